"""State shared by all routes of one server."""

from dataclasses import dataclass
from typing import cast

from fastapi import Request

from tokasaurus.messages.lifecycle import EngineLimits
from tokasaurus.monitoring.loop_lag import LoopLag
from tokasaurus.server.engine_client.client import EngineClient
from tokasaurus.server.errors import EngineNotReady, ServerStopping
from tokasaurus.server.limits import RequestLimits
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.structured_output.validator import GrammarChecker
from tokasaurus.server.text_threads import TextThreads


@dataclass(frozen=True, slots=True)
class ServerState:
    """State shared by all routes of one server."""

    model: ServedModel
    engine: EngineClient
    grammars: GrammarChecker
    text_threads: TextThreads
    limits: RequestLimits
    loop_lag: LoopLag

    def ready_limits(self) -> EngineLimits:
        """Raises EngineNotReady until the engine is up, ServerStopping once the server drains."""
        if self.engine.is_draining:
            raise ServerStopping("the server is stopping and accepts no new work")
        limits = self.engine.limits
        if limits is None:
            raise EngineNotReady("the model is still loading")
        return limits


def state_of(request: Request) -> ServerState:
    return cast(ServerState, request.app.state.server)


def num_body_bytes(request: Request) -> int:
    """Size of the request's body, which has been read."""
    return cast(int, request.state.num_body_bytes)
