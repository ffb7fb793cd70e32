"""Clients of a server: one implementation of each method, for programs with and without an event loop."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import sys
import threading
import time
import warnings
import weakref
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeAlias, TypeVar, cast, overload

import numpy as np
import orjson
from numpy.typing import NDArray
from typing_extensions import Self, Unpack

from tokasaurus.library.blocking import BulkSession, LoopThread
from tokasaurus.library.bulk import AsyncBulkSession, ClientClosed
from tokasaurus.library.connection import Server, ServerError
from tokasaurus.library.counts import Counts
from tokasaurus.library.map.options import KEYWORDS, MapKeywords, MapOptions, StoredMapKeywords, show_keywords
from tokasaurus.library.map.progress import ShownCall
from tokasaurus.library.map.sources import absolute_paths
from tokasaurus.library.model_files import ModelFiles
from tokasaurus.library.requests import (
    CHAT,
    CLASSIFY,
    COMPLETIONS,
    EMBEDDINGS,
    RERANK,
    Answer,
    BadPrompt,
    Message,
    PooledFormat,
    Prompt,
    RequestFormat,
    RequestLine,
    Schema,
    ScoreFormat,
)
from tokasaurus.library.results import (
    ParsedT,
    Pooled,
    Result,
    Results,
    RowError,
    RowsFailed,
    Score,
    failures_of,
    stacked,
)
from tokasaurus.library.sampling import Sampling

if TYPE_CHECKING:
    from tokasaurus.library.keywords import ChatOptions, CompletionOptions
    from tokasaurus.library.map.outputs import MapSummary
    from tokasaurus.library.map.sources import Rows

Row: TypeAlias = "Prompt | Mapping[str, Any]"
"""A prompt, or a dictionary with "prompt" or "messages" beside other fields."""
AnyResults = TypeVar("AnyResults", bound="Results[Any] | list[Score] | list[Pooled]")
RowResult = TypeVar("RowResult", bound="Result[Any] | Score | Pooled")
MadeResult = TypeVar("MadeResult", bound="Result[Any] | Score | Pooled", covariant=True)
Vectors: TypeAlias = "NDArray[np.float32]"
"""float32 [texts, numbers]."""
_SEE_ERROR = " (their .error says why)"

_MAX_READ_S = 0.05
_MAX_READ_BYTES = 8 << 20
_MAX_READ_ROWS = 256
"""Rows that take longer to read, have more bytes, or are more, are sent before the next ones are read."""


class _RowFormat(Protocol[MadeResult]):
    """How rows become lines, and answers become results: RequestFormat, ScoreFormat and PooledFormat."""

    def line(self, number: int, row: Any, /) -> RequestLine: ...

    def result(self, answer: Answer, key: object, row: Any, /) -> MadeResult: ...

    def failed(self, key: object, row: Any, error: RowError, /) -> MadeResult: ...


class _Flow(Generic[RowResult]):
    """The rows of one call on their way to results. No I/O."""

    def __init__(self, rows: Iterable[tuple[int, Any]], row_format: _RowFormat[RowResult], key: str | None) -> None:
        """rows: with their numbers, which are their keys unless `key` names a field."""
        self._rows = iter(rows)
        self._format = row_format
        self._key = key
        self._open: dict[int, tuple[Any, Any]] = {}
        """(key, row) of the lines without an answer."""
        self.counts = Counts()
        self.is_exhausted = False
        """No row is left."""
        self.failure: ServerError | None = None
        """Why the rows were lost that have no answer."""

    def take(self, room: int) -> tuple[list[RequestLine], list[tuple[int, RowResult]]]:
        """The next rows: at most `room` lines, and the results of rows that cannot be sent, with their numbers."""
        lines: list[RequestLine] = []
        refused: list[tuple[int, RowResult]] = []
        num_bytes = 0
        room = min(room, _MAX_READ_ROWS)
        deadline_s = time.monotonic() + _MAX_READ_S
        while len(lines) < room and len(refused) < room and num_bytes < _MAX_READ_BYTES:
            if (lines or refused) and time.monotonic() > deadline_s:
                break
            number, row = next(self._rows, (-1, ""))
            if number < 0:
                self.is_exhausted = True
                break
            key: Any = None
            try:
                key = self._key_of(number, row)
                line = self._format.line(number, _prompt_of(row))
            except BadPrompt as error:
                refused.append((number, self._format.failed(key, row, RowError(error.code, str(error)))))
            else:
                self._open[number] = key, row
                lines.append(line)
                num_bytes += len(line.body)
        self.counts.num_rows += len(lines) + len(refused)
        self._count(refused)
        return lines, refused

    def results(self, answers: Sequence[Answer]) -> list[tuple[int, RowResult]]:
        """The results of answered lines, with the numbers of their rows."""
        results = []
        for answer in answers:
            number = answer.line.number
            results.append((number, self._format.result(answer, *self._open.pop(number))))
        self._count(results)
        return results

    def _count(self, results: Sequence[tuple[int, RowResult]]) -> None:
        counts = self.counts
        counts.num_finished += len(results)
        for _, result in results:
            if result.error is not None:
                counts.num_errors += 1
                counts.failures.add(result.error.code, result.error.message)
            for sample in result.samples if isinstance(result, Result) else ():
                counts.output_tokens += len(sample.token_ids)

    def lost(self, error: ServerError) -> list[tuple[int, RowResult]]:
        """Results with an error for the rows that were sent and have no answer."""
        self.failure = error
        reason = RowError("server_lost", str(error))
        return [(number, self._format.failed(*row, reason)) for number, row in self._open.items()]

    def _key_of(self, number: int, row: Any) -> Any:
        """Raises BadPrompt."""
        if self._key is None:
            return number
        if not isinstance(row, Mapping) or self._key not in row:
            raise BadPrompt(f"row {number} has no {self._key!r}, which key= names", "row_without_key")
        return row[self._key]


def _absolute(path: str | Path) -> str:
    return str(Path(path).absolute())


class AsyncClient:
    """A client of a running server, for programs with an event loop.

    ```python
    async with AsyncClient("http://127.0.0.1:10210") as client:
        results = await client.generate(["Once upon a time"], Sampling(max_tokens=32))
    ```
    """

    def __init__(
        self, base_url: str = "http://127.0.0.1:10210", *, api_key: str | None = None, concurrency: int | None = None
    ) -> None:
        """base_url: of the server, with or without /v1.
        api_key: by default TOKA_API_KEY of the environment.
        concurrency: most prompts that are at the server at once; None: as many as its scheduler can look ahead over.
        """
        _check_concurrency(concurrency)
        if not isinstance(base_url, str):
            raise TypeError(f"base_url must be a URL, not {type(base_url).__name__}")
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url must begin with http:// or https://, not {base_url!r}")
        self._concurrency = concurrency
        self._address = (base_url, api_key)
        self._server: Server | None = None
        self._model: str | None = None
        self._is_closed = False
        self._sessions = weakref.WeakSet[AsyncBulkSession]()
        """Sessions of calls that may be at work."""
        self._connecting = asyncio.Lock()

    async def __aenter__(self) -> Self:
        try:
            await self.connect()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self.close()

    async def connect(self) -> str:
        """The name of the model that the server serves. Every method connects if this was not called. Raises
        ServerError."""
        async with self._connecting:
            if self._is_closed:
                raise ClientClosed()
            if self._model is None:
                if self._server is None:
                    self._server = self._make_server()
                self._model = await self._server.find_model()
        return self._model

    async def close(self) -> None:
        """Ends its connections. It cannot be used any more."""
        self._is_closed = True
        for session in list(self._sessions):
            session.fail(ClientClosed())
        if self._server is not None:
            await self._server.close()
            self._server = self._model = None

    def end(self) -> None:
        """Ends what it has started, after its connections. Blocks."""

    def __repr__(self) -> str:
        return self._describe(type(self).__name__)

    def _describe(self, class_name: str) -> str:
        """class_name: of this object, or of the one that uses it."""
        *_, place = self._address[0].rpartition("@")  # without a password
        model = f", {self._model}" if self._model else ""
        return f"{class_name}({place}{model}{', closed' if self._is_closed else ''})"

    def _make_server(self) -> Server:
        return Server(*self._address)

    def _find_model_files(self) -> ModelFiles | None:
        """Files of the model, if they are local; None if the model is known by its name alone."""
        return None

    async def generate(
        self,
        prompts: str | Iterable[str | Sequence[int]],
        sampling: Sampling | None = None,
        *,
        schema: Schema[ParsedT] | None = None,
        progress: bool = True,
        raise_on_error: bool = False,
        **options: Unpack[CompletionOptions],
    ) -> Results[ParsedT]:
        """`Client.generate`, as a coroutine."""
        rows = _checked_prompts(prompts)
        return _told(await self._answered(COMPLETIONS, rows, sampling, schema, None, options, progress), raise_on_error)

    async def chat(
        self,
        conversations: str | Iterable[str | Sequence[Message]],
        sampling: Sampling | None = None,
        *,
        schema: Schema[ParsedT] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        progress: bool = True,
        raise_on_error: bool = False,
        **options: Unpack[ChatOptions],
    ) -> Results[ParsedT]:
        """`Client.chat`, as a coroutine."""
        rows = _checked_conversations(conversations)
        return _told(await self._answered(CHAT, rows, sampling, schema, tools, options, progress), raise_on_error)

    async def stream(
        self,
        rows: str | Iterable[Row],
        sampling: Sampling | None = None,
        *,
        key: str | None = None,
        schema: Schema[ParsedT] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncIterator[Result[ParsedT]]:
        """`Client.stream`, as an asynchronous iterator."""
        flow = _Flow(enumerate(_checked_rows(rows)), await self._format(sampling, schema, tools, options), key)
        async for _, result in self._results(flow, self._session("generate")):
            yield result
        _warn_of(flow.counts)

    async def score(
        self,
        prompts: Iterable[Any],
        completions: Iterable[Any],
        *,
        adapter: str | None = None,
        progress: bool = True,
        raise_on_error: bool = False,
    ) -> list[Score]:
        """`Client.score`, as a coroutine."""
        return _told(await self._scored(_checked_pairs(prompts, completions), adapter, progress), raise_on_error)

    async def embed(
        self,
        texts: Iterable[str | Sequence[int]],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        progress: bool = True,
        raise_on_error: bool = False,
    ) -> Vectors:
        """`Client.embed`, as a coroutine."""
        fields = {"dimensions": dimensions, "prompt_name": prompt_name}
        return stacked(_told(await self._pooled(EMBEDDINGS, _checked_texts(texts), fields, progress), raise_on_error))

    async def rerank(
        self,
        query: str,
        documents: Iterable[str],
        *,
        instruction: str | None = None,
        progress: bool = True,
        raise_on_error: bool = False,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """`Client.rerank`, as a coroutine."""
        pairs = [(query, document) for document in _checked_texts(documents)]
        fields = {"instruction": instruction}
        return _ranked(_told(await self._pooled(RERANK, pairs, fields, progress), raise_on_error))

    async def classify(
        self, texts: Iterable[str | Sequence[int]], *, progress: bool = True, raise_on_error: bool = False
    ) -> tuple[list[str | None], Vectors]:
        """`Client.classify`, as a coroutine."""
        return _classified(_told(await self._pooled(CLASSIFY, _checked_texts(texts), {}, progress), raise_on_error))

    async def _pooled(self, url: str, rows: list[Any], fields: Mapping[str, object], progress: bool) -> list[Pooled]:
        """Of each row, in their order; without a warning of errors."""
        row_format = PooledFormat(await self.connect(), url, fields)
        return await self._in_order("embed" if url == EMBEDDINGS else "score", rows, rows, row_format, progress)

    async def _embed_format(self, fields: Mapping[str, object]) -> tuple[PooledFormat, int]:
        """How a job's texts become vectors, and how many numbers these have. fields: of all bodies. Raises
        ServerError, also if the model makes none."""
        (probe,) = await self._pooled(EMBEDDINGS, ["a"], fields, progress=False)
        if probe.error is not None:
            raise ServerError(str(probe.error))
        return PooledFormat(await self.connect(), EMBEDDINGS, fields), len(probe.numbers)

    async def update_weights(
        self,
        directory: str | Path,
        version: str | None = None,
        *,
        partial: bool = False,
        mode: Literal["abort", "wait", "keep"] = "keep",
        clear_cache: bool = True,
    ) -> str:
        """`Client.update_weights`, as a coroutine."""
        await self.connect()
        assert self._server is not None
        directory = _absolute(directory)
        body = {
            **{"weight_dir": directory, "version": version, "partial": partial},
            **{"mode": mode, "clear_cache": clear_cache},
        }
        answer = await self._server.post("/update_weights", body)
        self._note_weights(Path(directory), partial)
        return str(answer["weight_version"])

    def _note_weights(self, directory: Path, is_partial: bool) -> None:
        """The model has these weights now."""

    async def map(self, rows: Rows, output: str | Path | None = None, **keywords: Unpack[StoredMapKeywords]) -> Any:
        """`Client.map` in a thread, which also reads the rows and calls functions of them. If the call is cancelled,
        what has finished is stored."""
        rows, output = absolute_paths(rows), absolute_paths(output)
        await self.connect()
        beside = await asyncio.to_thread(_ClientBeside, self)

        def run() -> Any:
            return beside.map(rows, output, **keywords)

        # A thread of its own: jobs that have all of asyncio's threads would wait for one for ever, which closes them.
        thread = ThreadPoolExecutor(1, "tokasaurus map")
        context = contextvars.copy_context()
        running = asyncio.get_running_loop().run_in_executor(thread, context.run, run)
        try:
            return await asyncio.shield(running)
        finally:
            await asyncio.to_thread(beside.close)
            await asyncio.gather(running, return_exceptions=True)
            thread.shutdown(wait=False)

    async def _format(
        self,
        sampling: Sampling | None,
        schema: Schema[Any] | None,
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, object],
        endpoints: Collection[str] = (COMPLETIONS, CHAT),
    ) -> RequestFormat:
        model = await self.connect()
        return RequestFormat(model, sampling, schema=schema, tools=tools, options=options, endpoints=endpoints)

    def _session(self, call: str) -> AsyncBulkSession:
        """call: what the session is for."""
        assert self._server is not None, "connected"
        session = AsyncBulkSession(self._server, self._concurrency, _job_name(call))
        self._sessions.add(session)
        return session

    async def _answered(
        self,
        endpoint: str,
        rows: list[Any],
        sampling: Sampling | None,
        schema: Schema[Any] | None,
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, object],
        progress: bool,
    ) -> Results[Any]:
        """Results of checked rows, in their order; without a warning of errors."""
        request_format = await self._format(sampling, schema, tools, options, (endpoint,))
        return Results(await self._in_order("generate", rows, rows, request_format, progress))

    async def _scored(self, pairs: list[tuple[Any, Any]], adapter: str | None, progress: bool) -> list[Score]:
        """Scores of checked pairs, in their order; without a warning of errors."""
        prompts = [prompt for prompt, _ in pairs]
        model = await self.connect()
        score_format = ScoreFormat(adapter or model)
        return await self._in_order("score", pairs, prompts, score_format, progress)

    async def _in_order(
        self, call: str, rows: list[Any], prompts: list[Any], row_format: _RowFormat[RowResult], progress: bool
    ) -> list[RowResult]:
        """prompts: of the rows, of which those with a common prefix are sent together."""
        numbers = _in_order_of_prefixes(prompts)
        flow = _Flow([(number, rows[number]) for number in numbers], row_format, None)
        results: dict[int, RowResult] = {}
        session = self._session(call)
        session.num_lines = len(rows)
        shown = ShownCall(len(rows), flow.counts, lambda: session.progress) if progress else nullcontext()
        try:
            with shown:
                async for number, result in self._results(flow, session):
                    results[number] = result  # noqa: PERF403  (what came before an error stays)
        except ServerError:
            if flow.failure is None:
                raise
        reason = RowError("server_lost", str(flow.failure))
        for number in range(len(rows)):
            if number not in results:
                results[number] = row_format.failed(number, rows[number], reason)
        return [results[number] for number in range(len(rows))]

    async def _results(self, flow: _Flow[RowResult], session: AsyncBulkSession) -> AsyncIterator[tuple[int, RowResult]]:
        """As they finish, with the numbers of their rows. Closes the session."""
        try:
            while True:
                lines, refused = flow.take(session.room())
                for result in refused:
                    yield result
                answers = await session.exchange(lines, is_last=flow.is_exhausted)
                if not answers and flow.is_exhausted:
                    return
                for result in flow.results(answers):
                    yield result
        except ServerError as error:
            for result in flow.lost(error):
                yield result
            raise
        finally:
            await session.close()


class Client:
    """A client of a running server.

    ```python
    with Client("http://127.0.0.1:10210") as client:
        for result in client.generate(["Once upon a time", "In a hole"], Sampling(max_tokens=32)):
            print(result.text)
    ```

    Its methods may be called from any thread, from several at once, and where an event loop runs, as in a notebook.
    """

    def __init__(
        self, base_url: str = "http://127.0.0.1:10210", *, api_key: str | None = None, concurrency: int | None = None
    ) -> None:
        """base_url: of the server, with or without /v1.
        api_key: by default TOKA_API_KEY of the environment.
        concurrency: most prompts that are at the server at once; None: as many as its scheduler can look ahead over.

        Raises ServerError if no server answers, and ValueError for what is no URL."""
        self._start(AsyncClient(base_url, api_key=api_key, concurrency=concurrency))

    def _start(self, client: AsyncClient) -> None:
        """Use the client, on a loop in a thread of its own."""
        self._client = client
        self._loop = LoopThread()
        # also called at the interpreter's end, and when nothing refers to this object any more
        self._closing = weakref.finalize(self, _close, client, self._loop)
        try:
            self.model = self._loop.run(client.connect())
            """Name of the model that the server serves."""
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return self._client._describe(type(self).__name__)

    def close(self) -> None:
        """Ends its connections, and the engine if it is its own. It cannot be used any more."""
        self._closing()

    def generate(
        self,
        prompts: str | Iterable[str | Sequence[int]],
        sampling: Sampling | None = None,
        *,
        schema: Schema[ParsedT] | None = None,
        progress: bool = True,
        raise_on_error: bool = False,
        **options: Unpack[CompletionOptions],
    ) -> Results[ParsedT]:
        """Complete prompts. The results are in the order of the prompts.

        prompts: texts, or lists of token ids; a text alone is one prompt.
        sampling: how; by default `Sampling()`.
        schema: a pydantic class, a dataclass or a JSON schema, which every completion then matches; `parsed` is the
        object.
        progress: show how far the call is, on stderr or in the notebook, once it takes longer than three seconds.
        raise_on_error: raise RowsFailed at the end if prompts have errors; its `results` are all that the call has.
        options: other fields of /v1/completions, such as structured_outputs={"regex": "yes|no"}.

        A prompt that cannot be completed has a result with an `error`, and the call ends with one warning that counts
        these. Raises TypeError and ValueError for arguments that are wrong for every prompt."""
        rows = _checked_prompts(prompts)
        answered = self._client._answered(COMPLETIONS, rows, sampling, schema, None, options, progress)
        return _told(self._loop.run(answered), raise_on_error)

    def chat(
        self,
        conversations: str | Iterable[str | Sequence[Message]],
        sampling: Sampling | None = None,
        *,
        schema: Schema[ParsedT] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        progress: bool = True,
        raise_on_error: bool = False,
        **options: Unpack[ChatOptions],
    ) -> Results[ParsedT]:
        """Answer conversations, each a list of messages. The results are in the order of the conversations.

        conversations: lists of messages, such as [{"role": "user", "content": "Hello"}]; a text is one message of a
        user, and a text alone is one conversation.
        sampling, schema, progress, raise_on_error: as for `generate`.
        tools: functions that the model may call, as in OpenAI's API.
        options: other fields of /v1/chat/completions, such as chat_template_kwargs={"enable_thinking": False}.
        """
        rows = _checked_conversations(conversations)
        answered = self._client._answered(CHAT, rows, sampling, schema, tools, options, progress)
        return _told(self._loop.run(answered), raise_on_error)

    def stream(
        self,
        rows: str | Iterable[Row],
        sampling: Sampling | None = None,
        *,
        key: str | None = None,
        schema: Schema[ParsedT] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Unpack[ChatOptions],
    ) -> Iterator[Result[ParsedT]]:
        """Results as they finish. Rows are read as there is room for them, so there may be any number.

        rows: prompts, lists of messages, or dictionaries with "prompt" or "messages" and any other fields; read in the
        thread that takes the results. A text alone is one prompt.
        key: name of a dictionary's field that is the result's key; by default it is the row's number, from 0.
        sampling, schema, tools, options: as for `generate` and `chat`.

        A row that cannot be answered has a result with an `error`; one warning at the end counts them. Raises TypeError
        and ValueError for arguments that are wrong for every row, and what reading the rows raises. If the server is
        lost for good, the rows that have been sent get errors, and ServerError is raised."""
        numbered = enumerate(_checked_rows(rows))
        request_format = self._loop.run(self._client._format(sampling, schema, tools, options))
        return self._stream(_Flow(numbered, request_format, key))

    def score(
        self,
        prompts: Iterable[Any],
        completions: Iterable[Any],
        *,
        adapter: str | None = None,
        progress: bool = True,
        raise_on_error: bool = False,
    ) -> list[Score]:
        """The log-probabilities of given completions, each after its prompt; in the order of the input.

        prompts, completions: of equal length; the two of a pair are both texts, or both lists of token ids. Texts are
        put together before they become tokens.
        adapter: as of `Sampling`. progress, raise_on_error: as for `generate`.

        A pair that cannot be scored has a score with an `error`. Raises TypeError and ValueError for arguments that are
        wrong as a whole."""
        scored = self._client._scored(_checked_pairs(prompts, completions), adapter, progress)
        return _told(self._loop.run(scored), raise_on_error)

    def embed(
        self,
        texts: Iterable[str | Sequence[int]],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        progress: bool = True,
        raise_on_error: bool = False,
    ) -> Vectors:
        """The vectors of texts or token ids, by a model with `task="embed"`; NaN for a text with an error.

        dimensions, prompt_name: as in the HTTP API. progress, raise_on_error: as for `generate`."""
        fields = {"dimensions": dimensions, "prompt_name": prompt_name}
        pooled = self._client._pooled(EMBEDDINGS, _checked_texts(texts), fields, progress)
        return stacked(_told(self._loop.run(pooled), raise_on_error))

    def rerank(
        self,
        query: str,
        documents: Iterable[str],
        *,
        instruction: str | None = None,
        progress: bool = True,
        raise_on_error: bool = False,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Numbers of the documents, best first; and the score of each, in the order of the input, NaN with an error.

        instruction: as in the HTTP API. progress, raise_on_error: as for `generate`."""
        pairs = [(query, document) for document in _checked_texts(documents)]
        pooled = self._client._pooled(RERANK, pairs, {"instruction": instruction}, progress)
        return _ranked(_told(self._loop.run(pooled), raise_on_error))

    def classify(
        self, texts: Iterable[str | Sequence[int]], *, progress: bool = True, raise_on_error: bool = False
    ) -> tuple[list[str | None], Vectors]:
        """The label of each text, and the probabilities of all labels; None and NaN for a text with an error."""
        pooled = self._client._pooled(CLASSIFY, _checked_texts(texts), {}, progress)
        return _classified(_told(self._loop.run(pooled), raise_on_error))

    def update_weights(
        self,
        directory: str | Path,
        version: str | None = None,
        *,
        partial: bool = False,
        mode: Literal["abort", "wait", "keep"] = "keep",
        clear_cache: bool = True,
    ) -> str:
        """Give the model new weights, in place; returns their version. Needs `rl=True`, of an LLM or of the server.

        directory: on the server's machine, with safetensors files of the model's tensors; /dev/shm is memory. It must
        stay until the next update, since an engine that dies reads it again.
        version: a name; None counts on from the last number.
        partial: tensors may be missing, and stay as they are.
        mode: what becomes of prompts that are running: "keep" goes on with them, "wait" finishes them first, "abort"
        ends them with the tokens that they have.
        clear_cache: forget what is cached of all prompts.

        Raises ServerError if nothing was changed; it names the file or tensor that is wrong."""
        return self._loop.run(
            self._client.update_weights(directory, version, partial=partial, mode=mode, clear_cache=clear_cache)
        )

    @overload
    def map(self, rows: Rows, output: str | Path, **keywords: Unpack[StoredMapKeywords]) -> MapSummary: ...

    @overload
    def map(self, rows: Rows, output: None = None, **keywords: Unpack[MapKeywords]) -> Any: ...

    def map(self, rows: Rows, output: str | Path | None = None, **keywords: Unpack[StoredMapKeywords]) -> Any:
        """Answer every row of a data set: its columns are kept, and the answers are columns beside them.

        ```python
        llm.map("questions/*.parquet", "answers", prompt="{question}", key="id", sampling=Sampling(n=4))
        ```

        rows: paths, patterns or directories of Parquet, JSON-lines, CSV or Arrow files; a pandas or Polars DataFrame, a
        pyarrow.Table, a Hugging Face Dataset; or an iterable of dicts, which is read as far as there is room. Files but
        JSON lines and CSV need pyarrow.
        output: a directory, whose files appear whole while the job runs, each with up to 10,000 rows. None: the rows
        come back with their answers, in the type that came in and in its order; files as a pyarrow.Table or, JSON
        lines, as a list of dicts.
        prompt: of a row: a template such as "Q: {question}", the name of a column, or a function of the row, a dict. It
        gives a text, token ids, or messages.
        embed: in place of `prompt`, by a model that makes vectors: the new column `embedding` has those of the texts,
        in Parquet as fixed-size lists of embed_dtype, float32 or float16. `options` may be `dimensions`.
        messages: the same, but a column or a function that gives a list of messages.
        chat: texts of `prompt` are sent as the message of a user, in place of being completed.
        key: a column whose values tell rows apart. None: the row's number in its file.
        sampling, schema, tools, options: as for `generate` and `chat`.
        columns: further columns of the answers, named as the fields of Sample: "token_ids", "logprobs", "seed",
        "reasoning" and "tool_calls", which is there whenever there are tools.
        format: of the output's files, "parquet" or "jsonl"; by default that of the input if it is JSON lines, else
        Parquet.
        prefix: of the names of the new columns: "answer", "finish_reason", "error" and `columns`.
        overwrite: remove the rows that an earlier call has put into the output directory.
        retry_errors: compute the rows again whose stored row has an error, whatever they ask now; all other rows stay.
        progress: show how far the job is, on stderr or in the notebook.

        The new columns: `answer` is a text, or with n > 1 a list of n texts; with a schema it is JSON text.
        `finish_reason` and `columns` are likewise, but for `seed`, which is one number. `error` is null, or says why
        the row has no answer.

        **The same call again goes on where it was**, whatever has ended it: Ctrl-C, a full disk, the death of the
        program, the engine or the machine. Rows that have an answer or an error are not computed again, unless
        `retry_errors` says so. The state is in the directory OUTPUT.toka beside the output. A job whose requests have
        changed is refused with JobChanged.

        Returns a MapSummary, or without `output` the rows with their answers. Raises ValueError, TypeError and
        FileNotFoundError for wrong arguments and files that cannot be read, OutputInUse if another job writes to the
        output, OutputFull and OSError if it cannot be written, and ServerError if the server is lost."""
        from tokasaurus.library.map.job import map_rows

        fields: dict[str, Any] = {**keywords}
        options = MapOptions(**{name: fields.pop(name) for name in KEYWORDS if name in fields})
        model_files = None if output is None else self._client._find_model_files()
        if options.embed is not None:
            pooled_format, size = self._loop.run(self._client._embed_format(fields))
            with self._session("map" if output is None else f"map {Path(output).name}") as session:
                return map_rows(session, pooled_format, rows, output, options, model_files, vector_size=size)
        sampling = Sampling() if options.sampling is None else options.sampling
        if isinstance(sampling, Sampling):  # the format refuses all else
            sampling = dataclasses.replace(sampling, logprobs="logprobs" in options.columns, top_logprobs=0)
        endpoints = (CHAT,) if options.chat or options.messages is not None else (COMPLETIONS, CHAT)
        request_format = self._loop.run(
            self._client._format(sampling, options.schema, options.tools, fields, endpoints)
        )
        with self._session("map" if output is None else f"map {Path(output).name}") as session:
            return map_rows(session, request_format, rows, output, options, model_files)

    def _session(self, call: str) -> BulkSession:
        async def make() -> AsyncBulkSession:
            return self._client._session(call)

        return BulkSession(self._loop, self._loop.run(make()))

    def _stream(self, flow: _Flow[Result[Any]]) -> Iterator[Result[Any]]:
        """`AsyncClient._results` in this thread, which reads the rows."""
        with self._session("generate") as session:
            try:
                while True:
                    lines, refused = flow.take(session.room())
                    yield from (result for _, result in refused)
                    answers = session.exchange(lines, is_last=flow.is_exhausted)
                    if not answers and flow.is_exhausted:
                        break
                    yield from (result for _, result in flow.results(answers))
            except ServerError as error:
                yield from (result for _, result in flow.lost(error))
                raise
        _warn_of(flow.counts)


