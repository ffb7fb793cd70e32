"""Recordings of servers that never ran: a small simulation writes events of `/live`, with all that the page shows."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

START = 1_764_331_200.0
PAGE_SIZE = 16
_MAX_POINTS = 240
_STEPS_BETWEEN_ADMISSIONS = 5


@dataclass
class _Sequence:
    prompt: int
    predicted: int
    actual: int
    shared: int
    """Blocks of the prompt that others use, too."""
    arrived: float
    sampled: int = 0

    def blocks_after(self, steps: int) -> int:
        """Blocks of its own, `steps` from now."""
        return -(-(self.prompt + self.sampled + steps) // PAGE_SIZE) - self.shared

    @property
    def steps_left(self) -> int:
        return max(1, self.predicted - self.sampled)


@dataclass
class SimulatedReplica:
    """Sequences that grow by a token a step, and are admitted if all of them fit until they are predicted to end."""

    index: int
    rng: random.Random
    total: int = 1500
    slots: int = 96
    running: list[_Sequence] = field(default_factory=list)
    waiting: list[_Sequence] = field(default_factory=list)
    cached: int = 0
    step: int = 0
    restarts: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    shared: int = 40

    def forecast(self, more: list[_Sequence]) -> list[int]:
        """Blocks in use after each step until the running sequences, and `more`, have ended."""
        sequences = [*self.running, *more]
        end = max((one.steps_left for one in sequences), default=0)
        usage = np.zeros(end + 1, dtype=int)
        usage[:end] += self.shared
        for one in sequences:
            tokens = one.prompt + one.sampled + np.arange(one.steps_left)
            usage[: one.steps_left] += -(-tokens // PAGE_SIZE) - one.shared
        return [int(blocks) for blocks in usage]

    def arrive(self, now: float) -> None:
        predicted = int(self.rng.lognormvariate(5.2, 0.5)) + 4
        actual = max(1, int(predicted * self.rng.lognormvariate(0.0, 0.35)))
        prompt = self.rng.randint(60, 700)
        shared = min(self.shared, prompt // PAGE_SIZE) // 2
        self.waiting.append(_Sequence(prompt, predicted, actual, shared, now))

    def second(self, now: float) -> dict[str, Any]:
        """Runs for a second; returns what the event says of the replica."""
        step_seconds = 0.02 + 0.0002 * len(self.running)
        events = dict.fromkeys(("admitted", "finished", "preempted", "evicted"), 0)
        lengths: list[list[int]] = []
        tokens = self.tokens
        num_steps = int(1 / step_seconds) if self.running or self.waiting else 0
        for _ in range(num_steps):
            self.step += 1
            for one in self.running:
                one.sampled += 1
            tokens["generated"] = tokens.get("generated", 0) + len(self.running)
            for one in [one for one in self.running if one.sampled >= one.actual]:
                self.running.remove(one)
                lengths.append([one.predicted, one.actual])
                events["finished"] += 1
                self.cached += one.blocks_after(0)
            if self._in_use() > self.total and self.running:
                self.waiting.insert(0, self.running.pop())
                events["preempted"] += 1
            may_admit = self.step % _STEPS_BETWEEN_ADMISSIONS == 0
            while may_admit and self.waiting and len(self.running) < self.slots and self._fits(self.waiting[0]):
                one = self.waiting.pop(0)
                self.running.append(one)
                events["admitted"] += 1
                reused = one.shared * PAGE_SIZE
                for name, number in (
                    ("prompt", one.prompt),
                    ("cached", reused),
                    ("computed", one.prompt - reused),
                    ("shared", reused // 2),
                ):
                    tokens[name] = tokens.get(name, 0) + number
            surplus = self._in_use() + self.cached - self.total
            if surplus > 0:
                self.cached -= surplus
                events["evicted"] += surplus
        return self._described(now, num_steps, step_seconds, events, lengths)

    def _in_use(self) -> int:
        return sum(one.blocks_after(0) for one in self.running) + (self.shared if self.running else 0)

    def _fits(self, one: _Sequence) -> bool:
        return max(self.forecast([one])) <= self.total

    def _described(
        self, now: float, steps: int, step_seconds: float, events: dict[str, int], lengths: list[list[int]]
    ) -> dict[str, Any]:
        in_use = self._in_use()
        shared = self.shared if self.running else 0
        curve = self.forecast([])
        busy = steps * step_seconds
        return {
            "index": self.index,
            "state": "up",
            "restarts": self.restarts,
            "step": self.step,
            "steps": steps,
            "step_seconds": step_seconds,
            "microbatches": 1,
            "running": len(self.running),
            "prefilling": min(len(self.running), events["admitted"]),
            "background": len(self.running) // 3,
            "waiting": len(self.waiting),
            "slots": self.slots,
            "queue_depth": min(8, len(self.running)),
            "tokens": {"prompt": 0, "generated": 0, "cached": 0, "computed": 0, "shared": 0, "recomputed": 0}
            | self.tokens,
            "blocks": {
                "total": self.total,
                "own": in_use - shared,
                "shared": shared,
                "cached": self.cached,
                "free": self.total - in_use - self.cached,
            },
            "events": events,
            "forecast": None if not self.running else self._points(curve),
            "next": self._next(now, curve),
            "oldest_wait_seconds": None if not self.waiting else now - min(one.arrived for one in self.waiting),
            "lengths": lengths[-64:],
            "eta_seconds": None if not self.running else (len(curve) + 40 * len(self.waiting)) * step_seconds,
            "parts": {
                "manager": {
                    "requests": 0.01,
                    "results": 0.02 + 0.0002 * len(self.running),
                    "admission": 0.015 * (1 + events["admitted"] / 8),
                    "inputs": 0.03,
                    "sending": 0.01,
                },
                "device": {"busy": busy * 0.97, "idle": busy * 0.01},
                "phases": {"gemm": busy * 0.6, "attention": busy * 0.22, "sampling": busy * 0.09, "other": busy * 0.06},
            },
        }

    def _points(self, curve: list[int]) -> dict[str, Any]:
        """Every so many steps, and the peak."""
        every = -(-len(curve) // (_MAX_POINTS - 2))
        chosen = sorted({*range(0, len(curve), every), len(curve) - 1, curve.index(max(curve))})
        return {
            "step": self.step + 4,
            "steps": chosen,
            "blocks": [curve[at] for at in chosen],
            "peak": max(curve),
            "limit": self.total,
        }

    def _next(self, now: float, curve: list[int]) -> dict[str, Any] | None:
        if not self.waiting:
            return None
        one = self.waiting[0]
        needed = one.blocks_after(one.steps_left)
        later = np.maximum.accumulate(curve[::-1])[::-1]  # the peak from each step on
        fitting = iter(np.flatnonzero(later + needed <= self.total).tolist())
        is_full = len(self.running) >= self.slots
        return {
            "fits_in_steps": next(fitting, None),
            "blocks": needed,
            "prompt_tokens": one.prompt,
            "wait_seconds": now - one.arrived,
            "blocked_by": "slots" if is_full else "blocks",
        }


def simulated_events(
    seconds: int, num_replicas: int = 1, seed: int = 0, restart_at: int | None = None
) -> list[dict[str, Any]]:
    """Events of a server under load that comes in waves; the last replica restarts after `restart_at` events."""
    rng = random.Random(seed)
    replicas = [SimulatedReplica(index, rng) for index in range(num_replicas)]
    events = []
    for second in range(seconds):
        now = START + second + rng.uniform(0, 0.02)
        if second == restart_at:
            replicas[-1] = SimulatedReplica(num_replicas - 1, rng, restarts=1)
        for replica in replicas:
            # half of a minute with load, then a pause of ten seconds
            for _ in range(rng.randint(2, 16) if second % 40 < 30 else 0):
                replica.arrive(now)
        described = [replica.second(now) for replica in replicas]
        events.append(
            {
                "format": 1,
                "time": now,
                "server": {
                    "version": "0.0.0",
                    "model": "simulated-1B",
                    "started": START - 4000,
                    "dp_size": num_replicas,
                    "pp_size": 1,
                    "tp_size": 1,
                    "device": "cpu",
                    "dtype": "bfloat16",
                    "page_size": PAGE_SIZE,
                    "draining": False,
                    "price_per_hour": 2.5,
                },
                "requests": {
                    "open": sum(one["running"] + one["waiting"] for one in described),
                    "answered": 40 * second,
                    "aborted": 2,
                    "failed": 1,
                },
                "replicas": described,
                "jobs": _jobs(second),
            }
        )
    return events


def _jobs(second: int) -> list[dict[str, Any]]:
    def job(name: str, kind: str, state: str, total: int | None, done: int, failed: int) -> dict[str, Any]:
        return {
            "id": f"{kind}_{name}",
            "kind": kind,
            "name": name,
            "state": state,
            "lines": {"total": total, "done": done, "failed": failed, "running": 64 if state == "running" else 0},
            "tokens": {"prompt": 300 * done, "generated": 190 * done},
            "started": START - 60,
            "tokens_per_second": 1500.0 if state == "running" else None,
            "eta_seconds": None if total is None or state != "running" else (total - done) / 8,
            "cost": {"device_seconds": 0.11 * done, "price": 0.11 * done * 2.5 / 3600},
        }

    return [
        job("gsm8k-samples", "batch", "running", 5000, min(5000, 400 + 8 * second), second // 30),
        job("map of questions.jsonl", "bulk", "running", None, 3 * second, 0),
        job("evaluation", "batch", "finished", 800, 793, 7),
    ]


def write_recording(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(event) + b"\n" for event in events))
    return path
