"""Which grammars GrammarChecker accepts and refuses, and within what time. Its child processes are real."""

import asyncio
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest
import uvloop

from tests.helpers.limits import read_line
from tests.server.helpers.grammar_checks import DEEP_REFERENCES, SLOW_REGEX, is_alive, refusal, run, source
from tokasaurus.server.errors import GrammarValidatorFailed
from tokasaurus.server.grammars import validator
from tokasaurus.server.grammars.validator import GrammarChecker
from tokasaurus.server.protocol.grammar_fields import GrammarFormat, GrammarSource
from tokasaurus.server.served_model import ServedModel

REFUSED = [
    ({"not": {"type": "string"}}, "not"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {"type": "integer"}}, "contains"),
    ({"if": {"type": "string"}, "then": {"minLength": 3}}, "if"),
    ({"type": "object", "propertyNames": {"pattern": "a"}}, "propertyNames"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"properties": {"a": {"properties": {"b": {"unevaluatedProperties": False}}}}}, "unevaluatedProperties"),
    ({"type": "string", "format": "password"}, "password"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"type": "strin"}, "strin"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf is supported only where no two"),
    ({"$ref": "https://example.com/schema.json"}, "example.com"),
    ({"$ref": "#/$defs/nowhere"}, "nowhere"),
    ({"$ref": "#"}, "no text"),
    (
        {
            "type": "array",
            "prefixItems": [{"const": 1}, {"$ref": "#/$defs/x"}],
            "minItems": 2,
            "$defs": {"x": {"$ref": "#/$defs/x"}},
        },
        "nothing may follow",
    ),
    ({"enum": []}, "empty"),
    ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength"),
    ({"type": "integer", "minimum": 5, "maximum": 2}, "minimum"),
    ({"anyOf": [False]}, "false"),
    ({"type": "object", "properties": {f"name_{i}": {"type": "string"} for i in range(1000)}}, "too much work"),
    ({"not": {}, "x-guidance": {"lenient": True}}, "not"),  # a compiler warning counts as an error
]
REFUSED_TEXTS: list[tuple[GrammarFormat, str, str]] = [
    ("regex", "(a", "a ( without )"),
    ("regex", "a\\", "ends within an escape"),
    ("regex", r"(?<=a)b", "look-behind is not supported"),
    ("regex", r"(a)\1", "back-references"),
    ("regex", "(" * 1000 + ")" * 1000, "too deeply"),
    ("regex", "(?!.*(a|b).{9}c)(a|b|c)*", "too many states"),
    ("regex", "((((a{1,100}){1,100}){1,100}){1,100}){1,100}", "too much work"),
    ("regex", "a{1000000}", "too much work"),
    ("lark", 'start: a "b"', "unknown name"),
    ("lark", 'rule: "b"', "start"),
    ("lark", "start: <|no_such_token|>", "<|no_such_token|> is no added token"),
    ("lark", 'start: "a" <|im_end|>', "<|im_end|> contains a special token"),
    ("lark", "start: <[97,260-264]>", "<[97,260-264]> contains a special token"),
    ("lark", "start: <[97-]> | <[*]>", "<[*]> must contain ids"),
    ("lark", "start: <[^97]>", "<[^97]> must contain ids"),
    ("lark", "start: <[9999999]>", "no token of this model"),
    ("lark", "start: " + "(" * 9000 + '"a"' + ")" * 9000, "too deeply"),
    ("lark", 'start: %json {"type": "object", "uniqueItems": true, "x-guidance": {"lenient": true}}', "uniqueItems"),
    ("lark", 'start: word\nword[temperature=0.1]: "a"', "temperature"),
    ("lark", ' {"grammars": [{"lark_grammar": "start[temperature=0.1]: /a/"}]}', "neither"),
    ("gbnf", 'root ::= "a" other', "other"),
    ("gbnf", 'start ::= "a"', "root"),
    ("gbnf", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "too deeply"),
    ("gbnf", r'root ::= "\ud800"', "no character"),
]


