"""Prompt logprobs against plain torch and against transformers."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from tests.helpers.tiny_model import VOCAB_SIZE, save_byte_tokenizer, save_tiny_model
from tests.model.helpers.greedy_decoding import load, oracle_greedy
from tests.model.helpers.peak_memory import peak, reset_peak
from tests.model.helpers.rule_contexts import Rule, make_rules
from tests.model.helpers.sampling_rows import make_rows, noise_keys, token_logprobs_of
from tests.model.helpers.steps import PromptLogprob, StepDriver, make_runner
from tokasaurus.messages.channel import make_channel
from tokasaurus.messages.forward import ForwardOutput
from tokasaurus.model.cpu.bindings import Kernels, load_kernels
from tokasaurus.model.execution import device_batch
from tokasaurus.model.sampling import prompt_logprobs
from tokasaurus.model.sampling.sample import sample
from tokasaurus.model.worker.loop import run_steps
from tokasaurus.model.worker.warmup import ForwardLimits, single_token, widest_prefill

BACKENDS = ["cpu", "torch"]


@pytest.fixture(params=["kernels", "torch"])
def kernels(request: pytest.FixtureRequest) -> Kernels | None:
    return None if request.param == "torch" else load_kernels()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "num_top"), [(7, 7), (1003, 0), (5001, 20), (300, 299), (64, 1)])
def test_logprobs_and_ranks_equal_a_plain_sort(
    vocab_size: int, num_top: int, dtype: torch.dtype, kernels: Kernels | None
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(130, vocab_size, generator=generator) * 3).to(dtype)
    targets = torch.randint(vocab_size, (130,), generator=generator)
    targets[::3] = logits[::3].argmax(dim=-1)
    computed = token_logprobs_of(logits, targets, num_top, kernels)
    expected = logits.double().log_softmax(dim=-1)
    target_logprobs = expected.gather(1, targets.unsqueeze(1))
    torch.testing.assert_close(computed.logprobs.double(), target_logprobs.squeeze(1), atol=3e-6, rtol=1e-5)
    # bfloat16 logits are often equal, and equal logits have the same rank
    ordered = expected.sort(dim=-1, descending=True).values
    ranks = [1 + row.index(value) for row, value in zip(ordered.tolist(), target_logprobs, strict=True)]
    assert computed.ranks.tolist() == ranks
    torch.testing.assert_close(computed.top_logprobs.double(), ordered[:, :num_top], atol=3e-6, rtol=1e-5)
    by_ids = expected.gather(1, computed.top_ids.long())
    torch.testing.assert_close(computed.top_logprobs.double(), by_ids, atol=3e-6, rtol=1e-5)
    assert all(len(set(ids)) == num_top for ids in computed.top_ids.tolist())
    is_target = computed.top_ids == targets.unsqueeze(1)
    assert torch.equal(computed.top_logprobs[is_target], computed.logprobs.unsqueeze(1).expand_as(is_target)[is_target])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prompt_token_has_the_same_logprob_as_a_drawn_token(dtype: torch.dtype, kernels: Kernels | None) -> None:
    logits = (torch.randn(50, 3000, generator=torch.Generator().manual_seed(2)) * 5).to(dtype)
    drawn = sample(logits, make_rows([1.0] * 50, [1.0] * 50, noise_keys([1] * 50, [0] * 50, list(range(50)))), kernels)
    assert drawn.logprobs is not None
    computed = token_logprobs_of(logits, drawn.tokens, 0, kernels)
    torch.testing.assert_close(computed.logprobs, drawn.logprobs, atol=0, rtol=2e-7)


def test_a_row_with_nans_does_not_affect_other_rows(kernels: Kernels | None) -> None:
    logits = torch.randn(3, 300)
    logits[1, 100:] = torch.nan
    computed = token_logprobs_of(logits, torch.tensor([5, 6, 7]), 4, kernels)
    alone = token_logprobs_of(logits[2:], torch.tensor([7]), 4, kernels)
    assert bool(torch.isnan(computed.logprobs[1]))
    assert all(torch.equal(one[2:], other) for one, other in zip(computed, alone, strict=True))


def assert_logprobs_of(
    computed: list[PromptLogprob], oracle: PreTrainedModel, prompt: list[int], first: int, num_top: int
) -> None:
    """Compare the logprobs of prompt[first:] with transformers."""
    with torch.inference_mode():
        expected = oracle(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
    assert len(computed) == len(prompt) - first
    for position, entry in enumerate(computed, start=first):
        row, target = expected[position - 1], prompt[position]
        assert entry.logprob == pytest.approx(float(row[target]), abs=1e-4)
        assert int((row > row[target] + 1e-4).sum()) < entry.rank <= 1 + int((row > row[target] - 1e-4).sum())
        most_likely = row.topk(num_top)
        assert [token for token, _ in entry.top[:num_top]] == most_likely.indices.tolist()
        assert [value for _, value in entry.top[:num_top]] == pytest.approx(most_likely.values.tolist(), abs=1e-4)


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def oracle(tmp_path: Path) -> PreTrainedModel:
    return save_tiny_model(tmp_path, "qwen3")


@pytest.fixture
def new_driver(backend: str, oracle: PreTrainedModel, tmp_path: Path) -> Callable[[], StepDriver]:  # noqa: ARG001
    """Makes drivers of a runner with the oracle's weights."""
    model, info = load(tmp_path, packed=backend == "cpu")
    return lambda: StepDriver(make_runner(model, info, backend))


