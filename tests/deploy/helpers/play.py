"""What systemd and Kubernetes do with a server, in small: they start it, ask it, signal it, and wait for its end."""

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.helpers.limits import join

STREAM_TOKENS = 400
STREAM_SAMPLES = 72


@dataclass
class Stream:
    """A streamed answer that takes some seconds, read by a thread."""

    url: str
    headers: dict[str, str]
    has_begun: threading.Event = field(default_factory=threading.Event)
    ended_s: float | None = None
    """On the monotonic clock."""
    finish_reasons: list[str] = field(default_factory=list)
    num_tokens: int | None = None
    is_done: bool = False
    """The last event was [DONE]."""

    def start(self) -> threading.Thread:
        thread = threading.Thread(target=self._read, daemon=True)
        thread.start()
        assert self.has_begun.wait(60)
        return thread

    def assert_whole(self) -> None:
        assert self.is_done
        assert self.finish_reasons == ["length"] * STREAM_SAMPLES
        assert self.num_tokens == STREAM_SAMPLES * STREAM_TOKENS

    def _read(self) -> None:
        body = {
            "model": "default",
            "prompt": "A",
            "n": STREAM_SAMPLES,
            "max_tokens": STREAM_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            url = f"{self.url}/v1/completions"
            with httpx.stream("POST", url, json=body, headers=self.headers, timeout=300) as answer:
                for line in answer.iter_lines():
                    self._note(line.removeprefix("data: "))
        finally:
            self.ended_s = time.monotonic()
            self.has_begun.set()

    def _note(self, event: str) -> None:
        if event == "[DONE]":
            self.is_done = True
        elif event:
            self.has_begun.set()
            chunk = json.loads(event)
            reasons = [choice["finish_reason"] for choice in chunk["choices"]]
            self.finish_reasons += [reason for reason in reasons if reason is not None]
            if chunk.get("usage"):
                self.num_tokens = chunk["usage"]["completion_tokens"]


@dataclass(frozen=True, slots=True)
class Answer:
    """Of a probe."""

    asked_s: float
    answered_s: float
    is_success: bool


class Probes:
    """A manifest's probes as the kubelet sends them, but more often, so that a test is short."""

    def __init__(self, container: Mapping[str, Any], url: str, period_s: float) -> None:
        """container: as in the manifest. url: in place of the pod's address and the container's port."""
        self._container = container
        self._url = url
        self._period_s = period_s
        self._is_over = threading.Event()
        self.answers: dict[str, list[Answer]] = {}
        """By the probe's name, in their order."""

    def ask(self, name: str) -> Answer:
        """A status from 200 to 399 is a success, as for the kubelet; an answer that is too late is none."""
        probe = self._container[name]
        asked_s = time.monotonic()
        try:
            path = probe["httpGet"]["path"]
            status = httpx.get(f"{self._url}{path}", timeout=probe["timeoutSeconds"]).status_code
        except httpx.TransportError:
            status = 0
        answer = Answer(asked_s, time.monotonic(), 200 <= status < 400)
        self.answers.setdefault(name, []).append(answer)
        return answer

    def wait_for_start(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not self.ask("startupProbe").is_success:
            assert time.monotonic() < deadline_s
            time.sleep(self._period_s)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Liveness and readiness, each at its own pace."""
        names = ("livenessProbe", "readinessProbe")
        threads = [threading.Thread(target=self._ask_again_and_again, args=(name,), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            for thread in threads:
                join(thread)

    def between(self, name: str, from_s: float, until_s: float) -> list[bool]:
        """Successes of the probes that were asked and answered in this time."""
        return [
            answer.is_success
            for answer in self.answers[name]
            if from_s <= answer.asked_s and answer.answered_s <= until_s
        ]

    def _ask_again_and_again(self, name: str) -> None:
        while not self._is_over.wait(self._period_s):
            self.ask(name)


@contextmanager
def started(command: list[str], environment: Mapping[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Kills it at the end if it still runs."""
    process = subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
