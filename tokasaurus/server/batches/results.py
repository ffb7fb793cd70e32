"""Lines of the output and error files, in OpenAI's format."""

import uuid

import orjson

from tokasaurus.server.errors import ApiError, error_response
from tokasaurus.text.json_lines import write_json


def answered_line(custom_id: str, answer: bytes) -> bytes:
    """answer: the response's JSON."""
    return _line(custom_id, _response(200, answer), None)


def refused_line(custom_id: str, error: ApiError) -> bytes:
    """What a live request would have been answered with."""
    return _line(custom_id, _response(error.status, bytes(error_response(error).body)), None)


def unrun_line(custom_id: str, code: str, message: str) -> bytes:
    """A line that did not run to its end."""
    return _line(custom_id, None, {"code": code, "message": message})


def _response(status: int, body: bytes) -> dict[str, object]:
    return {"status_code": status, "request_id": f"req_{uuid.uuid4().hex}", "body": orjson.Fragment(body)}


def _line(custom_id: str, response: dict[str, object] | None, error: dict[str, str] | None) -> bytes:
    line = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return write_json(line, option=orjson.OPT_APPEND_NEWLINE)
