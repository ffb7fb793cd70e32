"""A pytest plugin that tells the process that started pytest what happens to each test, as it happens.

It appends lines of JSON to the file that TOKA_TEST_JOURNAL names. Tests that the file already names are not run again,
so that pytest, started again after a test that killed it, goes on with the next one. It also ends what hangs: a test
after its own limit, and the run at its deadline.
"""

import contextlib
import faulthandler
import json
import os
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

SETTINGS = "TOKA_TEST_JOURNAL"
"""The environment variable with the settings."""
_DEFAULT_LIMIT_S = 60.0
_MIN_S = 2.0
"""No test begins with less time left."""


@dataclass(frozen=True, slots=True)
class Settings:
    path: str
    """Of the journal."""
    deadline: float
    """By time.time(). No test begins after it, and one that is at work then is ended."""
    limits_s: dict[str, float] = field(default_factory=dict)
    """Seconds that each test of a file may take, by the file's path."""
    grace_s: float = 15.0
    """A test that its limit does not interrupt, since it waits in C code, ends the process so much later."""

    def as_environment(self) -> dict[str, str]:
        return {SETTINGS: json.dumps(asdict(self))}


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Its whole lines; a process that was killed may have left a part of one."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def pytest_configure(config: pytest.Config) -> None:
    settings = Settings(**json.loads(os.environ.pop(SETTINGS)))
    config.pluginmanager.register(_Journal(settings, os.dup(2)))  # not captured yet


class _Journal:
    def __init__(self, settings: Settings, stderr: int) -> None:
        self._settings = settings
        self._path = Path(settings.path)
        self._stderr = stderr

    def _write(self, **event: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        begun = {event["begun"] for event in read_journal(self._path) if "begun" in event}
        items[:] = [item for item in items if item.nodeid not in begun]
        self._write(collected=[item.nodeid for item in items])
        if config.pluginmanager.hasplugin("timeout") and config.getoption("timeout") is None:
            for item in items:
                item.add_marker(pytest.mark.timeout(self._limit_s(item), method="signal"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._write(begun=item.nodeid)
        limit_s = item.config.getoption("timeout", None) or self._limit_s(item)
        with self._exit_after(min(self._left_s(), limit_s + self._settings.grace_s)):
            done = yield
        self._write(finished=item.nodeid)
        if _device_is_lost():
            self._write(restart="the process's CUDA context is broken")
            item.session.shouldstop = "the process's CUDA context is broken"
        elif self._left_s() < _MIN_S:
            self._write(out_of_time=True)
            item.session.shouldstop = "no time is left"
        return done

    def _left_s(self) -> float:
        return self._settings.deadline - time.time()

    def _limit_s(self, item: pytest.Item) -> float:
        return self._settings.limits_s.get(str(item.path), _DEFAULT_LIMIT_S)

    @contextlib.contextmanager
    def _exit_after(self, seconds: float) -> Iterator[None]:
        """Ends the process, after a traceback of each thread, if the block takes longer, even in C code."""
        faulthandler.dump_traceback_later(max(seconds, 0.001), exit=True, file=self._stderr)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            # pytest itself shows why only after the last test
            why = {"why": report.longreprtext} if report.outcome == "failed" else {}
            self._write(test=report.nodeid, outcome=report.outcome, **why)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._write(ended=int(exitstatus))


def _device_is_lost() -> bool:
    """An error in a kernel breaks the process's CUDA context: all later calls fail."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
