"""Files of any size pass through the server in parts: its memory hardly grows, and /health is quick meanwhile."""

import multiprocessing
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.helpers.examples import IS_NIGHTLY
from tests.helpers.small_tokenizer import save_small_tokenizer
from tests.server.helpers.fake_engine import FakeEngine
from tests.server.http.helpers.health_loads import MAX_SECONDS
from tests.server.http.helpers.server_process import probing_health, server_process
from tests.server.jobs.helpers.forms import FORM, PURPOSE, file_part
from tests.server.jobs.helpers.uploads import FILES

NUM_BYTES = (150 if IS_NIGHTLY else 24) << 20
MAX_GROWTH_BYTES = 16 << 20


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    tokenizer = save_small_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    with server_process(tokenizer, FakeEngine(), data_dir=tmp_path_factory.mktemp("data")) as http:
        yield http


def proc_file(name: str) -> Path:
    """Of the server, which is the only child process while this is called."""
    (process,) = multiprocessing.active_children()
    return Path(f"/proc/{process.pid}/{name}")


def memory_bytes(name: str) -> int:
    """name: VmRSS for the present memory, VmHWM for the highest since it was reset."""
    found = re.search(rf"{name}:\s+(\d+) kB", proc_file("status").read_text())
    assert found is not None
    return int(found[1]) << 10


def test_a_large_file_takes_little_memory(http: httpx.Client) -> None:
    unit = b"0123456789abcde\n" * 4096
    head, tail = (PURPOSE + file_part(b"|")).split(b"|")

    def body() -> Iterator[bytes]:
        yield head
        for _ in range(NUM_BYTES // len(unit)):
            yield unit
        yield tail + b"--b0undary--\r\n"

    small = http.post(FILES, content=head + b"x" + tail + b"--b0undary--\r\n", headers={"Content-Type": FORM})
    assert http.get(f"{FILES}/{small.json()['id']}/content").content == b"x"
    proc_file("clear_refs").write_text("5")  # resets VmHWM
    before = memory_bytes("VmRSS")
    assert memory_bytes("VmHWM") <= before + (1 << 20)
    with probing_health(http) as health:
        file = http.post(FILES, content=body(), headers={"Content-Type": FORM}).json()
        assert file["bytes"] == NUM_BYTES
        num_received = 0
        with http.stream("GET", f"{FILES}/{file['id']}/content") as download:
            assert download.headers["content-length"] == str(NUM_BYTES)
            for part in download.iter_raw():
                num_received += len(part)
        assert num_received == NUM_BYTES
    growth = memory_bytes("VmHWM") - before
    assert growth < MAX_GROWTH_BYTES, growth
    late_s = [second for second in health.seconds if second >= MAX_SECONDS]
    assert len(late_s) <= 1, health  # the machine may stop for a second or two
