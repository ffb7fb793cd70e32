"""`toka top` in a terminal: what is shown, and that the terminal is as before when it has ended."""

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.commands.top.helpers.live_stub import Script, serving
from tests.commands.top.helpers.scripted_samples import job, line, replica, sample
from tests.commands.top.helpers.terminal_process import in_terminal
from tests.end_to_end.helpers.toka_process import free_port
from tests.helpers.examples import few

COMMAND = [sys.executable, "-m", "tokasaurus", "top"]
REFUSED = "[Errno 111] Connection refused"
CTRL_C, CTRL_Z, LEFT, RIGHT = b"\x03", b"\x1a", b"\x1b[D", b"\x1b[C"


def two_replicas(second: int) -> dict:
    """With a name that is as long as the screen, has wide characters, and one that would clear it."""
    return sample(
        second,
        replicas=[replica(second), replica(second, 1, running=7, state="starting")],
        jobs=[
            job(second, name="評価" * 40),
            job(second, name="clear\x1b[2J" * 9, lines={"total": None, "done": second}),
        ],
    )


@pytest.fixture
def url() -> Iterator[str]:
    with serving(Script(make=two_replicas)) as url:
        yield url


def answered(text: str) -> int:
    """A figure that grows with each sample."""
    found = re.search(r"([\d,]+) answered", text)
    assert found is not None
    return int(found[1].replace(",", ""))


@few(1, ("columns", "rows"), [(80, 24), (33, 9), (120, 40)])
@pytest.mark.parametrize(
    "how", [pytest.param("q", id="q"), pytest.param("ctrl-c", id="ctrl-c"), pytest.param("sigterm", id="sigterm")]
)
def test_a_screen_never_wraps_and_leaves_the_terminal_as_it_was(url: str, columns: int, rows: int, how: str) -> None:
    if (columns, rows) != (80, 24) and how != "q":
        pytest.skip("the way to the end does not depend on the size: one size has all")
    with in_terminal([*COMMAND, url], columns, rows) as terminal:
        first = terminal.wait_for(lambda text: "generated" in text and "– tokens/s" not in text)
        terminal.wait_for(lambda text: text != first)
        terminal.assert_full_screen()
        lines = terminal.screen.display
        assert lines[0].startswith("toka top  live  SmolLM2")
        assert lines[-1].startswith("q quit")
        assert ("10-90 %" in terminal.text) == (columns > 40)
        if how == "sigterm":
            terminal.process.send_signal(signal.SIGTERM)
        else:
            terminal.press(b"q" if how == "q" else CTRL_C)
        assert terminal.end() == (128 + signal.SIGTERM if how == "sigterm" else 0)
        terminal.assert_as_before()
        assert b"Traceback" not in terminal.output


def test_a_server_that_dies_is_waited_for_and_one_that_changes_its_mind_ends_the_command() -> None:
    script, port = Script(make=two_replicas), free_port()
    with ExitStack() as server:
        url = server.enter_context(serving(script, port))
        with in_terminal([*COMMAND, url], 100, 24) as terminal:
            terminal.wait_for_words("live")
            server.close()
            text = terminal.wait_for_words(" Connection refused; trying again")
            assert re.search(
                r"  no answer since \d\d:\d\d:\d\d: \[Errno 111\] Connection refused; trying again  ", text
            )
            assert "10-90 %" in terminal.text, "the last figures stay"
            before = answered(terminal.text)
            with serving(script, port):
                terminal.wait_for(lambda text: "live" in text and answered(text) > before)
                terminal.assert_full_screen()
                script.make = lambda second: sample(second, format=2)
                assert terminal.end() == 1
            terminal.assert_as_before()
            assert "toka top: " in terminal.text
            assert b"format 2 of samples is not known, this toka reads 1\r\n" in terminal.output


def test_a_server_that_says_why_it_ends_is_believed() -> None:
    script = Script(make=lambda second: sample(second, server={**sample(second)["server"], "ended": "it was stopped"}))
    with ExitStack() as server:
        url = server.enter_context(serving(script))
        with in_terminal([*COMMAND, url], 100, 24) as terminal:
            terminal.wait_for_words("live")
            server.close()
            text = terminal.wait_for_words("; trying again")
            assert re.search(r"  server ended at \d\d:\d\d:\d\d: it was stopped; trying again  ", text)


def test_keys_pause_choose_a_replica_and_explain(url: str) -> None:
    with in_terminal([*COMMAND, url], 80, 30) as terminal:
        terminal.wait_for_words("> replica 0")
        terminal.press(b"r")
        assert "7 running" in terminal.wait_for_words("> replica 1")
        terminal.press(b"r?")
        assert "tokens/s" not in terminal.wait_for_words("Rates are means")
        terminal.press(b"?p")
        paused = answered(terminal.wait_for(lambda text: "paused" in text and "answered" in text))
        terminal.press(b"rr")  # drawn anew, with the same sample
        terminal.wait_for_words("> replica 0")
        assert answered(terminal.text) == paused
        terminal.press(b"p\x1b[5~\x1bOPx")  # and keys that mean nothing
        terminal.wait_for(lambda text: "live" in text and answered(text) > paused + 3)
        terminal.assert_full_screen()


