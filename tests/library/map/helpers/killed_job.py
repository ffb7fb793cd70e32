"""A job that is killed with SIGKILL again and again, until it ends by itself.

`python -m tests.library.map.helpers.killed_job FOLDER FORMAT SEED KILLS` maps FOLDER/rows to FOLDER/out. Each attempt
is a fork of this process, which has imported everything, so that attempts are short. FOLDER/log has a line for each
attempt (`attempt`), for each row that was sent (`sent N`), and for each row whose answer was stored, as far as its
writer lived to write that (`stored N`).
"""

import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import tokasaurus.library.map.shards
from tests.library.map.helpers.calls import call_map
from tests.library.map.helpers.instant_session import InstantSession
from tokasaurus.library.requests import Answer, RequestLine

SHARD_ROWS = 400


class LoggingSession(InstantSession):
    """Answers some of the lines that are in flight, in any order."""

    def __init__(self, log: int, seed: int) -> None:
        super().__init__(max_lines=256)
        self._log = log
        self._random = random.Random(seed)
        self._handed_over: list[int] = []

    def exchange(
        self, lines: Sequence[RequestLine], is_last: bool = False, timeout_s: float | None = None
    ) -> list[Answer]:
        """The caller stores the answers that it gets before it calls again."""
        del is_last, timeout_s
        entries = [f"stored {number}\n" for number in self._handed_over]
        entries += [f"sent {line.number}\n" for line in lines]
        os.write(self._log, "".join(entries).encode())
        self._in_flight += lines
        self._random.shuffle(self._in_flight)
        count = self._random.randint(1, 1 + len(self._in_flight) // 2)
        answered, self._in_flight = self._in_flight[:count], self._in_flight[count:]
        self._handed_over = [line.number for line in answered]
        time.sleep(0.0005)
        return [self.answer(line) for line in answered]


def attempt(folder: Path, format_name: str, seed: int) -> None:
    tokasaurus.library.map.shards.MAX_SHARD_ROWS = SHARD_ROWS
    log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, b"\nattempt\n")  # the last line may be torn
    (source,) = folder.glob("rows.*")
    call_map(source, folder / "out", LoggingSession(log, seed), prompt="{q}", key="id", format=format_name)


def main(folder: Path, format_name: str, seed: int, num_kills: int) -> int:
    """0 if the last attempt has ended by itself."""
    chance = random.Random(seed)
    for number in range(num_kills + 1):
        child = os.fork()
        if child == 0:
            try:
                attempt(folder, format_name, seed + number)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        if number < num_kills:
            time.sleep(chance.uniform(0.01, 0.5))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code not in (0, -signal.SIGKILL):
            return code
    return code


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