show_keywords(AsyncClient.map)
show_keywords(Client.map)


class _ClientBeside(Client):
    """A client of the server of an AsyncClient, which may have started it."""

    def __init__(self, client: AsyncClient) -> None:
        borrowed = AsyncClient(concurrency=client._concurrency)
        borrowed._make_server = client._make_server  # type: ignore[method-assign]
        borrowed._find_model_files = client._find_model_files  # type: ignore[method-assign]
        self._start(borrowed)


def _close(client: AsyncClient, loop: LoopThread) -> None:
    """End the client and the thread of its loop."""
    if loop.is_current():  # a garbage collection has come there, and it cannot wait for itself
        threading.Thread(target=_close, args=(client, loop), name="tokasaurus close").start()
        return
    loop.finish(AsyncClient.close(client))
    loop.close()
    client.end()


def _prompt_of(row: Row) -> Prompt:
    if not isinstance(row, Mapping):
        return row
    if ("prompt" in row) == ("messages" in row):
        raise BadPrompt('a row has either "prompt" or "messages"')
    prompt: Prompt = row["prompt"] if "prompt" in row else row["messages"]
    return prompt


def _told(results: AnyResults, raise_on_error: bool) -> AnyResults:
    """The results of a method's call. If there are errors, its caller gets one warning, or RowsFailed is raised."""
    failures = failures_of(result.error for result in results)
    if failures.total():
        summary = failures.summary(len(results))
        if raise_on_error:
            raise RowsFailed(summary, results)
        warnings.warn(RowsFailed(summary + _SEE_ERROR, results), stacklevel=3)
    return results


