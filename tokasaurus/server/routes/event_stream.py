"""The response to a body with stream=true: server-sent events."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokasaurus.server.disconnect import run_while_connected
from tokasaurus.server.errors import ApiError, ClientGone
from tokasaurus.server.respond.stream import error_event

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the second keeps nginx from buffering responses


class EventStream(Response):
    """Sends what `events` yields. The response starts with the first event: an earlier error gets its own status.

    A later error is sent as the last event. `events` is closed at the end and when the client disconnects.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._has_started = False

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_while_connected(receive, self._send_events(send))
        except ClientGone:
            return
        except Exception as error:
            if not self._has_started:
                raise
            known = (
                error if isinstance(error, ApiError) else ApiError("internal error; the server's log has the details")
            )
            await send({"type": "http.response.body", "body": error_event(known), "more_body": False})
            if known is not error:
                raise  # for the log

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            async for event in events:
                if not self._has_started:
                    self._has_started = True
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": event, "more_body": True})
                await asyncio.sleep(0)  # let other tasks run: `send` waits only for a slow client
        await send({"type": "http.response.body", "body": b"", "more_body": False})