def test_unsupported_or_invalid_grammar_is_refused_and_the_message_names_the_cause(served_model: ServedModel) -> None:
    async def check_all(checker: GrammarChecker) -> None:
        for schema, named in REFUSED:
            assert named in await refusal(checker, source("json_schema", schema)), schema
        for format, text, named in REFUSED_TEXTS:
            message = await refusal(checker, source(format, text))
            assert named in message, (text[:50], message)
            assert len(message) < 400

    run(served_model, check_all)


async def patient_refusal(checker: GrammarChecker, wrong: GrammarSource) -> str:
    """Tries again while the machine is too busy to tell a slow grammar from a starved process, as clients are told."""
    for _ in range(10):
        with suppress(GrammarValidatorFailed):
            return await refusal(checker, wrong)
    raise AssertionError("a process has never had half of a core")


def test_oversized_grammars_are_refused_in_time_and_block_nothing(served_model: ServedModel) -> None:
    """They block neither the event loop nor other grammars, though one crashes its process and one must be killed."""

    async def check_oversized(checker: GrammarChecker) -> None:
        good = source("regex", "a+")
        await checker.check(source("regex", "warm up"))
        oversized = [
            source("json_schema", DEEP_REFERENCES),
            source("regex", SLOW_REGEX),
            source("regex", "a" * (validator.MAX_GRAMMAR_CHARS + 1)),
        ]
        refusals = [asyncio.create_task(patient_refusal(checker, grammar)) for grammar in oversized]
        longest_work_s, num_pauses = 0.0, 0
        await checker.check(good)
        assert not refusals[1].done()
        while not all(task.done() for task in refusals):
            before = time.thread_time()
            await asyncio.sleep(0.01)
            longest_work_s = max(longest_work_s, time.thread_time() - before)
            num_pauses += 1
        messages = [task.result() for task in refusals]
        assert "too deeply" in messages[0]
        assert "longer than 2 s" in messages[1]
        assert "at most" in messages[2]
        assert longest_work_s < 0.3
        assert num_pauses > 15, "150 on a free machine; a loop that waits for a process has none"
        await checker.check(source("regex", "b+"))  # the checker still works
        assert len(checker._processes) <= validator.MAX_PROCESSES

    run(served_model, check_oversized, time_limit_s=2)


