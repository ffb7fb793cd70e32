"""Unix sockets to listen on, URLs that lead to this machine, and the proxies that others are reached through."""

import os
import re
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.helpers.limits import LIMIT_S, join
from tokasaurus.addresses import (
    MAX_SOCKET_PATH_BYTES,
    bind,
    leads_here,
    listening_at,
    no_proxies,
    proxies_for,
    proxy_variable,
    socket_of,
    url_of,
)
from tokasaurus.messages.status import UserError

LOCAL = (
    *("127.0.0.1", "127.8.9.10", "0.0.0.0", "[::1]", "[::]", "[::ffff:127.0.0.1]", "localhost", "LocalHost", "127.1"),
    *("localhost.", "127.0.0.1.", "a.localhost", "0x7f.1", "2130706433"),
)
OTHER = (
    *(
        "128.0.0.1",
        "10.0.0.1",
        "[2001:db8::1]",
        "[fe80::1%25eth0]",
        "[::ffff:10.0.0.1]",
        "example",
        "localhost.example",
    ),
    *("127.0.0.1.example", "mylocalhost", "", "a b", "127.0.0.1x"),
)


@pytest.fixture(autouse=True)
def no_proxies_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("rest", ["", "/v1", ":10210/v1"])
def test_urls_of_this_machine(scheme: str, rest: str) -> None:
    assert [host for host in LOCAL if not leads_here(f"{scheme}://{host}{rest}")] == []
    assert [host for host in OTHER if leads_here(f"{scheme}://{host}{rest}")] == []


@pytest.mark.parametrize("host", [host for host in LOCAL if host[0].isdigit() and not host.endswith(".")])
def test_the_resolver_agrees(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if not host.startswith("127.8"):
            socket.create_connection((host, port)).close()


@pytest.mark.parametrize("url", ["http://[::1", "http://[x]/", "127.0.0.1:80", "", "http://"])
def test_what_is_no_url_leads_nowhere(url: str) -> None:
    assert not leads_here(url)


@pytest.mark.parametrize("variable", ["http_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"])
@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "foo://x:1", "http://x:port", "http://[", "http://:80"])
def test_an_unusable_proxy_is_named_unless_the_url_leads_here(
    variable: str, proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, proxy)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with (
        pytest.raises(UserError, match=f"^the environment variable {variable}: [^\n]*$"),
        proxies_for("http://x.example"),
    ):
        pass
    with proxies_for("http://127.0.0.1:80"):
        assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "*"
    assert "no_proxy" not in os.environ
    monkeypatch.setenv("no_proxy", "a, *")
    with proxies_for("http://x.example"):
        assert os.environ["no_proxy"] == "a, *"


def test_a_password_of_a_proxy_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "foo://user:secret@x:1")
    with pytest.raises(UserError) as refused, proxies_for("http://x.example"):
        pass
    assert "secret" not in str(refused.value)


def test_the_environment_is_as_before_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "internal.example")
    with pytest.raises(KeyError), no_proxies():
        raise KeyError
    assert os.environ["no_proxy"] == "internal.example"
    assert "NO_PROXY" not in os.environ


