"""How many requests one round accepts."""

import pytest

from tokasaurus.manager.planning.intake import IDLE_SECONDS, INTAKE_SHARE, LEAST_MESSAGES, Intake


@pytest.mark.parametrize("message_seconds", [2e-5, 1e-3])
@pytest.mark.parametrize("seconds_left", [0.0, 0.001, 0.02, 1.0])
def test_accepted_messages_take_a_share_of_the_time_left(message_seconds: float, seconds_left: float) -> None:
    intake = Intake()
    for num_messages in (1, 7, 300) * 30:
        intake.note(num_messages, num_messages * message_seconds)
    num = intake.most_messages(seconds_left, is_idle=False)
    assert num >= LEAST_MESSAGES
    if num > LEAST_MESSAGES:
        assert num * message_seconds == pytest.approx(INTAKE_SHARE * seconds_left, rel=0.01, abs=2 * message_seconds)
    else:
        assert INTAKE_SHARE * seconds_left < (LEAST_MESSAGES + 1) * message_seconds


def test_an_idle_engine_accepts_some_milliseconds_of_requests() -> None:
    intake = Intake()
    for _ in range(100):
        intake.note(10, 0.001)
    assert intake.most_messages(0.0, is_idle=True) == pytest.approx(IDLE_SECONDS / 1e-4, abs=1)


def test_rounds_without_messages_and_times_of_zero_teach_nothing_absurd() -> None:
    intake = Intake()
    before = intake.most_messages(1.0, is_idle=False)
    intake.note(0, 5.0)
    assert intake.most_messages(1.0, is_idle=False) == before
    for _ in range(1000):
        intake.note(5, 0.0)
    assert before < intake.most_messages(1.0, is_idle=False) < 1_000_000
