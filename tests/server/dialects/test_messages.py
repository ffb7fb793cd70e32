"""Streams of /v1/messages, cut at random, compared with the whole answer and with the chat answer."""

import random
from dataclasses import replace

import orjson
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.helpers.small_tokenizer import IM_END
from tests.server.helpers.finished_sequences import finished, interleaved, make_request
from tests.server.helpers.message_events import checked_message, joined_message, partial_object, without_ids
from tests.server.helpers.tool_texts import FRAGMENTS, NAMES
from tokasaurus.messages.generation import FinishReason
from tokasaurus.server.dialects.messages import MessageEvents
from tokasaurus.server.prepare.requests import Prepared
from tokasaurus.server.protocol.sampling_fields import StreamOptions
from tokasaurus.server.respond.blocks import write_whole
from tokasaurus.server.respond.whole import build_chat_completion
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.tools.formats import FORMATS, ToolCallFormat
from tokasaurus.server.tools.parser import CallRules
from tokasaurus.server.tools.reasoning import ReasoningRules

WHOLE_CALLS = [format_.write("f", {"x": "é\n", "big": 10**30}) for format_ in FORMATS.values()]
MARKS = ["<think>", "</think>"]
REASONING = [None, *(ReasoningRules({"<think>": "</think>"}, start) for start in ("before", "inside", "after"))]


@examples(200)
@given(
    st.sampled_from([*FORMATS.values(), None]),
    st.lists(st.sampled_from([*FRAGMENTS, "é", "€", *(WHOLE_CALLS * 3), *(MARKS * 2)]), max_size=9),
    st.sampled_from([(), ("x",), ("}}",), ("l_call>\n",), ('": {', "name")]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["stop", "length"]),
    st.sampled_from([*REASONING, *(rules and replace(rules, is_included=False) for rules in REASONING)]),
    st.tuples(st.booleans(), st.booleans()),
    st.integers(0, 1000),
)
def test_joined_events_equal_the_whole_answer_and_chat_wherever_the_stream_is_cut(
    served_model: ServedModel,
    format_: ToolCallFormat | None,
    fragments: list[str],
    stop: tuple[str, ...],
    parallel: bool,
    is_forced: bool,
    finish_reason: FinishReason,
    reasoning: ReasoningRules | None,
    shown: tuple[bool, bool],
    seed: int,
) -> None:
    token_ids = [*"".join(fragments).encode(), *([IM_END] if finish_reason == "stop" else [])]
    sequence = finished(token_ids, finish_reason)
    shows_special, keeps_stop = shown
    request = replace(make_request(3, stop), shows_special=shows_special)
    rules = None if format_ is None else CallRules(format_, NAMES, parallel, is_forced=is_forced)
    max_tokens = request.max_new_tokens + (seed % 2)
    repeated = {"max_tokens": max_tokens}
    prepared = Prepared("msg_1", [request], calls=rules, reasoning=reasoning, repeated=repeated, keeps_stop=keeps_stop)
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
        assert whole["stop_sequence"] in stop
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
