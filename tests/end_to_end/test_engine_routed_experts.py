"""The manager and the worker together, in one process: experts of tokens against transformers' routers."""

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.helpers.runner_worker import Worker
from tests.helpers.tiny_model import VOCAB_SIZE, option_config, save_random_model
from tests.manager.helpers.engine_driver import EndsNext, EngineDriver, make_options
from tests.manager.helpers.requests import make_request
from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.routed_experts import assert_are_of
from tests.model.helpers.steps import make_runner, one_thread
from tokasaurus.manager.engine.lifecycle import preempt
from tokasaurus.messages.commands import AbortRequests
from tokasaurus.messages.generation import GenerateRequest

NUM_BLOCKS = 14


def random_requests(rng: random.Random) -> list[GenerateRequest]:
    """Prompts that start with a prefix of one of two texts, some of several blocks. Two thirds want experts."""
    texts = [[rng.randrange(VOCAB_SIZE) for _ in range(120)] for _ in range(2)]
    requests = []
    for number in range(24):
        prompt = rng.choice(texts)[: rng.choice([0, 16, 47, 48, 49, 100])]
        prompt = prompt + [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 2, 15, 30]))]
        request = make_request(number, 1, rng.choice([1, 2, 4]), rng.choice([0, 1, 5, 40]))
        wants = {"want_experts": rng.random() < 0.67, "want_prompt_logprobs": rng.random() < 0.3}
        requests.append(dataclasses.replace(request, prompt_ids=np.array(prompt, np.int32), **wants))
    return requests


@pytest.mark.parametrize(
    ("family", "number", "packed"),
    [("glm4_moe", 1, True), ("qwen3_moe", 1, True), ("qwen3_moe", 0, False), ("gpt_oss", 1, True)],
)
def test_experts_of_cached_recomputed_and_sampled_tokens_match_transformers(
    family: str, number: int, packed: bool, tmp_path: Path
) -> None:
    """Also of tokens that other requests have computed, and computed again after preemptions."""
    oracle = save_random_model(tmp_path, option_config(family, number))
    model, info = load(tmp_path, packed=packed)
    driver = EngineDriver(
        make_options(NUM_BLOCKS, 16, max_tokens_per_forward=64),
        rng=random.Random(number),
        step_seconds=(0.001, 0.01),
        forecast=EndsNext(),
    )
    runner = make_runner(model, info, "cpu", num_blocks=NUM_BLOCKS, num_slots=driver.options.num_slots)
    assert runner.decodes_in_one_call == packed
    driver.worker = worker = Worker(runner)
    requests = random_requests(random.Random(number))
    with one_thread():
        driver.run(requests)
    assert driver.state.totals.preemptions > 3
    assert worker.num_computed < 0.8 * sum(len(request.prompt_ids) * request.num_sequences for request in requests), (
        "prompts were cached"
    )
    by_id = {request.request_id: request for request in requests}
    for delta in driver.deltas:
        request = by_id[delta.request_id]
        if delta.finish_reason is None or not request.want_experts:
            assert delta.experts is None
            continue
        assert delta.experts is not None
        assert delta.experts.dtype == np.uint8
        tokens = [token for own in driver.deltas for token in own.token_ids if _is_of(own, delta)]
        assert_are_of(oracle, [*request.prompt_ids.tolist(), *tokens], delta.experts)


def _is_of(one: object, other: object) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in ("request_id", "sequence_index"))


def test_aborted_sequences_have_the_experts_of_their_tokens(tmp_path: Path) -> None:
    oracle = save_random_model(tmp_path, option_config("qwen3_moe", 0))
    model, info = load(tmp_path, packed=True)
    driver = EngineDriver(make_options(NUM_BLOCKS, 16, max_tokens_per_forward=64))
    driver.worker = Worker(make_runner(model, info, "cpu", num_blocks=NUM_BLOCKS, num_slots=driver.options.num_slots))
    prompt = np.arange(30, dtype=np.int32)
    request = dataclasses.replace(make_request(1, 1, 2, 60), prompt_ids=prompt, want_experts=True)
    driver.step([request])
    for _ in range(20):
        driver.step(num_results=1)
    driver.step([AbortRequests(1, (request.request_id,))], num_results=9)
    while driver.queue:
        driver.step(num_results=1)
    driver.step()
    assert len(driver.deltas) == 2
    for delta in driver.deltas:
        assert delta.finish_reason == "abort"
        assert 0 < len(delta.token_ids) < 60
        assert delta.experts is not None
        assert_are_of(oracle, [*prompt.tolist(), *delta.token_ids], delta.experts)


def test_experts_of_before_a_preemption_are_those_that_were_sampled_with(tmp_path: Path) -> None:
    """New weights may come between: what is computed again has other experts then."""
    save_random_model(tmp_path, option_config("qwen3_moe", 0))
    model, info = load(tmp_path, packed=True)
    driver = EngineDriver(make_options(NUM_BLOCKS, 16, max_tokens_per_forward=64))
    driver.worker = Worker(make_runner(model, info, "cpu", num_blocks=NUM_BLOCKS, num_slots=driver.options.num_slots))
    prompt = np.arange(30, dtype=np.int32)
    driver.step([dataclasses.replace(make_request(1, 1, 1, 60), prompt_ids=prompt, want_experts=True)])
    for times in range(2):
        for _ in range(10):
            driver.step(num_results=1)
        (sequence,) = driver.running()
        preempt(driver.state, sequence)
        assert sequence.kept_experts is not None
        marked = len(sequence.kept_experts)
        if not times:
            first = marked
            sequence.kept_experts[:] = 99  # as no router chooses
        assert (sequence.kept_experts == 99).all(axis=(1, 2)).tolist() == [True] * first + [False] * (marked - first)
    while not driver.deltas:
        driver.step(num_results=1)
    (delta,) = driver.deltas
    assert delta.experts is not None
    assert len(delta.experts) == 30 + 60 - 1 > marked > first
    assert (delta.experts == 99).all(axis=(1, 2)).sum() == first
