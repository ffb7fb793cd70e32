"""What a user sets: habits of other programs' command lines, environment variables, a YAML file, and their order."""

import io
import shlex
from pathlib import Path

import pytest

from tokasaurus.cli import config_types, main
from tokasaurus.command_line import Given, listing, read, unknown_variables, variables_of
from tokasaurus.commands.ping import PingConfig
from tokasaurus.commands.plan import parse_size
from tokasaurus.config import ServerConfig
from tokasaurus.flags import SUFFIXES_IN_WORDS, FlagConfig, FlagError, given_text, number_with_suffix
from tokasaurus.habits import HABITS, OPTIONS, Habit


def given(*words: str, environment: dict[str, str] | None = None) -> Given[ServerConfig]:
    return read(ServerConfig, words, environment or {}, ("model",))


def refusal(*words: str, environment: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(FlagError) as caught:
        given(*words, environment=environment)
    return list(caught.value.lines)


FROM_1 = "must be a whole number from 1 to 2147483647"
OPTION_HABITS = [habit for habit in HABITS if not habit.is_command]
ALWAYS = {"input", "output"}
"""Flags of `toka batch`, whose habits are those of a sub-command."""


def config_of(habit: Habit) -> type[FlagConfig]:
    return config_types()["batch"] if habit.flag in ALWAYS else ServerConfig


@pytest.mark.parametrize(
    "habit", [habit for habit in OPTION_HABITS if not habit.refusal], ids=lambda habit: habit.example
)
def test_habit_is_taken_for_our_flags(habit: Habit) -> None:
    needed = [word for word in ("input=a", "output=b") if word.partition("=")[0] != habit.flag]
    needed = needed if habit.flag in ALWAYS else []
    config_type = config_of(habit)
    option, *rest = shlex.split(habit.example)
    first = read(config_type, [option, *rest, *needed], {})
    assert first.config.__dict__ == config_type.parse([*habit.means.split(), *needed]).__dict__
    assert {word for word in first.words if word not in needed} == set(habit.means.split())
    if rest:  # the same with an equals sign, and without dashes
        for word in (f"{option}={rest[0]}", f"{option.strip('-').replace('-', '_')}={rest[0]}"):
            assert read(config_type, [word, *needed], {}).config.__dict__ == first.config.__dict__
    for name in habit.names:
        assert OPTIONS[name] is habit, "no other row has the name"


@pytest.mark.parametrize("habit", [habit for habit in OPTION_HABITS if habit.refusal], ids=lambda habit: habit.example)
def test_habit_is_answered_with_what_to_do(habit: Habit) -> None:
    assert refusal(*shlex.split(habit.example)) == [f"{habit.example}: {habit.refusal}"]
    assert refusal(*shlex.split(habit.example), "port=80", "--rl", "tp_size=x")[1:] == [
        "tp_size=x: must be a whole number from 1 to 2147483647"
    ], "its value is not taken for a word of its own"
    named = [word.rstrip("=") for word in habit.refusal.replace(",", " ").split() if word.endswith("=")]
    assert set(named) <= set(ServerConfig.flags)


@pytest.mark.parametrize("habit", [habit for habit in HABITS if habit.is_command], ids=lambda habit: habit.example)
def test_sub_command_of_another_program(habit: Habit, capsys: pytest.CaptureFixture[str]) -> None:
    if habit.refusal:
        assert main(habit.example.split()) == 2
        assert capsys.readouterr() == ("", f"toka: {habit.example.split()[0]}: {habit.refusal}\n")
        return
    shown = []
    for words in (habit.example, habit.means):
        assert main([*words.split(), "--print-config"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert "command line" in shown[0]


def test_there_are_habits_of_every_program() -> None:
    programs = {name for habit in HABITS for name in habit.program.split(", ")}
    assert programs == {"vLLM", "SGLang", "llama.cpp", "Ollama", "tokasaurus"}
    assert len(HABITS) >= 24
    names = [(habit.is_command, name) for habit in HABITS for name in habit.names]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("words", "same"),
    [
        (["--port", "8080"], ["port=8080"]),
        (["--port=8080"], ["port=8080"]),
        (["--max-seqs-per-forward", "8"], ["max_seqs_per_forward=8"]),
        (["max-seqs-per-forward=8"], ["max_seqs_per_forward=8"]),
        (["--rl"], ["rl=T"]),
        (["--rl", "false", "--port", "1"], ["rl=F", "port=1"]),
        (["--no-greedy-prefill"], ["greedy_prefill=F"]),
        (["--torch-compile", "--device", "cpu"], ["torch_compile=T", "device=cpu"]),
        (
            ["--rope-scaling", '{"rope_type":"linear","factor":2.0}'],
            ['rope_scaling={"rope_type":"linear","factor":2.0}'],
        ),
        (["org/name", "port=1"], ["model=org/name", "port=1"]),
        (["--kv-cache-num-tokens", "auto"], []),
        (["--kv-cache-num-tokens", "64k"], ["kv_cache_num_tokens=64000"]),
        (["max_file_bytes=1.5G"], ["max_file_bytes=1610612736"]),
        (
            ["max_num_tokens_per_request=8K", "max_tokens_per_forward=4K"],
            ["max_num_tokens_per_request=8192", "max_tokens_per_forward=4096"],
        ),
        (
            ["dtype=bf16", "kv_cache_dtype=half", "device=gpu"],
            ["dtype=bfloat16", "kv_cache_dtype=float16", "device=cuda"],
        ),
        (["dtype=fp16", "kv_cache_dtype=float"], ["dtype=float16", "kv_cache_dtype=float32"]),
        (["demo"], ["model=demo"]),
        (["--any-model", "org/name"], ["model_aliases=*", "model=org/name"]),
        (["--any-model", "--rl"], ["model_aliases=*", "rl=T"]),
        (["--any-model", "false", "org/name"], ["model=org/name"]),
        (["any_model=F"], []),
        (["--enable-chosen-logprobs", "org/name"], ["model=org/name"]),
        (["--uvicorn-log-level", "debug", "org/name"], ["model=org/name"]),
    ],
)
def test_our_flags_are_understood_as_options_too(words: list[str], same: list[str]) -> None:
    assert given(*words).config.__dict__ == ServerConfig.parse(same).__dict__


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["port=1", "port=1"], ["port=1: given twice, first as port=1"]),
        (["tp_size=2", "-tp", "2"], ["-tp: tp_size=2: given twice, first as tp_size=2"]),
        (["api_key=a", "--api-key", "b"], ["--api-key: given twice, first as api_key"]),
        (
            ["kv_cache_num_tokens=64", "kv_cache_size_num_tokens=64"],
            ["kv_cache_size_num_tokens=64: given twice, first as kv_cache_num_tokens=64"],
        ),
        (
            ["--enforce-eager", "torch_compile=T"],
            ["torch_compile=T: given twice, first as --enforce-eager: torch_compile=F"],
        ),
        (["page_size=16kb"], [f"page_size=16kb: {FROM_1}; {SUFFIXES_IN_WORDS}"]),
        (["page_size=0.0001k"], [f"page_size=0.0001k: {FROM_1}; {SUFFIXES_IN_WORDS}"]),
        (["dtype=int8"], ["dtype=int8: must be bfloat16, float16 or float32, or None (auto)"]),
        (["--port"], ["--port: needs a value, port=..."]),
        (["--port", "--rl"], ["--port: needs a value, port=..."]),
        (["--port", "80800"], ["--port 80800: must be a whole number from 0 to 65535"]),
        (
            ["--max-num-seqs", "0"],
            ["--max-num-seqs: max_seqs_per_forward=0: must be a whole number from 1 to 2147483647"],
        ),
        (["org/name", "port", "8080"], ["port 8080: not understood, did you mean port=8080?"]),
        (["org/name", "more"], ["more: not understood, flags are written name=value"]),
        (["org/name", "model=x"], ["model=x: given twice, first as model=org/name"]),
        (["--prot", "80"], ["--prot 80: unknown flag, did you mean port=?"]),
        (["--zzz", "80", "-zzz"], ["--zzz 80: unknown flag, --help-all lists those there are"]),
        (["--zzz"], ["--zzz: unknown flag, --help-all lists those there are"]),
        (["--api-kye", "secret"], ["--api-kye: unknown flag, did you mean api_key=?"]),
        (["--max-num-seqs"], ["--max-num-seqs: needs a value, max_seqs_per_forward=..."]),
        (["any_model=org/name"], ["any_model=org/name: must be T or F"]),
    ],
)
def test_what_is_not_understood_is_told(words: list[str], lines: list[str]) -> None:
    assert [line for line in refusal(*words) if line in lines] == lines
    assert "secret" not in " ".join(refusal(*words))


