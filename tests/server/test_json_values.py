"""Bodies with too many values, compared with a count of their parsed JSON."""

import json
import random
import time
from typing import Any

import httpx
import orjson

from tests.helpers.examples import few
from tests.server.helpers.bodies_and_errors import CHAT, assert_openai_error, minimal_body
from tests.server.helpers.live_server import LiveServer
from tokasaurus.config import ServerConfig
from tokasaurus.server.json_values import has_too_many_values, is_parsed_quickly

MAX_JSON_WORK = ServerConfig.max_json_values


def work_of(value: Any) -> int:
    """Commas between items, 8 for each list or object, 3 for each key."""
    if isinstance(value, list):
        return 8 + max(0, len(value) - 1) + sum(map(work_of, value))
    if isinstance(value, dict):
        return 8 + max(0, len(value) - 1) + 3 * len(value) + sum(map(work_of, value.values()))
    return 0


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice('a,[{:"\\\n€') for _ in range(rng.randint(0, 60)))


@few(2, "seed", range(4))
def test_only_marks_outside_of_strings_count(seed: int) -> None:
    """With many marks and escapes inside of strings, for bodies just below and just above the limit."""
    rng = random.Random(seed)
    value: list[Any] = [{random_text(rng): random_text(rng), "ids": [1] * rng.randint(0, 9)} for _ in range(20_000)]
    value += [1] * (MAX_JSON_WORK - work_of(value))
    content = orjson.dumps(value)
    assert sum(content.count(mark) for mark in (b",", b"[", b"{", b":")) > 2 * len(value) // 3
    assert work_of(value) == MAX_JSON_WORK
    assert not has_too_many_values(content, MAX_JSON_WORK)
    value.append(1)
    assert has_too_many_values(orjson.dumps(value), MAX_JSON_WORK)


def test_a_long_text_full_of_marks_is_no_work() -> None:
    assert not has_too_many_values(orjson.dumps({"prompt": '[{",\\' * 2_000_000}), MAX_JSON_WORK)


def test_what_is_refused_would_take_long_to_parse_and_the_check_does_not() -> None:
    content = b'{"prompt":[' + b"12345," * 5_000_000 + b"1]}"
    check_s, parse_s = [], []
    for _ in range(3):
        started = time.thread_time()
        assert has_too_many_values(content, MAX_JSON_WORK)
        checked = time.thread_time()
        orjson.loads(content)
        check_s.append(checked - started)
        parse_s.append(time.thread_time() - checked)
    assert min(check_s) < min(parse_s)


def test_too_many_values_are_refused_with_the_reason(shared_server: LiveServer) -> None:
    body = orjson.dumps(minimal_body("/v1/completions") | {"prompt": [1] * (MAX_JSON_WORK + 1)})
    response: httpx.Response = shared_server.http.post("/v1/completions", content=body)
    error = assert_openai_error(response.content)
    assert (response.status_code, error["code"]) == (400, "too_many_values")
    line = b'{"custom_id":"a","url":"/v1/completions","body":' + body + b"}\n"
    headers = {"Content-Type": "application/x-ndjson"}
    result = orjson.loads(shared_server.http.post("/v1/bulk", content=line, headers=headers).content)
    assert (result["response"]["status_code"], result["error"]["code"]) == (400, "too_many_values")


def test_bodies_with_patterns_are_not_parsed_on_the_event_loop() -> None:
    body = minimal_body(CHAT) | {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}
    assert is_parsed_quickly(orjson.dumps(body))
    assert is_parsed_quickly(json.dumps(body | {"user": "é"}).encode())
    assert not is_parsed_quickly(orjson.dumps(body | {"user": "x" * 40_000}))
    slow = ({"pattern": "a"}, {"patternProperties": {"a": True}}, {"propertyNames": {"pattern": "a"}})
    slow = (*slow, {"not": {"enum": ["a"]}}, {"if": {"format": "date"}}, {"uniqueItems": True})
    contents = [orjson.dumps(body | {"guided_json": schema}) for schema in slow]
    contents += [orjson.dumps(body | {"guided_json": json.dumps(schema)}) for schema in slow]
    contents += [orjson.dumps(body | {name: "a"}) for name in ("regex", "guided_regex")]
    for content in contents:
        assert not is_parsed_quickly(content)
        assert not is_parsed_quickly(content.replace(b"t", b"\\u0074").replace(b"f", b"\\u0066"))
