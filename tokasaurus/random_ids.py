"""Random numbers of the operating system for ids and seeds, fetched many at a time.

A call of `uuid4` or `secrets` releases the GIL, which an event loop among busy threads gets back only after
milliseconds."""

import os

_NUM_BYTES = 16
_NUM_FETCHED = 256
_pool: list[bytes] = []
os.register_at_fork(after_in_child=_pool.clear)


def random_bytes() -> bytes:
    """16 bytes that nobody can predict. Thread-safe."""
    while True:
        try:
            return _pool.pop()
        except IndexError:
            fetched = os.urandom(_NUM_BYTES * _NUM_FETCHED)
            _pool.extend(fetched[start : start + _NUM_BYTES] for start in range(0, len(fetched), _NUM_BYTES))


def random_id() -> str:
    """32 hexadecimal digits."""
    return random_bytes().hex()


def random_seed() -> int:
    """64 bits, unsigned."""
    return int.from_bytes(random_bytes()[:8], "little")
