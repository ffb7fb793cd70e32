"""The manager and the worker together, in one process: a model that computes NaN for some prompts."""

import dataclasses
import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.end_to_end.helpers.runner_worker import Worker
from tests.helpers.examples import few
from tests.helpers.tiny_model import VOCAB_SIZE, save_tiny_model
from tests.manager.helpers.engine_driver import EngineDriver, make_options
from tests.manager.helpers.requests import make_request
from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.steps import make_runner, one_thread
from tokasaurus.messages.generation import CancelRequest, GenerateRequest
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.execution.runner import ModelRunner

NUM_BLOCKS = 30
NUM_SLOTS = 12
POISON = 77
"""The token whose embedding has a NaN."""

Outcome = tuple[list[int], str]
"""Tokens and error of a sequence."""


def random_requests(rng: random.Random, count: int) -> list[GenerateRequest]:
    """Prompts that start with a prefix of one of two texts; in about a quarter, POISON follows somewhere."""
    texts = [[rng.randrange(VOCAB_SIZE) for _ in range(120)] for _ in range(2)]
    texts = [[token for token in text if token != POISON] for text in texts]
    requests = []
    for number in range(count):
        prompt = rng.choice(texts)[: rng.choice([1, 16, 40, 48, 70])]
        if rng.random() < 0.25:
            prompt = [*prompt, POISON]
        prompt = prompt + [rng.randrange(POISON) for _ in range(rng.choice([0, 1, 15, 30]))]
        request = make_request(number, 1, rng.choice([1, 3]), rng.choice([1, 5, 20]))
        asks_logprobs = rng.random() < 0.3
        requests.append(
            dataclasses.replace(
                request,
                prompt_ids=np.array(prompt, np.int32),
                want_prompt_logprobs=asks_logprobs,
                num_top_prompt_logprobs=2 if asks_logprobs else 0,
            )
        )
    return requests


def outcomes(
    runner: ModelRunner, batches: list[list[GenerateRequest]], cancelled: Iterable[str] = ()
) -> dict[tuple[str, int], Outcome]:
    """What becomes of each sequence if an engine serves one batch of requests after the other.

    cancelled: ids of requests that are cancelled at random moments; they have no outcome.
    """
    options = make_options(NUM_BLOCKS, 16, max_tokens_per_forward=64, max_seqs_per_forward=NUM_SLOTS)
    driver = EngineDriver(options, rng=random.Random(0), step_seconds=(0.001, 0.01))
    driver.worker = Worker(runner)
    for batch in batches:
        driver.run(batch, cancelled)
        assert not driver.running()
        assert driver.state.blocks.num_used == 0
    assert driver.state.totals.nonfinite_rows > 0 or not any(delta.error for delta in driver.deltas)
    assert all(delta.error_code == "numerical_error" for delta in driver.deltas if delta.error)
    return {
        (delta.request_id, delta.sequence_index): (delta.token_ids, delta.error)
        for delta in driver.deltas
        if delta.request_id not in cancelled
    }


@few(2, ("backend", "packed"), [("cpu", True), ("cpu", False), ("torch", False), ("reference", False)])
def test_nan_in_an_embedding_fails_the_sequences_that_read_it_and_changes_no_other(
    backend: str, packed: bool, tmp_path: Path
) -> None:
    """Every sequence has the outcome that its request has alone. KV blocks are few, so they are reused all the time.

    Also when requests are cancelled, before the result that has the NaN arrives or later.
    """
    save_tiny_model(tmp_path, "llama")
    model, info = load(tmp_path, packed=packed)
    assert model.embedding is not None
    with torch.inference_mode():
        model.embedding.weight[POISON, 3] = torch.nan

    def new_runner() -> ModelRunner:
        return make_runner(model, info, backend, num_blocks=NUM_BLOCKS, num_slots=NUM_SLOTS)

    requests = random_requests(random.Random(1), 60)
    cancelled = {request.request_id for request in requests if random.Random(request.request_id).random() < 0.3}
    with one_thread():
        together = outcomes(new_runner(), [requests])
        assert outcomes(new_runner(), [requests], cancelled).items() <= together.items()
        alone = outcomes(new_runner(), [[request] for request in requests])
    for request in requests:
        if POISON in request.prompt_ids:
            errors = [together[request.request_id, index][1] for index in range(request.num_sequences)]
            assert all(errors), "the prompt has a token whose embedding is NaN"
    assert together == alone
    assert {error == "" for _, error in together.values()} == {True, False}


@pytest.mark.parametrize("packed", [True, False])
def test_keys_that_overflow_fail_their_sequence_alone(packed: bool, tmp_path: Path) -> None:
    """The hidden states before the keys and values are finite: only what would be stored is not."""
    save_tiny_model(tmp_path, "qwen2")
    model, info = load(tmp_path)
    layer = next(iter(model.decoder_layers()))
    with torch.inference_mode():
        # One input of the keys is multiplied by so much that only an outlier's product overflows float32.
        layer.attention.qkv.weight[layer.attention.num_heads * info.head_dim, 5] = 1e38
        assert model.embedding is not None
        model.embedding.weight[:, 5] = 0
        model.embedding.weight[POISON, 5] = 100
    if packed:
        model.pack(load_kernels())
    requests = random_requests(random.Random(2), 24)
    with one_thread():
        together = outcomes(make_runner(model, info, "cpu", num_blocks=NUM_BLOCKS, num_slots=NUM_SLOTS), [requests])
    for request in requests:
        if POISON in request.prompt_ids:
            assert all(together[request.request_id, index][1] for index in range(request.num_sequences))
    assert any(not error for _, error in together.values())


def test_blocks_of_a_cancelled_sequence_leave_the_cache_when_its_result_has_nan(tmp_path: Path) -> None:
    """The same prompt, sent again, must not find the zeros that were stored for it."""
    save_tiny_model(tmp_path, "llama")
    model, info = load(tmp_path, packed=True)
    assert model.embedding is not None
    with torch.inference_mode():
        model.embedding.weight[POISON] = torch.nan
    prompt = np.array([3, 4, 5, POISON, *range(6, 42)], np.int32)
    first, again = (dataclasses.replace(make_request(number), prompt_ids=prompt) for number in range(2))
    driver = EngineDriver(make_options(NUM_BLOCKS, 16), rng=random.Random(0), step_seconds=(0.001,))
    driver.worker = Worker(make_runner(model, info, "cpu", num_blocks=NUM_BLOCKS, num_slots=driver.options.num_slots))
    driver.step([first])
    driver.step([CancelRequest(first.request_id)])
    assert driver.state.blocks.tree.num_blocks == 2, "computed, as far as the manager knows"
    driver.run([again])
    assert [(delta.request_id, delta.error_code) for delta in driver.deltas] == [("r1", "numerical_error")]
    assert driver.state.blocks.tree.num_blocks == 0
