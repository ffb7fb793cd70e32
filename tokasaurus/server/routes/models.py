"""GET /v1/models"""

from fastapi import APIRouter, Request, Response

from tokasaurus.server.openapi import error_responses
from tokasaurus.server.protocol.models import ModelList, ModelObject
from tokasaurus.server.state import ServerState, state_of
from tokasaurus.text.json_lines import write_json

router = APIRouter(tags=["models"])


@router.get("/v1/models", responses={200: {"model": ModelList}})
async def list_models(request: Request) -> Response:
    """The served model."""
    return _json(ModelList([_model_object(state_of(request))]))


# a path, since names such as org/name contain slashes
@router.get("/v1/models/{name:path}", responses={200: {"model": ModelObject}, **error_responses(404)})
async def retrieve_model(request: Request, name: str) -> Response:
    """The model with this name; "default" and the flag model= are other names of the served model."""
    state = state_of(request)
    state.model.check_name(name)
    return _json(_model_object(state))


def _model_object(state: ServerState) -> ModelObject:
    limits = state.engine.limits
    max_model_len = None if limits is None else limits.max_tokens_per_sequence
    return ModelObject(id=state.model.name, created=state.model.created, max_model_len=max_model_len)


def _json(body: object) -> Response:
    return Response(write_json(body), media_type="application/json")