def test_the_screen_follows_the_size_of_the_terminal() -> None:
    """Without wide characters, of which the emulator cannot cut one in two."""
    with serving(Script()) as url, in_terminal([*COMMAND, url], 80, 24) as terminal:
        terminal.wait_for_words("live")
        for columns, rows in ((120, 40), (60, 12), (10, 3), (1, 1), (100, 30)):
            terminal.resize(columns, rows)
            if columns >= 60:
                terminal.wait_for(
                    lambda _, rows=rows: (
                        terminal.screen.display[0].startswith("toka top  live")
                        and terminal.screen.display[rows - 1].startswith("q quit")
                    )
                )
        terminal.press(b"q")
        assert terminal.end() == 0
        terminal.assert_as_before()


def test_ctrl_z_gives_the_terminal_back_until_the_command_goes_on(url: str) -> None:
    with in_terminal([*COMMAND, url], 80, 24) as terminal:
        terminal.wait_for_words("live")
        terminal.press(CTRL_Z)
        terminal.wait_until_stopped()
        terminal.assert_as_before()
        terminal.screen.reset()
        os.kill(terminal.process.pid, signal.SIGCONT)
        terminal.wait_for_words("live")
        terminal.assert_full_screen()
        terminal.press(b"q")
        assert terminal.end() == 0
        terminal.assert_as_before()


def colours(output: bytes) -> list[bytes]:
    """Sequences that set a colour."""
    codes = [code for codes in re.findall(rb"\x1b\[([\d;]*)m", output) for code in codes.split(b";")]
    return [code for code in codes if (code[:1] in (b"3", b"4", b"9") and len(code) > 1) or code[:2] == b"10"]


def test_colours_can_be_turned_off_and_a_terminal_without_bars_has_the_figures(url: str) -> None:
    seen: dict[str, bytes] = {}
    for name, environment in (("full", {}), ("plain", {"NO_COLOR": "1"}), ("ascii", {"PYTHONIOENCODING": "ascii"})):
        with in_terminal([*COMMAND, url], 80, 24, **environment) as terminal:
            terminal.wait_for(lambda text: "last minute" in text and "– tokens/s" not in text)
            seen[name] = terminal.output
    assert colours(seen["full"]) != []
    assert colours(seen["plain"]) == []
    assert "█".encode() in seen["plain"]
    assert seen["ascii"].isascii()
    assert b"????" in seen["ascii"]


@pytest.mark.long
def test_a_terminal_without_a_cursor_has_a_line_a_second(url: str) -> None:
    with in_terminal([*COMMAND, url], 80, 24, TERM="dumb") as terminal:
        terminal.wait_for(lambda text: text.count("217 running") > 2)
        terminal.press(CTRL_C)
        assert terminal.end() == 0
        terminal.assert_as_before()
        assert b"\x1b" not in terminal.output


@pytest.mark.long
def test_errors_of_the_first_moment_come_without_a_screen() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with in_terminal([*COMMAND, url], 80, 24) as terminal:
        assert terminal.end() == 1
        assert terminal.output == f"toka top: no answer from {url}: {REFUSED}; is toka running?\r\n".encode()


def test_a_replay_is_scrubbed_and_stays_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"".join(line(sample(second)) for second in range(61)))
    with in_terminal([*COMMAND, f"replay={path}", "speed=0.01"], 80, 24) as terminal:
        terminal.wait_for_words("replay 00:00 of 01:00")
        assert answered(terminal.text) == 100
        terminal.press(RIGHT + RIGHT)
        assert answered(terminal.wait_for_words("00:20 of 01:00")) == 120
        terminal.press(LEFT)
        assert answered(terminal.wait_for_words("00:10 of 01:00")) == 110
        terminal.press(b" ")
        terminal.wait_for_words("paused")
        terminal.press(RIGHT * 6)
        assert answered(terminal.wait_for_words("01:00 of 01:00, speed 0.01, the end")) == 160
        terminal.assert_full_screen()
        terminal.press(b"q")
        assert terminal.end() == 0
        terminal.assert_as_before()


@pytest.mark.long
def test_a_replay_goes_through_its_samples_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"".join(line(sample(second)) for second in range(61)))
    with in_terminal([*COMMAND, f"replay={path}", "speed=100"], 80, 24) as terminal:
        middle = terminal.wait_for(lambda text: " answered" in text and 105 < answered(text) < 160)
        assert "the end" not in middle
        terminal.wait_for_words("the end")
        assert "16,800 tokens/s" in terminal.text
        terminal.process.send_signal(signal.SIGHUP)
        assert terminal.end() == 128 + signal.SIGHUP
        terminal.assert_as_before()


def test_a_terminal_that_goes_away_ends_the_command(url: str) -> None:
    with in_terminal([*COMMAND, url], 80, 24) as terminal:
        terminal.wait_for_words("live")
        terminal.hang_up()
        assert terminal.process.wait(timeout=60) in (1, 128 + signal.SIGHUP)
