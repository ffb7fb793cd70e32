"""Stop strings against brute force over a small alphabet, in which everything overlaps."""

import time

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.text.helpers.first_stop import find_first_stop
from tokasaurus.text.stop_strings import (
    StopMatcher,
    StopScanner,
    StopTokens,
    buffered_length,
    lookback_tokens,
)

TEXTS = st.text("aabé", max_size=12)
STOPS = st.lists(st.text("aabé", min_size=1, max_size=4), max_size=3)

# Tokens as byte strings: one byte, several characters, halves of "é" and of "😀"; token 9 is special.
TOKENS = [b"a", b"b", "é".encode(), b"\xc3", b"\xa9", b"abab", b"a\xc3", b"\xf0\x9f", b"\x98\x80b", b""]
SPECIAL_ID = 9
TOKEN_IDS = st.lists(st.sampled_from([*range(len(TOKENS)), 0, 0, 1, SPECIAL_ID, SPECIAL_ID]), max_size=20)


def decode(token_ids: list[int]) -> str:
    return b"".join(TOKENS[token_id] for token_id in token_ids).decode(errors="replace")


@examples(400)
@given(TEXTS, STOPS)
@example("aa", ["aab"])
def test_buffered_text_is_exactly_the_tail_that_may_become_a_stop(text: str, stops: list[str]) -> None:
    if find_first_stop(text, stops) is not None:
        return
    # The stop string that some continuation completes may start anywhere in the text; take the earliest start.
    starts = [
        start
        for start in range(len(text))
        if any(stop.startswith(text[start:]) and stop != text[start:] for stop in stops)
    ]
    assert buffered_length(text, stops) == (len(text) - min(starts) if starts else 0)


@examples(1000)
@given(st.lists(st.text("aab", max_size=6), max_size=8), st.lists(st.text("aab", min_size=1, max_size=7), max_size=3))
@example(["aa", "aab"], ["aaab"])
@example(["abaaba", "b"], ["abaabab", "ab"])
def test_scanner_returns_what_a_search_of_the_whole_text_would(parts: list[str], stops: list[str]) -> None:
    """After each part: nothing from a stop string on, and all text before the part of it that may begin a stop."""
    scanner = StopScanner(stops)
    text = returned = ""
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        text += part
        new, has_stopped = scanner.add(part, 0, is_last)
        returned += new
        stop = find_first_stop(text, stops)
        assert has_stopped == (stop is not None)
        if stop is not None:
            assert returned == text[: stop[0]]
            return
        assert returned == text[: len(text) - (0 if is_last else buffered_length(text, stops))]


@examples(2000)
@given(
    st.lists(st.text("aab", max_size=6), max_size=8),
    st.lists(st.text("aab", min_size=1, max_size=7), max_size=3),
    st.just(0) | st.integers(0, 20),
    st.booleans(),
)
def test_scanner_ignores_stops_in_the_exempt_characters(
    parts: list[str], stops: list[str], num_exempt: int, keeps_stop: bool
) -> None:
    """One that keeps the stop returns all text up to its end at once."""
    scanner, text, returned = StopScanner(stops, keeps_stop=keeps_stop), "", ""
    for number, part in enumerate(parts):
        text += part
        new, has_stopped = scanner.add(part, num_exempt - len(returned), number == len(parts) - 1)
        returned += new
        stop = find_first_stop(text, stops, num_exempt)
        assert has_stopped == (stop is not None)
        if stop is not None:
            assert returned == text[: stop[0] + keeps_stop * len(stop[1])]
            return
        assert returned == text or not keeps_stop
    assert returned == text


def test_time_of_the_scanner_is_linear_in_the_new_text() -> None:
    """A search that compares every prefix of the stop string after each part would take minutes."""
    stop = "a" * 100_000 + "b"
    scanner = StopScanner([stop, "a" * 50_000 + "c"])
    started = time.thread_time()
    returned = [scanner.add("aaaa", 0, False) for _ in range(2_000)]
    assert returned == [("", False)] * 2_000
    assert scanner.add("c" + "a" * 200_000, 0, True) == ("aaaa" * 2_000 + "c" + "a" * 200_000, False)
    assert time.thread_time() - started < 5


@examples(400)
@given(TOKEN_IDS, STOPS, st.integers(0, 20))
@example([0, SPECIAL_ID, SPECIAL_ID, SPECIAL_ID, 1], ["ab"], 4)
def test_matcher_finds_the_token_at_which_the_whole_text_first_contains_a_stop(
    token_ids: list[int], stops: list[str], num_checked: int
) -> None:
    ends = range(1, len(token_ids) + 1)
    expected = next((end for end in ends if any(stop in decode(token_ids[:end]) for stop in stops)), None)
    matcher = StopMatcher(decode, stops, {SPECIAL_ID})
    if expected is not None:
        num_checked = min(num_checked, expected - 1)  # the caller has checked no token that completes a stop
    assert matcher.first_completion(token_ids, num_checked) == (expected if num_checked < len(token_ids) else None)


@examples(400)
@given(TOKEN_IDS, STOPS, st.integers(0, 20), st.integers(0, 12))
@example([0, 1, 0, 1], ["ab"], 0, 2)
@example([0, 1, 1], ["bb"], 0, 2)
def test_matcher_ignores_stops_within_the_text_of_exempt_tokens(
    token_ids: list[int], stops: list[str], num_checked: int, num_exempt: int
) -> None:
    num_exempt_characters = len(decode(token_ids[:num_exempt]))
    expected = None
    for end in range(len(token_ids), num_exempt, -1):
        text = decode(token_ids[:end])
        counting = [
            start
            for start in range(len(text))
            for stop in stops
            if text.startswith(stop, start) and start + len(stop) > num_exempt_characters
        ]
        expected = end if counting else expected
    if expected is not None:
        num_checked = min(num_checked, expected - 1)
    found = StopMatcher(decode, stops, {SPECIAL_ID}).first_completion(token_ids, num_checked, num_exempt)
    assert found == (expected if num_checked < len(token_ids) else None)


