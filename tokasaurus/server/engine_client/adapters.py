"""Adapters that requests may name: loaded on every replica or on none, by their content, and forgotten once no name and
no request has them."""

import asyncio
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from tokasaurus.checkpoint import CheckpointError
from tokasaurus.checkpoint.adapters import Adapter, copy_adapter, read_adapter
from tokasaurus.checkpoint.info import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tokasaurus.checkpoint.json_files import write_json
from tokasaurus.messages.commands import BASE_NAME, LoadAdapter, NamedAdapter, UnloadAdapter, adapter_version
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.messages.status import NO_ADAPTERS, first_line
from tokasaurus.server.engine_client.commands import CommandRefused, Commands
from tokasaurus.server.engine_client.replicas import Replica
from tokasaurus.server.errors import EngineDied, InvalidRequest, ModelNotFound, NotFound

GRACE_S = 2.0
"""An adapter is kept this long after its last name and request are gone, in seconds: a body that has named it may still
be prepared."""

AdapterFiles = tuple[Mapping[str, Any], bytes]
"""What adapter_config.json and adapter_model.safetensors contain, as a request has brought it."""


class AdapterRefused(Exception):
    """A replica that has been started again cannot get an adapter that the others have. The message is one line."""


class Adapters:
    """One per server, for all replicas together. Used by the event loop only.

    An adapter is copied into the server's own directory, named by its digest, so that a replica that starts again gets
    the same one whatever has become of its source. Running requests end with the one that they began with."""

    def __init__(
        self,
        commands: Commands,
        changing: asyncio.Lock,
        directory: str,
        held: Sequence[NamedAdapter],
        tell: Callable[[], None],
        wait_until_up: Callable[[], Awaitable[None]],
    ) -> None:
        """changing: held while all replicas are changed. directory: for the copies; "" if none can be loaded. held:
        copies of servers before this one are there. tell: called with each change of `named`. wait_until_up: returns
        when a replica is up, or raises EngineDied."""
        self._commands = commands
        self._changing = changing
        self._directory = Path(directory) if directory else None
        self._tell = tell
        self._wait_until_up = wait_until_up
        self._by_name = {adapter.name: adapter for adapter in held}
        self._loaded = {adapter.digest: adapter.directory for adapter in held}
        """Directories by digest, of all that every replica has, or will have when it is up."""
        self._num_calls = Counter[str]()
        """Unfinished calls with requests, by digest."""
        self._left: set[str] = set()
        """Digests that replicas may have from a server that has died."""
        self._ids = count(1)
        self._tasks: set[asyncio.Future[None]] = set()
        if self._directory is not None and self._directory.is_dir():
            for path in self._directory.iterdir():
                if path.name not in self._loaded:
                    self._left.add(path.name)
                    shutil.rmtree(path, ignore_errors=True)

    @property
    def named(self) -> tuple[NamedAdapter, ...]:
        """All of them, in the order of their loads."""
        return tuple(self._by_name.values())

    def find(self, name: str) -> NamedAdapter | None:
        """None if none has the name."""
        return self._by_name.get(name)

    @property
    def of_base(self) -> NamedAdapter | None:
        """The one that requests for the model itself get, if any."""
        return self.find(BASE_NAME)

    def begin_call(self, requests: Sequence[GenerateRequest]) -> None:
        """The adapter of the requests, if any, is kept until `end_call`. Raises ModelNotFound if it is forgotten."""
        digest = requests[0].adapter
        if digest:
            if digest not in self._loaded:
                raise ModelNotFound(adapter_named_by(requests[0]))
            self._num_calls[digest] += 1

    def end_call(self, digest: str) -> None:
        """The requests of a call have ended, and replicas are told so. digest: of its adapter; "" if it has none."""
        if digest:
            self._num_calls[digest] -= 1
            self._forget_later(digest)

    async def load(
        self,
        name: str,
        source: str | AdapterFiles,
        *,
        replaces: bool,
        version: Callable[[], str] | None = None,
        param: str,
    ) -> NamedAdapter:
        """Returns when every replica has it: from then on, requests with the name get it. Nothing has changed if it
        raises.

        source: a directory, or what its files contain. replaces: another one may have the name. version: names the
        weights, once they are loaded; None makes it of name and digest. param: the body's field with the source.
        Raises InvalidRequest, also as NotFound if the files are missing, and EngineDied."""
        if self._directory is None:
            raise InvalidRequest(NO_ADAPTERS, param)
        await self._wait_until_up()
        for replica in self._commands.up:
            if replica.limits is not None and replica.limits.no_adapters:
                raise InvalidRequest(replica.limits.no_adapters, param)
        incoming = self._directory / f"incoming-{next(self._ids)}"
        written = source if isinstance(source, str) else ""
        try:
            digest = (await asyncio.to_thread(_take, source, incoming, param)).digest
            async with self._changing:
                before = self.find(name)
                if before is not None and not replaces and before.digest != digest:
                    raise InvalidRequest(
                        f"the adapter {name!r} is loaded already, with other numbers: unload it first, or load this "
                        "one with load_inplace=true",
                        param,
                    )
                if digest not in self._loaded:
                    directory = self._directory / digest
                    # Of a load that was cancelled: nobody reads it, or what it has is the same.
                    await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
                    incoming.replace(directory)
                    await self._load_on_all(digest, directory, written, param)
                    self._loaded[digest] = str(directory)
                named = adapter_version(name, digest) if version is None else version()
                adapter = NamedAdapter(name, digest, self._loaded[digest], written, named)
                self._by_name[name] = adapter
                self._tell()
                if before is not None:
                    self._forget_later(before.digest)
                return adapter
        finally:
            await asyncio.to_thread(shutil.rmtree, incoming, ignore_errors=True)

    def unload(self, name: str) -> bool:
        """The name is unknown from now on; requests that have been submitted go on. False if it is already."""
        adapter = self._by_name.pop(name, None)
        if adapter is None:
            return False
        self._tell()
        self._forget_later(adapter.digest)
        return True

    @property
    def has_work(self) -> bool:
        """A replica must be told of adapters before it gets requests."""
        return bool(self._loaded or self._left)

    async def bring_next(self, replica: Replica, told: dict[str, bool]) -> bool:
        """Tell a replica that is not ready yet of one adapter that it may lack, or have in vain. False if it has those
        of the others. told: what it has been told, changed here: by digest, whether it has it; empty at first. Raises
        ReplicaLost, AdapterRefused."""
        missing = next((digest for digest in self._loaded if not told.get(digest)), None)
        others = (digest for digest in {*told, *self._left} if digest not in self._loaded)
        gone = next((digest for digest in others if told.get(digest, True)), None)
        if missing is not None:
            told[missing] = True
            directory = self._loaded[missing]
            try:
                await self._commands.run(replica, partial(LoadAdapter, digest=missing, directory=directory))
            except CommandRefused as error:
                named = next((one for one in self.named if one.digest == missing), None)
                name, source = ("", directory) if named is None else (named.name, named.source)
                reason = str(error).replace(directory, source)
                raise AdapterRefused(f"a replica cannot get the adapter {name!r}: {reason}") from None
        elif gone is not None:
            told[gone] = False
            await self._commands.run(replica, partial(UnloadAdapter, digest=gone))
        return missing is not None or gone is not None

    async def _load_on_all(self, digest: str, directory: Path, source: str, param: str) -> None:
        """Raises InvalidRequest and EngineDied, if no replica has it."""
        error: Exception | None = None
        try:
            await self._commands.run_on_all(partial(LoadAdapter, digest=digest, directory=str(directory)))
        except CommandRefused as refused:
            reason = str(refused).replace(str(directory), source)
            error = InvalidRequest(f"{param}: {reason}", param)
        if error is None and not self._commands.up:
            error = EngineDied("the engine died while it was given the adapter")
        if error is not None:
            await self._forget_on_all(digest, str(directory))
            raise error

    def _forget_later(self, digest: str) -> None:
        """If nothing needs it then."""
        if not self._is_needed(digest):
            asyncio.get_running_loop().call_later(GRACE_S, self._begin_forgetting, digest)

    def _begin_forgetting(self, digest: str) -> None:
        if digest in self._loaded and not self._is_needed(digest):
            task = asyncio.ensure_future(self._forget(digest))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forget(self, digest: str) -> None:
        async with self._changing:
            if digest in self._loaded and not self._is_needed(digest):
                await self._forget_on_all(digest, self._loaded.pop(digest))

    async def _forget_on_all(self, digest: str, directory: str) -> None:
        with suppress(CommandRefused):
            await self._commands.run_on_all(partial(UnloadAdapter, digest=digest))
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    def _is_needed(self, digest: str) -> bool:
        return self._num_calls[digest] > 0 or any(adapter.digest == digest for adapter in self._by_name.values())


