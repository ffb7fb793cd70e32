"""Whole steps on a device whose tensors cannot be read or copied without the host's noticing: none makes it wait."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.examples import IS_NIGHTLY, few
from tests.helpers.tiny_model import FAMILIES, VOCAB_SIZE, save_tiny_model
from tests.model.helpers.greedy_decoding import load
from tests.model.helpers.prefix_samples import Samples
from tests.model.helpers.pretend_device import (
    DEVICE,
    HostTransfers,
    PretendTransfers,
    Refused,
    move_to_device,
    on_device,
    on_host,
    pretended,
)
from tests.model.helpers.rule_contexts import ALWAYS, Rule, make_rules
from tests.model.helpers.sampling_rows import make_masks
from tests.model.helpers.steps import StepDriver, make_runner, one_thread
from tokasaurus.messages.forward import ForwardInput
from tokasaurus.model.buffer_sizes import RING_SIZE, BufferSizes, sizes_for
from tokasaurus.model.execution.runner import ModelRunner, StepResult
from tokasaurus.model.worker.warmup import ForwardLimits, decode_after, small_forwards, widest_prefill

PAGE_SIZE = 16
DEFAULT_SIZES = BufferSizes()
LIMITS = ForwardLimits(max_tokens=256, max_seqs=20, context_length=256, vocab_size=VOCAB_SIZE)


def host_runner(
    directory: Path, transfers: PretendTransfers | None = None, sizes: BufferSizes = DEFAULT_SIZES
) -> ModelRunner:
    model, info = load(directory)
    return make_runner(model, info, "torch", PAGE_SIZE, transfers=transfers, buffer_sizes=sizes)


def device_runner(directory: Path, transfers: PretendTransfers) -> ModelRunner:
    """Call and use it in `pretended`."""
    model, info = load(directory)
    move_to_device(model)
    return make_runner(model, info, "torch", PAGE_SIZE, device=DEVICE, transfers=transfers)


def answer(result: StepResult) -> list[np.ndarray]:
    """All results of a step, as arrays."""
    output = result.output()
    arrays = [output.token_ids]
    for optional in (output.logprobs, output.top, output.prompt_logprobs, output.nonfinite):
        if isinstance(optional, np.ndarray):
            arrays.append(optional)
        elif optional is not None:
            arrays += [getattr(optional, field.name) for field in dataclasses.fields(optional)]
    return arrays


def check_equal(answers: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for array, expected_array in zip(answers, expected, strict=True):
        np.testing.assert_allclose(array, expected_array, rtol=1e-5, atol=1e-5)


def test_steps_of_every_kind_with_every_output(tmp_path: Path) -> None:
    """Prefill, decode, both together and prefix groups; penalties, biases, masks, limits, logprobs, top-k logprobs and
    prompt logprobs."""
    save_tiny_model(tmp_path, "llama")
    steps = list(small_forwards(LIMITS, PAGE_SIZE))
    on_cpu = host_runner(tmp_path)
    expected = [answer(on_cpu.run(step)) for step in steps]
    with pretended():
        runner = device_runner(tmp_path, PretendTransfers())
        for step, expected_answer in zip(steps, expected, strict=True):
            check_equal(answer(runner.run(step)), expected_answer)
    assert {len(arrays) for arrays in expected} == {1, 5, 9}


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "top_k": {"temperature": 1.0, "top_k": 4},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "presence": {"rules": make_rules({1: Rule(2)}), "presence_penalty": 1.5},
    "frequency": {"rules": make_rules({1: Rule(2)}), "frequency_penalty": 0.5},
    "repetition": {"rules": make_rules({1: Rule(2)}), "repetition_penalty": 1.3},
    "biases": {"rules": make_rules({1: Rule(biases=((7, 3.0, ALWAYS), (7, -1.0, 17)))})},
    "top logprobs": {"num_top": 4},
    "drawn logprobs": {
        "logprobs_as_sampled": True,
        "num_top": 3,
        "temperature": 0.7,
        "top_p": 0.9,
        "rules": make_rules({1: Rule(2)}),
        "repetition_penalty": 1.3,
    },
    "prompt logprobs": {"num_prompt_top": 3},
    "masks": {},
}


def run_option(runner: ModelRunner, option: str) -> list[object]:
    """One slot with the option beside a plain one: a prefill whose other chunk does not sample, decode beside the rest
    of it, and decode of both, over the borders of blocks. -> all results."""
    masks = make_masks({0: np.arange(VOCAB_SIZE) % 3 == 1}) if option == "masks" else None
    driver = StepDriver(runner, PAGE_SIZE)
    prompt = np.random.default_rng(0).integers(0, VOCAB_SIZE, 35).tolist()
    driver.open(1, prompt[:14], **OPTIONS[option])
    driver.open(2, prompt)
    results: list[object] = []
    for decode, prefill in (([], [(1, 14), (2, 20)]), ([1], [(2, 15)]), *[([1, 2], [])] * 4):
        results += [driver.run(decode, prefill, masks=masks), driver.top, driver.logprobs_by_slot]
    return results


@pytest.mark.parametrize("option", OPTIONS)
def test_steps_of_every_kind_with_one_option(option: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    with one_thread():
        expected = run_option(host_runner(tmp_path), option)
        with pretended():
            results = run_option(device_runner(tmp_path, PretendTransfers()), option)
    check_equal([np.array(numbers(results))], [np.array(numbers(expected))])


def numbers(value: object) -> list[float]:
    """All numbers in lists, tuples, dictionaries and dataclasses, in order."""
    if dataclasses.is_dataclass(value):
        value = dataclasses.astuple(value)
    if isinstance(value, dict):
        value = list(value.items())
    return [number for item in value for number in numbers(item)] if isinstance(value, list | tuple) else [float(value)]


@few(1, "family", FAMILIES)
def test_samples_in_prefix_groups(family: str, tmp_path: Path) -> None:
    """Prompts in chunks beside decode rows, shared blocks and groups, against the same steps on the host."""
    save_tiny_model(tmp_path, family)

    def run(runner: ModelRunner) -> dict[int, list[tuple[int, float | None]]]:
        samples = Samples(StepDriver(runner, PAGE_SIZE), PAGE_SIZE, seed=3)
        with one_thread():
            samples.run(12 if IS_NIGHTLY else 4, grouped=True)
        assert samples.num_grouped > (30 if IS_NIGHTLY else 5)
        return samples.sampled

    expected = run(host_runner(tmp_path))
    with pretended():
        sampled = run(device_runner(tmp_path, PretendTransfers()))
    for slot, pairs in expected.items():
        assert [token for token, _ in sampled[slot]] == [token for token, _ in pairs]
        assert [logprob for _, logprob in sampled[slot]] == pytest.approx([logprob for _, logprob in pairs], abs=1e-5)


NUM_STEPS = 1000 if IS_NIGHTLY else 150


def test_buffers_keep_their_addresses_over_many_steps(tmp_path: Path) -> None:
    """From the first step on, of which some are the largest. With plain memory as the device's: the pretended device
    takes a minute for as many steps."""
    save_tiny_model(tmp_path, "llama")
    transfers = HostTransfers()

    def run(steps: list[ForwardInput]) -> None:
        for step in steps:
            runner.run(step).output()

    with one_thread():
        sizes = sizes_for(LIMITS.max_tokens, LIMITS.max_seqs, LIMITS.vocab_size, num_top=20)
        runner = host_runner(tmp_path, transfers, sizes)
        widest = widest_prefill(LIMITS)
        steps = [*small_forwards(LIMITS, PAGE_SIZE), widest, decode_after(widest)]
        addresses = [buffer.data_ptr() for buffer in transfers.buffers]
        assert len(addresses) == 3 * RING_SIZE, "pinned and device memory of the inputs, pinned memory of the results"
        run((steps * NUM_STEPS)[:NUM_STEPS])
    assert [buffer.data_ptr() for buffer in transfers.buffers] == addresses
    sources = [source for source, _ in transfers.uploads]
    assert len(sources) == NUM_STEPS, "one copy a step"
    assert sources == (sources[:RING_SIZE] * NUM_STEPS)[:NUM_STEPS]
    assert len(set(sources)) == RING_SIZE
    assert transfers.num_downloads == NUM_STEPS


CALLS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "int": lambda x: int(x[0]),
    "cpu": lambda x: x.cpu(),
    "to the host": lambda x: x.to("cpu"),
    "if": lambda x: bool((x > 0).any()),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "assignment by mask": lambda x: x.__setitem__(x > 0, torch.zeros(1, device=DEVICE)),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x),
    "equal": lambda x: torch.equal(x, x),
    "copy from the host": lambda x: x.copy_(torch.zeros(4, dtype=torch.int64)),
    "copy of a number": lambda x: x.copy_(torch.zeros((), dtype=torch.int64)),
    "copy to the host": lambda x: torch.zeros(4, dtype=torch.int64).copy_(x),
    "host index": lambda x: x[torch.zeros(2, dtype=torch.int64)],
    "host operand": lambda x: x + torch.zeros(4),
    "to the device": lambda _: torch.zeros(4).to(DEVICE),
    "new from a list": lambda _: torch.tensor([1, 2], device=DEVICE) + 1,
    "pinned": lambda _: torch.empty(4, pin_memory=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_device_refuses(name: str) -> None:
    with pretended():
        x = on_device(torch.tensor([2, 0, 1, 3]))
        with pytest.raises(Refused):
            CALLS[name](x)


@pytest.mark.parametrize("name", ["tolist", "numpy"])
def test_torch_does_not_read_a_tensor_of_the_device(name: str) -> None:
    with pretended():
        x = on_device(torch.tensor([2, 0, 1, 3]))
        with pytest.raises(RuntimeError, match="not supported for tensor subclasses"):
            getattr(x, name)()


def test_the_device_computes() -> None:
    with pretended():
        x = on_device(torch.tensor([2, 0, 1, 3]))
        x[torch.arange(0, 4, 2, device=DEVICE)] += 5
        y = torch.repeat_interleave(x, x % 3, output_size=1) * torch.tensor(2.5)
        assert y.device == DEVICE
        assert on_host(x).tolist() == [7, 0, 6, 3]
        assert on_host(y).tolist() == [17.5]
