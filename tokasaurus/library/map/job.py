"""The loop of `map`: rows → prompts → requests → answers → output."""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from tokasaurus.library.blocking import BulkSession
from tokasaurus.library.bulk import ClientClosed
from tokasaurus.library.connection import ServerError
from tokasaurus.library.counts import Counts
from tokasaurus.library.map.answers import VECTOR_DTYPES, AnswerNames, answer_names, further_values
from tokasaurus.library.map.journal import Journal, KeySet
from tokasaurus.library.map.options import MapOptions
from tokasaurus.library.map.outputs import NO_REQUEST, CollectedOutput, Output, StoredOutput
from tokasaurus.library.map.progress import MapProgress
from tokasaurus.library.map.prompts import NoPrompt, Prompts
from tokasaurus.library.map.rows import (
    Row,
    RowBatch,
    Source,
    column_keys,
    default_keys,
    import_arrow,
    without_surrogates,
)
from tokasaurus.library.map.shards import FORMATS, MapRow, make_format
from tokasaurus.library.map.sources import open_source
from tokasaurus.library.model_files import ModelFiles
from tokasaurus.library.requests import Answer, BadPrompt, PooledFormat, RequestFormat, RequestLine
from tokasaurus.library.results import RowError, row_error
from tokasaurus.processes.group import STOP_NUMBERS
from tokasaurus.text.exact_json import loads

_MAX_WAIT_S = 0.5
"""Longest time between two looks at the clock, the journal and Ctrl-C."""
_MAX_ASK_S = 0.5
"""Rows whose prompts take longer are sent in parts: the first ones are computed while the user's function is called."""
_NO_IDENTITY = NO_REQUEST.to_bytes(16, "little")
_MAX_ERROR_CHARS = 2_000


def map_rows(
    session: BulkSession,
    request_format: RequestFormat | PooledFormat,
    rows: object,
    output: str | Path | None,
    options: MapOptions,
    model_files: ModelFiles | None = None,
    vector_size: int | None = None,
) -> object:
    """Answer every row; see `Client.map`. Call it from the thread that has the rows.

    model_files: of the model that answers, if they are known. vector_size: numbers of a vector, with a PooledFormat.

    Returns a MapSummary if there is an output, else the rows with their answers in the type that came in. Raises
    ValueError, TypeError and FileNotFoundError for wrong arguments, JobChanged, OutputInUse, OutputFull, RowMisfit, and
    ServerError if the server is lost: then, as after every error, what has finished is stored, and the same call goes
    on."""
    if request_format.asks_tools:
        options = dataclasses.replace(options, columns=[*options.columns, "tool_calls"])
    output = None if output is None else Path(output).expanduser().absolute()  # it may be written to after a chdir
    source, prompts, names, format_name = check_arguments(rows, output, options)
    if request_format.asks_tools and prompts.is_text and not options.chat:
        raise ValueError("tools need messages: chat=True sends the prompt as the message of a user")
    # All that the rows' requests have in common.
    if isinstance(request_format, PooledFormat):
        names = dataclasses.replace(names, vector_size=vector_size, vector_dtype=options.embed_dtype)
        request = loads(request_format.line(0, "").body)
        request["input"] = f"{options.embed_dtype}[{vector_size}]"
    else:
        request = loads(request_format.line(0, [{"role": "user", "content": ""}]).body)
        del request["messages"]
    is_list = request.get("n", 1) > 1
    stored: Output
    if output is None:
        stored = CollectedOutput(source, names, is_list)
    else:
        _check_apart(source, output)
        settings = {
            "request": request,
            "key": options.key,
            "format": format_name,
            "prefix": options.prefix,
            "answer_columns": list(names.fields),
            "columns": _columns(source, format_name),
            "files": [source.row_origin(path) for path in source.paths] if options.key is None else None,
            "prompt": prompts.description,
            "model_files": None if model_files is None else dataclasses.asdict(model_files),
        }
        shards = make_format(format_name, source, names, is_list)
        journal = Journal(output, settings, shards, options.overwrite, options.retry_errors)
        stored = StoredOutput(journal, shards, prompts.description)
    shown = MapProgress(source.num_rows, options.progress)
    return _Job(session, request_format, source, prompts, stored, options.key, names.fields, is_list, shown).run()


