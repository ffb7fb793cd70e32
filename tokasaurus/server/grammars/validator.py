"""Validates grammars before they reach the engine: in child processes, with a time limit, once per grammar."""

import asyncio
import logging
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import orjson

from tokasaurus.server.child_process import PACKAGE_PARENT
from tokasaurus.server.errors import GrammarValidatorFailed, InvalidRequest
from tokasaurus.server.protocol.grammar_fields import GrammarSource
from tokasaurus.server.served_model import ServedModel

logger = logging.getLogger(__name__)

MAX_GRAMMAR_CHARS = 2**20
TIME_LIMIT_S = 5.0
# More than one, so that a slow grammar does not delay the next.
MAX_PROCESSES = 2
# Longest start of a child process; generous because the machine may be busy.
_START_LIMIT_S = 60.0
_MAX_KNOWN = 4096
_MAX_KNOWN_BYTES = 64 * 2**20
# By an operator, or by the kernel when the machine has no memory left. A grammar ends a process by other signals.
_KILLED_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
# Most bytes of a reply that are kept until its line has ended: no limit.
_MAX_LINE_BYTES = 1 << 30

# An llguidance error: the line of the fault, the reason, then the lines of the grammar around it.
_FAULT = re.compile(r"at (?P<line>\d+)\(\d+\): (?:failed to compile JSON schema: )?(?P<reason>.*?)(?: \d+ \| .*)?")


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The result of validating one grammar."""

    grammar: str
    """The grammar in llguidance's form; "" if it was refused."""
    error: str
    """Why the grammar was refused; "" if it is valid."""
    num_bytes: int = 0
    """Size of the question and the reply, counted against _MAX_KNOWN_BYTES; 0 if the outcome must not be remembered."""
    is_our_fault: bool = False
    """`error` says why the grammar could not be validated: this says nothing about the grammar."""


class _Crashed(Exception):
    """The process died while it worked on the question, and nobody outside killed it."""


class _TooSlow(Exception):
    """The process computed during most of the time limit without an answer."""


class _Unanswered(Exception):
    """The process did not start, was killed, or was stopped or starved of CPU time; the message says which."""


