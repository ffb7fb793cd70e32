"""Layers with experts: each expert alone, and plain formulas in float64 of routing and of what is added."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.model.helpers.linear_layers import assert_close, make_norm, random_rows
from tests.model.helpers.quantized_rows import block_size, random_block_rows
from tokasaurus.checkpoint.spec import GateLimits, RouterSpec
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.cpu.experts import MAX_ROWS, ExpertWeights, PackedExperts, PackedRouter
from tokasaurus.model.cpu.layer_executor import BlockWeight, LayerKernels, PackedWeights

NUM_EXPERTS = 5
COUNTS = ([1, 0, 0, 1, 1], [0, 0, 37, 0, 0], [3, 2, 40, 0, 7], [6, 7, 0, 1, 90], [0, 0, 0, 0, 1], [700, 1, 0, 2, 3])
"""Rows of each expert: with empty ones, with one that gets all, and with more rows than the caches have room for."""


def assert_equals_each_alone(
    kernels: LayerKernels, gate_up: Sequence[Tensor | BlockWeight], down: Sequence[Tensor | BlockWeight]
) -> None:
    """Bit for bit."""
    experts = PackedExperts(ExpertWeights(kernels, gate_up, True, "silu"), ExpertWeights(kernels, down))
    dtype = experts.down.packed[0].activation_dtype
    for counts in COUNTS:
        x = random_rows(sum(counts), experts.gate_up.packed[0].in_size, dtype)
        expert = torch.repeat_interleave(torch.tensor(counts))[torch.randperm(len(x))]
        found = experts(x, expert.unsqueeze(1), torch.ones(len(x), 1))
        elsewhere = torch.where(torch.arange(len(x)) % 2 == 0, -1, NUM_EXPERTS)
        assert torch.equal(experts(x, torch.stack((elsewhere, expert), 1), torch.ones(len(x), 2)), found)
        assert not experts(x, elsewhere.unsqueeze(1), torch.ones(len(x), 1)).any()
        for number, (first, last) in enumerate(zip(experts.gate_up.packed, experts.down.packed, strict=True)):
            rows = x[expert == number]
            if len(rows):
                assert torch.equal(found[expert == number], last.multiply(first.multiply(rows))), counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "width"), [(98, 74), (2080, 64), (64, 2112)])
def test_plain_weights(kernels: LayerKernels, size: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = [torch.randn(2 * width, size).to(dtype) for _ in range(NUM_EXPERTS)]
    assert_equals_each_alone(kernels, gate_up, [torch.randn(size, width).to(dtype) for _ in range(NUM_EXPERTS)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("types", [["Q4_1"] * NUM_EXPERTS, ["Q6_K", "Q4_K", "Q8_0", "Q4_K", "Q5_0"]])
def test_quantised_weights(kernels: LayerKernels, types: list[str], is_int8: bool, dtype: torch.dtype) -> None:
    """Each expert has its own type, as files of mixed types may have."""

    def weights(num_rows: int, in_size: int) -> list[BlockWeight]:
        rows = [random_block_rows(each, num_rows, in_size // block_size(each)) for each in types]
        return [BlockWeight(in_size, dtype, (each,), is_int8) for each in rows]

    assert_equals_each_alone(kernels, weights(2 * 256, 512), weights(512, 256))


def test_no_rows(kernels: LayerKernels) -> None:
    experts = PackedExperts(
        ExpertWeights(kernels, [torch.randn(64, 32)] * 3, True, "silu"),
        ExpertWeights(kernels, [torch.randn(32, 32)] * 3),
    )
    assert experts(torch.empty(0, 32), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2)).shape == (0, 32)


class Layer:
    """Random weights of a layer with experts, and what it computes by plain formulas in float64, token by token."""

    def __init__(
        self, kernels: LayerKernels, num_experts: int, dtype: torch.dtype, shared: int = 0, gates_shared: bool = False,
        limits: GateLimits | None = None, choice_bias: Tensor | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """shared: width of the shared expert; 0: none. options: of RouterSpec."""
        torch.manual_seed(num_experts)
        self.size, width = 66, 46
        self.spec = RouterSpec(num_experts, **{"num_chosen": 3} | options)
        self.choice_bias = choice_bias
        self.limits, self.gates_shared = limits, gates_shared

        def numbers(*shape: int) -> Tensor:
            return (torch.randn(shape) / 4).to(dtype)

        self.gate_up, self.down = numbers(num_experts, 2 * width, self.size), numbers(num_experts, self.size, width)
        self.biases = (numbers(num_experts, 2 * width), numbers(num_experts, self.size)) if limits else (None, None)
        self.router, self.router_bias = numbers(num_experts + gates_shared, self.size).float(), None
        if limits:
            self.router_bias = numbers(num_experts).float()
        self.shared = (numbers(2 * shared, self.size), numbers(self.size, shared)) if shared else None
        activation = None if limits else "silu"
        own_shared = None
        if self.shared:
            enter, leave = (
                PackedWeights(kernels, each, None, *gated)
                for each, gated in zip(self.shared, ((True, "silu"), ()), strict=True)
            )
            own_shared = enter, leave
        self.packed = PackedExperts(
            ExpertWeights(kernels, [*self.gate_up], True, activation, self.biases[0], limits),
            ExpertWeights(kernels, [*self.down], biases=self.biases[1]),
            PackedRouter(self.spec, PackedWeights(kernels, self.router, self.router_bias), choice_bias),
            own_shared,
            self.spec.weighs_inputs,
        )
        self.dtype = self.packed.down.packed[0].activation_dtype

    def _feed_forward(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | float]) -> Tensor:
        gate, up = (weights[0].double() @ x + biases[0]).to(self.dtype).double().chunk(2)
        if self.limits is None:
            features = functional.silu(gate).to(self.dtype).double() * up
        else:
            gate, up = gate.clamp(max=self.limits.limit), up.clamp(-self.limits.limit, self.limits.limit)
            features = gate * torch.sigmoid(self.limits.alpha * gate) * (up + self.limits.up_offset)
        return (weights[1].double() @ features.to(self.dtype).double() + biases[1]).to(self.dtype).double()

    def choices(self, x: Tensor) -> list[tuple[int, float]]:
        """The experts of one token, and their weights."""
        spec = self.spec
        num_experts = len(self.down)
        # Not a product of torch's, which may add a row's numbers in another order than another's.
        logits = (self.router[:num_experts].double() * x).sum(1)
        if self.router_bias is not None:
            logits = logits + self.router_bias.double()
        if spec.scores == "sparsemixer":
            return self._mixed_sparsely(logits)
        of_logits = {
            "softmax": lambda: logits.softmax(0),
            "sigmoid": logits.sigmoid,
            "softmax_of_chosen": lambda: logits,
            "sigmoid_of_chosen": lambda: logits,
        }
        scores = of_logits[spec.scores]()
        by = scores if self.choice_bias is None else scores + self.choice_bias.double()
        groups = by.view(spec.num_groups, -1)
        best = groups.topk(2).values.sum(1)
        allowed = sorted(range(len(best)), key=lambda group: (-float(best[group]), group))[: spec.num_chosen_groups]
        candidates = [expert for expert in range(num_experts) if expert // groups.shape[1] in allowed]
        chosen = sorted(candidates, key=lambda expert: (-float(by[expert]), expert))[: spec.num_chosen]
        weights = scores[chosen]
        if spec.scores == "softmax_of_chosen":
            weights = weights.softmax(0)
        elif spec.scores == "sigmoid_of_chosen":
            weights = weights.sigmoid()
        if spec.normalizes:
            weights = weights / max(spec.min_sum, float(weights.sum()))
        return list(zip(chosen, (weights * spec.scale).tolist(), strict=True))

    def _mixed_sparsely(self, logits: Tensor) -> list[tuple[int, float]]:
        found = list[tuple[int, float]]()
        for _ in range(self.spec.num_chosen):
            left = {n: float(logit) for n, logit in enumerate(logits) if n not in dict(found)}
            first = max(left, key=lambda n: (left[n], -n))
            near = [
                logit for logit in left.values()
                if (left[first] - logit) / max(abs(logit), left[first]) <= 2 * self.spec.jitter
            ]  # fmt: skip
            found.append((first, 1 / sum(math.exp(logit - left[first]) for logit in near)))
        return found

    def expected(self, x: Tensor) -> Tensor:
        """x [T, E] -> float64 [T, E]."""
        out = torch.zeros(x.shape, dtype=torch.float64)
        for row, token in zip(out, x.double(), strict=True):
            for expert, weight in self.choices(token):
                biases = [0.0 if bias is None else bias[expert].double() for bias in self.biases]
                matrices = self.gate_up[expert], self.down[expert]
                if self.spec.weighs_inputs:
                    row += self._feed_forward((token * weight).to(self.dtype).double(), matrices, biases)
                else:
                    row += weight * self._feed_forward(token, matrices, biases)
            if self.shared is not None:
                factor = torch.sigmoid(self.router[-1].double() @ token) if self.gates_shared else 1
                row += factor * self._feed_forward(token, self.shared, (0.0, 0.0))
        return out


ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "normalised": {"normalizes": True},
    "softmax of chosen": {"scores": "softmax_of_chosen", "limits": GateLimits(0.8, 1.702, 1.0)},
    "limits only": {"limits": GateLimits(0.5)},
    "sigmoid": {"scores": "sigmoid", "normalizes": True, "scale": 2.5, "choice_bias": True},
    "groups": {"scores": "sigmoid", "num_groups": 3, "num_chosen_groups": 2, "choice_bias": True},
    "one group chosen": {"num_groups": 3, "num_chosen_groups": 1, "scale": 16.0},
    "a least sum": {"scores": "sigmoid", "normalizes": True, "min_sum": 3.0},
    "sparse mixer": {"scores": "sparsemixer", "jitter": 0.2, "num_chosen": 2},
    "one chosen": {"num_chosen": 1, "scores": "sigmoid"},
    "inputs weighed": {"num_chosen": 2, "scores": "sigmoid_of_chosen", "weighs_inputs": True, "shared": 34},
    "all chosen": {"num_chosen": 9, "normalizes": True},
    "shared": {"shared": 34},
    "gated shared": {"shared": 50, "gates_shared": True, "normalizes": True},
}


def layer_of(kernels: LayerKernels, router: str, dtype: torch.dtype) -> Layer:
    options = dict(ROUTERS[router])
    if options.get("choice_bias"):
        options["choice_bias"] = torch.randn(9, generator=torch.Generator().manual_seed(5))
    return Layer(kernels, 9, dtype, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("router", ROUTERS)
def test_layers_equal_the_plain_formula(kernels: LayerKernels, router: str, dtype: torch.dtype) -> None:
    layer = layer_of(kernels, router, dtype)
    for num_rows in (1, 2, 77):
        x = random_rows(num_rows, layer.size, layer.dtype)
        assert_close(layer.packed.routed(x), layer.expected(x))


def test_the_first_of_equal_experts_are_chosen(kernels: LayerKernels) -> None:
    for options in ({}, {"num_groups": 3, "num_chosen_groups": 2}):
        layer = Layer(kernels, 9, torch.float32, **options)
        layer.router[:] = layer.router[3]
        layer.packed = PackedExperts(
            layer.packed.gate_up,
            layer.packed.down,
            PackedRouter(layer.spec, PackedWeights(kernels, layer.router, None)),
        )
        x = random_rows(7, layer.size, torch.float32)
        assert [expert for expert, _ in layer.choices(x[0].double())] == [0, 1, 2]
        assert_close(layer.packed.routed(x), layer.expected(x))


def test_a_norm_comes_first(kernels: LayerKernels) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        layer = Layer(kernels, 9, dtype, shared=34)
        x, norm = random_rows(21, layer.size, layer.dtype), make_norm(layer.size, torch.float32)
        normed = norm(x.float()).to(layer.dtype)
        assert_close(layer.packed.routed(x, norm.packed), layer.expected(normed))


def test_the_kernels_compute_as_many_rows_at_a_time_as_memory_is_counted_for() -> None:
    loaded = load_kernels()
    assert loaded is not None
    assert loaded.max_expert_rows == MAX_ROWS


ROWS = (0, 1, 500, 909, 910, 911, 999)


def test_a_token_does_not_depend_on_the_others(kernels: LayerKernels) -> None:
    """Nor on which others are computed at a time: with 9 experts chosen, 910 tokens are."""
    layer = Layer(kernels, 9, torch.bfloat16, num_chosen=9, shared=34)
    layer.packed.reserve(2000, 9)
    x = random_rows(1000, layer.size, layer.dtype)
    together = layer.packed.routed(x)
    for row in ROWS:
        assert torch.equal(together[row : row + 1], layer.packed.routed(x[row : row + 1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_int8", [False, True])
def test_with_quantised_weights_a_token_depends_on_the_others_by_rounding_alone(
    kernels: LayerKernels, is_int8: bool, dtype: torch.dtype
) -> None:
    """Of sums that are rounded to bfloat16: few rows of an expert are multiplied in another way than many."""
    torch.manual_seed(0)

    def weights(num_rows: int, in_size: int) -> list[BlockWeight]:
        rows = [random_block_rows("Q4_K", num_rows, in_size // block_size("Q4_K")) for _ in range(9)]
        return [BlockWeight(in_size, dtype, (each,), is_int8) for each in rows]

    gate_up, down = ExpertWeights(kernels, weights(512, 256), True, "silu"), ExpertWeights(kernels, weights(256, 256))
    router = PackedWeights(kernels, torch.randn(9, 256), None)
    experts = PackedExperts(gate_up, down, PackedRouter(RouterSpec(9, 3), router))
    x = random_rows(1000, 256, down.packed[0].activation_dtype)
    together = experts.routed(x)
    for row in ROWS:
        found, alone = together[row], experts.routed(x[row : row + 1])[0]
        if dtype == torch.float32 or is_int8:
            assert torch.equal(found, alone)
        else:
            assert (found - alone).norm() <= 2**-7 * alone.norm()


@pytest.mark.parametrize("router", ROUTERS)
def test_rows_that_are_not_finite_stay_so_alone(kernels: LayerKernels, router: str) -> None:
    layer = layer_of(kernels, router, torch.float32)
    x = random_rows(5, layer.size, torch.float32)
    whole = layer.packed.routed(x)
    x[2, 7] = float("nan")
    found = layer.packed.routed(x)
    assert found[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(found[others], whole[others])
