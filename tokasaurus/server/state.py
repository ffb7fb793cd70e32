"""What every route of one server shares."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, TypeVar, cast

from fastapi import Request

from tokasaurus.messages.lifecycle import EngineLimits
from tokasaurus.server.engine_client.client import EngineClient
from tokasaurus.server.errors import EngineNotReady
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.structured_output.validator import GrammarChecker

Params = ParamSpec("Params")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ServerState:
    """text_threads: for work on text and ids, which would block the event loop; the tokenizer frees the GIL.

    max_request_bytes: of a body; None: any size.
    """

    model: ServedModel
    engine: EngineClient
    grammars: GrammarChecker
    text_threads: ThreadPoolExecutor
    max_request_bytes: int | None

    def ready_limits(self) -> EngineLimits:
        """Raises EngineNotReady until the engine is up."""
        limits = self.engine.limits
        if limits is None:
            raise EngineNotReady("the model is still loading")
        return limits

    async def in_text_thread(
        self, function: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.text_threads, lambda: function(*args, **kwargs))


def state_of(request: Request) -> ServerState:
    return cast(ServerState, request.app.state.server)
