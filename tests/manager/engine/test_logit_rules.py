"""Tests the logit biases, penalties and forbidden tokens that the worker is sent."""

import dataclasses

import numpy as np

from tests.manager.helpers.engine_driver import EngineDriver, make_options
from tests.manager.helpers.fake_grammars import EOS_ID
from tests.manager.helpers.requests import make_request
from tokasaurus.manager.engine.lifecycle import preempt
from tokasaurus.messages.forward import LogitRules, SlotOpens
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.messages.sampling import SamplingParams

ALWAYS = np.iinfo(np.int32).max
PLAIN = (0.0, 0.0, 1.0)


def change(
    request: GenerateRequest,
    min_tokens: int = 0,
    stops: tuple[int, ...] = (),
    logit_bias: tuple[tuple[int, float], ...] = (),
    **params: float,
) -> GenerateRequest:
    """params: fields of SamplingParams."""
    sampling = SamplingParams(**params)
    return dataclasses.replace(
        request, sampling=sampling, min_tokens=min_tokens, stop_token_ids=stops, logit_bias=logit_bias
    )


def by_seed(opened: SlotOpens) -> dict[int, tuple[int, tuple[float, ...], list[tuple[int, float, int]]]]:
    """(request tokens, penalties, biases) of the slots with rules, by the seed of their sequence."""
    rules, found = opened.rules, {}
    assert isinstance(rules, LogitRules)
    ends = np.cumsum(rules.bias_counts)
    assert len(rules.bias_ids) == len(rules.bias_values) == len(rules.bias_ends) == ends[-1]
    biases = list(zip(rules.bias_ids.tolist(), rules.bias_values.tolist(), rules.bias_ends.tolist(), strict=True))
    for row, slot in enumerate(rules.slots):
        index = opened.slots.tolist().index(slot)
        seed = int(opened.seeds[index])
        penalties = opened.sampling[index].item()[-3:]
        own = biases[ends[row] - rules.bias_counts[row] : ends[row]]
        found[seed] = (int(rules.num_request_tokens[row]), penalties, own)
    return found


def test_only_sequences_with_logit_rules_send_them_and_all_send_sampling_params():
    requests = [
        make_request(0),
        change(make_request(1), presence_penalty=0.5, frequency_penalty=-1, repetition_penalty=1.5),
        change(make_request(2), top_k=7, min_p=0.25),
        change(make_request(3, 9), min_tokens=4, stops=(5, 3), logit_bias=((7, -2.5), (3, 100.0))),
        change(make_request(4, ignore_eos=True), min_tokens=2, stops=(5,)),
        change(make_request(5), stops=(5,)),
    ]
    driver = EngineDriver(make_options(100, max_seqs_per_forward=8, max_tokens_per_forward=100))
    driver.step(requests)
    opened = driver.queue[0].changes.opened
    assert opened is not None
    forbidden = [(token_id, -np.inf, 13) for token_id in sorted([EOS_ID, 3, 5])]
    assert by_seed(opened) == {
        1: (5, (0.5, -1.0, 1.5), []),
        3: (9, PLAIN, [(7, -2.5, ALWAYS), (3, 100.0, ALWAYS), *forbidden]),
        4: (5, PLAIN, [(5, -np.inf, 7)]),
    }
    sent = dict(zip(opened.seeds.tolist(), opened.sampling.tolist(), strict=True))
    assert sent == {request.seed: request.sampling for request in requests}


def test_a_request_without_logit_rules_sends_none():
    driver = EngineDriver()
    driver.step([make_request(1)])
    opened = driver.queue[0].changes.opened
    assert opened is not None
    assert opened.rules is None


def test_after_preemption_penalties_still_count_from_the_end_of_the_request_prompt():
    driver = EngineDriver()
    driver.step([change(make_request(1, 6, max_new_tokens=20, ignore_eos=True), presence_penalty=1.0)])
    driver.step([], 2)
    (sequence,) = driver.running()
    preempt(driver.state, sequence)
    driver.step()
    opened = driver.queue[-1].changes.opened or driver.queue[-2].changes.opened
    while opened is None:
        driver.step([], 1)
        opened = driver.queue[-1].changes.opened
    assert opened.num_prompt_tokens.tolist() == [8]
    assert by_seed(opened) == {1: (6, (1.0, 0.0, 1.0), [])}
