"""What a batch in progress tells of the tokens that it has, and will have."""

import dataclasses

import pytest

from tests.server.helpers.finished_sequences import make_request
from tokasaurus.messages.generation import SequenceDelta, SequenceProgress
from tokasaurus.messages.status import StepCost
from tokasaurus.server.engine_client.collectors import Results
from tokasaurus.server.engine_client.pending import JobPace, PendingRequest
from tokasaurus.server.jobs.objects import batch_progress
from tokasaurus.server.jobs.store.records import BatchRecord


def record(num_completed: int = 0, output_tokens: int = 0, num_failed: int = 0) -> BatchRecord:
    batch = BatchRecord(1, "batch_1", "/v1/completions", "file_1", "24h", 0, 0, "in_progress", num_lines=100)
    return dataclasses.replace(batch, num_completed=num_completed, num_failed=num_failed, output_tokens=output_tokens)


async def pending(request_id: str, *reports: tuple[int, int | None] | None, finished: int = 0) -> PendingRequest:
    """A request in the engine. reports: of each of its sequences, (tokens, expected tokens); None: it has not begun.
    finished: tokens of one sequence more, which has ended."""
    request = dataclasses.replace(make_request(num_sequences=len(reports) + (finished > 0)), request_id=request_id)
    found = PendingRequest(request, Results([request]), 0)
    for index, report in enumerate(reports):
        if report is not None:
            found.progress[index] = SequenceProgress(request_id, index, *report)
    if finished:
        found.progress[len(reports)] = SequenceProgress(request_id, len(reports), finished - 2, finished + 9)
        found.note_end(SequenceDelta(request_id, len(reports), [7] * finished, None, "stop", 0, 0, 0, 0))
    return found


@pytest.mark.anyio
async def test_lines_that_no_prediction_knows_are_expected_to_be_like_the_others() -> None:
    pace = JobPace(num_lines=100)
    progress = batch_progress(record(), pace)
    assert (progress.generated_tokens, progress.expected_tokens, progress.seconds_left) == (0, None, None)
    for one in (await pending("cmpl-a-0", (10, 40)), await pending("cmpl-b-0", (5, 20))):
        pace.begin_line()
        pace.add(one, 100.0)
    pace.look(101.0, StepCost())
    progress = batch_progress(record(), pace)
    assert (progress.generated_tokens, progress.expected_tokens) == (15, 60 + 98 * 30)
    assert progress.seconds_left is not None
    low, high = progress.seconds_left
    assert low < (45 + 98 * 30) / 15 < high, "15 tokens took a second"


@pytest.mark.anyio
async def test_a_request_that_runs_again_has_no_tokens() -> None:
    samples = await pending("cmpl-a-0", (10, 20), finished=6)
    assert samples.restart()
    assert samples.num_generated_tokens == 0
