"""Streams of /v1/responses, cut at random, compared with the whole answer and with the chat answer."""

import random
from dataclasses import replace

import orjson
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.helpers.small_tokenizer import IM_END, IM_START
from tests.server.helpers.finished_sequences import finished, interleaved, make_request
from tests.server.helpers.response_events import (
    checked_events,
    checked_response,
    joined_response,
    without_random_fields,
)
from tests.server.helpers.tool_texts import FRAGMENTS, NAMES
from tokasaurus.messages.generation import FinishReason
from tokasaurus.server.dialects.responses import ResponseEvents, ResponsesRequest, WholeResponse, repeated_fields
from tokasaurus.server.prepare.requests import Prepared
from tokasaurus.server.protocol.sampling_fields import StreamOptions
from tokasaurus.server.respond.blocks import write_whole
from tokasaurus.server.respond.whole import build_chat_completion
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.tools.formats import FORMATS, ToolCallFormat
from tokasaurus.server.tools.parser import CallRules
from tokasaurus.server.tools.reasoning import ReasoningRules

WHOLE_CALLS = [format_.write("f", {"x": "é"}) for format_ in FORMATS.values()]
MARKS = ["<think>", "</think>"]
REASONING = [None, *(ReasoningRules({"<think>": "</think>"}, start) for start in ("before", "inside", "after"))]
BODY = ResponsesRequest.model_validate({"model": "default", "input": "?"})


@examples(200)
@given(
    st.sampled_from([*FORMATS.values(), None]),
    st.lists(st.sampled_from([*FRAGMENTS, "é", "€", *(WHOLE_CALLS * 3), *(MARKS * 2)]), max_size=9),
    st.sampled_from([(), ("x",), ("}}",), ("l_call>\n",), ('": {', "name")]),
    st.booleans(),
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
    want_logprobs: bool,
    parallel: bool,
    is_forced: bool,
    finish_reason: FinishReason,
    reasoning: ReasoningRules | None,
    shown_ends: tuple[bool, bool],
    seed: int,
) -> None:
    token_ids = [*"".join(fragments).encode(), IM_START, *([IM_END] if finish_reason == "stop" else [])]
    sequence = finished(token_ids, finish_reason)
    shows_special, keeps_stop = shown_ends
    request = replace(make_request(3, stop, want_logprobs=want_logprobs), shows_special=shows_special)
    rules = None if format_ is None else CallRules(format_, NAMES, parallel, is_forced=is_forced)
    prepared = Prepared(
        "resp_1",
        [request],
        calls=rules,
        reasoning=reasoning,
        repeated=repeated_fields(BODY, served_model),
        keeps_stop=keeps_stop,
    )
    answer = write_whole(WholeResponse, prepared, [[sequence]], served_model)
    whole = checked_response(answer.content)
    stream = ResponseEvents(prepared, served_model, StreamOptions())
    written = b"".join(stream.events(group) for group in interleaved([[sequence]], random.Random(seed)))
    joined = joined_response(checked_events(written + stream.end()))
    assert without_random_fields(joined) == without_random_fields(whole)

    chat = orjson.loads(orjson.dumps(build_chat_completion(prepared, [[sequence]], served_model)))
    (choice,) = chat["choices"]
    texts = [item["content"][0] for item in whole["output"] if item["type"] == "message"]
    calls = [item for item in whole["output"] if item["type"] == "function_call"]
    thoughts = [item["content"][0]["text"] for item in whole["output"] if item["type"] == "reasoning"]
    assert "".join(thoughts) == (choice["message"].get("reasoning") or "")
    assert len(thoughts) <= 1
    assert "".join(part["text"] for part in texts) == (choice["message"]["content"] or "")
    assert bool(texts) == (choice["message"]["content"] is not None)
    assert [(call["name"], call["arguments"]) for call in calls] == [
        (call["function"]["name"], call["function"]["arguments"]) for call in choice["message"].get("tool_calls", [])
    ]
    was_cut = choice["finish_reason"] == "length"
    assert whole["status"] == ("incomplete" if was_cut else "completed")
    assert (whole["incomplete_details"] is not None) == was_cut
    statuses = [item["status"] for item in whole["output"]]
    assert statuses == ["completed"] * (len(statuses) - 1) + [whole["status"]][: len(statuses)]
    usage = chat["usage"]
    assert answer.usage.completion_tokens == usage["completion_tokens"]
    assert whole["usage"]["input_tokens"] == usage["prompt_tokens"]
    assert whole["usage"]["output_tokens"] == usage["completion_tokens"]
    details = usage["completion_tokens_details"]
    assert whole["usage"]["output_tokens_details"] == details
    assert whole["usage"]["total_tokens"] == usage["total_tokens"]
    assert whole["usage"]["input_tokens_details"]["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    logprobs = [entry for part in texts for entry in part["logprobs"]]
    kinds = [item["type"] for item in whole["output"] if item["type"] != "reasoning"]
    if not want_logprobs or kinds[:1] != ["message"] or (reasoning is not None and not texts[0]["text"]):
        assert logprobs == []
        return
    if not calls and reasoning is None:
        assert logprobs == choice["logprobs"]["content"]
    assert logprobs == texts[0]["logprobs"]
    hidden = () if shows_special else ("<|im_start|>", "<|im_end|>")
    tokens_of_text = [entry for entry in logprobs if entry["token"] not in hidden]
    shown = bytes(byte for entry in tokens_of_text for byte in entry["bytes"]).decode(errors="replace")
    assert shown == texts[0]["text"] or (stop and shown.startswith(texts[0]["text"]))