def check_arguments(rows: object, output: Path | None, options: MapOptions) -> tuple[Source, Prompts, AnswerNames, str]:
    """(the opened rows, their prompts, the names of the new columns, the format of files), from arguments of
    `map_rows`, which says what they raise."""
    if output is None:
        for name in ("format", "overwrite", "retry_errors"):
            value = getattr(options, name)
            if value:
                raise ValueError(f"{name}={value!r}: only with an output directory")
    if options.overwrite and options.retry_errors:
        raise ValueError("retry_errors=True: overwrite=True leaves no rows that could have errors")
    source = open_source(rows, options.key, output)
    prompts = Prompts(source, options.prompt, options.messages, options.chat, options.embed)
    if options.embed_dtype not in VECTOR_DTYPES:
        raise ValueError(f"embed_dtype={options.embed_dtype!r}: must be {' or '.join(VECTOR_DTYPES)}")
    for name in ("sampling", "schema", "tools") if options.embed is not None else ():
        if getattr(options, name) is not None:
            raise ValueError(f"{name}: is for answers, and embed= has none")
    names = answer_names(source.columns, options.prefix, options.columns, options.embed is not None)
    if options.format is not None and options.format not in FORMATS:
        raise ValueError(f"format={options.format!r}: must be {' or '.join(FORMATS)}")
    are_dicts_of_files = bool(source.paths) and source.schema is None
    format_name = options.format or ("jsonl" if are_dicts_of_files else "parquet")
    if output is not None and format_name == "parquet":
        import_arrow("a Parquet output")
    return source, prompts, names, format_name


def _check_apart(source: Source, output: Path) -> None:
    """Raises ValueError if the output's files would be read as rows."""
    directory = output.expanduser().resolve()
    for path in source.paths:
        if Path(path).resolve().is_relative_to(directory):
            raise ValueError(f"output={output}: has {path}, which is one of the files to read")


def _columns(source: Source, format_name: str) -> list[str] | None:
    """What must not change from call to call: names of columns, with their types if files of the output have types;
    None for dicts, whose columns are known once they are read."""
    if source.schema is None:
        return None
    return [f"{field.name}: {field.type}" if format_name == "parquet" else field.name for field in source.schema]


@dataclasses.dataclass(slots=True)
class _OpenBatch:
    """A batch whose rows become requests."""

    batch: RowBatch
    hashes: npt.NDArray[np.uint64]
    """[rows] of the keys."""
    rows: Sequence[Row]
    """The rows, with the columns that prompts need."""
    num_asked: int = 0
    """Rows, from the first one on, that have their request, or the reason why there is none."""

    def rows_to_come(self) -> Iterator[MapRow]:
        batch = self.batch
        return (
            MapRow(batch.first_number + index, batch, index, 0, 0) for index in range(self.num_asked, len(self.rows))
        )