def _warn_of(counts: Counts) -> None:
    """One warning of the errors of a stream, where its results are taken."""
    if counts.num_errors:
        warnings.warn(RowsFailed(counts.failures.summary(counts.num_rows) + _SEE_ERROR), stacklevel=3)


def _in_order_of_prefixes(prompts: Sequence[Any]) -> list[int]:
    """The numbers of the prompts, such that those with a common prefix are neighbours."""
    texts = [prompt if isinstance(prompt, str) else _written(prompt) for prompt in prompts]
    return sorted(range(len(prompts)), key=texts.__getitem__)


def _written(prompt: Any) -> str:
    """Only to order prompts by it; "" for one that cannot be sent."""
    try:
        return orjson.dumps(prompt, option=orjson.OPT_SERIALIZE_NUMPY).decode()
    except TypeError:
        return ""


def _checked_list(rows: Iterable[Any], name: str) -> list[Any]:
    """Raises TypeError for what is one row in place of several."""
    rows = _checked_rows(rows, name)
    listed = list(rows)
    if listed and isinstance(listed[0], Mapping | int | np.integer):
        raise TypeError(f"{name} must be a list of {name}; for one of them, write [{name[:-1]}]")
    return listed


def _checked_prompts(prompts: Iterable[Any]) -> list[Any]:
    """Raises TypeError if messages are among them."""
    rows = _checked_list(prompts, "prompts")
    for number, row in enumerate(rows):
        if isinstance(row, Mapping) or (isinstance(row, list | tuple) and row and isinstance(row[0], Mapping)):
            raise TypeError(f"prompts[{number}] has messages, which `chat` answers; `generate` completes texts")
    return rows


