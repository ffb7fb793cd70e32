"""When processes that died are started again."""

from tokasaurus.processes.restarts import HEALTHY_SECONDS, MAX_PAUSE_SECONDS, RestartPolicy


def test_pauses_grow_until_restarts_end() -> None:
    policy = RestartPolicy(max_restarts=8)
    assert [policy.note_failure(float(n)) for n in range(9)] == [0, 1, 2, 4, 8, 16, 30, MAX_PAUSE_SECONDS, None]


def test_a_healthy_time_forgets_earlier_failures() -> None:
    policy = RestartPolicy(max_restarts=2)
    now_s = 100.0
    for _ in range(10):
        assert policy.note_failure(now_s) == 0
        policy.note_ready(now_s + 5)
        now_s += 5 + HEALTHY_SECONDS


def test_a_short_time_between_start_and_failure_forgets_nothing() -> None:
    policy = RestartPolicy(max_restarts=2)
    pauses = []
    for n in range(3):
        pauses.append(policy.note_failure(100.0 * n))
        policy.note_ready(100.0 * n + 100 - 0.9 * HEALTHY_SECONDS)
    assert pauses == [0, 1, None]


def test_without_restarts_the_first_failure_is_final() -> None:
    assert RestartPolicy(max_restarts=0).note_failure(1.0) is None
