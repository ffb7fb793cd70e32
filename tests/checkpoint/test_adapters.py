"""Adapters that PEFT has written, beside the weights that PEFT makes of them; and files that are refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, PeftModel, get_peft_model
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from tests.helpers.tiny_model import OPTIONS, family_config, option_config
from tokasaurus.checkpoint import CheckpointError, adapters, read_model_info
from tokasaurus.checkpoint.adapters import Adapter, fit_to_base, read_adapter, read_adapter_config, write_adapter
from tokasaurus.checkpoint.info import EMBEDDING, HEAD
from tokasaurus.model.decoder.decoder import build_decoder
from tokasaurus.model.parallel.mesh import Mesh

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."


def base_model(family: str = "llama", tied: bool = False) -> PreTrainedModel:
    torch.manual_seed(0)
    config = family_config(family, tied) if family == "llama" else option_config(family, 0, tied)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model


def train(model: PreTrainedModel, **options: Any) -> PeftModel:
    """An adapter whose numbers are all random. B begins as zeros, and saved modules as the base model's."""
    adapted = get_peft_model(model, LoraConfig(**{"r": 4, "target_modules": ALL, **options}))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(torch.randn(parameter.shape) * 0.3)
    return adapted


def saved(directory: Path, **options: Any) -> Path:
    train(base_model(), **options).save_pretrained(directory)
    return directory


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def read_for(model: PreTrainedModel, directory: Path) -> Adapter:
    return fit_to_base(read_adapter(directory), shapes(model))


