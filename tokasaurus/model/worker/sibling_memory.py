"""The memory of a machine that several workers share: what they may use together, although each starts by itself."""

from collections.abc import Iterable, Iterator

import psutil

_TITLE = "toka-worker"
"""How the names of workers' processes begin."""


def available_to_all(available_bytes: int, own_bytes: int, others_bytes: Iterable[int], num_workers: int) -> int:
    """Bytes that num_workers may still use together, if each of the others came to need what this one uses now.

    own_bytes: used by this worker. others_bytes: used by each of the others that exist. One that has loaded less than
    this one will take the difference; one that has filled its KV cache already has what it may take.
    """
    others = list(others_bytes)[: num_workers - 1]
    others += [0] * (num_workers - 1 - len(others))
    return max(0, available_bytes + sum(other - own_bytes for other in others))


def own_bytes() -> int:
    """Memory that is this process's alone, without that of files such as libraries."""
    return _bytes_of(psutil.Process())


def sibling_bytes() -> Iterator[int]:
    """The same of each other worker of this server."""
    own = psutil.Process()
    launcher = own.parent()
    for child in [] if launcher is None else launcher.children():
        try:
            if child.pid != own.pid and child.name().startswith(_TITLE):
                yield _bytes_of(child)
        except psutil.Error:  # it has just ended, or the system does not tell
            continue


def _bytes_of(process: psutil.Process) -> int:
    memory = process.memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))  # only Linux tells what is shared
