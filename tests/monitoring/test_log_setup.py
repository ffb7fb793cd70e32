"""The records that a process's log shows at each level."""

import subprocess
import sys

import pytest

# Run in a process of its own: logging is global, and other tests start uvicorn in this one.
SCRIPT = """
import logging, sys
from tokasaurus.config import parse_server_config
from tokasaurus.monitoring.log_setup import setup_logging

setup_logging(parse_server_config(sys.argv[1:]), "manager")
logging.getLogger("tokasaurus.manager.loop").debug("ours debug")
logging.getLogger("tokasaurus.manager.loop").info("ours info")
logging.getLogger("uvicorn.error").log(5, "uvicorn trace")
logging.getLogger("uvicorn.access").info("uvicorn info")
logging.getLogger("httpx").info("other info")
logging.getLogger("httpx").warning("other warning")
"""


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ([], ["ours info", "uvicorn info", "other warning"]),
        (["log_level=debug"], ["ours debug", "ours info", "uvicorn info", "other warning"]),
        (["log_level=error", "uvicorn_log_level=trace"], ["uvicorn trace", "uvicorn info", "other warning"]),
        (["uvicorn_log_level=error"], ["ours info", "other warning"]),
    ],
)
def test_each_flag_sets_the_level_of_its_own_part(flags: list[str], shown: list[str]) -> None:
    result = subprocess.run([sys.executable, "-c", SCRIPT, *flags], capture_output=True, text=True, check=True)
    assert [line.partition(" manager: ")[2] for line in result.stderr.splitlines()] == shown
    assert result.stdout == ""
