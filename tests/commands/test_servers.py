"""`toka ps` and `toka models`: the servers of this user, and what one serves."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.small_model import make_served_model
from tests.helpers.small_tokenizer import save_small_tokenizer
from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import live_server
from tokasaurus.cli import main
from tokasaurus.commands import servers
from tokasaurus.commands.servers import FoundServer, find_servers
from tokasaurus.config import ServerConfig
from tokasaurus.processes.launch import title_of

# A launcher with a server process that answers GET /ready with this status, or listens and says nothing, or does not
# listen yet. What it prints says where.
PROCESSES = """
import os, socket, sys, threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from tokasaurus.monitoring.own_process import set_title
title, kind, path = sys.argv[1:]
set_title("toka", title)
if os.fork():
    os.wait()
    sys.exit()
set_title("toka-server")
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(int(kind) if self.path == "/ready" else 404)
        self.end_headers()
    def log_message(self, *_): ...
    def address_string(self): return ""
listener = socket.socket(socket.AF_UNIX if path else socket.AF_INET)
listener.bind(path or ("127.0.0.1", 0))
if kind != "starting":
    listener.listen()
print(0 if path else listener.getsockname()[1], flush=True)
if kind.isdigit():
    server = HTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    threading.Thread(target=server.serve_forever, daemon=True).start()
sys.stdin.read()
"""


@contextmanager
def running(title: str, kind: str, path: str = "") -> Iterator[tuple[int, int]]:
    """(pid of the launcher, port of its server)."""
    command = [sys.executable, "-c", PROCESSES, title, kind, path]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.pid, int(process.stdout.readline())
    finally:
        process.communicate("")  # the end of stdin ends it


def config_of(*words: str) -> ServerConfig:
    return ServerConfig.parse(list(words))


def test_every_server_of_this_user_is_found_with_its_address_and_state(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(servers, "_ASK_S", 0.3)
    with tempfile.TemporaryDirectory(prefix="t-") as directory, ExitStack() as stack:
        path = f"{directory}/socket"
        secret = "never-to-be-shown"
        started = {
            kind: stack.enter_context(running(title, kind.partition(" ")[0], path if "unix" in kind else ""))
            for kind, title in {
                "200": title_of(config_of("model=org/name", "port=0", f"api_key={secret}")),
                "503": title_of(config_of("model=/with space/model")),
                "silent": title_of(config_of()),
                "starting": title_of(config_of("port=4321")),
                "200 unix": title_of(config_of(f"unix_socket={path}")),
            }.items()
        }
        pids = {pid: kind for kind, (pid, _) in started.items()}
        found = {pids[server.pid]: server for server in find_servers() if server.pid in pids}

        def expected(kind: str, address: str, model: str, state: str) -> FoundServer:
            return FoundServer(address, model, state, found[kind].seconds, started[kind][0])

        def url(kind: str) -> str:
            return f"http://127.0.0.1:{started[kind][1]}"

        assert found == {
            "200": expected("200", url("200"), "org/name", "ready"),
            "503": expected("503", url("503"), "/with space/model", "not ready"),
            "silent": expected("silent", url("silent"), "demo", "silent"),
            "starting": expected("starting", "port 4321", "demo", "not ready"),
            "200 unix": expected("200 unix", f"unix:{path}", "demo", "ready"),
        }
        assert all(0 <= server.seconds < 60 for server in found.values())
        assert main(["ps"]) == 0
        out = capsys.readouterr().out
        lines = {line.split()[-1]: line for line in out.splitlines()}
        assert lines["PID"].split() == ["ADDRESS", "MODEL", "STATE", "UP", "PID"]
        assert lines[str(started["503"][0])].startswith(url("503"))
        assert secret not in out
        assert main(["ps", "json=T"]) == 0
        objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert {one["pid"] for one in objects} >= set(pids)
    assert not [server for server in find_servers() if server.pid in pids]


def test_without_servers_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "getuid", lambda: -1)
    assert main(["ps"]) == 0
    assert capsys.readouterr().out == "no server of this user runs here\n"


def test_the_models_of_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("TOKA_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    served_model = make_served_model(save_small_tokenizer(tmp_path))
    with live_server(served_model, FakeEngine(), api_key="secret") as server:
        told: list[dict[str, Any]] = server.http.get("/v1/models").json()["data"]
        words = ["models", f"{server.url}/v1", "api_key=secret"]
        assert main([*words, "json=T"]) == 0
        assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == told
        assert main(words) == 0
        (line,) = capsys.readouterr().out.splitlines()
        assert line.split("  ")[:2] == [told[0]["id"], f"{told[0]['max_model_len']:,} tokens"]
        assert main(words[:-1]) == 1
        err = capsys.readouterr().err
        assert err.startswith(f"toka models: {server.url}/v1 answered 401: ")
        assert err.count("\n") == 1
    assert main(words) == 1
    assert "is toka running?" in capsys.readouterr().err
