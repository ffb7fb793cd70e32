"""The loop of `map`: rows → prompts → requests → answers → output."""

from __future__ import annotations

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
import orjson

from tokasaurus.library.blocking import BulkSession
from tokasaurus.library.bulk import ServerError
from tokasaurus.library.map.journal import Journal, KeySet
from tokasaurus.library.map.outputs import CollectedOutput, Counts, Output, StoredOutput
from tokasaurus.library.map.progress import MapProgress
from tokasaurus.library.map.prompts import NoPrompt, PromptOf, Prompts
from tokasaurus.library.map.shards import FORMATS, AnswerNames, MapRow, answer_names, make_format
from tokasaurus.library.map.sources import RowBatch, Source, column_keys, default_keys, open_source, without_surrogates
from tokasaurus.library.requests import Answer, BadPrompt, RequestFormat, RequestLine
from tokasaurus.library.results import row_error
from tokasaurus.processes.group import STOP_NUMBERS

_MAX_WAIT_S = 0.5
"""Between two looks at the clock, the journal and Ctrl-C."""
_NO_REQUEST = bytes(16)
"""Identity of a row that has no request. All such rows have the same: errors of functions may differ each time."""
_MAX_ERROR_CHARS = 2_000


def map_rows(
    session: BulkSession,
    request_format: RequestFormat,
    rows: object,
    output: str | Path | None = None,
    *,
    prompt: PromptOf | None = None,
    messages: PromptOf | None = None,
    chat: bool = False,
    key: str | None = None,
    format: str | None = None,
    prefix: str = "",
    overwrite: bool = False,
    progress: bool = True,
) -> object:
    """Answer every row; see `Client.map`, which has the same arguments. Call it from the thread that has the rows.

    Returns a MapSummary if there is an output, else the rows with their answers in the type that came in. Raises
    ValueError, TypeError and FileNotFoundError for wrong arguments, JobChanged, OutputInUse, OutputFull, RowMisfit, and
    ServerError if the server is lost: then, as after every error, what has finished is stored, and the same call goes
    on."""
    if format is not None and output is None:
        raise ValueError(f"format={format!r}: only with an output directory")
    source, prompts, names, format_name = check_arguments(
        rows, output, prompt=prompt, messages=messages, chat=chat, key=key, format=format, prefix=prefix
    )
    # All that the rows' requests have in common.
    request = orjson.loads(request_format.line(0, [{"role": "user", "content": ""}]).body)
    del request["messages"]
    is_list = request.get("n", 1) > 1
    stored: Output
    if output is not None:
        _check_apart(source, Path(output))
    if output is None:
        stored = CollectedOutput(source, names, is_list)
    else:
        settings = {
            "request": request,
            "key": key,
            "format": format_name,
            "prefix": prefix,
            "columns": _columns(source, format_name),
            "files": [source.row_origin(path) for path in source.paths] if key is None else None,
            "prompt": prompts.description,
        }
        shards = make_format(format_name, source, names, is_list)
        journal = Journal(Path(output).expanduser(), settings, shards.suffix, overwrite)
        stored = StoredOutput(journal, shards, prompts.description)
    job = _Job(session, request_format, source, prompts, stored, key, is_list, MapProgress(source.num_rows, progress))
    return job.run()


def check_arguments(
    rows: object,
    output: str | Path | None,
    *,
    prompt: PromptOf | None,
    messages: PromptOf | None,
    chat: bool,
    key: str | None,
    format: str | None,
    prefix: str,
) -> tuple[Source, Prompts, AnswerNames, str]:
    """(the opened rows, their prompts, the names of the new columns, the format of files), from arguments of
    `map_rows`, which say what they raise."""
    source = open_source(rows, key, None if output is None else Path(output))
    prompts = Prompts(source, prompt, messages, chat)
    names = answer_names(source.columns, prefix)
    if format is not None and format not in FORMATS:
        raise ValueError(f"format={format!r}: must be {' or '.join(FORMATS)}")
    return source, prompts, names, format or ("jsonl" if source.is_json_lines else "parquet")


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


