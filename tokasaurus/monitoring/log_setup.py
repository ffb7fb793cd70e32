"""Logging of one process: lines on stderr that name the process. Prompts and completions are logged only at debug."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from tokasaurus.monitoring.log_writer import QueuedStderr, log_writer

if TYPE_CHECKING:
    from tokasaurus.config import ServerConfig

_UVICORN_TRACE = 5  # uvicorn's own level below debug


def setup_logging(config: ServerConfig, process: str) -> None:
    """Log this process to stderr, replacing existing handlers. From now on no log line or print to stderr blocks.

    Levels: config.log_level for tokasaurus, config.uvicorn_log_level for uvicorn, warning for all other packages.
    Start uvicorn with `log_config=None`, or it installs its own handlers.
    """
    handler = log_writer()
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {process}: %(message)s"))
    sys.stderr = QueuedStderr(handler)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("tokasaurus").setLevel(config.log_level.upper())
    uvicorn_level = config.uvicorn_log_level
    logging.getLogger("uvicorn").setLevel(_UVICORN_TRACE if uvicorn_level == "trace" else uvicorn_level.upper())
