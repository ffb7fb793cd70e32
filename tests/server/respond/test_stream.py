"""Joined chunks of a stream, compared with the answer that is not streamed."""

import dataclasses
import random
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.helpers.small_tokenizer import IM_END, IM_START
from tests.server.helpers.fake_engine import prompt_logprobs
from tests.server.helpers.finished_sequences import finished, interleaved, make_request, parse
from tokasaurus.messages.generation import FinishReason, GenerateRequest, SequenceDelta
from tokasaurus.server.engine_client.collectors import FinishedSequence
from tokasaurus.server.prepare.requests import Echo, Prepared
from tokasaurus.server.protocol.sampling_fields import StreamOptions
from tokasaurus.server.respond.stream import AnswerStream, ChatStream, CompletionStream
from tokasaurus.server.respond.whole import build_chat_completion, build_completion
from tokasaurus.server.served_model import ServedModel

HELLO, SPACE_WO = 259, 261  # "hello", " wo"
TOKENS = [HELLO, SPACE_WO, *b"helo w", *"é€".encode(), 0xFF, IM_START]
STOPS = [(), ("o w",), ("lo", "hello h"), ("é",), ("\ufffd",), ("hello hello",), ("ohello",), ("zz", "w")]

SEQUENCES = st.tuples(st.lists(st.sampled_from(TOKENS), max_size=12), st.booleans())


