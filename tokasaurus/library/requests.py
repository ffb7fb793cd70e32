"""Prompts → lines of a bulk request, and their answers → results. No I/O."""

from __future__ import annotations

import base64
import hashlib
import inspect
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, TypeAlias

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError

from tokasaurus.library.results import NO_TOKENS, ParsedT, Pooled, Result, RowError, Sample, Score, ToolCall, row_error
from tokasaurus.library.sampling import Sampling
from tokasaurus.messages.sampling import GENERATE_TOKENS
from tokasaurus.text.exact_json import dumps, loads

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
EMBEDDINGS, RERANK, CLASSIFY = "/v1/embeddings", "/v1/rerank", "/classify"

Message: TypeAlias = Mapping[str, Any]
"""A message of a chat in OpenAI's API: "role", "content", ..."""
Prompt: TypeAlias = "str | Sequence[int] | Sequence[Message]"
"""A text, token ids, or the messages of a chat."""
Schema: TypeAlias = "type[ParsedT] | Mapping[str, Any]"
"""A pydantic class, a dataclass, or a JSON schema."""


class BadPrompt(ValueError):
    """The row cannot be sent. The message says why."""

    def __init__(self, message: str, code: str = "bad_prompt") -> None:
        """code: of the row's error."""
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class RequestLine:
    """One line of a bulk request."""

    number: int
    """Unique in the session."""
    url: str
    body: bytes
    """The request's JSON, without a random seed."""
    seed: int | None = None
    """A random seed, added when the line is sent. It is no part of the request's identity."""

    def encode(self, attempt: int = 1) -> bytes:
        """The line as bytes, with its end. attempt: later attempts have other ids, since a server takes each id
        once."""
        body = self.body if self.seed is None else b'%b,"seed":%d}' % (self.body[:-1], self.seed)
        custom_id = b"%d" % self.number if attempt == 1 else b"%d.%d" % (self.number, attempt)
        return b'{"custom_id":"%b","url":"%b","body":%b}\n' % (custom_id, self.url.encode(), body)

    def identity(self) -> bytes:
        """16 bytes, equal for equal requests: a hash of url and body."""
        return hashlib.blake2b(self.url.encode() + self.body, digest_size=16).digest()


def line_number(custom_id: str | None) -> int:
    """Number of the line with this id, which encoding it made; -1 for no id."""
    return -1 if custom_id is None else int(custom_id.partition(".")[0])


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a line."""

    line: RequestLine
    status: int
    """200, or the status that a single request would have got."""
    body: dict[str, Any]
    """The response's JSON; {"error": {...}} unless the status is 200."""