class _Job:
    """One call."""

    def __init__(
        self,
        session: BulkSession,
        request_format: RequestFormat | PooledFormat,
        source: Source,
        prompts: Prompts,
        output: Output,
        key: str | None,
        further: Sequence[str],
        is_list: bool,
        progress: MapProgress,
    ) -> None:
        self._session = session
        self._format = request_format
        self._source = source
        self._prompts = prompts
        self._output = output
        self._key = key
        self._further = further
        """Further columns of the answers."""
        self._is_list = is_list
        self._progress = progress
        self._keys = KeySet()
        self._batches = source.batches()
        self._batch: _OpenBatch | None = None
        """None between two batches."""
        self._is_read = False
        self._unsent: deque[RequestLine] = deque()
        self._unfinished: dict[int, MapRow] = {}
        """Rows with a request, in flight or unsent, by line number."""
        self._failed: list[MapRow] = []
        """Rows without a request that are to be added next."""
        self._counts = Counts()
        self._wait_s = _MAX_WAIT_S
        self._is_storing = False
        """Whether rows have finished that are not in the output yet."""

    def run(self) -> object:
        """What `map_rows` returns."""
        started_s = time.monotonic()
        if self._source.num_rows is not None:  # rows without a prompt, not known yet, will send no line
            self._session.announce(max(0, self._source.num_rows - self._output.num_done))
        try:
            with _delayed_signals() as signals, self._progress:
                if self._output.num_done:
                    self._progress.note(f"{self._output.num_done:,} rows are done already")
                while not self._step():
                    if signals.have_come():
                        self._store(self._session.exchange([], timeout_s=0.0))
                        signals.deliver()
                num_left = self._output.num_done - self._counts.num_skipped
                if num_left:
                    self._progress.note(f"{num_left:,} rows of the output are not in the input")
                if self._output.num_mended:
                    self._progress.note(
                        f"{self._output.num_mended:,} rows that had no prompt have one now; they keep their errors "
                        "unless the call has retry_errors"
                    )
                result = self._output.complete(self._counts, time.monotonic() - started_s)
                signals.deliver()
            return result
        except BaseException:
            self._output.stop(is_orderly=not self._is_storing)
            raise

    def _step(self) -> bool:
        """Read some rows, send some, and store what has arrived. Returns whether that was all."""
        room = self._session.room()
        if not self._is_read and len(self._unsent) < room:
            self._read_rows()
        lines = [self._unsent.popleft() for _ in range(min(room, len(self._unsent)))]
        is_last = self._is_read and not self._unsent
        try:
            answers = self._session.exchange(lines, is_last, min(self._wait_s, _MAX_WAIT_S))
        except ServerError as error:
            self._lose_rest(error)
            return True
        self._store(answers)
        return is_last and not self._unfinished

    def _read_rows(self) -> None:
        """Put lines of some rows of the next batch, or of the rows that it has left, to the unsent ones. Rows that need
        none are stored."""
        if self._batch is None:
            self._batch = self._read_batch()
            if self._batch is None:
                self._is_read = True
                return
        batch, first = self._batch.batch, self._batch.num_asked
        asked = self._ask(self._batch)
        hashes = self._batch.hashes[first : first + len(asked)]
        hashed = [line.identity() if isinstance(line, RequestLine) else _NO_IDENTITY for line in asked]
        identities = np.frombuffer(b"".join(hashed), "<u8")[::2]
        is_done, finished = self._output.skip_done(batch, first, hashes, identities)
        self._batch.num_asked += len(asked)
        if self._batch.num_asked == batch.num_rows:
            self._batch = batch.dicts = None
        rows = zip(asked, is_done.tolist(), hashes.tolist(), identities.tolist(), strict=True)
        lines: list[RequestLine] = []
        failed: list[MapRow] = []
        for index, (line, is_skipped, key_hash, identity) in enumerate(rows, first):
            if is_skipped:
                continue
            row = MapRow(batch.first_number + index, batch, index, key_hash, identity)
            if isinstance(line, RequestLine):
                lines.append(line)
                self._unfinished[line.number] = row
            else:
                _fail(row, line)
                failed.append(row)
        lines.sort(key=attrgetter("body"))  # so that rows with a common prefix are neighbours
        self._unsent.extend(lines)
        self._counts.num_skipped += len(asked) - len(lines) - len(failed)
        with self._storing():
            self._failed = failed
            self._add(finished, is_new=False)
            self._failed = []
            self._add(failed)

    def _read_batch(self) -> _OpenBatch | None:
        """None if there are no more."""
        batch = next(self._batches, None)
        if batch is None:
            return None
        self._counts.num_rows += batch.num_rows
        hashes = self._hash_keys(batch)
        self._output.prepare(batch)
        return _OpenBatch(batch, hashes, batch.rows(self._prompts.columns))

    def _hash_keys(self, batch: RowBatch) -> npt.NDArray[np.uint64]:
        """[rows] of the keys. A row without a key of its own is an error, and told apart by its number."""
        hashes = default_keys(self._source, batch)
        if self._key is None:
            return hashes
        found, wrong = column_keys(batch, self._key)
        valid = np.array([index for index in range(batch.num_rows) if index not in wrong], np.int64)
        repeated = valid[self._keys.add(found[valid])].tolist()
        if repeated:
            values = batch.column(self._key)
            for index in repeated:
                wrong[index] = f"{batch.place(index)}: its key {values[index]!r} is that of an earlier row"
        batch.errors = wrong | batch.errors
        is_own = np.ones(batch.num_rows, np.bool_)
        is_own[list(wrong)] = False
        return np.where(is_own, found, hashes)

    def _ask(self, opened: _OpenBatch) -> list[RequestLine | RowError]:
        """The line of each of the next rows, or why it has none."""
        number, errors = opened.batch.first_number, opened.batch.errors
        make, to_line = self._prompts.make, self._format.line
        asked: list[RequestLine | RowError] = []
        deadline_s = time.monotonic() + _MAX_ASK_S
        for index in range(opened.num_asked, len(opened.rows)):
            if asked and time.monotonic() > deadline_s:
                break
            row = opened.rows[index]
            if index in errors:
                asked.append(RowError("bad_row", errors[index]))
                continue
            try:
                asked.append(to_line(number + index, make(row)))
            except NoPrompt as error:
                asked.append(RowError("no_prompt", str(error)))
            except BadPrompt as error:
                asked.append(RowError(error.code, str(error)))
        return asked

    def _store(self, answers: Sequence[Answer]) -> None:
        with self._storing():
            self._add([self._answered(answer) for answer in answers])
            self._wait_s = self._output.tick(self._rows_to_come)
        self._progress.update(self._counts, self._session.progress())

    def _add(self, rows: list[MapRow], is_new: bool = True) -> None:
        if rows:
            self._output.add(rows, self._rows_to_come, is_new)
        if is_new:
            self._counts.num_finished += len(rows)
            for row in rows:
                if row.error is not None:
                    self._counts.num_errors += 1
                    self._counts.failures.add(row.error_code or "unknown", row.error)

    def _rows_to_come(self) -> Iterator[MapRow]:
        unasked = () if self._batch is None else self._batch.rows_to_come()
        return chain(self._unfinished.values(), self._failed, unasked)

    @contextmanager
    def _storing(self) -> Iterator[None]:
        """Wraps what must happen as a whole, so that the output has all rows that have finished."""
        self._is_storing = True
        yield
        self._is_storing = False

    def _answered(self, answer: Answer) -> MapRow:
        """The row of an answer, with it."""
        row = self._unfinished.pop(answer.line.number)
        body = answer.body
        if answer.status != 200:
            return _fail(row, row_error(answer.status, body))
        try:
            if isinstance(self._format, PooledFormat):
                row.answer = body["data"][0]["embedding"]
                self._counts.prompt_tokens += body["usage"]["prompt_tokens"]
                return row
            texts = [_text_of(choice) for choice in body["choices"]]
            reasons = [choice["finish_reason"] for choice in body["choices"]]
            if self._further:
                assert isinstance(self._format, RequestFormat), "vectors have no further columns"
                result = self._format.result(answer, None, None)
                if result.error is not None:
                    return _fail(row, result.error)
                row.more = further_values(result.samples, self._further, self._is_list)
            usage = body["usage"]
            self._counts.prompt_tokens += usage["prompt_tokens"]
            self._counts.output_tokens += usage["completion_tokens"]
            row.answer, row.finish_reason = (texts, reasons) if self._is_list else (texts[0], reasons[0])
        except (LookupError, TypeError) as error:
            reason = f"the server's answer cannot be read: {type(error).__name__}: {error}"
            return _fail(row, RowError("bad_answer", reason))
        return row

    def _lose_rest(self, error: ServerError) -> None:
        """No more answers come: without an output directory, rows without an answer get the error, unless the user has
        closed the client; with one, it is raised, and the same call goes on."""
        if self._output.goes_on:
            raise ServerError(f"{error}; what has finished is stored, and the same call goes on") from None
        if isinstance(error, ClientClosed):
            raise error  # reading the rest of the rows may take for ever, and nobody wants them
        self._unsent.clear()
        while not self._is_read:
            self._read_rows()
        lost = list(self._unfinished.values())
        self._unfinished.clear()
        for row in lost:
            _fail(row, RowError("server_lost", str(error)))
        with self._storing():
            self._add(lost)


