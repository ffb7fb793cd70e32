"""Biases and penalties of slots, and the contexts whose tokens penalties count."""

import dataclasses
from typing import Any

import numpy as np
import torch

from tests.model.helpers.sampling_rows import with_params
from tests.model.helpers.steps import CPU, int32
from tokasaurus.messages.forward import LogitRules
from tokasaurus.messages.generation import SAMPLING_DTYPE
from tokasaurus.messages.sampling import SamplingParams
from tokasaurus.model.sampling.rules import RuledRows, SlotRules
from tokasaurus.model.sampling.sample import SamplingRows
from tokasaurus.model.staging.staging import ON_HOST

PAGE_SIZE = 4


ALWAYS = np.iinfo(np.int32).max


@dataclasses.dataclass
class Rule:
    """Penalties and biases of one slot."""

    num_request_tokens: int = 1
    """Tokens of the request at the start of the context; the tokens after them are generated."""
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    biases: tuple[tuple[int, float, int], ...] = ()
    """(token, value, end) each; a bias applies while the context has fewer than `end` tokens."""

    @property
    def penalties(self) -> dict[str, Any]:
        """As fields of SamplingParams."""
        names = ("presence", "frequency", "repetition")
        return {f"{name}_penalty": getattr(self, name) for name in names}


def make_rules(by_slot: dict[int, Rule]) -> LogitRules:
    rules = by_slot.values()
    biases = [bias for rule in rules for bias in rule.biases]
    return LogitRules(
        slots=int32(list(by_slot)),
        num_request_tokens=int32([rule.num_request_tokens for rule in rules]),
        bias_counts=int32([len(rule.biases) for rule in rules]),
        bias_ids=int32([bias[0] for bias in biases]),
        bias_values=np.array([bias[1] for bias in biases], np.float32),
        bias_ends=int32([bias[2] for bias in biases]),
    )


class Contexts:
    """The slots' context tokens in scattered blocks, the first `num_shared_blocks` shared with the first slot."""

    def __init__(self, contexts: dict[int, list[int]], num_slots: int, num_shared_blocks: int = 0) -> None:
        self.rules = SlotRules(num_slots, CPU)
        self.sampling = np.zeros(num_slots, SAMPLING_DTYPE)
        self.num_tokens = contexts
        self.tables = np.zeros((num_slots, 40), np.int32)
        free = np.random.default_rng(0).permutation(np.arange(1, 3000)).tolist()
        self.rules.allocate(3000 * PAGE_SIZE)
        self.rules.tokens.fill_(3)  # tokens outside the contexts, which must not count
        first = min(contexts)
        for slot, context in contexts.items():
            for position, token in enumerate(context):
                block_index = position // PAGE_SIZE
                if position % PAGE_SIZE == 0:
                    is_shared = slot != first and block_index < num_shared_blocks
                    self.tables[slot, block_index] = self.tables[first, block_index] if is_shared else free.pop()
                self.rules.tokens[self.tables[slot, block_index] * PAGE_SIZE + position % PAGE_SIZE] = token

    def open(self, slots: list[int], by_slot: dict[int, Rule]) -> None:
        """by_slot: the rules of some of the slots."""
        for slot in slots:
            self.sampling[slot] = SamplingParams(**by_slot.get(slot, Rule()).penalties)
        self.rules.open(int32(slots), make_rules(by_slot) if by_slot else None, self.sampling)

    def with_rules(self, rows: SamplingRows, slots: list[int]) -> SamplingRows:
        """The rows with the rules and penalties of their slots."""
        names = Rule().penalties
        penalties = with_params(rows, **{name: self.sampling[slots][name] for name in names})
        return dataclasses.replace(penalties, rules=self.select(slots))

    def select(self, slots: list[int]) -> RuledRows | None:
        lengths = int32([len(self.num_tokens[slot]) for slot in slots])

        def tables_of(some_slots: np.ndarray, num_blocks: int) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(self.tables[some_slots, :num_blocks]))

        return self.rules.select(int32(slots), lengths, tables_of, PAGE_SIZE, ON_HOST)
