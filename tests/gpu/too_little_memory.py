"""Starts on a device whose memory does not suffice: each ends with one line that says so. Not yet run on a GPU."""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.end_to_end.helpers.toka_process import running_toka
from tests.helpers.limits import read_line

ROOT = Path(__file__).parents[2]
FAR_TOO_MANY = 2_000_000_000
"""Tokens."""
HELD = "held"


def failed_start(directory: Path, *flags: str, prefix: Sequence[str] = ()) -> str:
    """The reason of a server that does not start. Asserts that it gives one, in one line. prefix: of the command."""
    command = [*prefix, sys.executable, "-m", "tokasaurus", "port=0", f"model={directory}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    output = done.stdout + done.stderr
    reasons = re.findall(r"^toka: (?:.* failed: )?(.*)$", output, re.MULTILINE)
    assert len(reasons) == 1, output
    assert done.returncode in (1, 2), output
    assert "Traceback" not in output
    return str(reasons[0])


def check_refused_cache(directory: Path, *flags: str, num_tokens: int = FAR_TOO_MANY) -> int:
    """-> the most tokens that the refusal allows."""
    reason = failed_start(directory, *flags, f"kv_cache_num_tokens={num_tokens}")
    found = re.fullmatch(rf"kv_cache_num_tokens={num_tokens}: needs .*, enough for at most (\d+)", reason)
    assert found is not None, reason
    assert 0 < int(found[1]) < num_tokens
    return int(found[1])


def check_allowed_cache(directory: Path, num_tokens: int, *flags: str) -> None:
    """A server with a KV cache of this size starts and answers."""
    body = {"model": "default", "prompt": [[1, 2, 3]] * 64, "max_tokens": 64, "ignore_eos": True}
    with running_toka(f"model={directory}", f"kv_cache_num_tokens={num_tokens}", *flags) as toka:
        answer = httpx.post(f"{toka.url}/v1/completions", json=body, timeout=200)
        assert answer.status_code == 200, answer.text
        assert toka.stop() == 0


@contextmanager
def held_device(left_mib: int) -> Iterator[None]:
    """Another process has all of the device's memory but this."""
    command = [sys.executable, "-m", "tests.gpu.too_little_memory", str(left_mib)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert read_line(holder, holder.stdout).strip() == HELD
            yield
        finally:
            holder.kill()


def hold(left_mib: int) -> None:
    """Until standard input ends."""
    import torch

    left, blocks = left_mib << 20, []
    for size in (1 << 30, 64 << 20):
        while torch.cuda.mem_get_info()[0] > left + size:
            blocks.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    print(HELD, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    hold(int(sys.argv[1]))
