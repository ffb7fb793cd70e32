"""The manager and the worker together, in one process: tokens under allowed_token_ids and bad_words."""

import dataclasses
import math
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from transformers import PreTrainedModel

from tests.end_to_end.helpers.runner_worker import Worker
from tests.helpers.tiny_model import EOS_ID, VOCAB_SIZE, save_tiny_model
from tests.manager.helpers.engine_driver import EndsNext, EngineDriver, make_options
from tests.manager.helpers.requests import make_request
from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.sampling_rows import chi_square
from tests.model.helpers.steps import make_runner, one_thread
from tokasaurus.messages.generation import GenerateRequest, TokenFilter
from tokasaurus.text.grammars import load_grammar_vocabulary

MAX_NEW_TOKENS = 20
A, B, C = 64, 65, 66  # of the tiny tokenizer, whose tokens are bytes in the order of their characters


def make_driver(directory: Path, num_blocks: int, seed: int) -> EngineDriver:
    model, info = load(directory, packed=True)
    options = make_options(
        num_blocks, 16, max_tokens_per_forward=256, eos_ids=frozenset({EOS_ID}), max_seqs_per_forward=32
    )
    vocabulary = load_grammar_vocabulary(directory, VOCAB_SIZE, (EOS_ID,))
    driver = EngineDriver(options, rng=random.Random(seed), forecast=EndsNext(), vocabulary=vocabulary)
    driver.worker = Worker(make_runner(model, info, "cpu", num_blocks=num_blocks, num_slots=options.num_slots))
    return driver


