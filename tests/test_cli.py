"""The `toka` command: dispatch, help, exit codes, and `toka ping` against a scripted server."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import HTTPServer
from pathlib import Path

import httpx
import pytest
from gguf import GGMLQuantizationType

from tests.checkpoint.helpers.gguf_files import random_weights, write_gguf
from tests.helpers.examples import few
from tests.helpers.scripted_api import UnixServer, scripted_api
from tokasaurus import __version__
from tokasaurus.cli import config_types, download_main, main, ping_main
from tokasaurus.commands import ping as ping_module
from tokasaurus.commands.ping import PingConfig
from tokasaurus.commands.running_server import client_of
from tokasaurus.config import ServerConfig

STREAM = {"stream": True, "stream_options": {"include_usage": True}}
RUN = "import sys; from tokasaurus.cli import main; sys.exit(main())"


@pytest.fixture(autouse=True)
def no_key_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOKA_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_help_is_quick_and_lists_every_flag() -> None:
    command = [sys.executable, "-X", "importtime", "-c", RUN, "--help-all"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert all(f"  {name}" in done.stdout for name in ServerConfig.flags)
    commands = {command.partition(" ")[0] for command in config_types()}
    assert commands <= set(re.findall(r"^toka (\w*)", done.stdout, re.MULTILINE))
    assert max(map(len, done.stdout.splitlines())) <= 80
    # What is imported, and not the time, which a busy machine doubles. (Pydra itself imports pydantic.)
    packages = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "tokasaurus" in packages
    heavy = {"torch", "transformers", "numpy", "fastapi", "openai", "httpx", "aiohttp", "asyncio", "rich"}
    assert packages & heavy == set()


def test_an_interruption_while_the_commands_are_imported_ends_in_one_line() -> None:
    script = """
import sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "tokasaurus.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
from tokasaurus.__main__ import main
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")


def test_short_help_has_the_flags_that_matter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = {name for name in ServerConfig.flags if any(re.match(rf"  {name}[ =]", line) for line in lines)}
    assert shown == ServerConfig.main_flags
    assert len(shown) == 15
    assert lines[-1] == f"{len(ServerConfig.flags) - 15} further flags: toka --help-all"
    for command, config_type in config_types().items():
        assert main([*command.split(), "--help"]) == 0
        short = capsys.readouterr().out
        assert main([*command.split(), "--help-all"]) == 0
        whole = capsys.readouterr().out
        assert all(f"\n  {name}" in short for name in config_type.main_flags or config_type.flags)
        assert all(f"\n  {name}" in whole for name in config_type.flags)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["port=x"], "toka: port=x: must be a whole number from 0 to 65535"),
        (
            ["pong"],
            "toka: pong: no such sub-command, there are ping, chat, download, plan, check, batch, map, mismatch, top, "
            "ps, models, bench, completion; flags are name=value",
        ),
        (["--port"], "toka: --port: needs a value, port=..."),
        (["ping"], "toka ping: prompt is missing: toka ping prompt='tell me a joke'"),
        (
            ["ping", "prompt=x", "unix_socket=/s", "base_url=http://x"],
            "toka ping: unix_socket=/s: either it or base_url= names the server",
        ),
        (["ping", "prompt=x", "n=0"], "toka ping: n=0: must be a whole number from 1 to 2147483647"),
        (["ping", "promt=x"], "toka ping: promt=x: unknown flag, did you mean prompt=?"),
        (["download", "modle=x"], "toka download: modle=x: unknown flag, did you mean model=?"),
    ],
)
def test_a_wrong_argument_gives_one_line_and_exit_code_2(
    args: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", line + "\n")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--version"], [f"tokasaurus {__version__}"]),
        (["-h"], ["max_seqs_per_forward=1024"]),
        (["port=1", "--help"], ["max_seqs_per_forward=1024"]),
        (["ping", "--help"], ["toka ping", "prompt (required)", "base_url"]),
        (["download", "--help"], ["toka download", "tokenizer (model)"]),
    ],
)
def test_help_and_version_print_and_succeed(
    args: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in words)


