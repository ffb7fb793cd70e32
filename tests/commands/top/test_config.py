"""The flags of `toka top`."""

import pytest

from tokasaurus.commands.top.config import TopConfig
from tokasaurus.flags import FlagError


@pytest.mark.parametrize(
    ("words", "url", "name"),
    [
        ([], "http://127.0.0.1:10210", "http://127.0.0.1:10210"),
        (["host=::1", "port=8080"], "http://[::1]:8080", "http://[::1]:8080"),
        (["base_url=https://h/v1"], "https://h", "https://h"),
        (["unix_socket=/run/toka"], "http://localhost", "unix_socket=/run/toka"),
    ],
)
def test_a_server_is_named_by_its_url_or_its_socket(words: list[str], url: str, name: str) -> None:
    config = TopConfig.parse(words)
    assert (config.url, config.server_name) == (url, name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["base_url=localhost:10210"], "base_url=localhost:10210: must begin with http:// or https://"),
        (["base_url=http://h", "unix_socket=/s"], "unix_socket=/s: either it or base_url= names the server"),
        (["speed=2"], "speed=2: only of a replay="),
        (["replay=a", "speed=0"], "speed=0: must be a number from 0.01 to 10000, or None"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(FlagError) as raised:
        TopConfig.parse(words)
    assert str(raised.value).startswith(message)
