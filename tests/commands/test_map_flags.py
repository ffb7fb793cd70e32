"""The flags of `toka map`: its own, those of Sampling, and those of the engine that it starts."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from tokasaurus.cli import main
from tokasaurus.commands.map import SAMPLING_FLAGS, MapConfig, engine_flags
from tokasaurus.config import ServerConfig
from tokasaurus.library.llm import _words
from tokasaurus.library.sampling import Sampling

JOB = ["input=a.jsonl", "output=out", "prompt={q}"]
USAGE = "toka map input='questions/*.parquet' output=answers prompt='{question}'"
URL = "base_url=http://localhost:1/v1"


def test_every_field_of_sampling_that_changes_answers_is_a_flag_with_its_default() -> None:
    fields = {field.name: field for field in dataclasses.fields(Sampling)}
    assert set(SAMPLING_FLAGS) == set(fields) - {"logprobs", "top_logprobs"}, "map stores no log-probabilities"
    for name in SAMPLING_FLAGS:
        if fields[name].default is not dataclasses.MISSING and fields[name].default != ():
            assert MapConfig.flags[name].default == fields[name].default, name
    assert Sampling(**MapConfig.parse(JOB).sampling_fields()) == Sampling()


def test_flags_of_sampling_become_sampling() -> None:
    words = ["n=4", "temperature=0", "top_k=5", 'stop=["\\n", "Q:"]', "stop_token_ids=7,8", 'logit_bias={"17": -100}']
    sampling = Sampling(**MapConfig.parse([*JOB, *words, "seed=3", "ignore_eos=T"]).sampling_fields())
    assert sampling == Sampling(
        n=4,
        temperature=0,
        top_k=5,
        stop=["\n", "Q:"],
        stop_token_ids=[7, 8],
        logit_bias={17: -100},
        seed=3,
        ignore_eos=True,
    )
    assert MapConfig.parse([*JOB, "stop=END"]).sampling_fields()["stop"] == "END"


def test_what_needs_pyarrow_says_so_before_anything_is_imported() -> None:
    script = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from tokasaurus.cli import main\n"
        "code = main(['map', *sys.argv[1:], 'out', 'prompt={q}'])\n"
        "print(code, sorted({'torch', 'openai', 'transformers', 'numpy'} & set(sys.modules)))\n"
    )
    for word, extra in (("input=q/*.parquet", ()), ("input=a.Feather", ()), ("format=parquet", ["input=a.csv"])):
        done = subprocess.run([sys.executable, "-c", script, word, *extra], capture_output=True, text=True, check=True)
        assert done.stderr == f"toka map: {word}: needs pyarrow, which is not installed: pip install pyarrow\n"
        assert done.stdout == "2 []\n"


def test_templates_come_through_as_they_are_written() -> None:
    for template in ("{q}", "{q}: {1}", "{{}} {q}", "Q: {q}\nA:", "(q)", "1e5 {q}"):
        assert MapConfig.parse(["input=a", "output=b", f"prompt={template}"]).prompt == template


def test_flags_of_the_engine_are_checked_and_passed_on() -> None:
    words = [*JOB, "model=org/name", "page_size=32", "kv_cache_size_num_tokens=4096", "use_hydragen=F", "n=2"]
    flags = engine_flags(MapConfig.parse(words), words)
    assert flags == {
        "model": "org/name",
        "page_size": 32,
        "kv_cache_num_tokens": 4096,
        "use_hydragen": False,
        "log_level": "warning",
    }
    assert "page_size=32" in _words(None, flags), "LLM takes them"
    words = [*JOB, "log_level=info"]
    assert engine_flags(MapConfig.parse(words), words)["log_level"] == "info"


def test_every_flag_of_the_server_is_one_of_map_or_of_how_others_reach_it() -> None:
    left_out = {"host", "port", "unix_socket", "api_keys_file", "allowed_hosts", "cors_origins", "data_dir", "rl"}
    left_out |= {"model_aliases"}
    assert set(ServerConfig.flags) - set(MapConfig.flags) == left_out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            [],
            f"input, output and prompt are missing: {USAGE}",
        ),
        (
            JOB[:1],
            f"output and prompt are missing: {USAGE}",
        ),
        (JOB[:2], f"prompt is missing: {USAGE}"),
        ([*JOB, "messages=m"], "messages: either it or prompt= is given"),
        ([*JOB[:2], "messages=m", "chat=T"], "chat: goes with prompt=; messages= are a chat already"),
        ([*JOB, "promt=x"], "promt=x: unknown flag, did you mean prompt=?"),
        ([*JOB, "temperatur=1"], "temperatur=1: unknown flag, did you mean temperature=?"),
        ([*JOB, "temperature=3"], "temperature=3: must be a number from 0 to 2, or None (the model's default, else 1)"),
        ([*JOB, "n=0"], "n=0: must be a whole number from 1 to 2147483647"),
        ([*JOB, "format=csv"], "format=csv: must be parquet or jsonl, or None (jsonl for JSON lines, else parquet)"),
        ([*JOB, "stop=[1]"], "stop=[1]: must be a text, or a JSON list of texts"),
        ([*JOB, "stop_token_ids=a,b"], "stop_token_ids=a,b: must be whole numbers with commas between them"),
        ([*JOB, 'logit_bias={"a": 1}'], 'logit_bias={"a": 1}: its names must be token ids'),
        ([*JOB, "port=80"], "port: others cannot reach the engine of toka map; base_url= names a running server"),
        ([*JOB, URL, "model=m"], "model: a flag of the server, which runs already at base_url=http://localhost:1/v1"),
        (
            [*JOB[:2], "prompt={q}", "tools=x.json"],
            "tools: need messages: chat=T sends the prompt as the message of a user",
        ),
        ([*JOB, "api_key=k"], "api_key: only with base_url=, since nobody else reaches the engine that is started"),
    ],
)
def test_a_wrong_flag_gives_one_line_and_exit_code_2(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["map", *words]) == 2
    assert capsys.readouterr() == ("", f"toka map: {line}\n")


def test_a_value_that_only_sampling_refuses_is_a_wrong_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["map", *JOB, 'logit_bias={"1": 500}']) == 2
    err = capsys.readouterr().err
    assert err.startswith("toka map: logit_bias must contain numbers ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("text", "match"), [(None, "No such file"), ("{", "is not JSON"), ("[]", "a JSON object")])
def test_a_wrong_schema_is_a_wrong_flag(
    text: str | None, match: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "schema.json"
    if text is not None:
        path.write_text(text)
    assert main(["map", *JOB, f"schema={path}"]) == 2
    assert match in capsys.readouterr().err


def test_wrong_tools_are_a_wrong_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tools.json").write_text("[1]")
    assert main(["map", *JOB, "chat=T", f"tools={tmp_path / 'tools.json'}"]) == 2
    assert "tools.json: must be a JSON list of objects, one for each function" in capsys.readouterr().err


def test_help_has_three_examples_and_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["map", "--help-all"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n  toka map input=") == 3
    assert all(f"  {name}" in out for name in MapConfig.flags)
    assert max(map(len, out.splitlines())) <= 80
