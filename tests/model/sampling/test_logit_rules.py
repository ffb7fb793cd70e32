"""Biases and penalties against a loop over tokens; slots that open and close; and drawn tokens against the softmax."""

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.tiny_model import VOCAB_SIZE, save_tiny_model
from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.rule_contexts import ALWAYS, Contexts, Rule, make_rules
from tests.model.helpers.sampling_rows import chi_square, make_rows, noise_keys
from tests.model.helpers.steps import StepDriver, int32, make_runner, one_thread
from tokasaurus.model.cpu.bindings import Kernels, load_kernels
from tokasaurus.model.sampling.sample import sample


@pytest.fixture(params=["kernels", "torch"])
def kernels(request: pytest.FixtureRequest) -> Kernels | None:
    return load_kernels() if request.param == "kernels" else None


def change_by_hand(logits: list[float], rule: Rule, context: list[int]) -> list[float]:
    """The changed logits, computed one token at a time as vLLM's documentation defines them."""
    changed = []
    generated = context[rule.num_request_tokens :]
    for token, logit in enumerate(logits):
        logit += sum(value for biased, value, end in rule.biases if biased == token and len(context) < end)
        if token in context:
            logit = logit / rule.repetition if logit > 0 else logit * rule.repetition
        logit -= rule.frequency * generated.count(token)
        logit -= rule.presence * (token in generated)
        changed.append(logit)
    return changed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(5))
