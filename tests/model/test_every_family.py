"""What a server does with any model, for every family of the table, beside transformers or the same without it.

By default each family has one of these tests, by turns; the others are long.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.helpers.tiny_model import OPTIONS, VOCAB_SIZE, option_config, save_random_model
from tests.model.helpers.greedy_decoding import load, oracle_greedy, run_whole_prompt
from tests.model.helpers.prefix_samples import Samples
from tests.model.helpers.rounding import rounded
from tests.model.helpers.steps import StepDriver, make_runner, one_thread
from tokasaurus.checkpoint import ModelInfo
from tokasaurus.messages.commands import UpdateWeights
from tokasaurus.model.attention.backend import KVShape
from tokasaurus.model.attention.choose import make_backend
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.cpu.gemm_choice import ALWAYS_KERNELS
from tokasaurus.model.decoder.decoder import Decoder
from tokasaurus.model.decoder.quantize import Packing
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker.sleep import Sleeper
from tokasaurus.model.worker.weight_update import WeightUpdates

CPU = torch.device("cpu")
SHAPE = KVShape(3, 4, 2, 16, 16, torch.float32, CPU)
PROMPT = torch.randint(VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(0))
_NUM_TESTS = 5
"""In this file."""


def in_turns(number: int) -> pytest.MarkDecorator:
    """Parametrizes a test, the `number`th: it is long for all but one of _NUM_TESTS families."""
    params = [
        pytest.param(family, marks=() if turn % _NUM_TESTS == number else (pytest.mark.long,))
        for turn, family in enumerate(OPTIONS)
    ]
    return pytest.mark.parametrize("family", params)


def save(directory: Path, family: str, seed: int = 0) -> PreTrainedModel:
    """With the options of its first configuration, and sizes that int4 allows."""
    sizes = {name: 64 for name in ("moe_intermediate_size",) if name in OPTIONS[family][0]}
    return save_random_model(directory, option_config(family, 0, intermediate_size=128, **sizes), seed=seed)


def assert_equals(model: Decoder, info: ModelInfo, oracle: PreTrainedModel) -> None:
    with torch.inference_mode():
        expected = oracle(PROMPT.unsqueeze(0)).logits[0]
    torch.testing.assert_close(logits_of(model, info), expected, atol=2e-4, rtol=1e-4)


def logits_of(model: Decoder, info: ModelInfo) -> Tensor:
    return run_whole_prompt(model, info, Mesh(), None, PROMPT)


@in_turns(0)
def test_samples_in_prefix_groups_are_those_of_samples_alone(family: str, tmp_path: Path) -> None:
    save(tmp_path, family)
    model, info = load(tmp_path, packed=True)
    if any(attention.chunk for attention in info.spec.attentions):
        pytest.skip("no step of a model with chunks of attention has prefix groups")
    runs = []
    for grouped in (False, True):
        samples = Samples(StepDriver(make_runner(model, info, None)), 16, seed=3)
        with one_thread():
            samples.run(15, grouped)
        runs.append(samples.sampled)
        assert (samples.num_grouped > 30) is grouped
    for alone, together in zip(*(run.values() for run in runs), strict=True):
        assert [token for token, _ in together] == [token for token, _ in alone]
        assert [logprob for _, logprob in together] == pytest.approx([logprob for _, logprob in alone], abs=2e-4)


@in_turns(1)
def test_cached_prefixes_and_preempted_sequences_go_on_as_transformers(family: str, tmp_path: Path) -> None:
    oracle = save(tmp_path, family)
    model, info = load(tmp_path, packed=True)
    driver = StepDriver(make_runner(model, info, None, num_snapshots=1))
    first = PROMPT.tolist()
    second = first[:35] + first[:10]
    tokens: dict[int, list[int]] = {1: [], 2: [], 3: []}

    def run(decode: list[int], prefill: list[tuple[int, int]], saves: list[tuple[int, int, int]] | None = None) -> None:
        for slot, (token, _) in driver.run(decode, prefill, saves=saves).items():
            tokens[slot].append(token)

    driver.open(1, first)
    run([], [(1, 25)])
    run([], [(1, 15)], saves=[(0, 7, 1)])
    driver.open(2, second, shares=(1, 2), snapshot=1)
    run([1], [(2, len(second) - 32)])
    for _ in range(4):
        run([1, 2], [])
    driver.close(1)
    again = first + tokens[1]
    driver.open(3, again)
    run([2], [(3, len(again))])
    for _ in range(4):
        run([2, 3], [])
    assert tokens[1] + tokens[3] == oracle_greedy(oracle, first, len(tokens[1]) + len(tokens[3]))[0]
    assert tokens[2] == oracle_greedy(oracle, second, len(tokens[2]))[0]


@in_turns(2)
@pytest.mark.parametrize("packed", [True, False])
def test_new_weights_replace_the_old_ones(packed: bool, family: str, tmp_path: Path) -> None:
    save(tmp_path / "old", family, seed=1)
    oracle = save(tmp_path / "new", family, seed=2)
    model, info = load(tmp_path / "old", packed=packed)
    logits_of(model, info)  # caches of the first forwards
    updates = WeightUpdates(model, info, tmp_path / "old", Mesh(), CPU)
    assert updates.apply(UpdateWeights(0, str(tmp_path / "new"), "1")) == ""
    assert_equals(model, info, oracle)


@in_turns(3)
def test_a_model_that_woke_up_computes_as_before(family: str, tmp_path: Path) -> None:
    oracle = save(tmp_path, family)
    model, info = load(tmp_path, packed=True)
    backend = make_backend("cpu", SHAPE, load_kernels())
    backend.allocate(8)
    sleeper = Sleeper(model, backend, WeightUpdates(model, info, tmp_path, Mesh(), CPU), CPU)
    assert sleeper.sleep(with_weights=True) == ""
    assert sleeper.wake() == ""
    assert_equals(model, info, oracle)


@in_turns(4)
@pytest.mark.parametrize("made", ["int8", "int4"])
def test_weights_quantised_at_load_are_the_rounded_ones(made: str, family: str, tmp_path: Path) -> None:
    oracle = save(tmp_path, family)
    model, info = load(tmp_path)
    model.pack(load_kernels(), ALWAYS_KERNELS, packing=Packing(made))
    with torch.no_grad():
        for name, module in oracle.named_modules():
            if isinstance(module, nn.Linear) and not name.endswith(
                ("lm_head", "gate", "gate.wg", "router")
            ):  # routers stay
                module.weight.copy_(rounded(module.weight, made))
            for own in ("gate_up_proj", "down_proj") if name.endswith(".experts") else ():
                of_experts = getattr(module, own)
                outputs = of_experts.mT if family in ("gpt_oss", "llama4_text") else of_experts
                outputs.copy_(rounded(outputs.flatten(0, 1), made).view(outputs.shape))
    assert_equals(model, info, oracle)
