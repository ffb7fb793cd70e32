"""Bulk lines without HTTP: each line gets one result wherever the body is cut; the lines in flight are limited."""

import asyncio
import codecs
import itertools
import random
import time
from collections.abc import Awaitable, Callable

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from tokasaurus.server.errors import QueueFull, ServerStopping
from tokasaurus.server.jobs.line_runner import START_BYTES, Line
from tokasaurus.server.protocol.answers import PromptTokensDetails, Usage
from tokasaurus.server.respond.whole import Answer
from tokasaurus.server.routes import bulk
from tokasaurus.server.routes.bulk import BulkRun, IncomingBody, LineSplitter, TooLong

Chunks = list[bytes]

USAGE = Usage(1, 1, 2, PromptTokensDetails(0, 0, 0, 0))


@given(
    lines=st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"")), max_size=8),
    cuts=st.lists(st.integers(0, 100), max_size=6),
    max_bytes=st.integers(0, 10),
    ends_in_newline=st.booleans(),
)
def test_split_lines_do_not_depend_on_chunk_boundaries(
    lines: list[bytes], cuts: list[int], max_bytes: int, ends_in_newline: bool
) -> None:
    text = b"\n".join(lines) + b"\n" * ends_in_newline
    whole = text.split(b"\n") if text else []
    if whole and whole[-1] == b"":
        whole.pop()  # no line follows the last newline
    splitter = LineSplitter(max_bytes)
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    found: list[tuple[int, bytes | TooLong]] = []
    for start, end in itertools.pairwise(borders):
        found += splitter.add(text[start:end])
    found += splitter.finish()
    assert found == [
        (number, line if len(line) <= max_bytes else TooLong(line))
        for number, line in enumerate(whole, 1)
        if line.strip()
    ]


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize("rest", [b'{"a": 1}\n{"b": 1}', b"\nx", b""])
def test_a_byte_order_mark_at_the_start_is_left_out(rest: bytes, size: int) -> None:
    def split(text: bytes) -> list[tuple[int, bytes | TooLong]]:
        splitter = LineSplitter(100)
        parts = (text[start : start + size] for start in range(0, len(text), size))
        return [line for part in parts for line in splitter.add(part)] + splitter.finish()

    assert split(codecs.BOM_UTF8 + rest) == split(rest)


@pytest.mark.parametrize("size", [1, 1000, 10 * START_BYTES])
def test_the_start_of_a_line_that_is_too_long_is_kept(size: int) -> None:
    line = bytes(index % 251 for index in range(10 * START_BYTES)).replace(b"\n", b"")
    text = line + b"\nb\n"
    splitter = LineSplitter(100)
    found = [part for start in range(0, len(text), size) for part in splitter.add(text[start : start + size])]
    assert found == [(1, TooLong(line[:START_BYTES])), (2, b"b")]


