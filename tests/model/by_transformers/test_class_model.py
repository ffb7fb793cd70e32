"""What a server does with a model that transformers' class computes, for mixed experts and for a model with sinks."""

from itertools import accumulate
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from tests.model.by_transformers.helpers.every_class import load_class
from tests.model.by_transformers.helpers.next_token import PROMPT, assert_next_token
from tests.model.by_transformers.helpers.tiny_classes import VOCAB_SIZE, save_tiny_model, tiny_config
from tests.model.helpers.prefix_samples import Samples
from tests.model.helpers.rounding import rounded
from tests.model.helpers.steps import CPU, StepDriver, make_runner, one_thread
from tokasaurus.checkpoint import read_model_info
from tokasaurus.config import ServerConfig
from tokasaurus.messages.commands import UpdateWeights
from tokasaurus.model.by_transformers.model import TransformersModel
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.cpu.gemm_choice import ALWAYS_KERNELS
from tokasaurus.model.decoder.parameters import num_parameters
from tokasaurus.model.decoder.quantize import Packing
from tokasaurus.model.decoder.weights import FilledModules, fill_randomly, load_weights
from tokasaurus.model.execution.executors import OwnLayers
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker.memory_plan import FORWARD, GRAPHS, plan_worker, sizes_of
from tokasaurus.model.worker.weight_update import WeightUpdates

FAMILIES = pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "opt"])


@FAMILIES
@pytest.mark.parametrize("packed", [True, False])
def test_new_weights_replace_the_old_ones(packed: bool, family: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "old", tiny_config(family), seed=1)
    oracle = save_tiny_model(tmp_path / "new", tiny_config(family), seed=2)
    model, info = load_class(tmp_path / "old", packed)
    updates = WeightUpdates(model, info, tmp_path / "old", Mesh(), CPU)
    assert updates.apply(UpdateWeights(0, str(tmp_path / "new"), "1")) == ""
    assert_next_token(model, info, oracle)


def test_a_forward_of_more_tokens_than_are_compiled(tmp_path: Path) -> None:
    oracle = save_tiny_model(tmp_path, tiny_config("mixtral"))
    with patch("tokasaurus.model.by_transformers.model.MAX_COMPILED_TOKENS", len(PROMPT) - 1):
        assert_next_token(*load_class(tmp_path), oracle)


@FAMILIES
def test_weights_quantised_at_load_are_the_rounded_ones(family: str, tmp_path: Path) -> None:
    oracle = save_tiny_model(tmp_path, tiny_config(family))
    info = read_model_info(tmp_path, impl="transformers")
    model = TransformersModel(info, Mesh(), torch.float32, tmp_path)
    model.materialize(CPU, info.context_length)
    load_weights([tmp_path / "model.safetensors"], model.weight_shards(), model.ignores)
    model.pack(load_kernels(), ALWAYS_KERNELS, packing=Packing("int8"))
    with torch.no_grad():
        for module in oracle.modules():
            if isinstance(module, nn.Linear) and module is not oracle.get_output_embeddings():
                module.weight.copy_(rounded(module.weight, "int8"))
    assert_next_token(model, info, oracle)


@FAMILIES
def test_samples_in_prefix_groups_are_those_of_samples_alone(family: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, tiny_config(family))
    model, info = load_class(tmp_path)
    runs = []
    for grouped in (False, True):
        samples = Samples(StepDriver(make_runner(model, info, None)), 16, seed=3)
        with one_thread():
            samples.run(15, grouped)
        assert (samples.num_grouped > 30) is grouped
        runs.append(samples.sampled)
    for alone, together in zip(*(run.values() for run in runs), strict=True):
        assert [token for token, _ in together] == [token for token, _ in alone]


@pytest.mark.parametrize(("family", "is_usual"), [("mixtral", True), ("deepseek_v3", True), ("gpt_oss", False)])
def test_the_kernels_multiply_usual_experts(family: str, is_usual: bool, tmp_path: Path) -> None:
    """They have all of their numbers; those of a layer with biases and interleaved gates stay in its class."""
    oracle = save_tiny_model(tmp_path, tiny_config(family))
    model, info = load_class(tmp_path)
    assert_next_token(model, info, oracle)
    stored = [(name, each) for name, each in model.named_parameters() if ".experts." in name and "bias" not in name]
    assert stored
    assert all((parameter.numel() == 0) is is_usual for _, parameter in stored)


