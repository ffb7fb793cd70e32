"""Streams with reasoning, cut into random chunks, compared with the whole answer."""

import random
from dataclasses import replace
from typing import Any

import orjson
from hypothesis import example, given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.helpers.small_tokenizer import IM_END
from tests.server.helpers.finished_sequences import finished, interleaved, make_request, parse
from tests.server.helpers.reasoning_texts import THINK, read_whole
from tests.server.helpers.tool_texts import FRAGMENTS as CALL_FRAGMENTS
from tests.server.helpers.tool_texts import NAMES
from tokasaurus.messages.generation import FinishReason
from tokasaurus.server.prepare.requests import Prepared
from tokasaurus.server.protocol.sampling_fields import StreamOptions
from tokasaurus.server.respond.stream import ChatStream
from tokasaurus.server.respond.whole import build_chat_completion
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.tools.formats import HERMES
from tokasaurus.server.tools.parser import CallRules
from tokasaurus.server.tools.reasoning import ReasoningRules, ReasoningStart

FRAGMENTS = st.sampled_from(["<think>", "</think>", "<thi", "</thin", "\n", "so", "é", *CALL_FRAGMENTS])
TEXTS = st.lists(FRAGMENTS, max_size=10).map("".join)


def join(chunks: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """A choice joined from its chunks: texts are added up, and null until the first of them."""
    whole: dict[str, Any] = {"content": None, "reasoning_content": None, "reasoning": None, "calls": []}
    whole |= {"logprobs": [], "token_ids": [], "finish_reason": None}
    for choice in (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index):
        assert whole["finish_reason"] is None
        delta = choice["delta"]
        for name in ("content", "reasoning_content", "reasoning"):
            if delta.get(name) is not None:
                whole[name] = (whole[name] or "") + delta[name]
        for call in delta.get("tool_calls", []):
            if "id" in call:
                whole["calls"].append([call["function"]["name"], ""])
            whole["calls"][call["index"]][1] += call["function"]["arguments"]
        whole["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
        whole["token_ids"] += choice.get("token_ids", [])
        whole["finish_reason"] = choice["finish_reason"]
    return whole


def flatten(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice["message"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", [])]
    return {
        **{name: message[name] for name in ("content", "reasoning_content", "reasoning")},
        "calls": calls,
        "logprobs": (choice["logprobs"] or {"content": []})["content"],
        "token_ids": choice.get("token_ids", []),
        "finish_reason": choice["finish_reason"],
    }


@examples(300)
@given(
    st.lists(st.tuples(TEXTS, st.sampled_from(["stop", "length"])), min_size=2, max_size=2),
    st.sampled_from(["before", "inside", "after"]),
    st.sampled_from([(), ("so",), ("nk>",), ("\n<",), ("</think>",)]),
    st.booleans(),
    st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
    st.integers(0, 10_000),
)
@example([("<think>\nhm\n</think>\n\nYes", "stop"), ("<think>cut", "length")], "before", (), True, (True,) * 4, 0)
@example([("hm\n</think>\n\nYes", "stop"), ("<thi", "length")], "inside", (), False, (False, True, True, False), 1)
@example([("<think>hm</think>", "stop"), ("", "stop")], "before", (), False, (False, False, True, True), 2)
def test_joined_chunks_equal_the_whole_answer_wherever_the_stream_is_cut(
    served_model: ServedModel,
    texts: list[tuple[str, FinishReason]],
    start: ReasoningStart,
    stop: tuple[str, ...],
    has_tools: bool,
    flags: tuple[bool, bool, bool, bool],
    seed: int,
) -> None:
    want_logprobs, returns_ids, is_separate, is_included = flags
    results = [finished([*text.encode(), *([IM_END] if end == "stop" else [])] or [104], end) for text, end in texts]
    request = make_request(3, stop, want_logprobs=want_logprobs, num_sequences=2)
    rules = ReasoningRules(THINK, start, is_separate, is_included)
    calls = CallRules(HERMES, NAMES) if has_tools else None
    prepared = Prepared("chatcmpl-1", [request], return_token_ids=returns_ids, calls=calls, reasoning=rules)
    whole = orjson.loads(orjson.dumps(build_chat_completion(prepared, [results], served_model)))
    stream = ChatStream(prepared, served_model, StreamOptions(include_usage=True))
    chunks = [chunk for group in interleaved([results], random.Random(seed)) for chunk in parse(stream.events(group))]
    last = parse(stream.end().removesuffix(b"data: [DONE]\n\n"))[0]
    assert last["usage"] == whole["usage"]
    num_tokens = 0
    for (text, _), choice in zip(texts, whole["choices"], strict=True):
        assert join(chunks, choice["index"]) == flatten(choice)
        shown = cut(text or ("h" if results[choice["index"]].token_ids == [104] else ""), stop)
        reasoning, content, num_characters = read_whole(shown, THINK, start)
        num_tokens += len(shown[:num_characters].encode())  # one for each byte
        expected = reasoning if is_separate and is_included else ""
        assert choice["message"]["reasoning_content"] == (expected or None)
        if not has_tools:
            rest = content if is_separate else shown
            assert choice["message"]["content"] == (rest or (None if reasoning and is_separate else ""))
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_tokens}


@examples(200)
@given(
    st.lists(FRAGMENTS, max_size=8),
    st.sampled_from(["before", "inside", "after"]),
    st.sampled_from([(), ("so",), ("</think>",), ("<|im_end|>",)]),
    st.sampled_from(["", "Once"]),
    st.tuples(*[st.booleans()] * 7),
    st.integers(0, 10_000),
)
@example(["<tool_call>\n", '{"name": "f", "arguments": {}}', "\n</tool_call>"], "before", (), "Once", (True,) * 7, 0)
@example(["<think>so</think>"], "before", ("so",), "Once", (True,) * 7, 1)
@example(["so"], "inside", ("<|im_end|>",), "", (True,) * 7, 2)
def test_streams_equal_whole_answers_with_special_tokens_kept_ends_and_echoes(
    served_model: ServedModel,
    fragments: list[str],
    start: ReasoningStart,
    stop: tuple[str, ...],
    content_start: str,
    flags: tuple[bool, ...],
    seed: int,
) -> None:
    has_tools, want_logprobs, returns_ids, is_separate, is_included, keeps_stop, shows_special = flags
    text = "".join(fragments)
    result = finished([*text.encode(), IM_END], "stop")
    request = replace(make_request(3, stop, want_logprobs=want_logprobs), shows_special=shows_special)
    prepared = Prepared(
        "chatcmpl-1",
        [request],
        return_token_ids=returns_ids,
        calls=CallRules(HERMES, NAMES) if has_tools else None,
        reasoning=ReasoningRules(THINK, start, is_separate, is_included),
        keeps_stop=keeps_stop,
        content_start=content_start,
    )
    whole = orjson.loads(orjson.dumps(build_chat_completion(prepared, [[result]], served_model)))
    stream = ChatStream(prepared, served_model, StreamOptions(include_usage=True))
    chunks = [chunk for group in interleaved([[result]], random.Random(seed)) for chunk in parse(stream.events(group))]
    last = parse(stream.end().removesuffix(b"data: [DONE]\n\n"))[0]
    assert last["usage"] == whole["usage"]
    (choice,) = whole["choices"]
    assert join(chunks, 0) == flatten(choice)
    shown = f"{text}<|im_end|>" if keeps_stop and shows_special else text
    if stop and stop[0] in shown:
        shown = shown[: shown.index(stop[0]) + (len(stop[0]) if keeps_stop else 0)]
    reasoning, content, _ = read_whole(shown, THINK, start)
    expected = reasoning if is_separate and is_included else ""
    assert choice["message"]["reasoning_content"] == (expected or None)
    if not has_tools:
        rest = content_start + (content if is_separate else shown)
        assert choice["message"]["content"] == (rest or (None if expected else ""))


def cut(text: str, stop: tuple[str, ...]) -> str:
    """The text before the stop string, of which there is at most one."""
    return text.partition(stop[0])[0] if stop else text


def test_usage_counts_reasoning_while_it_is_streamed(served_model: ServedModel) -> None:
    """Of all chunks so far, and never more than in the end."""
    text = "<think>\nhm, so\n</think>\n\nYes"
    result = finished([*text.encode(), IM_END], "stop")
    rules = ReasoningRules(THINK)
    prepared = Prepared("chatcmpl-1", [make_request(3)], reasoning=rules)
    stream = ChatStream(prepared, served_model, StreamOptions(continuous_usage_stats=True))
    groups = interleaved([[result]], random.Random(5))
    chunks = [chunk for group in groups for chunk in parse(stream.events(group))]
    counts = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == len("<think>\nhm, so\n</think>")


def test_without_reasoning_rules_nothing_is_split(served_model: ServedModel) -> None:
    result = finished([*b"<think>hm</think>Yes", IM_END], "stop")
    prepared = Prepared("chatcmpl-1", [make_request(3)])
    whole = orjson.loads(orjson.dumps(build_chat_completion(prepared, [[result]], served_model)))
    assert whole["choices"][0]["message"] == {
        "role": "assistant",
        "content": "<think>hm</think>Yes",
        "refusal": None,
    }
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
