"""The feed-forward of a layer with experts: the router, the experts' linear layers, and a shared expert."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from tokasaurus.checkpoint.spec import ExpertsSpec, MLPSpec, RouterScores, RouterSpec
from tokasaurus.model.cpu.experts import ExpertWeights, PackedExperts, PackedRouter
from tokasaurus.model.cpu.gemm_choice import ALWAYS_KERNELS, GemmChoice
from tokasaurus.model.cpu.layer_executor import BlockRows, BlockWeight, LayerKernels, PackedWeights, takes
from tokasaurus.model.decoder.layers import MLP, PLAIN, FusedColumnLinear, Linear, Norm, OutputShard, activated
from tokasaurus.model.decoder.quantize import Packing, quantized
from tokasaurus.model.decoder.weights import WeightShard, return_freed_memory, whole
from tokasaurus.model.parallel.collectives import sum_over_shards
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.triton_choice import uses_triton

_EXPERTS_PER_RETURN = 16
"""Experts that are quantised before what their intermediate results took is given back, which takes a millisecond."""

# T tokens, each with K chosen ones of N experts; R rows of experts, T * K; E hidden size, W width of an expert


class Router(FusedColumnLinear):
    """x [T, E] -> the experts of each token. Its last output is the shared expert's gate, where there is one."""

    def __init__(self, spec: RouterSpec, hidden_size: int, has_shared_gate: bool) -> None:
        outputs = [OutputShard("gate", spec.num_experts, 0, spec.num_experts)]
        outputs += [OutputShard("shared_gate", 1, 0, 1)] if has_shared_gate else []
        super().__init__(hidden_size, outputs, spec.has_bias, torch.float32)
        self.spec = spec
        self.choice_bias = None
        if spec.has_choice_bias:
            self.choice_bias = nn.Parameter(torch.empty(spec.num_experts), requires_grad=False)
        self.recorded: Tensor | None = None
        """int32 [>= T, K], which gets each call's choices; None: nothing does."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, E] -> experts, int64 [T, K]; their weights, float32 [T, K]; the shared one's gate, [T, 1] or [T, 0]."""
        outputs: Tensor = self(x.float())
        logits, shared = outputs[:, : self.spec.num_experts], outputs[:, self.spec.num_experts :]
        chosen, weights = choose_experts(logits, self.spec, self.choice_bias)
        if self.recorded is not None:
            self.recorded[: len(chosen)] = chosen
        return chosen, weights, shared.sigmoid()

    def weight_shards(self, prefix: str) -> list[WeightShard]:
        shards = super().weight_shards(prefix)
        if self.choice_bias is not None:
            name = f"{prefix}choice.e_score_correction_bias"
            shards.append(whole(name, self.choice_bias, self._write_choice_bias))
        return shards

    def _write_choice_bias(self, values: Tensor) -> None:
        assert self.choice_bias is not None
        self.choice_bias.data.copy_(values)


