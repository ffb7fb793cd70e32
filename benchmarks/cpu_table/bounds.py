"""What this machine could reach: measured bandwidth and rate of products, and the time that a load needs at least."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.cpu_table.models import WeightBytes, num_matrix_weights
from benchmarks.random_models import ModelShape
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.cpu.layer_executor import LayerKernels, PackedWeights

_READ_BYTES = 2 << 30
"""Larger than the last-level cache of most processors."""

_ROWS, _SIZE = 512, 4096
_ROUNDS = 5

_CACHED_PROMPT = 129
"""Whole blocks of any usual size and one more token, which servers compute for each sample again."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured limits, with all cores."""

    bytes_per_s: float
    """Of reading memory."""
    operations_per_s: float
    """Of the fastest product of 512 rows with 4,096 x 4,096 weights that torch or this project's kernels have."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that all have as many tokens."""

    name: str
    num_requests: int
    prompt_tokens: int
    """Of each request."""
    output_tokens: int
    """Of each request."""
    has_one_prompt: bool = False
    """All ask for the same prompt, which has to be computed once."""

    def least_seconds(self, machine: Machine, shape: ModelShape, weight_bytes: WeightBytes) -> float:
        """If every byte of weights, keys and values is read once a step at full bandwidth while the products have
        their full rate, and each step has a token of every request.

        Keys and values count two bytes a number."""
        operations = 2 * num_matrix_weights(shape)
        head = 2 * shape.vocab_size * shape.hidden_size  # whose logits only a prompt's last token needs
        prompts = 1 if self.has_one_prompt else self.num_requests
        prefilled = prompts * (self.prompt_tokens * (operations - head) + head)
        prefilled_bytes = weight_bytes.read_by(shape, prompts * self.prompt_tokens)
        prefill = max(prefilled / machine.operations_per_s, prefilled_bytes / machine.bytes_per_s)
        token_bytes = 4 * shape.num_layers * shape.num_kv_heads * shape.head_dim
        own_tokens = self.output_tokens / 2 + (0 if self.has_one_prompt else self.prompt_tokens)
        cached = self.num_requests * own_tokens + (self.prompt_tokens if self.has_one_prompt else 0)
        reading = (weight_bytes.read_by(shape, self.num_requests) + token_bytes * cached) / machine.bytes_per_s
        computing = self.num_requests * operations / machine.operations_per_s
        return prefill + (self.output_tokens - 1) * max(reading, computing)


def loads_of(shape: ModelShape) -> tuple[Load, ...]:
    """The three loads, shorter for larger models: each should take the slowest server a minute or two."""
    weights = num_matrix_weights(shape)

    def tokens(budget: float, least: int, most: int) -> int:
        return int(min(max(budget / weights, least), most))

    unrelated = tokens(1e10, 8, 32)
    return (
        Load("one stream", 1, 16, tokens(4e10, 12, 128)),
        Load("64 unrelated requests", 64, unrelated, unrelated),
        Load("512 samples of one prompt", 512, _CACHED_PROMPT, tokens(3e9, 4, 12), has_one_prompt=True),
    )


def measure_machine() -> Machine:
    """Takes some seconds and two GiB."""
    values = torch.ones(_READ_BYTES // 4)
    read = _READ_BYTES / _shortest(values.sum)
    kernels = load_kernels()
    with torch.inference_mode():
        products: list[Callable[[], object]] = []
        for dtype in (torch.bfloat16, torch.float32):
            weight, x = torch.randn(_SIZE, _SIZE).to(dtype), torch.randn(_ROWS, _SIZE).to(dtype)
            products.append(lambda x=x, weight=weight: torch.nn.functional.linear(x, weight))  # type: ignore[misc]
            if kernels is not None:
                packed = PackedWeights(LayerKernels(kernels), weight, None)
                rows = x.to(packed.activation_dtype)
                products.append(lambda packed=packed, rows=rows: packed.multiply(rows))  # type: ignore[misc]
        fastest = min(_shortest(product) for product in products)
    return Machine(read, 2 * _ROWS * _SIZE * _SIZE / fastest)


def _shortest(call: Callable[[], object]) -> float:
    """Seconds of the fastest of some calls."""
    times = []
    for _ in range(_ROUNDS + 1):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times[1:])
