"""Streams of /v1/responses, cut at random, compared with the whole answer and with the chat answer."""

import random
from dataclasses import replace

import orjson
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.server.helpers.finished_sequences import interleaved
from tests.server.helpers.random_answers import RandomAnswer, random_answers
from tests.server.helpers.response_events import (
    checked_events,
    checked_response,
    joined_response,
    without_random_fields,
)
from tokasaurus.server.dialects.responses import ResponseEvents, ResponsesRequest, WholeResponse, repeated_fields
from tokasaurus.server.protocol.sampling_fields import StreamOptions
from tokasaurus.server.respond.blocks import write_whole
from tokasaurus.server.respond.whole import build_chat_completion
from tokasaurus.server.served_model import ServedModel

BODY = ResponsesRequest.model_validate({"model": "default", "input": "?"})


@examples(200)
@given(random_answers("resp_1"), st.integers(0, 1000))
def test_joined_events_equal_the_whole_answer_and_chat_wherever_the_stream_is_cut(
    served_model: ServedModel, random_answer: RandomAnswer, seed: int
) -> None:
    prepared, sequence = random_answer
    (request,) = prepared.requests
    prepared = replace(prepared, repeated=repeated_fields(BODY, served_model))
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
    if (
        not request.want_logprobs
        or kinds[:1] != ["message"]
        or (prepared.reasoning is not None and not texts[0]["text"])
    ):
        assert logprobs == []
        return
    if not calls and prepared.reasoning is None:
        assert logprobs == choice["logprobs"]["content"]
    assert logprobs == texts[0]["logprobs"]
    hidden = () if request.shows_special else ("<|im_start|>", "<|im_end|>")
    tokens_of_text = [entry for entry in logprobs if entry["token"] not in hidden]
    shown = bytes(byte for entry in tokens_of_text for byte in entry["bytes"]).decode(errors="replace")
    assert shown == texts[0]["text"] or (request.stop_strings and shown.startswith(texts[0]["text"]))
