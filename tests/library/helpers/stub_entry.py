"""In place of `tokasaurus.processes.private_entry`: a private server whose processes run other entries.

`use_entries` names them; a program that a test starts may name them by the environment variable ENTRIES."""

import functools
import os

from tokasaurus.processes import launch, private_entry, private_server
from tokasaurus.processes.launch import Entries

ENTRIES = "TOKA_TEST_ENTRIES"


def use_entries(entries: Entries) -> None:
    """For all private servers that this process starts from now on."""
    os.environ[ENTRIES] = ",".join((entries.server, entries.manager, entries.worker))
    private_server.ENTRY = __name__


def main(*words: str) -> int:
    entries = Entries(*os.environ[ENTRIES].split(","))
    launch.serve = functools.partial(launch.serve, entries=entries)
    return private_entry.main(*words)
