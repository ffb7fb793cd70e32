"""Routers against sorting in plain Python, in float64, and the products of experts that torch computes."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoint.helpers.gguf_families import write_family_gguf
from tests.helpers.tiny_model import OPTIONS, VOCAB_SIZE, option_config, save_random_model
from tests.model.helpers.greedy_decoding import load, run_whole_prompt
from tests.model.helpers.steps import CPU
from tokasaurus.checkpoint import CheckpointError, read_model_info, resolve_checkpoint
from tokasaurus.checkpoint.families import FAMILIES
from tokasaurus.checkpoint.families.experts import FAMILIES as WITH_EXPERTS
from tokasaurus.checkpoint.spec import ExpertsSpec, RouterSpec
from tokasaurus.messages.commands import UpdateWeights
from tokasaurus.model.by_transformers.model import TransformersModel
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.cpu.experts import PackedExperts
from tokasaurus.model.cpu.layer_executor import LayerKernels
from tokasaurus.model.decoder.decoder import Decoder
from tokasaurus.model.decoder.experts import Experts, Router, choose_experts, grouped_product, product_by_masks
from tokasaurus.model.decoder.weights import fill_randomly
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker import weight_update

ROUTERS = {
    "softmax": RouterSpec(9, 4),
    "normalised": RouterSpec(9, 4, normalizes=True, scale=2.5),
    "of chosen": RouterSpec(9, 3, "softmax_of_chosen"),
    "sigmoid": RouterSpec(8, 3, "sigmoid", has_choice_bias=True, normalizes=True, min_sum=1e-20),
    "groups": RouterSpec(12, 4, "sigmoid", has_choice_bias=True, num_groups=4, num_chosen_groups=2, scale=1.5),
    "sigmoid of chosen": RouterSpec(9, 2, "sigmoid_of_chosen"),
    "biased softmax": RouterSpec(8, 3, has_choice_bias=True, normalizes=True, min_sum=0.9),
}


def best(scores: list[float], count: int) -> list[int]:
    """Indices of the largest; of equal ones, the first."""
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:count]


def route_in_python(outputs: list[float], spec: RouterSpec, bias: list[float]) -> dict[int, float]:
    """The chosen experts and their weights, each step by itself."""
    numbers = torch.tensor(outputs, dtype=torch.float64)
    if spec.scores.endswith("of_chosen"):
        scores = outputs
    else:
        scores = (numbers.sigmoid() if spec.scores == "sigmoid" else numbers.softmax(0)).tolist()
    for_choice = [score + own for score, own in zip(scores, bias, strict=True)]
    if spec.num_groups > 1:
        size = spec.num_experts // spec.num_groups
        of_groups = [for_choice[first : first + size] for first in range(0, spec.num_experts, size)]
        chosen_groups = best([sum(sorted(group)[-2:]) for group in of_groups], spec.num_chosen_groups)
        for_choice = [each if i // size in chosen_groups else -1e9 for i, each in enumerate(for_choice)]
    chosen = best(for_choice, spec.num_chosen)
    weights = [scores[index] for index in chosen]
    if spec.scores == "softmax_of_chosen":
        weights = torch.tensor(weights, dtype=torch.float64).softmax(0).tolist()
    elif spec.scores == "sigmoid_of_chosen":
        weights = torch.tensor(weights, dtype=torch.float64).sigmoid().tolist()
    if spec.normalizes:
        weights = [each / max(sum(weights), spec.min_sum) for each in weights]
    return {index: weight * spec.scale for index, weight in zip(chosen, weights, strict=True)}


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
def test_routers_choose_as_plain_python_does(name: str, has_ties: bool) -> None:
    """With ties, outputs are one of three numbers: of experts with equal scores, the first are chosen."""
    spec = ROUTERS[name]
    torch.manual_seed(0)
    logits, bias = torch.randn(200, spec.num_experts) * 2, torch.randn(spec.num_experts) * 0.3
    if has_ties:
        logits, bias = torch.randint(-1, 2, logits.shape).float(), torch.randint(0, 2, bias.shape) * 0.0625
        bias *= spec.num_groups == 1  # sums of rounded scores are not equal in float64 where they are here
    bias = bias if spec.has_choice_bias else torch.zeros_like(bias)
    chosen, weights = choose_experts(logits, spec, bias if spec.has_choice_bias else None)
    found = set[tuple[int, ...]]()
    for row, own, of_own in zip(logits.tolist(), chosen.tolist(), weights.tolist(), strict=True):
        expected = route_in_python(row, spec, bias.tolist())
        assert dict(zip(own, of_own, strict=True)) == pytest.approx(expected, rel=1e-5)
        found.add(tuple(sorted(own)))
    assert len(found) > 7


def test_numbers_that_are_not_finite_choose_some_experts() -> None:
    logits = torch.tensor([[torch.nan] * 12, [torch.inf] * 12, [-torch.inf] * 12])
    for spec in (RouterSpec(12, 4), ROUTERS["groups"]):
        chosen, _ = choose_experts(logits, spec, torch.zeros(12) if spec.has_choice_bias else None)
        assert ((chosen >= 0) & (chosen < 12)).all()
        assert all(len(set(row)) == 4 for row in chosen.tolist())


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "softmax_of_chosen"])
def test_a_tokens_experts_do_not_depend_on_the_batch(scores: str) -> None:
    """Bit for bit, by the kernels."""
    torch.manual_seed(0)
    router = Router(RouterSpec(16, 4, scores), 96, has_shared_gate=True)  # type: ignore[arg-type]
    router.weight.data.normal_()
    router.pack(LayerKernels(load_kernels()))
    x = torch.randn(50, 96).bfloat16()
    with torch.inference_mode():
        together = router.route(x)
        for row in range(50):
            for alone, both in zip(router.route(x[row : row + 1]), together, strict=True):
                assert torch.equal(alone[0], both[row])


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 0, 1], [0, 7, 0, 0]])
def test_grouped_products_are_those_of_each_group(counts: list[int]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(sum(counts), 32), torch.randn(4, 16, 32)
    ends = torch.tensor(counts).cumsum(0).int()
    expected = torch.cat([own.double() @ w.double().T for own, w in zip(x.split(counts), weight, strict=True)])
    for product in (grouped_product, product_by_masks):
        torch.testing.assert_close(product(x, weight, ends).double(), expected, atol=1e-4, rtol=1e-4)


def choices_of(model: Decoder) -> list[Tensor]:
    """Filled by each forward: the experts of all tokens, of each layer that has them."""
    found = list[Tensor]()
    for layer in model.decoder_layers():
        if isinstance(layer.spec.mlp, ExpertsSpec):
            router = layer.mlp.router

            def route(x: Tensor, own: Router = router) -> tuple[Tensor, Tensor, Tensor]:
                result = Router.route(own, x)
                found.append(result[0])
                return result

            router.route = route
    return found


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_random_routers_choose_by_token_and_layer(family: str, tmp_path: Path) -> None:
    """So that the comparisons with transformers see routing: experts of most tokens differ between layers."""
    config = option_config(family, 0, num_hidden_layers=4)
    save_random_model(tmp_path, config)
    model, info = load(tmp_path, packed=False)
    found = choices_of(model)
    run_whole_prompt(model, info, Mesh(), None, torch.arange(100) * 7 % VOCAB_SIZE)
    sets = [[tuple(sorted(row)) for row in layer.tolist()] for layer in found]
    assert len(sets) >= 2
    pairs = [
        one != other for first, second in itertools.pairwise(sets) for one, other in zip(first, second, strict=True)
    ]
    share = sum(pairs) / len(pairs)
    print(f"{family}: {share:.0%} of tokens have other experts in the next layer")
    assert share > 0.5
    assert all(len(set(layer)) > 3 for layer in sets)


def test_the_tiny_models_have_all_families_with_experts() -> None:
    assert set(WITH_EXPERTS) <= set(OPTIONS)
    assert set(WITH_EXPERTS) <= set(FAMILIES)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "glm4_moe", "hunyuan_v1_moe"])
def test_files_that_have_experts_together_are_read(family: str, tmp_path: Path) -> None:
    """As transformers 5 may save them: three dimensions, gates before ups."""
    oracle = save_random_model(tmp_path, option_config(family, 1))
    oracle.save_pretrained(tmp_path, save_original_format=False)
    token_ids = torch.arange(40) * 5
    with torch.inference_mode():
        expected = oracle(token_ids.unsqueeze(0)).logits[0]
    for packed in (True, False):
        model, info = load(tmp_path, packed=packed)
        assert info.stacks_experts
        logits = run_whole_prompt(model, info, Mesh(), None, token_ids)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def save_changed(directory: Path, changes: Callable[[dict[str, Tensor]], object], **fields: int) -> None:
    """A model of Qwen 3 with 8 experts, with other tensors or fields of config.json."""
    save_random_model(directory, option_config("qwen3_moe", 0))
    tensors = load_file(directory / "model.safetensors")
    changes(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **fields}))


_ROUTER, _LAST = "model.layers.1.mlp.gate.weight", "model.layers.1.mlp.experts.7.down_proj.weight"


@pytest.mark.parametrize(
    ("changes", "fields", "words"),
    [
        (dict.keys, {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than num_local_experts 8"),
        (lambda tensors: tensors.pop(_LAST), {}, f"the checkpoint lacks tensor {_LAST}: config.json has 8 experts"),
        (lambda tensors: tensors.pop(_LAST.replace("7", "3")), {}, "the checkpoint lacks tensor "),
        (
            lambda tensors: tensors.update({_ROUTER.replace("1", "0"): torch.zeros(7, 64)}),
            *({}, r"gate.weight has shape \(7, 64\), but config.json makes it \(8, 64\)"),
        ),
        (lambda tensors: tensors.pop(_ROUTER), {}, f"the checkpoint lacks tensor {_ROUTER}"),
        (dict.keys, {"num_local_experts": 6}, r"gate.weight has shape \(8, 64\), but config.json makes it \(6, 64\)"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    changes: Callable[[dict[str, Tensor]], object], fields: dict[str, int], words: str, tmp_path: Path
) -> None:
    save_changed(tmp_path, changes, **fields)
    with pytest.raises(CheckpointError, match=words) as raised:
        load(tmp_path)
    assert raised.value.exit_code == 2


def test_layers_that_draft_are_passed_over(tmp_path: Path) -> None:
    """Published files of GLM 4.5 have one; other families' further layers are refused."""
    config = option_config("glm4_moe", 0)
    oracle = save_random_model(tmp_path, config)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {f"model.layers.3.{name}": torch.ones(3) for name in ("eh_proj.weight", "mlp.gate.weight")}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model, info = load(tmp_path)
    with torch.inference_mode():
        expected = oracle(torch.arange(20).unsqueeze(0)).logits[0]
    torch.testing.assert_close(
        run_whole_prompt(model, info, Mesh(), None, torch.arange(20)), expected, atol=1e-4, rtol=1e-4
    )
    assert not model.ignores("model.layers.2.eh_proj.weight")
    assert not model.ignores("model.layers.x.y"), "a name of another kind is left to who compares names"
    save_changed(tmp_path, lambda tensors: tensors.update({"model.layers.3.mlp.gate.weight": torch.ones(3)}))
    with pytest.raises(
        CheckpointError, match=r"has tensor model\.layers\.3\.mlp\.gate\.weight, which this model has no"
    ):
        load(tmp_path)


