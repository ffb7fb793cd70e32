"""Rows with each rule alone and with mixes of all, and the logprobs of the distribution that each draws from, by NumPy
in float64."""

import dataclasses
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests.model.helpers.rule_contexts import ALWAYS, Contexts, Rule
from tests.model.helpers.sampling_rows import (
    inside_limits,
    make_rows,
    noise_keys,
    staged_masks,
    top_rows,
    with_params,
)
from tests.model.helpers.steps import CPU
from tokasaurus.messages.sampling import SamplingParams
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.parallel.collectives import joined
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.sampling.rules import choose_rows
from tokasaurus.model.sampling.sample import Sampled, SamplingRows, sample
from tokasaurus.model.sampling.shards import VocabularyShard
from tokasaurus.model.staging.staging import ON_HOST

VOCAB_SIZE, NUM_TOP = 157, 12
PLAIN = SamplingParams()
NUM_PROMPT, NUM_CONTEXT = 20, 45


@dataclasses.dataclass(frozen=True)
class Row:
    """One row: what it asks for."""

    params: SamplingParams = PLAIN
    biases: tuple[tuple[int, float], ...] = ()
    num_allowed: int | None = None
    """Tokens that its mask allows; None for no mask."""
    as_sampled: bool = True
    """Otherwise its logprobs are raw."""

    @property
    def has_rules(self) -> bool:
        return self.params.has_penalties or bool(self.biases)


ALONE = [
    Row(),
    Row(as_sampled=False),
    Row(SamplingParams(temperature=0.0)),
    Row(SamplingParams(temperature=0.6)),
    Row(SamplingParams(temperature=1.7)),
    Row(SamplingParams(top_p=0.8)),
    Row(SamplingParams(top_p=1e-6)),
    Row(SamplingParams(top_k=7)),
    Row(SamplingParams(min_p=0.05)),
    Row(SamplingParams(presence_penalty=1.5)),
    Row(SamplingParams(frequency_penalty=0.7)),
    Row(SamplingParams(repetition_penalty=1.4)),
    Row(SamplingParams(temperature=0.0, repetition_penalty=1.4)),
    Row(SamplingParams(temperature=0.0, top_k=3, top_p=0.5)),  # limits have no meaning without a draw
    Row(biases=((3, 6.0), (3, -1.0), (90, -np.inf))),
    Row(num_allowed=30),
    Row(num_allowed=5),
    Row(num_allowed=1),
    Row(SamplingParams(temperature=0.0), num_allowed=4),
]


def random_row(rng: np.random.Generator) -> Row:
    params = SamplingParams(
        temperature=float(rng.choice([0.0, 0.5, 1.0, 1.5])),
        top_p=float(rng.choice([1.0, 0.9, 0.3])),
        top_k=int(rng.choice([0, 3, 40])),
        min_p=float(rng.choice([0.0, 0.01])),
        presence_penalty=float(rng.choice([0.0, -1.0])),
        frequency_penalty=float(rng.choice([0.0, 0.5])),
        repetition_penalty=float(rng.choice([1.0, 0.8])),
    )
    biases = tuple((int(token), float(rng.normal() * 5)) for token in rng.integers(0, VOCAB_SIZE, rng.integers(0, 4)))
    num_allowed = int(rng.choice([2, 60])) if rng.random() < 0.4 else None
    return Row(params, biases, num_allowed, as_sampled=rng.random() < 0.8)


@dataclasses.dataclass
class Case:
    logits: Tensor
    rows: SamplingRows
    expected: np.ndarray
    """float64 [R, V], the logprobs of all tokens."""


