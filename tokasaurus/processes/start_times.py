"""How long the phases of the last start took, by which the next one says how far it is: a file in the cache."""

import json
import os
from collections.abc import Mapping

from tokasaurus.checkpoint.cache import cache_directory
from tokasaurus.messages.status import UserError

_NAME = "start_times.json"


def read_start_times() -> dict[str, float]:
    """Seconds by name; empty if they are not known."""
    try:
        found = json.loads((cache_directory() / _NAME).read_text(encoding="utf-8"))
        return {str(name): float(seconds) for name, seconds in found.items()}
    except (OSError, ValueError, TypeError, AttributeError, UserError):  # none, or damaged
        return {}


def write_start_times(times: Mapping[str, float]) -> None:
    """Nothing happens if that is impossible."""
    try:
        path = cache_directory() / _NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{_NAME}.{os.getpid()}")
        unfinished.write_text(json.dumps(times, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(path)
    except (OSError, UserError):
        pass
