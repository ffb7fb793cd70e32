"""Runs a tutorial of docs as a reader would: its commands and programs one after the other, each output compared with
the one that the page shows.

A page is run with these blocks:

- `sh title="Terminal 1"`: the server's start, which the caller has made; a `text` below it is among the server's lines.
- `sh`: commands of bash. `console`: lines that begin with `$ `, each followed by what it prints.
- `python`: a file, if the first line is a comment with its name, else a part of one program.
- `text`, `json`: what the block before has printed.

In what a page shows, … stands for anything in a line, and a line … or ... for any lines. VARYING are the figures that
differ from run to run.
"""

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.end_to_end.helpers.toka_process import wait_for

ROOT = Path(__file__).parents[3]
PORT = "10210"
"""That the pages name."""
TIMEOUT_S = 300
VARYING = (
    r"[\d,.]+(?= (?:s|ms|tokens/s)\b)",
    r"(?<=seconds=)[\d.]+",
    r"(?<=num_skipped=)\d+",
    r"(?<=_tokens=)\d+",
    r"[\d,]+(?= rows are done already)",
    r"\d+\.\d(?=%)",
)
"""Times and rates; what of a job was done when it was killed; shares of random samples."""
PROGRESS = re.compile(r"[\d,]+ of [\d,]+ rows done, 0 errors, [\d,]+(?: of [\d,]+)? tokens, \S+ tokens/s(?:, .* left)?")
"""A line of `map`: there may be more or fewer of them, and a page may leave them out."""
_BLOCK = re.compile(r'^```(\w*)(?: title="([^"]*)")?\n(.*?)^```$', flags=re.MULTILINE | re.DOTALL)
_ANY_LINES = ("…", "...")
_KILLED = "Killed"


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    code: str


def blocks_of(page: Path) -> list[Block]:
    return [Block(*found) for found in _BLOCK.findall(page.read_text())]


def server_flags(page: Path) -> set[str]:
    """Of the server that the page starts, without its model."""
    (command,) = [block.code for block in blocks_of(page) if block.title == "Terminal 1"]
    name, *flags = shlex.split(command)
    assert name == "toka"
    return {flag for flag in flags if not flag.startswith("model=")}


