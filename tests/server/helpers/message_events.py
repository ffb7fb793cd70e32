"""Answers and streams of /v1/messages, checked field by field against Anthropic's reference."""

import json
from typing import Any

from pydantic_core import from_json

MESSAGE_FIELDS = {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"}
USAGE_FIELDS = {
    "input_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    "output_tokens",
    "output_tokens_details",
    "service_tier",
    "speed",
    "inference_geo",
}
BLOCK_FIELDS = {
    "text": {"type", "text", "citations"},
    "thinking": {"type", "thinking", "signature"},
    "tool_use": {"type", "id", "name", "input"},
}
STOP_REASONS = {"end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded", "pause_turn"}


def checked_message(content: bytes) -> dict[str, Any]:
    """The answer, after asserting that it is what Anthropic documents."""
    message: dict[str, Any] = json.loads(content)
    _check_message(message)
    assert message["stop_reason"] in STOP_REASONS
    assert (message["stop_sequence"] is not None) <= (message["stop_reason"] == "stop_sequence" or has_calls(message))
    return message


def has_calls(message: dict[str, Any]) -> bool:
    return any(block["type"] == "tool_use" for block in message["content"])


def _check_message(message: dict[str, Any]) -> None:
    assert message.keys() == MESSAGE_FIELDS
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert message["id"].startswith("msg_")
    _check_usage(message["usage"])
    for block in message["content"]:
        assert block.keys() == BLOCK_FIELDS[block["type"]]
        assert block["type"] != "tool_use" or isinstance(block["input"], dict)


def _check_usage(usage: dict[str, Any]) -> None:
    assert usage.keys() == USAGE_FIELDS
    assert usage["output_tokens_details"].keys() == {"thinking_tokens"}


def joined_message(content: bytes) -> dict[str, Any]:
    """The message that a stream's events add up to, after asserting their order and fields."""
    assert content.endswith(b"\n\n")
    events = []
    for written in content.split(b"\n\n")[:-1]:
        head, data = written.split(b"\n")
        event = json.loads(data.removeprefix(b"data: "))
        assert head == b"event: " + event["type"].encode()
        events.append(event)
    start, *inner, delta, stop = events
    assert start.keys() == {"type", "message"}
    message: dict[str, Any] = start["message"]
    assert start["type"] == "message_start"
    _check_message(message)
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    while inner:
        message["content"].append(_take_block(inner, len(message["content"])))
    assert (delta["type"], delta.keys()) == ("message_delta", {"type", "delta", "usage"})
    assert delta["delta"].keys() == {"stop_reason", "stop_sequence"}
    _check_usage(delta["usage"])
    for name in ("input_tokens", "cache_read_input_tokens"):
        assert delta["usage"][name] == message["usage"][name]
    assert stop == {"type": "message_stop"}
    return {**message, **delta["delta"], "usage": delta["usage"]}


def _take_block(events: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """Removes the events of one block."""
    start = events.pop(0)
    assert (start["type"], start["index"]) == ("content_block_start", index)
    block: dict[str, Any] = start["content_block"]
    assert block.keys() == BLOCK_FIELDS[block["type"]]
    kind, name = {
        "text": ("text_delta", "text"),
        "thinking": ("thinking_delta", "thinking"),
        "tool_use": ("input_json_delta", "partial_json"),
    }[block["type"]]
    assert block.get(name, "") == ""
    text = ""
    while events[0]["type"] == "content_block_delta":
        event = events.pop(0)
        assert (event["index"], event["delta"].keys(), event["delta"]["type"]) == (index, {"type", name}, kind)
        assert event["delta"][name]
        text += event["delta"][name]
    assert events.pop(0) == {"type": "content_block_stop", "index": index}
    if block["type"] == "tool_use":
        assert block["input"] == {}
        return block | {"input": partial_object(text)}
    return block | {name: text}


def partial_object(text: str) -> Any:
    """As Anthropic's client reads the deltas of a call, but for line ends within strings."""
    try:
        return json.loads(text, strict=False)
    except ValueError:
        try:
            return from_json(text, allow_partial=True)
        except ValueError:
            return {}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """A copy without random ids."""
    copied: dict[str, Any] = json.loads(json.dumps(message))
    for holder in (copied, *copied["content"]):
        holder.pop("id", None)
    return copied