class _Job:
    """One call."""

    def __init__(
        self,
        session: BulkSession,
        request_format: RequestFormat,
        source: Source,
        prompts: Prompts,
        output: Output,
        key: str | None,
        is_list: bool,
        progress: MapProgress,
    ) -> None:
        self._session = session
        self._format = request_format
        self._source = source
        self._prompts = prompts
        self._output = output
        self._key = key
        self._is_list = is_list
        self._progress = progress
        self._keys = KeySet()
        self._batches = source.batches()
        self._is_read = False
        self._unsent: deque[RequestLine] = deque()
        self._unfinished: dict[int, MapRow] = {}
        """By line number: rows with a request, in flight or unsent."""
        self._failed: list[MapRow] = []
        """Rows without a request that are to be added next."""
        self._counts = Counts()
        self._wait_s = _MAX_WAIT_S
        self._is_storing = False
        """Whether rows have finished that are not in the output yet."""

    def run(self) -> object:
        """What `map_rows` returns."""
        started_s = time.monotonic()
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
            self._read_batch()
        lines = [self._unsent.popleft() for _ in range(min(room, len(self._unsent)))]
        is_last = self._is_read and not self._unsent
        try:
            answers = self._session.exchange(lines, is_last, min(self._wait_s, _MAX_WAIT_S))
        except ServerError as error:
            self._lose_rest(error)
            return True
        self._store(answers)
        return is_last and not self._unfinished

    def _read_batch(self) -> None:
        """Put the lines of the next batch to the unsent ones; its rows that need none are stored. Raises ValueError for
        a key that comes again."""
        batch = next(self._batches, None)
        if batch is None:
            self._is_read = True
            return
        self._counts.num_rows += batch.num_rows
        if self._key is None:
            hashes = default_keys(self._source, batch)
        else:
            hashes = column_keys(batch, self._key)
            repeated = self._keys.add(hashes)
            if repeated is not None:
                value = batch.column(self._key)[repeated]
                raise ValueError(f"{batch.place(repeated)}: its key {value!r} is that of an earlier row")
        self._output.prepare(batch)
        asked = self._ask(batch)
        batch.dicts = None
        hashed = [_NO_REQUEST if isinstance(line, str) else line.identity() for line in asked]
        identities = np.frombuffer(b"".join(hashed), "<u8")[::2]
        is_done, finished = self._output.skip_done(batch, hashes, identities)
        rows = zip(asked, is_done.tolist(), hashes.tolist(), identities.tolist(), strict=True)
        lines: list[RequestLine] = []
        failed: list[MapRow] = []
        for index, (line, is_skipped, key_hash, identity) in enumerate(rows):
            if is_skipped:
                continue
            row = MapRow(batch.first_number + index, batch, index, key_hash, identity)
            if isinstance(line, str):
                row.error = line
                failed.append(row)
            else:
                lines.append(line)
                self._unfinished[line.number] = row
        lines.sort(key=attrgetter("body"))  # so that rows with a common prefix are neighbours
        self._unsent.extend(lines)
        self._counts.num_skipped += batch.num_rows - len(lines) - len(failed)
        with self._storing():
            self._failed = failed
            self._add(finished, is_new=False)
            self._failed = []
            self._add(failed)

    def _ask(self, batch: RowBatch) -> list[RequestLine | str]:
        """The line of each row, or why it has none."""
        number = batch.first_number
        make, to_line = self._prompts.make, self._format.line
        asked: list[RequestLine | str] = []
        for index, row in enumerate(batch.rows(self._prompts.columns)):
            try:
                asked.append(to_line(number + index, make(row)))
            except (NoPrompt, BadPrompt) as error:
                asked.append(_shortened(str(error)))
        return asked

    def _store(self, answers: Sequence[Answer]) -> None:
        with self._storing():
            self._add([self._answered(answer) for answer in answers])
            self._wait_s = self._output.tick(self._rows_to_come)
        num_in_flight = len(self._unfinished) - len(self._unsent)
        self._progress.update(self._counts, num_in_flight, self._session.progress())

    def _add(self, rows: list[MapRow], is_new: bool = True) -> None:
        if rows:
            self._output.add(rows, self._rows_to_come, is_new)
        if is_new:
            self._counts.num_finished += len(rows)
            self._counts.num_errors += sum(row.error is not None for row in rows)

    def _rows_to_come(self) -> Iterator[MapRow]:
        return chain(self._unfinished.values(), self._failed)

    @contextmanager
    def _storing(self) -> Iterator[None]:
        """Around what must happen as a whole for the output to have all rows that have finished."""
        self._is_storing = True
        yield
        self._is_storing = False

    def _answered(self, answer: Answer) -> MapRow:
        """The row of an answer, with it."""
        row = self._unfinished.pop(answer.line.number)
        body = answer.body
        if answer.status != 200:
            row.error = _shortened(row_error(answer.status, body).message)
            return row
        try:
            texts = [_text_of(choice) for choice in body["choices"]]
            reasons = [choice["finish_reason"] for choice in body["choices"]]
            usage = body["usage"]
            self._counts.prompt_tokens += usage["prompt_tokens"]
            self._counts.output_tokens += usage["completion_tokens"]
            row.answer, row.finish_reason = (texts, reasons) if self._is_list else (texts[0], reasons[0])
        except (LookupError, TypeError) as error:
            row.error = f"the server's answer cannot be read: {type(error).__name__}: {error}"
        return row

    def _lose_rest(self, error: ServerError) -> None:
        """No more answers come: without an output directory, rows without an answer get the error; with one, it is
        raised, and the same call goes on."""
        if self._output.goes_on:
            raise ServerError(f"{error}; what has finished is stored, and the same call goes on") from None
        self._unsent.clear()
        while not self._is_read:
            self._read_batch()
        lost = list(self._unfinished.values())
        self._unfinished.clear()
        for row in lost:
            row.error = str(error)
        with self._storing():
            self._add(lost)


def _text_of(choice: dict[str, Any]) -> str | None:
    text: str | None = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


def _shortened(text: str) -> str:
    """An error's message as it is stored: it may quote any text of the row."""
    text = text if len(text) <= _MAX_ERROR_CHARS else text[: _MAX_ERROR_CHARS - 3] + "..."
    return cast(str, without_surrogates(text))


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