def test_the_command_line_comes_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "toka.yaml"
    path.write_text("port: 1\ntp_size: 1\npage_size: 1\nkeep_days: 1\n")
    environment = {"TOKA_PORT": "2", "TOKA_TP_SIZE": "2", "TOKA_KEEP_DAYS": "", "TOKA_CONFIG": "/nowhere"}
    found = given("port=3", f"config={path}", environment=environment)
    config = found.config
    assert (config.port, config.tp_size, config.page_size, config.keep_days, config.pp_size) == (3, 2, 1, 1, 1)
    assert set(found.words) == {"port=3", "tp_size=2", "page_size=1", "keep_days=1"}
    sources = {name: setting.source for name, setting in found.settings.items()}
    assert sources == {"port": "", "tp_size": "TOKA_TP_SIZE", "page_size": f"{path}:3", "keep_days": f"{path}:4"}
    assert ServerConfig.parse(found.words).__dict__ == config.__dict__


def test_every_flag_has_a_variable_of_its_name() -> None:
    for command, config_type in config_types().items():
        for name, flag in config_type.flags.items():
            # A model's name in a running server; or a flag that means another thing than the server's of this name
            others = {("TOKA_SERVED_MODEL_NAME",), (f"TOKA_{command.upper()}_{name.upper()}",)}
            is_renamed = flag.variables in others
            assert f"TOKA_{name.upper()}" in flag.variables or is_renamed, (command, name)
    assert read(PingConfig, ["prompt=x"], {"OPENAI_API_KEY": "openai"}).config.api_key == "openai"
    both = {"OPENAI_API_KEY": "openai", "TOKA_API_KEY": "toka", "TOKA_MODEL": "org/name", "TOKA_SERVED_MODEL_NAME": "m"}
    config = read(PingConfig, ["prompt=x"], both).config
    assert (config.api_key, config.model) == ("toka", "m")


