"""HAProxy's checks of a server, as its manual writes them, and requests through it."""

import csv
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.clients.conftest import WHALES, PlainPost

pytestmark = pytest.mark.skipif(shutil.which("haproxy") is None, reason="there is no haproxy: Debian's package has it")

CHAT = {"messages": [{"role": "user", "content": WHALES}], "max_tokens": 12, "temperature": 0}
CHECKS = {
    "options": "option httpchk",
    "get": "option httpchk GET /ready",
    "get_1_1": "option httpchk\n    http-check send meth GET uri /health ver HTTP/1.1 hdr Host localhost.",
}
CONFIG = """\
global
    stats socket {stats} level admin
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
frontend front
    bind 127.0.0.1:{port}
    default_backend {first}
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def check_states(stats: Path) -> dict[str, str]:
    """Backend → the result of its server's last check, such as L7OK; "" if there is none yet."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(stats))
        connection.sendall(b"show stat\n")
        page = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    rows = csv.DictReader(page.lstrip("# ").splitlines())
    return {row["pxname"]: row["check_status"].lstrip("* ") for row in rows if row["svname"] == "toka"}


def test_its_checks_find_the_server_up(base_url: str, plain_post: PlainPost, tmp_path: Path) -> None:
    expected = plain_post("chat/completions", CHAT)["choices"]
    address = urlsplit(base_url).netloc
    port, stats = free_port(), tmp_path / "stats"
    written = CONFIG.format(stats=stats, port=port, first=next(iter(CHECKS)))
    for name, check in CHECKS.items():
        written += f"backend {name}\n    {check}\n    server toka {address} check inter 200ms\n"
    config = tmp_path / "haproxy.cfg"
    config.write_text(written)
    with subprocess.Popen(["haproxy", "-db", "-f", config], stderr=subprocess.PIPE) as haproxy:
        try:
            deadline_s = time.monotonic() + 30
            states: dict[str, str] = {}
            while set(states.values()) != {"L7OK"}:
                assert haproxy.poll() is None
                assert time.monotonic() < deadline_s, states
                time.sleep(0.1)
                if stats.exists():
                    states = check_states(stats)
            assert states.keys() == CHECKS.keys()
            url, data = (
                f"http://127.0.0.1:{port}/v1/chat/completions",
                json.dumps({"model": "default", **CHAT}).encode(),
            )
            request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert json.load(answer)["choices"] == expected
        finally:
            haproxy.terminate()