def choose_experts(logits: Tensor, spec: RouterSpec, choice_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """logits: float32 [T, N], choice_bias [N] -> experts, int64 [T, K], and their weights, float32 [T, K]."""
    if logits.device.type != "cuda" or spec.num_groups > 1 or spec.scores == "sparsemixer":
        return choose_by_torch(logits, spec, choice_bias)
    numbers = spec.num_chosen, spec.scores, spec.normalizes, float(spec.min_sum), float(spec.scale)
    choose = choose_on_cuda if torch.compiler.is_compiling() else _choose_on_cuda
    chosen, weights = choose(logits, choice_bias, *numbers)
    return chosen, weights


def _choose_on_cuda(
    logits: Tensor,
    choice_bias: Tensor | None,
    num_chosen: int,
    scores: str,
    normalizes: bool,
    min_sum: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """As choose_experts, of a router without groups."""
    spec = RouterSpec(
        *(logits.shape[1], num_chosen, cast(RouterScores, scores)),
        has_choice_bias=choice_bias is not None,
        normalizes=normalizes,
        min_sum=min_sum,
        scale=scale,
    )
    if not uses_triton(logits.device, "experts"):
        return choose_by_torch(logits, spec, choice_bias)
    from tokasaurus.model.decoder import triton_experts

    return triton_experts.choose(logits, spec, choice_bias)


choose_on_cuda = torch.library.custom_op("tokasaurus::choose_experts", _choose_on_cuda, mutates_args=())
"""One operation of torch, which a compiler leaves whole."""


@choose_on_cuda.register_fake
def _with_shapes_of_choice(
    logits: Tensor, _bias: Tensor | None, num_chosen: int, *_numbers: object
) -> tuple[Tensor, Tensor]:
    size = logits.shape[0], num_chosen
    return logits.new_empty(size, dtype=torch.int64), logits.new_empty(size)


def choose_by_torch(logits: Tensor, spec: RouterSpec, choice_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """As choose_experts."""
    if spec.scores == "sparsemixer":
        return _mix_sparsely(logits, spec)
    if spec.scores in ("softmax_of_chosen", "sigmoid_of_chosen"):
        scores = logits
    else:
        scores = logits.sigmoid() if spec.scores == "sigmoid" else logits.softmax(-1)
    for_choice = scores if choice_bias is None else scores + choice_bias
    if spec.num_groups > 1:
        groups = for_choice.view(len(scores), spec.num_groups, -1)
        chosen_groups = largest(groups.topk(2).values.sum(-1), spec.num_chosen_groups)
        is_left_out = torch.ones(groups.shape[:2], dtype=torch.bool, device=logits.device)
        is_left_out.scatter_(1, chosen_groups, False)
        for_choice = groups.masked_fill(is_left_out.unsqueeze(-1), -torch.inf).flatten(1)
    chosen = largest(for_choice, spec.num_chosen)
    weights = scores.gather(1, chosen)
    if spec.scores == "softmax_of_chosen":
        weights = weights.softmax(-1)
    elif spec.scores == "sigmoid_of_chosen":
        weights = weights.sigmoid()
    if spec.normalizes:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=spec.min_sum)
    return chosen, weights if spec.scale == 1 else weights * spec.scale


def sort_rows(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """experts: int64 [R], of each row, or num_experts if none has it -> the rows sorted by expert, int64 [R], in their
    order if they have the same; int32 [num_experts], where each expert's end."""
    if experts.device.type == "cuda":
        order, ends = (sort_on_cuda if torch.compiler.is_compiling() else _sort_on_cuda)(experts, num_experts)
        return order, ends
    return sort_by_torch(experts, num_experts)


def sort_by_torch(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """As sort_rows."""
    ordered, order = experts.sort(stable=True)
    indices = torch.arange(num_experts, device=experts.device)
    return order, torch.searchsorted(ordered, indices, right=True, out_int32=True)


def _sort_on_cuda(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """As sort_rows."""
    if not uses_triton(experts.device, "experts"):
        return sort_by_torch(experts, num_experts)
    from tokasaurus.model.decoder import triton_experts

    return triton_experts.sort_rows(experts, num_experts)


sort_on_cuda = torch.library.custom_op("tokasaurus::sort_by_expert", _sort_on_cuda, mutates_args=())
"""One operation of torch, which a compiler leaves whole."""


@sort_on_cuda.register_fake
def _with_shapes_of_sort(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(experts), experts.new_empty(num_experts, dtype=torch.int32)


def largest(scores: Tensor, count: int) -> Tensor:
    """scores: float32 [T, N] -> int64 [T, count]: indices of the largest, these first; of equal ones, the first are
    chosen, unlike by torch.topk."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # integers in the order of the numbers
    last = scores.shape[1] - 1
    indices = torch.arange(last, -1, -1, device=scores.device)
    return last - ((ordered << 32) | indices).topk(count).values.bitwise_and_(0xFFFFFFFF)


def _mix_sparsely(logits: Tensor, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    """As choose_experts."""
    left, all_chosen, weights = logits, list[Tensor](), list[Tensor]()
    for _ in range(spec.num_chosen):
        chosen = largest(left, 1)
        most = left.gather(1, chosen)
        is_far = (most - logits) / logits.abs().clamp(min=most) > 2 * spec.jitter
        weights.append(left.masked_fill(is_far, -torch.inf).softmax(-1).gather(1, chosen))
        left = left.scatter(1, chosen, -torch.inf)
        all_chosen.append(chosen)
    return torch.cat(all_chosen, 1), torch.cat(weights, 1)


@dataclass(frozen=True, slots=True)
class ExpertShard:
    """A matrix that each expert has in the checkpoint, and this rank's part of it."""

    source: str
    shape: tuple[int, int]
    rows: slice
    columns: slice

    @property
    def num_rows(self) -> int:
        return len(range(*self.rows.indices(self.shape[0])))


class ExpertLinear(Linear):
    """The same linear layer of N experts: weight [N * O, in], the outputs of one after those of another."""

    def __init__(
        self, own: range, num_experts: int, shards: Sequence[ExpertShard], bias: bool, dtype: torch.dtype
    ) -> None:
        """own: this rank's N among the checkpoint's num_experts. shards: of an expert; all have the same columns."""
        self.num_rows = sum(shard.num_rows for shard in shards)
        _, columns = shards[0].shape
        in_size = len(range(*shards[0].columns.indices(columns)))
        super().__init__(in_size, len(own) * self.num_rows, bias, dtype)
        self.num_experts = len(own)
        self._own = own
        self._num_all = num_experts
        self._shards = tuple(shards)

    @property
    def experts(self) -> ExpertWeights | None:
        """Packed for the kernels."""
        assert self.packed is None or isinstance(self.packed, ExpertWeights)
        return self.packed

    def pack(
        self,
        kernels: LayerKernels | None,
        choice: GemmChoice = ALWAYS_KERNELS,
        keep_weight: bool = False,
        packing: Packing = PLAIN,
    ) -> None:
        """For the kernels, if they multiply by such weights; else it stays as it is."""
        if kernels is None or choice.always_torch or not takes(self.weight):
            self.dequantise_blocks()
        elif packing.quantization is not None:
            self._quantization = packing.quantization
            self.packed = self._pack_each(kernels, self._quantized(packing.quantization, packing.is_int8))
            self.weight.data = self.weight.new_empty(0)
        else:
            super().pack(kernels, ALWAYS_KERNELS, keep_weight, packing)

    def multiply(self, x: Tensor, ends: Tensor) -> Tensor:
        """x [R, in], rows of expert n up to ends[n] -> [R, O], by torch; rows behind have no meaning. ends: int32
        [N]."""
        weight = self.weight.view(self.num_experts, self.num_rows, -1).to(x.dtype)
        product = grouped_product(x, weight, ends)
        if self.bias is None:
            return product
        experts = torch.searchsorted(ends, torch.arange(len(x), dtype=ends.dtype, device=x.device), right=True)
        return product + self.bias.view(self.num_experts, -1)[experts.clamp(max=self.num_experts - 1)].to(x.dtype)

    def weight_shards(self, prefix: str) -> list[WeightShard]:
        found = []
        for expert in range(self._num_all):
            row = (expert - self._own.start) * self.num_rows
            for shard in self._shards:
                name, rows = f"{prefix}{expert}.{shard.source}", slice(row, row + shard.num_rows)
                if expert not in self._own:
                    found.append(WeightShard(f"{name}.weight", shard.shape, (), None))
                    found += [] if self.bias is None else [WeightShard(f"{name}.bias", shard.shape[:1], (), None)]
                    continue
                functions = partial(self.write_weight, row), partial(self.take_blocks, row)
                part = shard.rows, shard.columns
                found.append(WeightShard(f"{name}.weight", shard.shape, part, self.weight[rows], *functions))
                if self.bias is not None:
                    write = partial(self.write_bias, row)
                    found.append(WeightShard(f"{name}.bias", shard.shape[:1], part[:1], self.bias[rows], write))
                row = rows.stop
        return found

    def _quantized(self, quantization: str, is_int8: bool) -> Iterator[BlockWeight]:
        """Each expert's weight when it is asked for: of all together, intermediate results take several times the
        memory. Arguments as of Packing."""
        for expert, own in enumerate(self.weight.data.view(self.num_experts, self.num_rows, -1)):
            yield BlockWeight(own.shape[1], own.dtype, (quantized(own, quantization),), is_int8)
            if expert % _EXPERTS_PER_RETURN == 0:
                return_freed_memory()

    def _by_expert(self, weight: Tensor | BlockWeight) -> list[Tensor | BlockWeight]:
        if isinstance(weight, Tensor):
            return [*weight.view(self.num_experts, self.num_rows, -1)]
        return [
            BlockWeight(weight.in_size, weight.dtype, _rows_of(weight.parts, first, self.num_rows), weight.is_int8)
            for first in range(0, weight.num_rows, self.num_rows)
        ]

    def _pack(self, kernels: LayerKernels, weight: Tensor | BlockWeight) -> ExpertWeights:
        return self._pack_each(kernels, self._by_expert(weight))

    def _pack_each(self, kernels: LayerKernels, weights: Iterable[Tensor | BlockWeight]) -> ExpertWeights:
        biases = None if self.bias is None else self.bias.view(self.num_experts, -1)
        return ExpertWeights(kernels, weights, biases=biases)

    def _fits(self, weight: BlockWeight, kernels: LayerKernels) -> bool:
        each = (each for each in self._by_expert(weight) if isinstance(each, BlockWeight))
        return all(PackedWeights.fits(expert, kernels.panel_size) for expert in each)


class ActivatedExpertLinear(ExpertLinear):
    """Gates and ups of N experts. The kernels give activation(gate) * up."""

    def __init__(
        self, own: range, num_experts: int, shards: Sequence[ExpertShard], spec: MLPSpec, dtype: torch.dtype
    ) -> None:
        super().__init__(own, num_experts, shards, spec.has_bias, dtype)
        self._spec = spec

    def activated(self, features: Tensor) -> Tensor:
        """[R, 2 W] -> [R, W]."""
        return activated(features, self._spec)

    def _pack_each(self, kernels: LayerKernels, weights: Iterable[Tensor | BlockWeight]) -> ExpertWeights:
        biases = None if self.bias is None else self.bias.view(self.num_experts, -1)
        options = self._spec.activation, biases, self._spec.gate_limits
        return ExpertWeights(kernels, weights, True, *options)

    def _fits(self, weight: BlockWeight, kernels: LayerKernels) -> bool:
        each = (each for each in self._by_expert(weight) if isinstance(each, BlockWeight))
        return all(PackedWeights.fits(expert, kernels.panel_size, True) for expert in each)


def _rows_of(parts: Sequence[BlockRows], first: int, num_rows: int) -> tuple[BlockRows, ...]:
    """Of all rows of the parts, num_rows from `first` on."""
    found, start = list[BlockRows](), 0
    for part in parts:
        rows = part.blocks[max(0, first - start) : max(0, first + num_rows - start)]
        found += [BlockRows(part.type, rows)] if len(rows) else []
        start += len(part.blocks)
    return tuple(found)


class Experts(nn.Module):
    """x [T, E] -> [T, E]: of each token, the sum of its experts' down(activation(gate(x)) * up(x)), each times its
    weight, and the shared expert's."""

    def __init__(self, spec: ExpertsSpec, hidden_size: int, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        expert, num_experts = spec.expert, spec.router.num_experts
        assert expert.is_gated
        is_whole = mesh.whole_experts
        start, length = (0, expert.width) if is_whole else mesh.shard(expert.width, "intermediate_size")
        own, everything = slice(start, start + length), slice(None)
        first, count = mesh.shard(num_experts, "experts") if is_whole else (0, num_experts)
        experts = range(first, first + count)
        inner, outer = (expert.width, hidden_size), (hidden_size, expert.width)
        gate_up = [ExpertShard(name, inner, own, everything) for name in ("gate_proj", "up_proj")]
        down = [ExpertShard("down_proj", outer, everything, own)]
        self.router = Router(spec.router, hidden_size, spec.has_shared_gate)
        self.gate_up = ActivatedExpertLinear(experts, num_experts, gate_up, expert, dtype)
        has_bias = expert.has_bias and (is_whole or mesh.tp_rank == 0)
        self.down = ExpertLinear(experts, num_experts, down, has_bias, dtype)
        self._first = first
        self.shared = None if spec.shared is None else MLP(spec.shared, hidden_size, mesh, dtype)
        self._mesh = mesh
        self._has_bias = expert.has_bias
        self._packed: PackedExperts | None = None

    @property
    def packed(self) -> PackedExperts | None:
        """For the kernels, once the weights are packed for them: with the router and the shared expert, unless these
        are not, or the ranks' sums come between."""
        gate_up, down, router, shared = self.gate_up.experts, self.down.experts, self.router.packed_whole, None
        if self._packed is not None or gate_up is None or down is None:
            return self._packed
        own_router = None
        if router is not None and self._mesh.tp_size == 1:
            own_router = PackedRouter(self.router.spec, router, self.router.choice_bias)
        if self.shared is not None:
            shared = self.shared.packed
            own_router = None if shared is None else own_router
        shared = None if own_router is None else shared
        self._packed = PackedExperts(gate_up, down, own_router, shared, self.router.spec.weighs_inputs)
        return self._packed

    def record(self, chosen: Tensor | None) -> None:
        """From now on, forwards write their tokens' experts to chosen, int32 [>= T, K], contiguous; None: no longer."""
        self.router.recorded = chosen
        if self.packed is not None:
            self.packed.record(chosen)

    def forward(self, x: Tensor, norm: Norm | None) -> Tensor:
        """norm: applied to x first."""
        if self.packed is not None and self.packed.has_router:
            return self.packed.routed(x, None if norm is None else norm.packed)
        x = x if norm is None else norm(x)
        chosen, weights, shared_gate = self.router.route(x)
        own = sum_over_shards(self._of_chosen(x, chosen, weights), self._mesh)
        if self.shared is None:
            return own
        shared: Tensor = self.shared(x, None)
        return own + (shared * shared_gate.to(x.dtype) if shared_gate.shape[1] else shared)

    def _of_chosen(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """This rank's part of the chosen experts' sum, [T, E]."""
        chosen = chosen - self._first if self._mesh.whole_experts else chosen
        if self.packed is not None:
            return self.packed(x, chosen, weights)
        num_chosen, num_experts = chosen.shape[1], self.gate_up.num_experts
        if self._mesh.whole_experts:  # rows of other ranks' experts come last
            chosen = torch.where((chosen >= 0) & (chosen < num_experts), chosen, num_experts)
        order, ends = sort_rows(chosen.flatten(), num_experts)
        rows, weighs_inputs = x[order // num_chosen], self.router.spec.weighs_inputs
        if weighs_inputs:
            rows = (rows * weights.flatten()[order].unsqueeze(1)).to(x.dtype)
        features = self.gate_up.activated(self.gate_up.multiply(rows, ends))
        by_expert = self.down.multiply(features, ends)
        by_token = torch.empty(by_expert.shape, dtype=torch.float32, device=x.device)
        is_elsewhere = torch.arange(len(order), device=x.device) >= ends[-1]
        by_token[order] = by_expert.float().masked_fill(is_elsewhere.unsqueeze(1), 0)
        of_experts = by_token.view(*chosen.shape, -1)
        return (of_experts if weighs_inputs else of_experts * weights.unsqueeze(-1)).sum(1).to(x.dtype)

    def weight_shards(self, prefix: str) -> list[WeightShard]:
        shards = self.router.weight_shards(prefix)
        shards += self.gate_up.weight_shards(f"{prefix}experts.") + self.down.weight_shards(f"{prefix}experts.")
        if self._has_bias and self.down.bias is None:  # the first rank has them
            shards += [
                WeightShard(f"{prefix}experts.{expert}.down_proj.bias", (self.down.num_rows,), (), None)
                for expert in range(self.router.spec.num_experts)
            ]
        return shards if self.shared is None else shards + self.shared.weight_shards(f"{prefix}shared.")


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [R, in], weight [N, O, in], ends int32 [N] -> [R, O]: rows up to ends[n], from those of n - 1 on, times the
    weight of n. Rows behind the last end have no meaning."""
    if x.device.type == "cuda":
        return (multiply_groups if torch.compiler.is_compiling() else _multiply_groups)(x, weight, ends)
    # Elsewhere, and where torch compiles, it multiplies no other numbers.
    if x.dtype == torch.bfloat16 or (x.device.type == "cpu" and not torch.compiler.is_compiling()):
        return functional.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return product_by_masks(x, weight, ends)


def _multiply_groups(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """As grouped_product, on CUDA."""
    if not uses_triton(x.device, "experts"):
        return product_by_masks(x, weight, ends)
    if x.dtype == torch.bfloat16 and _has_grouped_product(x.device, x.shape[1], weight.shape[1]):
        return functional.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    from tokasaurus.model.decoder import triton_experts

    return triton_experts.multiply_groups(x, weight, ends)


multiply_groups = torch.library.custom_op("tokasaurus::multiply_groups", _multiply_groups, mutates_args=())
"""One operation of torch, which a compiler leaves whole."""


@multiply_groups.register_fake
def _with_its_shape(x: Tensor, weight: Tensor, _ends: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[1]))


@functools.cache
def _has_grouped_product(device: torch.device, *sizes: int) -> bool:
    """Whether torch has a kernel for bfloat16, which reads rows of multiples of 16 bytes. sizes: of rows."""
    return torch.cuda.get_device_capability(device)[0] in (9, 10) and not any(size % 8 for size in sizes)


def product_by_masks(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """As grouped_product: each weight times all rows, which needs no numbers of rows on the host."""
    rows = torch.arange(len(x), device=x.device).unsqueeze(1)
    out, start = x.new_zeros((len(x), weight.shape[1])), ends.new_zeros(())
    for own, end in zip(weight, ends, strict=True):
        out = torch.where((rows >= start) & (rows < end), x @ own.T, out)
        start = end
    return out
