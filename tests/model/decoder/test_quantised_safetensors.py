"""Models of compressed-tensors, AWQ, GPTQ and torchao: transformers with the weights that they mean, in float32."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, TorchAoConfig

from tests.checkpoint.helpers.quantised_models import change_quantization, save_gpt_oss, save_quantised_model
from tests.checkpoint.helpers.quantised_weights import Format, by_compressed_tensors, quantise, random_mxfp4
from tests.helpers.examples import few
from tests.helpers.tiny_model import save_tiny_model
from tests.model.helpers.greedy_decoding import assert_equals_oracle, load, run_stages, run_whole_prompt
from tests.model.helpers.quantized_rows import plain_rows
from tokasaurus.checkpoint import (
    CheckpointError,
    read_model_info,
    resolve_checkpoint,
    weight_files,
    with_safetensors,
)
from tokasaurus.checkpoint.quantized.config import parse_quantization
from tokasaurus.config import ServerConfig
from tokasaurus.messages.status import FlagRefused, PhaseDone
from tokasaurus.model.decoder.tensor_files import open_files, read_shard
from tokasaurus.model.decoder.weights import load_weights
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker.entry import load_worker
from tokasaurus.model.worker.start import PhaseLog, Start

FORMATS = [
    Format("awq"),
    Format("awq", group_size=64),
    Format("awq", group_size=128, is_symmetric=True),
    Format("gptq"),
    Format("gptq", group_size=128, is_symmetric=True),
    Format("gptq", group_size=None),
    Format("gptq", has_order=True),
    Format("gptq", num_bits=8, group_size=64),
    Format("gptq", num_bits=8, group_size=None, is_symmetric=True),
    Format("gptq_v2"),
    Format("int-quantized", num_bits=8, group_size=None, is_symmetric=True, scale_dtype=torch.bfloat16),
    Format("int-quantized", num_bits=8, group_size=None, is_symmetric=True, quantizes_activations=True),
    Format("int-quantized", num_bits=8, group_size=None, is_symmetric=True, is_per_tensor=True),
    Format("int-quantized", num_bits=8, group_size=None),
    Format("int-quantized", num_bits=8, group_size=32),
    Format("torchao", num_bits=8, group_size=None, is_symmetric=True, scale_dtype=torch.float32),
    Format("torchao", num_bits=8, group_size=None, is_symmetric=True, is_per_tensor=True, scale_dtype=torch.float32),
    Format("torchao", num_bits=8, group_size=64, scale_dtype=torch.float32),
    Format("pack-quantized", is_symmetric=True, scale_dtype=torch.bfloat16),
    Format("pack-quantized", group_size=64),
    Format("pack-quantized", group_size=128, scale_dtype=torch.float32),
    Format("pack-quantized", group_size=None),
    Format("pack-quantized", has_order=True),
    Format("pack-quantized", num_bits=8, group_size=64),
    Format("pack-quantized", num_bits=8, group_size=None, is_symmetric=True),
]


def named(how: Format) -> str:
    group = "tensor" if how.is_per_tensor else "channel" if how.group_size is None else str(how.group_size)
    marks = ("symmetric" * how.is_symmetric, "ordered" * how.has_order, "a8" * how.quantizes_activations)
    return "-".join(filter(None, (how.name, str(how.num_bits), group, *marks)))


def block_type(how: Format, group_size: int = 128) -> str | None:
    """Of the blocks that the kernels multiply by; None if there are none. group_size: where all inputs have one."""
    if how.has_order:
        return None
    if how.num_bits == 4:
        return f"I4_{group_size if how.group_size is None else how.group_size}"
    return "I8" if how.group_size is None and how.is_symmetric else None


@pytest.mark.parametrize("how", FORMATS, ids=named)
def test_shards_are_parts_of_the_weights_that_the_files_mean(how: Format, tmp_path: Path) -> None:
    oracle = save_quantised_model(tmp_path, "llama", how, num_layers=1)
    info = read_model_info(tmp_path)
    assert info.quantization is not None
    assert info.quantization.quantizes_activations == how.quantizes_activations
    found = {}
    every = slice(None)
    for file in open_files(weight_files(tmp_path), info.quantization):
        for name in file.names():
            expected = oracle.state_dict()[name]
            assert file.shape(name) == expected.shape
            found[name] = read_shard(file, name, tuple(every for _ in expected.shape))
            torch.testing.assert_close(found[name], expected, rtol=0, atol=0)
            if len(expected.shape) == 2:
                for shard in ((slice(3, 50), every), (every, slice(32, 64)), (slice(8, 21), slice(5, 101))):
                    torch.testing.assert_close(read_shard(file, name, shard), expected[shard], rtol=0, atol=0)
    assert found.keys() == oracle.state_dict().keys()


@pytest.mark.parametrize("how", FORMATS, ids=named)
def test_shards_in_blocks_mean_the_same_weights(how: Format, tmp_path: Path) -> None:
    oracle = save_quantised_model(tmp_path, "llama", how, num_layers=1)
    group_size = 128 if how.group_size is None else how.group_size
    every = slice(None)
    at_groups = [(every, every), (slice(3, 50), every), (slice(16, 24), slice(group_size, 2 * group_size))]
    name = "model.layers.0.mlp.down_proj.weight"
    expected = oracle.state_dict()[name]
    for file in open_files(weight_files(tmp_path), read_model_info(tmp_path).quantization):
        plain = [each for each in file.names() if file.block_type(each) is None]
        assert all(file.shard_blocks(each, tuple(every for _ in file.shape(each))) is None for each in plain)
        if name not in file.names():
            continue
        assert ("order" in str(file.block_type(name))) == how.has_order
        for shard in at_groups:
            blocks = file.shard_blocks(name, shard)
            assert (None if blocks is None else blocks.type) == block_type(how)
            if blocks is None:
                continue
            assert blocks.blocks.is_contiguous()
            for found in (blocks.dequantized(), plain_rows(blocks)):
                # A min of float32 and a scale of float32 are rounded; with shorter scales, both are exact.
                rounding = 1e-6 if how.scale_dtype is torch.float32 else 0
                torch.testing.assert_close(found, expected[shard], rtol=rounding, atol=rounding)
        between = file.shard_blocks(name, (every, slice(16, 112)))
        assert between is None or how.num_bits == 8
        smaller = file.shard_blocks(name, (every, slice(32, 64)))
        if block_type(how) is None:
            assert smaller is None
        else:  # smaller blocks, each with the group's numbers
            assert smaller is not None
            assert smaller.type == ("I8" if how.num_bits == 8 else "I4_32")
            torch.testing.assert_close(smaller.dequantized(), expected[:, 32:64], rtol=1e-6, atol=1e-6)


@few(
    3,
    ("family", "how", "tied"),
    [
        ("llama", Format("awq"), False),
        ("qwen2", Format("gptq", has_order=True), True),
        ("qwen3", Format("pack-quantized"), False),
        ("qwen3", Format("gptq_v2", group_size=64), False),
        ("qwen2", Format("int-quantized", num_bits=8, group_size=None, is_symmetric=True), False),
    ],
    ids=lambda value: named(value) if isinstance(value, Format) else str(value),
)
def test_a_quantised_model_gives_the_tokens_of_the_weights_that_it_means(
    family: str, how: Format, tied: bool, tmp_path: Path
) -> None:
    oracle = save_quantised_model(tmp_path, family, how, tied)
    assert_equals_oracle(tmp_path, oracle, "torch", seed=3)
    assert_equals_oracle(tmp_path, oracle, "cpu", seed=4)
    kept, info = load(tmp_path, packed=True)
    kind = block_type(how)
    assert kept.block_types == ([] if kind is None else [kind])
    assert (kept.saved_bytes > 0) == (kind is not None)
    plain, _ = load(tmp_path)
    dequantised = load_weights(
        weight_files(tmp_path), plain.weight_shards(), plain.ignores, quantization=info.quantization
    )
    assert dequantised == {"I4_32 in the order of activations" if kind is None else kind: 14}


@few(
    2,
    ("family", "how"),
    [
        ("qwen3_moe", Format("awq")),
        ("mixtral", Format("gptq", group_size=64)),
        ("qwen3_moe", Format("pack-quantized", group_size=128)),
        ("qwen3_moe", Format("int-quantized", num_bits=8, group_size=None, is_symmetric=True)),
        ("mixtral", Format("gptq", has_order=True)),
    ],
    ids=lambda value: named(value) if isinstance(value, Format) else str(value),
)
def test_each_expert_may_be_quantised_by_itself(family: str, how: Format, tmp_path: Path) -> None:
    oracle = save_quantised_model(tmp_path, family, how)
    assert_equals_oracle(tmp_path, oracle, "torch", seed=3)
    assert_equals_oracle(tmp_path, oracle, "cpu", seed=4)
    kept, _ = load(tmp_path, packed=True)
    kind = block_type(how)
    assert kept.block_types == ([] if kind is None else [kind])
    assert kept.packed_layers is not None
    experts = [layer.mlp for layer in kept.decoder_layers()]
    assert all(each.gate_up.experts.has_blocks == each.down.experts.has_blocks == bool(kind) for each in experts)
    logits, _ = run_stages(tmp_path, torch.arange(20), pp_size=2)
    with torch.no_grad():
        torch.testing.assert_close(logits, oracle(torch.arange(20)[None]).logits[0], rtol=1e-4, atol=1e-4)
    rank, _ = load(tmp_path, Mesh(tp_rank=1, tp_size=2), packed=True)
    assert bool(rank.block_types) == bool(kind)


def test_experts_of_mxfp4_give_the_tokens_of_the_weights_that_they_mean(tmp_path: Path) -> None:
    oracle = save_gpt_oss(tmp_path)
    assert_equals_oracle(tmp_path, oracle, "torch", seed=3)
    assert_equals_oracle(tmp_path, oracle, "cpu", seed=4)
    kept, info = load(tmp_path, packed=True)
    assert kept.block_types == ["MXFP4"]
    assert kept.saved_bytes > 0
    plain, _ = load(tmp_path)
    dequantised = load_weights(
        weight_files(tmp_path), plain.weight_shards(), plain.ignores, quantization=info.quantization
    )
    assert dequantised == {"MXFP4": 3 * 4 * info.num_layers}


def test_ranks_and_stages_have_parts_of_experts_of_mxfp4(tmp_path: Path) -> None:
    oracle = save_gpt_oss(tmp_path)
    token_ids = torch.arange(20)
    logits, _ = run_stages(tmp_path, token_ids, pp_size=2)
    with torch.no_grad():
        torch.testing.assert_close(logits, oracle(token_ids[None]).logits[0], rtol=1e-4, atol=1e-4)
    whole, info = load(tmp_path)
    ranks = [load(tmp_path, Mesh(tp_rank=rank, tp_size=2))[0] for rank in range(2)]
    for index, layer in enumerate(whole.decoder_layers()):
        downs, gate_ups = (
            [
                list(rank.decoder_layers())[index].get_submodule(f"mlp.{name}").weight.unflatten(0, (4, -1))
                for rank in ranks
            ]
            for name in ("down", "gate_up")
        )
        assert torch.equal(torch.cat(downs, 2).flatten(0, 1), layer.mlp.down.weight)
        gates, ups = (torch.cat([each.chunk(2, 1)[part] for each in gate_ups], 1) for part in range(2))
        assert torch.equal(torch.cat((gates, ups), 1).flatten(0, 1), layer.mlp.gate_up.weight)
    experts = {name: each for name, each in oracle.state_dict().items() if name.endswith(("gate_up_proj", "down_proj"))}
    every = slice(None)
    shards = (every, every, every), (slice(1, 3), slice(32, 64), slice(6, 30)), (slice(2, 3), slice(5, 40), every)
    for file in open_files(weight_files(tmp_path), info.quantization):
        for name, weight in experts.items():
            for shard in shards:
                assert torch.equal(read_shard(file, name, shard), weight[shard])
            blocks = file.shard_blocks(name, (slice(2, 3), slice(32, 64), slice(6, 30)))
            assert blocks is not None
            assert blocks.type == "MXFP4"
            assert torch.equal(blocks.dequantized(), weight[2, 32:64, 6:30].T)
            assert file.shard_blocks(name, (slice(2, 3), slice(16, 64), every)) is None, "half a block"


def test_transformers_makes_the_same_weights_of_mxfp4() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored, meant = random_mxfp4(3, 24, 64)
    assert torch.equal(convert_moe_packed_tensors(stored["blocks"], stored["scales"], dtype=torch.float32), meant)


@pytest.mark.parametrize("how", [Format("awq"), Format("gptq", has_order=True), Format("pack-quantized")], ids=named)
def test_ranks_and_stages_have_parts_of_the_quantised_model(how: Format, tmp_path: Path) -> None:
    oracle = save_quantised_model(tmp_path, "qwen2", how)
    token_ids = torch.arange(20)
    logits, num_layers = run_stages(tmp_path, token_ids, pp_size=2)
    assert num_layers == [1, 1]
    with torch.no_grad():
        torch.testing.assert_close(logits, oracle(token_ids[None]).logits[0], rtol=1e-4, atol=1e-4)
    whole, _ = load(tmp_path)
    ranks = [load(tmp_path, Mesh(tp_rank=rank, tp_size=2))[0] for rank in range(2)]
    for index, layer in enumerate(whole.decoder_layers()):
        parts = [list(rank.decoder_layers())[index] for rank in ranks]
        for get, dimension in (("attention.out", 1), ("mlp.down", 1)):
            weights = [part.get_submodule(get).weight for part in parts]
            assert torch.equal(torch.cat(weights, dim=dimension), layer.get_submodule(get).weight)
        gates = [part.mlp.gate_up.weight.chunk(2)[0] for part in parts]
        assert torch.equal(torch.cat(gates), layer.mlp.gate_up.weight.chunk(2)[0])


@pytest.mark.parametrize("how", [Format("awq"), Format("pack-quantized", has_order=True), None], ids=str)
def test_the_copy_for_other_programs_has_the_same_weights(
    how: Format | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: of gpt-oss."""
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))
    directory = tmp_path / "model"
    oracle = save_gpt_oss(directory) if how is None else save_quantised_model(directory, "qwen3", how)
    copy = with_safetensors(directory)
    assert copy.parent == tmp_path / "cache" / "converted"
    assert with_safetensors(directory) == with_safetensors(copy) == copy
    found = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32).state_dict()
    assert found.keys() == oracle.state_dict().keys()
    assert all(torch.equal(found[name], weight) for name, weight in oracle.state_dict().items())


