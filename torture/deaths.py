"""A worker or manager that is killed or stopped, many times, under load: the port stays open and no answer is lost."""

import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.end_to_end.helpers.completions import complete, get_status, make_body, random_ids, save_long_model
from tests.end_to_end.helpers.toka_process import TokaProcess, running_toka, wait_for
from torture.helpers.engine_load import LARGEST_UPDATE_BYTES, MAX_TOP, EngineLoad
from torture.helpers.health_watch import HealthWatch, watched_health
from torture.rows import Row, show_rows

PART = "deaths"
MAX_RESTART_S = 40
"""Pauses after repeated kills included."""
CONTEXT = 16384
FLAGS = ("dtype=float32", "kv_cache_num_tokens=65536", "max_tokens_per_forward=2048", "max_seqs_per_forward=8")
PARTS = ("toka-worker-0", "toka-manager")
HEALTHY_S = 10.0
"""A replica that was ready for this long is restarted without a pause; others wait 1, 2, 4, … s."""
HEALTH_LIMIT_S = 1.0
MAX_NEW_FDS = 5
RESTART_TIMEOUT_S = 120.0

NUM_REQUESTS = 16
STOP_TOKENS = 800
WATCHDOG_S = 10
TOLD_LIMIT_S = WATCHDOG_S + 5.0
"""From the stop until /ready says so: the launcher and the manager look once a second."""
LONG_PROMPTS = (8000, 9000, 10000)
"""Tokens; torch's attention takes seconds for each."""
ANSWER_LIMIT_S = 15.0
"""From then on until every client has its answer or an error."""


def run_deaths(num_kills: int = 20, seed: int = 1) -> list[Row]:
    """kill -9 of the worker and of the manager, num_kills times each.

    The kills come in groups of three, to save the time that a replica must live to count as healthy: one of a replica
    that has been ready for ten seconds, one of a replica that has just become ready, one of a replica that starts."""
    rng = random.Random(seed)
    titles = list(PARTS) * num_kills
    rng.shuffle(titles)
    restart_s: list[float] = []
    with _server("max_restarts=1000", f"max_topk_logprobs={MAX_TOP}") as toka:
        load = EngineLoad(toka.port)
        server_pid = toka.children()["toka-server"]
        pids = {"server": server_pid, "launcher": toka.process.pid}
        wait_for(lambda: toka.gauge("toka_kv_blocks_used") == 0, 30)
        fds_before = {name: _num_fds(pid) for name, pid in pids.items()}
        with watched_health(toka.port) as health, load.running():
            for index, title in enumerate(titles):
                _wait_for_the_moment(toka, index, rng)
                pid = toka.children()[title]
                load.num_deaths += 1
                began_s = time.monotonic()
                os.kill(pid, signal.SIGKILL)
                wait_for(lambda pid=pid: pid not in toka.children().values(), 20)  # type: ignore[misc]
                if index % 3 != 1:  # the next one is killed while it starts
                    _wait_until_ready(toka)
                    restart_s.append(time.monotonic() - began_s)
                if (index + 1) % 10 == 0:
                    print(f"{PART}: {index + 1} of {len(titles)} kills", flush=True)
        wait_for(lambda: get_status(toka.port, "/ready") == 200, RESTART_TIMEOUT_S)
        rows = [
            *_load_rows(load, f"{num_kills} kills of the worker and {num_kills} of the manager"),
            *_health_rows(health),
            _restart_row(restart_s),
            *_leftover_rows(toka, len(titles), server_pid, fds_before, pids),
        ]
    return show_rows(rows)


def _restart_row(seconds: list[float]) -> Row:
    limit = f"{MAX_RESTART_S} s"
    return Row(PART, "restart, from the kill until /ready", _spread(seconds), limit, max(seconds) < MAX_RESTART_S)


def run_stops() -> list[Row]:
    """SIGSTOP of the worker and of the manager: the watchdog finds out. A long step is not taken for a hang."""
    rows = []
    with _server(f"watchdog_seconds={WATCHDOG_S}", "max_restarts=1000", "max_seqs_per_forward=16") as toka:
        expected = _ask_all(toka)
        for title in PARTS:
            rows += show_rows(_stop_one(toka, title, [future.result() for future in expected]))
    return rows + show_rows(_long_step_rows())


