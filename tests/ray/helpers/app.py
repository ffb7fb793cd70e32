"""The application on a cluster of two nodes, its clients, and what they must receive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import torch
import yaml
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from tests.helpers.tiny_model import save_tiny_model
from tests.ray.helpers.cluster import TINY_FLAGS, actors, num_running
from tokasaurus.addresses import bind

CONFIG = Path(__file__).parents[3] / "deploy/ray_serve.yaml"
ENGINE = "ServeReplica:toka:Engine"
WAIT_S = 120.0
"""Longest wait for a replica: its start takes a tenth of that on a free machine."""
RETRIED = "a replica died before it answered"
"""What the ingress logs of each request that it sends again."""


@dataclass(frozen=True)
class Received:
    """A stream. failure: the code of its last event, if that is an error."""

    text: str
    is_whole: bool
    failure: str | None


@dataclass
class App:
    """The application, with a tiny model that is also the oracle."""

    url: str
    logs: Path
    oracle: PreTrainedModel
    tokenizer: Tokenizer
    settings: dict[str, Any]

    def deploy(self, num_replicas: int) -> None:
        """As `serve run` with the YAML file; returns when so many replicas run, and no other."""
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        application = self.settings["applications"][0]
        application["deployments"][0]["num_replicas"] = num_replicas
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(self.settings))
        self.wait_for(num_replicas)

    def wait_for(self, num_replicas: int) -> None:
        """Until so many replicas run, and no other."""
        from ray import serve

        def is_there() -> bool:
            application = serve.status().applications["toka"]
            assert application.status != "DEPLOY_FAILED", application.message
            engine = application.deployments.get("Engine")
            if engine is None or application.status != "RUNNING" or len(actors(ENGINE)) != num_replicas:
                return False
            return bool(engine.replica_states == {"RUNNING": num_replicas})

        wait_until(is_there)

    def expected(self, prompt: str, num_tokens: int) -> str:
        """The text that the model continues the prompt with."""
        ids = torch.tensor([self.tokenizer.encode(prompt).ids])
        limits = {"max_new_tokens": num_tokens, "eos_token_id": None, "pad_token_id": 0}
        with torch.inference_mode():
            made = self.oracle.generate(ids, do_sample=False, **limits)[0, ids.shape[1] :].tolist()
        return str(self.tokenizer.decode(made))

    def num_retried(self) -> int:
        """Requests that the ingress has sent again."""
        logs = (self.logs / "serve").glob("replica_toka_Ingress_*.log")
        return sum(path.read_text().count(RETRIED) for path in logs)

    def running(self) -> list[int]:
        """Sequences that each replica runs."""
        return [num_running(process) for process in actors(ENGINE)]


def body_of(prompt: str, num_tokens: int, **fields: Any) -> dict[str, Any]:
    return {
        **{"model": "default", "prompt": prompt, "max_tokens": num_tokens},
        **{"temperature": 0, "ignore_eos": True, **fields},
    }


@contextmanager
def running_app(model: Path, logs: Path, oracle: PreTrainedModel) -> Iterator[App]:
    """Serve, without the application yet; needs a cluster."""
    from ray import serve

    settings = yaml.safe_load(CONFIG.read_text())
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    settings["http_options"]["port"] = port
    application = settings["applications"][0]
    application["args"] = {"flags": {**TINY_FLAGS, "model": str(model)}, "num_cpus": 1}
    application["deployments"][0] |= {"health_check_period_s": 1, "health_check_timeout_s": 10}
    serve.start(http_options=settings["http_options"])
    try:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        yield App(f"http://127.0.0.1:{port}", logs, oracle, tokenizer, settings)
    finally:
        serve.shutdown()


def make_model(directory: Path) -> PreTrainedModel:
    return save_tiny_model(directory, "llama")


async def read_stream(client: httpx.AsyncClient, body: dict[str, Any], has_begun: Callable[[], None]) -> Received:
    """has_begun: called at the first event."""
    text, is_whole, failure = "", False, None
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if not line:
                continue
            assert not is_whole
            assert failure is None, "an error is the last event"
            has_begun()
            if line == "data: [DONE]":
                is_whole = True
                continue
            event = orjson.loads(line.removeprefix("data: "))
            if "error" in event:
                failure = event["error"]["code"]
            else:
                text += event["choices"][0]["text"]
    return Received(text, is_whole, failure)


async def read_whole(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


async def under_load(
    app: App,
    streamed: Sequence[dict[str, Any]],
    whole: Sequence[dict[str, Any]],
    meanwhile: Callable[[], None],
) -> tuple[list[Received], list[str]]:
    """The answers to the bodies, all sent at once. meanwhile: called in a thread when all streams have begun."""
    begun = [asyncio.Event() for _ in streamed]
    async with httpx.AsyncClient(base_url=app.url, timeout=WAIT_S, limits=httpx.Limits(max_connections=None)) as client:
        streams = [
            asyncio.ensure_future(read_stream(client, body, event.set))
            for body, event in zip(streamed, begun, strict=True)
        ]
        wholes = [asyncio.ensure_future(read_whole(client, body)) for body in whole]
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), WAIT_S)
        await asyncio.to_thread(meanwhile)
        return await asyncio.gather(*streams), await asyncio.gather(*wholes)


def wait_until(is_there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_there():
        assert time.monotonic() < deadline
        time.sleep(0.1)
