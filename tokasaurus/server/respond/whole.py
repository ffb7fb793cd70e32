"""Finished sequences → OpenAI's completion objects. Plain functions that detokenize; no server."""

import base64
import io
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import orjson

from tokasaurus.messages.forward import RoutedExperts
from tokasaurus.messages.generation import PromptLogprobs
from tokasaurus.server.engine_client.collectors import FinishedSequence
from tokasaurus.server.prepare.requests import Prepared
from tokasaurus.server.protocol.answers import Usage
from tokasaurus.server.protocol.chat import (
    ChatChoice,
    ChatChoiceWithIds,
    ChatCompletion,
    ExtendedChatCompletion,
)
from tokasaurus.server.protocol.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    ExtendedCompletionChoice,
)
from tokasaurus.server.respond.choice import (
    Choice,
    ChoiceDelta,
    UsageCounter,
    build_message,
    newest_version,
    weight_spans,
)
from tokasaurus.server.respond.logprobs import (
    TokenNames,
    build_chat_logprobs,
    build_completion_logprobs,
    build_echo_logprobs,
    build_fingerprint,
    build_prompt_logprobs,
    join_logprobs,
)
from tokasaurus.server.served_model import ServedModel
from tokasaurus.text.json_lines import write_json

# One call that serialises more than this would block the event loop for more than some milliseconds.
_SLICE_VALUES = 8192
_SLICE_TOKENS = 128
"""Sampled or echoed tokens, each with its top-k logprobs."""


def build_completion(
    prepared: Prepared, results: Sequence[Sequence[FinishedSequence]], model: ServedModel
) -> Completion:
    """The answer to a body. results: the sequences of each of `prepared.requests`, in order."""
    echoes = [
        build_echo(request_index, prepared, row[0].prompt_logprobs, model) for request_index, row in enumerate(results)
    ]
    prompt_logprobs = [
        write_prompt_logprobs(request_index, prepared, row[0].prompt_logprobs, model)
        for request_index, row in enumerate(results)
    ]
    prompt_ids = [request.prompt_ids.tolist() for request in prepared.requests] if prepared.return_token_ids else None
    choices: list[CompletionChoice] = []
    for index, whole in enumerate(_whole_choices(prepared, results, model)):
        assert whole.finish_reason is not None, "its only delta is the last"
        request_index = index // prepared.requests[0].num_sequences  # all requests of a body have the same n
        echo, logprobs = echoes[request_index]
        if whole.logprobs is not None:
            own = build_completion_logprobs(whole.logprobs, token_names(prepared, model), len(echo))
            logprobs = own if logprobs is None else join_logprobs(logprobs, own)
        text, scores = echo + whole.text, prompt_logprobs[request_index]
        if prompt_ids is None and scores is None:
            choices.append(CompletionChoice(index, text, logprobs, whole.finish_reason))
            continue
        choice = ExtendedCompletionChoice(
            index,
            text,
            logprobs,
            whole.finish_reason,
            token_ids=None if prompt_ids is None else whole.token_ids,
            prompt_token_ids=None if prompt_ids is None else prompt_ids[request_index],
            prompt_logprobs=scores,
        )
        choices.append(choice)
    return Completion(
        id=prepared.response_id,
        object="text_completion",
        created=int(time.time()),
        model=prepared.adapter_name or model.name,
        system_fingerprint=_fingerprint(prepared, results, model),
        choices=choices,
        usage=build_usage(prepared, results),
    )


