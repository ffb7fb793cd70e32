"""An engine of the program's own, used as any server is: `LLM`, and `AsyncLLM` for programs with an event loop."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import Unpack

from tokasaurus.config import DEMO, FLAGS_OF_ACCESS, ServerConfig
from tokasaurus.habits import flag_meant
from tokasaurus.library.client import AsyncClient, Client
from tokasaurus.library.connection import Server, ServerError
from tokasaurus.library.engine import EngineError, EngineNotUp, PrivateEngine
from tokasaurus.library.model_files import ModelFiles, find_model_files
from tokasaurus.library.sampling import Sampling

if TYPE_CHECKING:
    from tokasaurus.library.keywords import EngineFlags

NO_FLAGS = (*FLAGS_OF_ACCESS, "api_key")
# The log is beside what the program prints, and the progress.
_OWN_DEFAULTS = {"log_level": "warning"}
_RESTART_S = 600.0
"""Longest start of an engine again."""
_WAIT_S = 0.5
"""Longest wait of a thread: an interrupted program ends only when its threads of this kind do."""


class AsyncLLM(AsyncClient):
    """LLM for programs with an event loop. The engine starts when the context is entered, or with the first call.

    ```python
    async with AsyncLLM("Qwen/Qwen3-0.6B") as llm:
        results = await llm.generate(["Once upon a time"])
    ```
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        concurrency: int | None = None,
        show: bool = True,
        **flags: Unpack[EngineFlags],
    ) -> None:
        """The arguments are those of `LLM`."""
        super().__init__(concurrency=concurrency)
        words = _words(model, flags)
        path = None if model is None or model == DEMO else Path(model).expanduser()
        self._asked_model = model or DEMO
        self._model_paths = [path.resolve()] if path is not None and path.exists() else []
        """Paths of the last whole set of weights, if it is local, and of the partial ones since."""
        self._engine = PrivateEngine(words, _print if show else _ignore)
        self._has_started = False

    def _describe(self, class_name: str) -> str:
        return f"{class_name}({self._model or self._asked_model}{', closed' if self._is_closed else ''})"

    async def connect(self) -> str:
        """Starts the engine, if it has not been; the name of its model. Raises EngineError."""
        async with self._connecting:
            if not self._has_started and not self._is_closed:
                try:
                    await asyncio.to_thread(self._engine.start)
                except asyncio.CancelledError:
                    self._engine.close()  # else its thread goes on, and asyncio.run waits for it
                    raise
                self._has_started = True
        return await super().connect()

    async def close(self) -> None:
        """Ends the engine's processes."""
        await super().close()
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        self._engine.close()

    def check_engine(self) -> None:
        """Raises EngineError if the engine is closed, or has died so often that it is not started again."""
        self._engine.check()

    def _find_model_files(self) -> ModelFiles | None:
        return find_model_files(*self._model_paths)

    def _note_weights(self, directory: Path, is_partial: bool) -> None:
        self._model_paths = [*(self._model_paths if is_partial else ()), directory]

    def _make_server(self) -> Server:
        async def wait_until_up() -> None:
            deadline = time.monotonic() + _RESTART_S
            while True:
                try:
                    await asyncio.to_thread(self._engine.wait_until_up, _WAIT_S)
                except EngineError as error:
                    if isinstance(error, EngineNotUp) and time.monotonic() < deadline:
                        continue
                    raise ServerError(str(error)) from None
                return

        return Server("http://localhost", "", self._engine.socket_path, wait_until_up)


class LLM(Client):
    """A model, in processes of its own on this machine.

    ```python
    with LLM("Qwen/Qwen3-0.6B") as llm:
        for result in llm.chat([[{"role": "user", "content": "What is the capital of Germany?"}]]):
            print(result.text)
    ```

    The processes are those of `toka`. They can be reached by this program only, are started again if they die, and end
    with the program, however it ends. The methods may be called from any thread, and where an event loop runs.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        concurrency: int | None = None,
        show: bool = True,
        **flags: Unpack[EngineFlags],
    ) -> None:
        """Returns when the model is loaded.

        model: as `toka model=`: a repository id, a directory or a GGUF file; "demo" or None for the small demo model.
        concurrency: most prompts that are in the engine at once; None: as many as its scheduler can look ahead over.
        show: print the phases of the start, and warnings, on stderr; log_level="info" shows more.
        flags: of `toka`, such as kv_cache_num_tokens=100_000 or dp_size=2; `toka --help-all` lists them.

        Raises TypeError or ValueError for a wrong flag, and EngineError if the engine does not start; one line says
        why."""
        self._llm = AsyncLLM(model, concurrency=concurrency, show=show, **flags)
        self._start(self._llm)

    def check_engine(self) -> None:
        """Raises EngineError if the engine is closed, or has died so often that it is not started again.

        All rows have that error from then on."""
        self._llm.check_engine()


def _words(model: str | None, flags: Mapping[str, object]) -> list[str]:
    """Flags as on a command line. Raises TypeError and ValueError."""
    for name in flags:
        if name in inspect.signature(Sampling).parameters:
            raise TypeError(f"LLM has no argument {name!r}: it belongs into Sampling")
        if name not in ServerConfig.flags and name not in ServerConfig.retired:
            meant = flag_meant(name) or ", and toka no flag of this name"
            raise TypeError(f"LLM has no argument {name!r}{meant}")
        if name in NO_FLAGS:
            raise TypeError(f"LLM has no argument {name!r}: only this program can reach its engine")
    if model is not None:
        flags = {"model": model, **flags}
    words = flag_words({**_OWN_DEFAULTS, **flags})
    ServerConfig.parse(words)  # FlagError, a ValueError, names the flag
    return words


def flag_words(flags: Mapping[str, object]) -> list[str]:
    """Flags as on a command line, in their order. None is checked."""
    return [f"{name}={_written(value)}" for name, value in flags.items()]


def _written(value: object) -> str:
    if isinstance(value, bool):
        return "T" if value else "F"
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _ignore(_line: str) -> None: ...
