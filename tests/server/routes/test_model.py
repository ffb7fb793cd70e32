"""/tokenize, /detokenize and /tokenizer_info, called the way vLLM's clients and lm-eval call them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.small_model import make_served_model
from tests.helpers.small_tokenizer import IM_END, IM_START, VOCAB_SIZE
from tests.server.helpers.bodies_and_errors import assert_openai_error
from tests.server.helpers.fake_engine import LIMITS, FakeEngine
from tests.server.helpers.live_server import LiveServer, live_server
from tokasaurus.server.served_model import ServedModel

TOOL = {"type": "function", "function": {"name": "f"}}
HI = [{"role": "user", "content": "hi<|im_end|>"}]


def post(server: LiveServer, path: str, **body: Any) -> dict[str, Any]:
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("fields", [{}, {"model": "default"}, {"add_special_tokens": False}])
def test_tokenize_returns_the_prompt_ids_and_detokenize_returns_the_prompt(
    shared_server: LiveServer, served_model: ServedModel, fields: dict[str, Any]
) -> None:
    text = "hello world<|im_end|>é"
    answer = post(shared_server, "/tokenize", prompt=text, **fields)
    ids = served_model.tokenizer.encode(text, add_special_tokens=False)
    assert answer == {
        "count": len(ids),
        "max_model_len": LIMITS.max_tokens_per_sequence,
        "tokens": ids,
        "token_strs": None,
    }
    assert post(shared_server, "/detokenize", tokens=ids) == {"prompt": text}
    token_strs = post(shared_server, "/tokenize", prompt="hello world", return_token_strs=True)["token_strs"]
    assert token_strs == ["hello", "Ġwo", "rld"]


def test_empty_prompt_has_no_tokens(shared_server: LiveServer) -> None:
    assert post(shared_server, "/tokenize", prompt="")["tokens"] == []
    assert post(shared_server, "/detokenize", tokens=[]) == {"prompt": ""}


def test_messages_are_rendered_with_the_chat_template(shared_server: LiveServer) -> None:
    def text(**fields: Any) -> str:
        ids = post(shared_server, "/tokenize", messages=HI, **fields)["tokens"]
        return post(shared_server, "/detokenize", tokens=ids)["prompt"]

    assert text() == "<|im_start|>user\nhi<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert text(add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|><|im_end|>\n"
    assert text(continue_final_message=True) == "<|im_start|>user\nhi<|im_end|>"
    ids = post(shared_server, "/tokenize", messages=HI)["tokens"]
    assert [i for i in ids if i >= IM_START] == [IM_START, IM_END, IM_START]


def test_messages_with_tools_get_the_same_ids_as_a_chat_completion(server: LiveServer) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [*HI, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "x", "content": "1"}]
    asked = {"messages": messages, "tools": [TOOL]}
    assert server.http.post("/v1/chat/completions", json=asked | {"model": "default"}).status_code == 200
    assert post(server, "/tokenize", **asked)["tokens"] == server.engine.requests[-1].prompt_ids.tolist()


def test_tokenizer_info_names_the_end_token_and_the_template(shared_server: LiveServer) -> None:
    info = shared_server.http.get("/tokenizer_info").json()
    assert (info["eos_token"], info["bos_token"]) == ("<|im_end|>", "<|im_start|>")
    assert "add_generation_prompt" in info["chat_template"]


@pytest.mark.parametrize("layout", ["list", "files"])
@pytest.mark.parametrize("names", [("rag", "tool_use"), ("default", "tool_use"), ("tool_use",), ("default",), ()])
def test_tokenizer_info_with_named_templates(
    tokenizer_directory: Path, tmp_path: Path, names: tuple[str, ...], layout: str
) -> None:
    templates = {name: "%s {{ messages[0].content }}" % name for name in names}  # noqa: UP031
    directory = tmp_path / "tokenizer"
    shutil.copytree(tokenizer_directory, directory)
    config_path = directory / "tokenizer_config.json"
    config = json.loads(config_path.read_text())
    config.pop("chat_template", None)
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    if layout == "list" and names:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    elif layout == "files":
        (directory / "additional_chat_templates").mkdir()
        for name, text in templates.items():
            is_default = name == "default"
            file = "chat_template.jinja" if is_default else f"additional_chat_templates/{name}.jinja"
            (directory / file).write_text(text)
    config_path.write_text(json.dumps(config))
    with live_server(make_served_model(directory), FakeEngine()) as server:
        info = server.http.get("/tokenizer_info")
        assert info.status_code == 200
        assert info.json()["chat_template"] == templates.get("default")
        chat = server.http.post("/v1/chat/completions", json={"model": "default", "messages": HI})
        assert chat.status_code == (200 if "default" in names else 400), chat.text
        assert "default" in names or "template" in chat.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": [1]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [1] * 200_000}, "messages[0]"),
        ("/tokenize", {"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": HI, "chat_template": "{{ 1"}, "chat_template"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "speed": 1}, "speed"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, "tools"),
        ("/tokenize", {"messages": HI, "tools": [TOOL, TOOL]}, "tools"),
        ("/tokenize", {"messages": HI, "tools": [{}]}, "tools[0].type"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1.0]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, True]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": [2**62]}, "tokens"),
    ],
)
def test_invalid_body_returns_400_and_names_the_field(
    shared_server: LiveServer, path: str, body: dict[str, Any], param: str
) -> None:
    response = shared_server.http.post(path, json=body)
    error = assert_openai_error(response.content)
    assert (response.status_code, error["param"]) == (400, param), error
    assert param in error["message"]


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})])
def test_unknown_model_returns_404(shared_server: LiveServer, path: str, body: dict[str, Any]) -> None:
    response = shared_server.http.post(path, json=body | {"model": "other"})
    assert (response.status_code, assert_openai_error(response.content)["code"]) == (404, "model_not_found")


def test_only_tokenize_requires_a_ready_engine(served_model: ServedModel) -> None:
    with live_server(served_model, FakeEngine(), start_engine=False) as server:
        assert server.http.post("/tokenize", json={"prompt": "a"}).status_code == 503
        assert server.http.post("/detokenize", json={"tokens": [97]}).status_code == 200
        assert server.http.get("/tokenizer_info").status_code == 200
