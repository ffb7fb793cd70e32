"""kill -9 of a process of one replica of two, under whole requests and streams, compared with an undisturbed run."""

import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import psutil

from tests.end_to_end.helpers.completions import Streamed, complete, make_body, stream
from tests.end_to_end.helpers.toka_process import TokaProcess, wait_for

NUM_WHOLE = NUM_STREAMS = 32
"""Requests in flight at each kill."""
MAX_TOKENS = 400
RESTART_TIMEOUT_S = 120.0
TITLES = ("toka-manager", "toka-worker")
"""How the names of the processes of replicas begin."""


@dataclass
class KillReport:
    """What one kill did. The fault lists are empty if all is well."""

    title: str
    """Of the killed process."""
    faults: list[str] = field(default_factory=list)
    num_whole_streams: int = 0
    num_ended_streams: int = 0
    """Streams that ended with an error event."""
    ended_s: float = 0.0
    """From the kill until all processes of its replica had ended."""
    told_s: float = 0.0
    """From the kill until the last of those streams had its error event."""
    back_s: float = 0.0
    """From the kill until both replicas were up."""


def learn_texts(port: int, max_tokens: int = MAX_TOKENS) -> list[str]:
    """The texts of all requests on an undisturbed server."""
    with ThreadPoolExecutor(NUM_WHOLE) as pool:
        bodies = [make_body(number, max_tokens=max_tokens) for number in range(NUM_WHOLE + NUM_STREAMS)]
        return [answer.texts[0] for answer in pool.map(lambda body: complete(port, body), bodies)]


def engine_processes(toka: TokaProcess) -> list[psutil.Process]:
    """The managers and workers of all replicas."""
    children = psutil.Process(toka.process.pid).children()
    return [child for child in children if child.name().startswith(TITLES)]


def replica_of(title: str) -> str:
    """title: of a manager or worker, such as toka-worker1-0 -> such as "1"."""
    return title.removeprefix("toka-manager").removeprefix("toka-worker").partition("-")[0]


def kill_once(
    toka: TokaProcess,
    expected: list[str],
    rng: random.Random,
    max_tokens: int = MAX_TOKENS,
    titles: tuple[str, ...] = TITLES,
) -> KillReport:
    """Send all requests, kill one process at a random moment; wait until all is answered and both replicas are up.

    titles: how the victim's name may begin.
    """
    num_deaths_before = int(toka.gauge("toka_engine_restarts_total"))
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(NUM_WHOLE + NUM_STREAMS) as pool:

        def read_stream(number: int) -> tuple[Streamed, float]:
            streamed = stream(toka.port, make_body(number, max_tokens=max_tokens), on_first_event=begun.release)
            return streamed, time.monotonic()

        streams = {number: pool.submit(read_stream, number) for number in range(NUM_WHOLE, NUM_WHOLE + NUM_STREAMS)}
        wholes = {
            number: pool.submit(complete, toka.port, make_body(number, max_tokens=max_tokens))
            for number in range(NUM_WHOLE)
        }
        for _ in range(rng.randint(1, NUM_STREAMS)):
            assert begun.acquire(timeout=60)
        victim = rng.choice([process for process in engine_processes(toka) if process.name().startswith(titles)])
        report = KillReport(victim.name())
        killed_s = time.monotonic()
        replica = replica_of(victim.name())
        processes = [process for process in engine_processes(toka) if replica_of(process.name()) == replica]
        os.kill(victim.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(processes, timeout=RESTART_TIMEOUT_S)
        report.ended_s = time.monotonic() - killed_s
        report.faults += [f"{process.name()} did not end" for process in alive]
        for number, whole in wholes.items():
            answer = whole.result()
            if answer.status != 200 or answer.texts[0] != expected[number]:
                report.faults.append(f"request {number}: {answer.status} {answer.error_code}")
        for number, future in streams.items():
            streamed, ended_s = future.result()
            if streamed.is_done and streamed.text == expected[number] and not streamed.error_codes:
                report.num_whole_streams += 1
            elif streamed.error_codes == ["engine_died"] and expected[number].startswith(streamed.text):
                report.num_ended_streams += 1
                report.told_s = max(report.told_s, ended_s - killed_s)
            else:
                report.faults.append(
                    f"stream {number}: {streamed.status} {streamed.error_codes} {streamed.text[:40]!r}"
                )
    wait_for(lambda: toka.gauge("toka_engine_restarts_total") > num_deaths_before, RESTART_TIMEOUT_S)
    wait_for(lambda: toka.gauge("toka_replicas_up") == 2, RESTART_TIMEOUT_S)
    report.back_s = time.monotonic() - killed_s
    return report