def test_blank_lines_are_not_handled_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gigabyte of them is a megabyte of a compressed body."""
    num_ended = 0
    end = LineSplitter._end

    def counted_end(splitter: LineSplitter, part: bytes) -> list[tuple[int, bytes | TooLong]]:
        nonlocal num_ended
        num_ended += 1
        return end(splitter, part)

    monkeypatch.setattr(LineSplitter, "_end", counted_end)
    splitter = LineSplitter(100)
    for _ in range(4):
        assert splitter.add(b"\n" * 100_000) == []
        assert splitter.add(b" \r\n\t" * 100_000) == []
    assert splitter.add(b"a\n") == [(800_001, b"\ta")]
    assert num_ended == 9, "one for each chunk"


def messages_of(chunks: Chunks) -> Callable[[], Awaitable[Message]]:
    """An ASGI `receive` whose client never disconnects."""
    remaining = iter(chunks)

    async def receive() -> Message:
        await asyncio.sleep(0)
        chunk = next(remaining, None)
        if chunk is None:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": chunk, "more_body": chunk != b""}

    return receive


async def run_lines(
    run: BulkRun, chunks: Chunks, write: Callable[[bytes], Awaitable[None]], body: IncomingBody | None = None
) -> None:
    body = IncomingBody(messages_of([*chunks, b""])) if body is None else body

    async def receive_all() -> None:
        while True:
            await body.receive()

    receiving = asyncio.ensure_future(receive_all())
    try:
        await asyncio.wait_for(run.run(body, write), 60)
    finally:
        receiving.cancel()


async def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.005)


class Answers:
    """Answers each line, which is its custom_id, after a random number of event loop iterations."""

    def __init__(self, seed: int = 0) -> None:
        self.num_running = self.max_running = self.num_started = 0
        self.written: list[bytes] = []
        self._random = random.Random(seed)
        self.gate = asyncio.Event()
        self.gate.set()

    async def read_line(self, content: bytes) -> Line:
        async def answer() -> Answer:
            self.num_started += 1
            self.num_running += 1
            self.max_running = max(self.max_running, self.num_running)
            try:
                for _ in range(self._random.randrange(20)):
                    await asyncio.sleep(0)
                await self.gate.wait()
            finally:
                self.num_running -= 1
            return Answer(orjson.dumps(content.decode()), USAGE)

        return Line(content.decode(), answer)

    async def write(self, content: bytes) -> None:
        assert content.endswith(b"\n")
        self.written += content.splitlines()

    def results(self) -> dict[str, int]:
        """Status by custom_id; asserts that no custom_id repeats."""
        results = [orjson.loads(line) for line in self.written]
        assert len({result["custom_id"] for result in results}) == len(results)
        return {result["custom_id"]: result["response"]["status_code"] for result in results}


@pytest.mark.parametrize("seed", range(5))
def test_every_line_gets_one_result_and_max_lines_in_flight_is_the_peak(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "MAX_LINES_IN_FLIGHT", 7)
    monkeypatch.setattr(bulk, "MAX_UNREAD_BYTES", 50)
    text = b"".join(b"line %d\n" % number for number in range(300))
    borders = sorted(random.Random(seed).sample(range(len(text)), 40))
    chunks = [text[start:end] for start, end in zip([0, *borders], [*borders, len(text)], strict=True)]

    async def go() -> Answers:
        answers = Answers(seed)
        await run_lines(BulkRun(answers.read_line, 1000), [chunk for chunk in chunks if chunk], answers.write)
        return answers

    answers = asyncio.run(go())
    assert answers.results() == {f"line {number}": 200 for number in range(300)}
    assert answers.max_running == 7


def test_reading_stops_while_max_lines_in_flight_are_unanswered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "MAX_LINES_IN_FLIGHT", 3)
    monkeypatch.setattr(bulk, "MAX_UNREAD_BYTES", 100)

    async def go() -> None:
        answers = Answers()
        answers.gate.clear()
        num_read = 0
        receive = messages_of([b"%d\n" % number for number in range(1000, 2000)] + [b""])

        async def counted() -> Message:
            nonlocal num_read
            num_read += 1
            return await receive()

        body = IncomingBody(counted)
        running = asyncio.ensure_future(run_lines(BulkRun(answers.read_line, 1000), [], answers.write, body))
        await until(lambda: answers.num_started == 3)
        await asyncio.sleep(0.1)
        assert answers.num_started == 3
        # Running lines, a waiting line, buffered 5-byte lines, and up to 2 more chunks.
        assert 3 <= num_read <= 3 + 1 + 100 // 5 + 2
        answers.gate.set()
        await running
        assert len(answers.results()) == 1000

    asyncio.run(go())


def test_client_that_reads_only_after_sending_everything_gets_every_result() -> None:
    async def go() -> None:
        answers = Answers()
        is_sent = asyncio.Event()
        chunks = [b"%d\n" % number for number in range(20_000)] + [b""]
        receive = messages_of(chunks)

        async def until_sent() -> Message:
            message = await receive()
            if not message["more_body"]:
                is_sent.set()
            return message

        async def write(content: bytes) -> None:
            await is_sent.wait()
            await answers.write(content)

        await run_lines(BulkRun(answers.read_line, 1000), [], write, IncomingBody(until_sent))
        assert len(answers.results()) == 20_000

    asyncio.run(go())


def test_reading_stops_while_too_many_result_bytes_are_unsent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "MAX_UNSENT_BYTES", 5_000)

    async def go() -> None:
        answers = Answers()
        client_reads = asyncio.Event()

        async def write(content: bytes) -> None:
            await client_reads.wait()
            await answers.write(content)

        chunks = [b"%d\n" % number for number in range(2000)]
        running = asyncio.ensure_future(run_lines(BulkRun(answers.read_line, 1000), chunks, write))
        await until(lambda: answers.num_started >= 20)
        await asyncio.sleep(0.3)
        assert 20 <= answers.num_started <= 100  # a result has about 150 bytes
        client_reads.set()
        await running
        assert len(answers.results()) == 2000

    asyncio.run(go())


def test_cancelling_the_run_stops_its_lines_and_unanswered_lines_can_get_errors() -> None:
    async def go() -> None:
        answers = Answers()
        run = BulkRun(answers.read_line, 1000)
        await run_lines(run, [b"a\nb\nc\n"], answers.write)

        answers.gate.clear()
        run = BulkRun(answers.read_line, 1000)
        running = asyncio.ensure_future(run_lines(run, [b"d\ne\n"], answers.write))
        await until(lambda: answers.num_running == 2)
        running.cancel()
        await asyncio.wait([running])
        assert answers.num_running == 0
        await answers.write(run.results_of_rest(ServerStopping("the server is stopping")))
        assert answers.results() == {"a": 200, "b": 200, "c": 200, "d": 503, "e": 503}

    asyncio.run(go())


def test_results_whose_writing_is_cancelled_are_among_those_of_the_rest() -> None:
    """A client reads slowly while the server stops."""

    async def go() -> None:
        answers = Answers()
        run = BulkRun(answers.read_line, 1000)
        is_stuck = asyncio.Event()

        async def write(_: bytes) -> None:
            is_stuck.set()
            await asyncio.Event().wait()

        running = asyncio.ensure_future(run_lines(run, [b"a\n", b"b\n", b"c\n"], write))
        await until(is_stuck.is_set)
        await until(lambda: answers.num_started == 3 and answers.num_running == 0)
        running.cancel()
        await asyncio.wait([running])
        await answers.write(run.results_of_rest(ServerStopping("the server is stopping")))
        assert answers.results() == {"a": 200, "b": 200, "c": 200}

    asyncio.run(go())


def test_line_refused_by_a_full_queue_is_retried_and_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is retried when another line finishes, not only after QUEUE_RETRY_S."""
    monkeypatch.setattr(bulk, "QUEUE_RETRY_S", 0.2)

    async def go() -> None:
        answers = Answers()

        async def read_line(content: bytes) -> Line:
            line = await answers.read_line(content)

            async def answer() -> Answer:
                if answers.num_running >= 4:
                    raise QueueFull("4 run")
                return await line.answer()

            return Line(line.custom_id, answer)

        started = asyncio.get_running_loop().time()
        chunks = [b"%d\n" % number for number in range(1000)]
        await run_lines(BulkRun(read_line, 1000), chunks, answers.write)
        assert answers.results() == {str(number): 200 for number in range(1000)}
        assert answers.max_running == 4
        assert asyncio.get_running_loop().time() - started < 20  # 250 waits of QUEUE_RETRY_S would take 50 s

    asyncio.run(go())
