"""How long parsing a JSON body would take, from its bytes: parsing is one C call, which blocks the event loop."""

_SLICE_BYTES = 1 << 19
# A list or an object takes as long to make and to free as this many numbers.
_CONTAINER_WORK = 8
_KEY_WORK = 3


def has_too_many_values(content: bytes | bytearray, max_work: int) -> bool:
    """Whether parsing the body would take more than `max_work`. Valid JSON is not required.

    max_work: numbers and strings, with 8 more for each list or object and 3 more for each key. A million take 150 ms.
    In slices of a few milliseconds; other threads may run between them.
    """
    if len(content) <= max_work // _CONTAINER_WORK:  # each byte may be a list
        return False
    slices = range(0, len(content), _SLICE_BYTES)
    # First as if no mark were inside a string, which is faster and enough for nearly all bodies.
    if sum(_work(content[start : start + _SLICE_BYTES]) for start in slices) <= max_work:
        return False
    work = position = 0
    is_in_string = False
    while position < len(content) and work <= max_work:
        part = content[position : position + _SLICE_BYTES]
        position += len(part)
        if (len(part) - len(part.rstrip(b"\\"))) % 2 == 1:  # the border must not cut an escape
            part += content[position : position + 1]
            position += 1
        texts = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        work += _work(b"".join(texts[is_in_string::2]))
        is_in_string ^= len(texts) % 2 == 0
    return work > max_work


def _work(part: bytes | bytearray) -> int:
    num_containers = part.count(b"[") + part.count(b"{")
    return part.count(b",") + _CONTAINER_WORK * num_containers + _KEY_WORK * part.count(b":")
