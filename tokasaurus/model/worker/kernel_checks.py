"""All layers against torch's modules; each Triton kernel by itself against plain torch, at the sizes of a model, for
`toka check` and the GPU tests; decode steps that the CPU kernels compute in one call, against the same steps taken
apart, which draw the same tokens.

A start checks what the kernels compute together (self_check.py), and takes the comparison of sampling alone from here.
Inputs are small, but have the sizes of the model: they compile the variants that steps launch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokasaurus.messages.generation import SAMPLING_DTYPE
from tokasaurus.messages.sampling import CLIENT_PARAMETERS, LIMITS, PENALTIES, SamplingParams
from tokasaurus.model.attention.backend import BlockLists, KVShape, RecordedMemory, as_stored
from tokasaurus.model.attention.block_lists import fill_lists_by_torch, lists_in
from tokasaurus.model.attention.row_split import count_sinks, merge_partial
from tokasaurus.model.buffer_sizes import num_mask_words
from tokasaurus.model.cpu.low_rank import LowRankRows
from tokasaurus.model.decoder.decoder import Decoder, zero_nonfinite
from tokasaurus.model.decoder.experts import (
    Experts,
    choose_by_torch,
    choose_experts,
    grouped_product,
    product_by_masks,
    sort_by_torch,
    sort_rows,
)
from tokasaurus.model.decoder.row_adapters import LowRankSlots, RowAdapters, TiledRows
from tokasaurus.model.execution.executors import FusedExecutor, has_fused_layers
from tokasaurus.model.execution.recorded_inputs import RecordedInputs, SlotState, StagedRows, fill_inputs_by_torch
from tokasaurus.model.execution.runner import ModelRunner
from tokasaurus.model.sampling.finish import finish_by_torch
from tokasaurus.model.sampling.rules import (
    DeviceMasks,
    RuledRows,
    choose_rows,
    has_limits,
    limited_rows,
    params_to_device,
)
from tokasaurus.model.sampling.sample import Sampled, SamplingRows, TopRows, sample_by_torch, sample_by_triton
from tokasaurus.model.staging.staging import DirectStaging
from tokasaurus.model.triton_choice import KernelGroup, groups_in_use, uses_triton
from tokasaurus.model.worker.self_check import (
    NUM_SEQUENCES,
    TOLERANCES,
    Checks,
    Measure,
    Measured,
    Prompts,
    SeededNumbers,
    compared,
    measure_layers,
)
from tokasaurus.model.worker.warmup import ForwardLimits
from tokasaurus.workers import max_adapter_rank, num_adapters

if TYPE_CHECKING:
    from tokasaurus.model.worker.start import Start

# T tokens in this forward, H query heads, D head size

_OPTIONS = (
    SamplingParams(temperature=0.0),
    SamplingParams(),
    *(SamplingParams(**{name: CLIENT_PARAMETERS[name].strong}) for name in ("temperature", *LIMITS)),  # type: ignore[arg-type]
    # Limits come after the division, which leaves more tokens inside.
    *(SamplingParams(2.0, **{name: CLIENT_PARAMETERS[name].strong}) for name in LIMITS),  # type: ignore[arg-type]
)
_ROWS_PER_OPTION = 4
_NUM_TOP = 5
_CONTEXT_TOKENS = 20
_CHECKED_RANK = 64


def check_triton(start: Start) -> str:
    """Check the Triton kernels of sampling, layers, experts and adapters. Kernels of attention and of steps are checked
    on the way."""
    model, shape = start.model, start.shape
    own_layers = start.backend, shape, start.mesh, None, 1, start.limits.context_length
    measures: dict[KernelGroup, Measure] = {
        "sampling": partial(compare_sampler, model.vocab_size, model.activation_dtype, shape.device),
        "layers": lambda: measure_layers(FusedExecutor(start.decoder), start.decoder, *own_layers),
    }
    if start.info.is_native and any(_layers_with_experts(start.decoder)):
        measures["experts"] = partial(compare_experts, start.decoder)
    if num_adapters(start.config) and start.info.is_native:
        measures["adapters"] = partial(compare_low_rank, start.decoder, max_adapter_rank(start.config))
    if not has_fused_layers(model.spec.layers):
        del measures["layers"]
    for group in groups_in_use(start.device, *measures):
        start.checks.check_kernels(group, measures[group])
    return ""


def check_layers(start: Start, flag: str | None = None) -> bool:
    """Whether all layers, compiled or not, compute what torch's modules do. flag: as in Checks.passes."""
    measure = partial(
        measure_layers,
        *(start.runner.executor, start.model, start.backend, start.shape, start.mesh, start.compiler),
        *(start.runner.token_multiple, start.limits.context_length),
    )
    if start.compiler is None:
        return start.checks.describe_wrong("layers", measure) is None
    what, without = "torch_compile is", "the layers run uncompiled, which is slower"
    return start.checks.passes("torch_compile", measure, what, without, flag)