@FAMILIES
def test_the_plan_counts_the_parameters_of_the_class(family: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    config.save_pretrained(tmp_path)
    info = read_model_info(tmp_path, impl="transformers")
    oracle = save_tiny_model(tmp_path, config)
    assert num_parameters(info, Mesh()) == sum(parameter.numel() for parameter in oracle.parameters())


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2)])
def test_the_plan_counts_the_parameters_of_a_rank(sizes: tuple[int, int], family: str, tmp_path: Path) -> None:
    """But for norms behind all layers, which only the last stage has."""
    tiny_config(family).save_pretrained(tmp_path)
    info = read_model_info(tmp_path, impl="transformers")
    for index in range(sizes[0] * sizes[1]):
        mesh = Mesh.of_worker(index, *sizes)
        model = TransformersModel(info, mesh, torch.float32, tmp_path)
        num_found = sum(parameter.numel() for parameter in model.parameters())
        assert num_parameters(info, mesh) == pytest.approx(num_found, abs=100), mesh


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "opt", "deepseek_v3"])
def test_the_plan_counts_what_layers_have_in_memory_at_once(family: str, tmp_path: Path) -> None:
    """Beside what torch's profiler counts."""
    save_tiny_model(tmp_path, tiny_config(family))
    model, info = load_class(tmp_path, packed=False)
    token_ids = torch.randint(VOCAB_SIZE, (250,), generator=torch.Generator().manual_seed(0))
    arguments = token_ids, None, torch.arange(250), OwnLayers(), lambda query, *_: torch.empty_like(query)
    with torch.inference_mode():
        model(*arguments)  # torch's first products allocate more
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            model(*arguments)
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = [each for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
    in_use = accumulate(each.nbytes() for each in sorted(events, key=lambda each: each.start_ns()))
    assert info.of_class is not None
    widest_row = info.of_class.widest_row
    assert 0.9 < max(in_use) / (len(token_ids) * widest_row * 4) <= 1
    plan = plan_worker(info, Mesh(), sizes_of(ServerConfig(), info, 1 << 30, "float32", "float32"))
    reasons = {part.name: part.reason for part in plan.parts}
    for name in (FORWARD, GRAPHS):
        assert f" tokens x {widest_row:,} x 4 B" in reasons[name]


@FAMILIES
def test_a_model_without_files_has_random_weights(family: str, tmp_path: Path) -> None:
    tiny_config(family).save_pretrained(tmp_path)
    info = read_model_info(tmp_path, impl="transformers")
    model = TransformersModel(info, Mesh(), torch.float32, tmp_path)
    model.materialize(CPU, info.context_length)
    model.begin_packing(load_kernels())
    filled = FilledModules(model, model.pack_module)
    fill_randomly(iter(model.weight_shards()), filled.note)
    model.end_packing()
    driver = StepDriver(make_runner(model, info, None))
    driver.open(1, PROMPT.tolist())
    assert driver.run([], [(1, len(PROMPT))])[1][0] >= 0


def test_a_token_whose_state_is_not_finite_poisons_no_other(tmp_path: Path) -> None:
    """Its keys and values are zeros in the cache, its own state and what follows it are NaN."""
    save_tiny_model(tmp_path, tiny_config("mixtral"))
    model, info = load_class(tmp_path)
    driver = StepDriver(make_runner(model, info, None))
    prompt = [token for token in PROMPT.tolist() if token != VOCAB_SIZE - 1]
    driver.open(1, prompt)
    before = driver.run([], [(1, len(prompt))])[1]
    with torch.no_grad():
        model.whole.get_input_embeddings().weight[VOCAB_SIZE - 1] = torch.nan
    driver.open(2, [VOCAB_SIZE - 1, *prompt])
    driver.open(3, prompt)
    found = driver.run([], [(2, len(prompt) + 1), (3, len(prompt))])
    assert found[3] == before


def test_new_weights_of_another_configuration_are_refused(tmp_path: Path) -> None:
    """Also where only the class knows the key."""
    for name, epsilon in (("old", 1e-5), ("same", 1e-5), ("other", 1e-3)):
        config = tiny_config("mixtral")
        config.rms_norm_eps = epsilon
        config.save_pretrained(tmp_path / name)
    old, same, other = (read_model_info(tmp_path / name, impl="transformers") for name in ("old", "same", "other"))
    assert same == old
    assert other.of_class != old.of_class


@FAMILIES
@pytest.mark.parametrize("is_equal", [True, False])
def test_a_stored_head_beside_tied_embeddings_counts_where_it_differs(
    is_equal: bool, family: str, tmp_path: Path
) -> None:
    """As in transformers."""
    config = tiny_config(family)
    config.tie_word_embeddings = True
    oracle = save_tiny_model(tmp_path, config)
    stored = load_file(tmp_path / "model.safetensors")
    stored["lm_head.weight"] = oracle.get_input_embeddings().weight.data.clone() + (0 if is_equal else 0.3)
    stored["lm_head.weight"][5] *= 1 if is_equal else -1
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    model, info = load_class(tmp_path)
    assert_next_token(model, info, expected)


@FAMILIES
def test_memory_of_all_matrices_is_given_back(family: str, tmp_path: Path) -> None:
    oracle = save_tiny_model(tmp_path, tiny_config(family))
    model, info = load_class(tmp_path)
    model.give_back()
    assert sum(each.untyped_storage().nbytes() for each in model.parameters() if each.dim() > 1) == 0
    for experts in model._experts.values():
        assert experts.packed is not None
        down = experts.packed.down  # pages that were given back are zero; those at the ends are others', too
        products = torch.cat([each.multiply(torch.ones(1, each.in_size)) for each in down.packed])
        assert (products == 0).double().mean() > 0.3
    model.take_again()
    updates = WeightUpdates(model, info, tmp_path, Mesh(), CPU)
    assert updates.apply_again() == ""
    assert_next_token(model, info, oracle)


@FAMILIES
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_the_rounded_weights(
    dtype: torch.dtype, packed: bool, family: str, tmp_path: Path
) -> None:
    """In float32, which the kernels widen bfloat16 to where the processor does not multiply it."""
    oracle = save_tiny_model(tmp_path, tiny_config(family))
    oracle.to(dtype).float()
    model, info = load_class(tmp_path, packed, dtype=dtype)
    is_wide = model.activation_dtype == torch.float32
    assert_next_token(model, info, oracle, 1e-3 if is_wide else 100 * torch.finfo(dtype).eps)