@pytest.mark.parametrize(
    ("variable", "value", "line"),
    [
        ("TOKA_PORT", "x", "TOKA_PORT=x: must be a whole number from 0 to 65535"),
        ("TOKA_PAGE_SIZE", "(1/0)", "TOKA_PAGE_SIZE=(1/0): cannot be read, ZeroDivisionError: division by zero"),
        ("TOKA_API_KEY", "a b", "TOKA_API_KEY: must be printable ASCII without spaces, as a header carries it"),
        ("TOKA_CONFIG", "/nowhere", "config=/nowhere: No such file or directory"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, value: str, line: str) -> None:
    assert refusal(environment={variable: value}) == [line]


def test_an_unknown_variable_is_told_with_what_may_be_meant() -> None:
    environment = dict.fromkeys(["TOKA_PROT", "TOKA_MAX_MODEL_LEN", "TOKA_ZZZZZZ", "TOKA_CACHE", "TOKA_N", "PORT"], "1")
    assert unknown_variables(environment, variables_of(config_types().values()), variables_of([ServerConfig])) == [
        "TOKA_MAX_MODEL_LEN: unknown variable, did you mean TOKA_MAX_NUM_TOKENS_PER_REQUEST?",
        "TOKA_PROT: unknown variable, did you mean TOKA_PORT?",
        "TOKA_ZZZZZZ: unknown variable",
    ]


def test_variables_that_kubernetes_sets_beside_a_service_named_toka_are_no_flags() -> None:
    environment = {
        "TOKA_PORT": "tcp://10.0.0.1:80",
        "TOKA_SERVICE_HOST": "10.0.0.1",
        "TOKA_SERVICE_PORT_HTTP": "80",
        "TOKA_PORT_80_TCP": "tcp://10.0.0.1:80",
        "TOKA_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    assert given(environment=environment).config.port == ServerConfig.port
    assert unknown_variables(environment, variables_of([ServerConfig]), set()) == []


FILE = """\
# a comment
model: 1e5
max-num-seqs: 5
greedy_prefill: no
served_model_name: on
model_aliases: [a, b]
rope_scaling: {rope_type: linear, factor: 2.0}
kv_cache_num_tokens: (2 * 1024)
device: null
"""


def test_a_file_of_flags(tmp_path: Path) -> None:
    path = tmp_path / "toka.yaml"
    path.write_text(FILE)
    expected = ServerConfig.parse(
        [
            *("model=1e5", "max_seqs_per_forward=5", "greedy_prefill=F", "served_model_name=on", "model_aliases=a,b"),
            *('rope_scaling={"rope_type":"linear","factor":2.0}', "kv_cache_num_tokens=2048"),
        ]
    )
    assert given("--config", str(path)).config.__dict__ == expected.__dict__
    assert given(environment={"TOKA_CONFIG": str(path)}).config.__dict__ == expected.__dict__
    other = read(PingConfig, ["prompt=x", f"config={path}"], {})
    assert other.config.model == "on", "the served name; other flags of the server are passed over"
    path.write_text("any_model: no\n")
    assert given("--config", str(path)).config.model_aliases is None


def test_errors_in_a_file_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "toka.yaml"
    path.write_text("port: x\nprot: 3\n\nport: 5\napi_key: ge heim\ngpu-memory-utilization: 0.9\nmax-num-seqs: 0\n")
    assert refusal(f"config={path}") == [
        f"{path}:2: prot: 3: unknown flag, did you mean port=?",
        f"{path}:4: port: 5: given twice, first in {path}:1",
        f"{path}:6: gpu_memory_utilization=0.9: {OPTIONS['gpu_memory_utilization'].refusal}",
        f"{path}:1: port: x: must be a whole number from 0 to 65535",
        f"{path}:5: api_key: must be printable ASCII without spaces, as a header carries it",
        f"{path}:7: max_num_seqs: max_seqs_per_forward=0: must be a whole number from 1 to 2147483647",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("port: 1\n  x: [\n", ":2: is not YAML: mapping values are not allowed here"),
        ("- port\n", ":1: must be lines such as `port: 8080`"),
        ("[a]: 1\n", ":1: must be lines such as `port: 8080`"),
        ("port: !!python/name:os.system\n", ":1: is not YAML: could not determine a constructor for the tag"),
    ],
)
def test_a_file_that_is_no_list_of_flags_is_told(text: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "toka.yaml"
    path.write_text(text)
    (found,) = refusal(f"config={path}")
    assert found.startswith(f"{path}{line}")
    assert "\n" not in found


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "toka.yaml"
    path.write_text("")
    assert given(f"config={path}").settings == {}


def test_the_listing_is_a_file_of_the_same_flags(tmp_path: Path) -> None:
    words = [
        *("model=org/name", "port=1", "rl=T", "served_model_name=on", "model_aliases=a: b,#c", "api_key=geheim"),
        *('rope_scaling={"rope_type":"linear","factor":2.0}', "max_step_seconds=0.5"),
    ]
    found = given(*words, environment={"TOKA_TP_SIZE": "2"})
    text = listing(found)
    assert "geheim" not in text
    assert "port: 1  # command line\n" in text
    assert "tp_size: 2  # TOKA_TP_SIZE\n" in text
    assert "page_size: 16  # default\n" in text
    assert "device: null  # default (auto)\n" in text
    path = tmp_path / "toka.yaml"
    path.write_text(text)
    again = given(f"config={path}", "api_key=geheim")
    assert again.config.__dict__ == found.config.__dict__


def test_all_of_it_through_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "toka.yaml").write_text("page_size: x\n")
    monkeypatch.setenv("TOKA_TP_SIZE", "y")
    monkeypatch.setenv("TOKA_PROT", "80")
    assert main([f"config={tmp_path / 'toka.yaml'}", "--port", "z", "-c", "8192"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.partition(": ")[2].partition(": ")[0] for line in err.splitlines()] == [
        "warning",
        "-c 8192",
        "--port z",
        f"{tmp_path / 'toka.yaml'}:1",
        "TOKA_TP_SIZE=y",
    ]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("64k", 64_000), ("64K", 65_536), ("24G", 24 << 30), ("24g", 24 * 10**9), ("1.5m", 1_500_000)),
        *(("2M", 2 << 20), ("7", 7), ("0.5k", 500), ("8.1k", 8_100)),
    ],
)
def test_one_rule_of_suffixes(text: str, number: int) -> None:
    assert number_with_suffix(text) == str(number)
    for same in ("k", "1.0001k", "64kb", "-1", "k64", "64 k", "0x1k"):
        assert number_with_suffix(same) == same
    if text[-1].isalpha():
        assert parse_size(text) == number, "of memory, in bytes"


