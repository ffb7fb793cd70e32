"""`toka batch`: run a file of requests, with a server of its own or a running one; run again, it continues."""

import os
import sys
import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from tokasaurus.commands.batch.config import RunConfig, server_words
from tokasaurus.commands.batch.errors import CommandError, NothingToContinue, NotOnServer
from tokasaurus.commands.batch.input_file import (
    Fingerprint,
    InputLimits,
    check_input,
    copy_stream,
    find_endpoint,
    fingerprint,
    is_stream,
)
from tokasaurus.commands.batch.own import INPUT_ID, OwnBatch, OwnServer, store_batch
from tokasaurus.commands.batch.progress import BatchView, Progress
from tokasaurus.commands.batch.remote import MAX_SILENCE_SECONDS, BatchApi, RemoteBatch
from tokasaurus.commands.batch.results import Outcome, OutputFile, ResultsSoFar, why_failed
from tokasaurus.commands.batch.state_file import (
    RunState,
    StateFile,
    directory_of_run,
    path_of_results_so_far,
    path_with_base_url,
    path_with_own_server,
)
from tokasaurus.processes.stop_signals import Stopped, signals_raise
from tokasaurus.server.jobs.store.records import FINAL_STATUSES
from tokasaurus.server.protocol.batches import LINE_URLS

# Seconds between two looks at the batch. The first are quick, for a short batch.
_FIRST_PAUSE_S = 0.1


class Batch(Protocol):
    """The batch of a run. Methods raise CommandError."""

    max_pause_s: float

    def view(self) -> BatchView: ...

    def wait(self, seconds: float) -> None: ...

    def read_results(self, first: int) -> list[bytes]: ...

    def results(self, batch: BatchView, so_far: ResultsSoFar, name: Path) -> AbstractContextManager[OutputFile]: ...


