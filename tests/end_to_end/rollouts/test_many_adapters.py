"""Adapters that come and go under load: no answer is lost or another adapter's, and nothing piles up."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

from tests.end_to_end.helpers.rollouts import RolloutServer, make_prompts, rollout_server
from tests.end_to_end.helpers.toka_process import wait_for
from tests.helpers.examples import IS_NIGHTLY
from tests.helpers.peft_adapters import greedy_ids, merged_model, save_adapter

NUM_LOADS = 200 if IS_NIGHTLY else 60
NUM_CLIENTS = 64
NUM_ADAPTERS = 4
NUM_TOKENS = 12
MIB = 1 << 20


class Clients:
    """NUM_CLIENTS threads that ask for adapters by the names that are loaded, until they are stopped."""

    def __init__(self, server: RolloutServer, expected: list[list[int]], prompt: list[int]) -> None:
        """expected: the tokens after the prompt, by adapter."""
        self._server = server
        self._expected = expected
        self._prompt = prompt
        self.names: dict[str, int] = {}
        """The adapter that each name is."""
        self.num_right = self.num_late = 0
        self.wrong: list[str] = []
        self.are_stopped = threading.Event()

    def run(self, index: int) -> None:
        asked = {"prompt": self._prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        while not self.are_stopped.is_set():
            if not (names := [*self.names.items()]):
                continue
            name, number = names[index % len(names)]
            body = {"model": name, **asked, "return_token_ids": True}
            try:
                answer = self._server.http.post("/v1/completions", json=body)
            except httpx.TransportError:  # of a server that was killed
                continue
            if answer.status_code == 200:
                is_right = answer.json()["choices"][0]["token_ids"] == self._expected[number]
                self.num_right += is_right
                if not is_right:
                    self.wrong.append(f"{name}: {answer.text}")
            elif answer.status_code == 404 and name not in self.names:
                self.num_late += 1
            else:
                self.wrong.append(f"{name}: {answer.status_code} {answer.text}")


def memory(server: RolloutServer) -> dict[str, int]:
    """Bytes (RSS) by process."""
    return {name: psutil.Process(pid).memory_info().rss for name, pid in server.toka.children().items()}


def test_loads_and_unloads_under_load_lose_nothing_and_leave_nothing(models: list[Path], tmp_path: Path) -> None:
    (prompt,) = make_prompts(1)
    sources = [save_adapter(models[0], tmp_path / str(seed), seed) for seed in range(NUM_ADAPTERS)]
    expected = [greedy_ids(merged_model(models[0], source), prompt, NUM_TOKENS) for source in sources]
    assert len({tuple(ids) for ids in expected}) == NUM_ADAPTERS
    with rollout_server(models[0], "max_loras=2") as server, ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = Clients(server, expected, list(prompt))
        running = [pool.submit(clients.run, index) for index in range(NUM_CLIENTS)]
        try:
            before = dict[str, int]()
            for number in range(NUM_LOADS):
                if number == NUM_LOADS // 3:
                    os.kill(server.toka.children()["toka-worker-0"], signal.SIGKILL)
                    wait_for(server.is_whole, 120)
                elif number == NUM_LOADS // 2:
                    os.kill(server.toka.children()["toka-server"], signal.SIGKILL)
                    wait_for(lambda: _is_up(server), 60)
                elif number == 2 * NUM_LOADS // 3:
                    before = memory(server)
                name = f"policy-v{number}"
                body = {"lora_name": name, "lora_path": str(sources[number % NUM_ADAPTERS])}
                answer = server.http.post("/v1/load_lora_adapter", json=body)
                assert answer.status_code == 200, answer.text
                clients.names[name] = number % NUM_ADAPTERS
                if len(clients.names) > 3:
                    oldest = next(iter(clients.names))
                    del clients.names[oldest]
                    answer = server.http.post("/v1/unload_lora_adapter", json={"lora_name": oldest})
                    assert answer.status_code == 200, answer.text
            after = memory(server)
        finally:
            clients.are_stopped.set()
        for client in running:
            client.result()
        assert clients.wrong == []
        assert clients.num_right > NUM_LOADS
        growth = {name: (after[name] - before[name]) / MIB for name in before}
        assert max(growth.values()) < 48, growth
        assert len(server.http.get("/v1/models").json()["data"]) == 1 + len(clients.names)


def _is_up(server: RolloutServer) -> bool:
    with suppress(httpx.TransportError):
        return server.is_whole()
    return False
