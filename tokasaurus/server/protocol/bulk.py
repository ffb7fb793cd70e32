"""Input and output lines of POST /v1/bulk, in the format of OpenAI's batch files."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tokasaurus.server.protocol.storage.custom_id import MAX_CUSTOM_ID_CHARS


class BulkLine(BaseModel):
    """custom_id: the caller's unique name of the line. body: a request body for the route `url`."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    custom_id: Annotated[str, Field(min_length=1, max_length=MAX_CUSTOM_ID_CHARS)]
    method: Literal["POST"] = "POST"
    url: Literal["/v1/completions", "/v1/chat/completions"]
    body: dict[str, Any]


# For the OpenAPI page, which cannot describe newline-separated JSON.
LINE_SCHEMA = {
    "type": "string",
    "description": "Lines, each a JSON object with custom_id, url and body; method may be POST.",
    "example": '{"custom_id": "1", "url": "/v1/completions", "body": {"model": "default", "prompt": "Once"}}\n',
}
RESULT_SCHEMA = {
    "type": "string",
    "description": "One line per input line: a JSON object with id, custom_id, response (status_code, request_id and "
    "body) and error, which is null if status_code is 200.",
}
