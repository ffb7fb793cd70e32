"""What the start of a model of transformers' class says of its weights: which stay plain."""

from pathlib import Path

import pytest

from tests.helpers.tiny_model import save_byte_tokenizer
from tests.model.by_transformers.helpers.tiny_classes import save_tiny_model, tiny_config
from tokasaurus.checkpoint import resolve_checkpoint
from tokasaurus.config import ServerConfig
from tokasaurus.messages.status import FlagRefused, PhaseDone
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker.entry import load_worker
from tokasaurus.model.worker.start import PhaseLog


def weights_line(directory: Path, *flags: str) -> str:
    reports: list[PhaseDone] = []
    config = ServerConfig.parse(["device=cpu", "dtype=float32", "kv_cache_num_tokens=1024", *flags])
    load_worker(config, resolve_checkpoint(str(directory)), Mesh(), 0, PhaseLog(reports.append))
    return next(report.detail for report in reports if report.phase == "weights")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_bytes_that_are_not_quantised_are_told(quantization: str, tmp_path: Path) -> None:
    oracle = save_tiny_model(tmp_path, tiny_config("flex_olmo"))
    save_byte_tokenizer(tmp_path)
    num_bytes = sum(
        4 * each.numel() for name, each in oracle.named_parameters() if ".experts." in name or ".gate." in name
    )
    assert num_bytes > 4 * 4 * 4 * 3 * 64 * 96
    line = weights_line(tmp_path, f"quantization={quantization}", "quantized_compute=exact")
    assert line.endswith(f", {num_bytes / 2**20:.4g} MiB of experts and other matrices stay float32")
    assert "experts" not in weights_line(tmp_path)


def test_a_class_without_linear_layers_is_not_quantised(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, tiny_config("gpt2"))
    save_byte_tokenizer(tmp_path)
    with pytest.raises(FlagRefused, match=r"^quantization=int8: gpt2 has no linear layers but its LM head$"):
        weights_line(tmp_path, "quantization=int8")
