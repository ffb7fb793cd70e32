"""Loads and unloads of adapters by vLLM's, SGLang's and SkyRL's names. Served with rl=T, as new weights are."""

import asyncio
import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import Field

from tokasaurus.server.engine_client.adapters import AdapterFiles
from tokasaurus.server.engine_client.control import PauseMode
from tokasaurus.server.errors import InvalidRequest, NotFound, Unsupported
from tokasaurus.server.json_body import JsonBodyRoute
from tokasaurus.server.openapi import BODY_ERRORS, answers, error_responses
from tokasaurus.server.protocol.fields import NullMeans, Only, StrictObject, Text, VersionName
from tokasaurus.server.state import ServerState, ready_state_of
from tokasaurus.text.json_lines import write_json

_HEADER_BYTES = 8
"""Length of a safetensors file's header, which is a JSON object."""


class LoadLora(StrictObject):
    """lora_name: what requests will give as their model. lora_path: a directory on the server's machine with
    adapter_config.json and adapter_model.safetensors. load_inplace: another adapter may have the name. mode: what
    becomes of requests that run with it, as for /pause."""

    lora_name: VersionName
    lora_path: Text
    load_inplace: Annotated[bool, NullMeans(False)] = False
    mode: Annotated[PauseMode, NullMeans("keep")] = "keep"


class UnloadLora(StrictObject):
    """lora_id: no effect."""

    lora_name: VersionName
    lora_id: str | None = None


class LoadLoraAdapter(StrictObject):
    """Another adapter may have the name. pinned: no effect, since all stay in memory."""

    lora_name: VersionName
    lora_path: Text
    pinned: bool | None = None

    lora_id: Annotated[Any, Only(None)] = None


class LoadLoraFromTensors(StrictObject):
    """config_dict: what adapter_config.json contains. serialized_named_tensors: base64 of what
    adapter_model.safetensors contains; strings of a list are the same. serialized_tensors: its older name."""

    lora_name: VersionName
    config_dict: dict[str, Any]
    serialized_named_tensors: Annotated[list[str] | str | None, Field(min_length=1)] = None
    serialized_tensors: Annotated[list[str] | str | None, Field(min_length=1)] = None
    pinned: bool | None = None

    lora_id: Annotated[Any, Only(None)] = None
    load_format: Annotated[Any, Only(None)] = None
    added_tokens_config: Annotated[Any, Only(None, {})] = None


@dataclass(frozen=True, slots=True)
class LoadedLora:
    """lora_id: the digest of its numbers."""

    lora_id: str
    lora_name: str
    lora_path: str
    pinned: bool = True


@dataclass(frozen=True, slots=True)
class LoadedLoras:
    """loaded_adapters: by name."""

    success: bool
    error_message: str | None
    loaded_adapters: dict[str, LoadedLora]


router = APIRouter(route_class=JsonBodyRoute, tags=["roll-outs"])

_TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


@router.post(
    "/v1/load_lora_adapter",
    response_class=PlainTextResponse,
    responses={**_TEXT, **error_responses(*BODY_ERRORS, 404, 503)},
)
async def load_lora(request: Request, body: LoadLora) -> Response:
    """Load an adapter on every replica, or on none; 404 if a file is missing. /skyrl/v1/load_lora_adapter is always in
    place."""
    state, mode = ready_state_of(request), body.mode
    await _load(state, body.lora_name, body.lora_path, "lora_path", replaces=body.load_inplace, mode=mode)
    return PlainTextResponse(f"Success: the adapter {body.lora_name!r} is loaded.")


@router.post(
    "/skyrl/v1/load_lora_adapter",
    include_in_schema=False,
)
async def load_lora_in_place(request: Request, body: LoadLora) -> Response:
    """As /v1/load_lora_adapter, always with load_inplace."""
    await _load(ready_state_of(request), body.lora_name, body.lora_path, "lora_path", mode=body.mode)
    return PlainTextResponse(f"Success: the adapter {body.lora_name!r} is loaded.")


