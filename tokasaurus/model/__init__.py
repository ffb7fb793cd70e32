"""The model worker's process: weights, the KV cache, and the forwards that the manager asks for.

Knows slots, blocks and tensors. Does not know requests, text or HTTP, and decides nothing. Must be imported before
torch, which reads the OpenMP settings when it loads.
"""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    # A thread that waits for the others spins, then sleeps. By default it spins for milliseconds: if another process
    # wants a core, the spinning thread can occupy the core of the very thread that it waits for. Two workers of the
    # demo model on two cores took 4,500 ms per step of 64 sequences with the default, 134 ms with 1,000 spins and 207
    # ms with 3,000. One worker alone took 58 ms in each case; for a single sequence, 10.3, 14.5 and 11.2 ms.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
