"""`toka ps`: the servers that this user runs here, found by their processes. `toka models`: what a server serves."""

import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tokasaurus.commands.running_server import AddressConfig, client_of, explained, models_of, status_of
from tokasaurus.flags import FlagConfig, flag
from tokasaurus.monitoring.progress import show_time

if TYPE_CHECKING:
    import psutil

# What the launcher calls itself, see processes/launch.
_TITLE = re.compile(r"toka model=(.+?) (port|unix_socket)=(.+)", re.DOTALL)
_ASK_S = 1.0


class PsConfig(FlagConfig):
    """The flags of `toka ps`."""

    json: bool = flag(False, "print one JSON object per server", heading="output")


class ModelsConfig(AddressConfig):
    """The flags of `toka models`."""

    json: bool = flag(False, "print one JSON object per model, as the API has it", heading="output")


@dataclass(frozen=True, slots=True)
class FoundServer:
    """A server of this user on this machine."""

    address: str
    """A URL, or `unix:` and the path of a socket; `port` and its number before the server listens."""
    model: str
    """As the server was told."""
    state: str
    """`ready`; `not ready`: it starts or ends; `silent`: it listens and does not answer."""
    seconds: float
    """Time since its start."""
    pid: int
    """The launcher's process id; it takes signals."""


def ps(config: PsConfig, _words: list[str]) -> int:
    """Print a line for each server, the oldest first. Returns the exit code."""
    servers = find_servers()
    if config.json:
        for server in servers:
            print(json.dumps(asdict(server)))
        return 0
    rows = [("ADDRESS", "MODEL", "STATE", "UP", "PID")]
    rows += [(one.address, one.model, one.state, show_time(one.seconds), str(one.pid)) for one in servers]
    _print_table(rows if servers else [("no server of this user runs here",)])
    return 0


def models(config: ModelsConfig, _words: list[str]) -> int:
    """Print a line for each model of the server. Returns the exit code. Raises NotAnswered."""
    with client_of(config) as client, explained(config):
        found = models_of(client)
    if config.json:
        for model in found:
            print(json.dumps(model))
        return 0
    _print_table([_row_of(model) for model in found] or [("the server lists no models",)])
    return 0


def _row_of(model: dict[str, Any]) -> tuple[str, ...]:
    """model: as the API has it. Only ours and vLLM tell the length of a context and the checkpoint."""
    longest, root = model.get("max_model_len"), model.get("root")
    context = f"{longest:,} tokens" if isinstance(longest, int) else ""
    checkpoint = root if isinstance(root, str) and root != model.get("id") else ""
    return (str(model.get("id")), context, checkpoint, str(model.get("owned_by") or ""))


def _print_table(rows: Iterable[tuple[str, ...]]) -> None:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(value.ljust(width) for value, width in zip(row, widths, strict=True)).rstrip())


def find_servers() -> list[FoundServer]:
    """The oldest first."""
    import psutil

    found: list[FoundServer] = []
    for process in psutil.process_iter():
        try:
            if process.uids().real != os.getuid():
                continue
            title = _TITLE.fullmatch((process.cmdline() or [""])[0])
            if title is None:
                continue
            model, kind, value = title.groups()
            address = next(_listening_urls(process), f"port {value}") if kind == "port" else f"unix:{value}"
            seconds = max(0.0, time.time() - process.create_time())
        except psutil.Error:  # it has ended meanwhile, or is hidden
            continue
        found.append(FoundServer(address, model, _state_of(address), round(seconds, 1), process.pid))
    return sorted(found, key=lambda server: -server.seconds)


def _listening_urls(launcher: "psutil.Process") -> Iterator[str]:
    """Where its server process listens, once it does. Raises psutil.Error."""
    for process in launcher.children():
        for connection in process.net_connections(kind="tcp"):
            if connection.status == "LISTEN":
                host, port = connection.laddr
                yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _state_of(address: str) -> str:
    if address.startswith("port "):
        return "not ready"
    unix_socket = address.removeprefix("unix:") if address.startswith("unix:") else None
    status = status_of("http://localhost" if unix_socket else address, "/ready", _ASK_S, unix_socket)
    return "silent" if status is None else "ready" if status == 200 else "not ready"
