"""`toka batch`: run a file of requests on a running server, or on one that it starts; run again, it continues."""

import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from tokasaurus.addresses import URL_OF_SOCKETS
from tokasaurus.commands.batch.api import MAX_SILENCE_SECONDS, BatchApi
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
from tokasaurus.commands.batch.own_server import OwnServer
from tokasaurus.commands.batch.progress import BatchView, Progress
from tokasaurus.commands.batch.results import Outcome, ResultsSoFar, merged, why_failed
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
_MAX_PAUSE_S = 1.0
# Of another kind of server, which has no progress of lines that run, and may count requests.
_MAX_PAUSE_OF_OTHERS_S = 3.0

ALL_FAILED = 3
"""Exit code if the output is complete, and every line has failed."""


def run_batch(config: RunConfig, words: list[str]) -> int:
    """Run the batch to its end; call from the main thread. Returns the exit code: 0 or ALL_FAILED if the output is
    complete, 128 + N if it is stopped by signal N.

    Raises CommandError if the output is not complete; its exit code is 2 if the server refused a flag or the model."""
    run = _Run(config, server_words(config, words))
    try:
        with signals_raise():
            summary, exit_code = run.run()
    except Stopped as stopped:
        print(f"toka batch: stopped; {run.what_goes_on()}{run.how_to_continue()}", file=sys.stderr)
        return 128 + stopped.number
    try:
        print(summary, flush=True)
    except OSError:  # nobody reads it, but the output is complete
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return exit_code


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

    def run(self) -> tuple[str, int]:
        """(the lines that sum up the complete run, the exit code). Raises CommandError."""
        found = None if is_stream(self._input_name) else fingerprint(self._input)
        self._check_output()
        with ExitStack() as stack:
            self._state_file = StateFile(self._state_path())
            stack.callback(self._state_file.close)
            stored = self._state_file.read()
            if found is None:
                found = self._copy_input(stored)
                self._input = self._state_file.input_copy
            window = self._config.completion_window
            new_state = RunState(found.num_bytes, found.sha256, self._config.base_url, window)
            self._state = new_state if stored is None or stored.file_id is None else stored
            self._check_state(new_state)
            if self._is_written():
                self._remove_state()
                return f"{self._output} is complete already", self._state.exit_code
            try:
                summary = self._run_batch()
            except BaseException as error:
                if self._state.file_id is None or isinstance(error, NothingToContinue):
                    self._remove_state()
                elif isinstance(error, NotOnServer):  # the upload has expired, or somebody has deleted the batch
                    raise CommandError(f"{error}; {self._how_to_begin_again()}") from None
                raise
            self._remove_state()
        return summary, self._state.exit_code

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
        begun, asked = self._state.completion_window, new_state.completion_window
        if asked is not None and begun not in (None, asked):
            raise CommandError(
                f"completion_window={asked}: the batch was begun with {begun}: leave the flag out to continue it, "
                f"or {again}"
            )

    def _run_batch(self) -> str:
        """The summary; the output is complete, and the server that was started has ended. Raises CommandError."""
        with ExitStack() as stack:
            is_continued = self._state.file_id is not None
            progress = Progress()
            stack.callback(progress.close)
            api = self._connect(stack, progress)
            self._batch = view = self._find_batch(api) or self._begin_batch(api)
            self._save(replace(self._state, batch_id=view.id))
            self._check_model(view)
            if is_continued:
                progress.note(f"continuing {view.id}: {view.num_done:,} of {view.num_lines:,} lines are done already")
            started_s, tokens_before = time.monotonic(), view.output_tokens
            view = self._wait_for_end(api, view.id, progress)
            seconds = time.monotonic() - started_s
            if view.status != "completed":
                raise self._why_incomplete(api, view)
            outcome = self._write_results(api, view, self._output)
        rate = (view.output_tokens - tokens_before) / max(seconds, 1e-9)
        cut = f" ({outcome.num_cut:,} cut by length)" if outcome.num_cut else ""
        lines = "line" if view.num_completed == 1 else "lines"
        counts = f"{view.num_completed:,} {lines} completed{cut}, {view.num_failed:,} failed"
        sums = f"{view.output_tokens:,} tokens, {seconds:.1f} s, {rate:,.1f} tokens/s"
        return "\n".join([f"{counts}, {sums}", *outcome.failures.lines(), f"the results are in {self._output}"])

    def _connect(self, stack: ExitStack, progress: Progress) -> BatchApi:
        """The server's API within the stack; a new input is checked before."""
        config = self._config
        if self._state.file_id is None:
            self._so_far.remove()  # of a run whose state the user has deleted
            limits = None
            if config.base_url is None:
                limits = InputLimits(LINE_URLS, config.max_batch_lines, config.max_line_bytes)
                if self._state.input_bytes > config.max_file_bytes:
                    most = f"{config.max_file_bytes} bytes (max_file_bytes)"
                    raise CommandError(f"input={self._input_name}: has more than {most}")
            check_input(self._input, find_endpoint(self._input), limits, self._input_name)
        if config.base_url is not None:
            api = BatchApi(config.base_url, config.api_key, progress.note, MAX_SILENCE_SECONDS, is_local=False)
        else:
            root = directory_of_run(self._output)
            server = OwnServer(self._server_words, root, config.drain_seconds, progress.note)
            self._own_server = stack.enter_context(server)
            api = BatchApi(
                f"{URL_OF_SOCKETS}/v1",
                None,
                progress.note,
                MAX_SILENCE_SECONDS,
                is_local=True,
                unix_socket=server.socket_path,
                wait=server.wait,
            )
        stack.callback(api.close)
        return api

    def _find_batch(self, api: BatchApi) -> BatchView | None:
        """The batch that the last run has begun, perhaps without knowing that it exists; None if it has not."""
        if self._state.batch_id is not None:
            return api.retrieve(self._state.batch_id)
        return None if self._state.file_id is None else api.find(self._state.file_id)

    def _begin_batch(self, api: BatchApi) -> BatchView:
        """A new batch, of which each step is written down."""
        window = self._state.completion_window or ("30d" if self._config.base_url is None else "24h")
        file_id = self._state.file_id
        if file_id is None:
            file_id = api.upload(self._input)
            self._check_input()  # before the state makes the upload count
            self._save(replace(self._state, file_id=file_id, completion_window=window))
        return api.create(file_id, find_endpoint(self._input), window)

    def _save(self, state: RunState) -> None:
        """Write down what is done. Raises CommandError."""
        self._state = state
        self._state_file.save(self._state)

    def _check_model(self, view: BatchView) -> None:
        """A batch runs only with the model that it was begun with. Raises CommandError."""
        if self._own_server is not None and view.model != self._own_server.model:
            raise CommandError(
                f"the batch was begun with the model {view.model}, and this server serves {self._own_server.model}: "
                f"name the same model=, or {self._how_to_begin_again()}"
            )

    def _check_input(self) -> None:
        """Raises CommandError if the file has changed since the run began."""
        if fingerprint(self._input) != self._state.input:
            raise CommandError(f"input={self._input}: was changed while the batch ran")

    def _version_of_input(self) -> tuple[int, int, int]:
        """(which file it is, its size, when it was changed last)"""
        try:
            status = self._input.stat()
        except OSError as error:
            raise CommandError(f"input={self._input}: {error.strerror}") from None
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _wait_for_end(self, api: BatchApi, batch_id: str, progress: Progress) -> BatchView:
        """The finished batch. Raises CommandError."""
        pause_s, version = _FIRST_PAUSE_S, self._version_of_input()
        while (view := api.retrieve(batch_id)).status not in FINAL_STATUSES:
            self._batch = view
            progress.update(view)
            self._so_far.update(partial(api.results_from, batch_id), view.num_done, progress.note)
            api.wait(pause_s)
            if version != (version := self._version_of_input()):
                self._check_input()
            pause_s = min(1.5 * pause_s, _MAX_PAUSE_S if view.tells_progress else _MAX_PAUSE_OF_OTHERS_S)
        self._batch = view
        progress.update(view)
        return view

    def _why_incomplete(self, api: BatchApi, view: BatchView) -> CommandError:
        """The error of a batch that has not completed; the results that it has are written beside the output."""
        if view.status == "failed" and not view.result_file_ids:
            return why_failed(view)
        results = ""
        if view.result_file_ids:
            beside = self._output.with_name(self._output.name + ".partial")
            try:
                self._write_results(api, view, beside)
                self._so_far.remove()
                results = f"its results are in {beside}; "
            except CommandError as error:
                results = f"its results cannot be written: {error}; "
        return CommandError(
            f"{view.id} is {view.status}, with {view.num_completed:,} of {view.num_lines:,} lines completed; "
            f"{results}{self._how_to_begin_again()}"
        )

    def _write_results(self, api: BatchApi, view: BatchView, name: Path) -> Outcome:
        """Write the results in the order of the input. Raises CommandError: then the file `name` is as it was."""
        is_complete = view.status == "completed"
        try:
            with ExitStack() as stack:
                files = []
                for file_id in view.result_file_ids:
                    files.append(stack.enter_context(tempfile.TemporaryFile(dir=name.parent)))
                    api.download(file_id, files[-1])
                output = self._so_far.complete(lambda: merged(self._input, files, is_complete))
            self._check_input()
            # it may have appeared since the run began
            if not self._config.overwrite and name.exists() and fingerprint(name, "output").sha256 != output.sha256:
                raise CommandError(f"{name} exists; overwrite=T replaces it")
            if is_complete:
                exit_code = ALL_FAILED if view.num_completed == 0 else 0
                self._save(replace(self._state, output_sha256=output.sha256, exit_code=exit_code))
            output.commit(name)
            return output.outcome
        except OSError as error:
            raise CommandError(f"{name}: {error.strerror}") from None
