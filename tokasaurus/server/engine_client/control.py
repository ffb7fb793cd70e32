"""Pauses, sleep and new weights, as the routes for roll-outs ask for them, by whatever names. All may be repeated."""

import asyncio
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol

from tokasaurus.checkpoint import CheckpointError, file_states, update_files
from tokasaurus.messages.commands import (
    BASE_NAME,
    FIRST_VERSION,
    ClearCache,
    FileState,
    Held,
    Pause,
    Resume,
    Sleep,
    StartedUpdate,
    UpdateWeights,
    Wake,
    add_update,
)
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.messages.status import FlagRefused, Predecessors, Ready, UserError, first_line
from tokasaurus.server.engine_client.adapters import (
    AdapterFiles,
    AdapterRefused,
    Adapters,
    adapter_named_by,
    is_only_an_adapter,
)
from tokasaurus.server.engine_client.commands import CommandRefused, Commands, ReplicaLost
from tokasaurus.server.engine_client.pending import PendingRequest
from tokasaurus.server.engine_client.replicas import Replica
from tokasaurus.server.errors import Conflict, EngineAsleep, EngineDied, InvalidRequest

PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of requests that run: they end by "abort" with the tokens that they have, are waited for, or go on
later."""

MAX_TRIES = 3
"""Most times that an update begins, when every replica was lost."""

RESTART_S = 600.0
"""Longest time for a replica to start again in the middle of an update, in seconds."""

MAX_COUNT_DIGITS = 18
"""Longer numbers, as of a date and time with a hash, are names."""


def next_version(version: str) -> str:
    """The number after the last one: "4" after "3", "step-8.1" after "step-8", then "step-8.2"."""
    name, dot, number = version.rpartition(".")
    if number.isascii() and number.isdecimal() and len(number) <= MAX_COUNT_DIGITS:
        return f"{name}{dot}{int(number) + 1}"
    return f"{version}.1"


CheckUpdate = Callable[[Path, bool, Sequence[UpdateWeights]], tuple[FileState, ...]]
"""Looks at new weights before an update, as UpdateChecks.check does."""


def states_alone(directory: Path, _is_partial: bool, _earlier: Sequence[UpdateWeights]) -> tuple[FileState, ...]:
    """() if the files cannot be read: a worker says why."""
    try:
        return file_states(update_files(directory))
    except (CheckpointError, OSError):
        return ()


@contextmanager
def _refused(reason: str = "") -> Iterator[None]:
    """CommandRefused becomes Conflict. reason: what stands before the managers' words."""
    try:
        yield
    except CommandRefused as error:
        raise Conflict(f"{reason}{error}") from None


class Requests(Protocol):
    """What becomes of the requests of all replicas: EngineClient."""

    @property
    def unsent(self) -> list[PendingRequest]:
        """Requests that wait for a replica, or for the end of a pause."""

    def end_unsent(self, requests: Sequence[PendingRequest]) -> None:
        """Abort the requests that are still unsent, and so have no tokens."""

    def submit_waiting(self) -> None:
        """Submit what waits, unless the engine is paused."""

    def go_on_with(self, replica: Replica) -> None:
        """The replica is ready, with the weights of the others."""

    def has(self, is_meant: Callable[[GenerateRequest], bool]) -> bool:
        """Whether such a request is unfinished."""

    async def abort(self, is_meant: Callable[[GenerateRequest], bool], only_waiting: bool = False) -> None:
        """End requests by "abort" with the tokens that they have."""


