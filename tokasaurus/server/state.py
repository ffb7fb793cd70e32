"""What routes share: the state of one server, and what they ask of a request."""

from dataclasses import dataclass, field
from typing import cast

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from tokasaurus.config import ServerConfig
from tokasaurus.messages.commands import NamedAdapter
from tokasaurus.messages.status import EngineLimits
from tokasaurus.monitoring.metrics import LoopLag
from tokasaurus.server.answers import AnswerCounts
from tokasaurus.server.engine_client.client import EngineClient
from tokasaurus.server.errors import EngineNotReady, EngineRestarting, ServerStopping
from tokasaurus.server.grammars.validator import GrammarChecker
from tokasaurus.server.resources import BodyBytes, TextThreads
from tokasaurus.server.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class ServerState:
    """State shared by all routes of one server."""

    model: ServedModel
    engine: EngineClient
    grammars: GrammarChecker
    text_threads: TextThreads
    body_bytes: BodyBytes
    loop_lag: LoopLag
    config: ServerConfig
    """The limits of requests among others, and what routes tell of it."""
    answers: AnswerCounts = field(default_factory=dict)

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

    def adapter_for(self, model: str | None) -> NamedAdapter | None:
        """The adapter that a body with this model means, or None for the served model. Raises ModelNotFound."""
        adapters = self.engine.control.adapters
        if model and (named := adapters.find(model)) is not None:
            return named
        self.model.check_name(model)
        return adapters.of_base

    def check_ready(self) -> None:
        """Raises what `ready_limits` raises, and EngineRestarting although requests would wait."""
        self.ready_limits()
        if self.engine.is_restarting:
            raise EngineRestarting("the engine is restarting")


def state_of(request: Request) -> ServerState:
    return cast(ServerState, request.app.state.server)


def ready_state_of(request: Request) -> ServerState:
    """Raises what `ServerState.ready_limits` does."""
    state = state_of(request)
    state.ready_limits()
    return state


def num_body_bytes(request: Request) -> int:
    """Size of the request's body, which has been read."""
    return cast(int, request.state.num_body_bytes)


_IS_HEAD = "toka_is_head"


class HeadMiddleware:
    """Answers HEAD like GET (RFC 9110, section 9.3.2). The HTTP server below sends no body of the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET", _IS_HEAD: True}
        await self._app(scope, receive, send)


def is_head(scope: Scope) -> bool:
    """Whether the body of the answer is left out, so that it need not be read from a disk."""
    return _IS_HEAD in scope
