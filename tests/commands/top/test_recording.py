"""Recordings: what is read of whole, cut and damaged files, and where a replay is."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.commands.top.helpers.scripted_samples import START_S, line, sample
from tokasaurus.commands.top.recording import Player, Recording, RecordingError, positions_of


def write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def test_what_is_recorded_is_read_again(tmp_path: Path) -> None:
    lines = [line(sample(second)).rstrip() for second in range(5)]
    recording = Recording(write(tmp_path / "run.jsonl", b"\n".join(lines)))
    assert [recording.line(index) for index in range(len(recording.times))] == lines
    assert [recording.sample(index)["time"] for index in (4, 0)] == [START_S + 4, START_S]
    assert recording.num_left_out == 0


@pytest.mark.parametrize("num_cut", [1, 2, 100, 1000])
def test_a_cut_last_line_is_left_out_unless_only_its_end_is_cut(tmp_path: Path, num_cut: int) -> None:
    content = b"".join(line(sample(second)) for second in range(3))
    recording = Recording(write(tmp_path / "cut.jsonl", content[:-num_cut]))
    assert (len(recording.times), recording.num_left_out) == (3 if num_cut == 1 else 2, 0)


def test_damaged_lines_between_others_are_counted(tmp_path: Path) -> None:
    whole = [line(sample(second)) for second in range(3)]
    content = whole[0] + whole[1][:50] + b"\n" + b"\n" + whole[2]
    recording = Recording(write(tmp_path / "damaged.jsonl", content))
    assert (list(recording.times), recording.num_left_out) == ([START_S, START_S + 2], 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no recording: the file is empty"),
        (b"\x00\xff" * 100, "no recording: line 1 is no JSON"),
        (b'{"a": 1}\n', 'no recording: line 1 is no sample: it has no "format"'),
        (line(sample(0)) + line({**sample(1), "format": 2}), "line 2: format 2 of samples is not known"),
    ],
)
def test_files_that_cannot_be_replayed_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(RecordingError, match=message):
        Recording(write(tmp_path / "wrong.jsonl", content))


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"replay=.*/none: No such file or directory"):
        Recording(str(tmp_path / "none"))


def test_long_gaps_are_shortened_and_a_clock_set_back_passes_no_time() -> None:
    assert positions_of([10, 11, 13, 1000, 990, 991]) == [0, 1, 3, 8, 8, 9]


@given(
    st.lists(st.one_of(st.floats(0, 3), st.sampled_from([-10.0, 10.0])), max_size=20), st.sampled_from([0.5, 1.0, 8.0])
)
def test_a_replay_shows_the_sample_of_its_position(tmp_path_factory, moves: list[float], speed: float) -> None:
    """Whether it came there in small steps or by jumps; jumps are from the sample that is shown."""
    content = b"".join(line(sample(second)) for second in range(31))
    path = write(tmp_path_factory.mktemp("replay") / "run.jsonl", content)
    recording = Recording(path)
    player = Player(recording, speed)
    position = 0.0
    for move in moves:
        if abs(move) == 10.0:
            player.jump(move)
            position = min(max(int(position) + move, 0.0), 30.0)
        else:
            player.pass_time(move)
            position = min(position + move * speed, 30.0)
        latest = player.history.latest
        assert latest is not None
        assert (latest["time"], player.position) == (START_S + int(position), int(position))
        assert [one["time"] - START_S for one in player.history.samples] == list(range(int(position) + 1))
        wait_s = player.seconds_to_next()
        assert wait_s == (None if position == 30 else pytest.approx((int(position) + 1 - position) / speed))