@dataclass
class Tutorial:
    """One run of a page."""

    page: Path
    folder: Path
    """The working directory."""
    port: int = 0
    """Of the server, in place of the page's."""
    server_lines: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)
    """Of commands and programs, beside that of the tests."""
    said: tuple[str, ...] | None = None
    """None if the server has the demo model, whose words are compared. Else texts of the page that only the demo model
    says: these, and all figures, may be others."""
    change: Callable[[str], str] = str
    """Applied to every command and program."""
    is_time_to_kill: Callable[[Path], bool] = Path.exists
    """When a program that the page shows as killed has done enough: asked with `folder`."""

    def run(self) -> None:
        """Raises AssertionError at the first block that fails or prints something else."""
        if self.said is not None:
            text = self.page.read_text()
            assert [words for words in self.said if words not in text] == [], "words that the page does not have"
        self._names: dict[str, Any] = {"__name__": "__main__"}
        output: str | None = None
        blocks = blocks_of(self.page)
        for block, following in zip(blocks, [*blocks[1:], None], strict=True):
            is_shown = following is not None and following.language in ("text", "json")
            if block.language in ("text", "json"):
                assert output is not None, f"nothing has printed what the page shows: {block.code}"
                self._compare_block(block, output)
                output = None
            else:
                output = self._run(block)
                has_to_be_shown = block.language == "python" and output
                assert is_shown or not has_to_be_shown, f"the page does not show what this prints: {block.code}"

    def _run(self, block: Block) -> str | None:
        """What it prints; None if that has been compared."""
        if block.title == "Terminal 1":
            return "".join(f"{line}\n" for line in self.server_lines if line.startswith("ready:"))
        code = self._changed(block.code)
        if block.language == "sh":
            return self._command(code)
        if block.language == "console":
            for command, shown in _commands(code):
                self._compare(shown, self._printed_by(command, shown), command)
            return None
        assert block.language == "python", block.language
        named = re.match(r"# (\w+\.py)\n", code)
        if named:
            (self.folder / named[1]).write_text(code)
            return None
        with self._printed() as printed, redirect_stderr(io.StringIO()):
            exec(compile(code, self.page.name, "exec"), self._names)
        return printed.getvalue()

    def _changed(self, code: str) -> str:
        return self.change(code.replace(f"127.0.0.1:{PORT}", f"127.0.0.1:{self.port}"))

    def _printed_by(self, command: str, shown: list[str]) -> str:
        words = shlex.split(command) if command.startswith("python ") else []
        if shown and shown[-1] == _KILLED:
            return self._killed(words)
        return self._program(words[1:]) if words else self._command(command)

    def _program(self, arguments: list[str]) -> str:
        """In this process, which has imported most of what programs import."""
        path = self.folder / arguments[0]
        before = sys.argv
        sys.argv = arguments
        try:
            with self._printed() as printed:
                exec(compile(path.read_text(), path.name, "exec"), {"__name__": "__main__"})
        finally:
            sys.argv = before
        return printed.getvalue()

    @contextmanager
    def _printed(self) -> Iterator[io.StringIO]:
        """What is printed within, in the tutorial's directory and environment."""
        printed = io.StringIO()
        before = Path.cwd()
        os.chdir(self.folder)
        try:
            with patch.dict(os.environ, self.environment), redirect_stdout(printed), redirect_stderr(printed):
                yield printed
        finally:
            os.chdir(before)

    def _command(self, command: str) -> str:
        done = subprocess.run(
            ["bash", "-ec", command],
            cwd=self.folder,
            env=self._whole_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        return done.stdout

    def _killed(self, command: list[str]) -> str:
        """kill -9 as soon as `is_time_to_kill` says so."""
        output = self.folder / "output_of_killed"
        with output.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, *command[1:]],
                cwd=self.folder,
                env=self._whole_environment(),
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            try:
                wait_for(lambda: process.poll() is not None or self.is_time_to_kill(self.folder), TIMEOUT_S)
            finally:
                process.kill()
                process.wait()
        printed = output.read_text()
        assert process.returncode == -signal.SIGKILL, f"{command} has ended before it was killed:\n{printed}"
        return f"{printed}{_KILLED}\n"

    def _whole_environment(self) -> dict[str, str]:
        """With commands `toka` and `python` that are this package and this interpreter."""
        path = f"{self._programs()}{os.pathsep}{os.environ['PATH']}"
        return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1", "PATH": path, **self.environment}

    def _programs(self) -> Path:
        folder = self.folder / "bin"
        if not folder.exists():
            folder.mkdir()
            for name, arguments in (("toka", "-m tokasaurus "), ("python", "")):
                program = folder / name
                program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments}"$@"\n')
                program.chmod(0o755)
        return folder

    def _compare_block(self, block: Block, output: str) -> None:
        if block.language == "json":
            shown = json.loads(_json_with_any(block.code))
            assert self._is_json(shown, json.loads(output)), f"the page shows {shown}, printed was {output}"
        else:
            self._compare(self._changed(block.code).splitlines(), output, block.code)

    def _compare(self, shown: list[str], output: str, what: str) -> None:
        pattern = "".join(self._line_pattern(line) for line in shown)
        if not any(map(PROGRESS.fullmatch, shown)):  # it is on stderr, and depends on how long a call takes
            output = re.sub(rf"^{PROGRESS.pattern}\n", "", output, flags=re.MULTILINE)
        output += "" if output.endswith("\n") or not output else "\n"
        assert re.fullmatch(pattern, output), (
            f"{what}\nthe page shows:\n{os.linesep.join(shown)}\nprinted was:\n{output}"
        )

    def _line_pattern(self, line: str) -> str:
        if line in _ANY_LINES:
            return r"(?:.*\n)*?"
        if PROGRESS.fullmatch(line):
            return rf"(?:{PROGRESS.pattern}\n)*"
        parts = {"…": ".*?", **dict.fromkeys(self.said or (), r"[\s\S]*?")}
        of_figures = "|".join(VARYING) if self.said is None else r"\d[\d,.]*"
        words = "|".join(map(re.escape, sorted(parts, key=len, reverse=True)))
        pieces = re.split(f"({words}|{of_figures})", line)
        pattern = (parts.get(one, r"[\d,.]+") if number % 2 else re.escape(one) for number, one in enumerate(pieces))
        return "".join(pattern) + r"\n"

    def _is_json(self, shown: Any, actual: Any) -> bool:
        """Equal, but for … and for answers of another model, of which names and types are compared."""
        if shown == "…" or (isinstance(shown, str) and shown.endswith("…") and str(actual).startswith(shown[:-1])):
            return True
        if isinstance(shown, dict) and isinstance(actual, dict):
            if "…" in shown:
                return True
            # a server for several pages may have flags that add fields
            has_names = shown.keys() == actual.keys() if self.said is None else shown.keys() <= actual.keys()
            return has_names and all(self._is_json(shown[name], actual[name]) for name in shown)
        if isinstance(shown, list) and isinstance(actual, list):
            return shown == ["…"] or (len(shown) == len(actual) and all(map(self._is_json, shown, actual)))
        return type(shown) is type(actual) if self.said is not None else bool(shown == actual)


def _commands(code: str) -> Iterator[tuple[str, list[str]]]:
    """Each command of a block, lines that a backslash continues joined, and the lines that it prints."""
    lines = code.splitlines()
    assert lines[0].startswith("$ ")
    command, shown = "", list[str]()
    for line in lines:
        if command.endswith("\\"):
            command += "\n" + line
        elif line.startswith("$ "):
            if command:
                yield command, shown
            command, shown = line[2:], []
        else:
            shown.append(line)
    yield command, shown


def _json_with_any(text: str) -> str:
    """JSON in which … stands for a value, or for what an object or a list contains."""
    text = re.sub(r"\{…\}", '{"…": "…"}', text)
    text = re.sub(r"\[…\]", '["…"]', text)
    return re.sub(r"(?<=: )…", '"…"', text)
