"""Rows with adapters, in batches with any others, against the models that PEFT merges them into."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.checkpoint.helpers.gguf_files import VOCAB
from tests.helpers.peft_adapters import LINEAR, merged_model, save_adapter
from tests.helpers.tiny_model import VOCAB_SIZE, option_config, save_random_model
from tests.model.helpers.adapter_texts import assert_each_row_has_its_text, make_oracles
from tests.model.helpers.greedy_decoding import load, oracle_greedy
from tests.model.helpers.quantised_models import quantised
from tests.model.helpers.steps import StepDriver, make_runner
from tokasaurus.checkpoint.adapters import read_adapter
from tokasaurus.model.decoder import layers
from tokasaurus.model.decoder.adapters import ModelAdapters
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.execution.runner import ModelRunner
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker.warmup import ForwardLimits, warm_up_small


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_each_row_has_the_text_of_its_adapter(tmp_path: Path, family: str, backend: str) -> None:
    oracles = make_oracles(tmp_path, family)
    assert_each_row_has_its_text(tmp_path, [tmp_path / f"adapter{n}" for n in range(1, 7)], oracles, backend)


@pytest.mark.long
def test_compiled_layers_leave_steps_with_adapters_to_the_modules(tmp_path: Path) -> None:
    oracles, compiler = make_oracles(tmp_path, "llama"), Compiler()
    limits = ForwardLimits(max_tokens=256, max_seqs=20, context_length=512, vocab_size=VOCAB_SIZE)

    def warm_up(runner: ModelRunner) -> None:
        warm_up_small(runner, limits, 16)
        compiler.end_warm_up()

    sources = [tmp_path / f"adapter{number}" for number in range(1, len(oracles))]
    assert_each_row_has_its_text(tmp_path, sources, oracles, "torch", prepare=warm_up, compiler=compiler)
    assert compiler.num_recompiles == 0


@pytest.mark.parametrize("family", ["phi3", "glm4", "gemma2"])
def test_adapters_of_fused_and_permuted_projections(tmp_path: Path, family: str) -> None:
    oracles: list[PreTrainedModel] = [save_random_model(tmp_path, option_config(family, 0)).eval()]
    sources = [
        save_adapter(tmp_path, tmp_path / str(seed), seed, target_modules="all-linear", r=rank)
        for seed, rank in ((1, 16), (2, 3))
    ]
    oracles += [merged_model(tmp_path, source) for source in sources]
    assert_each_row_has_its_text(tmp_path, sources, oracles, "cpu")


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_prefix_groups_of_rows_with_adapters(tmp_path: Path, backend: str) -> None:
    """Samples of one prompt by one adapter share its blocks, beside samples of the model that share others."""
    oracles = make_oracles(tmp_path, "llama")[:2]
    model, info = load(tmp_path, packed=backend == "cpu")
    adapters = ModelAdapters(model, 1)
    adapter = read_adapter(tmp_path / "adapter1")
    adapters.load(adapter.digest, adapters.share(adapter))
    driver = StepDriver(make_runner(model, info, backend, adapters=adapters))
    driver.place_adapter(1, adapter.digest)
    prompt = [(7 * i) % VOCAB_SIZE for i in range(33)]
    texts: dict[int, list[int]] = {slot: [] for slot in (1, 2, 3, 4)}

    def run(decode: list[int], prefill: list[tuple[int, int]], groups: list[tuple[int, int]] | None = None) -> None:
        for slot, (token, _) in driver.run(decode, prefill, groups).items():
            texts[slot].append(token)

    for slot, first in ((1, 1), (2, 1), (3, 3), (4, 3)):
        driver.open(slot, prompt, adapter=int(first == 1), shares=None if slot == first else (first, 2))
        run([], [(slot, driver.remaining(slot))])
    for _ in range(8):
        run([1, 2, 3, 4], [], groups=[(2, 2), (2, 2)])
    expected = [oracle_greedy(oracle, prompt, 9)[0] for oracle in oracles]
    assert texts == {1: expected[1], 2: expected[1], 3: expected[0], 4: expected[0]}
    assert expected[0] != expected[1]


def test_ranks_embed_and_score_with_their_shares_of_the_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row with another adapter that changes embeddings or logits, as PEFT's merged models do."""
    oracles = make_oracles(tmp_path, "llama")
    numbers, token_ids = np.array([0, 3, 1, 2, 3], np.int32), torch.tensor([5, 200, VOCAB_SIZE - 1, 7, 9])
    of_rows = [oracles[number + 3 if number else 0] for number in numbers.tolist()]
    partials: dict[int, Tensor] = {}
    barrier = threading.Barrier(2)

    def summed(partial: Tensor, mesh: Mesh) -> Tensor:
        partials[mesh.tp_rank] = partial
        barrier.wait(timeout=60)
        return partials[0] + partials[1]

    monkeypatch.setattr(layers, "sum_over_shards", summed)

    @torch.inference_mode()
    def run(rank: int) -> tuple[Tensor, Tensor]:
        model, _ = load(tmp_path, Mesh.of_worker(rank, pp_size=1, tp_size=2))
        adapters = ModelAdapters(model, 3)
        for number in (1, 2, 3):
            adapter = read_adapter(tmp_path / f"adapter{number + 3}")
            adapters.load(adapter.digest, adapters.share(adapter))
            adapters.place(number, adapter.digest)
        adapters.set_rows(numbers)
        return model.embed(token_ids), model.logits(hidden)

    hidden = torch.randn(len(numbers), oracles[0].config.hidden_size, generator=torch.Generator().manual_seed(0))
    with ThreadPoolExecutor(2) as pool:
        (embedded, first), (again, second) = pool.map(run, range(2))
    logits = torch.cat((first, second), dim=1)
    for row, oracle in enumerate(of_rows):
        with torch.no_grad():
            torch.testing.assert_close(embedded[row], oracle.get_input_embeddings()(token_ids[row]))
            torch.testing.assert_close(
                logits[row], oracle.lm_head(oracle.model.norm(hidden[row])), atol=1e-5, rtol=1e-5
            )
    assert torch.equal(embedded, again)