@router.post(
    "/v1/unload_lora_adapter",
    response_class=PlainTextResponse,
    responses={**_TEXT, **error_responses(*BODY_ERRORS, 404, 503)},
)
async def unload_lora(request: Request, body: UnloadLora) -> Response:
    """Requests that run end with it."""
    _unload(ready_state_of(request), body.lora_name)
    return PlainTextResponse(f"Success: the adapter {body.lora_name!r} is unloaded.")


@router.post("/load_lora_adapter", responses=answers(LoadedLoras, *BODY_ERRORS, 404, 503))
async def load_lora_adapter(request: Request, body: LoadLoraAdapter) -> Response:
    """Load an adapter, in place of one that has the name."""
    state = ready_state_of(request)
    await _load(state, body.lora_name, body.lora_path, "lora_path")
    return _loaded(state)


@router.post("/load_lora_adapter_from_tensors", responses=answers(LoadedLoras, *BODY_ERRORS, 503))
async def load_lora_adapter_from_tensors(request: Request, body: LoadLoraFromTensors) -> Response:
    """Load an adapter that the body contains."""
    state = ready_state_of(request)
    param = "serialized_named_tensors" if body.serialized_tensors is None else "serialized_tensors"
    given = body.serialized_named_tensors if body.serialized_tensors is None else body.serialized_tensors
    if given is None or None not in (body.serialized_named_tensors, body.serialized_tensors):
        raise InvalidRequest("just one of serialized_named_tensors and serialized_tensors is needed", param)
    weights = await asyncio.to_thread(_safetensors, given, param)
    await _load(state, body.lora_name, (body.config_dict, weights), param)
    return _loaded(state)


@router.post("/unload_lora_adapter", responses=answers(LoadedLoras, *BODY_ERRORS, 404, 503))
async def unload_lora_adapter(request: Request, body: UnloadLora) -> Response:
    """Unload an adapter: its name is unknown from now on."""
    state = ready_state_of(request)
    _unload(state, body.lora_name)
    return _loaded(state)


async def _load(
    state: ServerState,
    name: str,
    source: str | AdapterFiles,
    param: str,
    *,
    replaces: bool = True,
    mode: PauseMode = "keep",
) -> None:
    """Raises InvalidRequest and EngineDied, if nothing has changed."""
    if state.model.is_own(name):
        raise InvalidRequest(f"lora_name: {name!r} is a name of the model itself", "lora_name")
    await state.engine.control.load_adapter(name, source, replaces=replaces, mode=mode, param=param)


def _unload(state: ServerState, name: str) -> None:
    if not state.engine.control.adapters.unload(name):
        raise NotFound(f"lora_name: there is no adapter {name!r}; GET /v1/models lists them", "lora_name")


def _safetensors(given: Sequence[str] | str, param: str) -> bytes:
    """What was given in base64. Raises InvalidRequest."""
    if not isinstance(given, str):
        if any(other != given[0] for other in given):
            raise Unsupported(f"{param} has a list whose strings differ: each must be the whole adapter", param)
        given = given[0]
    try:
        content = base64.b64decode(given, validate=True)
    except binascii.Error:
        content = b""
    if content[_HEADER_BYTES : _HEADER_BYTES + 1] != b"{":
        raise Unsupported(
            f"{param} must be base64 of a safetensors file, such as of safetensors.torch.save(tensors); pickles, which "
            "SGLang's MultiprocessingSerializer makes, are not read, since they run programs",
            param,
        )
    return content


def _loaded(state: ServerState) -> Response:
    adapters = [adapter for adapter in state.engine.control.adapters.named if adapter.name]
    found = {adapter.name: LoadedLora(adapter.digest, adapter.name, adapter.source) for adapter in adapters}
    return Response(write_json(LoadedLoras(True, None, found)), media_type="application/json")