@pytest.mark.parametrize(
    ("how", "name", "fields"),
    [
        (Format("awq"), "quant_config.json", {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}),
        (
            Format("gptq", has_order=True),
            "quantize_config.json",
            {"bits": 4, "group_size": 32, "desc_act": True, "sym": False},
        ),
    ],
)
def test_an_old_folder_with_its_settings_in_a_file_of_their_own(
    how: Format, name: str, fields: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))
    directory = tmp_path / "model"
    oracle = save_quantised_model(directory, "llama", how, num_layers=1)
    change_quantization(directory, None)
    with pytest.raises(CheckpointError, match="lacks tensor"):
        load(directory)
    (directory / name).write_text(json.dumps(fields))
    assert_equals_oracle(directory, oracle, "torch", seed=3)
    copy = with_safetensors(directory)
    assert read_model_info(copy).quantization is None
    found = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32).state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in oracle.state_dict().items())
    assert read_model_info(copy) == replace(read_model_info(directory), quantization=None)
    assert (copy / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()
    (directory / "config.json").touch()
    assert with_safetensors(directory) != copy


def test_a_quantised_head_gives_the_tokens_of_the_weights_that_it_means(tmp_path: Path) -> None:
    oracle = save_quantised_model(tmp_path, "llama", Format("gptq", group_size=64), has_quantised_head=True)
    assert_equals_oracle(tmp_path, oracle, "torch", seed=3)
    assert_equals_oracle(tmp_path, oracle, "cpu", seed=4)
    kept, _ = load(tmp_path, packed=True)
    assert kept.lm_head is not None
    assert kept.lm_head.packed is not None
    assert kept.lm_head.packed.has_blocks


def read_weight(directory: Path, stored: dict[str, torch.Tensor], how: Format) -> torch.Tensor:
    """Of a checkpoint with one weight."""
    path = directory / "model.safetensors"
    save_file({f"a.{part}": tensor for part, tensor in stored.items()}, path)
    for file in open_files([path], parse_quantization({"quantization_config": how.config})):
        return read_shard(file, "a.weight", (slice(None), slice(None)))
    raise AssertionError("there is one file")


@pytest.mark.parametrize("kind", ["weights by row", "weights by tensor", "weights by group", "weights and activations"])
def test_a_model_that_transformers_saves_with_torchao_has_the_weights_that_torchao_means(
    kind: str, tmp_path: Path
) -> None:
    torchao = pytest.importorskip("torchao.quantization", reason="no test installs it: pip install --no-deps torchao")
    how = {
        "weights by row": torchao.Int8WeightOnlyConfig(),
        "weights by tensor": torchao.Int8WeightOnlyConfig(granularity=torchao.PerTensor()),
        "weights by group": torchao.Int8WeightOnlyConfig(granularity=torchao.PerGroup(32)),
        "weights and activations": torchao.Int8DynamicActivationInt8WeightConfig(),
    }[kind]
    save_tiny_model(tmp_path / "plain", "qwen3", num_layers=1)
    quantised = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.float32, quantization_config=TorchAoConfig(how)
    )
    quantised.save_pretrained(tmp_path / "quantised")
    info = read_model_info(tmp_path / "quantised")
    assert info.quantization is not None
    assert info.quantization.quantizes_activations == (kind == "weights and activations")
    num_compared = 0
    for file in open_files(weight_files(tmp_path / "quantised"), info.quantization):
        for name, stored in quantised.state_dict().items():
            meant = stored.dequantize(torch.float32) if isinstance(stored, torchao.Int8Tensor) else stored
            num_compared += isinstance(stored, torchao.Int8Tensor)
            assert torch.equal(read_shard(file, name, tuple(slice(None) for _ in file.shape(name))), meant)
    assert num_compared == 7