def build_chat_completion(
    prepared: Prepared, results: Sequence[Sequence[FinishedSequence]], model: ServedModel
) -> ChatCompletion:
    """The answer to a body. results: the sequences of each of `prepared.requests`, in order."""
    choices: list[ChatChoice] = []
    wholes = _whole_choices(prepared, results, model)
    for index, whole in enumerate(wholes):
        logprobs = None if whole.logprobs is None else build_chat_logprobs(whole.logprobs, token_names(prepared, model))
        message, finish_reason = build_message(whole, prepared)
        if prepared.content_start:
            message = replace(message, content=prepared.content_start + (message.content or ""))
        if prepared.return_token_ids:
            choices.append(ChatChoiceWithIds(index, message, logprobs, finish_reason, whole.token_ids))
        else:
            choices.append(ChatChoice(index, message, logprobs, finish_reason))
    completion = ChatCompletion(
        id=prepared.response_id,
        object="chat.completion",
        created=int(time.time()),
        model=prepared.adapter_name or model.name,
        system_fingerprint=_fingerprint(prepared, results, model),
        choices=choices,
        usage=build_usage(prepared, results, sum(whole.num_reasoning_tokens for whole in wholes)),
    )
    prompt_logprobs = write_prompt_logprobs(0, prepared, results[0][0].prompt_logprobs, model)
    prompt_ids = prepared.requests[0].prompt_ids.tolist() if prepared.return_token_ids else None
    if prompt_ids is None and prompt_logprobs is None:
        return completion
    same = {field.name: getattr(completion, field.name) for field in fields(completion)}
    return ExtendedChatCompletion(**same, prompt_token_ids=prompt_ids, prompt_logprobs=prompt_logprobs)


@dataclass(frozen=True, slots=True)
class Answer:
    """The whole response to a body, written."""

    content: bytes
    """JSON."""
    usage: Usage


class WholeAnswer(Protocol):
    """A dataclass: an answer as it is on the wire."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def usage(self) -> Usage: ...


def write_answer(
    answer: WholeAnswer,
    results: Sequence[Sequence[FinishedSequence]] = (),
    names_weights: bool = False,
    experts_from: int | None = None,
) -> bytes:
    """The answer as JSON, which prompt logprobs may make hundreds of megabytes large.

    results: of its choices. names_weights: choices name the weights that their tokens are from. experts_from: as of
    Prepared.

    Serialised in parts, since each dumps() call holds the GIL, which blocks the event loop; join() releases it.
    """
    parts: list[bytes] = []
    sequences = [sequence for row in results for sequence in row]
    for field in fields(answer):
        if field.name == "choices" and names_weights:
            parts += [b"," if parts else b"{", b'"weight_version":', orjson.dumps(newest_version(sequences))]
        parts += [b"," if parts else b"{", orjson.dumps(field.name), b":"]
        if field.name != "choices":
            parts.append(write_json(getattr(answer, field.name)))
            continue
        choices: Sequence[WholeChoice] = getattr(answer, field.name)
        for index, choice in enumerate(choices):
            extra = choice_fields(sequences[index], names_weights, experts_from) if sequences else {}
            parts += [b"," if index else b"[", _write_choice(choice, extra)]
        parts.append(b"]")
    return b"".join([*parts, b"}"])


def choice_fields(sequence: FinishedSequence, names_weights: bool, experts_from: int | None) -> dict[str, object]:
    """What a choice has further. Arguments as of write_answer."""
    found: dict[str, object] = {}
    if names_weights:
        found["weight_versions"] = weight_spans(sequence.weight_versions, len(sequence.token_ids))
    if experts_from is not None:
        found["routed_experts"] = write_experts(sequence.experts, experts_from)
    return found


def write_experts(experts: RoutedExperts | None, first: int) -> str | None:
    """The experts of the tokens from `first` on, as vLLM writes them: a .npy file in base64."""
    if experts is None:
        return None
    file = io.BytesIO()
    np.save(file, experts[first:])
    return base64.b64encode(file.getbuffer()).decode()


class WholeChoice(Protocol):
    """A dataclass, and its logprobs are one too."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def logprobs(self) -> Any: ...


def _write_choice(choice: WholeChoice, extra: dict[str, object]) -> bytes:
    """extra: further fields."""
    logprobs = choice.logprobs
    if logprobs is None and not extra:
        return write_json(choice)
    shown = {field.name: getattr(choice, field.name) for field in fields(choice)} | extra
    if logprobs is not None:
        lists = {field.name: getattr(logprobs, field.name) for field in fields(logprobs)}
        shown["logprobs"] = {name: write_list(values) for name, values in lists.items()}
    return write_json(shown)


