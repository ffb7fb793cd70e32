"""Other forms of chat: what their bodies have in common."""

from typing import Annotated, Literal

from pydantic import PlainValidator

from tokasaurus.server.protocol.chat import TemplateFields
from tokasaurus.server.protocol.fields import WHOLE_FLOATS, NullMeans, Only, not_implemented
from tokasaurus.server.protocol.sampling_fields import SamplingFields


def named_here(name: str) -> PlainValidator:
    """Metadata of a field of chat that has another name in the form."""

    def check(value: object) -> None:
        if value is not None:
            raise not_implemented(f"is a field of /v1/chat/completions: here it is {name}")

    return PlainValidator(check, None)


_NO_PLACE = "the answer here has no place for it; that of /v1/chat/completions has"


class ChatForm(SamplingFields, TemplateFields):
    """A body of another form of chat. Fields of chat that the form lacks mean the same here, but for those without a
    place in its answer, which has a single choice."""

    n: Annotated[Literal[1], WHOLE_FLOATS, NullMeans(1)] = 1
    return_token_ids: Annotated[bool, Only(None, False, instead=_NO_PLACE), NullMeans(False)] = False
    prompt_logprobs: Annotated[None, Only(None, instead=_NO_PLACE)] = None
    logprobs_in_fingerprint: Annotated[bool, Only(None, False, instead=_NO_PLACE), NullMeans(False)] = False
    echo: Annotated[bool, Only(None, False, instead=_NO_PLACE), NullMeans(False)] = False

    separate_reasoning: Annotated[bool, NullMeans(True)] = True
    include_reasoning: Annotated[bool, NullMeans(True)] = True
    parallel_tool_calls: Annotated[bool, NullMeans(True)] = True