@pytest.mark.parametrize("how", [how for how in FORMATS if "quantized" in how.name and not how.has_order], ids=named)
def test_compressed_tensors_makes_the_same_weights_of_its_formats(how: Format, tmp_path: Path) -> None:
    stored, meant = quantise(torch.randn(64, 128), how)
    found = read_weight(tmp_path, stored, how)
    assert torch.equal(found, by_compressed_tensors(stored, how))
    assert torch.equal(found, meant)


def test_a_padded_weight_has_the_inputs_of_its_stated_shape(tmp_path: Path) -> None:
    how = Format("pack-quantized", group_size=None)
    stored, meant = quantise(torch.randn(20, 36), how)
    assert stored["weight_packed"].shape == (20, 5)
    assert stored["weight_zero_point"].shape == (3, 1)
    found = read_weight(tmp_path, stored, how)
    assert torch.equal(found, meant)
    assert torch.equal(found, by_compressed_tensors(stored, how))


def test_groups_that_an_old_version_left_out_are_of_adjacent_inputs(tmp_path: Path) -> None:
    how = Format("pack-quantized")
    stored, meant = quantise(torch.randn(16, 64), how)
    left_out = {**stored, "weight_g_idx": torch.full((64,), -1, dtype=torch.int32)}
    assert torch.equal(read_weight(tmp_path, left_out, how), meant)


