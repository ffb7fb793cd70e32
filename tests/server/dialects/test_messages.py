"""Streams of /v1/messages, cut at random, compared with the whole answer and with the chat answer."""

import random
from dataclasses import replace

import orjson
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.server.helpers.finished_sequences import interleaved
from tests.server.helpers.message_events import checked_message, joined_message, partial_object, without_ids
from tests.server.helpers.random_answers import RandomAnswer, random_answers
from tokasaurus.server.dialects.messages import MessageEvents
from tokasaurus.server.protocol.sampling_fields import StreamOptions
from tokasaurus.server.respond.blocks import write_whole
from tokasaurus.server.respond.whole import build_chat_completion
from tokasaurus.server.served_model import ServedModel


@examples(200)
@given(random_answers("msg_1"), st.integers(0, 1000))
def test_joined_events_equal_the_whole_answer_and_chat_wherever_the_stream_is_cut(
    served_model: ServedModel, random_answer: RandomAnswer, seed: int
) -> None:
    prepared, sequence = random_answer
    (request,) = prepared.requests
    prepared = replace(prepared, repeated={"max_tokens": request.max_new_tokens + (seed % 2)})
    answer = write_whole(MessageEvents, prepared, [[sequence]], served_model)
    whole = checked_message(answer.content)
    stream = MessageEvents(prepared, served_model, StreamOptions())
    written = b"".join(stream.events(group) for group in interleaved([[sequence]], random.Random(seed)))
    assert without_ids(joined_message(written + stream.end())) == without_ids(whole)

    chat = orjson.loads(orjson.dumps(build_chat_completion(prepared, [[sequence]], served_model)))
    (choice,), usage = chat["choices"], chat["usage"]
    message = choice["message"]
    texts = [block["text"] for block in whole["content"] if block["type"] == "text"]
    calls = [(block["name"], block["input"]) for block in whole["content"] if block["type"] == "tool_use"]
    thoughts = [block["thinking"] for block in whole["content"] if block["type"] == "thinking"]
    assert "".join(texts) == (message["content"] or "")
    assert "".join(thoughts) == (message.get("reasoning") or "")
    assert calls == [
        (call["function"]["name"], _as_written(call["function"]["arguments"]))
        for call in message.get("tool_calls") or []
    ]
    expected = {"stop": "end_turn", "tool_calls": "tool_use"}.get(choice["finish_reason"])
    if choice["finish_reason"] == "length":
        expected = "max_tokens" if seed % 2 == 0 else "model_context_window_exceeded"
    if whole["stop_sequence"] is not None:
        assert whole["stop_sequence"] in request.stop_strings
        expected = "tool_use" if calls else "stop_sequence"
    assert whole["stop_reason"] == expected
    counted = whole["usage"]
    assert counted["input_tokens"] + counted["cache_read_input_tokens"] == usage["prompt_tokens"]
    assert counted["cache_read_input_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert counted["output_tokens"] == usage["completion_tokens"]
    thinking_tokens = usage["completion_tokens_details"]["reasoning_tokens"]
    assert counted["output_tokens_details"] == {"thinking_tokens": thinking_tokens}


def _as_written(arguments: str) -> object:
    value = partial_object(arguments)
    return value if isinstance(value, dict) else {}
