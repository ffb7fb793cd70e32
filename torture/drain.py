"""SIGTERM under load: open requests end whole, new work is refused at once."""

import signal
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tests.end_to_end.helpers.completions import Answer, complete, make_body, save_long_model
from tests.end_to_end.helpers.toka_process import TokaProcess, running_toka, wait_for
from torture.rows import Row, show_rows

PART = "drain"
CONTEXT = 32_768
NUM_REQUESTS = 16
DRAIN_S = 20
TARGET_S = 10.0
"""How long each request should take."""
REFUSAL_LIMIT_S = 0.2
FLAGS = (
    "dtype=float32",
    f"kv_cache_num_tokens={NUM_REQUESTS * CONTEXT + 1024}",
    "max_seqs_per_forward=32",
    f"drain_seconds={DRAIN_S}",
)


def run_drain() -> list[Row]:
    with tempfile.TemporaryDirectory() as directory:
        save_long_model(Path(directory), CONTEXT)
        with running_toka(f"model={directory}", *FLAGS) as toka:
            return show_rows(_rows(toka))


def _rows(toka: TokaProcess) -> list[Row]:
    num_tokens, expected, before_s = _calibrate(toka)
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        began_s = time.monotonic()
        asked = _submit(pool, toka, num_tokens)
        wait_for(lambda: toka.gauge("toka_requests_running") == NUM_REQUESTS, 20)
        time.sleep(0.5)
        num_finished = sum(future.done() for future in asked)
        toka.process.send_signal(signal.SIGTERM)
        refusals, refused_s = _ask_for_more(toka)
        answers = [future.result() for future in asked]
        took_s = time.monotonic() - began_s
    exit_code = toka.process.wait(DRAIN_S + 10)
    num_whole = sum(
        answer.status == 200 and answer.texts == other.texts for answer, other in zip(answers, expected, strict=True)
    )
    refused = {f"{answer.status} {answer.error_code}, Retry-After: {answer.retry_after}" for answer, _ in refusals}
    longest_s = max(seconds for _, seconds in refusals)
    are_right = all(
        answer.status == 503 and int(answer.retry_after or 0) > 0 and answer.error_code == "server_stopping"
        for answer, _ in refusals
    )
    limit = f"{REFUSAL_LIMIT_S:g} s"
    what = f"SIGTERM under {NUM_REQUESTS} requests of {num_tokens} tokens ({before_s:.1f} s)"
    return [
        Row(PART, f"{what}: whole answers ({num_finished} before it)", str(num_whole), "16", num_whole == NUM_REQUESTS),
        Row(
            PART, f"{what}: time of the requests", f"{took_s:.1f} s", "more than 5 s", took_s > 5 and num_finished == 0
        ),
        Row(PART, "from SIGTERM to the first refusal", f"{refused_s:.3f} s", limit, refused_s <= REFUSAL_LIMIT_S),
        Row(
            PART,
            f"longest of {len(refusals)} refusals of new work",
            f"{longest_s:.3f} s",
            limit,
            longest_s <= REFUSAL_LIMIT_S,
        ),
        Row(PART, "how new work was refused", "; ".join(sorted(refused)), "503 with Retry-After", are_right),
        Row(PART, "exit code", str(exit_code), "0", exit_code == 0),
    ]


def _calibrate(toka: TokaProcess) -> tuple[int, list[Answer], float]:
    """Tokens per request for which all requests together take about TARGET_S; the answers; their seconds."""
    num_tokens = 500
    for _ in range(6):
        answers, seconds = _timed(toka, num_tokens)
        if 0.8 * TARGET_S <= seconds <= 1.4 * TARGET_S:
            return num_tokens, answers, seconds
        num_tokens = min(CONTEXT - 100, int(num_tokens * TARGET_S / seconds))
    raise AssertionError(
        f"{num_tokens} tokens took {seconds:.1f} s, and other numbers no time near {TARGET_S} s either"
    )


def _timed(toka: TokaProcess, num_tokens: int) -> tuple[list[Answer], float]:
    """The answers, and the seconds until the last one."""
    began_s = time.monotonic()
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        asked = _submit(pool, toka, num_tokens)
    answers = [future.result() for future in asked]
    assert all(answer.status == 200 for answer in answers), [answer.body for answer in answers][:3]
    return answers, time.monotonic() - began_s


def _submit(pool: ThreadPoolExecutor, toka: TokaProcess, num_tokens: int) -> list[Future[Answer]]:
    bodies = [make_body(number, max_tokens=num_tokens) for number in range(NUM_REQUESTS)]
    return [pool.submit(complete, toka.port, body) for body in bodies]


def _ask_for_more(toka: TokaProcess) -> tuple[list[tuple[Answer, float]], float]:
    """Asks for new work over new connections for two seconds.

    -> each refusal and its seconds, and the time from the start to the first refusal. What the server accepted before
    the signal reached it does not count."""
    began_s = time.monotonic()
    refusals: list[tuple[Answer, float]] = []
    refused_s = float("inf")
    while (asked_s := time.monotonic()) < began_s + 2:
        answer = complete(toka.port, make_body(999, max_tokens=1))
        now_s = time.monotonic()
        if answer.status != 200:
            refused_s = min(refused_s, now_s - began_s)
            refusals.append((answer, now_s - asked_s))
        elif refusals:
            raise AssertionError("new work was accepted after a refusal")
        time.sleep(0.01)
    assert refusals, "all new work was accepted"
    return refusals, refused_s