def is_allowed(token_filter: TokenFilter | None, generated: list[int], token: int) -> bool:
    if token_filter is None:
        return True
    if token_filter.allowed is not None and not token_filter.allowed[token // 8] >> token % 8 & 1:
        return False
    return not any(tuple([*generated, token][-len(ids) :]) == ids for ids in token_filter.bad_sequences)


def greedy_tokens(oracle: PreTrainedModel, request: GenerateRequest) -> list[int]:
    """The most likely token at each step that the filter allows, by the logits of the whole text."""
    generated: list[int] = []
    while len(generated) < MAX_NEW_TOKENS and EOS_ID not in generated:
        logits = oracle(torch.tensor([[*request.prompt_ids.tolist(), *generated]])).logits[0, -1].numpy()
        allowed = [token for token in range(VOCAB_SIZE) if is_allowed(request.token_filter, generated, token)]
        if not allowed:
            break
        generated.append(max(allowed, key=lambda token: logits[token]))
    return generated


def test_greedy_tokens_are_the_most_likely_that_the_filters_allow(tmp_path: Path) -> None:
    """Steps mix requests with and without filters, and some requests are preempted."""
    oracle = save_tiny_model(tmp_path, "llama")
    driver = make_driver(tmp_path, num_blocks=10, seed=0)
    rng = random.Random(1)
    requests = []
    with one_thread(), torch.inference_mode():
        for number in range(24):
            request = make_request(number, 1, 1, MAX_NEW_TOKENS)
            prompt = [rng.randrange(256) for _ in range(rng.randint(1, 50))]
            request = dataclasses.replace(
                request, prompt_ids=np.array(prompt, np.int32), sampling=request.sampling._replace(temperature=0.0)
            )
            plain = greedy_tokens(oracle, request)
            # what would be generated is forbidden, so that the filters matter
            starts = [rng.randrange(len(plain)) for _ in range(4)]
            bad = tuple(tuple(plain[start : start + rng.randint(1, 3)]) for start in starts)
            allowed = None if rng.random() < 0.5 else tuple(rng.sample(range(VOCAB_SIZE), 4))
            if number % 4:
                single = {ids[0] for ids in bad if len(ids) == 1}
                allowed = None if single.issuperset(allowed or ()) else allowed
                request = dataclasses.replace(request, token_filter=TokenFilter.of_ids(VOCAB_SIZE, allowed, bad))
            requests.append(request)
        driver.run(requests)
        found = {delta.request_id: delta for delta in driver.deltas}
        for request in requests:
            expected = greedy_tokens(oracle, request)
            delta = found[request.request_id]
            assert delta.token_ids == expected
            ends_early = len(expected) < MAX_NEW_TOKENS or expected[-1] == EOS_ID
            assert delta.finish_reason == ("stop" if ends_early else "length")
    assert driver.state.totals.preemptions > 1
    assert driver.state.slots.num_with_masks == 0
    assert not driver.state.slots.has_mask.any()
    assert not driver.state.slots.awaits_matcher.any()


def test_a_text_ends_where_no_token_is_left(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    driver = make_driver(tmp_path, num_blocks=40, seed=2)
    filters = [
        (TokenFilter.of_ids(VOCAB_SIZE, (5,), ((5, 5, 5),)), ""),
        (TokenFilter.of_ids(VOCAB_SIZE, (5, 6), ((5, 5), (5, 6), (6, 6), (6, 5))), ""),
        (TokenFilter.of_ids(VOCAB_SIZE, (5,)), LLMatcher.grammar_from_regex("abc")),  # not even a first token
        (TokenFilter.of_ids(VOCAB_SIZE, (A, B)), LLMatcher.grammar_from_regex("abc")),
        (TokenFilter.of_ids(VOCAB_SIZE, None, ((B, C),)), LLMatcher.grammar_from_regex("abc+")),
    ]
    requests = [
        dataclasses.replace(make_request(number, 3, 2, MAX_NEW_TOKENS), token_filter=token_filter, grammar=grammar)
        for number, (token_filter, grammar) in enumerate(filters)
    ]
    with one_thread(), torch.inference_mode():
        driver.run(requests)
    found = {(delta.request_id, delta.sequence_index): delta for delta in driver.deltas}
    texts = [[5, 5], [5], [], [A, B], [A, B]]
    for request, expected in zip(requests, texts, strict=True):
        for index in range(2):
            delta = found[request.request_id, index]
            assert delta.finish_reason == "stop"
            assert not delta.error
            assert delta.token_ids == expected or (expected == [5] and delta.token_ids == [6])
    assert not driver.state.unfinished
    assert driver.state.slots.num_with_masks == 0


@pytest.mark.parametrize("kind", ["allowed", "bad words"])
def test_frequencies_are_those_of_the_models_distribution_among_allowed_tokens(tmp_path: Path, kind: str) -> None:
    """First tokens, and second tokens after the most frequent first one, by chi-square tests at 1e-6."""
    oracle = save_tiny_model(tmp_path, "llama")
    driver = make_driver(tmp_path, num_blocks=2000, seed=3)
    prompt = [*b"once upon"]
    with one_thread(), torch.inference_mode():
        logits = oracle(torch.tensor([prompt])).logits[0, -1].double()
        first = int(logits.argmax())
        after = oracle(torch.tensor([[*prompt, first]])).logits[0, -1].double()
        likely = after.argsort(descending=True)[:12].tolist()
        if kind == "allowed":
            token_filter = TokenFilter.of_ids(
                VOCAB_SIZE, tuple(sorted({first, *likely, *logits.argsort()[-12:].tolist()}))
            )
        else:
            few = tuple({first, *likely, *logits.argsort()[-12:].tolist()})
            bad = [*((first, token) for token in likely[:6]), (likely[7],)]
            token_filter = TokenFilter.of_ids(VOCAB_SIZE, few, tuple(bad))
        request = dataclasses.replace(
            make_request(0, len(prompt), 4000, 2, want_logprobs=True),
            prompt_ids=np.array(prompt, np.int32),
            ignore_eos=True,
            token_filter=token_filter,
        )
        driver.run([request])
    texts = [delta.token_ids for delta in driver.deltas]
    assert len(texts) == 4000
    check(Counter(ids[0] for ids in texts), logits, token_filter, [])
    check(Counter(ids[1] for ids in texts if ids[0] == first), after, token_filter, [first])


def check(counts: Counter[int], logits: torch.Tensor, token_filter: TokenFilter, before: list[int]) -> None:
    allowed = [token for token in range(VOCAB_SIZE) if is_allowed(token_filter, before, token)]
    assert set(counts) <= set(allowed)
    shares, found = logits[allowed].softmax(0).numpy(), np.array([counts[token] for token in allowed])
    is_common = shares * found.sum() >= 5  # the others are one class
    if not is_common.all():
        shares = np.array([*shares[is_common], shares[~is_common].sum()])
        found = np.array([*found[is_common], found[~is_common].sum()])
    degrees = len(found) - 1
    assert degrees >= 5
    # Wilson and Hilferty's approximation of the distribution's quantile; 4.75 is the normal one's at 1e-6
    limit = degrees * (1 - 2 / (9 * degrees) + 4.75 * math.sqrt(2 / (9 * degrees))) ** 3
    assert chi_square(found, shares) < limit