def merged(adapter: Adapter, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """weights: the base model's by name."""
    result = {name: weight.clone() for name, weight in weights.items()}
    for whole in adapter.whole:
        result[whole.source] = torch.from_numpy(whole.weight)
    for each in adapter.low_rank:
        result[each.source] += each.scale * torch.from_numpy(each.b) @ torch.from_numpy(each.a)
    return result


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(directory: Path, edit: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    save_file(edit(load_file(directory / TENSORS)), directory / TENSORS)


OF_ALL_FAMILIES = {"target_modules": "all-linear", "lora_alpha": 12}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((family, OF_ALL_FAMILIES) for family in ("llama", "qwen3", "phi", "phi3", "gemma", "glm4", "starcoder2")),
    ("llama", {"use_rslora": True, "lora_alpha": 5, "r": 7}),
    ("llama", {"r": 256, "lora_alpha": 0.5, "target_modules": ["down_proj"]}),
    (
        "llama",
        {
            "rank_pattern": {"q_proj": 3, "^model.layers.1.mlp.up_proj": 6, r".*\.[0-9]\.mlp\.(?:gate|down)_proj": 5},
            "alpha_pattern": {"layers.2.self_attn.o_proj": 20, "up_proj": 0.5, "proj": 1, r"self_attn\.(q|k)_proj": 40},
        },
    ),
    ("llama", {"use_rslora": True, "rank_pattern": {"q_proj": 9}, "alpha_pattern": {"q_proj": 2}}),
    ("llama", {"target_modules": r".*\.[02]\.self_attn\.[qv]_proj"}),
    ("llama", {"layers_to_transform": [1], "layers_pattern": "layers"}),
    ("llama", {"exclude_modules": ["q_proj"], "lora_dropout": 0.1, "task_type": "CAUSAL_LM"}),
    ("llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    ("gemma3_text", {"target_modules": ["embed_tokens", "v_proj"]}),
    ("llama", {"modules_to_save": ["embed_tokens", "lm_head"]}),
    ("llama", {"modules_to_save": ["lm_head"], "target_modules": ["embed_tokens"]}),
    *(("llama", {"init_lora_weights": initial}) for initial in (False, "gaussian", "orthogonal", "mica")),
    # attention of a model whose experts are left alone
    *((family, {"target_modules": ALL[:4]}) for family in ("mixtral", "qwen3_moe", "granitemoe", "gpt_oss")),
]


@pytest.mark.parametrize(("family", "options"), CASES)
def test_weights_are_those_that_peft_merges(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    base = base_model(family)
    weights = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    adapted = train(base, **options)
    adapted.save_pretrained(tmp_path)
    adapter = read_for(base_model(family), tmp_path)
    expected = adapted.merge_and_unload().state_dict()
    found = merged(adapter, weights)
    assert found.keys() == expected.keys()
    changed = {name for name in found if not torch.equal(found[name], weights[name])}
    assert changed == {each.source for each in (*adapter.low_rank, *adapter.whole)}
    assert changed
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=1e-5, rtol=1e-5, msg=name)
    assert adapter.rank == max([0, *(each.rank for each in adapter.low_rank)])


@pytest.mark.parametrize("initial", ["pissa", "olora"])
def test_adapters_that_change_the_base_are_read_once_they_are_converted(initial: str, tmp_path: Path) -> None:
    base = base_model()
    weights = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=ALL, init_lora_weights=initial))
    adapted.peft_config["default"].init_lora_weights = True
    adapted.save_pretrained(tmp_path / "initial")
    adapted.peft_config["default"].init_lora_weights = initial
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    adapted.save_pretrained(tmp_path / "as it is")
    with pytest.raises(CheckpointError, match=f"{initial}.*path_initial_model_for_weight_conversion"):
        read_adapter(tmp_path / "as it is")
    adapted.save_pretrained(tmp_path / "new", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    found = merged(read_for(base_model(), tmp_path / "new"), weights)
    for name, weight in adapted.merge_and_unload().state_dict().items():
        torch.testing.assert_close(found[name], weight, atol=1e-5, rtol=1e-5, msg=name)


TIED: list[dict[str, Any]] = [
    {"target_modules": ["embed_tokens"]},
    {"target_modules": ["lm_head"]},
    {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    {"target_modules": ["lm_head"], "ensure_weight_tying": True},
    {"modules_to_save": ["embed_tokens"]},
    {"modules_to_save": ["lm_head"]},
    {"modules_to_save": ["embed_tokens", "lm_head"]},
    {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
]


@pytest.mark.parametrize("options", TIED)
def test_tied_weights_change_where_peft_computes_the_change(options: dict[str, Any], tmp_path: Path) -> None:
    """Merging would change both, since they are one tensor in the base model."""
    train(base_model(tied=True), **options).save_pretrained(tmp_path)
    base = base_model(tied=True)
    only_embedding = {name: shape for name, shape in shapes(base).items() if name != HEAD}
    adapter = fit_to_base(read_adapter(tmp_path), only_embedding)
    found = merged(adapter, base.state_dict())
    adapted = PeftModel.from_pretrained(base, tmp_path)
    hidden = torch.randn(5, found[HEAD].shape[1])
    with torch.no_grad():
        embedded = adapted.get_input_embeddings()(torch.arange(len(found[EMBEDDING])))
        torch.testing.assert_close(embedded, found[EMBEDDING], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(base.lm_head(hidden), hidden @ found[HEAD].T, atol=1e-4, rtol=1e-5)


def test_copies_of_the_base_are_compared_by_their_shape(tmp_path: Path) -> None:
    """PEFT stores them with changes of the embedding; they differ where the vocabulary has been made larger."""
    base = base_model()
    base.resize_token_embeddings(280)
    train(base, target_modules=["embed_tokens"]).save_pretrained(tmp_path)
    adapter = read_adapter(tmp_path)
    assert [name for name, _ in adapter.copies] == [EMBEDDING]
    with pytest.raises(
        CheckpointError, match=r"embed_tokens of shape \(280, 64\), but the base model's is \(272, 64\)"
    ):
        fit_to_base(adapter, shapes(base_model()))


def test_names_with_and_without_prefix_and_adapter_name_are_the_same(tmp_path: Path) -> None:
    options = {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]}
    adapted = train(base_model(), **options)
    adapted.save_pretrained(tmp_path)
    digest = read_adapter(tmp_path).digest

    def named(name: str) -> str:
        return name.replace("_A.", "_A.default.").replace("_B.", "_B.default.")

    edit_tensors(tmp_path, lambda tensors: {name.removeprefix(PREFIX): each for name, each in tensors.items()})
    assert read_adapter(tmp_path).digest == digest
    edit_tensors(tmp_path, lambda tensors: {named(name): each for name, each in tensors.items()})
    assert ".lora_A.default.weight" in "".join(load_file(tmp_path / TENSORS))
    assert read_adapter(tmp_path).digest == digest
    # As the model's own parameters are named, whose `original_module` is the base's.
    own = {name: each for name, each in adapted.state_dict().items() if "lora_" in name or "modules_to_save" in name}
    save_file({name: each.contiguous() for name, each in own.items()}, tmp_path / TENSORS)
    assert read_adapter(tmp_path).digest == digest


def test_text_models_of_checkpoints_with_images_have_their_names(tmp_path: Path) -> None:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "gemma3",
        text_config=option_config("gemma3_text", 0).to_dict(),
        vision_config={**vision, "image_size": 28, "patch_size": 14},
    )
    model = AutoModelForImageTextToText.from_config(config)
    adapted = train(
        model, target_modules=r".*language_model.*\.q_proj", rank_pattern={r"language_model\.layers\.0\..*": 2}
    )
    adapted.save_pretrained(tmp_path)
    assert any("language_model.layers" in name for name in load_file(tmp_path / TENSORS))
    adapter = fit_to_base(read_adapter(tmp_path), shapes(base_model("gemma3_text")))
    assert [(each.source, each.rank) for each in adapter.low_rank] == [
        (f"model.layers.{index}.self_attn.q_proj.weight", 4 if index else 2)
        for index in range(config.text_config.num_hidden_layers)
    ]


@pytest.mark.parametrize("family", list(OPTIONS))
def test_modules_of_every_family_are_named_as_the_weights_that_are_loaded(family: str, tmp_path: Path) -> None:
    """So that an adapter of transformers' modules needs no translation, also where weights are stored fused."""
    config = option_config(family, 0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    decoder = build_decoder(read_model_info(tmp_path), Mesh(), torch.float32)
    sources = {shard.source: shard.shape for shard in decoder.weight_shards()}
    modules = [(name, each) for name, each in model.named_modules() if isinstance(each, nn.Linear | nn.Embedding)]
    expected = {f"{name}.weight": tuple(each.weight.shape) for name, each in modules if "router" not in name}
    assert expected
    assert {name: sources.get(name) for name in expected} == expected


def test_digests_are_of_what_is_computed(tmp_path: Path) -> None:
    saved(tmp_path / "first", modules_to_save=["lm_head"])
    digest = read_adapter(tmp_path / "first").digest

    def changed(change: Callable[[Path], object]) -> bool:
        copy = tmp_path / "other name"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(tmp_path / "first", copy)
        change(copy)
        return read_adapter(copy).digest != digest

    def add(ending: str, value: float) -> Callable[[Path], None]:
        def edit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            name = next(name for name in tensors if name.endswith(ending))
            tensors[name][1, 2] += value
            return tensors

        return lambda path: edit_tensors(path, edit)

    assert not changed(lambda _: None)
    assert not changed(lambda path: edit_config(path, task_type="CAUSAL_LM", inference_mode=False, lora_dropout=0.5))
    assert not changed(lambda path: edit_config(path, base_model_name_or_path="/elsewhere", peft_version="1.0"))
    assert not changed(lambda path: edit_config(path, alpha_pattern={"q_proj": 8}))
    assert not changed(lambda path: (path / "README.md").write_text("# Adapter"))
    assert changed(lambda path: edit_config(path, lora_alpha=9))
    assert changed(lambda path: edit_config(path, use_rslora=True))
    assert changed(lambda path: edit_config(path, alpha_pattern={"layers.0.self_attn.q_proj": 9}))
    for ending in ("lora_A.weight", "lora_B.weight", "lm_head.weight"):
        assert changed(add(ending, 0.1))
    swapped = {"q_proj": "o_proj", "o_proj": "q_proj"}
    assert changed(
        lambda path: edit_tensors(
            path,
            lambda tensors: {
                name.replace(name.split(".")[-3], swapped.get(name.split(".")[-3], name.split(".")[-3])): each
                for name, each in tensors.items()
            },
        )
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_of_half_precision_are_exact(dtype: torch.dtype, tmp_path: Path) -> None:
    saved(tmp_path)
    edit_tensors(tmp_path, lambda tensors: {name: each.to(dtype) for name, each in tensors.items()})
    halves = read_adapter(tmp_path)
    for each in halves.low_rank:
        stored = load_file(tmp_path / TENSORS)[PREFIX + each.source.replace("weight", "lora_A.weight")]
        assert torch.equal(torch.from_numpy(each.a), stored.float())
    edit_tensors(tmp_path, lambda tensors: {name: each.float() for name, each in tensors.items()})
    assert read_adapter(tmp_path).digest == halves.digest


def test_peft_reads_what_is_written_here(tmp_path: Path) -> None:
    saved(tmp_path / "peft", modules_to_save=["lm_head"])
    config = json.loads((tmp_path / "peft" / CONFIG).read_text())
    tensors = load_file(tmp_path / "peft" / TENSORS)
    (tmp_path / "own").mkdir()
    write_adapter(
        tmp_path / "own",
        config,
        {name: ("F32", tuple(each.shape), each.numpy().tobytes()) for name, each in tensors.items()},
    )
    assert read_adapter(tmp_path / "own").digest == read_adapter(tmp_path / "peft").digest
    new, old = (
        PeftModel.from_pretrained(base_model(), tmp_path / name).merge_and_unload().state_dict()
        for name in ("own", "peft")
    )
    assert all(torch.equal(new[name], old[name]) for name in old)


PATTERNS = ["q_proj", "layers.1.*", r".*\.self_attn\.[qk]_proj", "^model.layers.0.mlp.up_proj", "a|up_proj", "_proj"]


@pytest.mark.parametrize("seed", range(20))
def test_patterns_match_as_pefts(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    keys = [str(each) for each in rng.permutation(PATTERNS)[: rng.integers(1, len(PATTERNS))]]
    ranks = {key: index + 2 for index, key in enumerate(keys)}
    (tmp_path / CONFIG).write_text(json.dumps({"peft_type": "LORA", "rank_pattern": ranks, "alpha_pattern": ranks}))
    config = read_adapter_config(tmp_path)
    for layer in range(12):
        for module in (*(f"self_attn.{name}" for name in ALL[:4]), *(f"mlp.{name}" for name in ALL[4:])):
            name = f"model.layers.{layer}.{module}"
            expected = ranks.get(get_pattern_key(list(ranks), name))
            assert config.rank_of(name) == (8 if expected is None else expected)
            assert config.scale_of(name, 16) == (8 if expected is None else expected) / 16


REFUSED: dict[str, Any] = {
    **{"use_dora": True, "lora_bias": True, "use_qalora": True, "fan_in_fan_out": True, "bias": "lora_only"},
    **{"alora_invocation_tokens": [1, 2], "layer_replication": [[0, 2], [1, 3]], "trainable_token_indices": [0]},
    **{"target_parameters": ["experts.gate_up_proj"], "megatron_config": {"a": 1}, "use_bdlora": {}},
    **{"velora_config": {"num_groups": 4}, "kasa_config": {}, "arrow_config": {"top_k": 2}, "monteclora_config": {}},
    **{"init_lora_weights": "loftq", "peft_type": "LOHA", "a_newer_key": 1, "another": "word"},
}


@pytest.mark.parametrize(("key", "value"), REFUSED.items())
def test_keys_of_other_computations_are_refused_by_name(key: str, value: object, tmp_path: Path) -> None:
    saved(tmp_path)
    edit_config(tmp_path, **{key: value})
    with pytest.raises(CheckpointError, match=key) as caught:
        read_adapter(tmp_path)
    assert repr(value) in str(caught.value)
    assert CONFIG in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_key_of_peft_is_known() -> None:
    """A key that a new version has makes this fail: whether it changes the computation has to be decided."""
    known = {*adapters._APPLIED, *adapters._WITHOUT_EFFECT, *REFUSED} - {"a_newer_key", "another"}
    assert set(asdict(LoraConfig())) == known, peft.__version__


def test_values_that_ask_for_nothing_are_accepted(tmp_path: Path) -> None:
    saved(tmp_path)
    digest = read_adapter(tmp_path).digest
    edit_config(tmp_path, a_newer_key=None, b=False, c=[], d={}, e="", use_dora=False, alora_invocation_tokens=None)
    assert read_adapter(tmp_path).digest == digest


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"r": 0}, "r must be a positive integer"),
    ({"r": "8"}, "r must be a positive integer"),
    ({"lora_alpha": None}, "lora_alpha must be a number"),
    ({"lora_alpha": True}, "lora_alpha must be a number"),
    ({"lora_alpha": float("nan")}, "lora_alpha must be a number"),
    ({"use_rslora": 1}, "use_rslora must be true or false"),
    ({"rank_pattern": ["q_proj"]}, "rank_pattern must be an object"),
    ({"rank_pattern": {"q_proj": 1.5}}, "q_proj must be a positive integer"),
    ({"alpha_pattern": {"q_proj": "x"}}, "q_proj must be a number"),
    ({"alpha_pattern": {"(q": 1}}, "no regular expression"),
    ({"alpha_pattern": {"(a*)*b": 1}}, "may take too long"),
    ({"alpha_pattern": {"a?a?a?a?": 1}}, "may take too long"),
    ({"alpha_pattern": {"(?=q)": 1}}, "may take too long"),
    ({"base_model_name_or_path": 3}, "base_model_name_or_path must be a string"),
    ({"modules_to_save": "lm_head"}, "modules_to_save must be a list"),
    ({"r": 5}, "makes the rank 5"),
    ({"rank_pattern": {"q_proj": 7}}, "makes the rank 7"),
    ({"modules_to_save": ["lm_head"]}, "no tensor of lm_head"),
]


@pytest.mark.parametrize(("changes", "message"), MALFORMED)
def test_malformed_configurations_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    saved(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        read_adapter(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b'"LORA"', b"[" * 100_000])
def test_other_files_are_no_configurations(content: bytes, tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / CONFIG).write_bytes(content)
    with pytest.raises(CheckpointError, match=CONFIG):
        read_adapter(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"has no {CONFIG}"):
        read_adapter(tmp_path)
    saved(tmp_path)
    (tmp_path / TENSORS).unlink()
    with pytest.raises(CheckpointError, match=f"has no {TENSORS}$"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"\.bin files are not read: save it as safetensors"):
        read_adapter(tmp_path)


def test_every_cut_of_the_file_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    content = (tmp_path / TENSORS).read_bytes()
    for size in [*range(0, 40, 3), *range(40, len(content), len(content) // 40), len(content) - 1]:
        (tmp_path / TENSORS).write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=TENSORS):
            read_adapter(tmp_path)


Q_A = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
Q_B = Q_A.replace("_A", "_B")


OF_TEXT = f"{PREFIX}model.language_model.layers.0.self_attn.q_proj.lora_"


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {each: tensor for each, tensor in tensors.items() if each != name}


def having(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: tensors | {name: tensor}


DAMAGED: list[tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = [
    (lambda _: {}, "it has no tensors"),
    (without(Q_A), f"{Q_B} lacks its other half, lora_A"),
    (without(Q_B), f"{Q_A} lacks its other half, lora_B"),
    (having(Q_A, torch.full((4, 64), torch.nan)), f"{Q_A} has numbers that are not finite"),
    (having(Q_B, torch.eye(64)[:, :4] / 0), f"{Q_B} has numbers that are not finite"),
    (having(Q_B, torch.full((64, 4), torch.inf, dtype=torch.bfloat16)), f"{Q_B} has numbers that are not finite"),
    (having(Q_A, torch.zeros(3, 64)), "makes the rank 4"),
    (having(Q_A, torch.zeros(4, 64, 1)), "not that of a matrix"),
    (having(Q_A, torch.zeros(4, 0)), "not that of a matrix"),
    (having(Q_A, torch.zeros(4, 64, dtype=torch.float64)), f"{Q_A} has dtype F64; allowed are F32, F16, BF16"),
    (having(Q_A, torch.zeros(4, 64, dtype=torch.int8)), f"{Q_A} has dtype I8"),
    (having(Q_A.replace("_A.", "_A.other."), torch.zeros(4, 64)), "have the same place"),
    (having(Q_A.removeprefix(PREFIX), torch.zeros(4, 64)), "have the same place"),
    (having(Q_A.replace("lora_A.", ""), torch.zeros(64, 64)), "have the same place"),
    (having(Q_B.replace("weight", "bias"), torch.zeros(64)), "lora_B.bias is of a kind that is not supported"),
    (having(Q_A.replace("lora_A.weight", "lora_magnitude_vector"), torch.zeros(64)), "lora_magnitude_vector"),
    (having("x" * 1000, torch.zeros(1, 1)), "is too long"),
    (having(f"{PREFIX}prompt_embeddings", torch.zeros(1, 1)), "prompt_embeddings is of a kind"),
]


@pytest.mark.parametrize(("edit", "message"), DAMAGED)
def test_tensors_that_do_not_fit_together_are_refused(
    edit: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str, tmp_path: Path
) -> None:
    saved(tmp_path)
    edit_tensors(tmp_path, edit)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_adapter(tmp_path)
    assert "\n" not in str(caught.value)


OTHER_BASE: list[tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = [
    (having(Q_A, torch.zeros(4, 63)), r"q_proj of shape \(64, 63\), but the base model's is \(64, 64\)"),
    (having(Q_B, torch.zeros(32, 4)), r"q_proj of shape \(32, 64\), but the base model's is \(64, 64\)"),
    (lambda tensors: {name.replace("q_proj", "query"): each for name, each in tensors.items()}, "does not have"),
    (lambda tensors: {name.replace(".0.", ".9."): each for name, each in tensors.items()}, "layers.9.*does not have"),
    (having(f"{PREFIX}model.norm.weight", torch.zeros(64, 1)), "model.norm"),
    (having(f"{PREFIX}score.weight", torch.zeros(2, 64)), "changes score, which the base model does not have"),
    (having(f"{PREFIX}model.layers.0.mlp.up_proj.weight", torch.zeros(96, 64)), "replaces model.layers.0.mlp.up_proj"),
    (
        lambda tensors: {**tensors, OF_TEXT + "A.weight": torch.zeros(4, 64), OF_TEXT + "B.weight": torch.zeros(64, 4)},
        "self_attn.q_proj.weight twice",
    ),
]


@pytest.mark.parametrize(("edit", "message"), OTHER_BASE)
def test_adapters_of_another_base_are_refused(
    edit: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str, tmp_path: Path
) -> None:
    saved(tmp_path, target_modules=ALL[:4])
    edit_tensors(tmp_path, edit)
    adapter = read_adapter(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        fit_to_base(adapter, shapes(base_model()))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "phimoe", "qwen2_moe"])
def test_experts_and_routers_are_refused_by_name(family: str, tmp_path: Path) -> None:
    train(base_model(family), target_modules="all-linear").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"target_parameters|of experts and routers are not served|rank"):
        read_for(base_model(family), tmp_path)


@pytest.mark.parametrize(
    "module",
    [
        *("mlp.experts.3.up_proj", "mlp.experts", "mlp.gate", "mlp.shared_expert_gate", "mlp.router", "mlp.gate.wg"),
        *("block_sparse_moe.gate", "block_sparse_moe.experts.0.w1", "block_sparse_moe.router.layer"),
    ],
)
def test_every_familys_experts_and_routers_are_refused(module: str, tmp_path: Path) -> None:
    saved(tmp_path, target_modules=["q_proj"])
    edit_tensors(
        tmp_path, lambda tensors: {name.replace("self_attn.q_proj", module): each for name, each in tensors.items()}
    )
    adapter = read_adapter(tmp_path)
    weights = {each.source: each.shape for each in adapter.low_rank}
    with pytest.raises(CheckpointError, match=rf"layers\.0\.{module}: adapters of experts and routers are not served"):
        fit_to_base(adapter, weights)


def test_transposed_weights_are_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gpt2", n_embd=32, n_layer=1, n_head=2, vocab_size=50)
    adapted = train(AutoModelForCausalLM.from_config(config), target_modules=["c_attn"], fan_in_fan_out=True)
    adapted.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="fan_in_fan_out = True is not supported"):
        read_adapter(tmp_path)


def test_ranks_have_a_limit(tmp_path: Path) -> None:
    saved(tmp_path, r=16, rank_pattern={"q_proj": 17})
    assert read_adapter(tmp_path, max_rank=17).rank == 17
    with pytest.raises(CheckpointError, match="q_proj has rank 17, more than max_lora_rank=16"):
        read_adapter(tmp_path, max_rank=16)


def test_other_kinds_of_adapters_are_refused(tmp_path: Path) -> None:
    config = AdaLoraConfig(target_modules=["q_proj"], total_step=10)
    get_peft_model(base_model(), config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="peft_type = 'ADALORA'"):
        read_adapter(tmp_path)
