"""`toka check`: a right model passes, what computes wrongly is named, and a shape without weights will do."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.tiny_model import option_config, save_random_model, save_tiny_model
from tokasaurus.cli import main
from tokasaurus.model.cpu.bindings import Kernels
from tokasaurus.model.execution.executors import KernelExecutor

FEATURES = ["attention_backend=cpu"] * 4 + ["layers"] * 6 + ["sampling"] * 8 + ["decode steps"] * 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny_model(directory, "qwen3")
    return directory


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    code = main(["check", *words, "--json", "device=cpu"])
    device, *results, end = map(json.loads, capsys.readouterr().out.splitlines())
    assert device == {"device": "the CPU"}
    return code, {"results": results, **end}


@pytest.mark.long
def test_a_right_model_passes(model: Path) -> None:
    command = [sys.executable, "-m", "tokasaurus", "check", f"model={model}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{model} on the CPU")
    assert done.stdout.count("right") == len(FEATURES)
    assert "weights" in done.stderr, "the phases are shown"


def test_random_weights_of_a_shape_will_do(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(model / "config.json", tmp_path)
    for given in (tmp_path, tmp_path / "config.json"):
        code, found = check(capsys, f"model={given}", "dtype=bfloat16")
        assert code == 0
        assert [result["feature"] for result in found["results"]] == FEATURES
        assert all(result["failure"] is None for result in found["results"])
        assert found["switched_off"] == []
    assert not list(tmp_path.glob("*.safetensors"))


def test_layers_with_states_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_random_model(tmp_path, option_config("qwen3_5_text", 0))
    code, found = check(capsys, f"model={tmp_path}")
    assert code == 0
    assert [result["feature"] for result in found["results"]] == FEATURES


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.long
def test_compiled_layers_and_other_pages_are_checked(
    page_size: int, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch._dynamo.reset()
    code, found = check(capsys, f"model={model}", "torch_compile=T", f"page_size={page_size}")
    assert code == 0, found
    assert {result["feature"] for result in found["results"]} >= {"torch_compile", "attention_backend=cpu"}
    torch._dynamo.reset()


def test_what_computes_wrongly_is_named_and_makes_the_exit_code_1(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KernelExecutor, "run", lambda _self, hidden, *_: hidden)

    def fail(*_: Any) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(Kernels, "sample", fail)
    code, found = check(capsys, f"model={model}")
    assert code == 1
    wrong = {result["feature"]: result["failure"] for result in found["results"] if result["failure"] is not None}
    assert wrong.keys() == {"layers", "sampling", "decode steps"}, "steps taken apart need both of them"
    assert wrong["sampling"] == "RuntimeError: no such instruction"
    assert wrong["layers"].startswith("layers (decode): median row differs by ")
    assert main(["check", f"model={model}", "device=cpu"]) == 1
    assert "\nsampling: RuntimeError: no such instruction\n" in capsys.readouterr().out


def test_what_was_found_before_an_error_is_shown(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure\nmore of it")

    monkeypatch.setattr("tokasaurus.model.worker.kernel_checks.check_layers", fail)
    code, found = check(capsys, f"model={model}")
    assert code == 1
    assert [result["feature"] for result in found["results"]] == [*FEATURES[:4], "start"]
    assert found["results"][-1]["failure"] == "RuntimeError: CUDA error: unspecified launch failure"


def test_a_check_that_is_killed_leaves_what_it_has_found(model: Path) -> None:
    command = [sys.executable, "-m", "tokasaurus", "check", f"model={model}", "--json", "device=cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]  # long before the last
        process.kill()
        lines += process.stdout.readlines()
    device, *results = [json.loads(line) for line in lines]
    assert device == {"device": "the CPU"}
    assert [result["feature"] for result in results] == FEATURES[: len(results)]
    assert len(results) < len(FEATURES)


@pytest.mark.parametrize(
    ("word", "message"), [("no_such_flag=1", "no_such_flag"), ("port=1", "port"), ("page_size=0", "page_size=0")]
)
def test_a_wrong_flag_is_one_line(word: str, message: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", word, f"model={model}"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("toka check: ")
    assert message in line


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["attention_backend=cpu", "cpu_isa=torch"], 2, "attention_backend=cpu"),
        (["model=/no/such/directory"], 2, "/no/such/directory"),
    ],
)
def test_what_cannot_be_checked_is_one_line(words: list[str], code: int, message: str, model: Path) -> None:
    command = [sys.executable, "-m", "tokasaurus", "check", f"model={model}", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == code
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("toka check: ")]
    assert len(lines) == 1
    assert message in lines[0]


def test_the_help_has_each_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--help"]) == 0
    shown = capsys.readouterr().out
    for name in ("model", "json", "dtype", "torch_compile", "use_cudagraphs"):
        assert re.search(rf"^ *\(?{name}\b", shown, re.MULTILINE), name
