"""kill -9 of a process of one replica of two, many times, each time under 64 requests, half of them streamed."""

import random
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from tests.end_to_end.helpers.toka_process import running_toka
from tests.helpers.processes import is_running
from tests.torture.helpers.completions import save_long_model
from tests.torture.helpers.replica_kills import KillReport, kill_once, learn_texts
from tests.torture.helpers.row_printer import show_rows
from tests.torture.helpers.rows import Row

PART = "replicas"
FLAGS = ("dtype=float32", "kv_cache_num_tokens=65536", "max_tokens_per_forward=512", "max_seqs_per_forward=32")
TOLD_LIMIT_S = 1.0
BACK_LIMIT_S = 40.0
"""Pauses after repeated kills included."""


def run_replicas(num_kills: int = 20, seed: int = 1) -> list[Row]:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        save_long_model(Path(directory), 8192)
        with running_toka(f"model={directory}", *FLAGS) as toka:
            expected = learn_texts(toka.port)
        with running_toka(f"model={directory}", *FLAGS, "dp_size=2", "max_restarts=1000") as toka:
            reports = [kill_once(toka, expected, rng) for _ in range(num_kills)]
            is_same_afterwards = learn_texts(toka.port) == expected
            children = psutil.Process(toka.process.pid).children(recursive=True)
            exit_code = toka.stop()
            time.sleep(1)
            left = [child.name() for child in children if is_running(child.pid)]
    return show_rows([*_report_rows(reports), *_end_rows(is_same_afterwards, exit_code, left)])


def _report_rows(reports: list[KillReport]) -> list[Row]:
    kills = Counter("manager" if "manager" in report.title else "worker" for report in reports)
    what = ", ".join(f"{count} of {title}" for title, count in sorted(kills.items()))
    faults = [fault for report in reports for fault in report.faults]
    ended = sum(report.num_ended_streams for report in reports)
    whole = sum(report.num_whole_streams for report in reports)
    told_s = max(report.told_s for report in reports)
    back_s = max(report.back_s for report in reports)
    wrong = str(len(faults)) + "".join(f"; {fault}" for fault in faults[:3])
    streams = f"{whole} whole, {ended} ended with engine_died"
    return [
        Row(PART, f"kills ({what}): wrong or missing answers", wrong, "0", not faults),
        Row(PART, "streams", streams, "both kinds", min(whole, ended) > 0),
        Row(PART, "a stream's error event, from the kill", f"{told_s:.2f} s", "1 s", told_s < TOLD_LIMIT_S),
        Row(PART, "both replicas up, from the kill", f"{back_s:.1f} s", "40 s", back_s < BACK_LIMIT_S),
    ]


def _end_rows(is_same_afterwards: bool, exit_code: int, left: list[str]) -> list[Row]:
    return [
        Row(PART, "texts afterwards", "the same" if is_same_afterwards else "others", "the same", is_same_afterwards),
        Row(PART, "exit code after SIGTERM", str(exit_code), "0", exit_code == 0),
        Row(PART, "processes left 1 s after the end", ", ".join(left) or "none", "none", not left),
    ]