@contextmanager
def _server(*flags: str) -> Iterator[TokaProcess]:
    with tempfile.TemporaryDirectory() as directory:
        save_long_model(Path(directory), CONTEXT)
        own = {flag.split("=")[0] for flag in flags}
        common = [flag for flag in FLAGS if flag.split("=")[0] not in own]
        with running_toka(f"model={directory}", *common, *flags) as toka:
            yield toka


def _wait_for_the_moment(toka: TokaProcess, index: int, rng: random.Random) -> None:
    """Until a random time after the state of the replica that `run_deaths` describes."""
    if index % 3 == 0:
        time.sleep(HEALTHY_S + rng.uniform(0.5, 2.0))
    elif index % 3 == 1:
        time.sleep(rng.uniform(0.0, 3.0))
    else:
        wait_for(lambda: set(PARTS) <= set(toka.children()), RESTART_TIMEOUT_S)
        time.sleep(rng.uniform(0.0, 1.5))


def _wait_until_ready(toka: TokaProcess) -> None:
    wait_for(lambda: set(PARTS) <= set(toka.children()), RESTART_TIMEOUT_S)
    wait_for(lambda: get_status(toka.port, "/ready") == 200, RESTART_TIMEOUT_S)


def _load_rows(load: EngineLoad, what: str) -> list[Row]:
    for fault in load.faults[:20]:
        print(f"{PART}: {fault}")
    outcomes = ", ".join(f"{kind} {name} {count}" for (kind, name), count in sorted(load.outcomes.items()))
    survived = {kind: load.count("right after a death", kind) for kind in ("whole", "late stream", "large")}
    num_told = load.count("engine_died")
    return [
        Row(PART, f"requests under {what}: {outcomes}", f"{len(load.faults)} wrong", "0", not load.faults),
        Row(
            PART,
            f"requests that outlived a death (large: updates of up to {LARGEST_UPDATE_BYTES / 1e6:.1f} MB)",
            ", ".join(f"{kind} {count}" for kind, count in survived.items()),
            "at least 1 each",
            min(survived.values()) > 0,
        ),
        Row(PART, "begun streams that ended with engine_died", str(num_told), "at least 1", num_told > 0),
    ]


def _health_rows(health: HealthWatch) -> list[Row]:
    for fault in health.faults[:5]:
        print(f"{PART}: /health: {fault}")
    asked = f"/health over {health.num_asked} new connections"
    longest = f"{health.longest_s * 1000:.0f} ms"
    limit = f"{HEALTH_LIMIT_S * 1000:.0f} ms"
    return [
        Row(PART, f"{asked}: refused or failed", str(len(health.faults)), "0", not health.faults),
        Row(PART, f"{asked}: longest", longest, limit, health.longest_s <= HEALTH_LIMIT_S),
    ]


def _leftover_rows(
    toka: TokaProcess, num_kills: int, server_pid: int, fds_before: dict[str, int], pids: dict[str, int]
) -> list[Row]:
    """What a server must not keep from its engine's deaths."""
    deadline_s = time.monotonic() + 10
    while toka.gauge("toka_kv_blocks_used") > 0 and time.monotonic() < deadline_s:
        time.sleep(0.2)
    used, restarts = toka.gauge("toka_kv_blocks_used"), toka.gauge("toka_engine_restarts_total")
    is_same = toka.children().get("toka-server") == server_pid
    rows = [
        Row(PART, "KV blocks in use at the end", f"{used:g}", "0", used == 0),
        Row(PART, "toka_engine_restarts_total", f"{restarts:g}", str(num_kills), restarts == num_kills),
        Row(PART, "process id of the server", "the same" if is_same else "another", "the same", is_same),
    ]
    for name, pid in pids.items():
        before, after = fds_before[name], _num_fds(pid)
        limit = f"{before + MAX_NEW_FDS}"
        row = Row(PART, f"file descriptors of the {name} ({before} before)", f"{after}", limit, after <= int(limit))
        rows.append(row)
    return rows