def _checked_texts(texts: Iterable[Any]) -> list[Any]:
    """Raises TypeError for one text in place of several."""
    if isinstance(texts, str):
        raise TypeError("texts must be a list of texts; for one of them, write [text]")
    return _checked_list(texts, "texts")


def _ranked(rows: list[Pooled]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    scores = np.array([np.nan if row.error is not None else row.numbers[0] for row in rows], np.float32)
    return np.argsort(-scores, kind="stable"), scores


def _classified(rows: list[Pooled]) -> tuple[list[str | None], Vectors]:
    return [row.label for row in rows], stacked(rows)


def _checked_conversations(conversations: Iterable[Any]) -> list[Any]:
    """Raises TypeError if token ids are among them, which have no template."""
    rows = _checked_list(conversations, "conversations")
    for number, row in enumerate(rows):
        if isinstance(row, list | tuple) and row and isinstance(row[0], str | int):
            raise TypeError(
                f"conversations[{number}] must be the text of a message, or a list of messages such as "
                '{"role": "user", "content": …}'
            )
    return rows


def _checked_rows(rows: Iterable[Any], name: str = "rows") -> Iterable[Any]:
    if isinstance(rows, str):  # one prompt, and none for each of its characters
        return [rows]
    if isinstance(rows, bytes | Mapping) or not isinstance(rows, Iterable):
        raise TypeError(f"{name} must be an iterable of {name}, not {type(rows).__name__}")
    # Columns of Arrow consist of objects of its own.
    return cast("list[Any]", rows.to_pylist()) if hasattr(rows, "to_pylist") else rows


def _checked_pairs(prompts: Iterable[Any], completions: Iterable[Any]) -> list[tuple[Any, Any]]:
    first, second = _checked_list(prompts, "prompts"), _checked_list(completions, "completions")
    if len(first) != len(second):
        raise ValueError(f"score: there are {len(first)} prompts and {len(second)} completions")
    return list(zip(first, second, strict=True))


def _job_name(call: str) -> str:
    """What the server's live page calls the lines of this call: by the program's file, if it has one."""
    program = Path(sys.argv[0]).name
    return call if program in ("", "-c", "-m") else f"{program}: {call}"


def _check_concurrency(concurrency: int | None) -> None:
    if concurrency is not None and (type(concurrency) is not int or concurrency < 1):
        raise ValueError(f"concurrency must be a whole number from 1, or None, not {concurrency!r}")