def test_logits_are_changed_as_by_hand_and_logprobs_are_from_unchanged_logits(
    seed: int, dtype: torch.dtype, kernels: Kernels | None
) -> None:
    """Greedy, so that the token has the largest changed logit; over many rows, every change shows."""
    rng = random.Random(seed)
    num_rows, vocab_size = 150, 30
    shared = [rng.randrange(vocab_size) for _ in range(8)]
    contexts = {slot: shared + [rng.randrange(vocab_size) for _ in range(rng.randint(1, 60))] for slot in range(1, 151)}
    by_slot = {}
    for slot in range(1, num_rows + 1):
        if rng.random() < 0.3:
            continue
        rule = Rule(rng.randint(1, len(contexts[slot])))
        if rng.random() < 0.7:
            rule.presence, rule.frequency = rng.uniform(-2, 2), rng.choice([0, rng.uniform(-2, 2)])
            rule.repetition = rng.choice([1.0, rng.uniform(0.5, 2)])
        if rng.random() < 0.5:
            tokens = rng.sample(range(vocab_size), 5)
            ends = [rng.choice([ALWAYS, len(contexts[slot]), len(contexts[slot]) + 1]) for _ in tokens]
            values = [rng.choice([rng.uniform(-5, 5), -torch.inf]) for _ in tokens]
            rule.biases = tuple(zip(tokens, values, ends, strict=True))
        by_slot[slot] = rule
    state = Contexts(contexts, num_rows + 1, num_shared_blocks=2)
    state.open(list(contexts), by_slot)
    slots = rng.sample(sorted(contexts), num_rows)
    logits = torch.from_numpy(np.random.default_rng(seed).normal(size=(num_rows, vocab_size))).to(dtype)
    rows = make_rows([0.0] * num_rows, [1.0] * num_rows, noise_keys([0] * num_rows, [0] * num_rows, [1] * num_rows))
    tokens, logprobs, *_ = sample(logits, state.with_rules(rows, slots), kernels)
    expected = np.array(
        [
            change_by_hand(row, by_slot.get(slot, Rule()), contexts[slot])
            for slot, row in zip(slots, logits.tolist(), strict=True)
        ]
    )
    best_two = np.sort(expected, axis=1)[:, -2:]
    is_clear = best_two[:, 1] - best_two[:, 0] > 1e-4
    assert is_clear.mean() > 0.8  # bfloat16 has ties
    assert (tokens.numpy() == expected.argmax(axis=1))[is_clear].all()
    assert (expected.argmax(axis=1) != logits.float().numpy().argmax(axis=1)).mean() > 0.15, "the rules change much"
    plain = logits.double().log_softmax(dim=-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    assert logprobs is not None
    torch.testing.assert_close(logprobs.double(), plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("rule", "temperature"),
    [
        (Rule(2, presence=1.2), 1.0),
        (Rule(2, frequency=0.4), 0.7),
        (Rule(2, repetition=1.5), 1.0),
        (Rule(2, presence=-0.5, frequency=-0.2, repetition=0.8, biases=((4, 2.5, ALWAYS), (0, -1, ALWAYS))), 1.3),
        (Rule(2, biases=((2, -torch.inf, ALWAYS),)), 1.0),
    ],
)
def test_draws_follow_the_softmax_of_the_changed_logits(
    rule: Rule, temperature: float, kernels: Kernels | None
) -> None:
    logits = [2.0, 1.5, 0.3, 0.0, -1.0, -2.5, 1.0]
    context = [0, 5, 6, 6, 6, 4, 1]
    num_draws = 20_000
    state = Contexts({1: context}, 2)
    state.open([1], {1: rule})
    keys = noise_keys([7] * num_draws, [0] * num_draws, list(range(num_draws)))
    rows = make_rows([temperature] * num_draws, [1.0] * num_draws, keys)
    rows = state.with_rules(rows, [1] * num_draws)
    tokens, _, *_ = sample(torch.tensor(logits).repeat(num_draws, 1), rows, kernels)
    counts = np.bincount(tokens.numpy(), minlength=len(logits))
    weights = np.exp(np.array(change_by_hand(logits, rule, context)) / temperature)
    drawn = weights > 0
    assert counts[~drawn].sum() == 0
    # 6 degrees of freedom: above 27.9 in one of 10,000 correct runs.
    assert chi_square(counts[drawn], weights[drawn] / weights.sum()) < 27.9


def test_a_slot_has_the_rules_it_was_last_opened_with() -> None:
    state = Contexts({slot: [1] * slot for slot in range(1, 7)}, 8)
    state.open([1, 2, 3], {1: Rule(presence=1), 3: Rule(biases=((5, 1.0, 4),))})
    assert rules_by_slot(state) == {1: (1, 0), 3: (0, 1)}
    state.rules.close(int32([1, 3]))
    state.open([3, 4], {4: Rule(biases=((5, 1.0, ALWAYS), (6, 1.0, 3)))})
    state.open([1, 5], {})
    state.open([6], {6: Rule(biases=((5, 1.0, 6),))})  # not active: the context already has 6 tokens
    assert rules_by_slot(state) == {4: (0, 1)}
    assert state.select([2, 5]) is None
    state.open([4], {4: Rule(presence=1)})  # not closed before, as after the warm-up
    assert rules_by_slot(state) == {4: (4, 0)}


def rules_by_slot(state: Contexts) -> dict[int, tuple[int, int]]:
    """(number of tokens that penalties read, number of biases) of the slots with active rules."""
    slots = sorted(state.num_tokens)
    ruled = state.select(slots)
    assert ruled is not None
    columns = ruled.rows.on_host.tolist(), ruled.lengths.tolist(), np.diff(ruled.bias_starts).tolist()
    return {slots[row]: (length, count) for row, length, count in zip(*columns, strict=True)}


OPTIONS = [
    {"temperature": 1.0, "rule": Rule(presence=1.5, frequency=0.5)},
    {"temperature": 0.0, "rule": Rule(repetition=1.6)},
    {"temperature": 0.8, "top_k": 20, "min_p": 0.02, "rule": Rule(repetition=1.3, biases=((7, 3.0, ALWAYS),))},
    {"temperature": 1.2, "top_k": 5},
]


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_tokens_are_the_same_alone_in_a_batch_and_after_preemption(backend: str, tmp_path: Path) -> None:
    """The greedy sequence also equals transformers. Alone: one chunk, then decode steps. In a batch: chunks beside
    other rows, with the prefix read from another slot's blocks. After preemption: opened again behind cached blocks,
    with its generated tokens as part of its prompt."""
    oracle = save_tiny_model(tmp_path, "llama")
    model, info = load(tmp_path)
    if backend == "cpu":
        model.pack(load_kernels())
    rng = random.Random(3)
    prefix = [rng.randrange(VOCAB_SIZE) for _ in range(48)]
    prompts = [prefix + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))] for _ in range(len(OPTIONS))]
    num_tokens = 24
    with one_thread():
        alone = []
        for slot, (prompt, options) in enumerate(zip(prompts, OPTIONS, strict=True), 1):
            driver = StepDriver(make_runner(model, info, backend))
            open_ruled(driver, slot, prompt, len(prompt), options)
            tokens = [driver.run([], [(slot, len(prompt))])[slot][0]]
            tokens += [driver.run([slot], [])[slot][0] for _ in range(num_tokens - 1)]
            alone.append(tokens)
        prompt = torch.tensor([prompts[1]])
        expected = oracle.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            repetition_penalty=OPTIONS[1]["rule"].repetition,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert alone[1] == expected[0, prompt.shape[1] :].tolist()

        driver = StepDriver(make_runner(model, info, backend, num_slots=40), num_blocks=200, seed=5)
        batched: dict[int, list[int]] = {}
        for slot in (9, 1, 2, 3, 4):
            prompt = prompts[max(0, slot - 1) % 4]
            options = OPTIONS[slot - 1] if slot < 9 else {"temperature": 1.0}
            open_ruled(driver, slot, prompt, len(prompt), options, shares=None if slot == 9 else (9, 3))
            while driver.remaining(slot):
                chunk = min(driver.remaining(slot), 13)
                for sampled, (token, _) in driver.run(sorted(batched), [(slot, chunk)]).items():
                    batched.setdefault(sampled, []).append(token)
        while min(map(len, batched.values())) < 11:
            for slot, (token, _) in driver.run(sorted(batched), []).items():
                batched[slot].append(token)
        for slot in (1, 2, 3, 4):
            before = batched[slot][:11]
            assert before == alone[slot - 1][:11]
            prompt = prompts[slot - 1]
            open_ruled(driver, slot + 20, prompt + before, len(prompt), OPTIONS[slot - 1], shares=(slot, 3))
            tokens = [driver.run([], [(slot + 20, driver.remaining(slot + 20))])[slot + 20][0]]
            tokens += [driver.run([slot + 20], [])[slot + 20][0] for _ in range(num_tokens - 12)]
            assert before + tokens == alone[slot - 1]


def open_ruled(
    driver: StepDriver, slot: int, prompt: list[int], num_request_tokens: int, options: dict, **more: object
) -> None:
    options = dict(options)
    rule = options.pop("rule", None)
    penalties = {} if rule is None else rule.penalties
    rules = None
    if rule is not None:
        rules = make_rules({slot: dataclasses.replace(rule, num_request_tokens=num_request_tokens)})
    driver.open(slot, prompt, seed=5, rules=rules, **options, **penalties, **more)