def test_memory_of_experts_is_reserved_for_as_many_as_tokens_choose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the class or a rank's part gives the choices; dense layers have none."""
    reserved = list[tuple[int, int]]()
    own = PackedExperts.reserve

    def reserve(experts: PackedExperts, *counts: int) -> None:
        reserved.append(counts)  # type: ignore[arg-type]
        own(experts, *counts)
        assert experts.struct.num_chosen == counts[1]

    monkeypatch.setattr(PackedExperts, "reserve", reserve)
    config = option_config("glm4_moe", 0, first_k_dense_replace=1)
    save_random_model(tmp_path, config)
    info = read_model_info(tmp_path)
    part = Decoder(info, Mesh(tp_rank=1, tp_size=2), torch.float32)
    of_class = TransformersModel(read_model_info(tmp_path, impl="transformers"), Mesh(), torch.float32, tmp_path)
    for model in (part, of_class):
        model.materialize(CPU, 512)
        fill_randomly(model.weight_shards())
        model.pack(load_kernels())
        reserved.clear()
        model.reserve_experts(3000)
        assert reserved == [(3000, config.num_experts_per_tok)] * (config.num_hidden_layers - 1)


def test_layers_of_llama_4_see_chunks_or_all_as_config_json_says(tmp_path: Path) -> None:
    save_random_model(tmp_path, option_config("llama4_text", 0))
    path = tmp_path / "config.json"
    whole = json.loads(path.read_text())
    for changed, chunks in (
        ({}, [13, 13, 13, None]),
        ({"layer_types": None}, [13, 13, 13, None]),
        ({"layer_types": ["full_attention"] * 4}, [None] * 4),
        ({"layer_types": None, "attention_chunk_size": None}, [None] * 4),
    ):
        path.write_text(json.dumps(whole | changed))
        info = read_model_info(tmp_path)
        assert [layer.attention.chunk for layer in info.spec.layers] == chunks
        assert info.context_length == 512
    path.write_text(json.dumps(whole | {"layer_types": ["sliding_attention"] * 4}))
    with pytest.raises(CheckpointError, match="layer_types"):
        read_model_info(tmp_path)