def test_a_quantised_model_has_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Q4_1, beside PEFT's on the dequantised one, which GGUF's order of channels does not concern."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory, base = quantised(tmp_path, "llama", "Q4_1")
    plain, oracles = tmp_path / "plain", [base.eval()]
    sources = [
        save_adapter(plain, tmp_path / str(seed), seed, target_modules=LINEAR, r=rank)
        for seed, rank in ((1, 16), (2, 3))
    ]
    oracles += [merged_model(plain, source) for source in sources]
    assert_each_row_has_its_text(directory, sources, oracles, "cpu", vocab_size=VOCAB)


def test_decode_steps_in_one_call_have_adapters_too(tmp_path: Path) -> None:
    oracles = make_oracles(tmp_path, "llama")
    model, info = load(tmp_path, packed=True)
    adapters = ModelAdapters(model, 2)
    digests = {}
    for number in (1, 2, 5):
        adapter = read_adapter(tmp_path / f"adapter{number}")
        adapters.load(adapter.digest, adapters.share(adapter))
        digests[number] = adapter.digest
    runner = make_runner(model, info, "cpu", adapters=adapters)
    assert runner.decodes_in_one_call
    driver = StepDriver(runner, want_logprobs=False)
    prompts = {slot: [slot * 7 + i for i in range(5)] for slot in (1, 2, 3)}

    def decode(numbers: dict[int, int]) -> dict[int, list[int]]:
        for slot, number in numbers.items():
            driver.open(slot, prompts[slot], adapter=number)
        texts = {slot: [driver.run([], [(slot, 5)])[slot][0]] for slot in numbers}
        for _ in range(10):
            for slot, (token, _) in driver.run([*numbers], []).items():
                texts[slot].append(token)
        for slot in numbers:
            driver.close(slot)
        return texts

    def expected(oracle: PreTrainedModel, slot: int) -> list[int]:
        return oracle_greedy(oracle, prompts[slot], 11)[0]

    driver.place_adapter(1, digests[1])
    driver.place_adapter(2, digests[2])
    texts = decode({1: 0, 2: 1, 3: 2})
    assert texts == {1: expected(oracles[0], 1), 2: expected(oracles[1], 2), 3: expected(oracles[2], 3)}
    driver.place_adapter(2, digests[5])  # which changes embeddings
    texts = decode({1: 1, 2: 0, 3: 2})
    assert texts == {1: expected(oracles[1], 1), 2: expected(oracles[0], 2), 3: expected(oracles[5], 3)}
    adapters.unload(digests[5])
    adapters.unload(digests[1])
    assert decode({1: 0, 2: 1})[2] == expected(oracles[0], 2)  # nothing is left of it
