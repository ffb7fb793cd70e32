"""Work on the data directory that blocks: in threads."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tokasaurus.server.batches.store.database import explain

Params = ParamSpec("Params")
Result = TypeVar("Result")


async def run_blocking(work: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs) -> Result:
    """What `work` returns or raises, but StoreError in place of OSError. A caller that is cancelled waits nevertheless
    for its end: nobody else may use the same file before."""
    running = asyncio.get_running_loop().run_in_executor(None, lambda: work(*args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        running.exception()  # or it would be logged
        raise
    except OSError as error:
        raise explain(error) from None
