"""Cancels a client's work when the client disconnects."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from tokasaurus.server.errors import ClientGone, ServerStopping

Result = TypeVar("Result")


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled and awaited if the client disconnects first.

    receive: the ASGI receive callable of a request whose whole body has been read.
    Raises ClientGone if the client disconnected, ServerStopping if the HTTP server cancels its tasks.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
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
