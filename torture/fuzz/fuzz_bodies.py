"""Mutated request bodies against a real HTTP server: each is answered, or refused with OpenAI's error object.

`python -m torture.fuzz.fuzz_bodies [NUM_CASES]` ends with 1 if any answer had status 500, was not in OpenAI's
form or did not come, or if the server logged a traceback. The engine behind the server is scripted. The same number
always gives the same bodies.
"""

import logging
import random
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson

from tests.helpers.small_model import make_served_model
from tests.helpers.small_tokenizer import save_small_tokenizer
from tests.server.helpers.bodies_and_errors import assert_openai_error
from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import LiveServer, live_server, wait_until_clean
from tokasaurus.messages.status import EngineLimits
from torture.fuzz.json_mutations import encode, mutate
from torture.fuzz.reports import Report, run_from_command_line

NUM_CLIENTS = 8
CASE_LIMIT_S = 60
"""A grammar may take ten seconds, and waits for others."""
MAX_REQUEST_BYTES = 1 << 20
_LIMITS = EngineLimits(num_kv_blocks=512, page_size=16, max_tokens_per_sequence=4096)

_SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1}, "s": {"enum": ["a", None]}}}
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": _SCHEMA, "strict": True}}
_NAMED = {"type": "function", "function": {"name": "f"}}
_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"n": 1}'}}
_USER = {"role": "user", "content": [{"type": "text", "text": "hello"}], "name": "Ann"}
_SAMPLING = {
    "model": "default",
    "max_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "n": 2,
    "seed": 7,
    "stop": ["x", "yy"],
    "stop_token_ids": [3],
    "presence_penalty": 0.1,
    "frequency_penalty": -0.1,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.5},
    "min_tokens": 1,
    "ignore_eos": False,
    "cache_salt": "s",
    "return_token_ids": True,
    "prompt_logprobs": 2,
    "user": "me",
    "metadata": {"a": "b"},
}
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}, "prompt_logprobs": None}
_CHAT = _SAMPLING | {"messages": [{"role": "system", "content": "be kind"}, _USER], "max_completion_tokens": 2}
del _CHAT["max_tokens"]
_JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": _SCHEMA, "strict": True}}
_TOOL_MESSAGES = [
    _USER,
    {"role": "assistant", "content": None, "tool_calls": [_CALL], "refusal": None},
    {"role": "tool", "tool_call_id": "c1", "content": "x"},
]
_PLAIN = {"model": "default", "max_tokens": 2}

