"""Finished sequences, or deltas → the answers of /generate: text and tokens."""

from collections.abc import Sequence
from typing import Any

from tokasaurus.messages.generation import FinishReason, PromptLogprobs, SequenceDelta
from tokasaurus.server.engine_client.collectors import FinishedSequence
from tokasaurus.server.prepare.requests import Prepared
from tokasaurus.server.protocol.sampling_fields import StreamOptions
from tokasaurus.server.protocol.sglang_rollouts import GenerateAnswer, GenerateRequest
from tokasaurus.server.respond.choice import Choice
from tokasaurus.server.respond.logprobs import likely_tokens
from tokasaurus.server.respond.stream import AnswerStream, ChunkChoice
from tokasaurus.server.respond.versions import weight_spans
from tokasaurus.server.respond.whole import build_usage
from tokasaurus.server.served_model import ServedModel
from tokasaurus.text.json_lines import write_json
from tokasaurus.text.special_stops import find_special_stops
from tokasaurus.text.token_decoder import PROMPT_TAIL_TOKENS

Entry = tuple[float | None, int, str | None]
"""(logprob, token id, text), as SGLang's lists have them."""


def build_generate_answer(
    body: GenerateRequest, prepared: Prepared, results: Sequence[Sequence[FinishedSequence]], model: ServedModel
) -> GenerateAnswer:
    """results: the only sequence of the only request."""
    ((sequence,),) = results
    text = Choice(prepared.requests[0], prepared, model).add(sequence).text
    return _Answer(body, prepared, model).build(sequence, text, sequence.finish_reason)


class GenerateStream(AnswerStream):
    """Each event is an answer with all tokens until then."""

    object_name = ""

    def __init__(self, body: GenerateRequest, prepared: Prepared, model: ServedModel, options: StreamOptions) -> None:
        super().__init__(prepared, model, options)
        self._answer = _Answer(body, prepared, model)
        self._sequence = FinishedSequence()
        self._choice = Choice(prepared.requests[0], prepared, model)
        self._text = ""

    def shows_prompts(self, _deltas: Sequence[tuple[int, SequenceDelta]]) -> bool:
        return self._prepared.return_token_ids

    def events(self, deltas: Sequence[tuple[int, SequenceDelta]]) -> bytes:
        for _, delta in deltas:
            self._sequence.append(delta)
            self._text += self._choice.add(delta).text
        reason = self._sequence.finish_reason if self._sequence.is_finished else None
        answer = self._answer.build(self._sequence, self._text, reason)
        return b"data: %b\n\n" % write_json(answer)

    def _chunk_choices(self, *_arguments: object) -> Sequence[ChunkChoice]:
        raise AssertionError("answers have no choices")


class _Answer:
    """Builds the answers to one body."""

    def __init__(self, body: GenerateRequest, prepared: Prepared, model: ServedModel) -> None:
        self._body = body
        self._prepared = prepared
        (self._request,) = prepared.requests
        self._model = model
        self._name = model.tokenizer.token_text if body.return_text_in_logprobs else lambda _: None

    def build(self, sequence: FinishedSequence, text: str, reason: FinishReason | None) -> GenerateAnswer:
        """text: of all tokens. reason: None before the end."""
        body = self._body
        spans = weight_spans(sequence.weight_versions, len(sequence.token_ids))
        matched = None if reason != "stop" else self._matched(sequence.token_ids)
        usage = build_usage(self._prepared, [[sequence]])
        meta_info: dict[str, Any] = {
            "id": self._prepared.response_id if body.rid is None else body.rid,
            "finish_reason": _finish_reason(reason, matched, len(sequence.token_ids)),
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": sequence.num_cached_tokens,
        }
        if reason is not None:  # not known before
            meta_info |= {"weight_version": spans[-1].version, "weight_versions": spans}
        if sequence.logprobs is not None:
            meta_info |= self._logprobs(sequence)
        prompt_ids = self._request.prompt_ids.tolist() if body.return_prompt_token_ids else None
        return GenerateAnswer(text, sequence.token_ids, prompt_ids, meta_info, usage)

    def _matched(self, token_ids: Sequence[int]) -> int | str | None:
        """The token or the stop string that ended the text; None if a grammar did."""
        request = self._request
        ends = request.stop_token_ids if request.ignore_eos else (*request.stop_token_ids, *self._model.eos_ids)
        if token_ids and token_ids[-1] in ends:
            return token_ids[-1]
        tokenizer = self._model.tokenizer.with_special() if request.shows_special else self._model.tokenizer
        tail = tokenizer.prompt_tail(request.prompt_ids[-PROMPT_TAIL_TOKENS:].tolist())
        special = find_special_stops(tokenizer, request.stop_strings, () if request.shows_special else None)
        decode, stops = (tokenizer.decode, request.stop_strings) if special is None else (special.decode, special.stops)
        text = tail.text_after(decode, token_ids)
        found = max((stop for stop in stops if stop in text), key=text.rfind, default=None)
        return found if special is None or found is None else special.as_given(found)

    def _logprobs(self, sequence: FinishedSequence) -> dict[str, Any]:
        body, prompt = self._body, sequence.prompt_logprobs
        assert sequence.logprobs is not None
        found: dict[str, Any] = {
            "input_token_logprobs": [] if prompt is None else self._of_prompt(prompt),
            "output_token_logprobs": self._entries(sequence.logprobs, sequence.token_ids),
        }
        if body.top_logprobs_num:
            tops = likely_tokens(sequence.top, len(sequence.token_ids))
            found["output_top_logprobs"] = [self._likely(top) for top in tops]
            found["input_top_logprobs"] = [] if prompt is None else self._tops_of_prompt(prompt)
        return found

    def _entries(self, logprobs: Sequence[float | None], token_ids: Sequence[int]) -> list[Entry]:
        pairs = zip(logprobs, token_ids, strict=True)
        return [(logprob, token_id, self._name(token_id)) for logprob, token_id in pairs]

    def _likely(self, top: Sequence[tuple[int, float]]) -> list[Entry]:
        return [(logprob, token_id, self._name(token_id)) for token_id, logprob in top]

    def _of_prompt(self, prompt: PromptLogprobs) -> list[Entry]:
        start = self._body.logprob_start_len
        logprobs: list[float | None] = prompt.logprobs[start:].tolist()
        if start == 0:
            logprobs[0] = None
        return self._entries(logprobs, self._request.prompt_ids[start:].tolist())

    def _tops_of_prompt(self, prompt: PromptLogprobs) -> list[list[Entry] | None]:
        start = self._body.logprob_start_len
        tops = likely_tokens(prompt.top, len(self._request.prompt_ids))[start:]
        found: list[list[Entry] | None] = [self._likely(top[: self._body.top_logprobs_num]) for top in tops]
        if start == 0:
            found[0] = None
        return found


def _finish_reason(reason: FinishReason | None, matched: int | str | None, num_tokens: int) -> dict[str, object] | None:
    match reason:
        case "stop":
            return {"type": reason, "matched": matched}
        case "length":
            return {"type": reason, "length": num_tokens}
        case "abort":
            return {"type": reason, "message": "the request was aborted"}
    return None