class RequestFormat:
    """How the prompts of one call become requests, and answers become results."""

    def __init__(
        self,
        model: str,
        sampling: Sampling | None = None,
        *,
        schema: Schema[Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, object] | None = None,
        endpoints: Collection[str] = (COMPLETIONS, CHAT),
    ) -> None:
        """model: the served model's name. schema: the completions are JSON that matches it. tools: functions that a
        chat may call. options: further fields of the bodies, as in the HTTP API. endpoints: which the prompts may need.
        Raises TypeError and ValueError."""
        if sampling is not None and not isinstance(sampling, Sampling):
            raise TypeError(f"sampling must be a Sampling, not {type(sampling).__name__}")
        self.sampling = sampling or Sampling()
        if tools is not None and not (
            isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools)
        ):
            raise TypeError("tools must be a list of dicts, one for each function, as in OpenAI's API")
        self._read: Callable[[str], Any] | None = None
        """Reads the object that a text means; None without a schema."""
        self._has_chats_only = COMPLETIONS not in endpoints
        fields: dict[str, Any] = {"model": self.sampling.adapter or model, **self.sampling.shared_fields()}
        if schema is not None:
            json_schema, self._read = _json_schema(schema)
            named = {"name": "answer", "schema": json_schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": named}
        if options:
            _check_options(options, endpoints, schema is not None)
            fields |= options
        # Packed, since a list of objects for each token would take longer than sampling it.
        fields["logprobs_in_fingerprint"] = True
        with_logprobs = self.sampling.logprobs
        top = self.sampling.top_logprobs
        completion = {"logprobs": top} if with_logprobs else {}
        chat = {"logprobs": True, "top_logprobs": top} if with_logprobs else {}
        max_tokens = {} if self.sampling.max_tokens is not None else {"max_tokens": GENERATE_TOKENS}
        self.asks_tools = bool(tools)
        tool_fields = {"tools": list(tools)} if tools else {}
        self._completion_end = _rest(fields | completion | max_tokens)
        self._chat_end = _rest(fields | chat | tool_fields)
        if options:
            prompts = {COMPLETIONS: b'{"prompt":"a"', CHAT: b'{"messages":[{"role":"user","content":"a"}]'}
            ends = {COMPLETIONS: self._completion_end, CHAT: self._chat_end}
            _check_values({endpoint: prompts[endpoint] + ends[endpoint] for endpoint in endpoints}, options)

    def line(self, number: int, prompt: Prompt) -> RequestLine:
        """The request of a prompt. Raises BadPrompt."""
        seed = None if self.sampling.seed is not None else secrets.randbits(63)
        if isinstance(prompt, str) and self._has_chats_only:
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, str):
            if self.asks_tools:
                raise BadPrompt("tools need messages: a prompt has no template that shows them")
            return RequestLine(number, COMPLETIONS, b'{"prompt":' + _dump(prompt) + self._completion_end, seed)
        if isinstance(prompt, np.ndarray):
            prompt = prompt.tolist()
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise BadPrompt(f"a prompt is a text, a list of token ids or a list of messages, not {_kind(prompt)}")
        if not prompt:
            raise BadPrompt("the list of token ids or messages is empty")
        if isinstance(prompt[0], Mapping):
            return RequestLine(number, CHAT, b'{"messages":' + _dump(_messages(prompt)) + self._chat_end, seed)
        ids = list(map(_refuse_token_unless_int, prompt))
        return RequestLine(number, COMPLETIONS, b'{"prompt":' + _dump(ids) + self._completion_end, seed)

    @staticmethod
    def failed(key: object, row: object, error: RowError) -> Result:
        """The result of a row without an answer."""
        return Result(key, row, (), error)

    def result(self, answer: Answer, key: object, row: object) -> Result:
        """The result of an answer; its error if the server answered one."""
        if answer.status != 200:
            return Result(key, row, (), row_error(answer.status, answer.body))
        try:
            return Result(key, row, self._samples(answer))
        except _UNREADABLE as error:
            return Result(key, row, (), _unreadable(answer, error))

    def _samples(self, answer: Answer) -> tuple[Sample, ...]:
        body = answer.body
        packed = orjson.loads(body["system_fingerprint"])
        usage = body["usage"]
        cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        seed = self.sampling.seed if answer.line.seed is None else answer.line.seed
        assert seed is not None, "either the user or the line has one"
        samples = []
        for index, choice in enumerate(body["choices"]):
            calls: tuple[ToolCall, ...] = ()
            if answer.line.url == CHAT:
                message = choice["message"]
                text = message["content"] or ""
                reasoning = message.get("reasoning_content")
                calls = tuple(
                    ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
                    for call in message.get("tool_calls") or ()
                )
            else:
                text = choice["text"]
                reasoning = find_reasoning(text)
            parsed, parse_error = (None, None) if calls or self._read is None else _parse(self._read, text)
            if parse_error is not None and choice["finish_reason"] == "length":
                parse_error = f"the text was cut at its limit of tokens: {parse_error}"
            token_ids = np.array(packed["completion_ids"][index], np.int32)
            weights = choice.get("weight_versions")
            samples.append(
                Sample(
                    text,
                    token_ids,
                    _unpack(packed["packed_chosen_logprobs"], index, np.float32),
                    choice["finish_reason"],
                    seed,
                    index,
                    parsed,
                    parse_error,
                    calls,
                    reasoning,
                    usage["prompt_tokens"],
                    cached_tokens,
                    _rows(_unpack(packed["packed_topk_indices"], index, np.int32), len(token_ids)),
                    _rows(_unpack(packed["packed_topk_logprobs"], index, np.float32), len(token_ids)),
                    weights[-1]["version"] if weights else None,
                )
            )
        return tuple(samples)


def _parse(read: Callable[[str], Any], text: str) -> tuple[Any, str | None]:
    """(the object that the text means, None), or (None, why it means none)."""
    try:
        return read(text), None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        return None, f"{place}: {first['msg']}" if place else str(first["msg"])
    except orjson.JSONDecodeError as error:
        return None, f"not valid JSON: {error}"
    except Exception as error:  # of the class's own validators, which must not end the call
        return None, f"{type(error).__name__}: {error}"


