"""Roll-outs against a real server: requests in flight while its weights change, compared with servers that were started
with those weights."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.end_to_end.helpers.toka_process import TokaProcess, running_toka, wait_for
from tests.helpers.examples import IS_NIGHTLY
from tests.helpers.tiny_model import save_tiny_model

FLAGS = ("dtype=float32", "kv_cache_num_tokens=32768", "max_tokens_per_forward=512", "max_seqs_per_forward=64")
NUM_REQUESTS = 64 if IS_NIGHTLY else 32
NUM_TOKENS = 200
"""Of each completion: some tenths of a second for all of them."""


def save_checkpoints(directory: Path) -> list[Path]:
    """Two models of equal shapes and other weights."""
    paths = [directory / "first", directory / "second"]
    for seed, path in enumerate(paths):
        save_tiny_model(path, "llama", seed=seed)
        generation = json.loads((path / "generation_config.json").read_text())
        # Nothing of this may reach a trainer's server.
        advised = {"do_sample": True, "temperature": 0.5, "top_k": 3, "repetition_penalty": 1.7}
        (path / "generation_config.json").write_text(json.dumps(generation | advised))
    return paths


class RolloutServer:
    """A client of a server with rl=T, by vLLM's routes."""

    def __init__(self, toka: TokaProcess) -> None:
        self.toka = toka
        # One thread may close an idle connection that another has just been given.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.http = httpx.Client(base_url=toka.url, timeout=240, limits=limits)

    def post(self, path: str, json: object = None, **params: str) -> Any:
        """The answer, which must be no error."""
        answer = self.http.post(path, json=json, params=params)
        assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}"
        return answer.json()

    def update(self, directory: Path, **fields: object) -> str:
        """Returns the version."""
        return str(self.post("/update_weights", {"weight_dir": str(directory), **fields})["weight_version"])

    @property
    def version(self) -> str:
        return str(self.http.get("/get_weight_version").json()["weight_version"])

    def is_whole(self) -> bool:
        """All replicas are up."""
        ready = self.http.get("/ready")
        return ready.status_code == 200 and ready.json()["replicas_up"] == ready.json()["replicas"]

    def greedy(self, token_ids: Sequence[int], num_tokens: int, num_logprobs: int = 0) -> dict[str, Any]:
        """The answer of the most likely tokens. num_logprobs: of the most likely tokens at each position."""
        sampling = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "logprobs": num_logprobs}
        return dict(self.post("/inference/v1/generate", {"token_ids": list(token_ids), "sampling_params": sampling}))

    def greedy_ids(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        if num_tokens == 0:
            return []
        return list(self.greedy(token_ids, num_tokens)["choices"][0]["token_ids"])

    def all_greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            return list(pool.map(lambda prompt: self.greedy_ids(prompt, num_tokens), prompts))

    @contextmanager
    def in_flight(
        self, prompts: Sequence[Sequence[int]], num_tokens: int = NUM_TOKENS
    ) -> Iterator[list[dict[str, Any]]]:
        """Within the context, greedy requests for all prompts run; their answers are in the list at its end."""
        before = self.toka.gauge("toka_generation_tokens_total")
        answers: list[dict[str, Any]] = []
        with ThreadPoolExecutor(len(prompts)) as pool:
            futures = [pool.submit(self.greedy, prompt, num_tokens) for prompt in prompts]
            wait_for(lambda: self.toka.gauge("toka_generation_tokens_total") > before + len(prompts), 60)
            try:
                yield answers
            except BaseException:
                self.http.post("/resume")  # else a test that failed in a pause waits for requests that never end
                raise
            answers += [future.result() for future in futures]


def make_prompts(count: int = NUM_REQUESTS, length: int = 40) -> list[list[int]]:
    """Longer than two blocks of the cache, so that a cached prefix of earlier weights would be found."""
    return [[(7 * number + 3 * position) % 250 for position in range(length)] for number in range(count)]


Gives = Callable[[list[int], list[int], list[int]], bool]
"""(prompt, first tokens of its completion, further tokens) -> whether the weights give these."""

MAX_TIE = 1e-5
"""Tokens whose log-probabilities differ by less are equally likely: ranks add in another order than one process."""


def known_completions(prompts: Sequence[list[int]], completions: Sequence[list[int]]) -> Gives:
    """Only from their starts."""
    whole = {tuple(prompt): ids for prompt, ids in zip(prompts, completions, strict=True)}

    def gives(prompt: list[int], before: list[int], found: list[int]) -> bool:
        assert not before
        return whole[tuple(prompt)][: len(found)] == found

    return gives


def continued_by(server: RolloutServer) -> Gives:
    """server: its weights never change."""

    def gives(prompt: list[int], before: list[int], found: list[int]) -> bool:
        while found:
            answer = server.greedy(prompt + before, len(found), num_logprobs=2)
            entries = answer["choices"][0]["logprobs"]["content"]
            number = next((n for n, entry in enumerate(entries) if entry["token_id"] != found[n]), None)
            if number is None:
                return True
            least = entries[number]["logprob"] - MAX_TIE
            ties = {top["token_id"] for top in entries[number]["top_logprobs"] if top["logprob"] >= least}
            if found[number] not in ties:
                return False
            before, found = before + found[: number + 1], found[number + 1 :]
        return True

    return gives


def find_faults(
    prompts: Sequence[list[int]],
    answers: Sequence[dict[str, Any]],
    weights: Mapping[str, Gives],
    num_tokens: int = NUM_TOKENS,
) -> list[str]:
    """What is wrong with greedy answers: missing tokens, or tokens that are not of the weights which they name.

    weights: what is right, by version."""

    def check(case: tuple[list[int], dict[str, Any]]) -> list[str]:
        prompt, answer = case
        (choice,) = answer["choices"]
        ids, spans, reason = choice["token_ids"], choice["weight_versions"], choice["finish_reason"]
        faults = []
        if reason not in ("length", "abort") or (reason == "length") != (len(ids) == num_tokens):
            faults.append(f"{len(ids)} tokens, {reason}")
        if [0, *(span["end"] for span in spans)] != [*(span["start"] for span in spans), len(ids)]:
            faults.append(f"spans {spans} of {len(ids)} tokens")
        if answer["weight_version"] != spans[-1]["version"]:
            faults.append(f"version {answer['weight_version']}, spans {spans}")
        if [entry["token_id"] for entry in choice["logprobs"]["content"]] != ids:
            faults.append("logprobs of other tokens")
        for span in spans:
            start, end = span["start"], span["end"]
            if not weights[span["version"]](prompt, ids[:start], ids[start:end]):
                faults.append(f"tokens {start} to {end} are not of the weights {span['version']}")
        return faults

    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        return [fault for faults in pool.map(check, zip(prompts, answers, strict=True)) for fault in faults]


@contextmanager
def rollout_server(model: Path, *flags: str) -> Iterator[RolloutServer]:
    with running_toka(f"model={model}", *FLAGS, "rl=T", *flags) as toka:
        server = RolloutServer(toka)
        with server.http:
            yield server


class ByParity(dict[str, Gives]):
    """Weights of any number: those of even versions are "0", of odd ones "1"."""

    def __missing__(self, version: str) -> Gives:
        return self[str(int(version) % 2)]


@dataclass
class KillReport:
    status: int
    """Of the update's answer; 0 if there was none."""
    answers: list[dict[str, Any]]
    """Of the requests in flight."""
    back_s: float
    """From the kill until all replicas were up again."""


def kill_in_update(
    server: RolloutServer,
    models: Sequence[Path],
    number: int,
    prompts: Sequence[list[int]],
    title: str,
    after_s: float,
) -> KillReport:
    """Kill -9 of a process in the middle of an update to the weights of this number, with requests in flight.

    title: how the names of the processes begin of which one is killed, not the server's. after_s: from the update's
    beginning."""
    victim = next(pid for name, pid in sorted(server.toka.children().items()) if name.startswith(title))
    with server.in_flight(prompts) as answers, ThreadPoolExecutor(1) as pool:
        body = {"weight_dir": str(models[number % 2]), "version": str(number)}
        updated = pool.submit(server.http.post, "/update_weights", json=body)
        time.sleep(after_s)
        os.kill(victim, signal.SIGKILL)
        killed_s = time.monotonic()
        status = updated.result().status_code
        wait_for(server.is_whole, 120)
        back_s = time.monotonic() - killed_s
    return KillReport(status, answers, back_s)
