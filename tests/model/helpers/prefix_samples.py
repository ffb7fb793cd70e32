"""Samples of questions that share a prefix, decoded together with prefix groups or without."""

import itertools
import random

from tests.helpers.tiny_model import VOCAB_SIZE
from tests.model.helpers.steps import StepDriver


class Samples:
    """Samples of questions that share few-shot examples. Questions arrive one at a time and decode together; prefill
    chunks end anywhere in a prompt."""

    def __init__(self, driver: StepDriver, page_size: int, seed: int) -> None:
        self._driver, self._page_size, self._rng = driver, page_size, random.Random(seed)
        # Groups have a random generator of their own: prompts, arrivals and chunks are the same without groups.
        self._grouping = random.Random(seed)
        self._few_shots = self._tokens(self._rng.randint(page_size, 70))
        self._questions: list[list[int]] = []
        self.sampled: dict[int, list[tuple[int, float | None]]] = {}
        """(token, logprob) pairs by slot."""
        self.num_grouped = 0
        """Rows that decoded in groups, over all steps."""

    def run(self, num_tokens: int, grouped: bool) -> None:
        """Run steps until every sample has `num_tokens` tokens."""
        sample_counts = [3, 1, 4, 2, 3]
        while sample_counts or any(len(pairs) < num_tokens for pairs in self.sampled.values()):
            if sample_counts and (not self.sampled or self._rng.random() < 0.2):
                self._open(sample_counts.pop())
            prefilling = [slot for slot in self.sampled if self._driver.remaining(slot)]
            decode = [slot for slot, pairs in self.sampled.items() if pairs and len(pairs) < num_tokens]
            prefill = []
            for slot in prefilling[: self._rng.randint(0 if decode else 1, len(prefilling))] if prefilling else []:
                prefill.append((slot, self._rng.randint(1, self._driver.remaining(slot))))
                if prefill[-1][1] < self._driver.remaining(slot):
                    break  # later samples read what the rest of this prompt computes
            decode, groups = self._in_groups(decode) if grouped else (decode, None)
            if decode or prefill:
                for slot, pair in self._driver.run(decode, prefill, groups).items():
                    self.sampled[slot].append(pair)

    def _open(self, num_samples: int) -> None:
        """Open the samples of one more question: the first computes the prompt, the others only its last block."""
        prompt = self._few_shots + self._tokens(self._rng.choice([1, 20, 2 * self._page_size]))
        if self._rng.random() < 0.5:
            prompt = prompt[: len(prompt) // self._page_size * self._page_size]
        first = len(self.sampled) + 1
        num_before = min(len(self._few_shots), len(prompt) - 1) // self._page_size
        shared_with = (1, num_before) if first > 1 else None
        for sample in range(num_samples):
            slot = first + sample
            temperature = self._rng.choice([0.0, 1.0])
            self._driver.open(slot, prompt, temperature, seed=7, sample=slot, shares=shared_with)
            self.sampled[slot] = []
            shared_with = (first, (len(prompt) - 1) // self._page_size)
        self._questions.append(list(range(first, first + num_samples)))

    def _in_groups(self, decode: list[int]) -> tuple[list[int], list[tuple[int, int]] | None]:
        """-> the slots of `decode` in group order, and groups of some of them: samples of one question or several."""
        members: list[list[int]] = [[]]
        for question in self._questions:
            if self._grouping.random() < 0.5:
                members.append([])
            members[-1] += [slot for slot in question if slot in decode and self._grouping.random() < 0.9]
        blocks = [self._driver.num_shared_blocks(slots) for slots in members]
        used = [(slots, count) for slots, count in zip(members, blocks, strict=True) if count]
        if not used:
            return decode, None
        grouped = list(itertools.chain(*(slots for slots, _ in used)))
        self.num_grouped += len(grouped)
        others = [slot for slot in decode if slot not in grouped]
        # Some groups use one block less than their members share.
        groups = [(len(slots), self._grouping.choice([count, max(1, count - 1)])) for slots, count in used]
        return grouped + others, groups

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(VOCAB_SIZE) for _ in range(count)]
