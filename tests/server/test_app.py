"""The server process as the launcher starts it."""

import multiprocessing
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.context import SpawnProcess
from pathlib import Path

import httpx
import orjson
import pytest

from tests.helpers.plain_info import plain_info
from tests.helpers.small_tokenizer import EOS_IDS, VOCAB_SIZE
from tests.server.helpers.fake_engine import FakeEngine, echo, hand_over
from tokasaurus.checkpoint import Checkpoint, RopeInfo
from tokasaurus.config import ServerConfig
from tokasaurus.messages.channel import Receiver, make_channel
from tokasaurus.messages.status import FIRST_SERVER, Failed, PhaseDone, Ready, UserError
from tokasaurus.server.app import run_server

KEY = "some-key"
PAGE = "http://localhost:3000"
INFO = plain_info(
    family="llama",
    num_layers=1,
    hidden_size=8,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=8,
    vocab_size=VOCAB_SIZE,
    context_length=512,
    norm_eps=1e-5,
    rope=RopeInfo(10_000.0),
    tie_embeddings=True,
    eos_ids=EOS_IDS,
    dtype="float32",
)


class ServerProcess:
    def __init__(self, tokenizer_directory: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.engine = FakeEngine()
        self.status: Receiver[PhaseDone | Ready | Failed]
        self.status, status = make_channel()
        checkpoint = Checkpoint("org/small", tokenizer_directory, tokenizer_directory, INFO)
        config = ServerConfig()
        config.model = "models/small.gguf"
        config.served_model_name = "nickname"
        config.model_aliases = "gpt-4o, team/best"
        config.cors_origins = PAGE
        config.api_key = KEY
        config.max_request_bytes = 10_000
        config.max_queued_requests = 1
        config.drain_seconds = 1
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            self.process: SpawnProcess = context.Process(
                target=run_server,
                args=(
                    config,
                    checkpoint,
                    listener,
                    hand_over(self.engine),
                    FIRST_SERVER,
                    status,
                ),
            )
            self.process.start()

    def wait_ready(self) -> list[PhaseDone | Ready | Failed]:
        """Messages the process reported, up to and including Ready."""
        messages = [self.status.receive(60)]
        while not isinstance(messages[-1], Ready):
            messages.append(self.status.receive(60))
        return messages


@pytest.fixture
def server_process(tokenizer_directory: Path) -> Iterator[ServerProcess]:
    running = ServerProcess(tokenizer_directory)
    yield running
    running.process.kill()
    running.process.join()
    running.engine.stop()


def test_process_reports_ready_serves_requests_and_exits_with_0_on_sigterm(server_process: ServerProcess) -> None:
    """One test covers the whole lifetime, since starting a process takes seconds."""
    engine = server_process.engine
    engine.script = lambda request, index: None if request.prompt_ids[0] == ord("z") else echo(request, index)
    assert isinstance(server_process.status.receive(60), PhaseDone)
    with httpx.Client(base_url=server_process.url, timeout=60, headers={"Authorization": f"Bearer {KEY}"}) as http:
        assert http.get("/health").status_code == 200
        assert http.get("/ready").status_code == 503
        assert http.get("/v1/models").json()["data"][0]["max_model_len"] is None, "not known yet"
        assert http.get("/v1/models", headers={"Authorization": "Bearer x"}).status_code == 401
        for host, status in (("rebound.example", 421), (None, 200), ("localhost:80", 200)):
            assert http.get("/health", headers={} if host is None else {"Host": host}).status_code == status
        assert http.post("/v1/completions", content=b" " * 10_001).status_code == 413
        engine.start()
        assert server_process.wait_ready()[-1] == Ready("server")
        assert http.get("/ready").status_code == 200
        models = http.get("/v1/models").json()["data"]
        assert [(model["id"], model["root"]) for model in models] == [
            (name, "org/small") for name in ("nickname", "gpt-4o", "team/best")
        ]
        for name in ("gpt-4o", "team/best", None):
            answer = http.post("/completions/", content=orjson.dumps({"model": name, "prompt": "hello"}))
            assert (answer.status_code, answer.json()["model"]) == (200, "nickname")
        for origin, status in ((PAGE, 200), ("https://evil.example", 403)):
            answer = http.post("/v1/completions", json={"prompt": "hello"}, headers={"Origin": origin})
            assert (answer.status_code, answer.headers.get("access-control-allow-origin") == PAGE) == (
                status,
                status == 200,
            )
        for name, status in (("models/small.gguf", 200), ("small", 404), ("org/small", 404)):
            answer = http.post("/v1/completions", json={"model": name, "prompt": "hello", "max_tokens": 9})
            assert answer.status_code == status
            assert status == 404 or answer.json()["model"] == "nickname"
            assert http.get(f"/v1/models/{name}").status_code == status
        body = {"model": "nickname", "prompt": "hello", "max_tokens": 9}
        assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "hello"
        chat = {"model": "default", "messages": [{"role": "user", "content": "hi"}]}
        assert http.post("/v1/chat/completions", json=chat).status_code == 200

    with socket.create_connection(("127.0.0.1", int(server_process.url.rpartition(":")[2]))) as connection:
        content = b'{"model": "default", "prompt": "zzz"}'
        headers = f"Host: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(content)}"
        head = f"POST /v1/completions HTTP/1.1\r\n{headers}\r\n\r\n"
        connection.sendall(head.encode() + content)
        engine.wait_until(lambda engine: engine.requests[-1].prompt_ids[0] == ord("z"))
        full = httpx.post(
            f"{server_process.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=60
        )
        assert full.status_code == 429
        stopped = time.monotonic()
        server_process.process.terminate()
        # The running request gets a grace period, then a well-formed error.
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert 1.5 < time.monotonic() - stopped < 60
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"server_stopping" in answer
    server_process.process.join(60)
    assert server_process.process.exitcode == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(server_process.url.rpartition(":")[2])))


