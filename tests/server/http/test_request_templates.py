"""Chat templates of requests: prompts as transformers renders them, answers read by their marks, and the limits."""

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.helpers.small_model import make_served_model
from tests.server.helpers.bodies_and_errors import CHAT, RESPONSES, assert_openai_error
from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import LiveServer, live_server
from tests.server.helpers.reasoning_templates import QWEN3_TEMPLATE
from tests.server.helpers.tool_answers import LIMITS, TOOLS, say
from tests.server.helpers.tool_templates import HERMES_TEMPLATE, TWO_TEMPLATES, save_tokenizer_with
from tests.server.jobs.helpers.uploads import upload
from tokasaurus.server.protocol.chat import MAX_TEMPLATE_CHARS
from tokasaurus.server.templates import request_templates
from tokasaurus.server.templates.request_templates import RequestTemplates
from tokasaurus.server.tools.formats import HERMES

QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "Warm <|im_end|> there?"}]
OWN = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }} {{ shade }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>bot{% endif %}"
)
MESSAGES = "/v1/messages"
# A single call, which only the end of its process can end.
LONG_CALL = "{{ 3 ** (10 ** 9) % 2 }}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer_with(TWO_TEMPLATES, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def server(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = make_served_model(directory)
    model = replace(model, request_templates=RequestTemplates(model.tokenizer))
    with live_server(model, FakeEngine(limits=LIMITS), data_dir=tmp_path_factory.mktemp("data")) as server:
        yield server


