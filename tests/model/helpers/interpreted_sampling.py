"""Compares the Triton sampler, run by Triton's interpreter, with torch and the C++ kernels. Run as a module.

A process of its own: the variable TRITON_INTERPRET must be set before anything imports Triton, and then holds for all.
"""

import contextlib
import dataclasses
import itertools
import os
import unittest.mock
from collections.abc import Callable
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton
import triton.language as tl

from tests.model.helpers.pretend_device import on_device, on_host, pretended, with_tensors_on_device
from tests.model.helpers.rule_contexts import ALWAYS, Contexts, Rule
from tests.model.helpers.sampling_rows import make_rows, noise_keys, staged_masks, top_rows, with_params
from tokasaurus.model import buffer_sizes
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.sampling import triton_limits, triton_rows, triton_sample
from tokasaurus.model.sampling.finish import Finished, finish_by_torch, unpacked
from tokasaurus.model.sampling.noise import gumbel_noise, keys_of_shard
from tokasaurus.model.sampling.rules import change_logits, columns_of
from tokasaurus.model.sampling.sample import Sampled, SamplingRows, sample, sample_by_triton


def random_case(seed: int, num_rows: int, vocab_size: int, is_limited: bool) -> tuple[torch.Tensor, SamplingRows]:
    """Greedy and sampled rows; few distinct logits, so that many tie at the borders of limits."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(-12, 12, (num_rows, vocab_size)) * rng.choice([0.03, 0.3, 1.0])
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    seeds, positions = rng.integers(0, 2**63, num_rows).tolist(), rng.integers(1, 9999, num_rows).tolist()
    rows = make_rows(
        rng.choice([0.0, 0.5, 1.0, 1.7], num_rows).tolist(),
        rng.choice([1.0, 0.9, 0.5, 0.05] if is_limited else [1.0], num_rows).tolist(),
        noise_keys(seeds, [seed] * num_rows, positions),
    )
    if is_limited:
        top_k, min_p = rng.choice([0, 1, 3, 17, 6000], num_rows), rng.choice([0.0, 0.013, 0.31, 1.0], num_rows)
        rows = with_params(rows, top_k=top_k, min_p=min_p)
    return torch.tensor(logits, dtype=torch.float32), rows


def check(logits: torch.Tensor, rows: SamplingRows) -> None:
    """Equal tokens, except where a sum of many probabilities may reach top_p one token apart; equal logprobs."""
    ours, plain = sample_by_triton(logits, rows), sample(logits, rows, None)
    compiled = sample(logits, rows, load_kernels()) if logits.dtype != torch.float64 else plain
    for other in (plain, compiled):
        equal = ours.tokens == other.tokens
        assert equal.float().mean() >= 0.98, (ours.tokens, other.tokens)
        check_logprobs(ours, other, equal & (ours.tokens >= 0))


def check_logprobs(ours: Sampled, other: Sampled, where: torch.Tensor) -> None:
    assert (ours.logprobs is None) == (other.logprobs is None)
    if ours.logprobs is not None and other.logprobs is not None:
        torch.testing.assert_close(ours.logprobs[where], other.logprobs[where], atol=1e-5, rtol=1e-5, equal_nan=True)
    if ours.top_logprobs is not None and other.top_logprobs is not None:
        torch.testing.assert_close(ours.top_logprobs, other.top_logprobs, atol=1e-5, rtol=1e-5, equal_nan=True)


def check_rules(logits: torch.Tensor, rows: SamplingRows) -> None:
    """Penalties and biases of a third of the rows each, and of none."""
    rng = np.random.default_rng(2)
    contexts = {slot: rng.integers(0, logits.shape[1], 50).tolist() for slot in range(1, len(logits) + 1)}
    state = Contexts(contexts, len(logits) + 1)
    by_slot = {}
    for slot in contexts:
        if slot % 3 == 0:
            by_slot[slot] = Rule(20, presence=1.5, frequency=0.5, repetition=1.4)
        elif slot % 3 == 1:
            by_slot[slot] = Rule(20, biases=((slot, 12.0, ALWAYS), (2 * slot, -np.inf, ALWAYS)))
    state.open(list(contexts), by_slot)
    ruled = state.with_rules(rows, list(contexts))
    check(logits, ruled)
    drawn = sample_by_triton(logits, ruled).tokens
    assert not torch.equal(drawn, sample_by_triton(logits, rows).tokens)
    check_cut(logits, ruled, drawn)


def check_cut(logits: torch.Tensor, rows: SamplingRows, drawn: torch.Tensor) -> None:
    """Some rows alone, as ranks divide them, have the same tokens, in memory that is aligned as that of all rows."""
    ends = [0, 1, 5, len(logits)]
    cut = [rows.cut(start, end - start) for start, end in itertools.pairwise(ends)]
    parts = [
        sample_by_triton(logits[start:end], own)
        for (start, end), own in zip(itertools.pairwise(ends), cut, strict=True)
    ]
    assert torch.equal(torch.cat([part.tokens for part in parts]), drawn)
    for own in cut:
        tensors = [own.device_params, own.noise_keys]
        if own.rules is not None:
            tensors += [own.rules.lengths, own.rules.block_tables, own.rules.device_bias_starts]
        if own.masks is not None:
            tensors.append(own.masks.bits)
        assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def check_changed_logits() -> None:
    """Contexts and biases of which one program reads all, or a part; -inf among the logits; a row without rules."""
    rng = np.random.default_rng(4)
    vocab_size, num_rows = 2500, 9
    lengths = [1, 7, 150, 158, 8, 16, 150, 1, 64]
    contexts = {slot: rng.integers(0, 40, length).tolist() for slot, length in enumerate(lengths, start=1)}
    state = Contexts(contexts, num_rows + 1)
    by_slot = {
        slot: Rule(
            int(rng.integers(1, lengths[slot - 1] + 1)),
            rng.choice([-1.5, 0.5, 0.0]),
            rng.choice([-1.5, 0.5, 0.0]),
            rng.choice([0.7, 1.4]),
        )
        for slot in contexts
        if slot != 5
    }
    for slot, count in ((2, 1), (4, 300), (8, 129)):
        tokens, values = rng.permutation(vocab_size)[:count], rng.choice([-100.0, 3.25, -np.inf], count)
        by_slot[slot].biases = tuple(
            (int(token), float(value), ALWAYS) for token, value in zip(tokens, values, strict=True)
        )
    state.open(list(contexts), by_slot)
    logits = torch.from_numpy(rng.normal(0, 5, (num_rows, vocab_size)).astype(np.float32))
    logits[:, ::7] = -torch.inf
    _, rows = random_case(0, num_rows, vocab_size, is_limited=False)
    ruled = state.with_rules(rows, list(contexts))
    assert ruled.rules is not None
    for dtype in (torch.float32, torch.bfloat16):
        expected = logits.to(dtype).float().clone()
        change_logits(expected, ruled.rules, columns_of(ruled.device_params), 0)
        for own in (slice(0, 8), slice(3, 4), slice(2, 7)):
            changed = triton_rows.changed_rows(logits.to(dtype), ruled.rules, own, ruled.device_params)
            torch.testing.assert_close(changed, expected[ruled.rules.rows.on_device[own]], atol=1e-5, rtol=1e-6)


def check_several_calls(logits: torch.Tensor, rows: SamplingRows) -> None:
    """More rows with rules than one call may have."""
    with unittest.mock.patch.object(buffer_sizes, "_SCRATCH_BYTES", 8 * logits.shape[1] * 3):
        assert buffer_sizes.ruled_rows_at_once(logits.shape[1]) == 3
        check_rules(logits, rows)


def check_top() -> None:
    """Against a sort in which smaller tokens come first: ties, -inf, one part and several, some of the rows."""
    rng = np.random.default_rng(5)
    for vocab_size, count, dtype in ((1, 1, torch.float32), (50, 50, torch.bfloat16), (20_000, 20, torch.float32)):
        logits = torch.from_numpy(rng.integers(-9, 9, (5, vocab_size))).to(dtype)
        logits[rng.random((5, vocab_size)) < 0.3] = -torch.inf
        logits[2] = -torch.inf
        rows = torch.tensor([0, 2, 3])
        token_ids, values = triton_sample.largest_logits(logits, rows, count)
        for row, ids, largest in zip(rows.tolist(), token_ids, values, strict=True):
            by_value = sorted(range(vocab_size), key=lambda token: (-float(logits[row, token]), token))
            assert ids.tolist() == by_value[:count]
            assert torch.equal(largest, logits[row, ids.long()].float())
    broken = torch.full((1, 100), torch.nan)
    token_ids, _ = triton_sample.largest_logits(broken, torch.tensor([0]), 5)
    assert set(token_ids.flatten().tolist()) < set(range(100))


@triton.jit  # type: ignore[untyped-decorator]
def store_uniforms(hashes: Any, results: Any, SIZE: tl.constexpr) -> None:
    offsets = tl.arange(0, SIZE)
    tl.store(results + offsets, triton_sample._uniform(tl.load(hashes + offsets).to(tl.uint32)))


def check_uniforms() -> None:
    """All hashes around powers of two, where the spacing of float32 changes and sums are rounded, and random ones."""
    powers = (1 << np.arange(33))[:, None] + np.arange(-600, 600)
    near_powers = powers[(powers >= 0) & (powers < 2**32)]
    size = 2**17
    others = np.random.default_rng(6).integers(0, 2**32, size - len(near_powers))
    hashes, results = torch.from_numpy(np.concatenate((near_powers, others))), torch.empty(size)
    store_uniforms[(1,)](hashes, results, SIZE=size)
    assert torch.equal(results, (hashes.double() + 0.5).mul_(2.0**-32).float().clamp_(max=1 - 2.0**-24))


def check_skipped_noise() -> None:
    """Blocks whose noise cannot win are skipped: none that holds the winner, whatever the spread, scale and limits."""
    num_rows, vocab_size = 8, 300
    generator = torch.Generator().manual_seed(7)
    for spread, offset in ((0.0, 0.0), (0.01, 0.0), (1.0, -700.0), (3.0, 30.0), (5.0, 1e5), (50.0, 0.0)):
        logits = torch.randn(num_rows, vocab_size, generator=generator) * spread + offset
        keys = noise_keys(list(range(num_rows)), [0] * num_rows, [8] * num_rows)
        temperatures = [0.3, 1.0, 1.7, 0.0] * (num_rows // 4)
        with unittest.mock.patch.object(triton_rows, "_BLOCK", 16):
            tokens = sample_by_triton(logits, make_rows(temperatures, [1.0] * num_rows, keys)).tokens
        divisors = torch.tensor(temperatures).unsqueeze(1)
        noise = gumbel_noise(keys, vocab_size).masked_fill(divisors == 0, 0)
        noisy = logits / torch.where(divisors > 0, divisors, 1) + noise
        assert torch.equal(tokens, noisy.argmax(dim=1))  # the lowest id among equals


def check_parts(row_counts: tuple[int, ...]) -> None:
    """A row that several programs read has the token that one program draws, and almost the same logprob: few rows and
    many, vocabularies that no part divides, masks that allow few tokens, rows that are -inf or not finite, a shard."""
    several: set[int] = set()

    def draw_in(num_processors: int, *arguments: Any) -> tuple[torch.Tensor, ...]:
        with (
            unittest.mock.patch.object(triton_rows, "_BLOCK", 16 if len(arguments[0]) < 20 else 128),
            unittest.mock.patch.object(triton_sample, "_num_processors", return_value=num_processors),
        ):
            several.add(triton_sample._draw_parts(*arguments).shape[1])
            return triton_sample.draw(*arguments)

    for seed, num_rows in enumerate(row_counts):
        logits, rows = random_case(seed, num_rows, 333, is_limited=num_rows in (2, 7))
        logits[0, ::3] = -torch.inf
        logits[num_rows // 2 :: 5] = -torch.inf
        if num_rows > 4:
            logits[1, 17], logits[num_rows - 1, 332] = torch.nan, torch.inf
        allowed = {0: np.arange(333) == 331, num_rows // 2: np.isin(np.arange(333), (200, 30, 332))}
        bits = staged_masks(allowed)
        masks = bits.rows.index_of_row(num_rows), bits.bits
        shard = logits[:, 100:230]
        cases = [
            (logits, rows.noise_keys, None),
            (logits, rows.noise_keys, masks),
            (shard, keys_of_shard(rows.noise_keys, 100), None),
        ]
        for some, keys, mask in cases if num_rows < 20 else cases[:1]:  # the interpreter is slow
            arguments = some, slice(0, num_rows), rows.device_params, keys, None, mask
            tokens, chosen, normalizers = draw_in(0, *arguments)
            again, chosen_again, others = draw_in(132, *arguments)
            assert torch.equal(again, tokens)
            assert torch.equal(chosen_again[tokens >= 0], chosen[tokens >= 0])
            torch.testing.assert_close(others[tokens >= 0], normalizers[tokens >= 0], atol=1e-5, rtol=1e-6)
            if mask is not None and num_rows > 1:
                assert tokens[[0, num_rows // 2]].tolist() == [331, 30], "the first that is allowed"
    assert 1 in several
    assert max(several) == 21, "as many as blocks"


def check_finish(num_rows: int, hidden_size: int, dtype: torch.dtype) -> None:
    """Against plain Python: NaN and infinite logits and hidden states, and rows of padding, which share slot 0."""
    logits, rows = random_case(num_rows, num_rows, 70, is_limited=False)
    rng = np.random.default_rng(num_rows)
    hidden = torch.from_numpy(rng.normal(0, 2, (num_rows, hidden_size))).to(dtype)
    for broken in (torch.nan, torch.inf, -torch.inf):
        hidden[rng.integers(num_rows), rng.integers(hidden_size)] = broken
    logits[rng.integers(num_rows), 69] = torch.nan
    slots = torch.from_numpy(1 + rng.permutation(num_rows + 3)[:num_rows])
    slots[num_rows - num_rows // 3 :] = 0
    before = torch.arange(1000, 1000 + num_rows + 5)
    sampled = sample(logits, rows, None)
    assert sampled.logprobs is not None
    tokens, logprobs = sampled.tokens.tolist(), sampled.logprobs.tolist()
    drawing = logits, rows.device_params, rows.noise_keys, hidden, slots
    finishing = sampled.tokens, sampled.logprobs, hidden, slots
    ways: tuple[tuple[Callable[..., Finished], tuple[Any, ...], bool], ...] = (
        (triton_sample.draw_and_finish, drawing, True),
        (triton_sample.finish, finishing, True),
        (triton_sample.finish, (sampled.tokens, None, hidden, slots), False),
        (finish_by_torch, finishing, True),
    )
    for finish, arguments, has_logprobs in ways:
        last_tokens = before.clone()
        finished: Finished = finish(*arguments, last_tokens)
        assert finished.tokens.tolist() == tokens
        arrays = unpacked(finished.packed.numpy(), has_logprobs)
        assert arrays["token_ids"].tolist() == [max(token, 0) for token in tokens]
        is_finite = [bool(np.isfinite(row).all()) for row in hidden.double().numpy()]
        assert arrays["is_finite"].tolist() == [
            good and token >= 0 for good, token in zip(is_finite, tokens, strict=True)
        ]
        assert ("logprobs" in arrays) == has_logprobs
        for row, token in enumerate(tokens):
            if has_logprobs and token >= 0:
                np.testing.assert_allclose(arrays["logprobs"][row], logprobs[row], atol=1e-5, rtol=1e-5)
            if slots[row]:
                assert last_tokens[slots[row]] == max(token, 0)
        untouched = [slot for slot in range(1, len(before)) if slot not in slots]
        assert torch.equal(last_tokens[untouched], before[untouched])


def check_device(logits: torch.Tensor, rows: SamplingRows) -> None:
    """With every option, the host does not wait for the device; the kernels themselves run on the host."""
    everything = dataclasses.replace(rows, masks=staged_masks({1: np.arange(333) % 3 == 0}), top=top_rows([1, 4], 6))
    contexts = Contexts({slot: [3, 5, 9] for slot in range(1, 13)}, 13)
    rules = {2: Rule(1, repetition=1.4), 7: Rule(biases=((5, 30.0, ALWAYS), (5, -1.0, ALWAYS)))}
    contexts.open(list(range(1, 13)), rules)
    everything = contexts.with_rules(everything, list(range(1, 13)))
    expected = sample_by_triton(logits, everything)
    assert expected.tokens[6] == 5

    with contextlib.ExitStack() as stack:
        for module, name in KERNELS:
            kernel = KernelOnHost(getattr(module, name))
            stack.enter_context(unittest.mock.patch.object(module, name, kernel))
        stack.enter_context(pretended())
        sampled = sample_by_triton(on_device(logits), with_tensors_on_device(everything))
    for own, right in zip(sampled, expected, strict=True):
        assert own is not None
        assert right is not None
        assert torch.equal(on_host(own), right)


KERNELS = [
    (triton_limits, "_find_least"),
    (triton_sample, "_draw_part"),
    (triton_sample, "_merge_row"),
    *((triton_rows, name) for name in ("_count_tokens", "_add_biases", "_change_rows")),
    *((triton_sample, name) for name in ("_largest_of_parts", "_largest_of_candidates")),
]


@dataclasses.dataclass
class KernelOnHost:
    """A kernel that is launched with tensors of the pretended device, and reads and writes their contents."""

    kernel: Any

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        def launch(*arguments: object, **constants: object) -> object:
            contents = [on_host(value) if isinstance(value, torch.Tensor) else value for value in arguments]
            return self.kernel[grid](*contents, **constants)

        return launch


def main() -> None:
    for seed, (num_rows, vocab_size) in enumerate([(1, 1), (3, 7), (16, 64), (12, 1003), (4, 5000)]):
        check(*random_case(seed, num_rows, vocab_size, is_limited=False))
    for seed, (num_rows, vocab_size) in enumerate([(12, 5), (16, 50), (12, 300), (2, 2500)]):
        check(*random_case(seed, num_rows, vocab_size, is_limited=True))

    logits, rows = random_case(9, 12, 333, is_limited=False)
    check(logits.bfloat16(), rows)
    allowed = np.random.default_rng(1).random((5, 333)) < 0.1
    allowed[:, 5] = True
    masked = dataclasses.replace(rows, masks=staged_masks(dict(zip([0, 2, 3, 7, 11], allowed, strict=True))))
    check(logits, masked)
    drawn = sample_by_triton(logits, masked).tokens[[0, 2, 3, 7, 11]]
    assert allowed[np.arange(5), drawn.numpy()].all()
    check(torch.full((12, 333), -torch.inf), masked)
    check(logits, dataclasses.replace(rows, top=top_rows([1, 4], 6)))
    check(logits, dataclasses.replace(rows, any_logprobs=False))
    broken = logits.clone()
    broken[1, 17], broken[2, 332], broken[3, 0] = torch.nan, torch.inf, torch.nan
    check(broken, rows)
    assert (sample_by_triton(broken, rows).tokens < 0).tolist() == [index in (1, 2, 3) for index in range(12)]
    check_rules(logits, rows)
    check_several_calls(logits, rows)
    check_changed_logits()
    check_top()
    check_uniforms()
    check_skipped_noise()
    check_parts((1, 2, 17, 150))
    check_finish(1, 33, torch.float32)
    check_finish(14, 2500, torch.bfloat16)
    check_device(logits, rows)
    print("all equal")


if __name__ == "__main__":
    main()