@pytest.mark.parametrize(
    ("environment", "url", "variable"),
    [
        ({}, "http://x.example", None),
        ({"http_proxy": "p:1"}, "http://x.example/v1", "http_proxy"),
        ({"HTTP_PROXY": "p:1"}, "http://x.example/v1", "HTTP_PROXY"),
        ({"http_proxy": "p:1"}, "https://x.example/v1", None),
        ({"http_proxy": "p:1", "all_proxy": "q:1"}, "https://x.example/v1", "all_proxy"),
        ({"https_proxy": "p:1", "ALL_PROXY": "q:1"}, "https://x.example/v1", "https_proxy"),
        ({"all_proxy": "p:1", "no_proxy": "example"}, "https://x.example/v1", None),
        ({"all_proxy": "p:1", "NO_PROXY": "other,*"}, "https://x.example/v1", None),
        ({"all_proxy": "p:1"}, "http://0.0.0.0:10210/v1", None),
        ({"http_proxy": ""}, "http://x.example", None),
    ],
)
def test_the_proxy_of_a_url(
    environment: dict[str, str], url: str, variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As OpenAI's client chooses it."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert proxy_variable(url) == variable
    import openai

    with openai.OpenAI(base_url=url, api_key="x") as client:
        transports = {str(pattern.pattern): transport for pattern, transport in client._client._mounts.items()}
    scheme = urlsplit(url).scheme
    used = [name for name in transports if name in (f"{scheme}://", "all://") and transports[name] is not None]
    bypassed = any(transports[name] is None for name in transports if "example" in name)
    if not leads_here(url):
        assert bool(used and not bypassed) == (variable is not None)


# Unix sockets


@pytest.fixture
def directory() -> Iterator[Path]:
    """Its path is short."""
    with tempfile.TemporaryDirectory(prefix="t-") as directory:
        yield Path(directory)


def connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def refusal(path: Path) -> str:
    """What the start of a server says after the flag."""
    with pytest.raises(UserError) as raised, listening_at(path):
        pass
    return str(raised.value).removeprefix(f"unix_socket={path}: ")


def test_a_unix_socket_is_its_owners_and_is_removed_at_the_end(directory: Path, monkeypatch) -> None:
    old_mask = os.umask(0)
    try:
        with listening_at(directory / "s") as listener:
            assert stat.S_IMODE((directory / "s").stat().st_mode) == 0o600
            assert connects(directory / "s")
            assert socket_of(url_of(listener)) == str(directory / "s")
    finally:
        os.umask(old_mask)
    assert list(directory.iterdir()) == []
    monkeypatch.chdir(directory)
    with listening_at(Path("s")) as listener:  # whoever reads where it listens has another working directory
        assert socket_of(url_of(listener)) == str(directory / "s")
    assert list(directory.iterdir()) == []
    assert socket_of("http://127.0.0.1:1") is None


def test_the_file_of_a_dead_server_is_replaced_and_a_living_ones_is_not(directory: Path) -> None:
    path = directory / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with listening_at(path):
        assert connects(path)
        assert refusal(path) == "another process listens there"
        assert connects(path)
    with socket.socket(socket.AF_UNIX) as full:
        full.bind(str(path))
        full.listen(0)
        waiting = socket.socket(socket.AF_UNIX)
        waiting.connect(str(path))
        with waiting:
            assert refusal(path) == "another process listens there"


def test_a_file_that_another_server_has_put_in_its_place_is_left(directory: Path) -> None:
    path = directory / "s"
    with listening_at(path):
        path.unlink()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
    assert path.exists()


def test_what_is_no_place_for_a_socket_is_refused_in_one_line(directory: Path) -> None:
    (directory / "file").write_text("kept")
    assert refusal(directory / "file") == "exists, and is no socket"
    assert (directory / "file").read_text() == "kept"
    assert refusal(directory / "absent" / "s") == "cannot listen there: No such file or directory"
    assert refusal(directory / "file" / "s") == "cannot listen there: Not a directory"
    longest = directory / ("s" * (MAX_SOCKET_PATH_BYTES - len(f"{directory}/")))
    with listening_at(longest):
        assert connects(longest)
    assert refusal(longest.with_name(f"{longest.name}s")) == (
        f"the path of a socket, from / on, may have at most {MAX_SOCKET_PATH_BYTES} bytes, and this one has "
        f"{MAX_SOCKET_PATH_BYTES + 1}"
    )


@pytest.mark.parametrize("_attempt", range(10))
def test_of_servers_that_start_together_one_gets_the_socket(directory: Path, _attempt: int) -> None:
    path = directory / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    outcomes: list[str] = []
    everyone = threading.Barrier(4, timeout=LIMIT_S)

    def start() -> None:
        everyone.wait()
        try:
            with listening_at(path):
                outcomes.append("listens")
                everyone.wait()
        except UserError as error:
            outcomes.append(str(error))
            everyone.wait()

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    assert sorted(outcomes) == ["listens", *[f"unix_socket={path}: another process listens there"] * 3]


@contextmanager
def answering(answers: dict[str, tuple[int, bytes]]) -> Iterator[int]:
    """The port of an HTTP server within the context."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get(self.path, (404, b""))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


OURS = b'{"object": "list", "data": [{"id": "org/model", "owned_by": "tokasaurus"}]}'


@pytest.mark.parametrize(
    ("answers", "who"),
    [
        (
            {"/v1/models": (200, OURS), "/version": (200, b'{"version": "0.3.0"}')},
            " (by tokasaurus 0.3.0 with the model org/model)",
        ),
        ({"/v1/models": (200, b'{"data": [{"id": "a\\nb"}]}')}, " (by a server with the model ab)"),
        ({"/v1/models": (401, b"")}, " (by a server that asks for an API key)"),
        ({}, " (by a server without an OpenAI API)"),
        ({"/v1/models": (200, b"[" * 100_000)}, " (by a server without an OpenAI API)"),
    ],
)
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_who_has_the_port_is_told(host: str, answers: dict[str, tuple[int, bytes]], who: str) -> None:
    with answering(answers) as port:
        line = f"port={port}: cannot listen on {host}: Address already in use{who}; choose another port="
        with pytest.raises(UserError, match=f"^{re.escape(line)}$"):
            bind(host, port)


@pytest.mark.parametrize("content", [b"SSH-2.0-OpenSSH_9.2\r\n", b""])
def test_a_program_that_speaks_no_http_is_not_guessed(content: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(content)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(UserError, match=r"Address already in use; choose"):
            bind("127.0.0.1", port)
        thread.join()
