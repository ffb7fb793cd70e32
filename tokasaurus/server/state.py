"""State shared by all routes of one server."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, TypeVar, cast

from fastapi import Request

from tokasaurus.messages.lifecycle import EngineLimits
from tokasaurus.server.engine_client.client import EngineClient
from tokasaurus.server.errors import EngineNotReady, EngineRestarting, ServerStopping
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.structured_output.validator import GrammarChecker

Params = ParamSpec("Params")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ServerState:
    """State shared by all routes of one server."""

    model: ServedModel
    engine: EngineClient
    grammars: GrammarChecker
    text_threads: ThreadPoolExecutor
    """For work on text and token ids that would block the event loop; the tokenizer releases the GIL."""
    max_request_bytes: int | None
    """Largest request body, in bytes; None: no limit."""

    def ready_limits(self) -> EngineLimits:
        """The limits of requests. Raises EngineNotReady until the engine is up, EngineRestarting while requests are
        refused because of a restart, and ServerStopping once the server drains."""
        if self.engine.is_draining:
            raise ServerStopping("the server is stopping and accepts no new work")
        limits = self.engine.limits
        if limits is None:
            raise EngineNotReady("the model is still loading")
        self.engine.check_restart()
        return limits

    def check_ready(self) -> None:
        """Raises what `ready_limits` raises, and EngineRestarting although requests would wait."""
        self.ready_limits()
        if self.engine.is_restarting:
            raise EngineRestarting("the engine is restarting")

    async def in_text_thread(
        self, function: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.text_threads, lambda: function(*args, **kwargs))


def state_of(request: Request) -> ServerState:
    return cast(ServerState, request.app.state.server)
