"""JSON that is one line for every reader."""

from tokasaurus.text.exact_json import dumps


def write_json(value: object, option: int | None = None) -> bytes:
    """The value as JSON by `dumps`, with `escape_line_ends`. option: orjson's."""
    return escape_line_ends(dumps(value, option=option))


def escape_line_ends(content: bytes) -> bytes:
    """The same JSON with U+0085, U+2028 and U+2029 escaped, which JSON allows in strings as they are.

    Python's str.splitlines() and readers like it end a line there, in the middle of a line of JSON or of an event.
    """
    # Searches for one byte are quick, and most contents have neither of the characters' first bytes.
    if content.isascii():
        return content
    if 0xE2 in content:
        content = content.replace(b"\xe2\x80\xa8", rb"\u2028").replace(b"\xe2\x80\xa9", rb"\u2029")
    if 0xC2 in content:
        content = content.replace(b"\xc2\x85", rb"\u0085")
    return content