def test_each_grammar_is_compiled_once(served_model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when many requests check it concurrently or later, and when the first one is cancelled."""
    asked: list[bytes] = []
    ask = validator._ask

    async def counting(process: asyncio.subprocess.Process, question: bytes) -> bytes:
        asked.append(question)
        return await ask(process, question)

    monkeypatch.setattr(validator, "_ask", counting)

    async def check_often(checker: GrammarChecker) -> None:
        wanted = source("json_schema", {"type": "integer"})
        first = asyncio.create_task(checker.check(wanted))
        await asyncio.sleep(0)
        first.cancel()
        answers = await asyncio.gather(*(checker.check(wanted) for _ in range(20)))
        assert set(answers) == {await checker.check(wanted)}
        assert len(asked) == 1
        await checker.check(source("json_schema", {"type": "number"}))
        assert len(asked) == 2

    run(served_model, check_often)


def test_grammar_is_not_compiled_if_all_its_requests_are_cancelled_first(
    served_model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    all_busy, gate = asyncio.Event(), asyncio.Event()
    ask = validator._ask

    async def waiting(process: asyncio.subprocess.Process, question: bytes) -> bytes:
        asked.append(orjson.loads(question)[1])
        if len(asked) == validator.MAX_PROCESSES:
            all_busy.set()
        await gate.wait()
        return await ask(process, question)

    monkeypatch.setattr(validator, "_ask", waiting)

    async def cancel_some(checker: GrammarChecker) -> None:
        def start(*texts: str) -> list[asyncio.Task[str]]:
            return [asyncio.create_task(checker.check(source("regex", text))) for text in texts]

        remaining = start("a", "b")
        await asyncio.wait_for(all_busy.wait(), 120)
        cancelled, remaining = start("c", "d", "e"), remaining + start("d", "f")
        await asyncio.sleep(0)
        for task in cancelled:
            task.cancel()
        gate.set()
        await asyncio.gather(*remaining)
        assert sorted(asked) == ["a", "b", "d", "f"]
        assert not checker._num_waiting

    run(served_model, cancel_some)


def test_cache_is_bounded_by_count_and_by_bytes(served_model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validator, "_MAX_KNOWN", 3)
    monkeypatch.setattr(validator, "_MAX_KNOWN_BYTES", 20_000)

    async def fill(checker: GrammarChecker) -> None:
        for index in (0, 1, 2, 0, 3):
            await checker.check(source("regex", f"a{index}"))
        assert [text for _, text in checker._known] == ["a2", "a0", "a3"]  # the least recently used was evicted
        await checker.check(source("regex", "b" * 5000))
        await checker.check(source("regex", "c" * 5000))
        assert [text[0] for _, text in checker._known] == ["c"]
        assert checker._num_known_bytes == sum(outcome.num_bytes for outcome in checker._known.values()) <= 20_000

    run(served_model, fill)


def test_killed_process_is_replaced_and_close_leaves_no_process(served_model: ServedModel) -> None:
    pids: list[int] = []

    async def kill_one(checker: GrammarChecker) -> None:
        assert not checker._processes, "the first process starts with the first grammar"
        await checker.check(source("regex", "a"))
        (process,) = checker._processes
        pids.append(process.pid)
        process.kill()
        await process.wait()
        await checker.check(source("regex", "b"))
        pids.extend(process.pid for process in checker._processes)

    run(served_model, kill_one)
    assert len(pids) == 2
    assert not any(is_alive(pid) for pid in pids)


def test_a_process_that_is_killed_just_before_it_is_asked_is_replaced(served_model: ServedModel) -> None:
    async def ask() -> None:
        checker = GrammarChecker(served_model)
        take = checker._take_process

        async def take_and_kill(must_be_new: bool) -> asyncio.subprocess.Process | None:
            process = await take(must_be_new)
            if not must_be_new:
                assert process is not None
                process.kill()
                await process.wait()
                await asyncio.sleep(0.01)
            return process

        checker._take_process = take_and_kill  # type: ignore[method-assign]
        assert await checker.check(source("regex", "a"))
        await checker.close()

    uvloop.run(ask())  # as the server does: its pipes have errors of their own


def test_grammar_is_refused_if_the_tokenizer_does_not_support_grammars(
    served_model: ServedModel, tmp_path: Path
) -> None:
    async def ask(checker: GrammarChecker) -> None:
        assert "tokenizer" in await refusal(checker, source("regex", "a"))
        assert not checker._processes

    (tmp_path / "tokenizer.json").write_text('{"model": "none"}')
    run(replace(served_model, tokenizer=SimpleNamespace(directory=tmp_path)), ask)


ORPHAN = """
import asyncio, sys
from types import SimpleNamespace
from pathlib import Path
from tokasaurus.server.grammars.validator import GrammarChecker
from tokasaurus.server.protocol.grammar_fields import GrammarSource

async def main():
    tokenizer = SimpleNamespace(directory=Path(sys.argv[1]))
    checker = GrammarChecker(SimpleNamespace(tokenizer=tokenizer, vocab_size=266, eos_ids={265}), time_limit_s=60)
    await checker.check(GrammarSource("regex", "a", "x"))
    asyncio.create_task(checker.check(GrammarSource("regex", "a*" * 40_000, "x")))
    await asyncio.sleep(0.1)
    print(*(process.pid for process in checker._processes), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="on other systems an orphan ends only after compiling or at its own time limit"
)
def test_process_dies_with_its_server_while_compiling(tokenizer_directory: Path) -> None:
    server = subprocess.Popen([sys.executable, "-c", ORPHAN, tokenizer_directory], stdout=subprocess.PIPE, text=True)
    pid = int(read_line(server, server.stdout))
    assert is_alive(pid)
    server.kill()
    server.wait()
    deadline = time.monotonic() + 10  # compiling takes longer
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