def test_zeros_of_the_first_gptq_format_are_one_number_for_a_word(tmp_path: Path) -> None:
    """gptqmodel takes 1 from every zero by taking 0x11111111 from the whole word, so that a zero of 0 takes from the
    next one. That is undone."""
    how = Format("gptq", group_size=None)
    stored, _ = quantise(torch.randn(8, 16), how)
    zeros = torch.arange(8)
    word = sum(zero << (4 * index) for index, zero in enumerate(zeros.tolist())) - 0x11111111
    changed = {**stored, "qzeros": torch.tensor([[word]], dtype=torch.int64).to(torch.int32)}
    codes = [[int(word) >> 4 * index & 15 for word in stored["qweight"][:, row] for index in range(8)] for row in zeros]
    expected = (torch.tensor(codes) - zeros[:, None]) * stored["scales"].T.float()
    assert torch.equal(read_weight(tmp_path, changed, how), expected)


W8A8 = Format("int-quantized", num_bits=8, group_size=None, is_symmetric=True, quantizes_activations=True)


def start(directory: Path, *flags: str) -> tuple[Start, str]:
    """A worker's model, and what it reports of its weights."""
    reports: list[PhaseDone] = []
    config = ServerConfig.parse(["device=cpu", "dtype=float32", "kv_cache_num_tokens=4096", *flags])
    loaded = load_worker(config, resolve_checkpoint(str(directory)), Mesh(), 0, PhaseLog(reports.append))
    return loaded, next(report.detail for report in reports if report.phase == "weights")


