"""The way that every body takes that asks for text: prepare, generate, build; all of it ends if the client leaves."""

from collections.abc import Callable
from typing import TypeVar

import orjson
from fastapi import Request, Response

from tokasaurus.messages.lifecycle import EngineLimits
from tokasaurus.server.disconnect import run_while_connected
from tokasaurus.server.engine_client import FinishedSequence
from tokasaurus.server.openapi import BODY_ERRORS, error_responses
from tokasaurus.server.prepare import Prepared
from tokasaurus.server.protocol.sampling_fields import SamplingFields
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.state import state_of

Body = TypeVar("Body", bound=SamplingFields)

# For the OpenAPI page.
ERROR_RESPONSES = error_responses(*BODY_ERRORS, 404, 429, 503)


async def answer_generation(
    request: Request,
    body: Body,
    prepare: Callable[[Body, ServedModel, EngineLimits], Prepared],
    build: Callable[[Prepared, list[list[FinishedSequence]], ServedModel], object],
) -> Response:
    """Raises ApiError; ClientGone when the client disconnects, after the engine was told to drop the request."""
    state = state_of(request)
    state.model.check_name(body.model)
    limits = state.ready_limits()
    state.engine.check_queue()  # it is checked again when the request is submitted, but this spares the work until then

    async def work() -> bytes:
        prepared = await state.in_text_thread(prepare, body, state.model, limits)
        results = await state.engine.generate(prepared.requests)
        return await state.in_text_thread(lambda: orjson.dumps(build(prepared, results, state.model)))

    return Response(await run_while_connected(request.receive, work()), media_type="application/json")