def join_completion(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    joined: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        whole = joined.setdefault(choice["index"], {"text": "", "logprobs": None, "finish_reason": None})
        assert whole["finish_reason"] is None, "a chunk after the last one"
        whole["text"] += choice["text"]
        whole["finish_reason"] = choice["finish_reason"]
        for name, values in (choice["logprobs"] or {}).items():
            whole["logprobs"] = whole["logprobs"] or {}
            if values is None:
                whole["logprobs"][name] = None
            else:
                whole["logprobs"][name] = whole["logprobs"].get(name, []) + values
    return joined


def assert_parallel(choice: dict[str, Any]) -> None:
    """The choice of a chunk or of a whole answer has one logprobs entry for each of its token ids."""
    logprobs = choice["logprobs"]
    lists = [] if logprobs is None else [entries for entries in logprobs.values() if entries is not None]
    assert {len(entries) for entries in lists} <= {len(choice["token_ids"])}
    assert lists or not choice["token_ids"]


def of_two_prompts(
    sequences: list[tuple[list[int], bool]], request: GenerateRequest, min_tokens: int
) -> tuple[GenerateRequest, list[FinishedSequence], list[list[FinishedSequence]]]:
    """The request with min_tokens, if all samples have as many; the samples, and the same by prompt, two of each."""
    results = [
        finished([*token_ids, IM_END], "stop") if ends else finished(token_ids or [HELLO], "length")
        for token_ids, ends in sequences
    ]
    # The engine generates at least min_tokens before the eos, so the shortest sequence without its eos is the limit.
    min_tokens = min(min_tokens, *(len(sequence.token_ids) - 1 for sequence in results))
    request = dataclasses.replace(request, min_tokens=max(0, min_tokens))
    computed = prompt_logprobs(request)
    pairs = results[:2], results[2:]
    return request, results, [[dataclasses.replace(one, prompt_logprobs=computed), other] for one, other in pairs]


def prepare_two(request: GenerateRequest, echoes: bool) -> Prepared:
    asked = dataclasses.replace(request, want_prompt_logprobs=echoes and request.want_logprobs)
    return Prepared("cmpl-1", [asked, asked], echoes=[Echo("lo€", [0, 1, 2])] * 2 if echoes else [])


@examples(200)
@given(
    st.lists(SEQUENCES, min_size=4, max_size=4),
    st.sampled_from(STOPS),
    st.booleans(),
    st.sampled_from([0, 0, 1, 2, 4]),
    st.booleans(),
    st.integers(0, 1000),
)
@example([([*b"hello h", IM_START], True)] * 4, ("hello hello",), False, 0, True, 1)
@example([([HELLO, SPACE_WO, HELLO], True)] * 4, ("o w",), False, 0, False, 2)
@example([([], True)] * 4, (), False, 0, False, 3)
def test_token_ids_and_logprobs_are_parallel_in_every_chunk_and_in_the_whole_answer(
    served_model: ServedModel,
    sequences: list[tuple[list[int], bool]],
    stop: tuple[str, ...],
    ignore_eos: bool,
    min_tokens: int,
    echoes: bool,
    seed: int,
) -> None:
    """With return_token_ids: all tokens as sampled, with the end token and the tokens of a stop string."""
    request = make_request(3, stop, ignore_eos, want_logprobs=True, num_sequences=2)
    request, results, rows = of_two_prompts(sequences, request, min_tokens)
    prepared = dataclasses.replace(prepare_two(request, echoes), return_token_ids=True)
    whole = orjson.loads(orjson.dumps(build_completion(prepared, rows, served_model)))
    joined: list[list[int]] = [[] for _ in results]
    stream: AnswerStream = CompletionStream(prepared, served_model, StreamOptions())
    for group in interleaved(rows, random.Random(seed)):
        for chunk in parse(stream.events(group)):
            (choice,) = chunk["choices"]
            if echoes and choice["prompt_token_ids"] is not None:  # the chunk of the echo
                assert len(choice["logprobs"]["token_logprobs"]) == len(choice["prompt_token_ids"])
                assert choice["token_ids"] == []
            else:
                assert_parallel(choice)
            joined[choice["index"]] += choice["token_ids"]
    assert joined == [sequence.token_ids for sequence in results]
    assert whole["usage"]["completion_tokens"] == sum(map(len, joined))
    for choice, sequence in zip(whole["choices"], results, strict=True):
        assert choice["token_ids"] == sequence.token_ids
        num_echoed = 3 if echoes else 0
        assert choice["logprobs"]["token_logprobs"][num_echoed:] == sequence.logprobs
        assert len(choice["logprobs"]["tokens"]) == num_echoed + len(sequence.token_ids)

    prepared = Prepared("chatcmpl-1", [dataclasses.replace(request, num_sequences=4)], return_token_ids=True)
    whole = orjson.loads(orjson.dumps(build_chat_completion(prepared, [results], served_model)))
    joined = [[] for _ in results]
    stream = ChatStream(prepared, served_model, StreamOptions())
    for group in interleaved([results], random.Random(seed)):
        for chunk in parse(stream.events(group)):
            (choice,) = chunk["choices"]
            if "token_ids" in choice:  # not in the first chunk, which has the role
                assert_parallel(choice)
                joined[choice["index"]] += choice["token_ids"]
    assert joined == [sequence.token_ids for sequence in results]
    for choice, sequence in zip(whole["choices"], results, strict=True):
        assert choice["token_ids"] == sequence.token_ids
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == sequence.logprobs


def join_chat(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    joined: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        if choice["index"] not in joined:
            assert choice["delta"] == {"role": "assistant", "content": "", "refusal": None}
            joined[choice["index"]] = {"content": "", "logprobs": None, "finish_reason": None}
            continue
        whole = joined[choice["index"]]
        assert whole["finish_reason"] is None, "a chunk after the last one"
        whole["content"] += choice["delta"]["content"]
        whole["finish_reason"] = choice["finish_reason"]
        if choice["logprobs"] is not None:
            whole["logprobs"] = (whole["logprobs"] or []) + choice["logprobs"]["content"]
    return joined


@examples(300)
@given(
    st.lists(SEQUENCES, min_size=4, max_size=4),
    st.sampled_from(STOPS),
    st.booleans(),
    st.booleans(),
    st.sampled_from([StreamOptions(), StreamOptions(include_usage=True), StreamOptions(continuous_usage_stats=True)]),
    st.sampled_from([0, 0, 1, 2, 4]),
    st.booleans(),
    st.integers(0, 1000),
)
@example([([HELLO, 0xE2, 0x82], False)] * 4, ("\ufffd",), True, False, StreamOptions(), 0, False, 0)
@example([([*b"hello h", IM_START], True)] * 4, ("hello hello",), True, False, StreamOptions(), 0, True, 1)
@example([([HELLO, 0xE2, HELLO, HELLO], True)] * 4, ("lo", "\ufffd"), True, False, StreamOptions(), 2, True, 2)
def test_joined_chunks_equal_the_whole_answer(
    served_model: ServedModel,
    sequences: list[tuple[list[int], bool]],
    stop: tuple[str, ...],
    want_logprobs: bool,
    ignore_eos: bool,
    options: StreamOptions,
    min_tokens: int,
    echoes: bool,
    seed: int,
) -> None:
    """A completion of two prompts with two samples each, echoed or not, and a chat with four samples."""
    request = make_request(3, stop, ignore_eos, want_logprobs, num_sequences=2)
    request, results, rows = of_two_prompts(sequences, request, min_tokens)
    prepared = prepare_two(request, echoes)
    whole = build_completion(prepared, rows, served_model)
    chunks = run(
        CompletionStream(prepared, served_model, options), rows, seed, options, orjson.loads(orjson.dumps(whole.usage))
    )
    if echoes:
        firsts = {choice["index"]: choice for chunk in reversed(chunks) for choice in chunk["choices"]}
        assert {choice["text"] for choice in firsts.values()} == {"lo€"}
    expected = {choice["index"]: choice for choice in orjson.loads(orjson.dumps(whole.choices))}
    for index, joined in join_completion(chunks).items():
        choice = expected.pop(index)
        if choice["logprobs"] is not None and not choice["logprobs"]["tokens"]:
            joined["logprobs"] = joined["logprobs"] or choice["logprobs"]  # no chunk had logprobs entries to join
        assert joined == {name: choice[name] for name in ("text", "logprobs", "finish_reason")}
    assert not expected

    chat = dataclasses.replace(request, num_sequences=4)
    prepared = Prepared("chatcmpl-1", [chat])
    whole_chat = build_chat_completion(prepared, [results], served_model)
    chunks = run(
        ChatStream(prepared, served_model, options),
        [results],
        seed,
        options,
        orjson.loads(orjson.dumps(whole_chat.usage)),
    )
    for index, joined in join_chat(chunks).items():
        choice = orjson.loads(orjson.dumps(whole_chat.choices[index]))
        assert joined["content"] == choice["message"]["content"]
        assert joined["finish_reason"] == choice["finish_reason"]
        assert joined["logprobs"] == (choice["logprobs"]["content"] if want_logprobs else None)
    assert len(join_chat(chunks)) == 4


def run(
    stream: AnswerStream, rows: list[list[FinishedSequence]], seed: int, options: StreamOptions, usage: dict[str, Any]
) -> list[dict[str, Any]]:
    """Returns the chunks that have a choice, after checking usage and the end of the stream."""
    chunks = [chunk for group in interleaved(rows, random.Random(seed)) for chunk in parse(stream.events(group))]
    end = stream.end()
    assert end.endswith(b"data: [DONE]\n\n")
    last = parse(end.removesuffix(b"data: [DONE]\n\n"))
    if options.include_usage:
        (summary,) = last
        assert (summary["choices"], summary["usage"]) == ([], usage)
        assert {chunk["usage"] for chunk in chunks} == {None}
    else:
        assert last == []
    if options.continuous_usage_stats:
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert chunks[-1]["usage"] == usage
    elif not options.include_usage:
        assert all("usage" not in chunk for chunk in chunks)
    return chunks


@pytest.mark.parametrize(("stream_type", "firsts"), [(CompletionStream, "TTFTF"), (ChatStream, "TFFFF")])
def test_shows_prompts_predicts_which_events_contain_prompts(
    served_model: ServedModel, stream_type: type[AnswerStream], firsts: str
) -> None:
    """Prompts may be long, so such events are serialised outside the event loop."""
    prepared = Prepared("cmpl-1", [make_request(num_sequences=3)], return_token_ids=True)
    stream = stream_type(prepared, served_model, StreamOptions())
    for index, is_first in zip((0, 1, 0, 2, 1), firsts, strict=True):
        delta = (0, SequenceDelta("r", index, [HELLO], None, None, 0, 0, 0, 0))
        predicted = stream.shows_prompts([delta])
        events = stream.events([delta])
        assert predicted == (b'"prompt_token_ids":[' in events) == (is_first == "T")


def test_stop_string_within_min_tokens_is_streamed_as_text(served_model: ServedModel) -> None:
    request = dataclasses.replace(make_request(3, ("hello",)), min_tokens=3)
    token_ids = [HELLO, ord("h"), HELLO, HELLO]
    assert text_after_each_token(served_model, request, token_ids) == ["hello", "", "hhello", ""]


def text_after_each_token(model: ServedModel, request: GenerateRequest, token_ids: list[int]) -> list[str]:
    """The text streamed after each token; the last token finishes with reason `length`."""
    stream = CompletionStream(Prepared("cmpl-1", [request]), model, StreamOptions())
    texts = []
    for position, token_id in enumerate(token_ids):
        reason: FinishReason | None = "length" if position == len(token_ids) - 1 else None
        chunks = parse(stream.events([(0, SequenceDelta("r", 0, [token_id], [-1.0], reason, 0, 0, 0, 0))]))
        texts.append("".join(chunk["choices"][0]["text"] for chunk in chunks))
    return texts


@pytest.mark.parametrize(
    ("stop", "token_ids", "texts"),
    [
        ((), [HELLO, SPACE_WO, *"€".encode()], ["hello", " wo", "", "", "€"]),
        ((), [HELLO, 0xE2], ["hello", "�"]),
        (("o wa",), [HELLO, SPACE_WO, HELLO], ["hell", "o w", "ohello"]),
        (("o wo",), [HELLO, SPACE_WO], ["hell", ""]),
        (("zz",), [HELLO, ord("z"), ord("a"), ord("z")], ["hello", "", "za", "z"]),
        (("€",), [HELLO, *"€".encode(), HELLO], ["hello", "", "", "", ""]),
    ],
)
def test_text_is_buffered_only_while_it_may_be_part_of_a_stop_string(
    served_model: ServedModel, stop: tuple[str, ...], token_ids: list[int], texts: list[str]
) -> None:
    assert text_after_each_token(served_model, make_request(3, stop), token_ids) == texts
