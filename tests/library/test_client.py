"""The clients against a real server: results equal those of single HTTP requests; what goes wrong is a result too."""

import asyncio
import dataclasses
import gc
import inspect
import io
import itertools
import json
import multiprocessing
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas
import polars
import pyarrow as pa
import pytest
from pydantic import BaseModel, ConfigDict, field_validator

from tests.end_to_end.helpers.toka_process import TokaProcess, free_port
from tests.library.helpers.cutting_proxy import cutting_proxy
from tokasaurus import AsyncClient, Client, Result, RowsFailed, Sampling, ServerError
from tokasaurus.library import bulk
from tokasaurus.library.map import progress
from tokasaurus.server.protocol.sampling_fields import SamplingFields

HTTP = httpx.Client(timeout=60)
PROMPTS = [f"{number} {'ab' * (number % 7)}: the answer" for number in range(40)]


def ask(toka: TokaProcess, route: str = "completions", **body: Any) -> dict[str, Any]:
    """A single HTTP request."""
    answer = HTTP.post(f"{toka.url}/v1/{route}", json={"model": "default", **body})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_greedy_texts_equal_those_of_single_requests(toka: TokaProcess, client: Client) -> None:
    results = client.generate(PROMPTS, Sampling(temperature=0, max_tokens=12))
    assert [result.key for result in results] == list(range(len(PROMPTS)))
    for prompt, result in zip(PROMPTS, results, strict=True):
        answer = ask(toka, prompt=prompt, temperature=0, max_tokens=12, logprobs=0, return_token_ids=True)
        choice = answer["choices"][0]
        sample = result.samples[0]
        assert (result.text, result.finish_reason, result.row) == (choice["text"], choice["finish_reason"], prompt)
        assert sample.token_ids.tolist() == choice["token_ids"]
        assert sample.logprobs is not None
        assert sample.logprobs == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-5)
        assert sample.prompt_tokens == answer["usage"]["prompt_tokens"]


def test_a_sample_can_be_drawn_again_with_its_seed(toka: TokaProcess, client: Client) -> None:
    result = client.generate(["Once"], Sampling(n=3, max_tokens=8))[0]
    answer = ask(toka, prompt="Once", n=3, max_tokens=8, seed=result.samples[0].seed)
    assert [sample.text for sample in result.samples] == [choice["text"] for choice in answer["choices"]]
    assert len({sample.text for sample in result.samples}) > 1
    again = client.generate(["Once"], Sampling(n=3, max_tokens=8, seed=result.samples[0].seed))[0]
    assert [sample.text for sample in again.samples] == [sample.text for sample in result.samples]


