"""`toka chat` at a real terminal and through a pipe, against a scripted server."""

import itertools
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.end_to_end.helpers.toka_process import wait_for
from tests.helpers.examples import few
from tests.helpers.scripted_api import scripted_api
from tests.helpers.tiny_model import save_tiny_model
from tokasaurus.command_line import read
from tokasaurus.commands.chat import ChatConfig, _Lines

WAIT_S = 60.0
COMMAND = [sys.executable, "-m", "tokasaurus", "chat"]


@pytest.fixture
def api() -> Iterator[HTTPServer]:
    with scripted_api() as server:
        yield server


class Terminal:
    """`toka chat` with a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self._process, self._terminal = pty.fork()
        if self._process == 0:
            os.execvpe(COMMAND[0], [*COMMAND, *words], {**os.environ, "TERM": "dumb"})
        self.shown = ""

    def wait_for(self, *texts: str, again: str = "") -> None:
        """Until all have been shown, each after the one before; what is before them is dropped.

        again: typed once more whenever nothing is shown for some seconds."""
        deadline = time.monotonic() + WAIT_S
        for text in texts:
            while text not in self.shown:
                assert time.monotonic() < deadline, self.shown
                if not select.select([self._terminal], [], [], 3.0)[0]:
                    self.type(again)
                    continue
                try:
                    self.shown += os.fsdecode(os.read(self._terminal, 4096))
                except OSError:
                    pytest.fail(f"ended without {text!r}: {self.shown}")
            self.shown = self.shown.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self._terminal, os.fsencode(text))

    def exit_code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])

    def kill(self) -> None:
        os.close(self._terminal)
        try:
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def messages(api: HTTPServer) -> list[Any]:
    return [body["messages"] for _, _, body in api.requests if "messages" in body]  # type: ignore[attr-defined]


def test_a_conversation_at_a_terminal(api: HTTPServer) -> None:
    terminal = Terminal(f"port={api.server_port}", "max_tokens=9", "temperature=0.5", "system=be brief")
    try:
        terminal.wait_for(f"tiny at http://127.0.0.1:{api.server_port}/v1; /help lists commands, Ctrl-D ends", "> ")
        terminal.type("hello\n")
        terminal.wait_for("chat hello 0", "> ")
        terminal.type("slow\n")
        terminal.wait_for("0 1 2 3 ")
        terminal.type("\x03")
        terminal.wait_for("(stopped)", "> ")
        # before the next question, so not because the program has ended
        wait_for(lambda: len(api.ended_early) == 1, 30)  # type: ignore[attr-defined]
        terminal.type("/system be long\n")
        terminal.wait_for("the instructions hold", "> ")
        terminal.type("think\n")
        terminal.wait_for("\x1b[2mwell\x1b[0m", "chat think 0", "> ")
        terminal.type("fail\n")
        terminal.wait_for("answered 400: prompt is too long", "> ")
        terminal.type("/clear\n/nonsense\n")
        terminal.wait_for("forgotten", "/nonsense: no such command", "/quit", "> ")
        terminal.type("\x03")
        # Python hears a signal between its prompt and its wait for keys only at the next key.
        terminal.wait_for("Ctrl-D or /quit ends", "> ", again="\x03")
        terminal.type("again\n")
        terminal.wait_for("chat again 0", "> ")
        terminal.type("/quit\n")
        assert terminal.exit_code() == 0
    finally:
        terminal.kill()
    (hello, slow, think, fail, again) = messages(api)
    brief, long = ({"role": "system", "content": f"be {word}"} for word in ("brief", "long"))
    first = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "chat hello 0"}]
    assert hello == [brief, *first[:1]]
    assert slow == [brief, *first, {"role": "user", "content": "slow"}]
    stopped = think[4]["content"]
    assert stopped.startswith("0 1 2 3 ")
    assert think == [long, *slow[1:], {"role": "assistant", "content": stopped}, {"role": "user", "content": "think"}]
    assert fail[-2:] == [{"role": "assistant", "content": "chat think 0"}, {"role": "user", "content": "fail"}]
    assert again == [long, {"role": "user", "content": "again"}]
    bodies = [body for _, _, body in api.requests if "messages" in body]  # type: ignore[attr-defined]
    assert {(body["model"], body["max_tokens"], body["temperature"], body["stream"]) for body in bodies} == {
        ("default", 9, 0.5, True)
    }


def test_an_answer_is_given_again_with_other_settings_and_saved(api: HTTPServer, tmp_path: Path) -> None:
    terminal = Terminal(f"port={api.server_port}")
    saved = tmp_path / "saved.json"
    try:
        terminal.wait_for("> ")
        terminal.type("/retry\nhello\n")
        terminal.wait_for("there is no message yet", "chat hello 0", "(40 tokens, ", " tokens/s)", "> ")
        terminal.type('/set temperature 0.5\n/set stop ["x"]\n/set reasoning_effort low\n/set max_tokens\n/set\n')
        terminal.wait_for("max_tokens is the server's own", "temperature 0.5", 'stop ["x"]', 'reasoning_effort "low"')
        terminal.type("/retry\n")
        terminal.wait_for("chat hello 0", "> ")
        terminal.type("/set max_tokens 7\nlong\n")
        terminal.wait_for("chat long 0", "> ")
        terminal.type(f"/save {saved}\n/save {saved}\n/save\n/quit\n")
        terminal.wait_for(f"saved: {saved}", "File exists", "a name of a file is missing")
        assert terminal.exit_code() == 0
    finally:
        terminal.kill()
    first, again, long, with_room = [body for _, _, body in api.requests if "messages" in body]  # type: ignore[attr-defined]
    hello = {"role": "user", "content": "hello"}
    assert first == first | {"messages": [hello], "max_tokens": 1024, "stream_options": {"include_usage": True}}
    assert "temperature" not in first
    assert again == again | {"messages": [hello], "temperature": 0.5, "stop": ["x"], "reasoning_effort": "low"}
    assert "max_tokens" not in again
    assert long["max_tokens"] == 7
    assert with_room == {name: value for name, value in long.items() if name != "max_tokens"}
    answers = [{"role": "assistant", "content": f"chat {word} 0"} for word in ("hello", "long")]
    told = [hello, answers[0], {"role": "user", "content": "long"}, answers[1]]
    assert json.loads(saved.read_text()) == {"messages": told}


def test_a_conversation_survives_commands_that_cannot_be_obeyed(api: HTTPServer, tmp_path: Path) -> None:
    terminal = Terminal(f"port={api.server_port}")
    saved = tmp_path / "saved.json"
    try:
        terminal.wait_for("> ")
        for name in ("messages", "n", "stream", "stream_options"):
            terminal.type(f"/set {name} 2\n")
            terminal.wait_for(f"{name} is set by the conversation itself", "> ")
        terminal.type("/save ~nobody-has-this-name/a.json\n")
        terminal.wait_for("home directory", "> ")
        terminal.type("/system \udcff\n")
        terminal.type(f"/save {saved}\n")
        terminal.wait_for("surrogates not allowed", "> ")
        terminal.type("/system\nhello\n")
        terminal.wait_for("chat hello 0", "> ")
        terminal.type(f"/save {saved}\n/quit\n")
        terminal.wait_for(f"saved: {saved}")
        assert terminal.exit_code() == 0
    finally:
        terminal.kill()
    (asked,) = [body for _, _, body in api.requests if "messages" in body]  # type: ignore[attr-defined]
    hello = {"role": "user", "content": "hello"}
    assert (asked["messages"], asked["stream"], "n" in asked) == ([hello], True, False)
    assert len(json.loads(saved.read_text())["messages"]) == 2


@given(
    words=st.lists(st.text("ab", min_size=1, max_size=9) | st.sampled_from(["\u4e16\u754c", "\n", "", "e\u0301"])),
    cuts=st.lists(st.integers(0, 60)),
    width=st.integers(10, 30),
)
def test_lines_break_between_words_however_the_text_arrives(words: list[str], cuts: list[int], width: int) -> None:
    text = " ".join(words)
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    lines = _Lines(width)
    shown = "".join([*(lines.add(text[start:end]) for start, end in itertools.pairwise(ends)), lines.rest()])
    # Nothing but the spaces at a break is changed, and all the words fit into their lines.
    assert shown.split() == text.split() or "".join(shown.split()) == "".join(text.split())
    for line in shown.split("\n"):
        columns = sum(2 if character in "\u4e16\u754c" else character != "\u0301" for character in line.rstrip())
        assert columns <= width
    for line, after in itertools.pairwise(shown.split("\n")):
        if f"{line}\n{after}" not in text and after.split():  # a break of ours: the next word had no room
            first = after.split()[0]
            assert len(line.rstrip()) + 1 + len(first) > width or "\u4e16" in text


@pytest.mark.long
def test_end_of_input_ends_the_conversation(api: HTTPServer) -> None:
    terminal = Terminal(f"base_url=http://127.0.0.1:{api.server_port}/v1", "model=m")
    try:
        terminal.wait_for("m at http://", "> ")
        terminal.type("\x04")
        assert terminal.exit_code() == 0
    finally:
        terminal.kill()


@few(
    4,
    ("message", "code", "out", "err"),
    [
        ("two\nlines\n", 0, "chat two\nlines 0\n", ""),
        ("think\n", 0, "chat think 0\n", ""),
        ("fail", 1, "", "/v1 answered 400: prompt is too long\n"),
        ("\n", 2, "", "toka chat: the standard input is empty: it is the message to answer\n"),
    ],
)
def test_a_message_from_a_pipe(message: str, code: int, out: str, err: str, api: HTTPServer) -> None:
    command = [*COMMAND, f"port={api.server_port}"]
    done = subprocess.run(command, input=message, capture_output=True, text=True, timeout=WAIT_S)
    assert (done.returncode, done.stdout) == (code, out)
    assert done.stderr.endswith(err)
    assert done.stderr.count("\n") == (1 if err else 0)
    assert messages(api) == ([[{"role": "user", "content": message.rstrip("\n")}]] if message.strip() else [])


def test_without_a_server_it_ends_in_one_line() -> None:
    done = subprocess.run([*COMMAND, "port=1"], input="hi", capture_output=True, text=True, timeout=WAIT_S)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("toka chat: no answer from http://127.0.0.1:1/v1: ")
    assert done.stderr.count("\n") == 1


def test_an_address_in_the_environment_does_not_matter_for_a_model_of_its_own() -> None:
    environment = {"TOKA_PORT": "1", "TOKA_MODEL": "other", "TOKA_API_KEY": "k"}
    given = read(ChatConfig, ["org/name"], environment, ("model",))
    assert (given.config.model, given.config.port, given.config.api_key) == ("org/name", ChatConfig.port, None)
    assert read(ChatConfig, [], environment, ("model",)).config.port == 1
    assert read(ChatConfig, [], environment, ("model",)).config.model is None


@pytest.mark.long
def test_a_model_of_its_own_answers_and_ends(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    command = [*COMMAND, f"model={tmp_path}", "max_tokens=4"]
    done = subprocess.run(command, input="hi", capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n")
    done = subprocess.run([*COMMAND, "model=/nowhere"], input="hi", capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert "'/nowhere' is neither a directory" in done.stderr.splitlines()[-1]
