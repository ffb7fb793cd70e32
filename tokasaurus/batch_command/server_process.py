"""The server process of a run: it ends with the run, even if that is killed, and tells it how far it is.

`OwnServer` runs its `main`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokasaurus.monitoring.shortage import LESS_MEMORY, describe_shortage, ends_in_one_line

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from tokasaurus.startup_report import StartupReport


@ends_in_one_line
def main(parent_pid: str, channel_fd: str, *words: str) -> int:
    """Run the batches of data_dir until a signal; returns the exit code. words: flags, which the parent has checked."""
    from multiprocessing.connection import Connection

    channel = Connection(int(channel_fd))
    try:
        from tokasaurus.processes.group import die_with_parent

        die_with_parent(int(parent_pid), channel)
        from tokasaurus.config import ServerConfig
        from tokasaurus.processes.launch import serve

        return serve(ServerConfig.parse([*words]), report=_report_to(channel), is_private=True)
    except Exception as error:
        shortage = describe_shortage(error, LESS_MEMORY)
        if shortage is None:
            raise
        from tokasaurus.messages.status import Failed

        channel.send(Failed("launcher", shortage))
        return 1


def _report_to(channel: Connection) -> StartupReport:
    """Sends what the run must know, and lines for the user as plain strings."""
    from tokasaurus.messages.status import BatchTokens, Failed, PhaseDone, Ready, Serving
    from tokasaurus.startup_report import StartupReport

    class Report(StartupReport):
        def show_line(self, line: str) -> None:
            channel.send(line)

        def show_failure(self, failure: str) -> None:
            channel.send(Failed("launcher", failure))

        def show_phase(self, process: str, phase: PhaseDone) -> None:
            if not self.is_ready:  # the chat template, which may be loaded later
                super().show_phase(process, phase)

        def note_ready(self, message: Ready, is_server: bool) -> None:
            was_ready = self.is_ready
            super().note_ready(message, is_server)
            if self.is_ready and not was_ready:
                channel.send(Serving(self.model))

        def note_tokens(self, message: BatchTokens) -> None:
            channel.send(message)

    return Report()