BODIES: dict[str, tuple[str, Any]] = {
    "completions": ("/v1/completions", _SAMPLING | {"prompt": ["hello", "w"], "echo": True, "logprobs": 2}),
    "completions, ids": ("/v1/completions", _PLAIN | {"prompt": [[1, 2], [3]], "stream": True}),
    "completions, grammar": ("/v1/completions", _PLAIN | {"prompt": "a", "structured_outputs": {"regex": "a+"}}),
    "chat": ("/v1/chat/completions", _CHAT | {"logprobs": True}),
    "chat, streamed": ("/v1/chat/completions", _CHAT | _STREAMED),
    "chat, response_format": (
        "/v1/chat/completions",
        _PLAIN | {"messages": [_USER], "response_format": _JSON_FORMAT},
    ),
    "chat, tools": (
        "/v1/chat/completions",
        _PLAIN
        | {
            "messages": _TOOL_MESSAGES,
            "tools": [_TOOL],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        },
    ),
    "chat, template": (
        "/v1/chat/completions",
        _PLAIN
        | {
            "messages": [_USER],
            "chat_template_kwargs": {"opening": "Hear!", "enable_thinking": False},
            "add_generation_prompt": True,
            "continue_final_message": False,
        },
    ),
    "tokenize": ("/tokenize", {"model": "default", "prompt": "hello", "return_token_strs": True}),
    "tokenize, chat": ("/tokenize", {"messages": _TOOL_MESSAGES, "tools": [_TOOL], "add_generation_prompt": True}),
    "detokenize": ("/detokenize", {"model": "default", "tokens": [1, 2, 3]}),
    "bulk": (
        "/v1/bulk",
        [
            {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": _PLAIN | {"prompt": "a"}},
            {"custom_id": "2", "url": "/v1/chat/completions", "body": _PLAIN | {"messages": [_USER]}},
        ],
    ),
}


def make_content(kind: str, seed: int) -> bytes:
    """The mutated body of a case."""
    rng = random.Random(f"{kind} {seed}")
    body = BODIES[kind][1]
    if isinstance(body, dict) and rng.random() < 0.5:  # one wrong field hides what the others would do
        dropped = {key for key in body if key not in ("model", "messages", "prompt", "tokens") and rng.random() < 0.7}
        body = {key: value for key, value in body.items() if key not in dropped}
    if kind != "bulk":
        return encode(mutate(body, rng, rng.choice([1, 1, 1, 2, 3])), rng)
    lines = mutate(body, rng)
    return b"\n".join(encode(line, rng) for line in (lines if isinstance(lines, list) else [lines]))


def check_answer(kind: str, response: httpx.Response) -> str:
    """The outcome. Raises AssertionError if the answer is wrong."""
    assert response.status_code < 500, f"status {response.status_code}: {response.text[:200]}"
    if response.status_code >= 400:
        assert_openai_error(response.content)
    elif kind == "bulk":
        for line in response.content.splitlines():
            result = orjson.loads(line)
            answer = result["response"]
            assert answer is None or answer["status_code"] < 500, line[:300]
            assert (answer is None or answer["status_code"] >= 400) == (result["error"] is not None), line[:300]
    elif response.headers["content-type"].startswith("text/event-stream"):
        events = [line for line in response.text.split("\n\n") if line]
        assert events[-1] == "data: [DONE]", events[-1][:200]
        for event in events[:-1]:
            assert "error" not in orjson.loads(event.removeprefix("data: ")), event[:200]
    else:
        orjson.loads(response.content)
    return str(response.status_code)


def run(num_cases: int) -> Report:
    report = Report("fuzzed bodies")
    kinds = list(BODIES)
    with _server() as (server, log), ThreadPoolExecutor(NUM_CLIENTS) as pool:

        def ask(seed: int) -> tuple[str, str | None, str]:
            """The kind, its outcome, and what was wrong."""
            kind = kinds[seed % len(kinds)]
            content = make_content(kind, seed)
            try:
                response = server.http.post(BODIES[kind][0], content=content, timeout=CASE_LIMIT_S)
                return kind, check_answer(kind, response), ""
            except (AssertionError, httpx.HTTPError, orjson.JSONDecodeError, LookupError, TypeError) as error:
                return kind, None, f"seed {seed}: {type(error).__name__} {error}; body {content[:150]!r}"

        for kind, (route, body) in BODIES.items():  # the fuzzer would be worthless if these were refused
            lines = body if kind == "bulk" else [body]
            response = server.http.post(route, content=b"\n".join(map(orjson.dumps, lines)))
            if response.status_code != 200:
                report.add_fault(kind, f"unchanged: {response.text}")
        for kind, outcome, wrong in pool.map(ask, range(num_cases)):
            if outcome is None:
                report.add_fault(kind, wrong)
            else:
                report.add(kind, outcome)
        wait_until_clean(server)
        for record in log.records:
            report.add_fault("log", record)
    return report


class _ErrorLog(logging.Handler):
    """Collects errors and tracebacks."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.levelno >= logging.ERROR:
            self.records.append(logging.Formatter().format(record)[-1000:].replace("\n", " | "))


@contextmanager
def _server() -> Iterator[tuple[LiveServer, _ErrorLog]]:
    log = _ErrorLog()
    logging.getLogger().addHandler(log)
    try:
        with tempfile.TemporaryDirectory() as directory:
            model = make_served_model(save_small_tokenizer(Path(directory)))
            with live_server(model, FakeEngine(limits=_LIMITS), max_request_bytes=MAX_REQUEST_BYTES) as server:
                yield server, log
    finally:
        logging.getLogger().removeHandler(log)


if __name__ == "__main__":
    sys.exit(run_from_command_line(run))
