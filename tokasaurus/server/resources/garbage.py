"""When the server collects garbage: a full collection visits every object, which blocks the event loop."""

import gc
import threading
from collections.abc import Callable

CHECK_INTERVAL_S = 10.0
LONGEST_WAIT_S = 600.0
# Objects made before a collection of the youngest generation, and such collections before one of the middle generation:
# it visits at most 100,000 objects, which takes about 10 ms.
_THRESHOLDS = (10_000, 10)
_NEVER = 1 << 30


def collect_garbage_when_idle(is_idle: Callable[[], bool]) -> None:
    """Makes full collections only while `is_idle`, or at least every LONGEST_WAIT_S, for the rest of the process.

    Python would make one whenever the number of objects has grown by a quarter: with a request of 65,536 sequences it
    takes up to 600 ms, again and again. Nearly all objects are freed without it, and of the cycles, those that live
    shortly by collections of the younger generations. Objects that exist now are never visited again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS, _NEVER)
    threading.Thread(target=_collect, args=(is_idle,), name="garbage", daemon=True).start()


def _collect(is_idle: Callable[[], bool]) -> None:
    waiting = threading.Event()
    waited_s = 0.0
    is_first = True
    while True:
        waiting.wait(CHECK_INTERVAL_S)
        waited_s += CHECK_INTERVAL_S
        if is_idle() or waited_s >= LONGEST_WAIT_S:
            gc.collect()
            waited_s = 0.0
            if is_first and is_idle():  # the libraries that load in the background are there
                gc.freeze()
                is_first = False
