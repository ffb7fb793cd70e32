"""Stop strings the slow way."""

from collections.abc import Sequence


def find_first_stop(text: str, stops: Sequence[str], num_exempt: int = 0) -> tuple[int, str] | None:
    """Start and stop string of the first occurrence that is seen when the text grows by characters; if several end
    there, the longest. Occurrences that end within the first `num_exempt` characters are ignored."""
    for end in range(num_exempt + 1, len(text) + 1):
        ending_here = [stop for stop in stops if text[:end].endswith(stop)]
        if ending_here:
            longest = max(ending_here, key=len)
            return end - len(longest), longest
    return None
