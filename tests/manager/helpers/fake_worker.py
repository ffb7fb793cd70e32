"""A worker without a model, strict about the contract of ForwardInput.

It stores token ids in paged memory, where a model stores keys and values, and draws each token from a hash of all
tokens that it reads back through the block table. A block given to two sequences, a block table that is too short, or a
chunk that is skipped or sent twice trips an assertion or changes the tokens. Layers with windows store the same tokens
in their own blocks of the same memory, and read those that they see. The state of a layer with a state is all tokens
that have changed it.
"""

import contextlib
import itertools
from dataclasses import dataclass, field

import numpy as np

from tests.manager.helpers.fake_grammars import VOCAB_SIZE, assert_is_allowed, read_masks
from tests.manager.helpers.fake_prompt_logprobs import FakePromptLogprobs
from tests.manager.helpers.simulation import draw, most_likely
from tokasaurus.messages.channel import ChannelClosed, Receiver, Sender
from tokasaurus.messages.forward import ForwardInput, ForwardOutput, LogitRules, TopOfRows
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.messages.status import EngineLimits, Ready


@dataclass
class FakeSlot:
    num_prompt_tokens: int
    position: int
    seed: int
    sample_index: int
    want_logprobs: bool
    num_top: int
    first_write: int
    adapter: str
    next_target: int | None = None  # target of the last prompt logprob: it must be the next token
    forbidden: dict[int, int] = field(default_factory=dict)  # token -> forbidden while the context is shorter than this
    last_token: int | None = None
    has_run: bool = False
    block_table: list[int] = field(default_factory=list)
    state: tuple[str, list[int]] = ("", [])
    """The adapter and the tokens that have changed it."""

    @property
    def key(self) -> tuple[int, int]:
        """(seed, sample index)."""
        return self.seed, self.sample_index