def _ask_all(toka: TokaProcess) -> list[Future[tuple[list[str], float]]]:
    """Runs all requests at once -> each one's texts and when it was answered. Waits for all."""
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        return [pool.submit(_timed_texts, toka.port, number) for number in range(NUM_REQUESTS)]


def _timed_texts(port: int, number: int) -> tuple[list[str], float]:
    """The texts, or the error's code; and when they came, by time.monotonic()."""
    answer = complete(port, make_body(number, max_tokens=STOP_TOKENS))
    return (answer.texts if answer.status == 200 else [answer.error_code]), time.monotonic()


def _stop_one(toka: TokaProcess, title: str, expected: list[tuple[list[str], float]]) -> list[Row]:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(_ask_all, toka)
        wait_for(lambda: toka.gauge("toka_requests_running") == NUM_REQUESTS, 20)
        os.kill(toka.children()[title], signal.SIGSTOP)
        stopped_s = time.monotonic()
        wait_for(lambda: get_status(toka.port, "/ready") == 503, TOLD_LIMIT_S + 30)
        told_s = time.monotonic()
        wait_for(lambda: get_status(toka.port, "/ready") == 200, RESTART_TIMEOUT_S)
        ready_s = time.monotonic()
        answers = [future.result() for future in asked.result()]
    num_right = sum(texts == right for (texts, _), (right, _) in zip(answers, expected, strict=True))
    num_before = sum(answered_s < told_s for _, answered_s in answers)
    hang_s, answer_s = told_s - stopped_s, max(answered_s for _, answered_s in answers) - told_s
    what = f"SIGSTOP of {title} under {NUM_REQUESTS} requests"
    limit = f"{TOLD_LIMIT_S:g} s"
    return [
        Row(PART, f"{what}: until /ready is 503", f"{hang_s:.1f} s", limit, hang_s <= TOLD_LIMIT_S),
        Row(
            PART,
            f"{what}: from then until /ready is 200",
            f"{ready_s - told_s:.1f} s",
            f"{MAX_RESTART_S} s",
            ready_s - told_s < MAX_RESTART_S,
        ),
        Row(
            PART,
            f"{what}: from then until the last answer ({num_before} came before)",
            f"{answer_s:.1f} s",
            f"{ANSWER_LIMIT_S:g} s",
            0 < answer_s <= ANSWER_LIMIT_S,
        ),
        Row(PART, f"{what}: right texts", str(num_right), str(NUM_REQUESTS), num_right == NUM_REQUESTS),
    ]


def _long_step_rows() -> list[Row]:
    """Prompts that are prefilled in one step of more than the watchdog's second each, after short steps."""
    flags = ("cpu_isa=torch", "watchdog_seconds=1", f"max_tokens_per_forward={CONTEXT}")
    steps_s, statuses = [], set()
    with _server(*flags) as toka:
        for number, length in enumerate([200, 1000, *LONG_PROMPTS]):
            before_s = toka.gauge("toka_forward_seconds_total")
            answer = complete(toka.port, make_body(number, prompt=random_ids(number, length), max_tokens=1))
            statuses.add(answer.status)
            if length in LONG_PROMPTS:
                steps_s.append(toka.gauge("toka_forward_seconds_total") - before_s)
        restarts = toka.gauge("toka_engine_restarts_total")
        wrong = [line for line in toka.lines if "watchdog_seconds" in line]
    for line in wrong[:5]:
        print(f"{PART}: {line}")
    what = "a step longer than watchdog_seconds=1"
    are_answered = statuses == {200}
    return [
        Row(PART, f"{what}: shortest of {len(steps_s)}", f"{min(steps_s):.1f} s", "more than 1 s", min(steps_s) > 1),
        Row(PART, f"{what}: restarts", f"{restarts:g}", "0", restarts == 0),
        Row(PART, f"{what}: statuses of the answers", str(statuses), "{200}", are_answered),
    ]


def _num_fds(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _spread(seconds: list[float]) -> str:
    return f"median {statistics.median(seconds):.1f} s, longest {max(seconds):.1f} s"
