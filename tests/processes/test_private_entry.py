"""The end of a private server whose parent has ended."""

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.limits import receive

SCRIPT = """
import select, sys, time
from tokasaurus.processes import launch, private_entry

def serve(config, report):
    report.show_line("serving")
    {serve}

launch.serve = serve
private_entry._kill_descendants = lambda: time.sleep({kill_s})
sys.exit(private_entry.main(*sys.argv[1:]))
"""
REPORT_FOR_EVER = "while True: report.show_line('line')"
RETURN_ONCE_ORPHANED = "select.select([int(sys.argv[1])], [], [])"


@pytest.mark.parametrize("serve", [REPORT_FOR_EVER, RETURN_ONCE_ORPHANED], ids=["reports fail", "serving ends"])
def test_the_directory_is_removed_although_serving_ends_before_the_other_processes(serve: str, tmp_path: Path) -> None:
    directory = tmp_path / "private"
    directory.mkdir()
    (directory / "file").touch()
    ours, its = multiprocessing.Pipe()
    script = SCRIPT.format(serve=serve, kill_s=1.5)
    words = [str(its.fileno()), str(directory), "model=any"]
    with its:
        process = subprocess.Popen(
            [sys.executable, "-c", script, *words],
            pass_fds=[its.fileno()],
            start_new_session=True,
            stderr=subprocess.PIPE,
        )
    with process:
        assert receive(ours) == "serving"
        ours.close()
        process.communicate(timeout=60)
    assert not directory.exists()
