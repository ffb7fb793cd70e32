"""Steps with rows in prefix groups: named cases and random ones."""

import dataclasses
import itertools
import random
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from tests.model.helpers.steps import CPU, int32
from tokasaurus.checkpoint.spec import AttentionSpec
from tokasaurus.messages.forward import ForwardInput, PrefixGroups, SlotChanges, SlotOpens
from tokasaurus.messages.generation import SAMPLING_DTYPE
from tokasaurus.model.attention.backend import KVShape
from tokasaurus.model.execution.slot_table import SlotTable, SlotTableSize


@dataclass(frozen=True)
class Group:
    """Decode rows that share a prefix: the blocks common to all groups, then blocks of this group."""

    num_blocks: int
    """Prefix blocks of this group, after the common ones."""
    members: tuple[tuple[int, int], ...]
    """For each row: its tokens after the prefix, including the current one; and how many whole blocks after the prefix
    it shares with the row before, at most. The group does not use this longer prefix."""


@dataclass(frozen=True)
class Other:
    """A row in no group, whose context starts with the prefix of a group."""

    group: int
    """Index of the group."""
    num_cached: int
    """Cached tokens after the prefix."""
    num_tokens: int
    """Tokens of this step."""


@dataclass(frozen=True)
class Case:
    """The rows of a step: grouped decode rows, other decode rows, then prefill rows."""

    page_size: int
    num_common: int
    """Blocks that all groups share."""
    groups: tuple[Group, ...]
    decode: tuple[Other, ...] = ()
    prefill: tuple[Other, ...] = ()
    num_kv_heads: int = 2
    heads_per_kv_head: int = 2
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    @property
    def shape(self) -> KVShape:
        return self.shape_of(1)

    def shape_of(self, num_layers: int) -> KVShape:
        """Every second layer has the window, the softcap and sinks, from the first on."""
        num_heads = self.num_kv_heads * self.heads_per_kv_head
        usual = AttentionSpec(num_heads, self.num_kv_heads, self.head_dim, self.head_dim**-0.5)
        limited = dataclasses.replace(usual, window=self.window, softcap=self.softcap)
        layers = tuple(usual if index % 2 else limited for index in range(num_layers))
        sizes = (num_layers, num_heads, self.num_kv_heads, self.head_dim, self.page_size)
        sinks = torch.linspace(-1, 4, num_heads) if self.has_sinks else None
        by_layer = tuple(None if index % 2 else sinks for index in range(num_layers))
        return KVShape(*sizes, self.dtype, CPU, layers=layers, sinks=by_layer)


@st.composite
def cases(draw: st.DrawFn, page_sizes: list[int]) -> Case:
    page_size, num_common = draw(st.sampled_from(page_sizes)), draw(st.integers(0, 4))
    num_after = st.one_of(st.sampled_from([1, 2, page_size, page_size + 1, 2 * page_size]), st.integers(1, 90))
    members = st.lists(st.tuples(num_after, st.sampled_from([0, 0, 1, 3])), min_size=1, max_size=14)
    fewest = 0 if num_common else 1
    group = st.builds(Group, st.integers(fewest, 9), members.map(tuple))
    groups = tuple(draw(st.lists(group, min_size=1, max_size=4)))
    other = st.builds(Other, st.integers(0, len(groups) - 1), st.integers(0, 60), st.integers(1, 40))
    decode, prefill = (tuple(draw(st.lists(other, max_size=4))) for _ in range(2))
    return Case(
        page_size=page_size,
        num_common=num_common,
        groups=groups,
        decode=tuple(dataclasses.replace(row, num_tokens=1) for row in decode),
        prefill=prefill,
        num_kv_heads=draw(st.integers(1, 3)),
        heads_per_kv_head=draw(st.sampled_from([1, 3, 4, 7])),
        head_dim=draw(st.sampled_from([16, 64, 80])),
        window=draw(st.one_of(st.none(), st.integers(1, 200))),
        softcap=draw(st.sampled_from([None, 2.0])),
        has_sinks=draw(st.booleans()),
    )


