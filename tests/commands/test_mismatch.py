"""`toka mismatch`: figures against plain sums, and a whole run on a small model, whose differences are known to be
rounding errors of one dtype or the other."""

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from tests.checkpoint.helpers.gguf_files import random_weights, write_gguf
from tests.checkpoint.helpers.quantised_models import save_quantised_model
from tests.checkpoint.helpers.quantised_weights import Format
from tests.helpers.tiny_model import OPTIONS, option_config, save_random_model, save_tiny_model
from tokasaurus.checkpoint import resolve_checkpoint, with_safetensors
from tokasaurus.cli import main
from tokasaurus.commands.mismatch import MODES, POSITIONS_PER_PART, Compared, TransformersReference, figures_of


def test_figures_equal_plain_sums_over_all_tokens() -> None:
    rng = np.random.default_rng(0)
    compared = [Compared(-rng.random(length), -rng.random(length)) for length in (40, 1, 16)]
    figures = figures_of("m", compared, bound=0.25)
    differences = [float(a - b) for one in compared for a, b in zip(one.sampled, one.reference, strict=True)]
    sizes = [abs(difference) for difference in differences]
    assert (figures.num_sequences, figures.num_tokens) == (3, 57)
    assert figures.mean == pytest.approx(sum(sizes) / 57)
    assert figures.largest == max(sizes)
    assert figures.share_above_bound == sum(size > 0.25 for size in sizes) / 57
    assert figures.kl == pytest.approx(sum(math.exp(-d) - 1 + d for d in differences) / 57)
    assert figures.longest_ratio == pytest.approx(math.exp(max(sizes)))
    assert [part.first_position for part in figures.parts] == [0, POSITIONS_PER_PART, 2 * POSITIONS_PER_PART]
    assert [part.num_tokens for part in figures.parts] == [16 + 1 + 16, 16, 8]
    last = [abs(float(d)) for d in compared[0].sampled[32:] - compared[0].reference[32:]]
    assert figures.parts[2].mean == pytest.approx(sum(last) / 8)
    assert figures.parts[2].largest == max(last)


def test_the_reference_of_a_gguf_file_has_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))
    for tied in (False, True):
        write_gguf(tmp_path / "tiny.gguf", "llama", random_weights("llama", tied), GGMLQuantizationType.Q8_0)
        directory = resolve_checkpoint(str(tmp_path / "tiny.gguf")).directory
        found, expected = (
            TransformersReference(each, "float32").logprobs([1, 2, 3], [4, 5, 6])
            for each in (directory, with_safetensors(directory))
        )
        np.testing.assert_array_equal(found, expected)


def test_the_reference_of_quantised_safetensors_has_the_weights_that_they_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))
    oracle = save_quantised_model(tmp_path / "model", "qwen2", Format("gptq", has_order=True), tied=True)
    ids = torch.tensor([[1, 2, 3, 4, 5, 6]])
    with torch.no_grad():
        logprobs = oracle(ids).logits[0, 2:-1].log_softmax(-1)
    expected = logprobs.gather(1, ids[0, 3:, None])[:, 0].numpy()
    for directory in (tmp_path / "model", with_safetensors(tmp_path / "model")):
        found = TransformersReference(directory, "float32").logprobs([1, 2, 3], [4, 5, 6])
        np.testing.assert_allclose(found, expected, atol=1e-5)


def run(directory: Path, *words: str) -> dict[str, Any]:
    """The JSON of a run that must succeed."""
    output = directory / "figures.json"
    flags = ["dtype=float32", "kv_cache_num_tokens=16384", "num_prompts=9", "max_tokens=20", f"json={output}"]
    assert main(["mismatch", f"model={directory}", *flags, *words]) == 0
    found: dict[str, Any] = json.loads(output.read_text())
    return found


@pytest.mark.long
def test_a_float32_engine_differs_from_transformers_by_rounding_in_every_mode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_model(tmp_path, "qwen3")
    found = run(tmp_path, f"picture={tmp_path / 'figures.svg'}")
    assert [mode["mode"] for mode in found["modes"]] == [mode.name for mode in MODES]
    for mode in found["modes"]:
        assert 0 < mode["largest"] < 1e-4
        assert mode["num_tokens"] > 8 * 15
    assert found["reference_dtype"] == "float32"
    shown = capsys.readouterr().out
    for mode in MODES:
        assert mode.name in shown
        assert mode.name in (tmp_path / "figures.svg").read_text()
    assert ET.parse(tmp_path / "figures.svg").getroot().tag.endswith("svg")


def test_a_float32_engine_differs_from_transformers_by_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path, "qwen3")
    monkeypatch.setattr("tokasaurus.commands.mismatch.MODES", MODES[:1])
    (mode,) = run(tmp_path)["modes"]
    assert 0 < mode["largest"] < 1e-4
    assert mode["num_tokens"] > 8 * 15


@pytest.mark.long
@pytest.mark.parametrize("family", OPTIONS)
def test_every_family_differs_from_transformers_by_rounding(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_random_model(tmp_path, option_config(family, 0))
    monkeypatch.setattr("tokasaurus.commands.mismatch.MODES", MODES[:1])
    (mode,) = run(tmp_path)["modes"]
    assert 0 < mode["largest"] < 2e-4


@pytest.mark.long
def test_a_reference_of_another_dtype_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path, "llama")
    monkeypatch.setattr("tokasaurus.commands.mismatch.MODES", MODES[:1])
    found = run(tmp_path, "reference_dtype=bfloat16", "bound=0.001")
    (mode,) = found["modes"]
    assert mode["mean"] > 1e-3
    assert mode["share_above_bound"] > 0.5


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("use_hydragen=T", "use_hydragen: toka mismatch sets it itself"),
        ("reference=vllm", "reference"),
        ("prompts=missing.txt", "prompts=missing.txt: "),
        ("nothing=1", "nothing"),
    ],
)
def test_wrong_flags_are_refused(word: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_model(tmp_path, "llama")
    assert main(["mismatch", f"model={tmp_path}", word]) == 2
    assert message in capsys.readouterr().err
