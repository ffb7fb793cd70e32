"""What a KV cache gets, what forwards of the CPU kernels take, and what workers of one machine may use together."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.examples import few
from tests.helpers.limits import read_line
from tests.helpers.processes import assert_all_end
from tests.helpers.tiny_model import save_byte_tokenizer
from tokasaurus.checkpoint.spec import AttentionSpec
from tokasaurus.config import ServerConfig
from tokasaurus.messages.status import UserError, WindowGroups
from tokasaurus.model.attention.backend import KVShape
from tokasaurus.model.buffer_sizes import chunk_sizes, graph_sizes, group_graph_sizes, places_of, window_groups
from tokasaurus.model.worker import memory as memory_module
from tokasaurus.model.worker.memory import (
    BlockBytes,
    ForwardMemory,
    KVCachePlan,
    available_to_all,
    graph_bytes,
    group_graph_bytes,
    plan_auto,
    plan_fixed,
    size_kv_cache,
)
from tokasaurus.model.worker.memory_plan import ADAPTERS, CUDA_FRACTION
from tokasaurus.monitoring.available_memory import AvailableMemory, available_memory
from tokasaurus.monitoring.memory_nodes import MemoryNode, Place

MIB = 1024**2
GIB = 1024**3


ALONE = BlockBytes(own=1000, total=1000)
"""A block of a model on one worker."""

STAGES = BlockBytes(own=700, total=2000, num_workers=4)
"""A block on one of two workers with 7 of 10 layers, beside two with 3."""


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(16, 1), (17, 2), (4096, 256)])
def test_a_requested_size_is_rounded_up_to_whole_blocks(num_tokens: int, num_blocks: int) -> None:
    plan = plan_fixed(num_tokens, page_size=16, block=ALONE, available_bytes=(num_blocks + 1) * 1000)
    assert plan.num_blocks == num_blocks


def test_a_size_that_does_not_fit_is_refused_with_the_largest_size_that_fits() -> None:
    with pytest.raises(UserError, match=r"kv_cache_num_tokens=200: .* at most 144$"):
        plan_fixed(200, page_size=16, block=ALONE, available_bytes=10_500)
    assert plan_fixed(144, page_size=16, block=ALONE, available_bytes=10_500).num_blocks == 9


def test_a_requested_size_must_fit_all_workers_together() -> None:
    plan = plan_fixed(144, page_size=16, block=STAGES, available_bytes=20_000)
    assert plan.num_blocks == 9
    assert "9 blocks of 700 B = 6.152 KiB" in plan.arithmetic
    with pytest.raises(UserError, match=r"needs .* on 4 workers together, but only .* are available, .* at most 128$"):
        plan_fixed(144, page_size=16, block=STAGES, available_bytes=19_999)


def test_the_automatic_size_is_the_share_of_memory_less_the_padding_block() -> None:
    plan = plan_auto(16 * GIB, "of memory available", 0.25, page_size=16, block=BlockBytes(2**20, 2**21, 2))
    assert plan.num_blocks == 2 * GIB // 2**20 - 1
    # The arithmetic shown to the user gives the result.
    assert re.search(
        r"16 GiB .* x 0.25 / 2 MiB a block of 2 workers = 2,047 blocks of 16 = 32,752 tokens", plan.arithmetic
    )


@pytest.mark.parametrize("layers", [(19, 11), (13, 12, 5), (1, 1)])
def test_stages_that_share_memory_get_equally_many_blocks(
    layers: tuple[int, ...],
) -> None:
    """So that no stage takes memory for blocks that another one lacks."""
    blocks = [BlockBytes(count * 1000, sum(layers) * 1000, len(layers)) for count in layers]
    plans = [plan_auto(GIB, "of memory available", 0.25, page_size=16, block=block) for block in blocks]
    (num_blocks,) = {plan.num_blocks for plan in plans}
    assert num_blocks + 1 == GIB // 4 // (sum(layers) * 1000)


def test_memory_for_less_than_one_block_is_refused() -> None:
    of = r"it is 0\.25 of 1 GiB of memory available \(limit: a file\);.* kv_cache_num_tokens"
    with pytest.raises(UserError, match=of):
        plan_auto(GIB, "of memory available (limit: a file)", 0.25, 16, BlockBytes(GIB, GIB))


def test_available_memory_is_positive_and_no_more_than_the_machine_has() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < available_memory().num_bytes <= total


def write_files(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def is_available_on_the_machine(num_bytes: int) -> bool:
    """About equal, since other processes allocate and free memory between two measurements."""
    return math.isclose(num_bytes, psutil.virtual_memory().available, rel_tol=0.1, abs_tol=GIB)


def test_without_cgroups_the_memory_of_the_machine_is_available(tmp_path: Path) -> None:
    assert is_available_on_the_machine(available_memory(tmp_path).num_bytes)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert available_memory(tmp_path).limited_by == f"the machine's {total / GIB:,.1f} GiB"


@pytest.mark.parametrize(
    ("entry", "directory", "limit", "usage", "prefix"),
    [
        # A service's own group; a group above it; a container, which sees its group as the root.
        ("0::/system.slice/toka", "sys/fs/cgroup/system.slice/toka", "memory.max", "memory.current", ""),
        ("0::/system.slice/toka", "sys/fs/cgroup/system.slice", "memory.max", "memory.current", ""),
        ("0::/", "sys/fs/cgroup", "memory.max", "memory.current", ""),
        ("0::/../toka", "sys/fs/cgroup", "memory.max", "memory.current", ""),
        # Version 1, and a container in which /proc shows the host's path.
        *(
            (entry, directory, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            for entry, directory in (
                ("3:cpu:/\n4:hugetlb,memory:/a/b", "sys/fs/cgroup/memory/a/b"),
                ("4:memory:/docker/123", "sys/fs/cgroup/memory"),
            )
        ),
    ],
)
def test_a_cgroup_makes_available_its_limit_minus_usage_outside_the_page_cache(
    entry: str, directory: str, limit: str, usage: str, prefix: str, tmp_path: Path
) -> None:
    write_files(
        tmp_path,
        {
            "proc/self/cgroup": f"{entry}\n",
            f"{directory}/{limit}": f"{10 * MIB}\n",
            f"{directory}/{usage}": f"{9 * MIB}\n",
            f"{directory}/memory.stat": f"anon 5\n{prefix}inactive_file {4 * MIB}\n{prefix}active_file {MIB}\n",
        },
    )
    assert available_memory(tmp_path).num_bytes == 6 * MIB
    assert available_memory(tmp_path).limited_by == f"{tmp_path / directory / limit}, 0.0 GiB"
    (tmp_path / directory / limit).write_text("max\n" if limit == "memory.max" else "9223372036854771712\n")
    assert is_available_on_the_machine(available_memory(tmp_path).num_bytes)


def test_a_cgroup_over_its_limit_makes_nothing_available(tmp_path: Path) -> None:
    group = "sys/fs/cgroup"
    files = {"proc/self/cgroup": "0::/\n", f"{group}/memory.max": "100\n", f"{group}/memory.current": "300\n"}
    write_files(tmp_path, {**files, f"{group}/memory.stat": "inactive_file 50\n"})
    assert available_memory(tmp_path).num_bytes == 0


_STATES = {
    **{"linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "layer_types": ["linear_attention", "full_attention"],
}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@few(
    3,
    ("family", "dtype"),
    [
        *(
            ("llama", "float32"),
            ("qwen3_5_text", "bfloat16"),
            ("gemma3_text", "float32"),
            ("llama", "bfloat16"),
            ("llama", "float32 int8"),
        ),
        *(("qwen3_moe", "bfloat16"), ("qwen3_moe", "bfloat16 quantised")),
    ],
)
def test_the_largest_forwards_use_more_than_half_of_the_reserved_memory_and_no_more_than_all(
    family: str, dtype: str, tmp_path: Path
) -> None:
    experts = {"num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
    config = AutoConfig.for_model(
        family,
        **(experts if family == "qwen3_moe" else _STATES if family == "qwen3_5_text" else {}),
        head_dim=32,
        vocab_size=32_000,
        hidden_size=256,
        intermediate_size=2048,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    save_byte_tokenizer(tmp_path)
    # In a process of its own: in this one, memory freed by earlier tests would be reused.
    command = [sys.executable, "-m", "tests.model.helpers.largest_forward", str(tmp_path), *dtype.split()]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)
    assert found["reserved"] / 2 < found["grown"] <= found["reserved"], found


SHAPE = KVShape(2, 4, 2, 64, 16, torch.bfloat16, torch.device("cuda", 0))
FREE, FORWARD, GRAPHS, OF_ADAPTERS = 940 * MIB, 300 * MIB, 100 * MIB, 40 * MIB


def test_an_automatic_cache_counts_the_memory_of_the_replicas_nodes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user asks for may be larger: the system takes the rest from other nodes."""
    shape = replace(SHAPE, device=torch.device("cpu"))
    monkeypatch.setattr(memory_module, "available_memory", lambda: AvailableMemory(64 * GIB, "the machine's 64 GiB"))
    monkeypatch.setattr(memory_module, "own_bytes", lambda: GIB)
    monkeypatch.setattr(memory_module, "sibling_bytes", lambda: [GIB])
    table = SimpleNamespace(forward_bound=ForwardMemory({"kept": GIB}, {"passing": GIB}))

    def num_bytes(words: str, node_gib: int) -> int:
        place = Place((MemoryNode(0, frozenset({0}), node_gib * GIB),))
        config = ServerConfig.parse(["dp_size=2", *words.split()])
        plan = size_kv_cache(config, 2, shape, None, table, None, None, place)  # type: ignore[arg-type]
        return (plan.num_blocks + 1) * shape.bytes_per_block

    assert num_bytes("", node_gib=9) == (9 - 1 - 2) * GIB // 4
    assert num_bytes("tp_size=2", node_gib=18) == (9 - 1 - 2) * GIB // 4, "each of two workers"
    assert num_bytes("", node_gib=99) == (64 - 2 * 2) // 2 * GIB // 4
    asked = 8 * GIB // shape.bytes_per_block * 16
    assert num_bytes(f"kv_cache_num_tokens={asked}", node_gib=9) == 8 * GIB + shape.bytes_per_block


