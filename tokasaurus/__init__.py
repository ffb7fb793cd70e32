"""Tokasaurus: an LLM inference server for high-throughput workloads.

`from tokasaurus import LLM, Sampling` is the library for programs, see docs/library.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokasaurus.library.client import AsyncClient as AsyncClient
    from tokasaurus.library.client import Client as Client
    from tokasaurus.library.connection import ServerError as ServerError
    from tokasaurus.library.engine import EngineError as EngineError
    from tokasaurus.library.llm import LLM as LLM
    from tokasaurus.library.llm import AsyncLLM as AsyncLLM
    from tokasaurus.library.map.journal import JobChanged as JobChanged
    from tokasaurus.library.map.journal import OutputFull as OutputFull
    from tokasaurus.library.map.journal import OutputInUse as OutputInUse
    from tokasaurus.library.map.outputs import MapSummary as MapSummary
    from tokasaurus.library.map.shards import RowMisfit as RowMisfit
    from tokasaurus.library.results import Result as Result
    from tokasaurus.library.results import Results as Results
    from tokasaurus.library.results import RowError as RowError
    from tokasaurus.library.results import RowsFailed as RowsFailed
    from tokasaurus.library.results import Sample as Sample
    from tokasaurus.library.results import Score as Score
    from tokasaurus.library.results import ToolCall as ToolCall
    from tokasaurus.library.sampling import Sampling as Sampling

__version__ = "0.3.0"
"""Version of the package, which `toka --version` and GET /version tell. pyproject.toml reads it here."""

# Imported when they are used, since every process of a server imports this module.
_MODULES = {
    "AsyncClient": "client",
    "AsyncLLM": "llm",
    "Client": "client",
    "EngineError": "engine",
    "JobChanged": "map.journal",
    "LLM": "llm",
    "MapSummary": "map.outputs",
    "OutputFull": "map.journal",
    "OutputInUse": "map.journal",
    "Result": "results",
    "Results": "results",
    "RowError": "results",
    "RowMisfit": "map.shards",
    "RowsFailed": "results",
    "Sample": "results",
    "Sampling": "sampling",
    "Score": "results",
    "ServerError": "bulk",
    "ToolCall": "results",
}

if not TYPE_CHECKING:  # a type checker would take it as every name there is
    __all__ = [*_MODULES]  # for `from tokasaurus import *`

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f"tokasaurus.library.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
