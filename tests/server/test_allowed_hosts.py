"""Host names: a local server answers no web page that reaches it through a name of its own."""

import ipaddress
import socket
from collections.abc import Iterator
from random import Random

import pytest

from tests.helpers.examples import seeds
from tests.server.helpers.bodies_and_errors import assert_openai_error
from tests.server.helpers.fake_engine import FakeEngine
from tests.server.helpers.live_server import LiveServer, live_server
from tests.server.helpers.raw_http import ask
from tokasaurus.server.access import allowed_hosts, is_address
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
        (["localhost."], 200),
        (["localhost.:10210"], 200),
        (["llm.example."], 200),
        (["localhost.."], 421),
        (["."], 421),
        (["rebound.example."], 421),
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
        ([""], 421),
        (["é"], 421),
        ([], 200),
        (["localhost", "rebound.example"], 421),
        (["0.0.0.0", "rebound.example"], 421),
    ],
)
def test_only_known_names_are_served(named: LiveServer, hosts: list[str], status: int) -> None:
    lines = b"".join(b"Host: %s\r\n" % host.encode() for host in hosts)
    answer = ask(named.url, b"GET /health HTTP/1.1\r\n%sConnection: close\r\n\r\n" % lines)
    assert answer.status == status
    if status == 421:
        assert answer.error_code == "misdirected_request"


@pytest.mark.parametrize(
    ("check", "status"),
    [
        ("OPTIONS / HTTP/1.0\r\n", 204),  # HAProxy's `option httpchk` alone
        ("OPTIONS /health HTTP/1.0\r\n", 204),
        ("OPTIONS /v1/models HTTP/1.1\r\nConnection: close\r\n", 204),
        ("OPTIONS * HTTP/1.0\r\n", 204),
        ("OPTIONS /nowhere HTTP/1.0\r\n", 404),
        ("GET /health HTTP/1.0\r\n", 200),
        ("GET /ready HTTP/1.0\r\nHost: rebound.example\r\n", 421),
    ],
)
def test_checks_of_load_balancers_are_answered_without_a_host(named: LiveServer, check: str, status: int) -> None:
    answer = ask(named.url, f"{check}\r\n".encode())
    assert answer.status == status
    if status == 204:
        assert answer.body == b""
        assert answer.headers.get("allow", "GET") == "GET"


@pytest.mark.parametrize(
    ("host", "hint"),
    [
        ("host.docker.internal", "allowed_hosts=host.docker.internal"),
        ("Host.Docker.Internal:10210", "allowed_hosts=host.docker.internal"),
        ("toka_1", "allowed_hosts=toka_1"),
        ("a b", None),
        ("x,y", None),
        ("x" * 300, None),
    ],
)
def test_a_refusal_says_the_value_of_the_flag_that_serves_the_name(
    served_model: ServedModel, named: LiveServer, host: str, hint: str | None
) -> None:
    def message(server: LiveServer) -> str:
        head = f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        answer = ask(server.url, head.encode())
        assert answer.status == 421
        return str(assert_openai_error(answer.body)["message"])

    with live_server(served_model, FakeEngine(), start_engine=False, allowed_hosts="localhost") as server:
        assert ("start the server with" in message(server)) == (hint is not None)
        assert hint is None or message(server).endswith(hint)
    if hint is not None:
        assert message(named).endswith(hint.replace("=", "=…,"))
        assert "llm.example" not in message(named), "strangers need not know the other names"
        with live_server(
            served_model, FakeEngine(), start_engine=False, allowed_hosts=hint.partition("=")[2]
        ) as server:
            assert server.http.get("/health", headers={"Host": host}).status_code == 200


ADDRESSES = (
    *("127.0.0.1", "0.0.0.0", "192.168.0.1", "172.17.0.2", "8.8.8.8", "255.255.255.255"),
    *("[::1]", "[::]", "[::2]", "[2001:db8::1]", "[2001:DB8:0:0:0:0:0:1]", "[::ffff:127.0.0.1]"),
    *("[fe80::1%eth0]", "[fe80::1%25eth0]"),
)


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("port", ["", ":", ":80", ":10210"])
def test_addresses_written_as_numbers_are_served(named: LiveServer, address: str, port: str) -> None:
    head = f"GET /health HTTP/1.1\r\nHost: {address}{port}\r\nConnection: close\r\n\r\n"
    assert ask(named.url, head.encode()).status == 200


@pytest.mark.parametrize("address", ["::1", "::", "fe80::1%eth0", "2001:db8::1"])
def test_ipv6_addresses_without_brackets_are_served(address: str) -> None:
    assert is_address(address)


@pytest.mark.parametrize(
    "name",
    [
        *("127.0.0.1.rebound.example", "127.0.0.1.rebound.example:80", "0.0.0.0.example", "1.2.3.4.5", "127.0.0.1..x"),
        *("127-0-0-1.example", "0x7f.example", "127.0.0.1@rebound.example", "127.0.0.1/rebound.example"),
        *("127.0.0.256", "127.0.0.1:x", "127.0.0.1:80:80", "127.0.0.1 rebound.example", "127.0.0.1%.example", "."),
        *("1.2.example", "08.0.0.1", "1.256.1", "0x1ffffffff", "1..2", "1.2.."),
        *("cafe", "dead.beef", "\u0661.0.0.1", "\uff11.0.0.1", "127.0.0.1\n"),
        *("[::1].rebound.example", "[::1]rebound.example", "[rebound.example]", "[::1", "::1]", "[]", "[127.0.0.1]"),
        *("[::1%]", "[::1%eth0].rebound.example", "[fe80::1%a]b]", "fe80::g", "a:80", "dead:80", "[::1]:x"),
    ],
)
def test_names_that_look_like_numbers_are_names(name: str) -> None:
    assert not is_address(name)


@pytest.mark.parametrize(
    "address", ["127.1", "127.0.1", "2130706433", "0x7f000001", "0X7F.1", "0177.0.0.1", "127.0.0.1.", "0", "1.2."]
)
@pytest.mark.parametrize("port", ["", ":80"])
def test_addresses_in_the_short_forms_of_resolvers_are_served(address: str, port: str) -> None:
    assert is_address(address + port)
    number = address.removesuffix(".")  # resolvers disagree about the dot, and browsers allow it
    assert socket.getaddrinfo(number, 80, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)


@pytest.mark.parametrize("seed", seeds(20))
def test_every_address_is_one_in_all_spellings(seed: int) -> None:
    random = Random(seed)
    for _ in range(50):
        old = ipaddress.IPv4Address(random.getrandbits(32))
        new = ipaddress.IPv6Address(random.getrandbits(random.choice((1, 16, 64, 128))))
        assert is_address(str(old))
        assert not is_address(f"{old}.example")
        for text in (new.compressed, new.exploded, new.exploded.upper()):
            assert is_address(f"[{text}]:{random.randrange(65536)}")
            assert not is_address(f"[{text}].example")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_addresses_are_guarded_by_default(address: str) -> None:
    assert allowed_hosts(address, None) == {"localhost"}
    assert allowed_hosts(address, "a.example") == {"localhost", "a.example"}
    assert allowed_hosts(address, "*") is None


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.0.0.1", "llm.example", None])
def test_other_addresses_and_unix_sockets_are_guarded_on_request(address: str | None) -> None:
    assert allowed_hosts(address, None) is None
    assert allowed_hosts(address, "a.example,") == {"localhost", "a.example"}
