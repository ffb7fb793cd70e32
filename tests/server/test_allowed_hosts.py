"""Host names: a local server answers no web page that reaches it through a name of its own."""

from collections.abc import Iterator

import pytest

from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import LiveServer, live_server
from tests.server.helpers.raw_http import ask
from tokasaurus.server.allowed_hosts import allowed_hosts
from tokasaurus.server.served_model import ServedModel


@pytest.fixture(scope="module")
def named(served_model: ServedModel) -> Iterator[LiveServer]:
    with live_server(served_model, FakeEngine(), allowed_hosts="llm.example, Other.Example") as server:
        yield server


@pytest.mark.parametrize(
    ("hosts", "status"),
    [
        (["localhost"], 200),
        (["LOCALHOST:10210"], 200),
        (["127.0.0.1"], 200),
        (["127.8.9.10:80"], 200),
        (["[::1]"], 200),
        (["[::1]:10210"], 200),
        (["llm.example:443"], 200),
        (["other.example"], 200),
        (["rebound.example"], 421),
        (["rebound.example:10210"], 421),
        (["127.0.0.1.rebound.example"], 421),
        (["localhost.rebound.example"], 421),
        (["[::2]"], 421),
        (["192.168.0.1"], 421),
        (["0.0.0.0"], 421),
        ([""], 421),
        (["é"], 421),
        ([], 421),
        (["localhost", "rebound.example"], 421),
    ],
)
def test_only_known_names_are_served(named: LiveServer, hosts: list[str], status: int) -> None:
    lines = b"".join(b"Host: %s\r\n" % host.encode() for host in hosts)
    answer = ask(named.url, b"GET /health HTTP/1.1\r\n%sConnection: close\r\n\r\n" % lines)
    assert answer.status == status
    if status == 421:
        assert answer.error_code == "misdirected_request"


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_addresses_are_guarded_by_default(address: str) -> None:
    assert allowed_hosts(address, None) == {"localhost"}
    assert allowed_hosts(address, "a.example") == {"localhost", "a.example"}
    assert allowed_hosts(address, "*") is None


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.0.0.1", "llm.example"])
def test_other_addresses_are_guarded_on_request(address: str) -> None:
    assert allowed_hosts(address, None) is None
    assert allowed_hosts(address, "a.example,") == {"localhost", "a.example"}
