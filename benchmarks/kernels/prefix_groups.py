"""Tokens of KV that a decode step reads, and the time of its attention, with different prefix groups.

`python -m benchmarks.kernels.prefix_groups`: samples of many questions behind one few-shot prefix.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

import tokasaurus.model  # noqa: F401 - makes thread settings that torch reads on import
from benchmarks.results import begin_results, make_console
from tokasaurus.commands.bench.results import machine_facts
from tokasaurus.manager.kv_cache.prefix_tree import NodeArrays
from tokasaurus.manager.planning.prefix_groups import Grouping, group_by_prefix
from tokasaurus.messages.status import KV_READS

PAGE_SIZE = 16
ROOT, EXAMPLES = 0, 1


@dataclass(frozen=True, slots=True)
class Batch:
    """R decode rows: Q questions with the same number of samples each, behind the same examples."""

    num_questions: int
    num_samples: int
    num_examples: int
    """Tokens of the few-shot examples."""
    num_question: int
    """Tokens of each question."""
    num_generated: int
    """Tokens that each sample has generated."""

    @property
    def num_rows(self) -> int:
        return self.num_questions * self.num_samples

    @property
    def example_blocks(self) -> int:
        """Whole blocks that all rows share."""
        return self.num_examples // PAGE_SIZE

    @property
    def prompt_blocks(self) -> int:
        """Whole blocks that the samples of a question share."""
        return (self.num_examples + self.num_question) // PAGE_SIZE

    @property
    def num_tokens(self) -> int:
        """Tokens that each row attends to."""
        return self.num_examples + self.num_question + self.num_generated

    def block_tables(self) -> NDArray[np.int32]:
        """int32 [R, blocks], with blocks in random order. Rows of a question follow one another."""
        num_own = -(-self.num_tokens // PAGE_SIZE) - self.prompt_blocks
        num_of_question = self.prompt_blocks - self.example_blocks
        sizes = (self.example_blocks, self.num_questions * num_of_question, self.num_rows * num_own)
        ids = 1 + np.random.default_rng(0).permutation(sum(sizes)).astype(np.int32)
        examples, questions, own = np.split(ids, np.cumsum(sizes)[:2])
        questions = questions.reshape(self.num_questions, -1).repeat(self.num_samples, axis=0)
        everywhere = np.broadcast_to(examples, (self.num_rows, len(examples)))
        return np.concatenate((everywhere, questions, own.reshape(self.num_rows, -1)), axis=1)

    def alone(self) -> Grouping:
        return Grouping(np.zeros(self.num_rows, np.int64), np.zeros(1, np.int64))

    def by_question(self) -> Grouping:
        """A group for each question."""
        groups = 1 + np.arange(self.num_questions).repeat(self.num_samples)
        return Grouping(groups, np.array([0] + [self.prompt_blocks] * self.num_questions))

    def chosen(self) -> Grouping:
        """The groups that the manager forms by the KV that they read."""
        questions = EXAMPLES + 1 + np.arange(self.num_questions)
        tree = NodeArrays(root_sequences=1 << 30)
        tree.add(ROOT, self.example_blocks, self.num_rows)
        for _ in questions:
            tree.add(EXAMPLES, self.prompt_blocks, self.num_samples)
        return group_by_prefix(questions.repeat(self.num_samples), tree, 2, 1, KV_READS, PAGE_SIZE)


def tokens_read(batch: Batch, grouping: Grouping) -> int:
    """Tokens of KV that one layer reads in a step: each group its prefix once, each row the rest of its tokens."""
    shared = grouping.num_blocks * PAGE_SIZE
    return int(shared.sum() + (batch.num_tokens - shared[grouping.group_of_sequence]).sum())


def measure(
    batch: Batch, groupings: dict[str, Grouping], backend: str, num_layers: int, num_rounds: int
) -> dict[str, float]:
    """Seconds of one layer's attention with each grouping, whose rounds alternate."""
    from benchmarks.kernels.attention_cases import grouped_calls, time_interleaved

    calls = grouped_calls(
        backend, num_layers, batch.block_tables(), batch.num_tokens, PAGE_SIZE, list(groupings.values())
    )
    return time_interleaved(dict(zip(groupings, calls, strict=True)), num_rounds)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels.prefix_groups", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--questions", type=int, default=256, metavar="N")
    parser.add_argument("--samples", type=int, default=4, metavar="N", help="samples of each question (default: 4)")
    parser.add_argument("--examples", type=int, default=998, metavar="N", help="tokens before the question")
    parser.add_argument("--question", type=int, default=60, metavar="N", help="tokens of a question (default: 60)")
    parser.add_argument("--generated", type=int, default=64, metavar="N", help="tokens generated so far (default: 64)")
    parser.add_argument("--backend", default="cpu", choices=["cpu", "torch"])
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="layers with a KV cache each (default: 4)")
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="measured rounds (default: 5; 0: count only)"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Returns the exit code, 0."""
    args = parse(argv)
    batch = Batch(args.questions, args.samples, args.examples, args.question, args.generated)
    groupings = {"none": batch.alone(), "by question": batch.by_question(), "chosen": batch.chosen()}
    seconds: dict[str, float] = {}
    if args.rounds:
        seconds = measure(batch, groupings, args.backend, args.layers, args.rounds)
    console = make_console(120)
    begin_results(args, machine_facts(), console)
    title = f"{batch.num_questions} questions x {batch.num_samples} samples, {batch.num_tokens:,} tokens each"
    table = Table("groups", "number", "tokens of KV read", "ms per layer", title=title, title_justify="left")
    for name, grouping in groupings.items():
        taken = f"{seconds[name] * 1e3:.1f}" if seconds else ""
        table.add_row(name, f"{len(grouping.num_blocks) - 1:,}", f"{tokens_read(batch, grouping):,}", taken)
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
