"""The board of pipeline stages, between processes."""

import multiprocessing

import pytest

from tokasaurus.messages import stages
from tokasaurus.messages.stages import StageBoard, StageTotals


def write_if_watched(board: StageBoard, stage: int) -> None:
    """Process entry."""
    board.write(stage, StageTotals(7, 1.25, 0.5 if board.is_watched else 0.0))


@pytest.mark.parametrize("is_watched", [False, True])
def test_what_one_process_writes_another_reads(is_watched: bool) -> None:
    board = StageBoard(3)
    if is_watched:
        assert board.look() == (StageTotals(),) * 3
    process = multiprocessing.get_context("spawn").Process(target=write_if_watched, args=(board, 1))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert board.look() == (StageTotals(), StageTotals(7, 1.25, 0.5 * is_watched), StageTotals())


def test_stages_are_watched_for_a_few_seconds_after_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    board, now_s = StageBoard(1), 100.0
    monkeypatch.setattr(stages.time, "monotonic", lambda: now_s)
    assert not board.is_watched
    board.look()
    now_s += 0.9 * stages.WATCHED_SECONDS
    assert board.is_watched
    now_s += 0.2 * stages.WATCHED_SECONDS
    assert not board.is_watched