@few(1, "unbuffered", ["", "1"])
@few(
    4,
    "words",
    [
        *(["--help"], ["pong"], ["--print-config"], ["ping", "prompt=x", "port=1"]),
        *(["--version"], ["ping", "--help"], ["batch", "--help"], ["plan", "--help"], ["download", "--help"]),
        *(["map", "--help-all"], ["completion", "bash"], ["completion", "--help"]),
        *(["port=x"], ["batch", "list", "data_dir=/nowhere"]),
    ],
)
def test_output_that_nobody_reads_ends_the_command_without_a_word(words: list[str], unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with os.fdopen(writer, "wb") as closed:
        is_error = "--" not in words[-1] and words[0] != "completion"
        stderr = closed if is_error else subprocess.PIPE
        done = subprocess.run([sys.executable, "-c", RUN, *words], env=environment, stdout=closed, stderr=stderr)
    assert (done.returncode, done.stderr or b"") == (128 + signal.SIGPIPE, b"")


def test_head_of_the_help() -> None:
    command = f"set -o pipefail; '{sys.executable}' -c '{RUN}' --help | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout.startswith("toka [name=value ...]")
    assert (done.returncode in (0, 128 + signal.SIGPIPE), done.stderr) == (True, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux alone has a full device")
def test_output_to_a_full_disk_is_one_line(unbuffered: str) -> None:
    with Path("/dev/full").open("wb") as full:
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run([sys.executable, "-c", RUN, "--help"], env=environment, stdout=full, stderr=-1, text=True)
    assert (done.returncode, done.stderr) == (1, "toka: cannot write: No space left on device\n")


def test_download_of_an_absent_model_gives_one_line(tmp_path, capfd: pytest.CaptureFixture[str]) -> None:
    assert download_main([f"model={tmp_path / 'absent.gguf'}"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("toka download: ")
    assert err.count("\n") == 1
    assert "absent.gguf" in err


def test_download_writes_the_weights_of_a_gguf_file_if_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf", "llama", random_weights("llama", tied=True), GGMLQuantizationType.Q8_0)
    directories = []
    for words in ([], ["dequantized=T"]):
        assert download_main([f"model={tmp_path / 'tiny.gguf'}", *words]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1
        directories.append(Path(lines[0]))
    assert [(path / "model.safetensors").is_file() for path in directories] == [False, True]


@pytest.fixture
def api() -> Iterator[HTTPServer]:
    with scripted_api() as server:
        yield server


def test_ping_prints_the_answer_and_its_speed(api: HTTPServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert ping_main(["prompt=tell me a joke", "max_tokens=64", f"port={api.server_port}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["text tell me a joke 0", ""]
    seconds, tokens, speed, first = lines[2].split(", ")
    assert first.startswith("first after ")
    assert seconds.endswith(" s")
    assert tokens == "40 tokens"
    assert speed.endswith(" tokens/s")
    ((path, key, body),) = api.requests  # type: ignore[attr-defined]
    assert (path, key) == ("/v1/completions", "Bearer none")
    assert body == {"model": "default", "prompt": "tell me a joke", "n": 1, "max_tokens": 64} | STREAM


def test_ping_sends_what_is_in_a_file(api: HTTPServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "question.txt").write_text("tell me\na joke\n")
    assert ping_main([f"@{tmp_path / 'question.txt'}", f"port={api.server_port}"]) == 0
    assert api.requests[0][2]["prompt"] == "tell me\na joke"  # type: ignore[attr-defined]
    assert ping_main(["@none", f"port={api.server_port}"]) == 2
    assert "prompt=@none: No such file or directory" in capsys.readouterr().err


def test_ping_imports_no_client_of_openai(api: HTTPServer) -> None:
    command = [sys.executable, "-X", "importtime", "-c", RUN, "ping", "hi", f"port={api.server_port}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("text hi 0\n")
    packages = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "httpx" in packages
    assert packages & {"openai", "torch", "numpy", "aiohttp", "fastapi"} == set()


def test_ping_does_not_count_the_time_until_it_asks(
    api: HTTPServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def late_client(config: PingConfig) -> Iterator[httpx.Client]:
        with client_of(config) as client:
            time.sleep(3)
            yield client

    monkeypatch.setattr(ping_module, "client_of", late_client)
    assert ping_main(["prompt=Hi", f"port={api.server_port}"]) == 0
    assert float(capsys.readouterr().out.split("\n")[-2].partition(" s,")[0]) < 3


def test_ping_numbers_several_answers_of_a_chat(api: HTTPServer, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"base_url=http://127.0.0.1:{api.server_port}/v1"
    assert main(["ping", "prompt=hi", "chat=T", "n=3", "temperature=0", url, "model=m", "api_key=k"]) == 0
    assert capsys.readouterr().out.splitlines()[:3] == ["[1] chat hi 0", "[2] chat hi 1", "[3] chat hi 2"]
    ((path, key, body),) = api.requests  # type: ignore[attr-defined]
    assert (path, key) == ("/v1/chat/completions", "Bearer k")
    assert body == {"model": "m", "messages": [{"role": "user", "content": "hi"}], "n": 3, "temperature": 0.0} | STREAM


@pytest.mark.parametrize(
    ("prompt", "line"),
    [("fail", " answered 400: prompt is too long"), ("page", ": no OpenAI-compatible API")],
)
def test_ping_shows_the_error_of_the_server(
    api: HTTPServer, prompt: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ping_main([f"prompt={prompt}", f"port={api.server_port}"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"toka ping: http://127.0.0.1:{api.server_port}/v1")
    assert err.endswith(f"{line}\n")


def test_ping_prints_what_has_arrived_when_the_answer_breaks(
    api: HTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ping_main(["break", f"port={api.server_port}"]) == 1
    out, err = capsys.readouterr()
    assert out == "text break 0\n"
    assert err.endswith("/v1: the engine died\n")


def test_ping_shows_an_answer_while_it_arrives(api: HTTPServer) -> None:
    words = ["ping", "prompt=slow", "chat=T", f"port={api.server_port}"]
    with subprocess.Popen(
        [sys.executable, "-c", RUN, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(8) == b"0 1 2 3 "
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (1, b"toka ping: stopped\n")


def test_ping_takes_openais_key(api: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "openai")
    assert ping_main(["prompt=hi", f"port={api.server_port}"]) == 0
    monkeypatch.setenv("TOKA_API_KEY", "toka")
    assert ping_main(["prompt=hi", f"port={api.server_port}"]) == 0
    assert [key for _, key, _ in api.requests] == ["Bearer openai", "Bearer toka"]  # type: ignore[attr-defined]


def test_ping_reaches_a_unix_socket(capsys: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/socket"
        assert ping_main(["prompt=hi", f"unix_socket={path}"]) == 1
        line = f"no answer from unix_socket={path}: [Errno 2] No such file or directory; is toka running?"
        assert capsys.readouterr().err == f"toka ping: {line}\n"
        with UnixServer(path) as server:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            assert ping_main(["prompt=hi", f"unix_socket={path}"]) == 0
            server.shutdown()
    assert capsys.readouterr().out.startswith("text hi 0\n\n")
    assert [request[0] for request in server.requests] == ["/v1/completions"]


def test_ping_without_a_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert ping_main(["prompt=hi", f"port={port}"]) == 1
    err = capsys.readouterr().err
    assert err == (
        f"toka ping: no answer from http://127.0.0.1:{port}/v1: [Errno 111] Connection refused; is toka running?\n"
    )


@pytest.mark.parametrize(
    "words",
    [
        ["--version"],
        ["ping", "hi", "port=1"],
        ["chat", "port=1"],
        ["top", "http://127.0.0.1:1"],
        ["batch", "no.jsonl", "out.jsonl", "base_url=http://127.0.0.1:1/v1"],
        ["map", "no.csv", "out", "prompt={q}", "base_url=http://127.0.0.1:1/v1"],
    ],
    ids=lambda words: words[0],
)
def test_a_command_that_only_asks_imports_little(words: list[str], tmp_path: Path) -> None:
    """Until the server has answered; packages that take long are seen in sys.modules."""
    script = (
        "import sys\n"
        "from tokasaurus.cli import main\n"
        "main(sys.argv[1:])\n"
        "heavy = {'torch', 'openai', 'transformers', 'tokenizers', 'pyarrow', 'pandas', 'fastapi', 'uvicorn'}\n"
        "heavy |= {'numpy', 'tokasaurus.server.protocol.sampling_fields'} if sys.argv[1] != 'map' else set()\n"
        "print('imported', sorted(heavy & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", script, *words]
    done = subprocess.run(command, input="hi", capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1:] == ["imported []"], done.stderr


def test_ping_understands_an_ipv6_address(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing listens there, and the machine may have no IPv6: the address shows that the URL was understood."""
    assert ping_main(["prompt=hi", "host=::1", "port=1"]) == 1
    assert "no answer from http://[::1]:1/v1: " in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["host=a b", "api_key=schlüssel", "base_url=http://x:port"])
def test_ping_with_an_address_or_key_that_cannot_be_sent_is_one_line(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ping_main(["prompt=hi", "port=1", flag]) == 1
    err = capsys.readouterr().err
    assert err.startswith("toka ping: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "127.1"])
@pytest.mark.parametrize("proxy", ["http://127.0.0.1:1", "socks5://127.0.0.1:1", "nonsense://"])
def test_ping_reaches_this_machine_without_a_proxy(
    api: HTTPServer, host: str, proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, proxy)
        monkeypatch.setenv(name.upper(), proxy)
    assert ping_main(["prompt=hi", f"base_url=http://{host}:{api.server_port}/v1"]) == 0
    assert ping_main(["prompt=hi", f"host={host}", f"port={api.server_port}"]) == 0


def test_ping_reaches_other_machines_through_the_proxy(
    api: HTTPServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{api.server_port}")
    assert ping_main(["prompt=hi", "base_url=http://192.0.2.1/v1"]) == 0
    ((path, _, _),) = api.requests  # type: ignore[attr-defined]
    assert path == "http://192.0.2.1/v1/completions"
    capsys.readouterr()
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert ping_main(["prompt=hi", "base_url=http://192.0.2.1/v1"]) == 1
    line = "no answer from http://192.0.2.1/v1 through the proxy of http_proxy: [Errno 111] Connection refused"
    assert capsys.readouterr().err == f"toka ping: {line}; is toka running?\n"


def test_ping_names_a_proxy_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ALL_PROXY", "nonsense://x")
    assert ping_main(["prompt=hi", "base_url=http://192.0.2.1/v1"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("toka ping: http://192.0.2.1/v1: the environment variable ALL_PROXY: ")
    assert err.count("\n") == 1


def test_ping_treats_an_empty_key_variable_as_no_key(api: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKA_API_KEY", "")
    assert ping_main(["prompt=hi", f"port={api.server_port}"]) == 0
    ((_, key, _),) = api.requests  # type: ignore[attr-defined]
    assert key == "Bearer none"
