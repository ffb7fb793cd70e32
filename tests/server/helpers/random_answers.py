"""Random answers with tool calls, reasoning, special text and stop strings, of which dialects write the same."""

from dataclasses import replace
from typing import NamedTuple

from hypothesis import strategies as st

from tests.helpers.small_tokenizer import IM_END, IM_START
from tests.server.helpers.finished_sequences import finished, make_request
from tests.server.helpers.tool_texts import FRAGMENTS, NAMES
from tokasaurus.server.engine_client.collectors import FinishedSequence
from tokasaurus.server.prepare.requests import Prepared
from tokasaurus.server.tools.formats import FORMATS
from tokasaurus.server.tools.parser import CallRules
from tokasaurus.server.tools.reasoning import ReasoningRules

_CALLS = [format_.write("f", {"x": "é\n", "big": 10**30}) for format_ in FORMATS.values()]
_FRAGMENTS = [*FRAGMENTS, "é", "€", *(_CALLS * 3), *(["<think>", "</think>"] * 2)]
_STOPS = [(), ("x",), ("}}",), ("l_call>\n",), ('": {', "name")]
_REASONING = [None, *(ReasoningRules({"<think>": "</think>"}, start) for start in ("before", "inside", "after"))]


class RandomAnswer(NamedTuple):
    prepared: Prepared
    sequence: FinishedSequence


@st.composite
def random_answers(draw: st.DrawFn, response_id: str) -> RandomAnswer:
    format_, is_ended = draw(st.sampled_from([*FORMATS.values(), None])), draw(st.booleans())
    parallel, is_forced, want_logprobs, shows_special, keeps_stop = (draw(st.booleans()) for _ in range(5))
    text = "".join(draw(st.lists(st.sampled_from(_FRAGMENTS), max_size=9)))
    reasoning = draw(
        st.sampled_from([*_REASONING, *(rules and replace(rules, is_included=False) for rules in _REASONING)])
    )
    request = make_request(3, draw(st.sampled_from(_STOPS)), want_logprobs=want_logprobs)
    prepared = Prepared(
        response_id,
        [replace(request, shows_special=shows_special)],
        calls=None if format_ is None else CallRules(format_, NAMES, parallel, is_forced=is_forced),
        reasoning=reasoning,
        keeps_stop=keeps_stop,
    )
    token_ids = [*text.encode(), IM_START]
    sequence = finished([*token_ids, IM_END], "stop") if is_ended else finished(token_ids, "length")
    return RandomAnswer(prepared, sequence)
