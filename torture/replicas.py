"""kill -9 of a process of one replica of two, many times, each time under 64 requests, half of them streamed."""

import random
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from tests.end_to_end.helpers.completions import save_long_model
from tests.end_to_end.helpers.replica_kills import KillReport, engine_processes, kill_once, learn_texts
from tests.end_to_end.helpers.toka_process import running_toka
from tests.helpers.leftovers import watched_leftovers
from tests.helpers.processes import is_running
from torture.rows import Row, show_rows

PART = "replicas"
FLAGS = ("dtype=float32", "kv_cache_num_tokens=65536", "max_tokens_per_forward=512", "max_seqs_per_forward=32")
TOLD_LIMIT_S = 1.0
BACK_LIMIT_S = 40.0
"""Pauses after repeated kills included."""


def run_replicas(num_kills: int = 20, seed: int = 1) -> list[Row]:
    """Replicas of one worker each, of two tensor-parallel ranks each, and of two pipeline stages each."""
    with tempfile.TemporaryDirectory() as directory:
        save_long_model(Path(directory), 8192)
        return [
            *_run_kills(directory, ("dp_size=2",), num_kills, seed, max_tokens=400),
            *_run_kills(directory, ("dp_size=2", "tp_size=2"), num_kills, seed, max_tokens=200),
            *_run_kills(directory, ("dp_size=2", "pp_size=2"), num_kills, seed, max_tokens=200),
        ]


def _run_kills(directory: str, parallel: tuple[str, ...], num_kills: int, seed: int, max_tokens: int) -> list[Row]:
    rng = random.Random(seed)
    what = " ".join(parallel)
    with running_toka(f"model={directory}", *FLAGS) as toka:
        expected = learn_texts(toka.port, max_tokens)
    with watched_leftovers() as leftovers:
        with running_toka(f"model={directory}", *FLAGS, *parallel, "max_restarts=1000") as toka:
            kinds = {_kind(process.name()) for process in engine_processes(toka)}
            reports = []
            for _ in range(num_kills):
                reports.append(report := kill_once(toka, expected, rng, max_tokens))
                print(f"{PART}: {what}: {report}", flush=True)
            is_same_afterwards = learn_texts(toka.port, max_tokens) == expected
            children = psutil.Process(toka.process.pid).children(recursive=True)
            exit_code = toka.stop()
            time.sleep(1)
            left = [child.name() for child in children if is_running(child.pid)]
        left += leftovers.found(toka.port)
    return show_rows([*_report_rows(what, kinds, reports), *_end_rows(what, is_same_afterwards, exit_code, left)])


def _report_rows(name: str, kinds: set[str], reports: list[KillReport]) -> list[Row]:
    kills = Counter(_kind(report.title) for report in reports)
    what = ", ".join(f"{count} of {title}" for title, count in sorted(kills.items()))
    faults = [fault for report in reports for fault in report.faults]
    ended = sum(report.num_ended_streams for report in reports)
    whole = sum(report.num_whole_streams for report in reports)
    ended_s = max(report.ended_s for report in reports)
    told_s = max(report.told_s for report in reports)
    back_s = max(report.back_s for report in reports)
    wrong = str(len(faults)) + "".join(f"; {fault}" for fault in faults[:3])
    streams = f"{whole} whole, {ended} ended with engine_died"
    return [
        Row(PART, f"{name}: kills ({what}): wrong or missing answers", wrong, "0", not faults),
        Row(PART, f"{name}: never killed", ", ".join(kinds - kills.keys()) or "none", "none", kinds == kills.keys()),
        Row(PART, f"{name}: its replica's processes ended, from the kill", f"{ended_s:.2f} s", "1 s", ended_s < 1),
        Row(PART, f"{name}: streams", streams, "both kinds", min(whole, ended) > 0),
        Row(PART, f"{name}: a stream's error event, from the kill", f"{told_s:.2f} s", "1 s", told_s < TOLD_LIMIT_S),
        Row(PART, f"{name}: both replicas up, from the kill", f"{back_s:.1f} s", "40 s", back_s < BACK_LIMIT_S),
    ]


def _kind(title: str) -> str:
    """title: of a process, such as toka-worker1-0 -> such as "rank 0"."""
    return "manager" if "manager" in title else f"rank {title.rpartition('-')[2]}"


def _end_rows(name: str, is_same_afterwards: bool, exit_code: int, left: list[str]) -> list[Row]:
    texts = "the same" if is_same_afterwards else "others"
    remains = ", ".join(left) or "none"
    return [
        Row(PART, f"{name}: texts afterwards", texts, "the same", is_same_afterwards),
        Row(PART, f"{name}: exit code after SIGTERM", str(exit_code), "0", exit_code == 0),
        Row(PART, f"{name}: processes, port, shared memory, files left 1 s after the end", remains, "none", not left),
    ]