def test_chats_equal_those_of_single_requests(toka: TokaProcess, client: Client) -> None:
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[:8]]
    results = client.chat(conversations, Sampling(temperature=0, max_tokens=9, top_logprobs=2))
    for messages, result in zip(conversations, results, strict=True):
        body = {"temperature": 0, "max_tokens": 9, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
        choice = ask(toka, "chat/completions", messages=messages, **body)["choices"][0]
        sample = result.samples[0]
        assert (sample.text, sample.token_ids.tolist()) == (choice["message"]["content"], choice["token_ids"])
        tops = [[top["logprob"] for top in token["top_logprobs"]] for token in choice["logprobs"]["content"]]
        assert sample.top_logprobs is not None
        assert sample.top_token_ids is not None
        assert sample.top_logprobs.shape == sample.top_token_ids.shape == (len(sample.token_ids), 2)
        assert sample.top_logprobs[: len(tops)] == pytest.approx(np.array(tops), abs=1e-5)


def test_sampled_logprobs_are_of_the_distribution_drawn_from(client: Client) -> None:
    fields: dict[str, Any] = {"n": 2, "temperature": 0.5, "top_k": 3, "seed": 1, "max_tokens": 10, "top_logprobs": 5}
    raw, sampled, default = (
        client.generate(["Once"], Sampling(**fields, logprobs_mode=mode))[0] for mode in ("raw", "sampled", None)
    )
    for own, of_model, by_flag in zip(sampled.samples, raw.samples, default.samples, strict=True):
        assert own.token_ids.tolist() == of_model.token_ids.tolist()
        assert by_flag.logprobs == pytest.approx(of_model.logprobs, abs=1e-5)
        assert own.logprobs is not None
        assert of_model.top_logprobs is not None
        assert own.top_logprobs is not None
        # without the other tokens, twice the differences remain
        expected = 2 * of_model.top_logprobs[:, :3]
        expected -= np.log(np.exp(expected).sum(axis=1, keepdims=True))
        assert own.top_logprobs[:, :3] == pytest.approx(expected, abs=1e-4)
        assert np.isneginf(own.top_logprobs[:, 3:]).all()
        assert own.top_token_ids is not None
        assert own.top_logprobs[own.top_token_ids == own.token_ids[:, None]].tolist() == own.logprobs.tolist()


def test_without_logprobs_samples_have_none(client: Client) -> None:
    sample = client.generate(["a"], Sampling(max_tokens=3, logprobs=False))[0].samples[0]
    assert sample.logprobs is None
    assert len(sample.token_ids) == 3


class Pair(BaseModel, extra="forbid"):
    left: bool
    right: bool


@dataclass
class Halves:
    left: bool
    right: bool
    __pydantic_config__ = ConfigDict(extra="forbid")


@dataclass
class OfFile:
    file: io.IOBase


class WithFunction(BaseModel):
    call: Callable[[int], int]


class Impossible(Pair):
    @field_validator("left")
    @classmethod
    def _refuse(cls, _value: bool) -> bool:
        raise ValueError("never")


def test_a_schema_gives_objects(client: Client) -> None:
    sampling = Sampling(n=2, max_tokens=150, temperature=0.5, seed=1)  # a random model may write spaces for ever
    for sample in client.chat([[{"role": "user", "content": "a"}]], sampling, schema=Pair)[0].samples:
        assert isinstance(sample.parsed, Pair), sample.parse_error
        assert sample.parsed == Pair.model_validate_json(sample.text)
    halves = client.generate(["a"], sampling, schema=Halves)[0]
    assert isinstance(halves.parsed, Halves), halves.samples[0].parse_error
    assert dataclasses.asdict(halves.parsed) == json.loads(halves.text or "")
    by_json = client.generate(["a"], sampling, schema=Pair.model_json_schema())[0].samples[0]
    assert by_json.parsed == json.loads(by_json.text)
    refused = client.generate(["a"], sampling, schema=Impossible)[0].samples[0]
    assert (refused.parsed, refused.parse_error) == (None, "left: Value error, never")
    cut = client.generate(["a"], Sampling(max_tokens=2, seed=1), schema=Pair)[0].samples[0]
    assert cut.parsed is None
    assert str(cut.parse_error).startswith("the text was cut at its limit of tokens: Invalid JSON: EOF")


def test_a_text_alone_is_one_prompt(client: Client) -> None:
    greedy = Sampling(temperature=0, max_tokens=6)
    (result,) = client.generate("Once upon", greedy)
    assert (result.text, result.row) == (client.generate(["Once upon"], greedy)[0].text, "Once upon")
    (streamed,) = client.stream("Once upon", greedy)
    assert streamed.text == result.text
    (score,) = client.score("Once", " upon")
    assert score.total == client.score(["Once"], [" upon"])[0].total
    (chat,) = client.chat("Once upon", greedy)
    expected = client.chat([[{"role": "user", "content": "Once upon"}]], greedy)[0].text
    assert (chat.text, chat.row) == (expected, "Once upon")
    assert [one.text for one in client.chat(["Once upon", "Once upon"], greedy)] == [expected] * 2

    async def alone() -> list[str | None]:
        async with AsyncClient(client._client._address[0]) as other:
            results = [*await other.generate("Once upon", greedy), *await other.chat("Once upon", greedy)]
            return [one.text for one in results]

    assert asyncio.run(alone()) == [result.text, expected]


BAD = ["a", "x " * 5000, None, "y " * 5000]
"""Three prompts of four have errors, of two kinds."""
SUMMARY = r"^3 of 4 prompts failed: 2 x context_length_exceeded: .+; 1 x bad_prompt: .+"
HINT = r" \(their \.error says why\)$"


def test_errors_of_a_call_are_one_warning_where_it_is_made(client: Client) -> None:
    calls: list[Callable[[], object]] = [
        lambda: client.generate(BAD, Sampling(max_tokens=2)),  # type: ignore[arg-type]
        lambda: client.chat([conversation(text) for text in BAD], Sampling(max_tokens=2)),
        lambda: [*client.stream(BAD, Sampling(max_tokens=2))],  # type: ignore[arg-type]
        lambda: client.score(BAD, ["b"] * 4),
    ]
    for call in calls:
        with pytest.warns(RowsFailed) as caught:
            call()
        assert len(caught) == 1
        assert caught[0].filename == __file__
        assert re.match(SUMMARY + HINT, str(caught[0].message)), caught[0].message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        client.generate(BAD[:1], Sampling(max_tokens=2))  # type: ignore[arg-type]
        assert len([*client.stream(BAD[:1], Sampling(max_tokens=2))]) == 1  # type: ignore[arg-type]


def test_coroutines_warn_where_they_are_awaited(client: Client) -> None:
    async def call() -> None:
        async with AsyncClient(client._client._address[0]) as other:
            await other.generate(BAD, Sampling(max_tokens=2))  # type: ignore[arg-type]
            await other.score(BAD, ["b"] * 4)
            assert len([one async for one in other.stream(BAD, Sampling(max_tokens=2))]) == 4  # type: ignore[arg-type]

    with pytest.warns(RowsFailed) as caught:
        asyncio.run(call())
    assert [warning.filename for warning in caught] == [__file__] * 3
    assert all(re.match(SUMMARY + HINT, str(warning.message)) for warning in caught)


def test_raise_on_error_raises_what_would_be_a_warning(client: Client) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        with pytest.raises(RowsFailed, match=SUMMARY) as raised:
            client.generate(BAD, Sampling(max_tokens=2), raise_on_error=True)  # type: ignore[arg-type]
    assert not re.search(HINT, str(raised.value))
    assert [result.error is None for result in raised.value.results] == [True, False, False, False]
    with pytest.raises(RowsFailed, match=r"^1 of 1 prompt failed: 1 x bad_prompt: "):
        client.chat([conversation(None)], raise_on_error=True)
    with pytest.raises(RowsFailed, match=SUMMARY):
        client.score(BAD, ["b"] * 4, raise_on_error=True)
    assert client.generate("a", Sampling(max_tokens=2), raise_on_error=True)[0].error is None


def conversation(text: str | None) -> Any:
    return text if text is None else [{"role": "user", "content": text}]


def test_a_client_is_described_in_a_line(client: Client, toka: TokaProcess) -> None:
    assert repr(client) == f"Client({toka.url}, {client.model})"
    other = AsyncClient("http://user:secret@127.0.0.1:1/v1", api_key="secret")
    assert repr(other) == "AsyncClient(127.0.0.1:1/v1)"
    asyncio.run(other.close())
    assert repr(other) == "AsyncClient(127.0.0.1:1/v1, closed)"


def test_scores_are_the_logprobs_of_the_completions_tokens(toka: TokaProcess, client: Client) -> None:
    prompts, completions = ["one two", "three", "x"], [" three", " four five", "y"]
    for prompt, completion, score in zip(prompts, completions, client.score(prompts, completions), strict=True):
        answer = ask(toka, prompt=prompt + completion, max_tokens=1, prompt_logprobs=0, return_token_ids=True)
        choice = answer["choices"][0]
        num_prompt = len(
            ask(toka, prompt=prompt, max_tokens=1, return_token_ids=True)["choices"][0]["prompt_token_ids"]
        )
        ids = choice["prompt_token_ids"][num_prompt:]  # each byte is a token in this model
        values = [
            entry[str(token)]["logprob"]
            for token, entry in zip(ids, choice["prompt_logprobs"][num_prompt:], strict=True)
        ]
        assert score.token_ids.tolist() == ids
        assert score.logprobs == pytest.approx(values, abs=1e-5)
        assert score.total == pytest.approx(sum(values), abs=1e-4)
        by_ids = client.score([choice["prompt_token_ids"][:num_prompt]], [ids])[0]
        assert by_ids.logprobs == pytest.approx(values, abs=1e-5)


def test_the_first_token_of_all_has_no_score(client: Client) -> None:
    """The tiny model has no start token."""
    score = client.score([""], ["abc"])[0]
    assert np.isnan(score.logprobs).tolist() == [True, False, False]
    assert score.error is None
    assert np.isnan(score.total)


def test_pairs_that_cannot_be_scored_have_errors(client: Client) -> None:
    prompts: list[Any] = ["a", None, "\ud800", "long " * 600, "a", b"ab", np.array(5)]
    scores = client.score(prompts, ["b", None, "b", "b", [1], [1], [1]])
    assert scores[0].error is None
    messages = [str(score.error) for score in scores[1:]]
    assert messages[3] == "a prompt and its completion are both texts or both token ids, and one is a text"
    assert messages[4] == "a prompt and its completion are texts or lists of token ids, not a bytes"
    assert messages[5] == "a prompt and its completion are texts or lists of token ids, not an int"
    assert messages[0] == "a prompt and its completion are texts or lists of token ids, not None"
    assert "surrogates" in messages[1]
    assert all(len(score.logprobs) == 0 and np.isnan(score.total) for score in scores[1:])


def test_every_bad_row_has_an_error_and_the_others_have_results(client: Client) -> None:
    rows: list[Any] = [
        "good",
        None,
        "\ud800",
        "long " * 600,
        [1, "a"],
        [999_999],
        {"id": 1},
        "fine",
        [],
        [{"role": "x"}],
    ]
    results = {result.key: result for result in client.stream(rows, Sampling(max_tokens=2))}
    assert sorted(results) == list(range(len(rows)))
    assert {key for key, result in results.items() if result.error is None} == {0, 7}
    messages = {key: str(result.error) for key, result in results.items() if result.error is not None}
    assert messages[1] == "a prompt is a text, a list of token ids or a list of messages, not None"
    assert "surrogates" in messages[2]
    assert results[3].error is not None
    assert results[3].error.code == "context_length_exceeded"
    assert messages[4] == "a list of token ids contains a str"
    assert "999999" in messages[5]
    assert messages[6] == 'a row has either "prompt" or "messages"'
    assert messages[8] == "the list of token ids or messages is empty"
    assert "role" in messages[9]
    assert results[1].text is results[1].parsed is results[1].finish_reason is None
    schemas = client.generate(["a", "b"], Sampling(max_tokens=2), schema={"type": "object", "not": {}})
    assert ["nsatisfiable" in str(result.error) for result in schemas] == [True, True]


def test_a_row_without_its_key_is_an_error_of_this_row(client: Client) -> None:
    rows: list[Any] = [{"id": "a", "prompt": "x"}, {"prompt": "x"}, "x", None, {"id": None, "prompt": "y"}]
    results = list(client.stream(iter(rows), Sampling(max_tokens=2), key="id"))
    found = sorted((rows.index(result.row), result.key, result.error and result.error.code) for result in results)
    missing = "row_without_key"
    assert found == [(0, "a", None), (1, None, missing), (2, None, missing), (3, None, missing), (4, None, None)]


class Raising(Pair):
    @field_validator("left")
    @classmethod
    def _raise(cls, _value: bool) -> bool:
        raise KeyError("never")


def test_what_a_validator_raises_is_the_reason_of_its_sample(client: Client) -> None:
    sampling = Sampling(max_tokens=150, temperature=0.5, seed=1)
    sample = client.generate(["a"], sampling, schema=Raising)[0].samples[0]
    assert (sample.parsed, sample.parse_error) == (None, "KeyError: 'never'")


def test_rows_are_read_as_there_is_room(toka: TokaProcess) -> None:
    num_read = 0

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal num_read
        for number in range(300):
            num_read += 1
            yield {"id": f"row {number}", "prompt": str(number)}

    with Client(toka.url, concurrency=10) as few:
        keys = []
        for num_results, result in enumerate(few.stream(rows(), Sampling(max_tokens=2), key="id"), start=1):
            assert num_read <= num_results + 20, "ten at the server, and ten results that have arrived with this one"
            keys.append(result.key)
            assert result.row["prompt"] in result.key
    assert sorted(keys) == sorted(f"row {number}" for number in range(300))


def test_a_stream_that_is_left_cancels_its_rows(toka: TokaProcess, client: Client) -> None:
    results = client.stream(PROMPTS, Sampling(max_tokens=200, ignore_eos=True))
    next(iter(results))
    results.close()  # type: ignore[attr-defined]
    assert client.generate(["a"], Sampling(max_tokens=2))[0].error is None
    assert toka.gauge("toka_kv_blocks_used") >= 0


def test_an_error_of_the_rows_is_raised(client: Client) -> None:
    def rows() -> Iterator[str]:
        yield "a"
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        list(client.stream(rows(), Sampling(max_tokens=2)))


def test_lost_connections_change_no_result(toka: TokaProcess, client: Client) -> None:
    sampling = Sampling(temperature=0, max_tokens=6)
    expected = [result.text for result in client.generate(PROMPTS, sampling)]
    with cutting_proxy(toka.url, [10_000, 700, 2000, 1]) as proxy, Client(proxy.url) as through:
        # the first connection finds the model, and is used again
        assert [result.text for result in through.generate(PROMPTS, sampling)] == expected
        assert proxy.num_connections == 5


def test_a_lost_server_is_the_error_of_what_is_left(toka: TokaProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the end of a stream, whose rows may have no end."""
    monkeypatch.setattr(bulk, "MAX_SILENCE_S", 0.5)
    num_read = 0

    def rows() -> Iterator[str]:
        nonlocal num_read
        while True:
            num_read += 1
            yield str(num_read)

    with cutting_proxy(toka.url, [4000]) as proxy, Client(proxy.url, concurrency=8) as through:
        results = through.stream(rows(), Sampling(max_tokens=2))
        first = next(results)
        proxy.stop()
        rest: list[Result] = []
        with pytest.raises(ServerError, match="onnect"):
            rest.extend(results)
        generated = through.generate(PROMPTS, Sampling(max_tokens=2))
    assert [result.error and result.error.code for result in generated] == ["server_lost"] * len(PROMPTS)
    assert [(result.key, result.row) for result in generated] == list(enumerate(PROMPTS))
    assert first.error is None
    errors = [result.error.code for result in rest if result.error is not None]
    assert errors == ["server_lost"] * len(errors)
    assert 0 < len(errors) <= 8, "those that were in flight"
    assert {result.key for result in (first, *rest)} == set(range(num_read)), "each row that was read has its result"


def test_no_server_is_said_at_once(caplog: pytest.LogCaptureFixture) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ServerError, match=f"no answer from {url}.*is the server running"):
        Client(url)

    async def enter() -> None:
        async with AsyncClient(url):
            pass

    with pytest.raises(ServerError, match=f"no answer from {url}"):
        asyncio.run(enter())
    gc.collect()
    assert caplog.text == "", "no connection is left open"


class _Echo(BaseHTTPRequestHandler):
    """Answers the prompt P with `PP`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send(b'{"data": [{"id": "m"}]}', "Content-Length")

    def do_POST(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while size := int(self.rfile.readline(), 16):
            for line in self.rfile.read(size).splitlines():
                self._answer(json.loads(line))
            self.rfile.readline()
        self._write(b"")

    def _answer(self, line: dict[str, Any]) -> None:
        prompt = line["body"]["prompt"]
        usage = {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
        packed = dict.fromkeys(("packed_chosen_logprobs", "packed_topk_indices", "packed_topk_logprobs"))
        fingerprint = json.dumps({"completion_ids": [[1]], **packed})
        choices = [{"text": prompt * 2, "finish_reason": "stop"}]
        body = {"choices": choices, "usage": usage, "system_fingerprint": fingerprint}
        response = {"status_code": 200, "body": body}
        self._write(json.dumps({"custom_id": line["custom_id"], "response": response}).encode() + b"\n")

    def _write(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))
        self.wfile.flush()

    def _send(self, content: bytes, header: str) -> None:
        self.send_response(200)
        self.send_header(header, str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None: ...


class _Silent(_Echo):
    """As if its machine had vanished: says nothing after the start of its first answer."""

    num_posts = 0

    def do_POST(self) -> None:
        _Silent.num_posts += 1
        if _Silent.num_posts > 1:
            super().do_POST()
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.connection.recv(1 << 16)
        self.connection.recv(1 << 16)  # until the client has given up


class _Deaf(_Silent):
    """Does not even begin an answer."""

    def do_POST(self) -> None:
        _Silent.num_posts += 1
        if _Silent.num_posts > 1:
            _Echo.do_POST(self)
            return
        while self.connection.recv(1 << 16):
            pass


@pytest.mark.parametrize("kind", [_Silent, _Deaf])
def test_a_server_that_says_nothing_is_asked_again(kind: type[_Silent], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Silent, "num_posts", 0)
    monkeypatch.setattr(bulk, "_MAX_QUIET_S", 0.5)
    monkeypatch.setattr(bulk, "_PAUSES_S", (0.01,))
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with Client(f"http://127.0.0.1:{server.server_port}") as silent:
            results = silent.generate(["quiet"])
        server.shutdown()
    assert ([result.text for result in results], _Silent.num_posts) == (["quietquiet"], 2)


def test_wrong_calls_raise_at_once_and_name_what_is_wrong(client: Client) -> None:
    with pytest.raises(TypeError, match="temprature"):
        Sampling(temprature=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^Sampling has no field 'max_new_tokens': max_tokens is its name here$"):
        Sampling(max_new_tokens=3)  # type: ignore[call-arg]
    for wrong, message in (
        ({"temperature": 3}, "temperature must be at most 2, not 3"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 1.5}, "n must be a whole number, not 1.5"),
        ({"stop": 5}, "stop must be a string or a list of strings, not 5"),
        ({"logprobs": 1}, "logprobs must be True or False, not 1"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs goes with logprobs=True"),
        ({"logit_bias": [1]}, "logit_bias must map token ids to numbers"),
        ({"logit_bias": {-1: 1}}, "logit_bias must contain token ids as keys"),
        ({"logit_bias": {1: 101}}, "logit_bias must contain numbers from -100 to 100"),
        ({"seed": -1}, r"seed must be a whole number from 0 to 2\*\*64 - 1, not -1"),
        ({"seed": 2**64}, "seed must be"),
        ({"seed": 1.0}, "seed must be"),
        ({"temperature": -0.1}, "temperature must be at least 0, not -0.1"),
        ({"temperature": float("nan")}, "temperature must be a finite number, not nan"),
        ({"temperature": "1"}, "temperature must be a number, not '1'"),
        ({"n": 0}, "n must be at least 1, not 0"),
        ({"n": True}, "n must be a whole number, not True"),
        ({"top_p": 0}, "top_p must be greater than 0, not 0"),
        ({"top_p": 1.5}, "top_p must be at most 1, not 1.5"),
        ({"top_k": -2}, "top_k must be .*not -2"),
        ({"min_p": 2}, "min_p must be .*not 2"),
        ({"presence_penalty": 3}, "presence_penalty must be .*not 3"),
        ({"frequency_penalty": -3}, "frequency_penalty must be .*not -3"),
        ({"repetition_penalty": 0}, "repetition_penalty must be .*not 0"),
        ({"max_tokens": -1}, "max_tokens must be .*not -1"),
        ({"min_tokens": -1}, "min_tokens must be .*not -1"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be at most max_tokens=4, not 5"),
        ({"stop": ""}, "stop must not contain an empty string"),
        ({"stop_token_ids": [-1]}, "stop_token_ids: -1 is no token id"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must be a list of token ids"),
        ({"top_logprobs": -1}, "top_logprobs must be a whole number from 0"),
        ({"priority": 2**63}, "priority must be "),
        ({"ignore_eos": 1}, "ignore_eos must be .*not 1"),
        (
            {"seed": -1, "n": 0, "top_p": 2},
            r"Sampling: 3 problems: \(1\) seed must be .*, not -1; "
            r"\(2\) (n|top_p) must be .*; \(3\) (n|top_p) must be [^;]*$",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            Sampling(**wrong)
    with pytest.raises(TypeError, match="prompts must be an iterable of prompts, not bytes"):
        client.generate(b"a")
    with pytest.raises(TypeError, match="conversations must be a list of conversations"):
        client.chat([{"role": "user", "content": "a"}])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="sampling must be a Sampling, not dict"):
        client.generate(["a"], {"n": 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="temperature belongs into Sampling"):
        client.generate(["a"], temperature=0)
    with pytest.raises(TypeError, match=r"no argument 'shcema', and no field of this name in /v1/completions$"):
        client.generate(["a"], shcema=Pair)
    with pytest.raises(TypeError, match="no argument 'chat_template_kwargs'"):
        client.generate(["a"], chat_template_kwargs={})
    with pytest.raises(ValueError, match="options: structured_outputs must be an object"):
        client.generate(["a"], structured_outputs="yes|no")
    with pytest.raises(ValueError, match="options: user must be a string"):
        list(client.stream(["a"], user=5))
    with pytest.raises(ValueError, match=r"options: 2 problems: \(1\) .* must be .*; \(2\) .* must be "):
        list(client.stream(["a"], user=5, cache_salt=5))
    with pytest.raises(TypeError, match="echo cannot be chosen"):
        client.generate(["a"], echo=True)
    with pytest.raises(TypeError, match="response_format cannot be combined with schema"):
        client.generate(["a"], schema=Pair, response_format={"type": "json_object"})
    with pytest.raises(TypeError, match=r"conversations\[1\] must be the text of a message, or a list of messages"):
        client.chat([[{"role": "user", "content": "a"}], [1, 2]])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"prompts\[0\] has messages, which `chat` answers"):
        client.generate([[{"role": "user", "content": "a"}]])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"base_url must begin with http:// or https://, not '127.0.0.1:1'"):
        Client("127.0.0.1:1")
    with pytest.raises(TypeError, match="schema must be a pydantic class, a dataclass or a JSON schema, not a str"):
        client.generate(["a"], schema="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"schema: WithFunction has no JSON schema: .*CallableSchema"):
        client.generate(["a"], schema=WithFunction)
    with pytest.raises(ValueError, match=r"schema: OfFile has no JSON schema: .*IOBase"):
        client.generate(["a"], schema=OfFile)
    with pytest.raises(TypeError, match=r"prompts must be a list of prompts; for one of them, write \[prompt\]"):
        client.generate(np.array([1, 2]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="base_url must be a URL, not int"):
        Client(10210)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1 prompts and 2 completions"):
        client.score(["a"], ["b", "c"])
    with pytest.raises(ValueError, match="concurrency must be a whole number from 1"):
        Client(concurrency=0)


def test_prompts_may_be_a_column_of_any_library(client: Client) -> None:
    sampling = Sampling(temperature=0, max_tokens=3)
    texts = [result.text for result in client.generate(PROMPTS[:3], sampling)]
    for make in (np.array, pandas.Series, polars.Series, pa.array):
        assert [result.text for result in client.generate(make(PROMPTS[:3]), sampling)] == texts
        assert {result.text for result in client.stream(make(PROMPTS[:3]), sampling)} == set(texts)
    ids = client.generate(np.array([[1, 2], [3, 4]]), sampling)
    assert [result.text for result in ids] == [result.text for result in client.generate([[1, 2], [3, 4]], sampling)]


def test_every_sampling_field_of_the_api_can_be_set() -> None:
    own = set(inspect.signature(Sampling).parameters) - {"logprobs", "top_logprobs", "adapter"}
    # what results are read from, what each method sets, and what concerns no sampling
    elsewhere = {
        *("model", "logprobs_in_fingerprint", "return_token_ids", "stream", "stream_options", "prompt_logprobs"),
        *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        "return_tokens_as_token_ids",
        *("json_schema", "regex", "ebnf", "grammar", "cache_salt", "best_of", "request_id", "rid"),
        *("user", "metadata", "safety_identifier", "prompt_cache_key", "spaces_between_special_tokens"),
        # options: of the text and of the prompt
        *("skip_special_tokens", "include_stop_str_in_output", "no_stop_trim"),
        *("truncate_prompt_tokens", "add_special_tokens", "allowed_token_ids", "bad_words"),
        *("return_routed_experts", "routed_experts_prompt_start"),  # of roll-outs
    }
    assert own == set(SamplingFields.model_fields) - elsewhere


def test_sampling_takes_numbers_of_numpy() -> None:
    sampling = Sampling(n=np.int64(3), temperature=np.float32(0.5), stop=("a", "b"))  # type: ignore[arg-type]
    assert sampling.shared_fields() == {"n": 3, "temperature": 0.5, "stop": ["a", "b"]}


def test_equal_samplings_are_written_equally() -> None:
    """`map` goes on with a job if its requests are the same."""
    written = [Sampling(stop=stop).shared_fields() for stop in ("a", ["a"], ("a",))]
    assert written == [{"stop": ["a"]}] * 3
    assert str(Sampling(temperature=0).shared_fields()) == str(Sampling(temperature=0.0).shared_fields())
    assert Sampling(stop=()).shared_fields() == Sampling(stop=[]).shared_fields() == Sampling().shared_fields() == {}


def test_a_client_that_cannot_be_used_says_so(toka: TokaProcess, client: Client) -> None:
    closed = Client(toka.url)
    closed.close()
    with pytest.raises(ServerError, match="the client is closed"):
        closed.generate(["a"])

    async def use_after_its_context() -> None:
        async with AsyncClient(toka.url) as left:
            pass
        await left.generate(["a"])

    with pytest.raises(ServerError, match="the client is closed"):
        asyncio.run(use_after_its_context())

    def use_in_child() -> None:
        with pytest.raises(RuntimeError, match="a forked process cannot use the client of its parent"):
            client.generate(["a"])

    child = multiprocessing.get_context("fork").Process(target=use_in_child)
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert client.generate(["a"], Sampling(max_tokens=1))[0].error is None


def test_a_call_that_takes_long_shows_how_far_it_is(
    client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sampling = Sampling(max_tokens=200, ignore_eos=True)
    client.generate(PROMPTS[:4], sampling)
    assert capsys.readouterr().err == "", "it takes less than three seconds"
    monkeypatch.setattr(progress, "FIRST_S", 0.0)
    monkeypatch.setattr(progress, "_LOOK_S", 0.01)
    client.generate([*PROMPTS, None], sampling)  # type: ignore[list-item]
    shown = capsys.readouterr().err
    assert re.match(r"\d+ of 41 rows done, 1 error, .* tokens/s, .* left\n", shown), shown
    client.generate(PROMPTS, sampling, progress=False)
    assert capsys.readouterr().err == ""
    client.score(iter([*PROMPTS * 8, None]), iter(["b" * 200] * 321))
    assert capsys.readouterr().err.splitlines()[-1].startswith("321 of 321 rows done, 1 error, ")


def test_clients_work_where_an_event_loop_runs(toka: TokaProcess, client: Client) -> None:
    sampling = Sampling(temperature=0, max_tokens=5)
    expected = [result.text for result in client.generate(PROMPTS[:5], sampling)]

    async def main() -> list[list[str | None]]:
        with Client(toka.url) as blocking:
            texts = [[result.text for result in blocking.generate(PROMPTS[:5], sampling)]]
        async with AsyncClient(toka.url) as waiting:
            generated = await waiting.generate(PROMPTS[:5], sampling)
            streamed = {result.key: result.text async for result in waiting.stream(PROMPTS[:5], sampling)}
            scores = await waiting.score(["a"], ["b"])
        assert scores[0].total == pytest.approx(client.score(["a"], ["b"])[0].total, abs=1e-5)
        return [*texts, [result.text for result in generated], [streamed[number] for number in range(5)]]

    assert asyncio.run(main()) == [expected] * 3


def test_map_of_an_async_client_equals_that_of_a_client(toka: TokaProcess, client: Client, tmp_path: Path) -> None:
    rows = [{"id": number, "text": prompt} for number, prompt in enumerate(PROMPTS[:12])]
    sampling = Sampling(temperature=0, max_tokens=4)
    expected = client.map(rows, prompt="{text}", sampling=sampling, progress=False)

    async def main() -> None:
        async with AsyncClient(toka.url) as waiting:
            assert await waiting.map(rows, prompt="{text}", sampling=sampling, progress=False) == expected
            with pytest.raises(TypeError, match="no argument 'shcema'"):
                await waiting.map(rows, prompt="{text}", shcema={})
            slow = Sampling(max_tokens=400, ignore_eos=True)
            many = [{"id": number, "text": "a"} for number in range(500)]
            job = waiting.map(many, tmp_path / "out", prompt="{text}", key="id", sampling=slow, progress=False)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(job, 1.0)
            endless = ({"text": "a"} for _ in itertools.count())
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(waiting.map(endless, prompt="{text}", sampling=slow, progress=False), 1.0)
            # more than asyncio has threads, all of which are at work when each is to be closed
            jobs = [waiting.map(many, prompt="{text}", sampling=slow, progress=False) for _ in range(40)]
            started = time.monotonic()
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.gather(*jobs), 1.0)
            assert time.monotonic() - started < 20
            # the client still serves
            assert (await waiting.generate(["a"], sampling))[0].error is None

    asyncio.run(main())