def test_a_variable_and_a_file_may_have_suffixes_and_synonyms(tmp_path: Path) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text("max_file_bytes: 2M\ndtype: bf16\n")
    both = given(f"config={path}", environment={"TOKA_PAGE_SIZE": "1K", "TOKA_DEVICE": "gpu"})
    assert (both.config.max_file_bytes, both.config.dtype) == (2 << 20, "bfloat16")
    assert (both.config.page_size, both.config.device) == (1024, "cuda")
    assert set(both.words) == {"max_file_bytes=2097152", "dtype=bfloat16", "page_size=1024", "device=cuda"}


def test_words_without_a_name_are_taken_in_order() -> None:
    config_type = config_types()["map"]
    words = ["in.csv", "out", "prompt={a}"]
    assert read(config_type, words, {}, ("input", "output")).words == ["input=in.csv", "output=out", "prompt={a}"]
    words = ["input=in.csv", "prompt=-", "out"]
    assert read(config_type, words, {}, ("input", "output")).config.output == "out"
    with pytest.raises(FlagError, match="more: not understood"):
        read(config_type, ["a", "b", "more", "prompt=c"], {}, ("input", "output"))
    with pytest.raises(FlagError, match="input=-: must be files"):
        read(config_type, ["-", "b", "prompt=c"], {}, ("input", "output"))
    batch = config_types()["batch"]
    assert read(batch, ["-", "out.jsonl"], {}, ("input", "output")).config.input == "-"
    with pytest.raises(FlagError, match="output=-: must be a file"):
        read(batch, ["-", "-"], {}, ("input", "output"))


def test_a_text_is_read_from_a_file_or_from_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "question.txt"
    path.write_text("Two lines,\nwith äöü.\n")
    assert given_text("prompt", f"@{path}") == "Two lines,\nwith äöü."
    assert given_text("prompt", "me@home") == "me@home"
    for content, read_as in ((b"hello\n", "hello"), (b"hello\r\n\n", "hello\r\n")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        assert given_text("prompt", "-") == read_as
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    with pytest.raises(FlagError, match="prompt=-: is empty"):
        given_text("prompt", "-")
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(FlagError, match="prompt=-: standard input is closed"):
        given_text("prompt", "-")
    with pytest.raises(FlagError, match=r"@none: No such file or directory; prompt=- reads a text that begins with @"):
        given_text("prompt", "@none")
    path.write_bytes(b"\xff")
    with pytest.raises(FlagError, match="must be text in UTF-8"):
        given_text("prompt", f"@{path}")
