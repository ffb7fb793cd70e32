"""kill -9 of every process of a server in the middle of updates, with requests in flight: each token is of the weights
that its answer names, and the server comes back with those that its version names."""

import os
import random
import signal
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.end_to_end.helpers.rollouts import (
    ByParity,
    KillReport,
    RolloutServer,
    continued_by,
    find_faults,
    kill_in_update,
    make_prompts,
    rollout_server,
    save_checkpoints,
)
from tests.end_to_end.helpers.toka_process import wait_for
from torture.rows import Row, show_rows

PART = "updates"
NUM_REQUESTS = 32
NUM_PROBES = 4
LONGEST_S = 0.08
"""After the start of an update, the HTTP server is killed within this time: updates take some hundredths of seconds."""
BACK_LIMIT_S = 40.0
"""Pauses after repeated kills included."""


@dataclass
class _Found:
    kills: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    """Tokens of other weights than those named, and missing answers."""
    wrong_ends: list[str] = field(default_factory=list)
    """Versions or texts after a kill that do not fit."""
    num_crossings: int = 0
    """Answers with tokens of several weights."""
    back_s: float = 0.0
    update_s: float = 0.0
    """The longest undisturbed update."""


def run_updates(num_kills: int = 20, seed: int = 1) -> list[Row]:
    """Kills of one worker and its manager, of two replicas, of two tensor-parallel ranks and of two stages: a quarter
    each. Some more of the HTTP server."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        models = save_checkpoints(Path(directory))
        fresh = [stack.enter_context(rollout_server(model)) for model in models]
        weights = ByParity({str(number): continued_by(server) for number, server in enumerate(fresh)})
        rng = random.Random(seed)
        rows = []
        for flag in (None, "dp_size=2", "tp_size=2", "pp_size=2"):
            flags = () if flag is None else (flag,)
            with rollout_server(models[0], "max_restarts=1000", *flags) as server:
                found = _kill_engines(server, models, weights, num_kills // 4, rng)
            rows += show_rows(_engine_rows("one worker" if flag is None else flag, found))
        return rows + show_rows(_kill_servers(models, weights, max(1, num_kills // 5), rng))


def _kill_engines(
    server: RolloutServer, models: list[Path], weights: ByParity, num_kills: int, rng: random.Random
) -> _Found:
    """Each kill in an update of an odd number; after it, an undisturbed one of an even number."""
    found = _Found()
    prompts = make_prompts(NUM_REQUESTS)
    titles = sorted(title for title in server.toka.children() if title.startswith(("toka-worker", "toka-manager")))
    rng.shuffle(titles)
    update_s = _update_undisturbed(server, models, 2, prompts, weights, found)
    for kill in range(num_kills):
        number, title = 2 * kill + 3, titles[kill % len(titles)]
        report = kill_in_update(server, models, number, prompts, title, rng.uniform(0, update_s))
        found.kills[title] += 1
        found.back_s = max(found.back_s, report.back_s)
        found.faults += find_faults(prompts, report.answers, weights)
        found.wrong_ends += _wrong_end(server, number, report, weights)
        print(f"{PART}: {title} killed in update {number}: {report.status}, {len(found.faults)} faults", flush=True)
        update_s = _update_undisturbed(server, models, number + 1, prompts, weights, found)
    return found


def _update_undisturbed(
    server: RolloutServer,
    models: list[Path],
    number: int,
    prompts: list[list[int]],
    weights: ByParity,
    found: _Found,
) -> float:
    """With requests in flight. Returns its seconds."""
    with server.in_flight(prompts) as answers:
        began_s = time.monotonic()
        server.update(models[number % 2], version=str(number))
        update_s = time.monotonic() - began_s
    found.faults += find_faults(prompts, answers, weights)
    found.num_crossings += sum(len(answer["choices"][0]["weight_versions"]) > 1 for answer in answers)
    found.update_s = max(found.update_s, update_s)
    return update_s


def _wrong_end(server: RolloutServer, number: int, report: KillReport, weights: ByParity) -> list[str]:
    """What does not fit after the kill in the update to the weights of this number."""
    version = server.version
    if report.status == 200 and version != str(number):
        return [f"update {number} was answered, and the version is {version}"]
    for prompt in make_prompts(NUM_PROBES, length=50):
        answer = server.greedy(prompt, 40)
        if answer["weight_version"] != version or find_faults([prompt], [answer], weights, 40):
            return [f"version {version} after update {number}: {answer['weight_version']} with other tokens"]
    return []


def _engine_rows(name: str, found: _Found) -> list[Row]:
    what = ", ".join(f"{count} of {title}" for title, count in sorted(found.kills.items()))
    faults = str(len(found.faults)) + "".join(f"; {fault}" for fault in found.faults[:3])
    ends = str(len(found.wrong_ends)) + "".join(f"; {end}" for end in found.wrong_ends[:3])
    crossing = found.num_crossings
    return [
        Row(PART, f"{name}: kills in updates ({what}): wrong or missing answers", faults, "0", not found.faults),
        Row(PART, f"{name}: version and text do not fit afterwards", ends, "0", not found.wrong_ends),
        Row(PART, f"{name}: answers that cross undisturbed updates", str(crossing), "some", crossing > 0),
        Row(PART, f"{name}: all up again, from the kill", f"{found.back_s:.1f} s", "40 s", found.back_s < BACK_LIMIT_S),
        Row(PART, f"{name}: longest undisturbed update", f"{found.update_s:.2f} s", "2 s", found.update_s < 2),
    ]


def _kill_servers(models: list[Path], weights: ByParity, num_kills: int, rng: random.Random) -> list[Row]:
    """The engine goes on: it has the new weights or the earlier ones. A client that was cut off asks again."""
    wrong: list[str] = []
    with rollout_server(models[0], "max_restarts=1000") as server:
        for number in range(1, num_kills + 1):
            before = server.toka.children()
            body = {"weight_dir": str(models[number % 2]), "version": str(number)}
            with suppress(httpx.HTTPError), server.in_flight(make_prompts(NUM_REQUESTS)), ThreadPoolExecutor(1) as pool:
                updated = pool.submit(server.http.post, "/update_weights", json=body)
                time.sleep(rng.uniform(0, LONGEST_S))
                os.kill(before["toka-server"], signal.SIGKILL)
                updated.result()
            wait_for(server.is_whole, BACK_LIMIT_S)
            if server.version not in (str(number - 1), str(number)):
                wrong.append(f"version {server.version} after update {number}")
            wrong += _wrong_end(server, number, KillReport(0, [], 0.0), weights)
            server.update(models[number % 2], version=str(number))
            wrong += _wrong_end(server, number, KillReport(200, [], 0.0), weights)
            after = server.toka.children()
            wrong += [f"another {name}" for name in after if name != "toka-server" and after[name] != before[name]]
    kills = f"{num_kills} kills of toka-server in updates"
    return [Row(PART, f"{kills}: version and text do not fit, or other engine", str(len(wrong)), "0", not wrong)]