class GrammarChecker:
    """Validates grammars in child processes and remembers the results.

    One per server. All methods run on the event loop's thread. The first process starts with the first grammar.

    time_limit_s: time in seconds to compile a grammar, compute its first mask and try it on short texts.
    """

    def __init__(self, model: ServedModel, time_limit_s: float = TIME_LIMIT_S) -> None:
        eos_ids = [str(eos_id) for eos_id in sorted(model.eos_ids)]
        directory = str(model.tokenizer.directory.resolve())
        self._arguments: Sequence[str] = (directory, str(model.vocab_size), str(time_limit_s), *eos_ids)
        self._time_limit_s = time_limit_s
        self._known: OrderedDict[tuple[str, str], _Outcome] = OrderedDict()
        self._num_known_bytes = 0
        self._compiling: dict[tuple[str, str], asyncio.Task[_Outcome]] = {}
        self._num_waiting: Counter[tuple[str, str]] = Counter()  # callers waiting for each grammar in `_compiling`
        self._free_processes = asyncio.Semaphore(MAX_PROCESSES)
        self._idle: list[Process] = []
        self._processes: set[Process] = set()

    async def check(self, source: GrammarSource) -> str:
        """The grammar in llguidance's form.

        Raises InvalidRequest if it is not valid, GrammarValidatorFailed if that cannot be found out now.
        """
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
                # other callers may wait for the same grammar, or ask for it later
                outcome = await asyncio.shield(self._compiling[key])
            finally:
                self._num_waiting[key] -= 1
                if self._num_waiting[key] == 0:
                    del self._num_waiting[key]
        else:
            self._known.move_to_end(key)
        if outcome.is_our_fault:
            raise GrammarValidatorFailed(f"{source.param}: {outcome.error}; try again", source.param)
        if outcome.error:
            raise _refusal(source, outcome.error)
        return outcome.grammar

    async def close(self) -> None:
        """Cancels all compilations and ends the processes."""
        for task in self._compiling.values():
            task.cancel()
        await asyncio.gather(*self._compiling.values(), return_exceptions=True)
        for process in list(self._processes):
            await self._end(process)

    async def _compile(self, key: tuple[str, str]) -> _Outcome:
        try:
            async with self._free_processes:
                if self._num_waiting[key] == 0:  # every caller was cancelled: do not delay other grammars
                    return _Outcome("", "no request waits for it")
                outcome = await self._ask_twice(orjson.dumps(key))
            if outcome.num_bytes > 0:
                self._remember(key, outcome)
            return outcome
        finally:
            del self._compiling[key]

    async def _ask_twice(self, question: bytes) -> _Outcome:
        """Asks an idle or new process, and a new one if the first fails: it may have been killed or stopped while idle.

        A grammar that crashes two processes is itself the cause.
        """
        faults: list[Exception] = []
        for must_be_new in (False, True):
            try:
                reply = await self._ask_once(question, must_be_new)
            except _TooSlow:  # not remembered, nor is a crash: the machine may have been busy or short of memory
                return _Outcome("", f"it takes longer than {self._time_limit_s:g} s to compile")
            except (_Crashed, _Unanswered) as fault:
                logger.warning("a process that validates grammars %s", fault)
                faults.append(fault)
                continue
            if reply is None:
                return _Outcome("", "grammars cannot be used with this model's tokenizer")
            grammar, error = orjson.loads(reply)
            return _Outcome(grammar or "", error or "", len(question) + len(reply))
        if all(isinstance(fault, _Crashed) for fault in faults):
            return _Outcome("", "it is too large or nested too deeply to compile")
        return _Outcome("", f"a process that validates grammars {faults[-1]}", is_our_fault=True)

    async def _ask_once(self, question: bytes, must_be_new: bool) -> bytes | None:
        """The reply; None if grammars do not support the model's tokenizer. Raises the three faults above."""
        process = await self._take_process(must_be_new)
        if process is None:
            return None
        began_s = _cpu_time_s(process)
        try:
            reply = await asyncio.wait_for(_ask(process, question), self._time_limit_s)
            self._idle.append(process)
            return reply
        except asyncio.TimeoutError:
            # A process that had less than half of a core's time may have been stopped, or the machine is overloaded.
            if _cpu_time_s(process) - began_s >= self._time_limit_s / 2:
                raise _TooSlow from None
            raise _Unanswered(f"did not run for {self._time_limit_s:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            await self._end(process)
            if process.returncode in _KILLED_FROM_OUTSIDE:
                raise _Unanswered(f"was killed by signal {-process.returncode}") from None
            raise _Crashed(f"crashed on a grammar (exit code {process.returncode})") from None
        finally:
            if process not in self._idle:
                await self._end(process)

    def _remember(self, key: tuple[str, str], outcome: _Outcome) -> None:
        self._known[key] = outcome
        self._num_known_bytes += outcome.num_bytes
        while len(self._known) > _MAX_KNOWN or self._num_known_bytes > _MAX_KNOWN_BYTES:
            self._num_known_bytes -= self._known.popitem(last=False)[1].num_bytes

    async def _take_process(self, must_be_new: bool) -> Process | None:
        """An idle or a new process; None if grammars do not support the model's tokenizer. Raises _Unanswered."""
        while self._idle and not must_be_new:
            process = self._idle.pop()
            if process.returncode is None:
                return process
            await self._end(process)  # killed from outside
        try:
            return await self._start_process()
        except asyncio.TimeoutError:
            raise _Unanswered(f"did not start within {_START_LIMIT_S:g} s") from None
        except asyncio.IncompleteReadError:
            raise _Unanswered("ended while it started") from None
        except OSError as error:
            raise _Unanswered(f"could not start ({error.strerror})") from None

    async def _start_process(self) -> Process | None:
        """None if grammars do not support the model's tokenizer. Raises OSError, TimeoutError, IncompleteReadError."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tokasaurus.server.grammars.validator_process",
            *self._arguments,
            stdin=PIPE,
            stdout=PIPE,
            limit=_MAX_LINE_BYTES,
            cwd=PACKAGE_PARENT,
            start_new_session=True,  # so that Ctrl-C reaches the launcher only
        )
        self._processes.add(process)
        is_usable = False
        try:
            is_usable = orjson.loads(await asyncio.wait_for(_read(process), _START_LIMIT_S))
        finally:
            if not is_usable:
                await self._end(process)
        return process if is_usable else None

    async def _end(self, process: Process) -> None:
        self._processes.discard(process)
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _refusal(source: GrammarSource, error: str) -> InvalidRequest:
    """The error for the client. If the server wrote the grammar, it names the field at fault and quotes no grammar."""
    fault = _FAULT.fullmatch(error) if source.line_params else None
    if fault is None:
        return InvalidRequest(f"{source.param}: {error}", source.param)
    param = source.line_params.get(int(fault["line"]), source.param)
    return InvalidRequest(f"{param}: {fault['reason']}", param)


def _cpu_time_s(process: Process) -> float:
    """CPU time used so far, in seconds; 0 if the process has ended."""
    import psutil  # on first use: it would delay the server's start

    try:
        times = psutil.Process(process.pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


async def _ask(process: Process, question: bytes) -> bytes:
    assert process.stdin is not None
    try:
        process.stdin.write(question + b"\n")
    except RuntimeError as error:  # uvloop's, if the process has ended
        raise ConnectionResetError(str(error)) from None
    await process.stdin.drain()
    return await _read(process)


async def _read(process: Process) -> bytes:
    """The next line. Raises IncompleteReadError if the process ends."""
    assert process.stdout is not None
    return await process.stdout.readuntil(b"\n")