def _text_of(choice: dict[str, Any]) -> str | None:
    text: str | None = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


def _fail(row: MapRow, error: RowError) -> MapRow:
    """The row, with the error as it is stored: its message may quote any text of the row."""
    text = error.message
    text = text if len(text) <= _MAX_ERROR_CHARS else text[: _MAX_ERROR_CHARS - 3] + "..."
    row.error, row.error_code = cast(str, without_surrogates(text)), error.code
    return row


class _Signals:
    """Signals that have come, and whose handlers are still to be called."""

    def __init__(self) -> None:
        self._come: list[Callable[[], object]] = []

    def have_come(self) -> bool:
        return bool(self._come)

    def come(self, handle: Callable[[], object]) -> None:
        self._come.append(handle)

    def deliver(self) -> None:
        come, self._come = self._come, []
        for handle in come:
            handle()


@contextmanager
def _delayed_signals() -> Iterator[_Signals]:
    """Within the context, the handlers of signals that end a program, such as the one that raises KeyboardInterrupt,
    are called where the job calls `deliver`. The second signal is not delayed."""
    signals = _Signals()
    old: dict[signal.Signals, Callable[[int, FrameType | None], object]] = {}

    def come(number: int, frame: FrameType | None) -> None:
        handler = old[signal.Signals(number)]
        if signals.have_come():
            handler(number, frame)
        else:
            signals.come(lambda: handler(number, frame))

    if threading.current_thread() is threading.main_thread():
        for number in STOP_NUMBERS:
            handler = signal.getsignal(number)
            if callable(handler):
                old[number] = handler
                signal.signal(number, come)
    try:
        yield signals
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