class ScoreFormat:
    """How pairs of a prompt and a completion become requests, and answers become scores."""

    def __init__(self, model: str) -> None:
        fields = {"model": model, "echo": True, "max_tokens": 0, "logprobs": 0, "return_token_ids": True}
        self._end = _rest(fields)

    def line(self, number: int, pair: tuple[Any, Any]) -> RequestLine:
        """pair: a prompt and its completion, both texts, or both token ids. Raises BadPrompt."""
        prompt, completion = pair
        if isinstance(prompt, str) and isinstance(completion, str):
            return RequestLine(number, COMPLETIONS, b'{"prompt":' + _dump(prompt + completion) + self._end)
        ids: list[int] = []
        for part in (prompt, completion):
            listed = part.tolist() if isinstance(part, np.ndarray) else part
            if not isinstance(listed, Sequence) or isinstance(listed, bytes | bytearray):
                raise BadPrompt(f"a prompt and its completion are texts or lists of token ids, not {_kind(listed)}")
            if isinstance(listed, str):
                raise BadPrompt("a prompt and its completion are both texts or both token ids, and one is a text")
            ids += map(_refuse_token_unless_int, listed)
        return RequestLine(number, COMPLETIONS, b'{"prompt":' + _dump(ids) + self._end)

    @staticmethod
    def failed(_key: object, _pair: object, error: RowError) -> Score:
        """The score of a pair without an answer."""
        return Score(*NO_TOKENS, error)

    @staticmethod
    def result(answer: Answer, _key: object, pair: tuple[Any, Any]) -> Score:
        """The score of an answer; its error if the server answered one."""
        if answer.status != 200:
            return Score(*NO_TOKENS, row_error(answer.status, answer.body))
        try:
            prompt, _ = pair
            choice = answer.body["choices"][0]
            token_ids, logprobs = choice["prompt_token_ids"], choice["logprobs"]
            first = len(prompt)
            if isinstance(prompt, str):
                offsets = [*logprobs["text_offset"], len(choice["text"])]
                # the first token whose text ends in the completion
                first = next((index for index, end in enumerate(offsets[1:]) if end > len(prompt)), len(token_ids))
            values = np.array(logprobs["token_logprobs"][first:], np.float32)  # null for the first token of all: NaN
            return Score(np.array(token_ids[first:], np.int32), values)
        except _UNREADABLE as error:
            return Score(*NO_TOKENS, _unreadable(answer, error))


class PooledFormat:
    """How texts, or pairs of a query and a document, become requests, and answers become vectors, probabilities or
    scores."""

    asks_tools = False

    def __init__(self, model: str, url: str, fields: Mapping[str, object]) -> None:
        """url: EMBEDDINGS, RERANK of pairs, or CLASSIFY. fields: of all bodies; those that are None are left out."""
        own: dict[str, object] = {"encoding_format": "base64"} if url == EMBEDDINGS else {}
        own |= {"return_documents": False} if url == RERANK else {}
        self._url = url
        self._end = _rest({"model": model, **own, **{name: each for name, each in fields.items() if each is not None}})

    def line(self, number: int, row: Any) -> RequestLine:
        """row: a text or token ids; or a pair of texts. Raises BadPrompt."""
        if self._url == RERANK:
            query, document = row
            if not isinstance(document, str):
                raise BadPrompt(f"a document is a text, not {_kind(document)}")
            body = b'{"query":%b,"documents":%b' % (_dump(query), _dump([document]))
            return RequestLine(number, RERANK, body + self._end)
        given = row.tolist() if isinstance(row, np.ndarray) else row
        if not isinstance(given, str):
            if not isinstance(given, Sequence) or isinstance(given, bytes | bytearray):
                raise BadPrompt(f"a text is a str or a list of token ids, not {_kind(given)}")
            given = list(map(_refuse_token_unless_int, given))
        return RequestLine(number, self._url, b'{"input":' + _dump(given) + self._end)

    @staticmethod
    def failed(_key: object, _row: object, error: RowError) -> Pooled:
        """Of a row without an answer."""
        return Pooled(np.zeros(0, np.float32), error=error)

    def result(self, answer: Answer, key: object, row: object) -> Pooled:
        """Of an answer; its error if the server answered one."""
        if answer.status != 200:
            return self.failed(key, row, row_error(answer.status, answer.body))
        try:
            if self._url == EMBEDDINGS:
                return Pooled(unpacked_vector(answer.body["data"][0]["embedding"]))
            if self._url == RERANK:
                return Pooled(np.array([answer.body["results"][0]["relevance_score"]], np.float32))
            (found,) = answer.body["data"]
            return Pooled(np.array(found["probs"], np.float32), str(found["label"]))
        except _UNREADABLE as error:
            return self.failed(key, row, _unreadable(answer, error))


def unpacked_vector(packed: str) -> NDArray[np.float32]:
    """[D], of an embedding in base64."""
    return np.frombuffer(base64.b64decode(packed), "<f4")


_UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, OverflowError)
"""What reading an answer of another form raises."""


def _unreadable(answer: Answer, error: Exception) -> RowError:
    """The error of a row whose answer has status 200 and is not of this API."""
    reason = f"the server's answer cannot be read: {type(error).__name__}: {error}"
    return RowError("bad_answer", reason, None, answer.status)


def find_reasoning(text: str) -> str | None:
    """The reasoning at the start of a completion, whose prompt has no template that names its marks; None if there is
    none, wherever else in the text such marks are."""
    if not text.lstrip().startswith(("<", "[")):
        return None
    # here, since they import tokenizers
    from tokasaurus.server.tools.reasoning import ReasoningReader
    from tokasaurus.text.token_decoder import REASONING_MARKS

    reader = ReasoningReader(REASONING_MARKS, "before")
    reasoning = reader.add(text)[0] + reader.finish()[0]
    return reasoning if reader.num_characters else None


