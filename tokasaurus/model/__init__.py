"""The model worker. Imported before torch, whose OpenMP threads read their settings when it loads."""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    # A thread that finds the others still at work spins, then sleeps. By default it spins for milliseconds: where
    # another process wants a core, it takes that core from the very thread that it waits for. Two workers of the demo
    # model on two cores took 4,500 ms a step of 64 by default, 134 at 1,000 spins and 207 at 3,000; one worker alone
    # took 58 in each case, and 10.3, 14.5 and 11.2 ms for a single sequence.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
