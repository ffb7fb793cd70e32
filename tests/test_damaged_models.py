"""Damaged models: every command ends with one line and exit code 2, as for a wrong flag; 1 is the machine's."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from tests.checkpoint.helpers.gguf_files import random_weights, write_gguf
from tests.checkpoint.helpers.quantised_models import save_quantised_model
from tests.checkpoint.helpers.quantised_weights import Format
from tests.commands.batch.helpers.request_lines import write_requests
from tests.helpers.examples import few
from tests.helpers.tiny_model import save_tiny_model
from tokasaurus.cli import main

SMALL = ("kv_cache_num_tokens=512", "max_tokens_per_forward=64", "max_seqs_per_forward=8", "cpu_isa=torch")


def with_cut_config(directory: Path) -> Path:
    (directory / "config.json").write_text('{"model_type": "llama"')
    return directory


def with_offsets_past_the_end(directory: Path) -> Path:
    save_tiny_model(directory, "llama")
    path = directory / "model.safetensors"
    content = path.read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_bytes])
    header["model.norm.weight"]["data_offsets"] = [1 << 40, (1 << 40) + 256]
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + content[8 + header_bytes :])
    return directory


def with_a_wrong_count(directory: Path) -> Path:
    """A file of GGUF that says it has a million tensors more."""
    path = directory / "tiny.gguf"
    write_gguf(path, "llama", random_weights("llama", tied=True), GGMLQuantizationType.Q8_0)
    content = bytearray(path.read_bytes())
    content[8:16] = (int.from_bytes(content[8:16], "little") + 1_000_000).to_bytes(8, "little")
    path.write_bytes(content)
    return path


def with_a_cut_gguf_file(directory: Path) -> Path:
    path = directory / "tiny.gguf"
    write_gguf(path, "llama", random_weights("llama", tied=True), GGMLQuantizationType.Q4_0)
    path.write_bytes(path.read_bytes()[:-100])
    return path


def quantised(directory: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """With other scales of one weight."""
    save_quantised_model(directory, "llama", Format("awq"))
    for path in directory.glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors:
            if name == "model.layers.1.mlp.up_proj.scales":
                tensors[name] = change(tensors[name]).contiguous()
        save_file(tensors, path)
    return directory


def with_scales_of_another_shape(directory: Path) -> Path:
    return quantised(directory, lambda scales: scales[:-1])


def with_scales_that_are_not_numbers(directory: Path) -> Path:
    return quantised(directory, lambda scales: torch.full_like(scales, torch.nan))


def without_a_model(directory: Path) -> Path:
    return directory / "absent.gguf"


IN_HEADERS = {
    with_cut_config: "cannot read",
    with_offsets_past_the_end: "model.safetensors is not a readable safetensors file",
    with_a_wrong_count: "tiny.gguf is not a readable GGUF file",
    with_a_cut_gguf_file: "tiny.gguf",
    with_scales_of_another_shape: "tensor model.layers.1.mlp.up_proj.weight is quantised: its scales is",
    without_a_model: "there is no file",
}


def words_of(command: str, model: Path, directory: Path) -> list[str]:
    """Of a command that would load this model."""
    source, output = directory / "in.jsonl", directory / "out"
    write_requests(source, 2)
    return {
        "serve": ["port=0", *SMALL],
        "download": ["download"],
        "plan": ["plan"],
        "check": ["check", "device=cpu"],
        "mismatch": ["mismatch", *SMALL],
        "batch": ["batch", f"input={source}", f"output={output}", *SMALL],
        "map": ["map", f"input={source}", f"output={output}", "prompt={custom_id}", *SMALL],
    }[command] + [f"model={model}"]


def check_last_line(code: int, output: str, message: str) -> None:
    assert code == 2, output
    assert "Traceback" not in output
    assert message in output.splitlines()[-1]


@pytest.fixture(autouse=True)
def own_cache_and_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))
    # else sys.stderr, which capfd has replaced, would be replaced by the descriptor's writer
    monkeypatch.setattr("tokasaurus.commands.check.setup_logging", lambda *_, **__: None)


@pytest.mark.parametrize("damage", IN_HEADERS)
@pytest.mark.parametrize("command", ["download", "plan", "check", "mismatch"])
def test_a_damaged_model_is_one_line_and_exit_code_2(
    command: str, damage: Callable[[Path], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(words_of(command, damage(tmp_path), tmp_path)) == 2
    out, err = capfd.readouterr()
    assert out == ""
    told = [line for line in err.splitlines() if line.startswith(f"toka {command}: ")]
    assert IN_HEADERS[damage] in told[-1]


@pytest.mark.parametrize("words", [["check", "device=cpu", "cpu_isa=torch"], ["download", "dequantized=T"]])
def test_scales_that_are_not_numbers_end_what_reads_the_weights(
    words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = with_scales_that_are_not_numbers(tmp_path)
    assert main([*words, f"model={model}"]) == 2
    assert (
        f"toka {words[0]}: tensor model.layers.1.mlp.up_proj.weight has scales that are not finite\n"
        in capfd.readouterr().err
    )


@few(
    1,
    ("command", "damage"),
    [
        ("batch", with_offsets_past_the_end),
        ("map", with_a_wrong_count),
        ("serve", with_scales_that_are_not_numbers),
    ],
)
def test_a_damaged_model_ends_the_programs_that_start_an_engine_with_exit_code_2(
    command: str, damage: Callable[[Path], Path], tmp_path: Path
) -> None:
    """The last is found by the worker, the others by the launcher."""
    words = words_of(command, damage(tmp_path), tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tokasaurus", *words], capture_output=True, text=True, timeout=200, check=False
    )
    message = {**IN_HEADERS, with_scales_that_are_not_numbers: "mlp.up_proj.weight has scales that are not finite"}
    check_last_line(done.returncode, done.stdout + done.stderr, message[damage])


@pytest.mark.parametrize("command", ["download", "plan", "mismatch"])
def test_a_cache_that_cannot_be_written_is_a_failure_of_the_machine(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama", random_weights("llama", tied=True), GGMLQuantizationType.Q8_0)
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "file" / "below"))
    assert main(words_of(command, tmp_path / "tiny.gguf", tmp_path)) == 1
    assert "cannot write" in capfd.readouterr().err
