"""The manager and the worker together, in one process: prompt logprobs against transformers."""

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.end_to_end.helpers.runner_worker import Worker
from tests.helpers.tiny_model import VOCAB_SIZE, save_tiny_model
from tests.manager.helpers.engine_driver import EngineDriver, make_options
from tests.manager.helpers.requests import make_request
from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.steps import make_runner, one_thread
from tokasaurus.messages.generation import GenerateRequest

NUM_BLOCKS = 24


def random_requests(rng: random.Random) -> list[GenerateRequest]:
    """Prompts that start with a prefix of one of two texts. About 30% request no prompt logprobs."""
    texts = [[rng.randrange(VOCAB_SIZE) for _ in range(120)] for _ in range(2)]
    requests = []
    for number in range(24):
        prompt = rng.choice(texts)[: rng.choice([0, 16, 47, 48, 49, 100])]
        prompt = prompt + [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 2, 15, 30]))]
        has_logprobs = rng.random() < 0.7
        request = make_request(number, 1, rng.choice([1, 2]), rng.choice([0, 5] if has_logprobs else [5, 30]))
        requests.append(
            dataclasses.replace(
                request,
                prompt_ids=np.array(prompt, np.int32),
                want_prompt_logprobs=has_logprobs,
                num_top_prompt_logprobs=rng.choice([0, 2]) if has_logprobs else 0,
            )
        )
    return requests


@pytest.mark.parametrize("seed", range(2))
def test_prompt_logprobs_of_prompts_with_shared_blocks_match_transformers(seed: int, tmp_path: Path) -> None:
    oracle = save_tiny_model(tmp_path, "llama")
    model, info = load(tmp_path, packed=True)
    driver = EngineDriver(
        make_options(NUM_BLOCKS, 16, max_tokens_per_forward=64), rng=random.Random(seed), step_seconds=(0.001, 0.01)
    )
    worker = Worker(make_runner(model, info, "cpu", num_blocks=NUM_BLOCKS, num_slots=driver.options.num_slots))
    driver.worker = worker
    requests = random_requests(random.Random(seed))
    with one_thread():
        driver.run(requests)
    found = {delta.request_id: delta.prompt_logprobs for delta in driver.deltas if delta.sequence_index == 0}
    for request in requests:
        prompt_logprobs = found[request.request_id]
        assert (prompt_logprobs is not None) == request.want_prompt_logprobs
        if prompt_logprobs is None:
            continue
        prompt, num_top = torch.from_numpy(request.prompt_ids).long(), request.num_top_prompt_logprobs
        with torch.inference_mode():
            expected = oracle(prompt.unsqueeze(0)).logits[0].log_softmax(dim=-1)
        own = expected[:-1].gather(1, prompt[1:].unsqueeze(1))
        assert prompt_logprobs.logprobs[1:] == pytest.approx(own.squeeze(1).numpy(), abs=1e-4)
        assert (prompt_logprobs.ranks[1:] >= (expected[:-1] > own + 1e-4).sum(dim=1).numpy() + 1).all()
        assert (prompt_logprobs.ranks[1:] <= (expected[:-1] > own - 1e-4).sum(dim=1).numpy() + 1).all()
        assert (prompt_logprobs.top is None) == (num_top == 0)
        if prompt_logprobs.top is not None:
            most_likely = expected[:-1].topk(num_top)
            assert prompt_logprobs.top.token_ids[1:].tolist() == most_likely.indices.tolist()
            np.testing.assert_allclose(prompt_logprobs.top.logprobs[1:], most_likely.values.numpy(), atol=1e-4)
    assert worker.num_computed < 0.8 * sum(len(request.prompt_ids) for request in requests)