def test_sigterm_ends_the_server_with_an_open_connection_and_a_dead_engine(
    server_process: ServerProcess,
) -> None:
    assert isinstance(server_process.status.receive(60), PhaseDone)
    with httpx.Client(base_url=server_process.url, timeout=60) as http:  # its connection stays open
        assert http.get("/health").status_code == 200
        server_process.process.terminate()
        server_process.process.join(60)
    assert server_process.process.exitcode == 0


def test_port_taken_by_another_server_raises_a_user_error() -> None:
    """Two sockets can bind to one port as long as neither listens, so only listen() detects the conflict."""
    with socket.socket() as first, socket.socket() as second:
        for listener in (first, second):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind(("127.0.0.1", 0))
        second.bind(first.getsockname())
        first.listen()
        config = ServerConfig()
        config.port = first.getsockname()[1]
        checkpoint = Checkpoint("org/small", Path(), Path(), INFO)
        launcher, status = socket.socketpair()[0], make_channel()[1]
        with pytest.raises(UserError, match=f"port={config.port}: .*in use"):
            run_server(config, checkpoint, second, launcher, FIRST_SERVER, status)


@pytest.mark.long
def test_process_raises_its_file_descriptor_limit_to_the_hard_limit(tokenizer_directory: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))  # the server process inherits this limit
    try:
        running = ServerProcess(tokenizer_directory)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        assert isinstance(running.status.receive(60), PhaseDone)
        assert resource.prlimit(running.process.pid or 0, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        running.process.kill()
        running.process.join()


def test_unreadable_engine_update_ends_the_server_instead_of_losing_answers(server_process: ServerProcess) -> None:
    assert isinstance(server_process.status.receive(60), PhaseDone)
    with httpx.Client(base_url=server_process.url, timeout=60) as http:
        assert http.get("/health").status_code == 200
    server_process.engine.updates.send("no update")
    server_process.process.join(60)
    assert server_process.process.exitcode == 1


def resident_mb(process: SpawnProcess) -> float:
    (line,) = [
        line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if line.startswith("VmRSS")
    ]
    return int(line.split()[1]) / 1024


def test_300_mb_of_headers_without_a_key_leave_the_memory_flat(server_process: ServerProcess) -> None:
    assert isinstance(server_process.status.receive(60), PhaseDone)
    port = int(server_process.url.rpartition(":")[2])
    with httpx.Client(base_url=server_process.url, timeout=60) as http:
        assert http.get("/health").status_code == 200
    while isinstance(message := server_process.status.receive(60), PhaseDone):  # loading ends, and with it the growth
        if message.phase == "chat template":
            break
    before_mb = resident_mb(server_process.process)
    for endless in (b"a" * (60 << 20), b"a: b\r\n" * (10 << 20)):
        for start in (b"GET / HTTP/1.1\r\nA: ", b"GET / HTTP/1.1\r\n", b"GET /"):
            with socket.create_connection(("127.0.0.1", port), 60) as connection, suppress(OSError):
                connection.sendall(start + endless)
    with httpx.Client(base_url=server_process.url, timeout=60) as http:
        assert http.get("/health").status_code == 200
    assert resident_mb(server_process.process) < before_mb + 30
