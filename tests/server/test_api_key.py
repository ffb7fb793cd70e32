"""API keys: every route except /health, /ready and the pages refuses a request without one, before it reads the
body."""

import hashlib
import http.client
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import openai
import orjson
import pytest

from tests.server.helpers import raw_http
from tests.server.helpers.bodies_and_errors import CHAT, COMPLETIONS, assert_openai_error, minimal_body
from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import LiveServer, live_server
from tokasaurus.messages.status import UserError
from tokasaurus.server.access import read_api_keys
from tokasaurus.server.served_model import ServedModel

KEY = "s3cret-key"
FILE_KEYS = ["key-of-alice", "key-of-bob", "key-without-name", "second-of-alice"]
UNLISTED_ROUTES = [("GET", "/openapi.json"), ("GET", "/docs/other"), ("GET", "/nowhere")]


def ask(
    server: LiveServer, method: str, path: str, authorization: str | None, body: bytes | None = None
) -> tuple[http.client.HTTPResponse, bytes]:
    """Sends one request; http.client can send a header value that ends in a space, as some clients do; httpx cannot."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=20)
    headers = {} if authorization is None else {"Authorization": authorization.encode()}
    connection.request(method, path, body if method == "POST" else None, headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response, content


@pytest.fixture(scope="module")
def guarded(served_model: ServedModel) -> Iterator[LiveServer]:
    with live_server(served_model, FakeEngine(), api_key=KEY) as server:
        yield server


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        f"Basic {KEY}",
        KEY,
        "Bearer é",
        "Bearer none",
    ],
)
def test_every_route_except_the_open_ones_returns_401_without_the_key(guarded: LiveServer, header: str | None) -> None:
    paths = guarded.http.get("/openapi.json").json()["paths"]
    listed = [
        (method.upper(), path)
        for path, methods in paths.items()
        for method in methods
        if path not in ("/health", "/ready")
    ]
    assert ("POST", CHAT) in listed
    for method, path in listed + UNLISTED_ROUTES:
        response, content = ask(guarded, method, path, header, b"{")
        if path.startswith("/v1/messages"):
            shown = orjson.loads(content)
            assert (shown["type"], shown["error"]["type"]) == ("error", "authentication_error"), path
        else:
            assert assert_openai_error(content)["code"] == "invalid_api_key", path
        assert response.status == 401, path
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert KEY.encode() not in content
    for path in ("/health", "/ready", "/", "/docs", "/docs/swagger-ui.css"):
        assert ask(guarded, "GET", path, header)[0].status == 200


def test_server_answers_a_request_with_the_key(guarded: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=KEY, max_retries=0)
    assert client.completions.create(model="default", prompt="hi", max_tokens=2).choices[0].text == "hi"
    guarded.engine.requests.clear()
    with pytest.raises(openai.AuthenticationError) as refused:
        client.with_options(api_key="wrong").models.list()
    assert refused.value.code == "invalid_api_key"
    assert ask(guarded, "GET", "/v1/models", f"bearer  {KEY} ")[0].status == 200


def status_and_message(server: LiveServer, headers: list[tuple[str, str]]) -> tuple[int, str]:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    head = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{lines}\r\n"
    answer = raw_http.ask(server.url, head.encode())
    return answer.status, "" if answer.status == 200 else assert_openai_error(answer.body)["message"]


@pytest.mark.parametrize(
    "headers",
    [
        [("api-key", KEY)],
        [("X-API-Key", KEY)],
        [("x-api-key", f" {KEY} ")],
        [("Authorization", "Bearer wrong"), ("x-api-key", KEY)],
        [("Authorization", "Basic eDp5"), ("api-key", KEY)],
        [("Authorization", f"Bearer {KEY}"), ("x-api-key", "wrong"), ("api-key", "")],
    ],
)
def test_a_key_may_be_in_each_header_that_clients_use(guarded: LiveServer, headers: list[tuple[str, str]]) -> None:
    assert status_and_message(guarded, headers) == (200, "")


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ([], "requires a key in the header Authorization: Bearer KEY (or api-key or x-api-key)"),
        ([("Authorization", KEY)], "Authorization must be 'Bearer KEY'"),
        ([("Authorization", f"Basic {KEY}")], "Authorization must be 'Bearer KEY'"),
        ([("Authorization", "Bearer ")], "Authorization must be 'Bearer KEY'"),
        ([("Authorization", f"Bearer:{KEY}")], "Authorization must be 'Bearer KEY'"),
        ([("Authorization", "Bearer wrong")], "the key in the header authorization is not known"),
        ([("api-key", "wrong")], "the key in the header api-key is not known"),
        ([("x-api-key", f"Bearer {KEY}")], "the key in the header x-api-key is not known"),
        ([("Authorization", KEY), ("x-api-key", "wrong")], "the key in the header x-api-key is not known"),
        ([("x-api-key", "")], "the header x-api-key is empty"),
    ],
)
def test_a_refusal_says_what_is_wrong_with_the_key(
    guarded: LiveServer, headers: list[tuple[str, str]], reason: str
) -> None:
    status, message = status_and_message(guarded, headers)
    assert status == 401
    assert reason in message
    assert KEY not in message


@pytest.mark.parametrize("header", ["Bearer ", "Bearer", "Bearer anything", "Basic x"])
def test_server_without_a_key_accepts_any_authorization_header(shared_server: LiveServer, header: str) -> None:
    body = orjson.dumps(minimal_body(COMPLETIONS))
    assert ask(shared_server, "POST", COMPLETIONS, header, body)[0].status == 200


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# clients\n\nalice  key-of-alice\n  bob\tkey-of-bob  \nkey-without-name\nalice second-of-alice\n")
    return path


def test_each_key_of_a_file_is_accepted_beside_the_flag(keys_file: Path) -> None:
    keys = read_api_keys(KEY, str(keys_file))
    digests = {hashlib.sha256(key.encode()).digest() for key in (KEY, *FILE_KEYS)}
    assert {key.digest for key in keys} == digests
    assert [key.name for key in keys if not key.name.startswith("key-")] == ["alice", "bob", "alice"]
    assert read_api_keys(None, None) == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "has no key"),
        (b"# none\n\n", "has no key"),
        (b"good\nname and-a key\n", "line 2"),
        ("name k\u00e9y\n".encode(), "line 1"),
        (b"\xff\xfe", "UTF-8"),
        (b"a same-key\nb same-key\n", "twice"),
        (KEY.encode(), "twice"),
        (None, "No such file"),
    ],
)
def test_faults_of_a_keys_file_are_named_in_one_line(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=reason) as refused:
        read_api_keys(KEY, str(path))
    assert "\n" not in str(refused.value)
    assert "api_keys_file=" in str(refused.value)
    assert "same-key" not in str(refused.value)


def test_clients_of_a_file_are_told_apart_and_share_no_cached_prompts(
    served_model: ServedModel, keys_file: Path
) -> None:
    salts: dict[str, str] = {}
    flags = {"api_keys_file": str(keys_file), "cache_salt_per_key": True}
    with live_server(served_model, FakeEngine(), start_engine=False, **flags) as server:
        server.engine.start()
        assert server.http.get("/v1/models").status_code == 401
        for key in FILE_KEYS:
            header = {"Authorization": f"Bearer {key}"}
            for salt in ("", "own"):
                server.engine.requests.clear()
                body = minimal_body(COMPLETIONS) | ({"cache_salt": salt} if salt else {})
                line = orjson.dumps({"custom_id": "1", "url": COMPLETIONS, "body": body})
                for content in (
                    server.http.post(COMPLETIONS, json=body, headers=header),
                    server.http.post("/v1/bulk", content=line, headers=header),
                ):
                    assert content.status_code == 200
                single, of_bulk = (request.cache_salt for request in server.engine.requests)
                assert single == of_bulk
                salts[f"{key} {salt}"] = single
    of_alice = [salts.pop(f"second-of-alice {salt}") for salt in ("", "own")]
    assert of_alice == [salts["key-of-alice "], salts["key-of-alice own"]]  # one client
    assert len(set(salts.values())) == len(salts)
    assert "" not in salts.values()


def test_bodies_keep_their_salts_without_the_flag(guarded: LiveServer) -> None:
    guarded.engine.requests.clear()
    body = minimal_body(COMPLETIONS) | {"cache_salt": "own"}
    assert guarded.http.post(COMPLETIONS, json=body).status_code == 200
    assert [request.cache_salt for request in guarded.engine.requests] == ["own"]