@pytest.mark.parametrize(
    ("windows", "groups", "places"),
    [
        ([None, None], None, ()),
        ([9, 9], None, ()),
        ([9, 9, None, 9, 9], WindowGroups(4, 9), [(1, 0), (2, 0), (0, 0), (3, 0), (4, 0)]),
        ([None, 5, None, 9, 9], WindowGroups(2, 9), [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0)]),
        ([None, -4, None], WindowGroups(1, -4), [(0, 0), (1, 0), (0, 1)]),
        ([None, -4, 9], None, ()),
    ],
)
def test_as_many_layers_have_windows_in_each_group_as_see_all_tokens(
    windows: list[int | None], groups: WindowGroups | None, places: list[tuple[int, int]]
) -> None:
    layers = [
        AttentionSpec(
            4, 2, 64, 1.0, **({"chunk": -window} if window is not None and window < 0 else {"window": window})
        )
        for window in windows
    ]
    assert window_groups(layers) == groups
    if groups is not None:
        assert places_of(layers, groups) == tuple(places)


def test_each_stage_has_the_groups_of_the_whole_model_in_blocks_of_its_own_size() -> None:
    layers = [AttentionSpec(4, 2, 64, 1.0, window=None if index % 6 == 5 else 9) for index in range(20)]
    groups = window_groups(layers)
    assert groups == WindowGroups(6, 9)
    for stages in (1, 2, 3, 5, 20):
        for first in range(0, 20, 20 // stages):
            places = places_of(layers[first : first + 20 // stages], groups)
            assert len(set(places)) == len(places)
            assert all(place.group <= 6 for place in places)


@pytest.mark.parametrize("window", [1, 2, 16, 17, 40, 512, -6, -16, -40])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_a_sequence_holds_no_more_blocks_than_its_group_allows(window: int, page_size: int) -> None:
    groups = WindowGroups(3, window)
    for num_tokens in (1, 5, 16, 33):
        held = [
            (start + num_tokens - 1) // page_size - max(0, groups.first_seen(start + 1)) // page_size + 1
            for start in range(200)
        ]
        assert max(held) <= groups.num_held(page_size, num_tokens)
    for num_blocks in (8, 50, 333):
        most = groups.max_pages(num_blocks, page_size)
        assert groups.num_blocks(most, page_size) <= num_blocks < groups.num_blocks(most + 1, page_size)


class PretendedCuda:
    """What `torch.cuda` says of a device: a forward allocates and frees its memory, graphs are measured and dropped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.peak = 0
        self.order: list[str] = []
        for name, function in {
            "mem_get_info": lambda _device: (FREE, FREE),
            "memory_allocated": lambda _device: self.allocated,
            "max_memory_allocated": lambda _device: self.peak,
            "reset_peak_memory_stats": lambda _device: setattr(self, "peak", self.allocated),
            "empty_cache": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def allocate(self, num_blocks: int) -> None:
        assert num_blocks == 1, "the padding block alone"
        self.order.append("cache")
        self.allocated += SHAPE.bytes_per_block

    def run_largest(self) -> None:
        self.order.append("forward")
        self.peak = max(self.peak, self.allocated + FORWARD)

    def measure_graphs(self) -> int:
        self.order.append("graphs")
        return GRAPHS


class Table:
    """The memory table, for what is measured alone."""

    def __init__(self) -> None:
        self.measured: dict[str, int] = {}

    def note(self, measured_bytes: int, name: str) -> None:
        self.measured[name] = measured_bytes

    def planned(self, name: str) -> int:
        return {ADAPTERS: OF_ADAPTERS}[name]


@pytest.fixture
def size(monkeypatch: pytest.MonkeyPatch) -> Callable[..., KVCachePlan]:
    def size_on_cuda(*flags: str) -> KVCachePlan:
        cuda = PretendedCuda(monkeypatch)
        config = ServerConfig.parse(list(flags))
        plan = size_kv_cache(config, 2, SHAPE, cuda, Table(), cuda.run_largest, cuda.measure_graphs)
        assert cuda.order == ["cache", "forward", "graphs"]
        return plan

    return size_on_cuda


def test_the_graphs_memory_is_estimated_from_the_first_and_the_last_of_each_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks come first. Each further graph is expected to take what the last of its kind took."""
    taken = {2048: 300, 1088: 5, 1024: 200, 16: 7}
    free = 1000

    def record_graphs(
        _recorder: object, sizes: list[int], progress: Callable[[list[int]], Iterable[int]], chunk_sizes: list[int]
    ) -> None:
        nonlocal free
        for size in progress(sorted([*sizes, *chunk_sizes], reverse=True)):
            free -= taken[size]

    of_groups = {1024: 90, 16: 4}

    def record_groups(sizes: list[int], progress: Callable[[list[int]], Iterable[int]]) -> None:
        nonlocal free
        for size in progress(sorted(sizes, reverse=True)):
            free -= of_groups[size]

    runner = SimpleNamespace(record_graphs=record_graphs, record_groups=record_groups)
    monkeypatch.setattr(memory_module, "CudaRecorder", lambda _device: None)
    monkeypatch.setattr(memory_module, "_free_bytes", lambda _device: free)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    rows, chunks = graph_sizes(1024, 16), chunk_sizes(1024, 16, 8192)

    def estimate(rows: list[int], chunks: list[int]) -> int:
        return graph_bytes(runner, rows, chunks, torch.device("cpu"))

    assert estimate(rows, chunks) == 300 + (len(chunks) - 1) * 5 + 200 + (len(rows) - 1) * 7
    assert estimate(rows, []) == 200 + (len(rows) - 1) * 7
    assert estimate([1024], chunks[:1]) == 300 + 200
    groups = group_graph_sizes(rows)
    assert group_graph_bytes(runner, groups, torch.device("cpu")) == 90 + (len(groups) - 1) * 4
    assert group_graph_bytes(runner, [1024], torch.device("cpu")) == 90


LEFT = (FREE - FORWARD - GRAPHS - OF_ADAPTERS) // SHAPE.bytes_per_block


def test_an_automatic_cache_takes_its_share_of_what_forwards_and_graphs_leave(
    size: Callable[..., KVCachePlan],
) -> None:
    assert (
        size().num_blocks == int((FREE - FORWARD - GRAPHS - OF_ADAPTERS) * CUDA_FRACTION) // SHAPE.bytes_per_block - 1
    )


def test_memory_that_adapters_have_already_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, table = PretendedCuda(monkeypatch), Table()
    table.measured[ADAPTERS] = OF_ADAPTERS - MIB
    plan = size_kv_cache(ServerConfig.parse([]), 2, SHAPE, cuda, table, cuda.run_largest, cuda.measure_graphs)
    assert plan.num_blocks == int((FREE - FORWARD - GRAPHS - MIB) * CUDA_FRACTION) // SHAPE.bytes_per_block - 1


def test_a_cache_of_a_given_size_has_to_fit_beside_the_largest_forward_and_the_graphs(
    size: Callable[..., KVCachePlan],
) -> None:
    largest = (LEFT - 1) * 16  # without the padding block
    assert size(f"kv_cache_num_tokens={largest}").num_blocks == LEFT - 1
    refused = rf"^kv_cache_num_tokens={largest + 1}: .* enough for at most {largest}$"
    with pytest.raises(UserError, match=refused):
        size(f"kv_cache_num_tokens={largest + 1}")


@pytest.mark.parametrize(
    ("own", "others", "num_workers", "expected"),
    [
        (300, [], 1, 1000),
        (300, [300, 300, 300], 4, 1000),
        (300, [100], 2, 800),  # it has 200 of its weights to load
        (300, [], 2, 700),  # it has not begun
        (300, [700], 2, 1400),  # its KV cache is filled: 400 of both caches' memory are no longer available
        (300, [700, 100, 300], 4, 1200),
        (900, [], 3, 0),
    ],
)
def test_workers_are_counted_as_if_all_had_come_as_far(
    own: int, others: list[int], num_workers: int, expected: int
) -> None:
    assert available_to_all(1000, own, others, num_workers) == expected


def test_own_memory_grows_by_what_is_filled() -> None:
    """In a process of its own: earlier tests' threads and tensors free memory at times of their own."""
    # New pages: an allocator may give memory that was counted before.
    fill = f"""
import mmap
from tokasaurus.model.worker.memory import own_bytes
own_bytes()
before = own_bytes()
pages = mmap.mmap(-1, {64 * MIB}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for start in range(0, len(pages), mmap.PAGESIZE):
    pages[start] = 1
print(own_bytes() - before)
"""
    done = subprocess.run([sys.executable, "-c", fill], stdout=subprocess.PIPE, timeout=120, check=True)
    assert 60 * MIB < int(done.stdout) < 80 * MIB


SIBLING = """
import ctypes, sys, time
ctypes.CDLL(None).prctl(15, sys.argv[1].encode())  # PR_SET_NAME
filled = b"1" * {num_bytes}
print(flush=True)
time.sleep(600)
"""


@pytest.mark.long
def test_siblings_are_the_other_workers_of_the_same_parent() -> None:
    """This process's own siblings are unknown, so a child looks for its siblings, which are this process's children."""
    look = "from tokasaurus.model.worker.memory import sibling_bytes; print(list(sibling_bytes()))"
    processes = [
        subprocess.Popen([sys.executable, "-c", SIBLING.format(num_bytes=size * MIB), name], stdout=subprocess.PIPE)
        for name, size in (("toka-worker-0", 64), ("toka-worker1-0", 128), ("toka-manager", 256))
    ]
    try:
        for process in processes:
            read_line(process, process.stdout)
        found = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout
    finally:
        for process in processes:
            process.kill()
            process.wait()
    sizes = sorted(int(size) for size in found.strip().strip("[]").split(","))
    assert [64 <= sizes[0] / MIB < 120, 128 <= sizes[1] / MIB < 184, len(sizes)] == [True, True, 2]
    assert_all_end([process.pid for process in processes], within_s=1)
