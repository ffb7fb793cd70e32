"""`toka batch`: run a file of requests, with a server of its own or a running one; run again, it continues."""

import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import get_args

from tokasaurus.batch_command.api import MAX_SILENCE_SECONDS, BatchApi, BatchView, Waiter
from tokasaurus.batch_command.config import RunConfig
from tokasaurus.batch_command.errors import CommandError, NothingToContinue, NotOnServer
from tokasaurus.batch_command.input_copy import copy_input, is_stream
from tokasaurus.batch_command.input_file import InputLimits, check_input, find_endpoint, fingerprint
from tokasaurus.batch_command.outcome import Outcome, why_failed
from tokasaurus.batch_command.own_server import GivenServer, OwnServer
from tokasaurus.batch_command.progress import Progress, make_progress
from tokasaurus.batch_command.results import OutputFile, ResultsSoFar, merge_results
from tokasaurus.batch_command.state_file import (
    RunState,
    StateFile,
    directory_of_run,
    path_of_results_so_far,
    path_with_base_url,
    path_with_own_server,
)
from tokasaurus.server.jobs.store.records import FINAL_STATUSES
from tokasaurus.server.protocol.batches import Endpoint

# Seconds between two looks at the batch. The first are quick, for a short batch.
_FIRST_POLL_S = 0.1
_OWN_POLL_S, _REMOTE_POLL_S = 1.0, 3.0

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_batch(config: RunConfig, words: list[str]) -> int:
    """Run the batch to its end; call from the main thread. Returns the exit code.

    0: the output is complete. 1: it is not; one line on stderr says why. 128 + N: stopped by signal N."""
    run = _Run(config, words)
    try:
        with signals_raise():
            summary = run.run()
    except CommandError as error:
        print(f"toka batch: {error}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        print(f"toka batch: stopped; {run.what_goes_on()}{run.how_to_continue()}", file=sys.stderr)
        return 128 + stopped.number
    try:
        print(summary, flush=True)
    except OSError:  # nobody reads it, but the output is complete
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


class _Run:
    """One run of the command."""

    def __init__(self, config: RunConfig, words: list[str]) -> None:
        assert config.input is not None
        assert config.output is not None
        self._config = config
        self._server_words = words
        self._input_name = config.input
        self._input = Path(config.input)
        """Of an input that can be read only once, the copy, as soon as there is one."""
        self._output = Path(config.output)
        self._so_far = ResultsSoFar(path_of_results_so_far(self._output))
        self._batch: BatchView | None = None
        """As the server has last described it."""

    def run(self) -> str:
        """The lines that sum up the complete run. Raises CommandError."""
        found = None if is_stream(self._input_name) else fingerprint(self._input)
        self._check_output()
        with ExitStack() as stack:
            self._state_file = StateFile(self._state_path())
            stack.callback(self._state_file.close)
            stored = self._state_file.read()
            if found is None:
                max_bytes = self._config.max_file_bytes if self._config.base_url is None else None
                found = copy_input(self._input_name, self._state_file, stored, max_bytes)
                self._input = self._state_file.input_copy
            new_state = RunState(found.num_bytes, found.sha256, base_url=self._config.base_url)
            self._state = new_state if stored is None or stored.file_id is None else stored
            self._check_state(new_state)
            if self._is_written():
                self._remove_state()
                return f"{self._output} is complete already"
            try:
                summary = self._run_batch()
            except BaseException as error:
                if self._state.file_id is None or isinstance(error, NothingToContinue):
                    self._remove_state()
                elif isinstance(error, NotOnServer):  # the upload has expired, or somebody has deleted the batch
                    raise CommandError(f"{error}; {self._how_to_begin_again()}") from None
                raise
            self._remove_state()
        return summary

    def _remove_state(self) -> None:
        """Remove all that the run has stored, but for the output. Raises CommandError."""
        self._so_far.remove()
        self._state_file.remove()

    def what_goes_on(self) -> str:
        """What a running server still does for a run that was stopped; empty if nothing."""
        url = self._config.base_url
        if url is None or self._batch is None or self._batch.status in FINAL_STATUSES:
            return ""
        batch_id = self._batch.id
        return f"{batch_id} goes on running on the server (toka batch cancel {batch_id} base_url={url} ends it); "

    def how_to_continue(self) -> str:
        """For a run that was stopped."""
        if not is_stream(self._input_name):
            return "the same command continues where it was"
        copy = f", as does input={self._input}, the copy" if self._input.exists() else ""
        return f"the same command with the same input continues where it was{copy}"

    def _how_to_begin_again(self) -> str:
        return f"delete {self._state_file.to_delete} to begin again"

    def _check_output(self) -> None:
        """Raises CommandError."""
        try:
            self._check_paths()
        except OSError as error:
            raise CommandError(f"output={self._output}: {error.strerror}") from None

    def _check_paths(self) -> None:
        """Raises CommandError and OSError."""
        if not self._output.parent.is_dir():
            raise CommandError(f"output={self._output}: there is no directory {self._output.parent}")
        if self._output.is_dir():
            raise CommandError(f"output={self._output}: is a directory")
        if self._output.exists() and not is_stream(self._input_name) and self._output.samefile(self._input):
            raise CommandError(f"output={self._output}: is the input")
        other = path_with_own_server if self._config.base_url is not None else path_with_base_url
        if other(self._output).exists():
            how = "without base_url=" if self._config.base_url is not None else "with base_url="
            unfinished = directory_of_run(self._output) if self._config.base_url is not None else other(self._output)
            raise CommandError(f"a run {how} is not complete: continue it so, or delete {unfinished} to begin again")

    def _state_path(self) -> Path:
        own = self._config.base_url is None
        return path_with_own_server(self._output) if own else path_with_base_url(self._output)

    def _is_written(self) -> bool:
        """Whether the last run, with this input, was interrupted after its output was complete.

        Raises CommandError if the output exists, and must not be replaced."""
        if not self._output.exists():
            return False
        if (
            self._state.output_sha256 is not None
            and fingerprint(self._output, "output").sha256 == self._state.output_sha256
        ):
            return True
        if not self._config.overwrite:
            if self._state.file_id is None:
                self._state_file.remove()
            raise CommandError(f"output={self._output}: exists; overwrite=T replaces it")
        return False

    def _check_state(self, new_state: RunState) -> None:
        """Raises CommandError if the stored state is of another run."""
        again = self._how_to_begin_again()
        if self._state.input != new_state.input:
            raise CommandError(f"input={self._input}: was changed since its batch was begun; {again}")
        if self._state.base_url != new_state.base_url:
            raise CommandError(f"the batch was begun with base_url={self._state.base_url}; {again}")

    def _run_batch(self) -> str:
        """The summary; the output is complete, and the server that was started has ended. Raises CommandError."""
        endpoint = (
            find_endpoint(self._input)
            if self._state.batch_id
            else check_input(self._input, self._input_limits(), self._input_name)
        )
        with ExitStack() as stack:
            is_continued = self._state.file_id is not None
            progress = make_progress()
            stack.callback(progress.close)
            server, base_url, api_key = self._connect(stack, progress)
            api = BatchApi(
                base_url, api_key, server, progress.note, MAX_SILENCE_SECONDS, is_local=self._config.base_url is None
            )
            stack.callback(api.close)
            batch = self._find_or_create(api, endpoint)
            if is_continued:
                progress.note(
                    f"continuing {batch.id}: {batch.num_done:,} of {batch.num_lines:,} lines are done already"
                )
            started_s, tokens_before = time.monotonic(), batch.output_tokens
            batch = self._wait_for_end(api, batch, server, progress)
            seconds = time.monotonic() - started_s
            if batch.status != "completed":
                raise self._why_incomplete(api, batch)
            outcome = self._write_results(api, batch, self._output)
        rate = (batch.output_tokens - tokens_before) / max(seconds, 1e-9)
        cut = f" ({outcome.num_cut:,} cut by length)" if outcome.num_cut else ""
        lines = "line" if batch.num_completed == 1 else "lines"
        counts = f"{batch.num_completed:,} {lines} completed{cut}, {batch.num_failed:,} failed"
        sums = f"{batch.output_tokens:,} tokens, {seconds:.1f} s, {rate:,.1f} tokens/s"
        return "\n".join([f"{counts}, {sums}", *outcome.failures(), f"the results are in {self._output}"])

    def _input_limits(self) -> InputLimits | None:
        """None if only the server at base_url knows."""
        if self._config.base_url is not None:
            return None
        return InputLimits(get_args(Endpoint), self._config.max_batch_lines, self._config.max_line_bytes)

    def _connect(self, stack: ExitStack, progress: Progress) -> tuple[Waiter, str, str | None]:
        """(server, URL of its API, key). Raises CommandError."""
        if self._config.base_url is not None:
            return GivenServer(), self._config.base_url, self._config.api_key
        if self._state.api_key is None:
            self._state = replace(self._state, api_key=secrets.token_urlsafe(32))
            self._state_file.save(self._state)
        api_key = self._state.api_key
        assert api_key is not None
        directory, drain_s = directory_of_run(self._output), self._config.drain_seconds
        server = stack.enter_context(OwnServer(self._server_words, api_key, directory, drain_s, progress.note))
        return server, f"{server.address}/v1", api_key

    def _find_or_create(self, api: BatchApi, endpoint: str) -> BatchView:
        """The batch of the run, which is written down. Raises CommandError."""
        if self._config.base_url is None:
            self._check_model(api.model_name())
        if self._state.batch_id is not None:
            batch = api.retrieve(self._state.batch_id)
            self._check_window(batch)
            return batch
        found = None
        if self._state.file_id is None:
            self._so_far.remove()  # of a run whose state the user has deleted
            self._state = replace(self._state, file_id=api.upload(self._input))
            self._check_input()  # before the state makes the upload count
            self._state_file.save(self._state)
        else:  # the last run ended here: perhaps before it knew that the batch exists
            found = api.find(self._state.file_id)
        assert self._state.file_id is not None
        if found is not None:
            batch = found
            self._check_window(batch)
        else:
            default = "30d" if self._config.base_url is None else "24h"
            window = default if self._config.completion_window is None else self._config.completion_window
            batch = api.create(self._state.file_id, endpoint, window)
        self._state = replace(self._state, batch_id=batch.id)
        self._state_file.save(self._state)
        return batch

    def _check_model(self, name: str) -> None:
        """A batch runs only with the model that it was validated for. Raises CommandError."""
        if self._state.model is None:
            self._state = replace(self._state, model=name)
        elif self._state.model != name:
            raise CommandError(
                f"the batch was begun with the model {self._state.model}, and this server serves {name}: name the same "
                f"model=, or {self._how_to_begin_again()}"
            )

    def _check_window(self, batch: BatchView) -> None:
        """Raises CommandError if the flag asks for another time than the batch has, which cannot be changed."""
        asked = self._config.completion_window
        if asked is not None and batch.completion_window not in (None, asked):
            raise CommandError(
                f"completion_window={asked}: {batch.id} was begun with {batch.completion_window}: leave the flag out "
                f"to continue it, or {self._how_to_begin_again()}"
            )

    def _check_input(self) -> None:
        """Raises CommandError if the file has changed since the run began."""
        if fingerprint(self._input) != self._state.input:
            raise CommandError(f"input={self._input}: was changed while the batch ran")

    def _wait_for_end(self, api: BatchApi, batch: BatchView, server: Waiter, progress: Progress) -> BatchView:
        """The finished batch. Raises CommandError."""
        longest_s = _REMOTE_POLL_S if isinstance(server, GivenServer) else _OWN_POLL_S
        pause_s = _FIRST_POLL_S
        self._batch = batch
        while batch.status not in FINAL_STATUSES:
            progress.update(batch)
            self._so_far.update(api, batch, progress.note)
            server.wait(pause_s)
            pause_s = min(1.5 * pause_s, longest_s)
            self._batch = batch = api.retrieve(batch.id)
        progress.update(batch)
        return batch

    def _why_incomplete(self, api: BatchApi, batch: BatchView) -> CommandError:
        """The error of a batch that has not completed; the results that it has are written beside the output."""
        if batch.status == "failed" and not batch.result_file_ids:
            return why_failed(batch)
        results = ""
        if batch.result_file_ids:
            partial = self._output.with_name(self._output.name + ".partial")
            try:
                self._write_results(api, batch, partial)
                self._so_far.remove()
                results = f"its results are in {partial}; "
            except CommandError as error:
                results = f"its results cannot be written: {error}; "
        return CommandError(
            f"{batch.id} is {batch.status}, with {batch.num_completed:,} of {batch.num_lines:,} lines completed; "
            f"{results}{self._how_to_begin_again()}"
        )

    def _write_results(self, api: BatchApi, batch: BatchView, path: Path) -> Outcome:
        """Write the results in the order of the input. Raises CommandError: then `path` is as it was."""
        is_complete, outcome = batch.status == "completed", Outcome()
        try:
            with ExitStack() as stack:
                results = []
                for file_id in batch.result_file_ids:
                    results.append(stack.enter_context(tempfile.TemporaryFile(dir=path.parent)))
                    api.download(file_id, results[-1])
                self._check_input()
                output = stack.enter_context(OutputFile(path, batch.id))
                digest = merge_results(self._input, results, output, outcome, is_complete)
                # it may have appeared since the run began
                if not self._config.overwrite and path.exists() and fingerprint(path, "output").sha256 != digest:
                    raise CommandError(f"{path} exists; overwrite=T replaces it")
                if is_complete:
                    self._state = replace(self._state, output_sha256=digest)
                    self._state_file.save(self._state)
                output.commit()
        except OSError as error:
            raise CommandError(f"{path}: {error.strerror}") from None
        return outcome


class Stopped(KeyboardInterrupt):
    """A signal asks this process to end."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def signals_raise() -> Iterator[None]:
    """Within the context, such a signal raises Stopped in the main thread, unless the process ignores it."""

    def stop(number: int, _: FrameType | None) -> None:
        raise Stopped(number)

    old = {
        number: signal.signal(number, stop)
        for number in _STOP_SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