def compile_layers(start: Start) -> str:
    """Compile the layers; switch the compiler off on all ranks if it fails, which it logs itself, or if they compute
    wrongly."""
    compiler = start.compiler
    assert compiler is not None
    if not check_layers(start, "torch_compile=T" if start.config.torch_compile else None):
        compiler.switch_off()
    elif not start.least(int(not compiler.has_failed)):
        compiler.switch_off()
        start.checks.leave_out("torch_compile", "it does not compile here")
    return ""


def check_each_kernel(shape: KVShape, model: Decoder, checks: Checks) -> None:
    """Check each group of kernels that is in use here, and switch it off if one of its kernels is wrong."""
    for group, measure in measures(shape, model).items():
        checks.check_kernels(group, measure)


def measures(shape: KVShape, model: Decoder) -> dict[KernelGroup, Measure]:
    """The comparisons of each group of kernels that is in use on this device."""
    every: dict[KernelGroup, Measure] = {
        "attention": partial(compare_attention, shape),
        "sampling": partial(compare_sampler, model.vocab_size, model.activation_dtype, shape.device),
        "layers": partial(compare_layers, model),
        "steps": partial(compare_inputs, shape),
        "adapters": partial(compare_low_rank, model, _CHECKED_RANK),
        "experts": partial(compare_experts, model),
    }
    if not any(_layers_with_experts(model)):
        del every["experts"]
    return {group: measure for group, measure in every.items() if uses_triton(shape.device, group)}


def compare_attention(shape: KVShape) -> Iterator[Measured]:
    from tokasaurus.model.attention import triton_kernels

    device, page_size = shape.device, shape.page_size
    num_heads, head_dim = shape.num_kv_heads, shape.head_dim
    random = SeededNumbers(device)
    tolerance = max(TOLERANCES[shape.dtype], TOLERANCES[shape.query_dtype])
    # New keys and values as the projections give them: slices of one tensor. One token is padding.
    heads = random.normal((3, 2 * num_heads, head_dim), shape.query_dtype)
    key, value = heads[:, :num_heads], heads[:, num_heads:]
    kv_indices = torch.tensor([3 * page_size - 1, page_size, 0], device=device)
    for is_by_head in (False, True):
        size = (2, num_heads, 3 * page_size, head_dim) if is_by_head else (2, 3 * page_size, num_heads, head_dim)
        cache = torch.zeros(size, dtype=shape.dtype, device=device)
        by_token = cache.transpose(1, 2) if is_by_head else cache
        expected = by_token.clone()
        triton_kernels.write_kv(by_token[0], by_token[1], key, value, kv_indices, page_size)
        for index, new in enumerate((key, value)):
            expected[index][kv_indices[:2]] = as_stored(new[:2], shape.dtype)
        yield compared("write_kv", by_token, expected, tolerance)

    for dtype in dict.fromkeys((torch.float32, shape.query_dtype)):
        outputs = [random.normal((5, shape.num_heads, head_dim), dtype) for _ in range(2)]
        lses = [3 * random.normal((5, shape.num_heads), torch.float32) for _ in range(2)]
        lses[0][1:3], lses[1][2:4] = -torch.inf, -torch.inf
        first, second = zip(outputs, lses, strict=True)
        # The merged rows are the first ones of the forward, which may have more.
        found, expected = (
            torch.zeros_like(outputs[0][:1].expand(7, -1, -1), dtype=shape.query_dtype) for _ in range(2)
        )
        for is_base_2 in (False, True):
            triton_kernels.merge_partial(first, second, found[:5], is_base_2)
            merge_partial(first, second, expected[:5], is_base_2)
            yield compared("merge_partial", found, expected, tolerance)
        sinks, (output, lse) = random.normal((shape.num_heads,), torch.float32), second
        counted, by_torch = ((output.clone(), lse.clone()) for _ in range(2))
        triton_kernels.count_sinks(*counted, sinks)
        count_sinks(*by_torch, sinks)
        for name, found, expected in zip(("count_sinks", "count_sinks (LSE)"), counted, by_torch, strict=True):
            yield compared(name, found, expected, tolerance)

    lengths = torch.tensor([3 * page_size, 1, 2 * page_size + 1, 0], dtype=torch.int32, device=device)
    tables = torch.arange(40, dtype=torch.int32, device=device).view(4, 10)
    first_entries = torch.tensor([10, 3, 31, 0], device=device)
    ours, plain = (_empty_lists(lengths, [0, 3, 4, 7, 7]) for _ in range(2))
    triton_kernels.fill_lists(tables, first_entries, page_size, ours)
    fill_lists_by_torch(tables, first_entries, page_size, plain)
    for name in ("starts", "blocks", "last_lengths"):
        yield compared(f"fill_lists ({name})", getattr(ours, name), getattr(plain, name), 0)