def write_list(values: list[Any] | None) -> Any:
    """A list as JSON, serialised in slices if it is long."""
    if values is None or len(values) <= _SLICE_TOKENS:
        return values
    starts = range(0, len(values), _SLICE_TOKENS)
    return _join_lists([write_json(values[start : start + _SLICE_TOKENS]) for start in starts])


def _join_lists(written: Sequence[bytes]) -> orjson.Fragment:
    """One list of the elements of all lists, as JSON. At least one list; none is empty."""
    return orjson.Fragment(b"".join([b"[", b",".join([part[1:-1] for part in written]), b"]"]))


def build_echo(
    request_index: int, prepared: Prepared, prompt_logprobs: PromptLogprobs | None, model: ServedModel
) -> tuple[str, CompletionLogprobs | None]:
    """(text, logprobs) of the echo that precedes the completions of one request; ("", None) without echo.

    prompt_logprobs: of the request's prompt; None if not requested.
    """
    if not prepared.echoes:
        return "", None
    echo, request = prepared.echoes[request_index], prepared.requests[request_index]
    if not request.want_logprobs:
        return echo.text, None
    assert prompt_logprobs is not None, "the engine returns logprobs if they are requested"
    num_top = request.num_top_logprobs
    names = token_names(prepared, model)
    return echo.text, build_echo_logprobs(echo, request.prompt_ids, prompt_logprobs, num_top, names)


def token_names(prepared: Prepared, model: ServedModel) -> TokenNames:
    """How the answer to a body names the tokens of logprobs."""
    return TokenNames(model.tokenizer, prepared.return_tokens_as_token_ids)


def build_usage(
    prepared: Prepared, results: Sequence[Sequence[FinishedSequence]], num_reasoning_tokens: int = 0
) -> Usage:
    """The token counts of a whole answer."""
    counter = UsageCounter(prepared)
    counter.add_reasoning(num_reasoning_tokens)
    for request_index, sequences in enumerate(results):
        for sequence_index, sequence in enumerate(sequences):
            counter.add(request_index, sequence_index, sequence)
    return counter.usage()


def write_prompt_logprobs(
    request_index: int, prepared: Prepared, prompt_logprobs: PromptLogprobs | None, model: ServedModel
) -> orjson.Fragment | None:
    """The `prompt_logprobs` of one request as JSON; None if not requested. prompt_logprobs: as in `build_echo`."""
    if prepared.num_top_prompt_logprobs is None:
        return None
    assert prompt_logprobs is not None, "the engine returns logprobs if they are requested"
    prompt_ids = prepared.requests[request_index].prompt_ids
    num_top = prepared.num_top_prompt_logprobs
    step = max(1, _SLICE_VALUES // (1 + num_top))
    slices = []
    for start in range(0, len(prompt_ids), step):
        entries = build_prompt_logprobs(prompt_ids, prompt_logprobs, num_top, model.tokenizer, start, start + step)
        slices.append(write_json(entries))
    return _join_lists(slices)


def _fingerprint(prepared: Prepared, results: Sequence[Sequence[FinishedSequence]], model: ServedModel) -> str:
    if not prepared.logprobs_in_fingerprint:
        return model.system_fingerprint
    sequences = [sequence for sequences in results for sequence in sequences]
    return build_fingerprint(sequences, prepared.starts_in_reasoning)


def _whole_choices(
    prepared: Prepared, results: Sequence[Sequence[FinishedSequence]], model: ServedModel
) -> list[ChoiceDelta]:
    """One per sequence, in order: all of its choice as a single delta."""
    return [
        Choice(request, prepared, model).add(sequence)
        for request, sequences in zip(prepared.requests, results, strict=True)
        for sequence in sequences
    ]
