"""Runs against a fake server that caches every prefix and counts computed tokens, then against a real server."""

import itertools
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.server import multiple_choice
from benchmarks.server.multiple_choice import Target, choose, count_distinct, make_questions, measure
from tests.helpers.examples import few
from tests.helpers.tiny_model import save_tiny_model
from tests.server.helpers.live_server import http_server

Change = Callable[[list[float | None]], list[float | None]]

PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8)


@given(PROMPTS)
def test_distinct_tokens_are_the_distinct_beginnings(prompts: list[list[int]]) -> None:
    beginnings = {tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)}
    assert count_distinct(prompts) == len(beginnings)


def words_as_tokens(text: str) -> list[int]:
    return [zlib.crc32(word.encode()) % 50_000 for word in text.split()]


def logprob_after(beginning: tuple[int, ...]) -> float:
    return -(1 + sum(beginning) % 97) / 64


@dataclass
class KeepingServer:
    """Fake server that computes each prefix of a prompt once per cache salt."""

    base_url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    kept: set[tuple[object, ...]] = field(default_factory=set)
    num_computed: int = 0
    keeps: bool = True
    uncounted_per_answer: int = 0
    change: Change = field(default=lambda logprobs: logprobs)

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/tokenize")
        async def tokenize(request: Request) -> dict[str, list[int]]:
            return {"tokens": words_as_tokens((await request.json())["prompt"])}

        @app.get("/metrics")
        async def metrics() -> PlainTextResponse:
            name = "toka_computed_prompt_tokens_total"
            counted = self.num_computed - self.uncounted_per_answer * len(self.bodies)
            return PlainTextResponse(f'# TYPE {name} counter\n{name}{{replica="0"}} {counted}\n')

        @app.post("/v1/completions")
        async def complete(request: Request) -> dict[str, Any]:
            body = await request.json()
            self.bodies.append(body)
            (prompt,) = body["prompt"]
            beginnings = [tuple(prompt[:end]) for end in range(1, len(prompt) + 1)]
            new = {(body["cache_salt"], beginning) for beginning in beginnings} - self.kept
            self.kept |= new if self.keeps else set()
            self.num_computed += len(new)
            logprobs = self.change([None, *map(logprob_after, beginnings)])
            usage = {"prompt_tokens_details": {"computed_tokens": len(new)}}
            return {"choices": [{"logprobs": {"token_logprobs": logprobs}}], "usage": usage}

        return app


@pytest.fixture
def server() -> Iterator[KeepingServer]:
    keeping = KeepingServer()
    with http_server(keeping.app()) as url:
        keeping.base_url = f"{url}/v1"
        yield keeping


def run(server: KeepingServer, *more: str) -> int:
    asked = ("--contexts", "5", "--tokens", "200", "--concurrency", "3")
    return multiple_choice.main(["--base-url", server.base_url, *asked, *more])


def test_all_options_are_asked_as_lm_eval_does_with_prefixes_shared_and_not(
    server: KeepingServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server, "--check") == 0
    prompts = [prompt for body in server.bodies for prompt in body["prompt"]]
    assert len(prompts) == 2 * 5 * 4
    questions = make_questions(5, 200, 0, words_as_tokens)
    expected = Counter(tuple(question.context + option) for question in questions for option in question.options)
    assert Counter(map(tuple, prompts[:20])) == Counter(map(tuple, prompts[20:])) == expected
    assert [len(body["cache_salt"]) > 0 for body in server.bodies] == [True] * 40
    assert len({body["cache_salt"] for body in server.bodies[:20]}) == 1
    assert len({body["cache_salt"] for body in server.bodies[20:]}) == 20
    asked = {"model": "default", "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    for body in server.bodies:
        assert {name: value for name, value in body.items() if name not in ("prompt", "cache_salt")} == asked
    assert len(prompts[0]) == max(map(len, prompts)), "long ones come first"
    distinct = len({tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)})
    num_asked = sum(map(len, expected))
    shown = capsys.readouterr().out.replace(",", "")
    rows = {
        name: re.findall(r"\d+", shown.split(name)[1].split("\n")[0])[:4]
        for name in ("prefixes shared", "nothing shared")
    }
    assert rows["prefixes shared"] == [str(num_asked), *[str(distinct)] * 3]
    assert rows["nothing shared"] == [str(num_asked), str(distinct), *[str(num_asked)] * 2]
    assert "differs by at most 0 " in shown


def test_logprobs_cover_only_the_options_in_the_order_of_the_questions(server: KeepingServer) -> None:
    questions = make_questions(3, 150, 1, words_as_tokens)
    cost = measure("shared", Target(server.base_url, "none"), questions, 2, lambda: "salt")
    expected = [
        sum(logprob_after((*question.context, *option[:end])) for end in range(len(option)))
        for question in questions
        for option in question.options
    ]
    assert cost.logprobs == pytest.approx(expected)
    assert choose([-3.0, -1.0, -1.0, -2.0, -0.5, -4.0, -5.0, -6.0]) == [1, 0]


def test_contexts_are_nearly_as_long_as_asked_and_end_with_an_unanswered_question() -> None:
    questions = make_questions(30, 1000, 3, words_as_tokens)
    assert all(950 < len(question.context) <= 1000 for question in questions)
    assert len({tuple(question.context) for question in questions}) == 30
    for question in questions:
        *answered, (start, end) = itertools.pairwise([*question_starts(question.context), len(question.context)])
        open_one = question.context[start:end]
        assert open_one[-1:] == words_as_tokens("Answer:")
        assert all(question.context[at : at + len(open_one)] != open_one for at, _ in answered), (
            "the open question is not among the answered ones"
        )
        assert len({tuple(option) for option in question.options}) == 4


def question_starts(context: list[int]) -> list[int]:
    return [index for index, token_id in enumerate(context) if [token_id] == words_as_tokens("Question:")]


@few(1, "wrong", ["first known", "one missing", "one null"])
def test_log_probabilities_that_lm_eval_could_not_read_are_an_error(
    server: KeepingServer, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changes: dict[str, Change] = {
        "first known": lambda logprobs: [-1.0, *logprobs[1:]],
        "one missing": lambda logprobs: logprobs[:-1],
        "one null": lambda logprobs: [*logprobs[:7], None, *logprobs[8:]],
    }
    server.change = changes[wrong]
    assert run(server) == 1
    assert "log-probabilities" in capsys.readouterr().err


def test_counts_that_disagree_fail(server: KeepingServer) -> None:
    server.uncounted_per_answer = 1
    assert run(server) == 1


def test_a_ratio_above_the_limit_fails_with_check(server: KeepingServer) -> None:
    server.keeps = False
    assert run(server) == 0
    assert run(server, "--check") == 1


def test_a_server_that_does_not_start_is_an_error_with_its_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert multiple_choice.main(["no_such_flag=3"]) == 1
    assert "no_such_flag" in capsys.readouterr().err


@pytest.mark.long
def test_a_real_server_computes_hardly_more_than_the_distinct_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_model(tmp_path, "qwen3")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    flags = [f"model={tmp_path}", "dtype=float32", "kv_cache_num_tokens=20000", "max_tokens_per_forward=256"]
    asked = ["--contexts", "4", "--tokens", "1200", "--concurrency", "8"]
    assert multiple_choice.main([*flags, *asked, "--check"]) == 0
    shown = capsys.readouterr().out
    difference = re.search(r"differs by at most (\S+) ", shown)
    assert difference is not None
    assert float(difference[1]) < 1e-3
    assert " 0 of 4 questions have another answer" in shown