def ask(server: LiveServer, route: str = CHAT, **fields: Any) -> dict[str, Any]:
    body = {"messages": QUESTION, "max_tokens": 99} if route != RESPONSES else {"input": QUESTION}
    answer = server.http.post(route, json=body | fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def prompt_ids(server: LiveServer) -> list[int]:
    ids: list[int] = server.engine.requests[-1].prompt_ids.tolist()
    return ids


def by_transformers(directory: Path, template: str, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    """With special tokens in messages as text: the tokenizer's special token in a message would not be one."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    mark = "\ue000"
    hidden = [one | {"content": one["content"].replace("<|im_end|>", mark)} for one in messages]
    text = tokenizer.apply_chat_template(hidden, chat_template=template, tokenize=False, **options)
    plain, special = text.split(mark), tokenizer("<|im_end|>", split_special_tokens=True)["input_ids"]
    ids: list[int] = []
    for index, part in enumerate(plain):
        ids += (special if index else []) + tokenizer(part, add_special_tokens=False)["input_ids"]
    return ids


@pytest.mark.parametrize("template", [OWN, QWEN3_TEMPLATE, HERMES_TEMPLATE, "tool_use"])
@pytest.mark.parametrize("variables", [{}, {"shade": "dark", "enable_thinking": False}])
def test_the_prompt_is_that_of_transformers(
    server: LiveServer, directory: Path, template: str, variables: dict[str, Any]
) -> None:
    expected = by_transformers(directory, template, QUESTION, add_generation_prompt=True, **variables)
    fields = {"chat_template": template, "chat_template_kwargs": variables}
    for route in (CHAT, RESPONSES, MESSAGES):
        ask(server, route, **fields)
        assert prompt_ids(server) == expected, route
    assert server.http.post("/tokenize", json={"messages": QUESTION} | fields).json()["tokens"] == expected
    counted = server.http.post(f"{MESSAGES}/count_tokens", json={"messages": QUESTION} | fields).json()
    assert counted == {"input_tokens": len(expected)}


def test_a_message_is_continued_as_by_transformers(server: LiveServer, directory: Path) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "It is"}]
    ask(server, messages=messages, chat_template=QWEN3_TEMPLATE, continue_final_message=True)
    assert prompt_ids(server) == by_transformers(directory, QWEN3_TEMPLATE, messages, continue_final_message=True)


def test_reasoning_tools_and_variables_are_those_of_the_given_template(server: LiveServer) -> None:
    """The model's own template knows none of them."""
    server.engine.script = say("<think>\nIs it?\n</think>\n\nYes.")
    (choice,) = ask(server, chat_template=QWEN3_TEMPLATE)["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("Is it?", "Yes.")
    ask(server, chat_template=QWEN3_TEMPLATE, reasoning_effort="none")
    text = server.http.post("/detokenize", json={"tokens": prompt_ids(server)}).json()["prompt"]
    assert text.endswith("<think>\n\n</think>\n\n")
    (choice,) = ask(server)["choices"]
    assert "reasoning" not in choice["message"]
    server.engine.script = say(HERMES.write("get_time", {}))
    (choice,) = ask(server, chat_template=HERMES_TEMPLATE, tools=TOOLS)["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_time"
    text = server.http.post("/detokenize", json={"tokens": prompt_ids(server)}).json()["prompt"]
    assert text.startswith('<|im_start|>system\n{"type": "function"')


def test_bulk_lines_and_batches_may_bring_templates(server: LiveServer) -> None:
    server.engine.script = say("Yes.")
    ask(server, chat_template=OWN)
    expected = prompt_ids(server)
    body = {"messages": QUESTION, "max_tokens": 99, "chat_template": OWN}
    line = {"custom_id": "1", "method": "POST", "url": CHAT, "body": body}
    bulk = server.http.post("/v1/bulk", content=json.dumps(line)).json()
    assert bulk["response"]["status_code"] == 200
    assert prompt_ids(server) == expected
    fields = {"input_file_id": upload(server, json.dumps(line).encode())["id"], "completion_window": "24h"}
    batch = server.http.post("/v1/batches", json=fields | {"endpoint": CHAT}).json()
    deadline = time.monotonic() + 60
    while batch["status"] != "completed":
        assert time.monotonic() < deadline, batch
        time.sleep(0.01)
        batch = server.http.get(f"/v1/batches/{batch['id']}").json()
    assert batch["request_counts"]["completed"] == 1
    assert prompt_ids(server) == expected


def refused(server: LiveServer, template: Any) -> dict[str, Any]:
    response = server.http.post(CHAT, json={"messages": QUESTION, "max_tokens": 9, "chat_template": template})
    assert response.status_code == 400, response.text
    return assert_openai_error(response.content)


@pytest.mark.parametrize(
    ("template", "param", "words"),
    [
        ("{% for %}", "chat_template", "chat_template: not a valid template: "),
        ("a\n{{ b", "chat_template", "(line 2)"),
        ("{{ raise_exception('no poems') }}", "messages", "no poems"),
        ("{{ messages[7].content.nothing }}", "messages", "messages: the chat template refuses these messages"),
        ("{{ messages.__class__.__mro__ }}", "messages", "unsafe"),
        ("x" * (MAX_TEMPLATE_CHARS + 1), "chat_template", str(MAX_TEMPLATE_CHARS)),
        (5, "chat_template", "chat_template"),
        ("{{ 'a' * 3000000000 }}", "chat_template", "chat_template: the chat template needs too much memory"),
        ("{{ 'a' * 70000000 }}", "messages", "writes more than"),
    ],
)
def test_a_bad_template_is_an_error_that_says_what_is_wrong(
    server: LiveServer, template: Any, param: str, words: str
) -> None:
    error = refused(server, template)
    assert error["param"] == param
    assert words in error["message"]
    assert len(error["message"]) < 500


def test_a_template_that_takes_too_long_ends_and_delays_no_other_chats(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(server, chat_template=OWN)  # a process has started
    monkeypatch.setattr(request_templates, "_KILL_AFTER_S", 1.0)
    errors: list[dict[str, Any]] = []
    threads = [threading.Thread(target=lambda: errors.append(refused(server, LONG_CALL))) for _ in range(2)]
    for thread in threads:
        thread.start()
    times = []
    while any(thread.is_alive() for thread in threads):
        started = time.monotonic()
        ask(server)
        times.append(time.monotonic() - started)
    for error in errors:
        assert error["param"] == "chat_template"
        assert error["message"] == ("chat_template: the chat template does not finish with these messages within 1 s")
    assert len(errors) == 2
    assert len(times) >= 3
    assert sorted(times)[len(times) // 2] < 1
    ask(server, chat_template=OWN)  # in a new process


def test_templates_are_refused_without_the_flag(directory: Path) -> None:
    with live_server(make_served_model(directory), FakeEngine(limits=LIMITS)) as server:
        for route in (CHAT, "/tokenize"):
            response = server.http.post(route, json={"messages": QUESTION, "chat_template": OWN})
            error = assert_openai_error(response.content)
            assert (error["param"], error["code"]) == ("chat_template", "unsupported_parameter")
            assert response.status_code == 400
            assert "request_chat_template=T" in error["message"]
        assert ask(server, chat_template="")["choices"]


def test_a_template_is_no_variable(server: LiveServer) -> None:
    for name in ("chat_template_kwargs", "apply_chat_template_overrides"):
        response = server.http.post(CHAT, json={"messages": QUESTION, name: {"chat_template": OWN}})
        assert response.status_code == 400
        assert "chat_template is not a variable" in assert_openai_error(response.content)["message"]


@pytest.mark.parametrize("depth", [240, 300, 985, 1015])
def test_values_nested_very_deeply_are_shown_or_refused(server: LiveServer, depth: int) -> None:
    nested = f"{'[' * depth}1{']' * depth}"
    fields = {"messages": QUESTION, "max_tokens": 9, "chat_template": "{{ deep }}"}
    content = json.dumps(fields)[:-1] + f', "chat_template_kwargs": {{"deep": {nested}}}}}'
    answer = server.http.post(CHAT, content=content, headers={"Content-Type": "application/json"})
    if depth < 250:
        assert answer.status_code == 200, answer.text
        assert bytes(prompt_ids(server)).decode() == nested
    else:
        assert (answer.status_code, assert_openai_error(answer.content)["param"]) == (400, "messages")


def test_few_templates_are_remembered_and_processes_end(directory: Path) -> None:
    tokenizer = make_served_model(directory).tokenizer
    templates = RequestTemplates(tokenizer)
    for number in range(request_templates._MAX_KNOWN + 6):
        templates.find(f"{number}{OWN}")
    assert len(templates._known) == request_templates._MAX_KNOWN
    (process,) = templates._processes
    pid = process._process.pid
    assert Path(f"/proc/{pid}").exists()
    templates.close()
    assert not templates._processes
    assert process._process.returncode is not None


def test_a_process_that_was_killed_is_replaced(directory: Path) -> None:
    templates = RequestTemplates(make_served_model(directory).tokenizer)
    found = templates.find(OWN)
    expected = found.render(QUESTION)
    (process,) = templates._processes
    process._process.kill()
    process._process.wait()
    assert found.render(QUESTION) == expected
    templates.close()