class CaseStep:
    """A case's step, the state of its slots before the step, and the contents of the KV cache: random keys and values
    at the kv indices that the step may read, and large values at all others, which would dominate a wrong read."""

    def __init__(self, case: Case) -> None:
        self._page_size = case.page_size
        self._ids = itertools.count(1)
        rows = _scattered(self._make_rows(case))
        tables = [table for table, _, _ in rows]
        num_cached = int32([cached for _, cached, _ in rows])
        num_tokens = int32([count for _, _, count in rows])
        slots = np.arange(1, len(rows) + 1, dtype=np.int32)
        num_grouped = sum(len(group.members) for group in case.groups)
        num_decode = num_grouped + len(case.decode)
        opened = SlotOpens(
            slots=slots,
            num_prompt_tokens=num_cached + np.where(np.arange(len(rows)) < num_decode, 0, num_tokens),
            first_positions=num_cached,
            sampling=np.zeros(len(rows), SAMPLING_DTYPE),
            seeds=np.zeros(len(rows), np.uint64),
            sample_indices=np.zeros(len(rows), np.uint32),
            want_logprobs=np.zeros(len(rows), np.bool_),
        )
        changes = SlotChanges(
            int32([]), opened, np.repeat(slots, list(map(len, tables))), int32(list(itertools.chain(*tables)))
        )
        sizes = [len(group.members) for group in case.groups]
        groups = PrefixGroups(int32(sizes), int32([case.num_common + group.num_blocks for group in case.groups]))
        prompt_ids = np.zeros(num_tokens[num_decode:].sum(), np.int32)
        self.slots = SlotTable(SlotTableSize(len(rows) + 1, max(map(len, tables))), CPU)
        self.slots.apply(changes)
        self.step = ForwardInput(0, slots, num_tokens, num_decode, prompt_ids, changes, groups)
        self.num_blocks = next(self._ids)
        self.slots.rules.allocate(self.num_blocks * case.page_size)
        is_read = torch.zeros(self.num_blocks * case.page_size, dtype=torch.bool)
        for table, cached, count in rows:
            tokens = torch.arange(cached + count)
            is_read[torch.tensor(table)[tokens // case.page_size] * case.page_size + tokens % case.page_size] = True
        size = (len(is_read), case.num_kv_heads, case.head_dim)
        generator = torch.Generator().manual_seed(0)
        self.key, self.value = (torch.randn(size, generator=generator).to(case.dtype) for _ in range(2))
        self.key[~is_read] = self.value[~is_read] = 100.0
        # Strided rows, as the fused gemm for queries, keys and values writes them.
        fused = torch.randn(1000, case.shape.num_heads + 2, case.head_dim, generator=generator).to(case.dtype)
        self.query = fused[:, : case.shape.num_heads]

    def _make_rows(self, case: Case) -> list[tuple[list[int], int, int]]:
        """For each row: block table, cached tokens, tokens of this step."""
        rows: list[tuple[list[int], int, int]] = []
        common = self._new_blocks(case.num_common)
        prefixes = [common + self._new_blocks(group.num_blocks) for group in case.groups]
        for prefix, group in zip(prefixes, case.groups, strict=True):
            num_prefix_tokens = len(prefix) * case.page_size
            before, num_whole = prefix, len(prefix)
            for num_after, max_shared in group.members:
                cached = num_prefix_tokens + num_after - 1
                num_same = min(len(prefix) + max_shared, num_whole, cached // case.page_size)
                before = self._extended(before[:num_same], cached + 1)
                num_whole = cached // case.page_size
                rows.append((before, cached, 1))
        for other in (*case.decode, *case.prefill):
            cached = len(prefixes[other.group]) * case.page_size + other.num_cached
            rows.append((self._extended(prefixes[other.group], cached + other.num_tokens), cached, other.num_tokens))
        return rows

    def _new_blocks(self, count: int) -> list[int]:
        return list(itertools.islice(self._ids, count))

    def _extended(self, table: list[int], num_tokens: int) -> list[int]:
        return table + self._new_blocks(-(-num_tokens // self._page_size) - len(table))


def _scattered(rows: list[tuple[list[int], int, int]]) -> list[tuple[list[int], int, int]]:
    """The rows with their blocks in random order."""
    num_blocks = max(itertools.chain(*(table for table, _, _ in rows)))
    order = [0, *random.Random(0).sample(range(1, num_blocks + 1), num_blocks)]
    return [([order[block] for block in table], cached, count) for table, cached, count in rows]


LONG = tuple((num_after, 0) for num_after in (300, 1, 17, 16, 40))


ONE_TOKEN_EACH = Group(3, ((1, 0),) * 20)


NAMED_CASES = [
    Case(16, 0, (Group(4, LONG),)),
    Case(16, 0, (ONE_TOKEN_EACH,)),
    Case(16, 0, (Group(1, ((16, 0), (17, 0))),), (), (Other(0, 0, 40),)),
    Case(16, 2, (Group(0, ((5, 0),)), Group(7, ((33, 2),) * 9), ONE_TOKEN_EACH), (Other(1, 40, 1),), (Other(1, 0, 9),)),
    Case(16, 0, (Group(4, LONG),), window=40, softcap=3.0, has_sinks=True),
]
"""In order: one group whose rows have very different lengths; rows right after a block border; rows around a block
border beside a prompt; three groups, one with only the common prefix and one with nested prefixes, and rows in no group
that share a group's blocks; a group whose first row's window begins behind the prefix, and the others' in it, beside
sinks."""
