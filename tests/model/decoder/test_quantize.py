"""Plain checkpoints quantised at load, against transformers with weights and activations rounded in the same way."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.helpers.tiny_model import FAMILIES, VOCAB_SIZE, family_config, option_config, save_random_model
from tests.model.helpers.greedy_decoding import load, run_whole_prompt
from tests.model.helpers.rounding import rounded
from tokasaurus.checkpoint import ModelInfo, resolve_checkpoint
from tokasaurus.config import ServerConfig
from tokasaurus.messages.commands import UpdateWeights
from tokasaurus.messages.status import FlagRefused, PhaseDone
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.cpu.gemm_choice import ALWAYS_KERNELS, GemmChoice
from tokasaurus.model.decoder.decoder import Decoder
from tokasaurus.model.decoder.quantize import CannotQuantize, Packing
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker import entry
from tokasaurus.model.worker.entry import load_worker
from tokasaurus.model.worker.start import PhaseLog
from tokasaurus.model.worker.weight_update import WeightUpdates

PROMPT = torch.randint(VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(0))


def save(directory: Path, family: str, seed: int = 0) -> PreTrainedModel:
    config = family_config(family)
    config.intermediate_size = 128  # two groups of int4
    return save_random_model(directory, config, seed=seed)


def load_quantised(directory: Path, packing: Packing, choice: GemmChoice = ALWAYS_KERNELS) -> tuple[Decoder, ModelInfo]:
    model, info = load(directory)
    model.pack(load_kernels(), choice, packing=packing)
    return model, info


def logits_of(model: Decoder, info: ModelInfo) -> Tensor:
    return run_whole_prompt(model, info, Mesh(), None, PROMPT)


def round_inputs(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    """The largest of each 128 numbers of a token gets the code 127."""
    parts = inputs[0].split(128, -1)
    scales = [part.abs().amax(-1, keepdim=True) / 127 for part in parts]
    return torch.cat([(part / scale).round() * scale for part, scale in zip(parts, scales, strict=True)], -1)


def oracle_logits(oracle: PreTrainedModel, made: str, is_int8: bool) -> Tensor:
    for name, module in oracle.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            with torch.no_grad():
                module.weight.copy_(rounded(module.weight, made))
            if is_int8:
                module.register_forward_pre_hook(round_inputs)
    with torch.no_grad():
        return oracle(PROMPT.unsqueeze(0)).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("made", "is_int8"), [("int8", False), ("int8", True), ("int4", False)])
def test_logits_are_those_of_rounded_weights_and_activations(
    made: str, is_int8: bool, family: str, tmp_path: Path
) -> None:
    oracle = save(tmp_path, family)
    model, info = load_quantised(tmp_path, Packing(made, is_int8))
    found, expected = logits_of(model, info), oracle_logits(oracle, made, is_int8)
    # A code that lies between two integers may be rounded to either, which changes all later logits a little.
    tolerance = 0.03 if is_int8 else 1e-5
    assert float((found - expected).norm() / expected.norm()) < tolerance
    plain = logits_of(*load(tmp_path))
    assert float((found - plain).norm() / expected.norm()) > 10 * float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("choice", [ALWAYS_KERNELS, GemmChoice(1.0, 0.5)], ids=["kernels", "torch for many rows"])
@pytest.mark.parametrize(("made", "is_int8"), [("int8", True), ("int4", False)])
def test_an_updated_quantised_model_computes_what_a_loaded_one_does(
    made: str, is_int8: bool, choice: GemmChoice, tmp_path: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    save(old, "qwen2", seed=0)
    save(new, "qwen2", seed=1)
    packing = Packing(made, is_int8)
    model, info = load_quantised(old, packing, choice)
    before = logits_of(model, info).clone()
    for directory in (new, old):
        updates = WeightUpdates(model, info, directory, Mesh(), torch.device("cpu"))
        assert updates.apply(UpdateWeights(0, str(directory), "1", is_partial=False)) == ""
        assert torch.equal(logits_of(model, info), logits_of(*load_quantised(directory, packing, choice)))
    assert torch.equal(logits_of(model, info), before)


def forward_rounded(
    module: nn.Module, is_int8: bool, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Of transformers' experts, each token by itself, with inputs rounded as round_inputs does."""
    rows = []
    for token, experts, weights in zip(hidden, top_k_index.tolist(), top_k_weights, strict=True):
        row = torch.zeros_like(token)
        for expert, weight in zip(experts, weights, strict=True):
            x = round_inputs(module, (token[None],)) if is_int8 else token[None]
            gate, up = nn.functional.linear(x, module.gate_up_proj[expert]).chunk(2, -1)  # type: ignore[index]
            inner = nn.functional.silu(gate) * up
            inner = round_inputs(module, (inner,)) if is_int8 else inner
            row += weight * nn.functional.linear(inner, module.down_proj[expert])[0]  # type: ignore[index]
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize(("made", "is_int8"), [("int8", False), ("int8", True), ("int4", False)])
def test_experts_are_rounded_and_routers_are_not(made: str, is_int8: bool, tmp_path: Path) -> None:
    oracle = save_random_model(tmp_path, option_config("qwen3_moe", 0, moe_intermediate_size=128))
    model, info = load_quantised(tmp_path, Packing(made, is_int8))
    assert model.packed_layers is not None
    assert all(layer.mlp.gate_up.experts.has_blocks for layer in model.decoder_layers())
    found = logits_of(model, info)
    with torch.no_grad():
        for name, module in oracle.named_modules():
            if name.endswith("mlp.experts"):
                for weights in (module.gate_up_proj, module.down_proj):
                    weights.copy_(rounded(weights.flatten(0, 1), made).view_as(weights))
                module.forward = partial(forward_rounded, module, is_int8)
    expected = oracle_logits(oracle, made, is_int8)
    tolerance = 0.03 if is_int8 else 1e-5
    assert float((found - expected).norm() / expected.norm()) < tolerance