def logprobs_of(oracle: PreTrainedModel, prompt: Tensor) -> Tensor:
    with torch.no_grad():
        return oracle(prompt.unsqueeze(0)).logits[0].log_softmax(dim=-1)


def quantise_inputs(oracle: PreTrainedModel) -> None:
    """As compressed-tensors computes with 8-bit activations."""
    quantization = pytest.importorskip("compressed_tensors.quantization", reason="needs Python 3.11")
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    arguments = quantization.QuantizationArgs(num_bits=8, type="int", strategy="token", dynamic=True, symmetric=True)

    def rounded(module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        rounded_inputs: Tensor = fake_quantize(
            inputs[0], *compute_dynamic_scales_and_zp(inputs[0], arguments, module), arguments
        )
        return rounded_inputs

    for name, module in oracle.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(rounded)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_activations_of_8_bits_err_as_compressed_tensors_ones_do(family: str, tmp_path: Path) -> None:
    oracle = save_quantised_model(tmp_path, family, W8A8)
    prompt = torch.randint(200, (60,), generator=torch.Generator().manual_seed(0))
    loaded, details = start(tmp_path)
    assert "quantised as I8, multiplied in integers (as the checkpoint asks)" in details
    found = run_whole_prompt(loaded.model, read_model_info(tmp_path), Mesh(), None, prompt).log_softmax(dim=-1)
    exact = logprobs_of(oracle, prompt)
    quantise_inputs(oracle)
    reference = logprobs_of(oracle, prompt)
    error, reference_error = ((each - exact).abs().mean() for each in (found, reference))
    assert 0 < error < 1.5 * reference_error


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["quantized_compute=exact"], "quantised as I8, exact (quantized_compute=exact)"),
        (
            ["rl=T"],
            "14 weights of I8 dequantised (with rl=T, all weights are plain numbers), whose activations are not",
        ),
    ],
)
def test_activations_of_8_bits_are_left_out_where_asked(flags: list[str], line: str, tmp_path: Path) -> None:
    save_quantised_model(tmp_path, "llama", W8A8)
    assert line in start(tmp_path, *flags)[1]