def adapter_named_by(request: GenerateRequest) -> str:
    """The name that the client has given as the model; "" if it was the model's own."""
    name, _, digest = request.adapter_version.rpartition("@")
    return name if digest and request.adapter.startswith(digest) else ""


def _take(source: str | AdapterFiles, incoming: Path, param: str) -> Adapter:
    """Write both files into a new directory, and read them. Raises InvalidRequest."""
    incoming.mkdir(parents=True)
    try:
        if isinstance(source, str):
            return copy_adapter(Path(source), incoming)
        config, weights = source
        write_json(incoming / ADAPTER_CONFIG, dict(config))
        (incoming / ADAPTER_WEIGHTS).write_bytes(weights)
        return read_adapter(incoming)
    except (CheckpointError, OSError, ValueError) as error:  # ValueError: a path with a zero byte
        reason = first_line(error).replace(f"{incoming}/", "")
        is_missing = isinstance(source, str) and not _has(source, ADAPTER_CONFIG, ADAPTER_WEIGHTS)
        raise (NotFound if is_missing else InvalidRequest)(f"{param}: {reason}", param) from None


def is_only_an_adapter(directory: str) -> bool:
    """Whether it has an adapter's configuration, and no model's. Reads the disk."""
    return _has(directory, ADAPTER_CONFIG) and not _has(directory, "config.json")


def _has(directory: str, *names: str) -> bool:
    try:
        return all(Path(directory, name).is_file() for name in names)
    except (OSError, ValueError):  # ValueError: a path with a zero byte
        return False