@examples(400)
@given(TOKEN_IDS, STOPS)
def test_checks_after_every_token_stop_where_one_late_check_stops(token_ids: list[int], stops: list[str]) -> None:
    matcher = StopMatcher(decode, stops, {SPECIAL_ID})
    ends = range(1, len(token_ids) + 1)
    one_by_one = next((end for end in ends if matcher.first_completion(token_ids[:end], end - 1) is not None), None)
    assert matcher.first_completion(token_ids, 0) == one_by_one


def test_replacement_character_as_stop_is_found_only_in_the_whole_text() -> None:
    # The last token alone decodes to replacement characters; after the first token it completes a character.
    token_ids = [7, 8]
    assert "\ufffd" in decode(token_ids[1:])
    matcher = StopMatcher(decode, ["\ufffd"])
    assert matcher.first_completion(token_ids, 1) is None
    assert matcher.first_completion([0, 4], 0) == 2


def test_lookback_counts_bytes_and_grows_with_the_longest_stop() -> None:
    assert lookback_tokens([]) == 0
    assert lookback_tokens(["é"]) == 3
    assert lookback_tokens(["ab", "ééé"]) == 7


@examples(400)
@given(st.lists(st.sampled_from([0, 1, 3, 4]), min_size=1, max_size=12), STOPS.filter(bool))
def test_lookback_reaches_every_stop_even_at_one_byte_a_token(token_ids: list[int], stops: list[str]) -> None:
    text = decode(token_ids)
    tail = decode(token_ids[-lookback_tokens(stops) :])
    for stop in stops:
        if text.endswith(stop):
            assert tail.endswith(stop)


TOKEN_TEXTS = [decode([token_id]) for token_id in range(len(TOKENS))]


@examples(1000)
@given(TOKEN_IDS, st.lists(st.text("ab é😀\ufffd", min_size=1, max_size=3), min_size=1, max_size=3))
@example([0, 3, 4], ["é"])
@example([7, 8], ["😀b"])
def test_a_token_that_completes_a_stop_is_marked_as_possible_end(token_ids: list[int], stops: list[str]) -> None:
    stop_tokens = StopTokens(TOKEN_TEXTS)
    row = stop_tokens.row(stops)
    may_end = stop_tokens.may_end[row]
    for end in range(1, len(token_ids) + 1):
        before, now = decode(token_ids[: end - 1]), decode(token_ids[:end])
        if any(stop in now for stop in stops) and not any(stop in before for stop in stops):
            assert may_end[token_ids[end - 1]]


def test_most_tokens_cannot_end_a_stop_and_stops_with_the_same_last_characters_share_a_row() -> None:
    stop_tokens = StopTokens(["x", "y:", ":z", "", "\n", " "])
    row = stop_tokens.row(["Question:", "A:"])
    assert stop_tokens.may_end[row].tolist() == [False, True, True, False, False, False]
    assert stop_tokens.row([":"]) == row
    row = stop_tokens.row(["\n\n"])
    assert stop_tokens.may_end[row].tolist() == [False] * 4 + [True, False]
    assert stop_tokens.row(["a "]) == 0, "a decoder may drop the space of a first token"


@given(
    texts=st.lists(st.text("ab:\u00e9\u4e2d\U0001f600\ufffd \n\ud800", max_size=5), min_size=1, max_size=12),
    sets=st.lists(
        st.lists(st.text("ab:\u00e9\u4e2d\U0001f600\n\ud800\U0010ffff", min_size=1, max_size=3), min_size=1), max_size=6
    ),
)
def test_a_row_has_the_tokens_that_a_scan_of_all_texts_finds(texts: list[str], sets: list[list[str]]) -> None:
    stop_tokens = StopTokens(texts)
    rows = [stop_tokens.row(stops) for stops in sets]
    assert all(rows), "row 0 is for stop strings that any token may end"
    for stops, row in zip(sets, rows, strict=True):
        ends = [stop[-1] for stop in stops] + ["\ufffd"]
        assert stop_tokens.may_end[row].tolist() == [any(end in text for end in ends) for text in texts]
    assert stop_tokens.may_end[0].all()


def test_a_new_row_does_not_read_the_texts_of_a_large_vocabulary() -> None:
    """128,256 tokens of 1 to 12 characters. The limit is a hundredth of the time of a scan in Python."""
    rng = np.random.default_rng(0)
    ends = rng.integers(1, 13, 128_256).cumsum()
    text = "".join(map(chr, rng.integers(33, 1024, int(ends[-1])).tolist()))
    texts = [text[start:end] for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)]
    stop_tokens = StopTokens(texts)
    seconds = []
    for first in range(40, 1000, 16):
        stops = [chr(number) for number in range(first, first + 16)]
        start_s = time.thread_time()
        row = stop_tokens.row(stops)
        seconds.append(time.thread_time() - start_s)
        assert row > 0
    assert min(seconds) < 0.002
    assert stop_tokens.may_end[1].tolist() == [any(chr(number) in text for number in range(40, 56)) for text in texts]


def test_the_number_of_rows_is_bounded() -> None:
    stop_tokens = StopTokens(TOKEN_TEXTS)
    rows = {stop_tokens.row([chr(0x4E00 + number)]) for number in range(300)}
    assert len(rows) == 257
    assert len(stop_tokens.may_end) == 257
