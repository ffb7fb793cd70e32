"""The flags of `toka batch`, which are those of the server as well."""

import pytest

from tokasaurus.cli import main
from tokasaurus.command_line import read
from tokasaurus.commands.batch.config import RunConfig, StoredConfig, server_words
from tokasaurus.config import ServerConfig

FILES = ["input=a.jsonl", "output=b.jsonl"]
URL = "base_url=http://localhost:1/v1"


def test_flags_of_the_server_are_checked_and_passed_on() -> None:
    words = [*FILES, "model=org/name", "page_size=32", "overwrite=T", "kv_cache_size_num_tokens=4096"]
    config = RunConfig.parse(words)
    assert (config.input, config.output, config.overwrite, config.page_size) == ("a.jsonl", "b.jsonl", True, 32)
    server = ServerConfig.parse(server_words(config, words))
    assert (server.model, server.page_size, server.kv_cache_num_tokens) == ("org/name", 32, 4096)
    for name in ServerConfig.flags:
        if name != "api_key" and name in RunConfig.flags:
            assert getattr(server, name) == getattr(config, name), name


def test_limits_against_clients_are_raised_unless_the_user_sets_them() -> None:
    default = ServerConfig.parse([])
    raised = ServerConfig.parse(server_words(RunConfig.parse(FILES), FILES))
    assert raised.max_batch_lines > default.max_batch_lines
    assert raised.max_file_bytes > default.max_file_bytes
    assert raised.keep_days > default.keep_days
    words = [*FILES, "max_batch_lines=10"]
    assert ServerConfig.parse(server_words(RunConfig.parse(words), words)).max_batch_lines == 10


def test_every_flag_of_the_server_is_one_of_a_run_or_set_by_it() -> None:
    assert set(ServerConfig.flags) - set(RunConfig.flags) == {
        *("host", "port", "unix_socket", "data_dir", "rl"),
        *("api_keys_file", "allowed_hosts", "cors_origins"),
    }


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "input and output are missing: toka batch input=requests.jsonl output=results.jsonl"),
        (["input=a"], "output is missing: toka batch input=requests.jsonl output=results.jsonl"),
        ([*FILES, "ovewrite=T"], "ovewrite=T: unknown flag, did you mean overwrite=?"),
        ([*FILES, "modle=x"], "modle=x: unknown flag, did you mean model=?"),
        ([*FILES, "page_size=0"], "page_size=0: must be a whole number from 1 to 2147483647"),
        ([*FILES, "overwrite=3"], "overwrite=3: must be T or F"),
        ([*FILES, "port=80"], "port: toka batch sets it itself; base_url= names a running server"),
        ([*FILES, "api_key=k"], "api_key: only with base_url=, since the server that is started takes no key"),
        (
            [*FILES, URL, "model=m"],
            "model: a flag of the server, which runs already at base_url=http://localhost:1/v1",
        ),
        (
            [*FILES, "completion_window=5x"],
            "completion_window=5x: must be a whole number with s, m, h or d after it, such as 24h, at most 30d",
        ),
        (
            [*FILES, "completion_window=31d"],
            "completion_window=31d: must be a whole number with s, m, h or d after it, such as 24h, at most 30d",
        ),
        (
            ["cancel", "batch_1", URL, "data_dir=d"],
            "base_url=http://localhost:1/v1: either it or data_dir= names the server",
        ),
        (["run"], "run: not understood, there are list, show, cancel; flags are name=value"),
        (["show"], "the batch is missing: toka batch show batch_...; toka batch list shows those there are"),
        (
            ["cancel", "port=1"],
            "the batch is missing: toka batch cancel batch_...; toka batch list shows those there are",
        ),
        (["list", "prot=1"], "prot=1: unknown flag, did you mean port=?"),
        (["show", "batch_1", "port=0"], "port=0: must be a whole number from 1 to 65535"),
    ],
)
def test_a_wrong_argument_gives_one_line_and_exit_code_2(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["batch", *words]) == 2
    assert capsys.readouterr() == ("", f"toka batch: {line}\n")


def test_keys_of_the_environment_are_those_of_a_running_server() -> None:
    environment = {"OPENAI_API_KEY": "openai"}
    assert read(RunConfig, [*FILES, URL], environment).config.api_key == "openai"
    environment["TOKA_API_KEY"] = "toka"
    assert read(RunConfig, [*FILES, URL], environment).config.api_key == "toka"
    assert read(RunConfig, [*FILES, URL, "api_key=typed"], environment).config.api_key == "typed"
    assert read(RunConfig, FILES, environment).config.api_key is None


def test_flags_for_starting_a_server_in_the_environment_do_not_matter_beside_a_running_one() -> None:
    environment = {"TOKA_MODEL": "org/name", "TOKA_PORT": "80", "TOKA_OVERWRITE": "T"}
    given = read(RunConfig, [*FILES, URL], environment)
    assert (given.config.model, given.config.overwrite) == (None, True)
    given = read(RunConfig, FILES, environment)
    server = ServerConfig.parse(server_words(given.config, given.words))
    assert (server.model, server.port) == ("org/name", ServerConfig.port)


def test_stored_batches_are_by_default_those_of_the_default_port() -> None:
    config = StoredConfig.parse([])
    assert (config.data_dir, config.port) == (None, ServerConfig.parse([]).port)


def test_help_lists_the_actions_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["batch", "--help-all"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name}" in out for name in RunConfig.flags)
    assert all(f"toka batch {word}" in out for word in ("FILE OUTPUT", "list", "show ID", "cancel ID"))
    assert main(["batch", "list", "--help"]) == 0
    assert "data_dir (by port)" in capsys.readouterr().out