@pytest.mark.parametrize(
    ("width", "block_type", "is_whole"),
    [(96, "F32", False), (96, "Q8_0", True), (128, "Q8_0", False), (65, None, True)],
)
def test_ranks_have_whole_experts_where_widths_cannot_be_divided(
    width: int, block_type: str | None, is_whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that quantised weights stay as they are. block_type: of a GGUF file; None: there is none."""
    saved = save_random_model(tmp_path / "saved", option_config("qwen3_moe", 0, moe_intermediate_size=width))
    directory = tmp_path / "saved"
    if block_type is not None:
        write_family_gguf(tmp_path / "model.gguf", saved, of_experts=GGMLQuantizationType[block_type])
        monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))
        directory = resolve_checkpoint(str(tmp_path / "model.gguf")).directory
    for rank in range(2):
        model, info = load(directory, Mesh(tp_rank=rank, tp_size=2), packed=True)
        experts = next(layer.mlp for layer in model.decoder_layers() if isinstance(layer.mlp, Experts))
        assert experts.gate_up.num_experts == (4 if is_whole else 8)
        assert model.block_types == (["Q8_0"] if block_type == "Q8_0" else [])
        assert not model.dequantised
        assert Mesh(tp_rank=rank, tp_size=2).for_model(info).whole_experts == is_whole


def test_whole_experts_are_replaced_by_new_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank writes its own, in both layouts, as a start with the new files has them."""
    monkeypatch.setattr(weight_update, "least_of_ranks", lambda value, *_: value)  # which run one after another here
    for number, name in enumerate(("old", "new")):
        save_random_model(tmp_path / name, option_config("gpt_oss", 0), seed=number)
    for rank, packed in itertools.product(range(2), (True, False)):
        mesh = Mesh(tp_rank=rank, tp_size=2, whole_experts=True)
        model, info = load(tmp_path / "old", mesh, packed=packed)
        updates = weight_update.WeightUpdates(model, info, tmp_path / "old", mesh, CPU)
        assert updates.apply(UpdateWeights(1, str(tmp_path / "new"), "1")) == ""
        expected, _ = load(tmp_path / "new", mesh, packed=packed)
        x, chosen = torch.randn(9, 64), torch.rand(9, info.spec.num_experts).topk(3).indices
        weights = torch.rand(9, 3)
        for own, other in zip(model.decoder_layers(), expected.decoder_layers(), strict=True):
            assert isinstance(own.mlp, Experts)
            assert isinstance(other.mlp, Experts)
            found = own.mlp._of_chosen(x, chosen, weights)
            assert found.abs().max() > 0
            assert torch.equal(found, other.mlp._of_chosen(x, chosen, weights))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("block_type", ["Q8_0", "Q4_1"])
def test_blocks_of_experts_are_multiplied_as_they_are(
    block_type: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the same blocks as plain numbers."""
    saved = save_random_model(tmp_path / "saved", option_config(family, 0))
    write_family_gguf(tmp_path / "model.gguf", saved, of_experts=GGMLQuantizationType[block_type])
    with monkeypatch.context() as changed:
        changed.setenv("TOKA_CACHE", str(tmp_path / "cache"))
        directory = resolve_checkpoint(str(tmp_path / "model.gguf")).directory
        model, info = load(directory)
    expected = run_whole_prompt(model, info, Mesh(), None, torch.arange(40) * 5)
    packed, _ = load(directory, packed=True)
    assert packed.block_types == [block_type]
    assert packed.saved_bytes > 0
    logits = run_whole_prompt(packed, info, Mesh(), None, torch.arange(40) * 5)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
