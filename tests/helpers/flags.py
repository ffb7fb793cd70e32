"""Configs of a server for tests."""

from typing import Any

from tokasaurus.config import ServerConfig


def config_with(**flags: Any) -> ServerConfig:
    """The default flags, but for these. They are not checked: some tests need less than a user may ask for."""
    config = ServerConfig()
    for name, value in flags.items():
        assert name in ServerConfig.flags or name in ServerConfig.retired, name
        setattr(config, name, value)
    return config