def make_case(asked: list[Row], seed: int = 0, dtype: torch.dtype = torch.float32) -> Case:
    """Every third row and the first two want no top-k logprobs."""
    rng = np.random.default_rng(seed)
    num_rows = len(asked)
    logits = torch.from_numpy(rng.normal(0, 3, (num_rows, VOCAB_SIZE)).astype(np.float32)).to(dtype)
    keys = noise_keys(rng.integers(0, 2**63, num_rows).tolist(), [1] * num_rows, list(range(num_rows)))
    slots = list(range(1, num_rows + 1))
    texts = {slot: rng.integers(0, VOCAB_SIZE // 2, NUM_CONTEXT).tolist() for slot in slots}
    contexts = Contexts(texts, num_rows + 1)
    rules = {}
    for slot, row in zip(slots, asked, strict=True):
        if row.has_rules:
            penalties = row.params.presence_penalty, row.params.frequency_penalty, row.params.repetition_penalty
            rules[slot] = Rule(NUM_PROMPT, *penalties, tuple((*bias, ALWAYS) for bias in row.biases))
    contexts.open(slots, rules)
    rows = contexts.with_rules(make_rows([1.0] * num_rows, [1.0] * num_rows, keys), slots)
    names = ("temperature", "top_p", "top_k", "min_p")
    rows = with_params(rows, **{name: np.array([getattr(row.params, name) for row in asked]) for name in names})
    allowed = {
        index: np.isin(np.arange(VOCAB_SIZE), rng.permutation(VOCAB_SIZE)[: row.num_allowed])
        for index, row in enumerate(asked)
        if row.num_allowed is not None
    }
    chosen = np.flatnonzero([row.as_sampled for row in asked])
    rows = dataclasses.replace(
        rows,
        masks=staged_masks(allowed) if allowed else None,
        top=top_rows([index for index in range(num_rows) if index % 3 and index > 1] or [0], NUM_TOP),
        as_sampled=choose_rows(chosen, ON_HOST) if len(chosen) else None,
    )
    expected = [
        distribution(logits[index].double().numpy(), row, texts[slot], allowed.get(index))
        for index, (slot, row) in enumerate(zip(slots, asked, strict=True))
    ]
    return Case(logits, rows, np.stack(expected))


def distribution(
    logits: np.ndarray, row: Row, context: list[int], allowed: np.ndarray | None, num_prompt: int = NUM_PROMPT
) -> np.ndarray:
    """float64 [V]: the logprobs that the row asks for. num_prompt: tokens of the context that are not generated."""
    values, params = logits.copy(), row.params
    if row.as_sampled:
        for token, bias in row.biases:
            values[token] += bias
        for token in set(context):
            factor = params.repetition_penalty
            values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
        for token in set(context[num_prompt:]):
            values[token] -= params.presence_penalty
            values[token] -= params.frequency_penalty * context[num_prompt:].count(token)
        if allowed is not None:
            values[~allowed] = -np.inf
        if params.temperature > 0:
            values /= params.temperature
            values[~inside_limits(values, params.top_p, params.top_k, params.min_p)] = -np.inf
    values -= values.max()
    with np.errstate(divide="ignore"):
        return np.asarray(values - np.log(np.exp(values).sum()))


def check(case: Case, sampled: Sampled) -> None:
    """Logprobs are exact to 1e-5, the drawn tokens' are finite, and impossible tokens are not among the top-k ones."""
    assert sampled.logprobs is not None
    assert sampled.top_ids is not None
    assert sampled.top_logprobs is not None
    tokens, logprobs = sampled.tokens.numpy(), sampled.logprobs.numpy()
    chosen = np.take_along_axis(case.expected, tokens[:, None], axis=1)[:, 0]
    assert np.isfinite(chosen).all(), "an impossible token"
    np.testing.assert_allclose(logprobs, chosen, atol=1e-5, rtol=0)
    assert case.rows.top is not None
    top_rows = zip(case.rows.top.rows.on_host, sampled.top_ids.numpy(), sampled.top_logprobs.numpy(), strict=True)
    for row, ids, values in top_rows:
        best = np.sort(case.expected[row])[::-1][:NUM_TOP]
        np.testing.assert_allclose(values, best, atol=1e-5, rtol=0)
        is_possible = np.isfinite(values)
        assert len(set(ids[is_possible].tolist())) == is_possible.sum()
        np.testing.assert_allclose(values[is_possible], case.expected[row][ids[is_possible]], atol=1e-5, rtol=0)
        if tokens[row] in ids[is_possible]:
            assert values[ids.tolist().index(tokens[row])] == logprobs[row], "the same float"


def mixes(seed: int, num_rows: int) -> list[Row]:
    rng = np.random.default_rng(seed)
    return [random_row(rng) for _ in range(num_rows)]


def sample_on_rank(rank: int, num_ranks: int, rendezvous: Path, answers: Connection) -> None:
    """Sends what the ranks together sample without kernels, and then with them."""
    torch.set_num_threads(1)
    with joined(Mesh(tp_rank=rank, tp_size=num_ranks), rendezvous, CPU) as mesh:
        first, count = mesh.vocab_shard(VOCAB_SIZE)
        shard = VocabularyShard.of(mesh, VOCAB_SIZE)
        for asked in RANK_CASES:
            for kernels in (None, load_kernels()):
                case = make_case(asked)
                own = case.logits[:, first : first + count].contiguous()
                answers.send(
                    [tensor.numpy() for tensor in sample(own, case.rows, kernels, shard) if tensor is not None]
                )


RANK_CASES = [ALONE, [Row(SamplingParams(temperature=0.6)), Row(as_sampled=False)] * 3]
"""In the second, no row but those of `SamplingRows.as_sampled` needs whole rows of logits."""
