"""How the page reads event streams and recordings."""

import random

import orjson
import pytest

from tests.server.page.helpers.node import NODE, in_node

pytestmark = pytest.mark.skipif(NODE is None, reason="needs Node")

STREAM = (
    'data: {"a": 1}\n\n: a comment\n\nevent: x\ndata: two\ndata: lines ünd\r\n\r\n'
    "id: 3\r\rdata:close\r\rdata: never ended"
)


def test_events_are_the_same_however_their_text_is_cut() -> None:
    rng = random.Random(1)
    cuts = [sorted(rng.sample(range(len(STREAM)), rng.randint(0, 20))) for _ in range(50)]
    parts = [[STREAM[a:b] for a, b in zip([0, *cut], [*cut, len(STREAM)], strict=True)] for cut in cuts]
    expression = (
        "data.map((parts) => { const events = []; const push = m.eventReader((one) => events.push(one));"
        " parts.forEach(push); return events; })"
    )
    expected = ['{"a": 1}', "two\nlines ünd", "close"]
    assert in_node("stream.mjs", expression, parts) == [expected] * len(parts)


def test_tries_come_less_often_up_to_every_half_minute() -> None:
    assert in_node("stream.mjs", "data.map(m.retryDelay)", list(range(1, 9))) == [1, 2, 4, 8, 16, 30, 30, 30]


def events(*times: float) -> list[dict[str, object]]:
    return [{"format": 1, "time": time, "replicas": []} for time in times]


def text(*times: float) -> str:
    return "".join(orjson.dumps(event).decode() + "\n" for event in events(*times))


def parsed(*texts: str) -> list[object]:
    expression = (
        "data.map((text) => { try { return m.parseRecording(text); } catch (error) { return error.message; } })"
    )
    found: list[object] = in_node("replay.mjs", expression, texts)
    return found


def test_a_recording_is_its_events_without_lines_that_were_cut_off() -> None:
    whole = text(1, 2, 3)
    cut = text(1) + text(2)[:-9] + "\n" + text(3)
    assert parsed(whole, whole[:-5], whole[:-1], f"\n{whole}\n\n", cut) == [
        events(1, 2, 3),
        events(1, 2),
        events(1, 2, 3),
        events(1, 2, 3),
        events(1, 3),
    ]


def test_what_is_no_recording_is_refused() -> None:
    broken = text(1, 2).replace('"time":2', '"time":"2"')
    newer = text(1).replace('"format":1', '"format":2')
    assert parsed("", "a,b\nc,d\n", "{}\n", broken, newer) == [
        "it has no events of /live",
        "it has no events of /live",
        "line 1 is not an event of /live that this page knows",
        "line 2 is not an event of /live that this page knows",
        "line 1 is not an event of /live that this page knows",
    ]


def test_a_replay_takes_the_time_of_the_recording_without_long_pauses() -> None:
    recorded = events(10, 11, 12.5, 400, 401, 399, 400)
    assert in_node("replay.mjs", "m.playTimes(data)", recorded) == [0, 1, 2.5, 5.5, 6.5, 6.5, 7.5]


def test_the_event_shown_is_the_last_one_whose_time_has_come() -> None:
    times = [0, 1, 2.5, 2.5, 6]
    asked = [0, 0.9, 1, 2.4, 2.5, 5.9, 6, 99]
    expected = [max(at for at, time in enumerate(times) if time <= seconds) for seconds in asked]
    assert (
        in_node("replay.mjs", "data.asked.map((at) => m.positionAt(data.times, at))", {"times": times, "asked": asked})
        == expected
    )


def test_the_history_of_a_replay_is_that_of_a_listener() -> None:
    """As if each event had been appended."""
    recorded = events(*range(0, 1200, 7), *range(500, 600), 5000.0, 5001.0)
    append = (
        "(history, one) => history.length && one.time <= history.at(-1).time"
        " ? [one] : [...history, one].filter((kept) => kept.time >= one.time - 900)"
    )
    compared = "times(m.historyAt(data, at)) === times(data.slice(0, at + 1).reduce(append, []))"
    script = (
        f"(() => {{ const append = {append}; const times = (history) => history.map((one) => one.time).join();"
        f" return data.map((_, at) => {compared}); }})()"
    )
    assert set(in_node("replay.mjs", script, recorded)) == {True}