@pytest.mark.parametrize("seed", range(2))
def test_chunks_in_mixed_steps_have_the_logprobs_of_transformers(
    seed: int, new_driver: Callable[[], StepDriver], oracle: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other rows decode, or prefill without logprobs, meanwhile; at most 16 rows pass the LM head at once."""
    for module in (prompt_logprobs, device_batch):
        monkeypatch.setattr(module, "LOGPROBS_AT_ONCE", 16)
    rng = random.Random(seed)
    driver = new_driver()
    lengths = {1: 40, 2: 1, 3: 77, 4: 2, 5: 30, 6: 100}
    num_tops = {1: 3, 2: 0, 3: 0, 4: 5, 5: None, 6: 1}
    prompts = {slot: random_tokens(rng, length) for slot, length in lengths.items()}
    for slot, prompt in prompts.items():
        driver.open(slot, prompt, num_prompt_top=num_tops[slot])
    computed: dict[int, list[PromptLogprob]] = {slot: [] for slot in prompts}
    while prefilling := [slot for slot in prompts if driver.remaining(slot)]:
        decode = [slot for slot in prompts if slot not in prefilling]
        chosen = sorted(rng.sample(prefilling, rng.randint(1, len(prefilling))))
        driver.run(decode, [(slot, min(driver.remaining(slot), rng.randint(1, 60))) for slot in chosen])
        for slot, new in driver.logprobs_by_slot.items():
            computed[slot] += new
    assert computed.pop(5) == []
    for slot, own in computed.items():
        assert_logprobs_of(own, oracle, prompts[slot], 1, num_tops[slot] or 0)


@pytest.mark.parametrize("num_shared", [1, 3])
@pytest.mark.parametrize("num_recomputed", [1, 16])
def test_the_last_tokens_of_a_cached_prefix_are_recomputed_for_logprobs(
    num_recomputed: int, num_shared: int, new_driver: Callable[[], StepDriver], oracle: PreTrainedModel
) -> None:
    """Several slots do so in one step; KV that they must not write goes to the padding block."""
    rng = random.Random(num_recomputed)
    prefix = random_tokens(rng, 16 * num_shared)
    driver = new_driver()
    driver.open(1, [*prefix, 1])
    driver.run([], [(1, len(prefix) + 1)])
    prompts = {slot: prefix + random_tokens(rng, rng.randint(1, 40)) for slot in range(2, 6)}
    for slot, prompt in prompts.items():
        driver.open(slot, prompt, shares=(1, num_shared), num_prompt_top=2, num_recomputed=num_recomputed)
    driver.run([1], [(slot, driver.remaining(slot)) for slot in prompts])
    for slot, prompt in prompts.items():
        assert_logprobs_of(driver.logprobs_by_slot[slot], oracle, prompt, len(prefix) - num_recomputed + 1, 2)
    texts = {slot: list(prompt) for slot, prompt in prompts.items()}
    for slot, (token, _) in driver.run(sorted(prompts), []).items():
        assert oracle_greedy(oracle, texts[slot], 2)[0][1] == token


def test_blocks_filled_by_another_row_give_logprobs_in_the_same_step(
    new_driver: Callable[[], StepDriver], oracle: PreTrainedModel
) -> None:
    rng = random.Random(3)
    prompt = random_tokens(rng, 60)
    longer = prompt[:48] + random_tokens(rng, 9)
    driver = new_driver()
    driver.open(1, prompt)
    driver.open(2, longer, shares=(1, 3), num_prompt_top=1, num_recomputed=48)
    driver.run([], [(1, 60), (2, 57)])
    assert_logprobs_of(driver.logprobs_by_slot[2], oracle, longer, 1, 1)


def test_recomputed_tokens_write_neither_kv_nor_context_tokens(new_driver: Callable[[], StepDriver]) -> None:
    """The recomputed tokens differ from the tokens in the blocks, so a write would change the samples of the row that
    reads the blocks, by its attention or its penalties."""
    rng = random.Random(4)
    prompt, others = random_tokens(rng, 40), random_tokens(rng, 33)
    tokens = []
    for is_disturbed in (False, True):
        driver = new_driver()
        rule = Rule(num_request_tokens=1, repetition=1.5, frequency=0.5)
        driver.open(1, list(prompt), rules=make_rules({1: rule}), **rule.penalties)
        driver.run([], [(1, 40)])
        if is_disturbed:
            driver.open(2, others, shares=(1, 2), num_prompt_top=0, num_recomputed=32)
            driver.run([], [(2, 20)])
            driver.run([], [(2, 13)])
        tokens.append([driver.run([1], [])[1] for _ in range(5)])
    assert tokens[0] == tokens[1]


def test_prompt_logprobs_are_sent_with_the_output_of_their_step(new_driver: Callable[[], StepDriver]) -> None:
    driver = new_driver()
    inputs_in, inputs = make_channel()
    outputs, outputs_out = make_channel()
    limits = ForwardLimits(max_tokens=600, max_seqs=7, context_length=512, vocab_size=VOCAB_SIZE)
    for message in (widest_prefill(limits), single_token(limits)):
        inputs.send(message)
    inputs.close()
    run_steps(driver.runner, inputs_in, outputs_out, steps_behind=0, carry_out=lambda _: "")
    with_logprobs, plain = outputs.receive(timeout_s=60), outputs.receive(timeout_s=60)
    assert isinstance(with_logprobs, ForwardOutput)
    assert with_logprobs.prompt_logprobs is not None
    assert with_logprobs.prompt_logprobs.logprobs.shape == (256,)
    assert with_logprobs.prompt_logprobs.top_ids.shape == with_logprobs.prompt_logprobs.top_logprobs.shape == (256, 20)
    assert isinstance(plain, ForwardOutput)
    assert plain.prompt_logprobs is None


def test_logprobs_of_a_long_prompt_take_little_memory(tmp_path: Path) -> None:
    """All logits of the prompt at once would take 1.6 GB."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(
        vocab_size=50_000, num_hidden_layers=1, max_position_embeddings=8192, tie_word_embeddings=True, **sizes
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    save_byte_tokenizer(tmp_path)
    model, info = load(tmp_path, packed=True)
    driver = StepDriver(make_runner(model, info, "cpu", num_blocks=600), num_blocks=600)
    prompt = np.random.default_rng(0).integers(0, 50_000, 8192).tolist()
    for slot, length in ((1, 600), (2, 8192)):  # the first is a warm-up: it allocates the buffers that are kept
        driver.open(slot, prompt[:length], num_prompt_top=20)
        before = reset_peak()
        driver.run([], [(slot, length)])
        grown = peak() - before
        assert len(driver.logprobs_by_slot[slot]) == length - 1
    assert grown < 60e6