# Fields that follow from the arguments, or that results are read from.
OWN_FIELDS = (
    *("model", "prompt", "messages", "tools", "stream", "stream_options"),
    *("logprobs_in_fingerprint", "return_token_ids", "prompt_logprobs", "echo", "best_of", "max_completion_tokens"),
    *("return_tokens_as_token_ids", "return_routed_experts", "routed_experts_prompt_start"),
)


_GRAMMAR_FIELDS = (
    *("response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("json_schema", "regex", "ebnf", "grammar"),
)


def _check_options(options: Mapping[str, object], endpoints: Collection[str], has_schema: bool) -> None:
    """Raises TypeError for a field that no body has, and for one that something else states."""
    # Here, since the models of bodies take a moment to be built.
    from tokasaurus.server.protocol.chat import ChatCompletionRequest
    from tokasaurus.server.protocol.completions import CompletionRequest

    bodies = {COMPLETIONS: CompletionRequest.model_fields, CHAT: ChatCompletionRequest.model_fields}
    for name in options:
        if name in inspect.signature(Sampling).parameters:
            raise TypeError(f"options: {name} belongs into Sampling")
        if name in OWN_FIELDS:
            raise TypeError(f"options: {name} cannot be chosen")
        if not any(name in bodies[endpoint] for endpoint in endpoints):
            raise TypeError(f"there is no argument {name!r}, and no field of this name in {' or '.join(endpoints)}")
        if has_schema and name in _GRAMMAR_FIELDS:
            raise TypeError(f"options: {name} cannot be combined with schema")


def _check_values(bodies: Mapping[str, bytes], options: Mapping[str, object]) -> None:
    """Raises ValueError if options have values that no endpoint takes. bodies: with them, by endpoint."""
    from tokasaurus.server.errors import ApiError
    from tokasaurus.server.json_values import validate_body
    from tokasaurus.server.protocol.chat import ChatCompletionRequest
    from tokasaurus.server.protocol.completions import CompletionRequest

    refused = []
    for endpoint, body in bodies.items():
        model = CompletionRequest if endpoint == COMPLETIONS else ChatCompletionRequest
        if options.keys() <= model.model_fields.keys():
            try:
                validate_body(loads(body), model)
            except ApiError as error:
                refused.append(error.message)
            else:
                return
    if refused:
        raise ValueError(f"options: {refused[0]}")


def _json_schema(schema: Schema[Any]) -> tuple[Mapping[str, Any], Callable[[str], Any]]:
    """(the JSON schema, what reads a text that matches it). Raises TypeError and ValueError."""
    if isinstance(schema, Mapping):
        return schema, loads
    try:
        if isinstance(schema, type) and issubclass(schema, BaseModel):
            return schema.model_json_schema(), schema.model_validate_json
        if isinstance(schema, type) and is_dataclass(schema):
            adapter = TypeAdapter(schema)
            return adapter.json_schema(), adapter.validate_json
    except (PydanticInvalidForJsonSchema, PydanticSchemaGenerationError) as error:
        raise ValueError(f"schema: {schema.__name__} has no JSON schema: {error.message}") from None
    raise TypeError(f"schema must be a pydantic class, a dataclass or a JSON schema, not {_kind(schema)}")


def _rest(fields: Mapping[str, Any]) -> bytes:
    """The fields after the first one of a JSON object. Raises ValueError."""
    try:
        return b"," + dumps(fields)[1:]
    except TypeError as error:  # orjson's error for what no JSON can be
        raise ValueError(f"a field of the request cannot be sent: {error}") from None


def _dump(value: object) -> bytes:
    try:
        return dumps(value)
    except TypeError as error:
        raise BadPrompt(f"the prompt cannot be sent: {error}") from None


def _messages(messages: Sequence[Any]) -> list[Any]:
    return [dict(message) if isinstance(message, Mapping) else message for message in messages]


def _refuse_token_unless_int(token: Any) -> int:
    return int(token) if isinstance(token, int | np.integer) else _refuse_token(token)


def _refuse_token(token: object) -> int:
    raise BadPrompt(f"a list of token ids contains {_kind(token)}")


def _kind(value: object) -> str:
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _unpack(values: Sequence[str] | None, index: int, dtype: type[Any]) -> Any:
    return None if values is None else np.frombuffer(base64.b64decode(values[index]), np.dtype(dtype).newbyteorder("<"))


def _rows(values: Any, num_rows: int) -> Any:
    return None if values is None else values.reshape(num_rows, -1) if num_rows else values.reshape(0, 0)
