"""What workers that share a machine's memory may use together."""

import subprocess
import sys

import pytest

from tests.helpers.processes import assert_all_end
from tokasaurus.model.worker.sibling_memory import available_to_all

MIB = 1 << 20


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
from tokasaurus.model.worker.sibling_memory import own_bytes
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
import ctypes, sys, time, numpy
ctypes.CDLL(None).prctl(15, sys.argv[1].encode())  # PR_SET_NAME
filled = numpy.ones({num_bytes}, numpy.uint8)
print(flush=True)
time.sleep(600)
"""


def test_siblings_are_the_other_workers_of_the_same_parent() -> None:
    """This process's own siblings are unknown, so a child looks for its siblings, which are this process's children."""
    look = "from tokasaurus.model.worker.sibling_memory import sibling_bytes; print(list(sibling_bytes()))"
    processes = [
        subprocess.Popen([sys.executable, "-c", SIBLING.format(num_bytes=size * MIB), name], stdout=subprocess.PIPE)
        for name, size in (("toka-worker-0", 64), ("toka-worker1-0", 128), ("toka-manager", 256))
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        found = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout
    finally:
        for process in processes:
            process.kill()
            process.wait()
    sizes = sorted(int(size) for size in found.strip().strip("[]").split(","))
    assert [64 <= sizes[0] / MIB < 120, 128 <= sizes[1] / MIB < 184, len(sizes)] == [True, True, 2]
    assert_all_end([process.pid for process in processes], within_s=1)
