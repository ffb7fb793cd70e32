"""Child processes of the server that work on what clients send: limits that each sets for itself, on Linux."""

import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from tokasaurus.monitoring.own_process import kill_with_parent, set_title

PACKAGE_PARENT = Path(__file__).parents[2]
"""Working directory for `python -m`, which imports from it: the user's may contain any module."""


def answer_lines(answer: Callable[[bytes], bytes], memory_bytes: int, limit_s: float) -> None:
    """Say on stdout that the process is ready, and answer each line of stdin with a line, until stdin ends.

    memory_bytes: address space that answers may use on top of what the process uses now. limit_s: after which the
    server kills a process that has not answered.
    """
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    _limit_memory(memory_bytes)
    answers.write(b"true\n")
    answers.flush()
    # What a failing library prints may have texts of clients, which must not reach a log.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    while (question := questions.readline()).endswith(b"\n"):
        # If the server itself was killed, this timer ends the process.
        signal.setitimer(signal.ITIMER_REAL, limit_s + 1)
        answers.write(answer(question) + b"\n")
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.flush()


def _limit_memory(num_bytes: int) -> None:
    """No core dumps, and at most so much more address space than the process uses now."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        used = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, resource.RLIM_INFINITY))


def die_with_server(name: str) -> None:
    """name: as of set_title. On other systems than Linux the process ends at the end of stdin."""
    set_title(name)
    kill_with_parent()