class FakeWorker:
    """Computes one ForwardInput at a time. The key of a sequence is (seed, sample index)."""

    def __init__(self, limits: EngineLimits, max_tokens_per_forward: int, max_seqs_per_forward: int) -> None:
        self.limits = limits
        self.max_tokens = max_tokens_per_forward
        self.max_seqs = max_seqs_per_forward
        self.memory = np.full((limits.num_kv_blocks + 1, limits.page_size), -1)
        self.adapters: dict[int, str] = {0: ""}
        """Digests by number."""
        self.adapters_of_tokens = np.full((limits.num_kv_blocks + 1, limits.page_size), "", dtype="U8")
        """The adapter with which each token's KV was computed."""
        self.groups_of_tokens = np.zeros((limits.num_kv_blocks + 1, limits.page_size), np.int64)
        """The group of layers that wrote each token last; 0: those that see all tokens."""
        self.window_blocks: dict[int, list[int]] = {}
        """By block of tables: those of the groups with windows."""
        self.snapshots: dict[int, tuple[str, list[int]]] = {}
        self.slots: dict[int, FakeSlot] = {}
        self.opened: list[tuple[int, int]] = []
        """Key of each opening of a slot, in order."""
        self.start_positions: list[int] = []
        """Position at which prefill began, for each entry of `opened`."""
        self.first_positions: dict[tuple[int, int], int] = {}
        """The start position of each sequence's first opening."""
        self.writers: dict[int, int] = {}
        """Seed of the sequence that last wrote each block."""
        self.read_from: set[tuple[int, int]] = set()
        """(seed of a sequence that started after cached tokens, seed of the sequence that computed them)."""
        self.num_sampled: dict[tuple[int, int], int] = {}
        """Tokens drawn for each sequence."""
        self.computed_ranges: dict[tuple[int, int], list[list[int]]] = {}
        """Of each sequence: the positions [start, end) computed in each opening of a slot."""
        self.longest_prefixes: dict[tuple[int, int], int] = {}
        """Of each sequence: the most blocks of a prefix that it attended to in a group."""
        self.grouped: list[list[tuple[list[int], int]]] = []
        """Of each step: (slots, blocks of the shared prefix) of each group."""
        self.num_steps = 0
        self.requests: dict[int, GenerateRequest] = {}
        """By seed: requests whose masks are compared with their grammars, and their adapters."""

    def forward(self, message: ForwardInput, forward_seconds: float = 0.01) -> ForwardOutput:
        assert message.step_id == self.num_steps
        self.num_steps += 1
        self._apply_changes(message)
        self.grouped.append(self._read_groups(message))
        rows = list(zip(message.slots.tolist(), message.num_tokens.tolist(), strict=True))
        in_use = {slot.adapter for slot in self.slots.values()} - {""}
        numbers = [number for number, digest in self.adapters.items() if digest in in_use]
        assert len(numbers) == len(in_use), "an adapter has two numbers, or lost its own while a slot has it"
        assert message.slots.dtype == message.num_tokens.dtype == message.prompt_ids.dtype == np.int32
        assert 0 < len(rows) <= self.max_seqs
        assert len({slot for slot, _ in rows}) == len(rows)
        assert sum(num_tokens for _, num_tokens in rows) <= self.max_tokens
        prompt_ids = message.prompt_ids.tolist()
        assert len(prompt_ids) == sum(num_tokens for _, num_tokens in rows[message.num_decode :])
        token_ids: list[int] = []
        logprobs: list[float] = []
        counts: list[int] = []
        asked = False
        prompt_logprobs = FakePromptLogprobs(message)
        masks = read_masks(message)
        starts = {slot_id: self.slots[slot_id].position for slot_id, _ in rows}
        saves = self._read_saves(message)
        for row, (slot_id, num_tokens) in enumerate(rows):
            slot = self.slots[slot_id]
            if row < message.num_decode:
                assert num_tokens == 1
                assert slot.last_token is not None, "decode before the first token"
                tokens = [slot.last_token]
            else:
                assert num_tokens >= 1
                assert slot.position + num_tokens <= slot.num_prompt_tokens
                tokens, prompt_ids = prompt_ids[:num_tokens], prompt_ids[num_tokens:]
                assert slot.next_target in (None, tokens[0])
            context = self._write(slot, tokens)
            if self.limits.num_snapshots:
                adapter, before = slot.state
                assert (adapter, before) == (slot.adapter, context[: -len(tokens)]), "a state of other tokens"
                slot.state = adapter, context
                for position, number in saves.pop(row, []):
                    assert 0 < position <= num_tokens
                    self.snapshots[number] = adapter, context[: len(before) + position]
            slot.next_target = prompt_logprobs.add(row, context, num_tokens, slot.position == slot.num_prompt_tokens)
            if slot.position < slot.num_prompt_tokens:
                continue
            forbidden = {token for token, end in slot.forbidden.items() if len(context) < end}
            allowed = masks.pop(len(token_ids), None)
            if slot.seed in self.requests:
                assert_is_allowed(allowed, self.requests[slot.seed], context)
            token_id, logprob = draw(
                context, slot.seed, slot.sample_index, forbidden, range(VOCAB_SIZE) if allowed is None else allowed
            )
            slot.last_token = token_id
            token_ids.append(token_id)
            logprobs.append(logprob if slot.want_logprobs else np.nan)
            asked |= slot.want_logprobs
            counts.append(slot.num_top)
            assert slot.want_logprobs or not slot.num_top
            self.num_sampled[slot.key] = self.num_sampled.get(slot.key, 0) + 1
        assert not masks, "a mask without a row"
        assert not saves, "a snapshot without a prompt"
        for slot_id, start in starts.items():  # once all rows have written
            self._see_windows(self.slots[slot_id], start)
        return ForwardOutput(
            message.step_id,
            np.array(token_ids, np.int32),
            np.array(logprobs, np.float32) if asked else None,
            forward_seconds,
            top=top_of_rows(token_ids, logprobs, counts),
            prompt_logprobs=prompt_logprobs.answer(),
        )

    def _read_saves(self, message: ForwardInput) -> dict[int, list[tuple[int, int]]]:
        """By row: after how many of its tokens its state is saved, and where."""
        if message.saves is None:
            return {}
        saves, found = message.saves, dict[int, list[tuple[int, int]]]()
        numbers = saves.snapshots.tolist()
        assert len(set(numbers)) == len(numbers)
        assert all(0 < number <= self.limits.num_snapshots for number in numbers)
        opened = message.changes.opened
        if opened is not None and opened.snapshots is not None:
            assert not {*numbers} & {*opened.snapshots.tolist()}, "a snapshot is read and written by one step"
        for row, position, number in zip(saves.rows.tolist(), saves.num_tokens.tolist(), numbers, strict=True):
            assert row >= message.num_decode
            found.setdefault(row, []).append((position, number))
        assert list(found) == sorted(found)
        assert all(own == sorted(own) for own in found.values())
        return found

    def _apply_changes(self, message: ForwardInput) -> None:
        changes = message.changes
        for number, digest in changes.adapters:
            assert number > 0
            self.adapters[number] = digest
        if changes.windows is not None:
            placed = zip(changes.windows.blocks.tolist(), changes.windows.own.tolist(), strict=True)
            self.window_blocks.update(placed)
        for slot_id in changes.closed.tolist():
            del self.slots[slot_id]
        if changes.opened is not None:
            opens = changes.opened
            assert opens.seeds.dtype == np.uint64
            for row, slot_id in enumerate(opens.slots.tolist()):
                assert 1 <= slot_id <= self.max_seqs
                assert slot_id not in self.slots, f"slot {slot_id} opened twice"
                assert slot_id in message.slots, "opened in a step in which it does not run"
                slot = FakeSlot(
                    int(opens.num_prompt_tokens[row]),
                    int(opens.first_positions[row]),
                    int(opens.seeds[row]),
                    int(opens.sample_indices[row]),
                    bool(opens.want_logprobs[row]),
                    0 if opens.num_top_logprobs is None else int(opens.num_top_logprobs[row]),
                    int((opens.first_positions if opens.first_writes is None else opens.first_writes)[row]),
                    self.adapters[0 if opens.adapters is None else int(opens.adapters[row])],
                )
                if slot.seed in self.requests:
                    assert slot.adapter == self.requests[slot.seed].adapter
                assert slot.position <= slot.first_write <= slot.num_prompt_tokens
                assert slot.position < slot.num_prompt_tokens
                number = 0 if opens.snapshots is None else int(opens.snapshots[row])
                slot.state = self.snapshots[number] if number else (slot.adapter, [])
                self.slots[slot_id] = slot
                self.opened.append(slot.key)
                self.start_positions.append(slot.position)
                self.first_positions.setdefault(slot.key, slot.position)
                self.computed_ranges.setdefault(slot.key, []).append([slot.position, slot.position])
            if opens.rules is not None:
                self._note_forbidden(opens.rules)
        appended: dict[int, list[int]] = {}
        for slot_id, block in zip(changes.block_slots.tolist(), changes.block_ids.tolist(), strict=True):
            assert 1 <= block <= self.limits.num_kv_blocks
            appended.setdefault(slot_id, []).append(block)
        copied: dict[int, tuple[int, int]] = {}
        if changes.copies is not None:
            assert changes.opened is not None
            assert set(changes.copies.slots.tolist()) <= set(changes.opened.slots.tolist()), (
                "a block table is copied into a slot that does not open"
            )
            columns = (changes.copies.slots, changes.copies.source_slots, changes.copies.num_blocks)
            for slot_id, source_id, num_blocks in zip(*(column.tolist() for column in columns), strict=True):
                copied[slot_id] = source_id, num_blocks
        for slot_id, blocks in appended.items():
            self.slots[slot_id].block_table += blocks
        for slot_id, (source_id, num_blocks) in copied.items():
            source = self.slots[source_id].block_table[:num_blocks]
            assert len(source) == num_blocks, "the source block table is shorter than the copy"
            self.slots[slot_id].block_table[:0] = source
        for slot_id in {*appended, *copied}:
            table = self.slots[slot_id].block_table
            assert len(set(table)) == len(table)

    def _note_forbidden(self, rules: LogitRules) -> None:
        biases = iter(zip(rules.bias_ids.tolist(), rules.bias_values.tolist(), rules.bias_ends.tolist(), strict=True))
        for slot_id, count in zip(rules.slots.tolist(), rules.bias_counts.tolist(), strict=True):
            own = list(itertools.islice(biases, count))
            self.slots[slot_id].forbidden = {token: end for token, value, end in own if value == -np.inf}
        assert next(biases, None) is None

    def _read_groups(self, message: ForwardInput) -> list[tuple[list[int], int]]:
        if message.groups is None:
            return []
        assert message.groups.sizes.dtype == message.groups.num_blocks.dtype == np.int32
        sizes, num_blocks = message.groups.sizes.tolist(), message.groups.num_blocks.tolist()
        assert min(sizes) > 0
        assert min(num_blocks) > 0
        assert sum(sizes) <= message.num_decode
        rows = iter(message.slots.tolist())
        groups = [(list(itertools.islice(rows, size)), count) for size, count in zip(sizes, num_blocks, strict=True)]
        for slot_ids, count in groups:
            prefix = self.slots[slot_ids[0]].block_table[:count]
            for slot_id in slot_ids:
                slot = self.slots[slot_id]
                assert slot.block_table[:count] == prefix, "the rows of a group do not share its prefix"
                assert slot.position >= count * self.limits.page_size, "a row has no token after the prefix"
                self.longest_prefixes[slot.key] = max(count, self.longest_prefixes.get(slot.key, 0))
        return groups

    def _write(self, slot: FakeSlot, tokens: list[int]) -> list[int]:
        """Write `tokens`; return all tokens of the slot, read back from memory."""
        page_size = self.limits.page_size
        end = slot.position + len(tokens)
        num_covered = max(end, slot.num_prompt_tokens)
        assert len(slot.block_table) == -(-num_covered // page_size), "the block table must cover exactly its tokens"
        first = max(slot.position, slot.first_write)
        written = set(slot.block_table[first // page_size : -(-end // page_size)])
        for other in self.slots.values():
            # A sequence that shares a block reads it, so it must not run before the block is written.
            if other is not slot and other.has_run and self.limits.windows is None:
                assert not written & set(other.block_table), "writes a block that another sequence reads"
        if not slot.has_run:
            cached = slot.block_table[: slot.first_write // page_size]
            self.read_from.update((slot.seed, self.writers[block]) for block in cached)
            slot.has_run = True
        self.writers.update(dict.fromkeys(written, slot.seed))
        others = [other for other in self.slots.values() if other is not slot and other.has_run]
        shared = {block for other in others for block in other.block_table} & set(slot.block_table)
        first_of_others = page_size * sum(block in shared for block in slot.block_table)
        for position, token in enumerate(tokens, slot.position):
            block, offset = slot.block_table[position // page_size], position % page_size
            kv_index = block, offset
            if position >= slot.first_write:
                if position < first_of_others:
                    assert self.memory[kv_index] == token, "changes what another sequence reads"
                own = self.window_blocks[block] if self.limits.windows is not None else []
                assert 0 not in own
                for group, place in enumerate([block, *own]):
                    self.memory[place, offset] = token
                    self.groups_of_tokens[place, offset] = group
                    self.adapters_of_tokens[place, offset] = slot.adapter
            assert self.memory[kv_index] == token, "a position that is not written must already have its token"
        slot.position = self.computed_ranges[slot.key][-1][1] = end
        adapters = self.adapters_of_tokens[slot.block_table].reshape(-1)[:end]
        assert (adapters == slot.adapter).all(), "reads KV of another adapter"
        assert not self.groups_of_tokens[slot.block_table].reshape(-1)[:end].any(), "a layer with a window was here"
        token_ids: list[int] = self.memory[slot.block_table].reshape(-1)[:end].tolist()
        return token_ids

    def _see_windows(self, slot: FakeSlot, start: int) -> None:
        """What layers with windows see of a row whose first token in this step is at `start`."""
        windows, page_size = self.limits.windows, self.limits.page_size
        if windows is None:
            return
        for position in range(int(windows.first_seen(start + 1)), slot.position):
            block, offset = slot.block_table[position // page_size], position % page_size
            for group, place in enumerate(self.window_blocks[block], 1):
                assert self.memory[place, offset] == self.memory[block, offset], "sees another token"
                assert self.groups_of_tokens[place, offset] == group, "sees another layer's keys"
                assert self.adapters_of_tokens[place, offset] == slot.adapter, "sees KV of another adapter"


def top_of_rows(token_ids: list[int], logprobs: list[float], counts: list[int]) -> TopOfRows | None:
    """Top-k logprobs of the rows that ask for any; each row gets as many as the row that asks for the most."""
    rows = np.flatnonzero(counts)
    if not len(rows):
        return None
    top = most_likely([token_ids[row] for row in rows], [logprobs[row] for row in rows], max(counts))
    return TopOfRows(rows, top.token_ids, top.logprobs)


def run_fake_worker(
    limits: EngineLimits,
    max_tokens_per_forward: int,
    max_seqs_per_forward: int,
    inputs: Receiver[ForwardInput],
    outputs: Sender[ForwardOutput | Ready],
) -> None:
    """Process entry."""
    worker = FakeWorker(limits, max_tokens_per_forward, max_seqs_per_forward)
    outputs.send(Ready("worker", limits))
    with contextlib.suppress(ChannelClosed):
        while True:
            outputs.send(worker.forward(inputs.receive(), forward_seconds=0.001))
