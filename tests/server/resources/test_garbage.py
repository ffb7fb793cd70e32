"""Garbage in a process of its own, since the settings are the whole process's."""

import subprocess
import sys

SCRIPT = """
import gc, time, weakref
from tokasaurus.server.resources import garbage

class Node:
    pass

def make_cycle():
    node = Node()
    node.own = node
    return weakref.ref(node)

garbage.CHECK_INTERVAL_S = 0.05
idle = False
garbage.collect_garbage_when_idle(lambda: idle)
full = []
gc.callbacks.append(lambda phase, info: full.append(phase) if info["generation"] == 2 else None)
kept = [[] for _ in range(2_000_000)]  # Python would have made several full collections
assert not full, full
idle = True
node = make_cycle()
deadline = time.monotonic() + 60
while node() is not None:
    assert time.monotonic() < deadline
    time.sleep(0.01)
assert full
"""


def test_full_collections_happen_only_when_idle() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
