"""Ranks in processes of their own that sample from their shards of logits, and what they exchange for it."""

import multiprocessing
import unittest.mock
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.helpers.limits import receive
from tests.model.helpers.rule_contexts import ALWAYS, Contexts, Rule
from tests.model.helpers.sampling_rows import make_rows, noise_keys, staged_masks, top_rows, with_params
from tests.model.helpers.steps import CPU
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.parallel import collectives
from tokasaurus.model.parallel.collectives import joined
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.sampling.prompt_logprobs import TokenLogprobs, fill_token_logprobs
from tokasaurus.model.sampling.sample import SamplingRows, sample
from tokasaurus.model.sampling.shards import VocabularyShard

NUM_ROWS = 140  # so that each of two ranks has more than plain torch samples together; not divided by 3
RANKS_S = 120.0
"""Longest wait for an answer of a rank."""


class Case(NamedTuple):
    """What the rows of a batch want; rows without it are beside them."""

    name: str
    num_rows: int = NUM_ROWS
    vocab_size: int = 331  # divided by neither 2 nor 3
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.3)
    limits: tuple[dict[str, float], ...] = ({},)
    """Fields of SamplingParams of rows in turns."""
    has_rules: bool = False
    has_masks: bool = False
    num_top: int = 0
    any_logprobs: bool = True
    has_bad_rows: bool = False
    spread: float = 3.0
    """Standard deviation of the logits."""
    has_ties: bool = False
    """Whole numbers, so that ranks have equal logits."""
    dtype: torch.dtype = torch.float32
    has_prompt: bool = False
    """Whether prompt logprobs are computed from the logits too."""
    first_row: int = 0
    """The first with rules, masks and top logprobs."""

    @property
    def top_rows(self) -> range:
        return range(self.first_row, self.num_rows, 3)

    @property
    def is_plain(self) -> bool:
        """Whether no row has limits, rules or a mask."""
        return not (self.has_rules or self.has_masks or any(self.limits))


CASES = [
    Case("greedy", temperatures=(0.0,), any_logprobs=False),
    Case("greedy ties", temperatures=(0.0,), has_ties=True),
    Case("ties at the end of top_k", limits=({}, {"top_k": 9}), has_ties=True),
    Case("temperature", has_prompt=True),
    Case("bfloat16", dtype=torch.bfloat16, limits=({}, {"top_k": 5}), has_prompt=True),
    Case("bfloat16, plain", temperatures=(0.0, 0.9), dtype=torch.bfloat16),
    Case("bad rows", has_bad_rows=True),
    Case("top logprobs", num_top=5),
    Case("top_k", limits=({}, {"top_k": 7}, {"top_k": 1}, {"top_k": 300}, {"min_p": 0.1})),
    Case("top_p", limits=({}, {"top_p": 0.8}, {"top_p": 0.01}, {"top_p": 0.9, "top_k": 20, "min_p": 0.02})),
    Case("top_p of few tokens", vocab_size=9001, limits=({}, {"top_p": 0.8})),
    Case("top_p of many tokens", vocab_size=9001, limits=({}, {"top_p": 0.999}), spread=0.3),
    Case("rules", has_rules=True, num_top=3),
    Case("masks", has_masks=True),
    Case("everything", limits=({}, {"top_p": 0.8}, {"top_k": 9}), has_rules=True, has_masks=True, num_top=4),
    Case("bad rows with limits", limits=({}, {"top_p": 0.8}), has_bad_rows=True),
    Case("limits, without logprobs", limits=({}, {"top_k": 4}), any_logprobs=False),
    Case("greedy rules", temperatures=(0.0,), has_rules=True, any_logprobs=False),
    Case("last rows", limits=({},), has_rules=True, has_masks=True, num_top=2, first_row=NUM_ROWS - 4),
    Case("one row", num_rows=1, limits=({"top_p": 0.8},), temperatures=(0.9,), num_top=3),
    Case("two rows", num_rows=2, limits=({"top_p": 0.8},), has_rules=True, has_masks=True, num_top=3),
    Case("few tokens", vocab_size=3, limits=({}, {"top_k": 2}), has_prompt=True),
]


