"""The process of the server that a run starts: it ends with the run, even if that is killed.

Run as `python -m tokasaurus.batch_command.server_process PARENT_PID LIFELINE_FD [name=value ...]`. Imports little,
because every process of the server imports this module again.
"""

import sys

from tokasaurus.monitoring.shortage import ends_in_one_line


@ends_in_one_line
def main(parent_pid: str, lifeline_fd: str, *words: str) -> int:
    """Serve until a signal; returns the exit code. words: flags of the server, which the parent has checked."""
    from multiprocessing.connection import Connection

    from tokasaurus.processes.group import die_with_parent

    die_with_parent(int(parent_pid), Connection(int(lifeline_fd), writable=False))
    from tokasaurus.config import ServerConfig
    from tokasaurus.processes.launch import serve

    return serve(ServerConfig.parse([*words]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