@pytest.mark.parametrize(
    ("how", "line"),
    [
        (
            Format("gptq", has_order=True),
            "14 weights of I4_32 in the order of activations dequantised (the kernels need groups of adjacent inputs)",
        ),
        *(
            (how, f"14 weights of I8_{how.group_size} dequantised (the kernels need one scale for each output)")
            for how in (
                Format("gptq", num_bits=8, group_size=64),
                Format("int-quantized", num_bits=8),
                Format("pack-quantized", num_bits=8, group_size=128),
                Format("torchao", num_bits=8, group_size=32, scale_dtype=torch.float32),
            )
        ),
        (
            Format("int-quantized", num_bits=8, group_size=None),
            "14 weights of I8 dequantised (the kernels need 8 bits without zero points, and inputs by the 32)",
        ),
    ],
    ids=lambda value: named(value) if isinstance(value, Format) else "",
)
def test_the_start_says_how_many_weights_are_dequantised_and_why(how: Format, line: str, tmp_path: Path) -> None:
    save_quantised_model(tmp_path, "llama", how)
    assert start(tmp_path)[1].endswith(line)


def test_the_start_without_kernels_says_what_quantised_weights_need(tmp_path: Path) -> None:
    save_quantised_model(tmp_path, "llama", Format("awq"))
    assert (
        "14 weights of I4_32 dequantised (only the CPU kernels multiply by blocks)"
        in start(tmp_path, "cpu_isa=torch")[1]
    )


@pytest.mark.parametrize("flags", [["quantization=int8"], ["quantization=int4", "rl=T"]])
def test_quantised_weights_are_not_quantised_again(flags: list[str], tmp_path: Path) -> None:
    save_quantised_model(tmp_path, "llama", Format("gptq", has_order=True))
    with pytest.raises(FlagRefused) as refused:
        start(tmp_path, *flags)
    assert str(refused.value) == f"{flags[0]}: the checkpoint's weights are quantised already"
