"""What has become of calls, by how they ended."""

import asyncio

import pytest

from tokasaurus.messages.status import ServerTotals
from tokasaurus.server.engine_client.call_counts import CallCounts


@pytest.mark.parametrize(
    ("is_whole", "has_error", "error", "counted"),
    [
        (True, False, None, "answered"),
        (False, False, None, "aborted"),  # a stream whose reader stopped early
        (False, False, asyncio.CancelledError(), "aborted"),
        (False, False, GeneratorExit(), "aborted"),
        (True, False, asyncio.CancelledError(), "answered"),  # its last tokens were there
        (False, True, None, "failed"),
        (False, True, asyncio.CancelledError(), "failed"),
        (False, False, RuntimeError("engine died"), "failed"),
    ],
)
def test_a_call_counts_once_as_its_caller_saw_it(
    is_whole: bool, has_error: bool, error: BaseException | None, counted: str
) -> None:
    counts = CallCounts(num_open=2)
    counts.note_end(is_whole, has_error, error, 5, 7)
    assert counts.num_open == 1
    by_name = {"answered": counts.answered, "aborted": counts.aborted, "failed": counts.failed}
    assert by_name == {name: int(name == counted) for name in by_name}
    assert counts.totals() == ServerTotals(counts.answered, counts.aborted, counts.failed, 5, 7)
