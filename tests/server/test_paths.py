"""Paths: base URLs with and without /v1 and slashes lead to the same routes, without a redirect, past no check."""

from collections.abc import Iterator
from random import Random

import openai
import orjson
import pytest

from tests.helpers.examples import seeds
from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS, assert_openai_error, minimal_body
from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import LiveServer, live_server
from tests.server.helpers.raw_http import ask, connect, read_all
from tokasaurus.server.served_model import ServedModel

KEY = "s3cret-key"


@pytest.fixture(scope="module")
def guarded(served_model: ServedModel) -> Iterator[LiveServer]:
    with live_server(served_model, FakeEngine(), api_key=KEY, allowed_hosts="llm.example") as server:
        yield server


@pytest.mark.parametrize("end", ["", "/", "//", "/v1", "/v1/", "/v1//", "//v1/", "/v1/v1"])
def test_openais_client_works_with_every_base_url(shared_server: LiveServer, end: str) -> None:
    client = openai.OpenAI(base_url=f"{shared_server.url}{end}", api_key="none", max_retries=0)
    assert client.completions.create(model="default", prompt="hello").choices[0].text == "hello"
    messages = [{"role": "user", "content": "hello"}]
    chunks = client.chat.completions.create(model="default", messages=messages, stream=True)  # type: ignore[call-overload]
    assert "hello" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert client.models.retrieve("org/small") == client.models.list().data[0]
    stored = client.files.create(file=("a.jsonl", b"{}"), purpose="batch")
    assert client.files.content(stored.id).content == b"{}"
    assert stored.id in [file.id for file in client.files.list()]
    client.files.delete(stored.id)
    assert client.batches.list().data == []


def spellings(path: str, random: Random) -> str:
    """The path with slashes doubled and added at random, and with /v1 once more, or without it."""
    names = path.strip("/").split("/")
    if names[0] == "v1":
        names = random.choice((names, names[1:], ["v1", *names]))
    return "".join("/" * random.randint(1, 3) + name for name in names) + "/" * random.randrange(3)


@pytest.mark.parametrize("seed", seeds(10))
def test_every_route_has_the_same_answer_under_every_spelling_of_its_path(guarded: LiveServer, seed: int) -> None:
    random = Random(seed)
    paths = guarded.http.get("/openapi.json").json()["paths"]
    for path, methods in paths.items():
        for method in methods:
            plain = path.replace("{name}", "org/small").replace("{file_id}", "x").replace("{batch_id}", "x")
            spelled = spellings(plain, random)
            for key in ("wrong",) if path == "/live" else (KEY, "wrong"):  # /live has no end
                headers = {"Authorization": f"Bearer {key}", "Connection": "close"}
                answers = []
                for asked in (plain, spelled):
                    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
                    head = f"{method.upper()} {asked} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n{lines}\r\n"
                    answers.append(ask(guarded.url, head.encode()))
                assert answers[0].status == answers[1].status, spelled
                assert answers[0].status < 300 or answers[0].status >= 400, "no redirects"
                is_open = path in ("/health", "/ready")
                assert (answers[1].status == 401) == (key == "wrong" and not is_open), spelled


@pytest.mark.parametrize(
    "path",
    [
        *("/health/../v1/models", "/health/..//v1/models", "//health/../v1/models", "/ready/../../v1/models"),
        *("/health/v1/models", "/v1/models/health", "/v1/models//health", "/v1/models#/health", "/v1/models?/health"),
        *("/health;/v1/models", "/%2e%2e/v1/models", "/health%2f..%2fv1/models", "/v1/v1/models", "/models/"),
        *("//v1//models//", "/v1/models/../health", "/./v1/models", "/health\\..\\v1/models", "/%76%31/models"),
        *("http://localhost/v1/models", "http://health/v1/models", "//health/v1/models", "/Health", "/v1/healthy"),
        *(
            "/V1/models",
            "/docs/nothing",
            "/openapi.json",
            "/docs/../v1/models",
            "/metrics/",
            "/v1/metrics",
            "//metrics",
        ),
    ],
)
def test_no_spelling_leads_past_the_key_and_the_host(guarded: LiveServer, path: str) -> None:
    for method in ("GET", "POST", "HEAD", "OPTIONS"):
        for host, key, status in (("localhost", "wrong", 401), ("rebound.example", KEY, 421)):
            lines = f"Host: {host}\r\nAuthorization: Bearer {key}\r\nContent-Length: 0\r\nConnection: close\r\n"
            with connect(guarded.url) as connection:
                connection.sendall(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode())
                answered = int(read_all(connection).split(b" ")[1])  # an answer to HEAD has no body
            assert answered in (status, 400), (method, path)


@pytest.mark.parametrize("path", ["/health/", "//health", "/v1/health", "/ready//"])
def test_probes_need_no_key_under_every_spelling(guarded: LiveServer, path: str) -> None:
    assert (
        ask(guarded.url, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()).status == 200
    )


@pytest.mark.parametrize("path", ["//v1/completions", "/completions/", "/v1//completions//", "/v1/v1/completions"])
def test_a_body_arrives_whole_under_every_spelling(shared_server: LiveServer, path: str) -> None:
    content = orjson.dumps(minimal_body(COMPLETIONS) | {"prompt": "hello world " * 20, "max_tokens": 100})
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    answer = ask(shared_server.url, head.encode() + content)
    assert answer.status == 200
    assert orjson.loads(answer.body)["choices"][0]["text"] == "hello world " * 20


def test_a_question_about_the_whole_server_is_answered(shared_server: LiveServer, guarded: LiveServer) -> None:
    """RFC 9110, section 9.3.7: the target of OPTIONS may be an asterisk, which is no path."""
    answer = ask(shared_server.url, b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert (answer.status, answer.body) == (204, b"")
    assert ask(guarded.url, b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").status == 401


def test_an_error_names_the_route_and_a_wrong_method_is_one(shared_server: LiveServer) -> None:
    answer = shared_server.http.get("/chat//completions/")
    assert answer.status_code == 405
    assert CHAT in assert_openai_error(answer.content)["message"]
