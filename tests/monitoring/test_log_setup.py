"""What a process's log shows at which level."""

import logging
from collections.abc import Iterator

import pytest

from tokasaurus.config import parse_server_config
from tokasaurus.monitoring.log_setup import setup_logging


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in (None, "tokasaurus", "uvicorn")]
    levels = [logger.level for logger in loggers]
    handlers = loggers[0].handlers[:]
    yield
    loggers[0].handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ([], ["ours info", "uvicorn info", "other warning"]),
        (["log_level=debug"], ["ours debug", "ours info", "uvicorn info", "other warning"]),
        (["log_level=error", "uvicorn_log_level=trace"], ["uvicorn trace", "uvicorn info", "other warning"]),
        (["uvicorn_log_level=error"], ["ours info", "other warning"]),
    ],
)
def test_each_flag_sets_the_level_of_its_own_part(
    flags: list[str], shown: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    setup_logging(parse_server_config(flags), "manager")
    logging.getLogger("tokasaurus.manager.loop").debug("ours debug")
    logging.getLogger("tokasaurus.manager.loop").info("ours info")
    logging.getLogger("uvicorn.error").log(5, "uvicorn trace")
    logging.getLogger("uvicorn.access").info("uvicorn info")
    logging.getLogger("httpx").info("other info")
    logging.getLogger("httpx").warning("other warning")
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition(" manager: ")[2] for line in lines] == shown