def make_case(case: Case) -> tuple[Tensor, SamplingRows]:
    """Whole logits and their rows."""
    rng = np.random.default_rng(len(case.name))
    vocab_size, num_rows = case.vocab_size, case.num_rows
    logits = torch.from_numpy(rng.normal(0, case.spread, (num_rows, vocab_size)).astype(np.float32)).to(case.dtype)
    if case.has_ties:
        logits = logits.round()
    keys = noise_keys(rng.integers(0, 2**63, num_rows).tolist(), [1] * num_rows, list(range(5, 5 + num_rows)))
    temperatures = [case.temperatures[row % len(case.temperatures)] for row in range(num_rows)]
    rows = make_rows(temperatures, [1.0] * num_rows, keys)
    limits = [case.limits[row % len(case.limits)] for row in range(num_rows)]
    defaults = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    columns = {name: np.array([own.get(name, usual) for own in limits]) for name, usual in defaults.items()}
    rows = with_params(rows, **columns)
    if case.has_bad_rows:
        logits[3, 300], logits[8, 2], logits[9] = torch.nan, torch.inf, -torch.inf
        logits[11, :200] = -torch.inf
    if case.has_masks:
        allowed = {row: rng.random(vocab_size) < 0.1 for row in range(case.first_row | 1, num_rows, 2)}
        if 7 in allowed:
            allowed[5] = np.arange(vocab_size) == vocab_size - 1
            allowed[7] = np.arange(vocab_size) == 0
            logits[5] = -torch.inf  # all that is allowed is forbidden too: the token is an allowed one all the same
            logits[5, 0] = 1
        rows = rows_with(rows, masks=staged_masks(allowed))
    if case.has_rules:
        contexts = {slot: rng.integers(0, vocab_size, 50).tolist() for slot in range(1, num_rows + 1)}
        state = Contexts(contexts, num_rows + 1)
        biases = ((0, 9.0, ALWAYS), (vocab_size - 1, 8.0, ALWAYS), (vocab_size // 2, -np.inf, ALWAYS))
        by_slot = {
            slot: Rule(20, 1.5, 0.5, 1.4, biases[slot % 3 :]) for slot in contexts if slot % 4 and slot > case.first_row
        }
        state.open(list(contexts), by_slot)
        rows = state.with_rules(rows, list(contexts))
    if case.num_top:
        rows = rows_with(rows, top=top_rows(case.top_rows, case.num_top))
    return logits, rows_with(rows, any_logprobs=case.any_logprobs)


def rows_with(rows: SamplingRows, **fields: Any) -> SamplingRows:
    values = {name: getattr(rows, name) for name in SamplingRows.__dataclass_fields__}
    return SamplingRows(**{**values, **fields})


def prompt_targets(vocab_size: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(3).integers(0, vocab_size, NUM_ROWS).astype(np.int32))


def empty_logprobs(num_top: int) -> TokenLogprobs:
    return TokenLogprobs(
        *(torch.empty(NUM_ROWS), torch.empty(NUM_ROWS, dtype=torch.int32)),
        *(torch.empty((NUM_ROWS, num_top), dtype=torch.int32), torch.empty((NUM_ROWS, num_top))),
    )


def run_rank(rank: int, num_ranks: int, rendezvous: Path, answers: Connection) -> None:
    """Sends, for each case without kernels and with them, and then for prompt logprobs, if any: the results, and the
    bytes that the rank sent."""
    torch.set_num_threads(1)
    with joined(Mesh(tp_rank=rank, tp_size=num_ranks), rendezvous, CPU) as mesh, counted_bytes() as num_sent:
        for case in CASES:
            logits, rows = make_case(case)
            first, count = mesh.vocab_shard(case.vocab_size)
            own, shard = logits[:, first : first + count].contiguous(), VocabularyShard.of(mesh, case.vocab_size)
            for kernels in (None, load_kernels()):
                before = num_sent()
                sampled = sample(own.clone(), rows, kernels, shard)
                for result in sampled:  # as results are packed for their copy from a device
                    assert result is None or result.reshape(-1).view(torch.uint8) is not None
                answers.send(([None if x is None else x.numpy() for x in sampled], num_sent() - before))
            if case.has_prompt:
                computed = empty_logprobs(min(4, case.vocab_size))
                before = num_sent()
                fill_token_logprobs(own, prompt_targets(case.vocab_size), computed, None, shard)
                answers.send(([x.numpy() for x in computed], num_sent() - before))


@contextmanager
def counted_bytes() -> Iterator[Callable[[], int]]:
    """Yields a function that tells how many bytes this rank has put into collectives so far."""
    sent: list[int] = []

    def counting(collective: Callable[..., Any], place_of_own: int) -> Callable[..., Any]:
        def count(*arguments: Any, **options: Any) -> Any:
            own = arguments[place_of_own]
            sent.append(own.numel() * own.itemsize)
            return collective(*arguments, **options)

        return count

    with ExitStack() as stack:
        for name, place in {collectives.GATHER: 1, "all_to_all_single": 1, "all_reduce": 0}.items():
            real = getattr(torch.distributed, name)
            stack.enter_context(unittest.mock.patch.object(torch.distributed, name, counting(real, place)))
        yield lambda: sum(sent)


def run_ranks(
    num_ranks: int,
    directory: Path,
    num_answers: int,
    run: Callable[[int, int, Path, Connection], None] = run_rank,
) -> list[list[Any]]:
    """What each rank sends. run: what it does."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    processes = [
        context.Process(target=run, args=(rank, num_ranks, directory / "rendezvous", pipes[rank][1]))
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()  # so that a rank that fails ends the wait for its answer
    try:
        # In turns: a rank whose pipe is full would let the others wait.
        answers = [[receive(receiver, RANKS_S) for receiver, _ in pipes] for _ in range(num_answers)]
        return [list(of_rank) for of_rank in zip(*answers, strict=True)]
    finally:
        for process in processes:
            process.kill()