def compare_sampling(
    vocab_size: int, dtype: torch.dtype, device: torch.device, sampler: Callable[[Tensor, SamplingRows], Sampled]
) -> Iterator[Measured]:
    """dtype: of logits. sampler: compared with `sample_by_torch`."""
    random = SeededNumbers(device)
    num_rows = len(_OPTIONS) * _ROWS_PER_OPTION
    logits = 2 * random.normal((num_rows, vocab_size), dtype)
    peaks = random.integers((num_rows, 1), vocab_size)
    logits.scatter_(1, peaks, 12)  # so that greedy rows do not tie
    logits[-1, vocab_size // 2] = torch.nan
    params = np.repeat(np.array([*_OPTIONS], SAMPLING_DTYPE), _ROWS_PER_OPTION)
    for name in PENALTIES:
        params[name] = CLIENT_PARAMETERS[name].strong
    staging = DirectStaging(device)
    rows = SamplingRows(
        params=params,
        device_params=params_to_device(params, device),
        noise_keys=random.integers((num_rows, 2), 2**32),
        any_logprobs=True,
        limited=limited_rows(has_limits(params), staging),
        top=TopRows(choose_rows(np.arange(0, num_rows - 1, 3), staging), min(_NUM_TOP, vocab_size)),
    )
    yield from _compare_draws("sampling", logits, rows, sampler)
    # Contexts of each second row's largest logits, so that penalties and biases change what is drawn.
    ruled = choose_rows(np.arange(1, num_rows, 2), staging)
    count = len(ruled.on_host)
    num_context = min(_CONTEXT_TOKENS, vocab_size)
    tokens = logits[ruled.on_device].nan_to_num(0).topk(num_context).indices.int()
    bias_starts = np.arange(count + 1)
    lengths = torch.full((count,), num_context, dtype=torch.int32, device=device)
    rules = RuledRows(
        rows=ruled,
        tokens=tokens.flatten(),
        page_size=num_context,
        block_tables=torch.arange(count, dtype=torch.int32, device=device).unsqueeze(1),
        lengths=lengths,
        num_request_tokens=lengths // 2,
        bias_starts=bias_starts,
        device_bias_starts=torch.from_numpy(bias_starts).to(device),
        bias_ids=tokens[:, 0].contiguous(),
        bias_values=torch.full((count,), -5.0, device=device),
    )
    masked = choose_rows(np.arange(0, num_rows, 3), staging)
    bits = random.integers((len(masked.on_host), num_mask_words(vocab_size)), 2**31).int()
    bits[:, 0] |= 1  # at least one token is allowed
    changed = replace(rows, rules=rules, masks=DeviceMasks(masked, bits))
    yield from _compare_draws("sampling with penalties, biases and masks", logits, changed, sampler)


def compare_sampler(vocab_size: int, dtype: torch.dtype, device: torch.device) -> Iterator[Measured]:
    """The Triton sampler, and how it finishes rows. dtype: of logits."""
    from tokasaurus.model.sampling import triton_sample

    yield from compare_sampling(vocab_size, dtype, device, sample_by_triton)
    random = SeededNumbers(device)
    for num_rows in (1, 6):  # a row in many parts, and several in fewer
        logits, hidden = random.normal((num_rows, vocab_size), dtype), random.normal((num_rows, 80), dtype)
        logits.scatter_(1, random.integers((num_rows, 1), vocab_size), 12)
        params = np.array([SamplingParams(temperature=0.0)] * num_rows, SAMPLING_DTYPE)
        if num_rows > 1:
            logits[1, vocab_size // 2], hidden[2, 79] = torch.nan, torch.inf
        slots, memory = torch.arange(num_rows, 0, -1, device=device), random.integers((num_rows + 3,), 9)
        rows = SamplingRows(
            params, params_to_device(params, device), random.integers((num_rows, 2), 2**32), True, limited=None
        )
        tokens, logprobs, *_ = sample_by_torch(logits, rows)
        last_tokens = [memory.clone() for _ in range(3)]
        expected = finish_by_torch(tokens, logprobs, hidden, slots, last_tokens[0])
        drawn = triton_sample.draw_and_finish(
            logits, rows.device_params, rows.noise_keys, hidden, slots, last_tokens[1]
        )
        alone = triton_sample.finish(tokens, logprobs, hidden, slots, last_tokens[2])
        is_usable = tokens >= 0
        for name, found, last in (("drawn", drawn, last_tokens[1]), ("sampled", alone, last_tokens[2])):
            what = f"rows finished as they are {name}"
            yield compared(what, found.tokens, expected.tokens, 0)
            yield compared(f"{what} (packed)", found.packed[:, ::2], expected.packed[:, ::2], 0)
            found_logprobs, expected_logprobs = (
                one.packed[is_usable, 1].view(torch.float32) for one in (found, expected)
            )
            yield compared(f"{what} (logprobs)", found_logprobs, expected_logprobs, TOLERANCES[torch.float32])
            yield compared(f"{what} (last tokens)", last, last_tokens[0], 0)


def _compare_draws(
    name: str, logits: Tensor, rows: SamplingRows, sampler: Callable[[Tensor, SamplingRows], Sampled]
) -> Iterator[Measured]:
    found, expected = sampler(logits, rows), sample_by_torch(logits, rows)
    differs = found.tokens != expected.tokens
    # In one row, a near tie may go the other way.
    yield Measured(f"{name} (share of tokens)", float(differs.double().mean()), 1 / len(differs))
    is_same = ~differs & (expected.tokens >= 0)
    assert found.logprobs is not None
    assert expected.logprobs is not None
    tolerance = TOLERANCES[torch.float32]
    yield compared(f"{name} (logprobs)", found.logprobs[is_same], expected.logprobs[is_same], tolerance)
    assert found.top_ids is not None
    assert found.top_logprobs is not None
    assert expected.top_ids is not None
    assert expected.top_logprobs is not None
    assert rows.top is not None
    yield compared(f"{name} (top_logprobs)", found.top_logprobs, expected.top_logprobs, tolerance)
    own = logits[rows.top.rows.on_device]  # of equal logits, either token may come first
    of_ids, of_expected = (own.gather(1, ids.long()) for ids in (found.top_ids, expected.top_ids))
    yield compared(f"{name} (top_ids)", of_ids, of_expected, 0)


def compare_layers(model: Decoder) -> Iterator[Measured]:
    from tokasaurus.model.decoder import triton_layers

    layer = next(iter(model.decoder_layers()))
    norm, mlp_norm = layer.attention_norm, layer.mlp_norm
    if not FusedExecutor.computes(layer.spec) or norm is None or mlp_norm is None:
        return
    attention = layer.own_attention
    dtype = norm.own_weight.dtype
    tolerance = TOLERANCES[dtype]
    random = SeededNumbers(model.device)
    heads = attention.num_heads, attention.num_kv_heads
    features = random.normal((4, (heads[0] + 2 * heads[1]) * model.head_dim), dtype)
    features[2, -1] = torch.inf
    angles = 9 * random.normal((4, 1, model.head_dim // 2), torch.float32)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    weights, eps = None, 0.0
    if attention.query_norm is not None and attention.key_norm is not None:
        weights, eps = (attention.query_norm.own_weight, attention.key_norm.own_weight), attention.query_norm.eps
    *found, poison = triton_layers.rotate_heads(features, cos_sin, *heads, weights, eps)
    query, key, value = attention.split_heads(attention.heads(features), cos_sin)
    key, value, is_finite = zero_nonfinite(key, value)
    for name, ours, plain in zip(("query", "key", "value"), found, (query, key, value), strict=True):
        yield compared(f"rotate_heads ({name})", ours, plain, tolerance)
    expected_poison = torch.where(is_finite, 0.0, torch.nan)
    yield compared("rotate_heads (poison)", poison, expected_poison, 0)

    hidden, addend = (random.normal((4, model.hidden_size), dtype) for _ in range(2))
    yield compared("add_norm", triton_layers.add_norm(hidden, None, norm.own_weight, norm.eps), norm(hidden), tolerance)
    for given in (None, expected_poison):
        total = hidden.clone()
        normed = triton_layers.add_norm(total, addend, mlp_norm.own_weight, mlp_norm.eps, given)
        expected = hidden + addend
        if given is not None:
            expected = torch.where(is_finite[:, None], expected, torch.nan)
        yield compared("add_norm (sum)", total, expected, tolerance)
        yield compared("add_norm (norm)", normed, mlp_norm(expected), tolerance)
    gate_up = random.normal((4, 2 * layer.dense_mlp.gate_up.length), dtype)
    yield compared("silu_mul", triton_layers.silu_mul(gate_up), layer.dense_mlp.gate_up.activate(gate_up), tolerance)


def compare_low_rank(model: Decoder, max_rank: int) -> Iterator[Measured]:
    """What adapters add to the linear layers of the first decoder layer, in few rows and in many, by two adapters;
    each third row has none."""
    layer, parts = next(iter(model.decoder_layers())), model.parts_of_linears()
    for num_rows, (name, linear) in itertools.product(
        (5, 600), zip(("qkv", "out", "gate and up", "down"), layer.dense_linears(), strict=False)
    ):
        random, weight = SeededNumbers(model.device), linear.weight.data
        rows = TiledRows(2, max_rank, num_rows, model.device)
        slots, plain = LowRankSlots(rows, parts[linear], weight), RowAdapters(2)
        numbers = np.arange(num_rows, dtype=np.int32) % 3
        adapters = dict[int, list[LowRankRows]]()
        for number, rank in ((1, max_rank), (2, 1)):
            adapters[number] = [
                LowRankRows(
                    first_row,
                    random.normal((rank, weight.shape[1]), weight.dtype) / weight.shape[1] ** 0.5,
                    random.normal((num_outputs, rank), weight.dtype) / rank**0.5,
                )
                for first_row, num_outputs in parts[linear]
            ]
            slots.place(number, adapters[number])
        rows.stage(numbers, DirectStaging(model.device))
        plain.set(numbers, model.device)
        x, out = (random.normal((num_rows, size), weight.dtype) for size in weight.shape[::-1])
        expected = plain.added(out.clone(), x, adapters)
        slots.add(out, x)
        yield compared(f"adapters of {name}, {num_rows} rows", out, expected, TOLERANCES[weight.dtype])


def _layers_with_experts(model: Decoder) -> Iterator[Experts]:
    return (layer.mlp for layer in model.decoder_layers() if isinstance(layer.mlp, Experts))


def compare_experts(model: Decoder) -> Iterator[Measured]:
    """The choice of experts, the rows sorted by them, and the products with their own rows, by torch's kernel or ours,
    in the first layer with experts: few rows, and many, of which one expert has most. Some experts have none, and the
    last rows no expert."""
    mlp = next(_layers_with_experts(model), None)
    if mlp is not None:
        random, spec = SeededNumbers(model.device), mlp.router.spec
        for num_rows in (1, 2000):
            logits = random.normal((num_rows, spec.num_experts), torch.float32)
            given = logits, spec, mlp.router.choice_bias
            (chosen, weights), (own, of_own) = choose_experts(*given), choose_by_torch(*given)
            yield compared(f"experts chosen, {num_rows} rows", chosen, own, 0)
            yield compared(f"weights of experts, {num_rows} rows", weights, of_own, TOLERANCES[torch.float32])
            rows = random.integers((num_rows,), spec.num_experts + 1), spec.num_experts
            for ours, plain in zip(sort_rows(*rows), sort_by_torch(*rows), strict=True):
                yield compared(f"{num_rows} rows sorted by expert", ours, plain, 0)
    for name, linear in () if mlp is None else (("gate and up", mlp.gate_up), ("down", mlp.down)):
        random, count, dtype = SeededNumbers(model.device), linear.num_experts, linear.weight.dtype
        weight = linear.weight.data.view(count, linear.num_rows, -1)
        for num_rows in (7, 33 * count):
            counts = torch.zeros(count, dtype=torch.int32, device=model.device)
            counts[[0, -1]] = torch.tensor([num_rows - 5, 3], dtype=torch.int32, device=model.device)
            ends = counts.cumsum(0, dtype=torch.int32)
            x = random.normal((num_rows, weight.shape[2]), dtype)
            found, expected = grouped_product(x, weight, ends), product_by_masks(x, weight, ends)
            are_there = slice(0, num_rows - 2)
            what = f"experts' {name}, {num_rows} rows"
            yield compared(what, found[are_there], expected[are_there], TOLERANCES[dtype])


def compare_inputs(shape: KVShape) -> Iterator[Measured]:
    """What recorded decode steps read: of four rows, one of them padding; with block lists and without."""
    from tokasaurus.model.execution import triton_inputs

    device, page_size = shape.device, shape.page_size
    random = SeededNumbers(device)
    lengths = torch.tensor([3 * page_size, 1, 2 * page_size + 1, 1], dtype=torch.int32, device=device)
    staged = StagedRows(
        torch.tensor([3, 1, 4, 0], device=device),
        lengths.long() - 1,
        torch.tensor([3 * page_size - 1, page_size, 4 * page_size, 0], device=device),
        random.integers((4, 2), 2**32),
        torch.tensor([-1, 77, -1, -1], dtype=torch.int32, device=device),
    )
    tables = torch.arange(40, dtype=torch.int32, device=device).view(5, 8)
    params = params_to_device(np.array([*_OPTIONS[:5]], SAMPLING_DTYPE), device)
    last_tokens = random.integers((5,), 1000)
    for has_lists in (False, True):
        results = []
        for fill in (triton_inputs.fill_inputs, fill_inputs_by_torch):
            inputs = RecordedInputs.allocate(4, 4, RecordedMemory.allocate(4, 8, device), device)
            lists = lists_in(inputs.memory, _empty_lists(lengths, [0, 3, 4, 7, 8])) if has_lists else None
            tokens = torch.zeros(5 * page_size, dtype=torch.int32, device=device)
            state = SlotState(last_tokens, tokens, params, tables.clone())
            fill(staged, state, page_size, inputs, lists)
            own = inputs.slots, inputs.token_ids, inputs.positions, inputs.noise_keys, inputs.device_params
            results.append((*own, *inputs.memory, state.tokens, state.block_tables))
        for found, expected in zip(*results, strict=True):
            yield compared(f"fill_inputs{' with lists' if has_lists else ''}", found, expected, 0)


def _empty_lists(kv_lengths: Tensor, starts: list[int]) -> BlockLists:
    """starts: of each segment's blocks, and the end of the last."""
    size = {"starts": len(starts), "blocks": starts[-1], "last_lengths": len(kv_lengths)}
    empty = {name: kv_lengths.new_full((length,), -1) for name, length in size.items()}
    host_starts = torch.tensor(starts, dtype=torch.int32)
    query_starts = torch.arange(len(starts), dtype=torch.int32, device=kv_lengths.device)
    return BlockLists(host_starts, query_starts=query_starts, kv_lengths=kv_lengths, **empty)


@torch.inference_mode()
def measure_one_call_decode(
    runner: ModelRunner, page_size: int, num_blocks: int, limits: ForwardLimits
) -> Iterator[Measured]:
    """Tokens of decode steps of one row and of several, each followed by a step that reads what it has stored, against
    the tokens of the same steps in separate calls.

    Overwrites blocks of the KV cache. num_blocks: without the padding block."""
    prompts = Prompts(page_size, num_blocks, limits)
    if (first := prompts.prefill()) is not None:
        runner.compute_alone(first, None, None)
    for num_rows in dict.fromkeys((1, min(NUM_SEQUENCES, limits.max_seqs))):
        at_once, apart = list[NDArray[np.int32]](), list[NDArray[np.int32]]()
        for turn in (0, 1):
            step = prompts.decode(num_rows, [], turn)
            token_ids = torch.from_numpy((prompts.sequences(num_rows, turn) * 7 + turn) % limits.vocab_size)
            at_once.append(runner.decode_alone(step, token_ids, prompts.num_decodes))
            with runner.launching():
                apart.append(runner.decode_alone(step, token_ids, prompts.num_decodes))
        share = float(np.mean(np.concatenate(at_once) != np.concatenate(apart)))
        yield Measured(f"decode of {num_rows} rows in one call: share of tokens", share, 0.0)
