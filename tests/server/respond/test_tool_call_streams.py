"""Streams with tool calls, cut into random chunks, compared with the whole answer."""

import random

import orjson
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.chat_completion import Choice

from tests.helpers.examples import examples
from tests.helpers.small_tokenizer import IM_END
from tests.server.helpers.finished_sequences import finished, interleaved, make_request, parse
from tests.server.helpers.tool_answers import joined, without_ids
from tests.server.helpers.tool_texts import FRAGMENTS, NAMES
from tokasaurus.server.prepare.requests import Prepared
from tokasaurus.server.protocol.sampling_fields import StreamOptions
from tokasaurus.server.respond.stream import ChatStream
from tokasaurus.server.respond.whole import build_chat_completion
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.tools.formats import FORMATS, ToolCallFormat
from tokasaurus.server.tools.parser import CallRules


@examples(150)
@given(
    st.sampled_from(list(FORMATS.values())),
    st.lists(st.lists(st.sampled_from(FRAGMENTS), max_size=9), min_size=2, max_size=2),
    st.sampled_from([(), ("x",), ("}}",), ("l_call>\n",), ('": {', "name")]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 1000),
)
def test_joined_chunks_equal_the_whole_answer_wherever_the_stream_is_cut(
    served_model: ServedModel,
    format_: ToolCallFormat,
    fragments: list[list[str]],
    stop: tuple[str, ...],
    want_logprobs: bool,
    parallel: bool,
    is_forced: bool,
    returns_ids: bool,
    seed: int,
) -> None:
    texts = ["".join(fragments_of_text) for fragments_of_text in fragments]
    results = [finished([*f"{text}é".encode(), IM_END], "stop") for text in texts]
    request = make_request(3, stop, want_logprobs=want_logprobs, num_sequences=2)
    rules = CallRules(format_, NAMES, parallel, is_forced=is_forced)
    prepared = Prepared("chatcmpl-1", [request], return_token_ids=returns_ids, calls=rules)
    whole = ChatCompletion.model_validate_json(
        orjson.dumps(build_chat_completion(prepared, [results], served_model)), strict=True
    )
    assert not is_forced or all(choice.message.content is None for choice in whole.choices)
    stream = ChatStream(prepared, served_model, StreamOptions())
    groups = interleaved([results], random.Random(seed))
    chunks = [ChatCompletionChunk.model_validate(chunk) for group in groups for chunk in parse(stream.events(group))]
    for choice in whole.choices:
        found, expected = joined(chunks, choice.index), without_ids(choice)
        token_ids = expected.pop("token_ids", None)
        assert token_ids == (results[choice.index].token_ids if returns_ids else None)
        if want_logprobs and not expected["logprobs"]["content"]:
            found["logprobs"] = expected["logprobs"]  # no chunk had logprobs entries to join
        assert found == expected
        assert_parallel_to_token_ids(chunks, choice)


def assert_parallel_to_token_ids(chunks: list[ChatCompletionChunk], whole: Choice) -> None:
    """Wherever there are token ids and logprobs, whole or in a chunk, they are equally many."""
    for choice in [whole, *(choice for chunk in chunks for choice in chunk.choices)]:
        token_ids = (choice.model_extra or {}).get("token_ids")
        if token_ids is not None and choice.logprobs is not None:
            assert len(choice.logprobs.content or []) == len(token_ids)
