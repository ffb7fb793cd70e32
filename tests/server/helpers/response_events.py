"""Answers and streams of /v1/responses, checked against OpenAI's types and document, and against each other."""

import json
from typing import Any

import openai.types.responses as types
import orjson
import pydantic

from tests.server.helpers.openai_client import assert_no_extra_fields
from tests.server.helpers.openai_document import EVENTS, assert_as_documented

EVENT_TYPES: dict[str, type[pydantic.BaseModel]] = {
    "response.created": types.ResponseCreatedEvent,
    "response.in_progress": types.ResponseInProgressEvent,
    "response.output_item.added": types.ResponseOutputItemAddedEvent,
    "response.content_part.added": types.ResponseContentPartAddedEvent,
    "response.output_text.delta": types.ResponseTextDeltaEvent,
    "response.output_text.done": types.ResponseTextDoneEvent,
    "response.reasoning_text.delta": types.ResponseReasoningTextDeltaEvent,
    "response.reasoning_text.done": types.ResponseReasoningTextDoneEvent,
    "response.content_part.done": types.ResponseContentPartDoneEvent,
    "response.function_call_arguments.delta": types.ResponseFunctionCallArgumentsDeltaEvent,
    "response.function_call_arguments.done": types.ResponseFunctionCallArgumentsDoneEvent,
    "response.output_item.done": types.ResponseOutputItemDoneEvent,
    "response.completed": types.ResponseCompletedEvent,
    "response.incomplete": types.ResponseIncompleteEvent,
    "response.failed": types.ResponseFailedEvent,
    "error": types.ResponseErrorEvent,
}


def checked_response(content: bytes) -> dict[str, Any]:
    """The answer, after asserting that it is what OpenAI documents."""
    response: dict[str, Any] = orjson.loads(content)
    assert_no_extra_fields(types.Response.model_validate_json(content, strict=True))
    assert_as_documented("Response", response)
    return response


def checked_events(content: bytes) -> list[dict[str, Any]]:
    """The events of a stream, after asserting that each is what OpenAI documents."""
    assert content.endswith(b"\n\n")
    events = []
    for number, written in enumerate(content.split(b"\n\n")[:-1]):
        head, data = written.split(b"\n")
        event = orjson.loads(data.removeprefix(b"data: "))
        assert head == b"event: " + event["type"].encode()
        assert event["sequence_number"] == number
        model = EVENT_TYPES[event["type"]].model_validate_json(data.removeprefix(b"data: "), strict=True)
        assert_no_extra_fields(model)
        assert_as_documented(EVENTS[event["type"]], event)
        events.append(event)
    return events


def joined_response(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The response of the last event, after asserting that the events before it add up to its output in the documented
    order."""
    created, in_progress, *inner, last = events
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == in_progress["response"]
    assert created["response"]["status"] == "in_progress"
    assert created["response"]["output"] == []
    assert created["response"]["usage"] is None
    output: list[dict[str, Any]] = []
    while inner:
        output.append(_take_item(inner, len(output)))
    final: dict[str, Any] = last["response"]
    assert last["type"] == f"response.{final['status']}"
    assert final["output"] == output
    changing = {"status", "output", "usage", "incomplete_details", "completed_at"}
    assert {name: final[name] for name in final.keys() - changing} == {
        name: created["response"][name] for name in created["response"].keys() - changing
    }
    return final


def _take_item(events: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """Removes the events of one item."""
    added = events.pop(0)
    assert (added["type"], added["output_index"]) == ("response.output_item.added", index)
    item = added["item"]
    assert item["status"] == "in_progress"
    name = {
        "message": "response.output_text",
        "reasoning": "response.reasoning_text",
        "function_call": "response.function_call_arguments",
    }[item["type"]]
    place = {"item_id": item["id"], "output_index": index}
    if item["type"] == "function_call":
        assert item["arguments"] == ""
    else:
        place["content_index"] = 0
        part = events.pop(0)
        assert part["type"] == "response.content_part.added"
        assert part["part"]["text"] == ""
        assert place.items() <= part.items()
    text, logprobs = "", []
    while events[0]["type"] == f"{name}.delta":
        delta = events.pop(0)
        assert place.items() <= delta.items()
        assert delta["delta"] or delta["logprobs"]
        text += delta["delta"]
        logprobs += delta.get("logprobs", [])
    done = events.pop(0)
    assert done["type"] == f"{name}.done"
    assert place.items() <= done.items()
    assert done["arguments" if item["type"] == "function_call" else "text"] == text
    assert done.get("logprobs", []) == logprobs
    expected = dict(item)
    if item["type"] == "function_call":
        expected["arguments"] = text
    else:
        part = events.pop(0)
        assert part["type"] == "response.content_part.done"
        assert place.items() <= part.items()
        assert part["part"]["text"] == text
        assert [_without_bytes(entry) for entry in part["part"].get("logprobs", [])] == logprobs
        expected["content"] = [part["part"]]
    finished = events.pop(0)
    assert (finished["type"], finished["output_index"]) == ("response.output_item.done", index)
    expected["status"] = finished["item"]["status"]
    assert expected["status"] in ("completed", "incomplete")
    assert finished["item"] == expected
    return expected


def _without_bytes(entry: dict[str, Any]) -> dict[str, Any]:
    tops = [{name: top[name] for name in ("token", "logprob")} for top in entry["top_logprobs"]]
    return {"token": entry["token"], "logprob": entry["logprob"], "top_logprobs": tops}


def without_random_fields(response: dict[str, Any]) -> dict[str, Any]:
    """A copy without ids and times."""
    copied: dict[str, Any] = json.loads(json.dumps(response))
    for holder in (copied, *copied["output"]):
        for name in ("id", "call_id", "created_at", "completed_at"):
            holder.pop(name, None)
    return copied
