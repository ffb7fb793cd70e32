"""`toka batch` with a server of its own, as a user starts it."""

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from tests.commands.batch.helpers.request_lines import write_requests
from tests.end_to_end.helpers.toka_process import wait_for

FLAGS = (
    "dtype=float32",
    "cpu_isa=torch",  # starts sooner
    "kv_cache_num_tokens=8192",
    "max_tokens_per_forward=256",
    "max_seqs_per_forward=4",
)
# A run must not ask a proxy for its own server, nor may a key for other servers be sent to it.
_ENVIRONMENT = {
    **os.environ,
    "HTTP_PROXY": "http://127.0.0.1:9",
    "http_proxy": "http://127.0.0.1:9",
    "TOKA_API_KEY": "of-another-server",
    "OPENAI_API_KEY": "of-another-server",
}


class BatchCommand:
    """`toka batch` on `in.jsonl` and `out.jsonl` of one directory."""

    def __init__(self, model: Path, directory: Path, num_lines: int, num_tokens: int) -> None:
        """num_tokens: of each answer."""
        self.source, self.output = directory / "in.jsonl", directory / "out.jsonl"
        self.data_dir = directory / "out.jsonl.toka"
        self._words = [f"model={model}", f"input={self.source}", f"output={self.output}", *FLAGS]
        # a seed, since another run's server would draw others
        write_requests(self.source, num_lines, max_tokens=num_tokens, ignore_eos=True, seed=7)

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tokasaurus", "batch", *self._words, *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=_ENVIRONMENT)

    def run(self, *words: str) -> tuple[int, str]:
        """(exit code, all output)"""
        process = self.start(*words)
        output, _ = process.communicate(timeout=300)
        return process.returncode, output

    def of_stored(self, *words: str) -> str:
        """Output of list, show or cancel."""
        command = [sys.executable, "-m", "tokasaurus", "batch", *words, f"data_dir={self.data_dir}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=_ENVIRONMENT)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def results(self) -> dict[str, bytes]:
        """What the ledger has: the line of the output by its custom id."""
        path = self.data_dir / "database.sqlite"
        if not path.exists():
            return {}
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            try:
                rows = connection.execute("SELECT custom_id, content FROM lines JOIN results USING (key)").fetchall()
            except sqlite3.OperationalError:  # the tables are not made yet
                return {}
        return dict(rows)

    def wait_for_results(self, num_lines: int) -> None:
        wait_for(lambda: len(self.results()) >= num_lines, 240)


def processes_below(pid: int) -> list[int]:
    """Ids of the process's children, and theirs."""
    listing = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return [found for child in map(int, listing.split()) for found in (child, *processes_below(child))]
