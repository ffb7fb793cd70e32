"""Other forms of chat: what their bodies have in common."""

from typing import Annotated, Literal

from pydantic import PlainValidator

from tokasaurus.server.protocol.chat import TemplateFields
from tokasaurus.server.protocol.fields import WHOLE_FLOATS, NullMeans, not_implemented
from tokasaurus.server.protocol.sampling_fields import SamplingFields


def named_here(name: str) -> PlainValidator:
    """Metadata of a field of chat that has another name in the form."""

    def check(value: object) -> None:
        if value is not None:
            raise not_implemented(f"is a field of /v1/chat/completions: here it is {name}")

    return PlainValidator(check, None)


def _check_absent(value: object) -> None:
    if value not in (None, False):
        raise not_implemented("has no place in this route's answer: /v1/chat/completions has it")


class ChatForm(SamplingFields, TemplateFields):
    """A body of another form of chat. Fields of chat that the form lacks mean the same here, but for those without a
    place in its answer, which has a single choice."""

    n: Annotated[Literal[1], WHOLE_FLOATS, NullMeans(1)] = 1
    return_token_ids: Annotated[Literal[False], NullMeans(False)] = False
    prompt_logprobs: Annotated[None, PlainValidator(_check_absent, None)] = None
    logprobs_in_fingerprint: Annotated[Literal[False], NullMeans(False)] = False
    echo: Annotated[Literal[False], NullMeans(False)] = False

    separate_reasoning: Annotated[bool, NullMeans(True)] = True
    include_reasoning: Annotated[bool, NullMeans(True)] = True
    parallel_tool_calls: Annotated[bool, NullMeans(True)] = True
