"""Pauses, new weights and aborts, as the routes for roll-outs ask for them, by whatever names. All may be repeated."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from tokasaurus.messages.commands import StartedUpdate
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.server.engine_client.client import EngineClient, PauseMode, next_version
from tokasaurus.server.engine_client.commands import CommandRefused
from tokasaurus.server.errors import Conflict, InvalidRequest


class Rollouts:
    """One per server. Used by the event loop only."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._named: dict[str, list[str]] = {}
        """Ids of requests in the engine, by the names that clients have given them."""

    @property
    def weight_version(self) -> str:
        return self._engine.weight_version

    @property
    def is_paused(self) -> bool:
        return self._engine.is_paused

    async def pause(self, mode: PauseMode, clears_cache: bool) -> None:
        """Pause the engine; the arguments are those of EngineClient.pause."""
        await self._engine.pause(mode, clears_cache)

    async def resume(self) -> None:
        """Resume the engine. An update that was started, and never finished, ends too.

        Raises Conflict while the engine sleeps."""
        self._engine.started_update = None
        try:
            await self._engine.resume()
        except CommandRefused as error:
            raise Conflict(str(error)) from None

    @property
    def is_asleep(self) -> bool:
        return self._engine.is_asleep

    async def sleep(self, mode: PauseMode, parts: Collection[str], refuses: bool = False) -> None:
        """Put the engine to sleep; mode and refuses are those of EngineClient.sleep.

        parts: whose memory is given back: kv_cache, or weights with or after it. Raises InvalidRequest, and Conflict if
        the engine cannot sleep."""
        if "kv_cache" not in parts and not self.is_asleep:
            raise InvalidRequest('tags: "weights" goes only with or after "kv_cache"', "tags")
        try:
            await self._engine.sleep(mode, with_weights="weights" in parts, refuses=refuses)
        except CommandRefused as error:
            raise Conflict(f"the engine goes on: {error}") from None

    async def wake(self, stays_paused: bool = False) -> None:
        """Wake the engine; the argument is that of EngineClient.wake. Raises Conflict if it goes on sleeping."""
        try:
            await self._engine.wake(stays_paused)
        except CommandRefused as error:
            raise Conflict(f"the engine goes on sleeping: {error}") from None

    async def update(
        self,
        directory: str,
        version: str | None,
        *,
        is_partial: bool = False,
        clears_cache: bool,
        mode: PauseMode,
        param: str,
    ) -> str:
        """New weights for all replicas; returns their version. Arguments as of EngineClient.update_weights.

        param: the body's field with the directory. Raises InvalidRequest if nothing was changed, and EngineDied."""
        started = self._engine.started_update
        if version is None and started is not None:
            version = started.version
        try:
            return await self._engine.update_weights(
                directory, version, is_partial=is_partial, clears_cache=clears_cache, mode=mode
            )
        except CommandRefused as error:
            raise InvalidRequest(f"{param}: {error}", param) from None

    async def start_update(self) -> None:
        """The updates from now to `finish_update` are parts of one: they have one version, and no step runs between."""
        started, has_paused = self._engine.started_update, not self._engine.is_paused
        if started is None:
            started = StartedUpdate(next_version(self._engine.weight_version), has_paused)
        elif has_paused:  # it was begun while the engine slept, and somebody has woken the engine
            started = replace(started, has_paused=True)
        self._engine.started_update = started
        if has_paused:
            await self._engine.pause("keep")
        else:
            self._engine.note_held()

    async def finish_update(self) -> None:
        """Does nothing unless an update was started."""
        started, self._engine.started_update = self._engine.started_update, None
        if started is not None and started.has_paused:
            await self.resume()
        else:
            self._engine.note_held()

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
        if name is None:
            await self._engine.abort(lambda _: True)
        else:
            ids = set(self._named.get(name, ()))
            await self._engine.abort(lambda request: request.request_id in ids)

    async def clear_cache(self, recomputes: bool = False) -> None:
        """Forget the KV of all prompts; recomputes as for EngineClient.clear_cache. Raises Conflict while sequences
        run."""
        try:
            await self._engine.clear_cache(recomputes)
        except CommandRefused as error:
            raise Conflict(f"the cache was not cleared: {error}") from None

    def forget_session(self, session: str) -> None:
        """A roll-out is over: nothing of its session is kept."""
        self._engine.forget_session(session)

    async def clear_cache_if_idle(self) -> bool:
        """Forget the KV of all prompts; False, and nothing happens, while any request is unfinished."""
        if self._engine.num_pending_requests:
            return False
        try:
            await self._engine.clear_cache()
        except CommandRefused:
            return False
        return True
