"""Answers that end when the client disconnects: work for one, and the server-sent events of stream=true."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokasaurus.server.errors import ApiError, ClientGone, ServerStopping, internal_error
from tokasaurus.server.respond.stream import error_event

Result = TypeVar("Result")

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the second keeps nginx from buffering responses


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled and awaited if the client disconnects first.

    receive: the ASGI receive callable of a request whose whole body has been read.
    Raises ClientGone if the client disconnected, ServerStopping if the HTTP server cancels its tasks, and what
    `receive` raises.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        watching.result()
        raise ClientGone
    except asyncio.CancelledError:
        # Only the HTTP server cancels us, when its grace period is over; there is just enough time for a response.
        raise ServerStopping("the server is stopping") from None
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends what `events` yields. The response starts with the first event: an earlier error gets its own status.

    A later error is sent as the last event, by `write_error`. `events` is closed at the end and when the client
    disconnects.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], write_error: Callable[[ApiError], bytes] = error_event
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._write_error = write_error
        self._has_started = False

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_while_connected(receive, self._send_events(send))
        except ClientGone:
            return
        except Exception as error:
            if not self._has_started:
                raise
            known = error if isinstance(error, ApiError) else internal_error()
            await send({"type": "http.response.body", "body": self._write_error(known), "more_body": False})
            if known is not error:
                raise  # for the log

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            async for event in events:
                await self._start(send)
                await send({"type": "http.response.body", "body": event, "more_body": True})
                await asyncio.sleep(0)  # let other tasks run: `send` waits only for a slow client
        await self._start(send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self, send: Send) -> None:
        if not self._has_started:
            self._has_started = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
