"""Whether a grammar can be followed is found out here, before the engine hears of it: in child processes, with a time
limit, and once for each grammar."""

import asyncio
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import orjson

from tokasaurus.server.errors import InvalidRequest
from tokasaurus.server.protocol.grammar_fields import GrammarSource
from tokasaurus.server.protocol.sampling_fields import SamplingFields
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.structured_output.ipc import HEADER_BYTES, UNUSABLE_TOKENIZER, content_length, make_frame

MAX_GRAMMAR_CHARS = 2**20
TIME_LIMIT_S = 5.0
# A grammar that takes long does not hold up the next.
MAX_PROCESSES = 2
# Of a process that starts, on a machine that is busy.
_START_LIMIT_S = 60.0
_MAX_KNOWN = 4096
_MAX_KNOWN_BYTES = 64 * 2**20
# `python -m` looks for modules in its working directory: not in the user's, where any could be.
_PACKAGE_PARENT = Path(__file__).parents[2]

# Where llguidance finds one, with the lines around it.
_FAULT = re.compile(r"at (?P<line>\d+)\(\d+\): (?:failed to compile JSON schema: )?(?P<reason>.*?)(?: \d+ \| .*)?")
_FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


def asked_grammar(body: SamplingFields) -> GrammarSource | None:
    """What the text is to match, by the one field of the body that says so. Raises InvalidRequest."""
    given = [(name, source) for name in _FIELDS if (source := getattr(body, name)) is not None]
    if len(given) > 1:
        (first, _), (second, _), *_ = given
        raise InvalidRequest(f"{first} and {second}: the text can follow just one of them", second)
    return given[0][1] if given else None


@dataclass(frozen=True, slots=True)
class _Outcome:
    """grammar: in llguidance's form; "" where it cannot be followed, and then `error` says why."""

    grammar: str
    error: str
    num_bytes: int


class GrammarChecker:
    """One per server. All methods run on the event loop's thread. A first process starts with the first grammar.

    time_limit_s: for a grammar to compile, and its first mask.
    """

    def __init__(self, model: ServedModel, time_limit_s: float = TIME_LIMIT_S) -> None:
        eos_ids = [str(eos_id) for eos_id in sorted(model.eos_ids)]
        directory = str(model.tokenizer.directory.resolve())
        self._arguments: Sequence[str] = (directory, str(model.vocab_size), str(time_limit_s), *eos_ids)
        self._time_limit_s = time_limit_s
        self._known: OrderedDict[tuple[str, str], _Outcome] = OrderedDict()
        self._num_known_bytes = 0
        self._compiling: dict[tuple[str, str], asyncio.Task[_Outcome]] = {}
        self._num_waiting: Counter[tuple[str, str]] = Counter()  # for what is compiling
        self._free_processes = asyncio.Semaphore(MAX_PROCESSES)
        self._idle: list[Process] = []
        self._processes: set[Process] = set()

    async def check(self, source: GrammarSource) -> str:
        """The grammar in llguidance's form. Raises InvalidRequest."""
        if len(source.text) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(
                f"{source.param}: a grammar may have at most {MAX_GRAMMAR_CHARS} characters", source.param
            )
        key = (source.format, source.text)
        outcome = self._known.get(key)
        if outcome is None:
            if key not in self._compiling:
                self._compiling[key] = asyncio.create_task(self._compile(key))
            self._num_waiting[key] += 1
            try:
                # others may wait for it too, or come for it later
                outcome = await asyncio.shield(self._compiling[key])
            finally:
                self._num_waiting[key] -= 1
                if self._num_waiting[key] == 0:
                    del self._num_waiting[key]
        else:
            self._known.move_to_end(key)
        if outcome.error:
            raise _refusal(source, outcome.error)
        return outcome.grammar

    async def close(self) -> None:
        """Ends the processes, and what is compiling."""
        for task in self._compiling.values():
            task.cancel()
        await asyncio.gather(*self._compiling.values(), return_exceptions=True)
        for process in list(self._processes):
            await self._end(process)

    async def _compile(self, key: tuple[str, str]) -> _Outcome:
        try:
            async with self._free_processes:
                if self._num_waiting[key] == 0:  # all who asked have left: it would hold up others
                    return _Outcome("", "nobody waits for it", 0)
                question = orjson.dumps(key)
                process = await self._take_process()
                if process is None:
                    return _Outcome("", "grammars cannot be used with this model's tokenizer", 0)
                try:
                    reply = await asyncio.wait_for(_ask(process, question), self._time_limit_s)
                    self._idle.append(process)
                # These two are not remembered: the machine may have been busy, or short of memory.
                except asyncio.TimeoutError:
                    return _Outcome("", f"it takes longer than {self._time_limit_s:g} s to compile", 0)
                except (asyncio.IncompleteReadError, ConnectionError):
                    return _Outcome("", "it is too large or nested too deeply to compile", 0)
                finally:
                    if process not in self._idle:
                        await self._end(process)
            grammar, error = orjson.loads(reply)
            outcome = _Outcome(grammar or "", error or "", len(question) + len(reply))
            self._remember(key, outcome)
            return outcome
        finally:
            del self._compiling[key]

    def _remember(self, key: tuple[str, str], outcome: _Outcome) -> None:
        self._known[key] = outcome
        self._num_known_bytes += outcome.num_bytes
        while len(self._known) > _MAX_KNOWN or self._num_known_bytes > _MAX_KNOWN_BYTES:
            self._num_known_bytes -= self._known.popitem(last=False)[1].num_bytes

    async def _take_process(self) -> Process | None:
        """None where the model's tokenizer is of a kind that grammars cannot be used with."""
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
            await self._end(process)  # killed from outside
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tokasaurus.server.structured_output.validator_process",
            *self._arguments,
            stdin=PIPE,
            stdout=PIPE,
            cwd=_PACKAGE_PARENT,
            start_new_session=True,  # Ctrl-C is for the launcher
        )
        self._processes.add(process)
        state = UNUSABLE_TOKENIZER
        try:
            state = await asyncio.wait_for(_read(process), _START_LIMIT_S)
        finally:
            if state == UNUSABLE_TOKENIZER:
                await self._end(process)
        return None if state == UNUSABLE_TOKENIZER else process

    async def _end(self, process: Process) -> None:
        self._processes.discard(process)
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _refusal(source: GrammarSource, error: str) -> InvalidRequest:
    """Of a text that the client did not write, no line is quoted: its field is named."""
    fault = _FAULT.fullmatch(error) if source.line_params else None
    if fault is None:
        return InvalidRequest(f"{source.param}: {error}", source.param)
    param = source.line_params.get(int(fault["line"]), source.param)
    return InvalidRequest(f"{param}: {fault['reason']}", param)


async def _ask(process: Process, question: bytes) -> bytes:
    assert process.stdin is not None
    process.stdin.write(make_frame(question))
    await process.stdin.drain()
    return await _read(process)


async def _read(process: Process) -> bytes:
    """One frame. Raises IncompleteReadError if the process ends."""
    assert process.stdout is not None
    header = await process.stdout.readexactly(HEADER_BYTES)
    return await process.stdout.readexactly(content_length(header))
