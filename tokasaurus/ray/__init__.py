"""Tokasaurus on Ray: an application for Ray Serve, and a stage for Ray Data.

Knows Ray, the HTTP API as its clients do, and how toka's processes are started. Does not know how a request is
scheduled or computed; schedules, restarts and scales nothing itself, which is Ray's work. The only package that imports
Ray; loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokasaurus.ray.application import app as app
    from tokasaurus.ray.data import build_processor as build_processor

# Imported when they are used: each needs another part of Ray.
_MODULES = {"app": "application", "build_processor": "data"}

if not TYPE_CHECKING:
    __all__ = [*_MODULES]

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        try:
            return getattr(import_module(f"tokasaurus.ray.{_MODULES[name]}"), name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "ray":
                raise
            raise ModuleNotFoundError(f"{error}: pip install 'ray[serve,data]'", name=error.name) from None