def test_sizes_that_are_no_multiple_of_a_group_are_refused(tmp_path: Path) -> None:
    save_random_model(tmp_path, family_config("llama"))
    with pytest.raises(CannotQuantize, match=r"^a linear layer has 96 inputs, which is no multiple of 64$"):
        load_quantised(tmp_path, Packing("int4"))


def start(directory: Path, *flags: str) -> list[PhaseDone]:
    """Load a worker's model -> what it reports."""
    reports: list[PhaseDone] = []
    config = ServerConfig.parse(["device=cpu", "dtype=float32", "kv_cache_num_tokens=4096", *flags])
    load_worker(config, resolve_checkpoint(str(directory)), Mesh(), 0, PhaseLog(reports.append))
    return reports


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["quantization=int8"], "quantised as I8, multiplied in integers (quantization=int8); integers take, of I8, "),
        (["quantization=int8", "quantized_compute=exact"], "quantised as I8, exact (quantized_compute=exact); "),
        (["quantization=int4"], "quantised as I4_64, exact (by default); integers take, of I4_64, "),
        (
            ["quantization=int4", "quantized_compute=int8"],
            "quantised as I4_64, multiplied in integers (quantized_compute=int8); ",
        ),
        (["quantization=int8", "rl=T"], "quantised as I8, multiplied in integers"),
    ],
)
def test_the_start_says_how_weights_are_multiplied(flags: list[str], line: str, tmp_path: Path) -> None:
    save(tmp_path, "llama")
    details = {report.phase: report.detail for report in start(tmp_path, *flags)}
    assert line in details["weights"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["quantized_compute=int8"], "the checkpoint's weights are not quantised; quantization=int8 quantises them"),
        (
            ["quantization=int8", "dtype=float16"],
            "only the CPU kernels multiply by such weights, of bfloat16 or float32",
        ),
        (["quantization=int8", "torch_compile=T"], "compiled layers have plain weights: torch_compile=F"),
        (["quantized_compute=int8", "torch_compile=T"], "compiled layers have plain weights: torch_compile=F"),
    ],
)
def test_what_cannot_be_quantised_is_refused(flags: list[str], message: str, tmp_path: Path) -> None:
    save(tmp_path, "llama")
    with pytest.raises(FlagRefused) as refused:
        start(tmp_path, *flags)
    assert str(refused.value) == f"{flags[0]}: {message}"


@pytest.mark.parametrize("flag", ["quantization=int8", "quantized_compute=exact", "cpu_isa=avx2"])
def test_flags_of_the_cpu_kernels_are_refused_on_other_devices(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "llama")
    monkeypatch.setattr(entry, "choose_device", lambda *_: torch.device("cuda"))
    config = ServerConfig.parse(["max_tokens_per_forward=64", flag])
    with pytest.raises(FlagRefused) as refused:
        load_worker(config, resolve_checkpoint(str(tmp_path)), Mesh(), 0, PhaseLog(lambda _: None))
    assert str(refused.value) == f"{flag}: only device=cpu allows it, not device=cuda"