def run_batch(config: RunConfig, words: list[str]) -> int:
    """Run the batch to its end; call from the main thread. Returns the exit code: 128 + N if it is stopped by signal N.

    Raises CommandError if the output is not complete; its exit code is 2 if the server refused a flag or the model."""
    run = _Run(config, server_words(config, words))
    try:
        with signals_raise():
            summary = run.run()
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
        """The input's file; its copy, as soon as there is one, if the input can be read only once."""
        self._output = Path(config.output)
        self._so_far = ResultsSoFar(path_of_results_so_far(self._output))
        self._batch: BatchView | None = None
        """The batch as the server has last described it."""
        self._own_server: OwnServer | None = None

    def run(self) -> str:
        """The lines that sum up the complete run. Raises CommandError."""
        found = None if is_stream(self._input_name) else fingerprint(self._input)
        self._check_output()
        with ExitStack() as stack:
            self._state_file = StateFile(self._state_path())
            stack.callback(self._state_file.close)
            stored = self._state_file.read()
            if found is None:
                found = self._copy_input(stored)
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

    def _copy_input(self, stored: RunState | None) -> Fingerprint:
        """Copy an input that can be read only once: results are put in its order, and a later run can continue with it.

        stored: the state of the last run. Raises CommandError, also if that run had another input; if there was none,
        nothing is left."""
        name, copy = self._input_name, self._state_file.input_copy
        new_copy = copy.with_name(f"{copy.name}.part")
        is_begun = stored is not None and stored.file_id is not None
        try:
            found = copy_stream(name, new_copy, self._config.max_file_bytes if self._config.base_url is None else None)
            if is_begun and stored is not None and found != stored.input:
                what = "is empty" if found.num_bytes == 0 else "is not what its batch was begun with"
                kept = f"input={copy} continues with the copy" if copy.exists() else "give it the same input"
                raise CommandError(f"input={name}: {what}: {kept}, or {self._how_to_begin_again()}")
            if found.num_bytes == 0:
                raise CommandError(f"input={name}: is empty")
            new_copy.replace(copy)
        except BaseException:
            new_copy.unlink(missing_ok=True)
            if not is_begun:
                self._state_file.remove()
            raise
        return found

    def _remove_state(self) -> None:
        """Remove all that the run has stored, but for the output. Raises CommandError."""
        self._so_far.remove()
        self._state_file.remove()

    def what_goes_on(self) -> str:
        """What a running server still does for a run that was stopped, or what the run's own has kept; empty if
        nothing."""
        url = self._config.base_url
        if self._own_server is not None and (totals := self._own_server.totals) is not None:
            return f"{totals.what_goes_on()}; " if totals.num_lines_left else ""
        if url is None or self._batch is None or self._batch.status in FINAL_STATUSES:
            return ""
        batch_id = self._batch.id
        return f"{batch_id} goes on running on the server (toka batch cancel {batch_id} base_url={url} ends it); "

    def how_to_continue(self) -> str:
        """How to continue a stopped run, as the end of a line."""
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
        with ExitStack() as stack:
            is_continued = self._state.file_id is not None
            progress = Progress()
            stack.callback(progress.close)
            open_batch = self._open_own if self._config.base_url is None else self._open_remote
            batch: Batch = open_batch(stack, progress)
            self._batch = view = batch.view()
            if is_continued:
                progress.note(f"continuing {view.id}: {view.num_done:,} of {view.num_lines:,} lines are done already")
            started_s, tokens_before = time.monotonic(), view.output_tokens
            view = self._wait_for_end(batch, progress)
            seconds = time.monotonic() - started_s
            if view.status != "completed":
                raise self._why_incomplete(batch, view)
            outcome = self._write_results(batch, view, self._output)
        rate = (view.output_tokens - tokens_before) / max(seconds, 1e-9)
        cut = f" ({outcome.num_cut:,} cut by length)" if outcome.num_cut else ""
        lines = "line" if view.num_completed == 1 else "lines"
        counts = f"{view.num_completed:,} {lines} completed{cut}, {view.num_failed:,} failed"
        sums = f"{view.output_tokens:,} tokens, {seconds:.1f} s, {rate:,.1f} tokens/s"
        return "\n".join([f"{counts}, {sums}", *outcome.failures.lines(), f"the results are in {self._output}"])

    def _open_own(self, stack: ExitStack, progress: Progress) -> OwnBatch:
        """The batch in the run's own data directory, which is written down, and a server that runs it."""
        config, root = self._config, directory_of_run(self._output)
        is_new, batch_id = self._state.batch_id is None, self._state.batch_id
        if batch_id is None:
            self._so_far.remove()  # of a run whose state the user has deleted
            limits = InputLimits(LINE_URLS, config.max_batch_lines, config.max_line_bytes)
            window = config.completion_window or "30d"
            batch_id = store_batch(root, self._input, self._input_name, limits, config.max_file_bytes, window)
        batch = OwnBatch(root, batch_id, self._input, self._state.input)
        stack.callback(batch.close)
        if is_new:
            self._save(replace(self._state, file_id=INPUT_ID, batch_id=batch_id))
        view = batch.view()
        self._check_window(view)
        if view.status not in FINAL_STATUSES:
            try:
                server = OwnServer(self._server_words, root, config.drain_seconds, progress.note)
                stack.enter_context(server)
            except BaseException:
                if is_new:  # nothing has run, so nothing is left behind
                    self._state = replace(self._state, file_id=None)
                raise
            self._own_server = server
            batch.run_by(server)
            self._check_model(batch.record().model, server.model)
        return batch

    def _open_remote(self, stack: ExitStack, progress: Progress) -> RemoteBatch:
        """The batch on the server at base_url, which is written down."""
        config = self._config
        assert config.base_url is not None
        if self._state.batch_id is None:
            endpoint = find_endpoint(self._input)
            check_input(self._input, endpoint, None, self._input_name)
        api = BatchApi(config.base_url, config.api_key, progress.note, MAX_SILENCE_SECONDS, is_local=False)
        stack.callback(api.close)
        if self._state.batch_id is not None:
            view: BatchView | None = api.retrieve(self._state.batch_id)
        elif self._state.file_id is not None:  # the last run ended here: perhaps before it knew that the batch exists
            view = api.find(self._state.file_id)
        else:
            view = None
            self._so_far.remove()  # of a run whose state the user has deleted
            file_id = api.upload(self._input)
            self._check_input()  # before the state makes the upload count
            self._save(replace(self._state, file_id=file_id))
        if view is not None:
            self._check_window(view)
        else:
            assert self._state.file_id is not None
            view = api.create(self._state.file_id, endpoint, config.completion_window or "24h")
        self._save(replace(self._state, batch_id=view.id))
        return RemoteBatch(api, view, self._input)

    def _save(self, state: RunState) -> None:
        """Write down what is done. Raises CommandError."""
        self._state = state
        self._state_file.save(self._state)

    def _check_model(self, begun_with: str | None, served: str) -> None:
        """A batch runs only with the model that it was begun with. Raises CommandError."""
        if begun_with != served:
            raise CommandError(
                f"the batch was begun with the model {begun_with}, and this server serves {served}: name the same "
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

    def _wait_for_end(self, batch: Batch, progress: Progress) -> BatchView:
        """The finished batch. Raises CommandError."""
        pause_s = _FIRST_PAUSE_S
        while (view := batch.view()).status not in FINAL_STATUSES:
            self._batch = view
            progress.update(view)
            self._so_far.update(batch.read_results, view.num_done, progress.note)
            batch.wait(pause_s)
            pause_s = min(1.5 * pause_s, batch.max_pause_s)
        self._batch = view
        progress.update(view)
        return view

    def _why_incomplete(self, batch: Batch, view: BatchView) -> CommandError:
        """The error of a batch that has not completed; the results that it has are written beside the output."""
        if view.status == "failed" and not view.has_results:
            return why_failed(view)
        results = ""
        if view.has_results:
            partial = self._output.with_name(self._output.name + ".partial")
            try:
                self._write_results(batch, view, partial)
                self._so_far.remove()
                results = f"its results are in {partial}; "
            except CommandError as error:
                results = f"its results cannot be written: {error}; "
        return CommandError(
            f"{view.id} is {view.status}, with {view.num_completed:,} of {view.num_lines:,} lines completed; "
            f"{results}{self._how_to_begin_again()}"
        )

    def _write_results(self, batch: Batch, view: BatchView, name: Path) -> Outcome:
        """Write the results in the order of the input. Raises CommandError: then the file `name` is as it was."""
        try:
            with batch.results(view, self._so_far, name) as output:
                self._check_input()
                # it may have appeared since the run began
                if not self._config.overwrite and name.exists() and fingerprint(name, "output").sha256 != output.sha256:
                    raise CommandError(f"{name} exists; overwrite=T replaces it")
                if view.status == "completed":
                    self._save(replace(self._state, output_sha256=output.sha256))
                output.commit(name)
                return output.outcome
        except OSError as error:
            raise CommandError(f"{name}: {error.strerror}") from None