class EngineControl:
    """One per server, for all replicas together. Used by the event loop only.

    Its state is `held`, which outlives the server: the launcher is told of each change. Requests wait in every state
    but the first. A second call of what has led to a state does no harm.

    | state | `held` | pause | resume | sleep | wake | wake, stays_paused |
    |---|---|---|---|---|---|---|
    | running | | paused | running | asleep | running | running |
    | paused | is_paused | paused | running | asleep | paused | paused |
    | asleep | is_paused, sleep | asleep | refused | asleep | running, or paused if it was before it slept | woken |
    | woken | is_paused, was_asleep | woken | running | asleep | running, or paused if it was before it slept | woken |

    woken: it has its memory again, though perhaps no weights yet, and waits for `wake` or `resume`. New weights are
    refused while it is asleep; they pause an engine that runs for the while. All that changes the state or the weights
    takes its turn; a change that a manager refuses leaves the state as it was.
    """

    def __init__(
        self,
        replicas: list[Replica],
        commands: Commands,
        requests: Requests,
        predecessors: Predecessors,
        check_update: CheckUpdate,
        on_broken: Callable[[Exception], None],
        tell_held: Callable[[Held], None],
    ) -> None:
        """Arguments: see EngineClient. commands: to the replicas."""
        self._replicas = replicas
        self._commands = commands
        self._requests = requests
        self._check_update = check_update
        self._on_broken = on_broken
        self._tell_held = tell_held
        self.held = predecessors.held
        self._is_stopped = self.held.is_paused
        """The managers run no steps, but keep what they have. While is_paused alone holds, they finish it."""
        self._changing = asyncio.Lock()
        """Held while all replicas are paused, resumed or given new weights."""
        self._updates = [*predecessors.updates]
        """Weight updates that every replica has, or will have when it is up."""
        self._num_updates = self._update_number
        """Updates that were begun."""
        self._begun_update: UpdateWeights | None = None
        self._unheard = set(range(len(replicas)) if predecessors.num_restarts else ())
        """Replicas that may have a newer update than this server knows: one that had been begun when the server before
        it died."""
        self._has_changed = asyncio.Event()
        self._tasks: set[asyncio.Future[None]] = set()
        self._named: dict[str, list[str]] = {}
        """Ids of requests in the engine, by the names that clients have given them."""
        self.adapters = Adapters(
            commands,
            self._changing,
            predecessors.adapters_directory,
            predecessors.held.adapters,
            self._note_adapters,
            self._wait_until_up,
        )

    @property
    def is_paused(self) -> bool:
        """Requests wait: none is submitted, and the managers run no steps, or finish what they have."""
        return self.held.is_paused

    @property
    def is_asleep(self) -> bool:
        return self.held.sleep is not None

    @property
    def waits_to_resume(self) -> bool:
        """Nothing goes on before a client says so."""
        return self.is_paused and not self._changing.locked()

    def check_awake(self) -> None:
        """Raises EngineAsleep if new requests are refused now."""
        if self.held.refuses_asleep:
            raise EngineAsleep("the engine sleeps")

    def note_change(self) -> None:
        """A sequence has finished, or a replica has come or gone."""
        self._has_changed.set()

    async def pause(self, mode: PauseMode, clears_cache: bool = False) -> None:
        """Returns when no step runs. New requests wait."""
        if mode == "abort" and self._changing.locked():
            await self._requests.abort(lambda _: True)  # another pause may wait for what runs
        async with self._changing:
            await self._pause(mode)
            if clears_cache:
                await self._commands.run_on_all(ClearCache)
            self._note_held()

    async def resume(self) -> None:
        """What waits goes on. An update that was started, and never finished, ends too. Raises Conflict while the
        engine sleeps."""
        self.held = replace(self.held, started_update=None)
        with _refused():
            async with self._changing:
                if self.held.was_asleep:
                    await self._commands.run_on_all(Wake)  # it may lack weights
                    self.held = replace(self.held, was_asleep=False, refuses_asleep=False)
                await self._resume()

    async def sleep(self, mode: PauseMode, parts: Collection[str], refuses: bool = False) -> None:
        """Give memory back until `wake`. parts: whose: kv_cache, or weights with or after it. refuses: new requests are
        refused meanwhile. Raises InvalidRequest for other parts, and Conflict if the engine cannot sleep."""
        if "kv_cache" not in parts and not self.is_asleep:
            raise InvalidRequest('tags: "weights" goes only with or after "kv_cache"', "tags")
        with_weights = "weights" in parts
        with _refused("the engine goes on: "):
            async with self._changing:
                before = self.held
                await self._pause(mode)
                try:
                    await self._commands.run_on_all(lambda command_id: Sleep(command_id, with_weights))
                except CommandRefused:
                    if not before.is_paused:
                        await self._resume()
                    raise
                with_weights |= before.sleep is not None and before.sleep.with_weights
                is_new = before.sleep is None and not before.was_asleep
                self.held = replace(
                    self.held,
                    sleep=Sleep(0, with_weights),
                    was_asleep=False,
                    refuses_asleep=refuses,
                    pauses_after_sleep=before.is_paused if is_new else before.pauses_after_sleep,
                )
                self._note_held()

    async def wake(self, stays_paused: bool = False) -> None:
        """Take the memory again. stays_paused: go on at the next call without; weights that cannot be read again may
        come by `update` until then. Raises Conflict if the engine goes on sleeping."""
        with _refused("the engine goes on sleeping: "):
            async with self._changing:
                if self.is_asleep or (self.held.was_asleep and not stays_paused):
                    await self._commands.run_on_all(lambda command_id: Wake(command_id, may_lack_weights=stays_paused))
                    self.held = replace(self.held, sleep=None, was_asleep=True)
                if self.held.was_asleep and not stays_paused:
                    self.held = replace(self.held, was_asleep=False, refuses_asleep=False)
                    if not self.held.pauses_after_sleep:
                        await self._resume()
                self._note_held()

    async def _pause(self, mode: PauseMode) -> None:
        self.held = replace(self.held, is_paused=True)
        # what is kept at a pause would be waited for in vain
        while mode == "wait" and not self._is_stopped and any(one.num_unfinished_sequences for one in self._up):
            await self._next_change()
        unsent = self._requests.unsent
        await self._commands.run_on_all(lambda command_id: Pause(command_id, mode == "abort"))
        self._is_stopped = True
        if mode == "abort":
            self._requests.end_unsent(unsent)

    async def _resume(self) -> None:
        await self._commands.run_on_all(Resume)
        self.held = replace(self.held, is_paused=False)
        self._is_stopped = False
        self._note_held()
        self._requests.submit_waiting()

    def _note_held(self) -> None:
        """Tell the launcher. Call once all replicas have done it, but before a client is told: if this server dies in
        between, it was not asked."""
        self._tell_held(self.held)

    def _note_adapters(self) -> None:
        self.held = replace(self.held, adapters=self.adapters.named)
        self._note_held()

    async def clear_cache(self, recomputes: bool = False) -> None:
        """Forget the KV of all prompts. recomputes: also while sequences run, which compute theirs again and go on;
        else that raises Conflict."""
        with _refused("the cache was not cleared: "):
            async with self._changing:
                goes_on = recomputes and not self.is_paused
                if goes_on:
                    await self._pause("keep")
                try:
                    await self._commands.run_on_all(ClearCache)
                finally:
                    if goes_on:
                        await self._resume()

    @contextmanager
    def named(self, name: str | None, requests: Sequence[GenerateRequest]) -> Iterator[None]:
        """Let `abort` know the requests by their client's name within the context; None has none."""
        if name is None:
            yield
            return
        ids = [request.request_id for request in requests]
        self._named.setdefault(name, []).extend(ids)
        try:
            yield
        finally:
            self._named[name] = [one for one in self._named[name] if one not in ids]
            if not self._named[name]:
                del self._named[name]

    async def abort(self, name: str | None) -> None:
        """End requests of this name by "abort" with the tokens that they have, or all if None. An unknown one is
        ignored."""
        ids = set(self._named.get(name or "", ()))
        await self._requests.abort(lambda request: name is None or request.request_id in ids)

    # New weights

    @property
    def weight_version(self) -> str:
        """Version of the weights that every replica has, or will have when it is up: for requests that name no
        adapter."""
        if self.adapters.of_base is not None:
            return self.adapters.of_base.version
        return self._updates[-1].version if self._updates else FIRST_VERSION

    @property
    def _update_number(self) -> int:
        """Number of the newest update that every replica has, or will have when it is up."""
        return self._updates[-1].number if self._updates else 0

    async def start_update(self) -> None:
        """The updates from now to `finish_update` are parts of one: they have one version, and no step runs between."""
        started, has_paused = self.held.started_update, not self.is_paused
        if started is None:
            started = StartedUpdate(next_version(self.weight_version), has_paused)
        elif has_paused:  # it was begun while the engine slept, and somebody has woken the engine
            started = replace(started, has_paused=True)
        self.held = replace(self.held, started_update=started)
        if has_paused:
            await self.pause("keep")
        else:
            self._note_held()

    async def finish_update(self) -> None:
        """Does nothing unless an update was started."""
        started = self.held.started_update
        self.held = replace(self.held, started_update=None)
        if started is not None and started.has_paused:
            await self.resume()
        else:
            self._note_held()

    async def update(
        self,
        directory: str,
        version: str | None,
        *,
        is_partial: bool = False,
        clears_cache: bool,
        mode: PauseMode = "keep",
        param: str = "weight_dir",
    ) -> str:
        """Give all replicas the weights of safetensors files. An engine that is not paused is for the while.

        version: a name for the weights; None is that of the started update, or counts on from the last number. Returns
        it. param: the body's field with the directory. Raises InvalidRequest if nothing was changed, and EngineDied.

        An adapter in place of weights is what later requests for the model get, until the next update; what runs goes
        on as it is, unless it is ended by "abort"."""
        if version is None and self.held.started_update is not None:
            version = self.held.started_update.version
        if await asyncio.to_thread(is_only_an_adapter, directory):
            return await self._put_before_base(directory, version, is_partial, mode, param)
        try:
            return await self._update(directory, version, is_partial, clears_cache, mode)
        except CommandRefused as error:
            raise InvalidRequest(f"{param}: {error}", param) from None

    async def _update(
        self, directory: str, version: str | None, is_partial: bool, clears_cache: bool, mode: PauseMode
    ) -> str:
        """Raises CommandRefused, if nothing was changed, and EngineDied."""
        async with self._changing:
            while any(one.connection is not None and one.index in self._unheard for one in self._replicas):
                await self._next_change()
            name = next_version(self.weight_version) if version is None else version
            if self.is_asleep:
                raise CommandRefused("the engine sleeps")
            was_paused = self.is_paused
            try:
                # A link may lead elsewhere later, when a replica reads the weights again.
                directory = await asyncio.to_thread(os.path.realpath, directory)
                files = await asyncio.to_thread(self._check_update, Path(directory), is_partial, [*self._updates])
            except (UserError, OSError, ValueError) as error:  # ValueError: a path with a zero byte
                raise CommandRefused(first_line(error)) from None
            try:
                await self._pause(mode)
                self._num_updates += 1
                update = UpdateWeights(0, directory, name, is_partial, clears_cache, self._num_updates, files)
                self._begun_update = update
                for _ in range(MAX_TRIES):
                    if await self._update_all(update):
                        self.adapters.unload(BASE_NAME)
                        return name
                    await self._wait_until_up()
                raise EngineDied("the engine died while it was given new weights")
            finally:
                self._begun_update = None
                if not was_paused:
                    await self._resume()

    async def _put_before_base(
        self, directory: str, version: str | None, is_partial: bool, mode: PauseMode, param: str
    ) -> str:
        """As `update`, of an adapter."""
        if is_partial:
            raise InvalidRequest(f"{param}: an adapter is no part of the model's weights", param)

        def name() -> str:
            return next_version(self.weight_version) if version is None else version

        before = self.adapters.of_base
        adapter = await self.adapters.load(BASE_NAME, directory, replaces=True, version=name, param=param)
        await self._let_end("" if before is None else before.digest, BASE_NAME, mode)
        return adapter.version

    async def load_adapter(
        self, name: str, source: str | AdapterFiles, *, replaces: bool, mode: PauseMode, param: str
    ) -> None:
        """As Adapters.load. mode: what becomes of requests that run with another adapter that had the name."""
        before = self.adapters.find(name)
        adapter = await self.adapters.load(name, source, replaces=replaces, param=param)
        if before is not None and before.digest != adapter.digest:
            await self._let_end(before.digest, name, mode)

    async def _let_end(self, digest: str, name: str, mode: PauseMode) -> None:
        """End the requests that have this adapter by this name, or wait for them, or neither."""

        def are_meant(request: GenerateRequest) -> bool:
            return request.adapter == digest and adapter_named_by(request) == name

        if mode == "abort":
            await self._requests.abort(are_meant)
        while mode == "wait" and not self.is_paused and self._requests.has(are_meant):
            await self._next_change()

    async def _update_all(self, update: UpdateWeights) -> bool:
        """False if every replica was lost. Raises CommandRefused if none has changed anything."""
        refusals: list[CommandRefused] = []
        # Again, because a replica may be up again meanwhile, with these weights or with those before.
        while not refusals and (behind := [one for one in self._up if one.update_number < update.number]):
            answers = await asyncio.gather(*(self._update_one(one, update) for one in behind), return_exceptions=True)
            refusals = [answer for answer in answers if isinstance(answer, CommandRefused)]
        if not any(one.update_number == update.number for one in self._up):
            if refusals:
                raise refusals[0]
            return False
        add_update(self._updates, update)
        if refusals:
            self._on_broken(UserError(f"only some replicas have the weights {update.version}: {refusals[0]}"))
        return True

    async def _update_one(self, replica: Replica, update: UpdateWeights) -> None:
        await self._commands.run(replica, lambda command_id: Pause(command_id, aborts=False))
        await self._commands.run(replica, lambda command_id: replace(update, command_id=command_id))
        replica.update_number = update.number

    async def _wait_until_up(self) -> None:
        """Wait until a replica has been started again. Raises EngineDied."""
        while not self._up:
            try:
                await asyncio.wait_for(self._next_change(), RESTART_S)
            except asyncio.TimeoutError:
                raise EngineDied("the engine died, and was not started again") from None

    @property
    def _up(self) -> list[Replica]:
        return self._commands.up

    async def _next_change(self) -> None:
        """Wait until a sequence finishes, or a replica comes or goes."""
        self._has_changed.clear()
        await self._has_changed.wait()

    def take_in(self, replica: Replica, ready: Ready) -> None:
        """A replica is up. It is given the weights and the state of the others, and then requests."""
        replica.update_number = ready.update_number
        self.note_change()
        begun = 0 if self._begun_update is None else self._begun_update.number
        if replica.update_number > max(begun, self._update_number):
            if replica.index not in self._unheard:
                self._on_broken(UserError("a replica has weights of an update that failed"))
                return
            self._updates, self._num_updates = [*ready.updates], ready.update_number
            for other in self._up:
                if other is not replica:
                    self._begin_catching_up(other)
        self._unheard.discard(replica.index)
        if replica.update_number < self._update_number or self.adapters.has_work:
            self._begin_catching_up(replica, ready.is_paused)
        else:
            self._go_on_with(replica, ready.is_paused)

    def _begin_catching_up(self, replica: Replica, was_paused: bool = False) -> None:
        replica.is_ready = False  # until it has the weights and adapters of the others
        task = asyncio.ensure_future(self._catch_up(replica, was_paused))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _catch_up(self, replica: Replica, was_paused: bool) -> None:
        """Give a replica, which is up and not ready, the weights and adapters that the others got while it was being
        started. was_paused: by a server that has died."""
        told = dict[str, bool]()
        try:
            while True:  # more may come meanwhile
                missing = [update for update in self._updates if update.number > replica.update_number]
                if missing:
                    await self._update_one(replica, missing[0])
                    was_paused = True
                elif not await self.adapters.bring_next(replica, told):
                    break
        except ReplicaLost:
            return
        except AdapterRefused as error:
            self._on_broken(FlagRefused(str(error)) if replica.num_starts == 1 else UserError(str(error)))
            return
        except CommandRefused as error:
            self._on_broken(UserError(f"a replica cannot get the weights {self.weight_version}: {error}"))
            return
        self._go_on_with(replica, was_paused)

    def _go_on_with(self, replica: Replica, was_paused: bool) -> None:
        """was_paused: its manager may be paused, or asleep."""
        if self.is_paused:
            replica.send(Pause(0, aborts=False))
        elif was_paused:
            replica.send(Wake(0))
            replica.send(Resume(0))
        if self.held.sleep is not None:
            replica.send(self.held.sleep)
        self._requests.go_on_with(replica)
