"""Processes that validate grammars and die, are stopped, or crash."""

import asyncio
import os
import signal
from contextlib import suppress

import pytest

from tests.server.helpers.grammar_checks import DEEP_REFERENCES, SLOW_REGEX, is_alive, refusal, run, source
from tokasaurus.server.errors import GrammarValidatorFailed
from tokasaurus.server.grammars.validator import GrammarChecker
from tokasaurus.server.served_model import ServedModel


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_grammar_is_validated_though_the_idle_process_was_killed_or_stopped(
    served_model: ServedModel, sent: signal.Signals
) -> None:
    async def harm_idle(checker: GrammarChecker) -> None:
        await checker.check(source("regex", "a"))
        (process,) = checker._processes
        os.kill(process.pid, sent)
        await checker.check(source("regex", "b"))  # at once: a death may not be known yet
        assert await refusal(checker, source("regex", "(a"))
        assert process not in checker._processes
        assert not is_alive(process.pid)

    run(served_model, harm_idle, time_limit_s=4)


def test_it_is_not_the_clients_fault_if_every_process_is_killed(served_model: ServedModel) -> None:
    async def kill_all(checker: GrammarChecker) -> None:
        await checker.check(source("regex", "a"))
        asked = asyncio.create_task(checker.check(source("regex", SLOW_REGEX)))
        while not asked.done():
            for process in list(checker._processes):
                with suppress(ProcessLookupError):
                    process.kill()
            await asyncio.sleep(0.01)
        with pytest.raises(GrammarValidatorFailed) as error:
            await asked
        assert error.value.param == "field"
        await checker.check(source("regex", "b"))  # the checker still works

    run(served_model, kill_all)


def test_a_grammar_that_crashes_two_processes_is_the_clients_fault(
    served_model: ServedModel, caplog: pytest.LogCaptureFixture
) -> None:
    async def crash(checker: GrammarChecker) -> None:
        assert "too deeply" in await refusal(checker, source("json_schema", DEEP_REFERENCES))

    run(served_model, crash)
    crashes = [record.message for record in caplog.records if "crashed on a grammar" in record.message]
    assert len(crashes) == 2
