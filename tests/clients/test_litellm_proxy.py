"""litellm's proxy as a process before the server: chats, completions, responses and messages of one deployment."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, OpenAI

from tests.clients.conftest import PlainPost

PROXY = Path(sys.executable).with_name("litellm")
KEY = "sk-0123456789abcdef0123456789abcdef"
START_SECONDS = 180
MESSAGES = [{"role": "user", "content": "What do whales eat?"}]
GREEDY = {"max_tokens": 24, "temperature": 0}

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("backoff") is None or not PROXY.is_file(),
    reason="litellm[proxy] is not installed: `make test-clients` has it",
)


@pytest.fixture(scope="module")
def proxy_url(base_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two model groups with one deployment each, by nothing but a provider, a base URL and a key."""
    directory = tmp_path_factory.mktemp("proxy")
    lines = ["model_list:"]
    for name in ("openai", "hosted_vllm"):
        lines.append(f"  - model_name: {name}")
        lines.append(f"    litellm_params: {{model: {name}/default, api_base: '{base_url}', api_key: none}}")
    (directory / "config.yaml").write_text("\n".join(lines))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    variables = {"LITELLM_MASTER_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [PROXY, "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=directory, env={**os.environ, **variables}, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_alive(process, f"{url}/health/liveliness", directory / "log")
            yield url
        finally:
            process.kill()
            process.wait(timeout=60)


def wait_until_alive(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=10):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"the proxy did not start:\n{log.read_text()}")


@pytest.fixture(params=["openai", "hosted_vllm"])
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def client(proxy_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{proxy_url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def expected(plain_post: PlainPost) -> str:
    text: str = plain_post("chat/completions", {"messages": MESSAGES, **GREEDY})["choices"][0]["message"]["content"]
    return text


def chat(client: OpenAI, model: str) -> str | None:
    answer: Any = client.chat.completions.create(model=model, messages=MESSAGES, **GREEDY)  # type: ignore[call-overload]
    text: str | None = answer.choices[0].message.content
    return text


def test_responses_and_messages_do_not_disturb_chats_of_the_same_deployment(
    client: OpenAI, proxy_url: str, model: str, expected: str
) -> None:
    """After an answer 404 the proxy refuses all requests for the deployment for some seconds."""
    fields: dict[str, Any] = {
        "model": model,
        "input": MESSAGES[0]["content"],
        "max_output_tokens": 24,
        "temperature": 0,
    }
    for stream in (False, True):
        assert chat(client, model) == expected
        if stream:
            events: list[Any] = list(client.responses.create(**fields, stream=True))
            deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
            assert "".join(deltas) == expected
            assert len(deltas) > 1
        else:
            assert client.responses.create(**fields).output_text == expected
    message = post(f"{proxy_url}/v1/messages", {"model": model, "messages": MESSAGES, **GREEDY})
    assert message["content"][0]["text"] == expected
    assert chat(client, model) == expected


def test_errors_of_one_client_do_not_disturb_the_others(client: OpenAI, model: str, expected: str) -> None:
    wrong: list[dict[str, Any]] = [
        {"input": "Hi", "previous_response_id": "resp_1"},
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        {"input": "Hi", "tools": [{"type": "web_search"}]},
        {"input": "Hi", "max_output_tokens": 1_000_000},
    ]
    for fields in wrong:
        with pytest.raises(APIStatusError) as raised:
            client.responses.create(model=model, **fields)
        assert raised.value.status_code == 400
        assert chat(client, model) == expected
    stored = client.responses.create(model=model, input="Hi", max_output_tokens=16)
    with pytest.raises(APIStatusError):
        client.responses.retrieve(stored.id)  # the server answers 404: it keeps none
    assert chat(client, model) == expected


def test_streams_and_completions_pass_the_proxy(
    client: OpenAI, model: str, expected: str, plain_post: PlainPost
) -> None:
    fields: dict[str, Any] = {"model": model, "messages": MESSAGES, **GREEDY}
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == expected
    (usage,) = [chunk.usage for chunk in chunks if chunk.usage]
    assert usage.completion_tokens == GREEDY["max_tokens"]
    body: dict[str, Any] = {"prompt": "The whale is", **GREEDY}
    assert (
        client.completions.create(model=model, **body).choices[0].text
        == (plain_post("completions", body)["choices"][0]["text"])
    )


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=120) as answer:
        parsed: dict[str, Any] = json.load(answer)
        return parsed
