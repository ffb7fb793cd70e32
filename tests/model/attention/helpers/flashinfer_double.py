"""FlashInfer's wrappers on the CPU, slowly: they check how they are called, then compute with FlashInfer's conventions.

LSE of base 2; outputs of the planned dtype, one that FlashInfer has, from sums in float32; 0 and -inf for a row that
sees no token; a causal row sees the tokens up to its own, the last row being the last token. A window begins
`window_left` tokens before a row's own position, whether it is causal or not. Computed in float32, one segment at a
time.
"""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.attention.helpers.flashinfer_source import DECODE, PREFILL, recorded_dtypes, recorded_signatures
from tests.model.helpers.pretend_device import contents_of
from tokasaurus.model import buffer_sizes
from tokasaurus.model.attention import flashinfer_backend

# S segments, N blocks of all segments, R rows, H query heads, K key/value heads, D head size, P page size, L tokens

CPU = torch.device("cpu")


@dataclass
class _Plan:
    options: dict[str, Any]
    starts: list[int]
    """Of the segments' rows; S + 1."""

    kv_starts: list[int]
    blocks: Tensor
    last_lengths: list[int]
    causal: bool


class _Wrapper:
    """What both wrappers share."""

    NAME: str
    KERNELS: tuple[str, ...] = ("fa2",)
    any_dtype = False
    """Whether to accept dtypes that FlashInfer has no kernels for."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._bind("__init__", args, options)
        workspace, layout = args
        assert workspace.dtype == torch.uint8
        assert workspace.device != CPU or not workspace.any(), "FlashInfer wants a workspace that starts as zeros"
        assert layout == "NHD"
        assert options["backend"] in self.KERNELS, "others have other conventions, auto chooses by version and device"
        self._device = workspace.device
        self._init_options = options
        self._plan: _Plan | None = None
        self.plan_memory = 8 << 20
        self._plan_memory: Tensor | None = None
        """Other wrappers may share it. None: its own."""
        self.num_plans = self.num_runs = 0
        self.most_rows = 0
        """Of a recorded prefill wrapper: the rows of its first plan."""

    def _bind(self, method: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        for version, signature in recorded_signatures(self.NAME, method).items():
            try:
                signature.bind(*args, **options)
            except TypeError as error:
                raise AssertionError(f"{self.NAME}.{method} of FlashInfer {version}: {error}") from error

    def reset_workspace_buffer(self, *args: Any, **options: Any) -> None:
        self._bind("reset_workspace_buffer", args, options)
        assert all(buffer.dtype == torch.uint8 and buffer.device == self._device for buffer in args)
        self.plan_memory = len(args[1])
        self._plan_memory = args[1]

    def _check_longest(self, kv_starts: Tensor, last_lengths: Tensor, options: dict[str, Any]) -> None:
        """Without `seq_lens` of one element, `plan` of 0.6.18 takes the maximum of all lengths in Python: slowly."""
        lengths = (kv_starts.diff() - 1).clamp_min(0) * options["page_size"] + last_lengths
        longest = options.pop("seq_lens")
        assert longest.device == CPU
        assert longest.tolist() == [lengths.max()]

    def _note_plan(self, lists: tuple[Tensor, ...], causal: bool, options: dict[str, Any]) -> None:
        starts, kv_starts, blocks, last_lengths = lists
        for array in lists:
            assert array.dtype == torch.int32
            assert array.dim() == 1
            assert array.is_contiguous()
        assert blocks.device == self._device, "run reads it there"
        for array in (starts, kv_starts, last_lengths):
            assert array.device == CPU, "plan would wait for the device"
        assert len(starts) == len(kv_starts) == len(last_lengths) + 1
        assert starts[0] == kv_starts[0] == 0
        assert (starts.diff() >= 0).all()
        assert (kv_starts.diff() >= 0).all()
        assert kv_starts[-1] == len(blocks)
        is_empty = kv_starts.diff() == 0
        assert (last_lengths[is_empty] == 0).all(), "FlashInfer adds it to the length of a segment without blocks"
        assert (last_lengths[~is_empty] >= 1).all()
        assert (last_lengths <= options["page_size"]).all()
        for name in ("q_data_type", "kv_data_type", "o_data_type"):
            assert isinstance(options[name], torch.dtype)
            for version, dtypes in recorded_dtypes(name).items():
                assert self.any_dtype or options[name] in dtypes, f"{options[name]} as {name} in FlashInfer {version}"
        assert options["num_qo_heads"] % options["num_kv_heads"] == 0
        # PrefillPlanImpl without a recording: tiles by the mean of the segments' rows. With one: by the most rows of a
        # segment, and as many as any segments of so many rows need.
        group = options["num_qo_heads"] // options["num_kv_heads"]
        packed = starts.diff() * group
        if self._init_options.get("use_cuda_graph"):
            most_rows = self.most_rows or len(packed)
            longest = (most_rows - len(packed) + 1) * group
            tile = 16 if longest <= 16 else 64 if longest <= 64 else 128
            num_tiles = max(264 // options["num_kv_heads"], -(-most_rows * group // tile) + len(packed) - 1)
        else:
            most_rows = int(starts[-1])
            mean = packed.sum() // len(packed)
            num_tiles = int((-(-packed // (16 if mean <= 16 else 64 if mean <= 64 else 128))).sum())
        assert 13 * num_tiles + 4 * (len(starts) + most_rows + 3) <= self.plan_memory, "plan would fail"
        assert options.get("window_left", -1) >= -1
        assert options.get("logits_soft_cap", 0.0) >= 0, "0 is none"
        if self._plan_memory is not None:
            _planned_last[contents_of(self._plan_memory).data_ptr()] = self
        # The blocks are kept as they are: on a device they are filled after the plan.
        self._plan = _Plan(options, starts.tolist(), kv_starts.tolist(), blocks, last_lengths.tolist(), causal)
        self.num_plans += 1

    def run(self, *args: Any, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
        """query [R, H, D]; key and value of a layer, [blocks, P, K, D] -> [R, H, D], and LSE [R, H] in float32 if it is
        asked for."""
        self._bind("run", args, options)
        query, kv_cache = args
        output, lse = self._run(query, kv_cache, options["out"])
        return (output, lse) if options["return_lse"] else output

    def _run(self, query: Tensor, kv_cache: tuple[Tensor, Tensor], output: Tensor | None) -> tuple[Tensor, Tensor]:
        keys, values = kv_cache
        plan = self._plan
        assert plan is not None
        if self._plan_memory is not None:
            assert _planned_last[contents_of(self._plan_memory).data_ptr()] is self, "another plan is in its memory"
        known = plan.options
        head_dim: int = known["head_dim_qk"] if "head_dim_qk" in known else known["head_dim"]
        assert query.shape == (plan.starts[-1], known["num_qo_heads"], head_dim)
        assert query.stride(2) == 1, "the kernels read strides of rows and heads alone"
        assert all(x * query.itemsize % 16 == 0 for x in (*query.stride()[:2], query.storage_offset())), "16-byte loads"
        assert query.dtype == known["q_data_type"]
        for cache in (keys, values):
            assert cache.shape[1:] == (known["page_size"], known["num_kv_heads"], head_dim)
            assert cache.dtype == known["kv_data_type"]
            assert cache.is_contiguous()
        if output is None:
            output = torch.empty(query.shape, dtype=known["o_data_type"], device=query.device)
        assert output.dtype == known["o_data_type"]
        assert output.shape == query.shape
        assert output.is_contiguous(), "the kernels do not read its strides"
        lse = torch.full(query.shape[:2], -torch.inf, device=query.device)
        for segment, last_length in enumerate(plan.last_lengths):
            rows = slice(*plan.starts[segment : segment + 2])
            blocks = plan.blocks[slice(*plan.kv_starts[segment : segment + 2])].long()
            length = max(0, len(blocks) - 1) * known["page_size"] + last_length
            key, value = (cache[blocks].flatten(0, 1)[:length].float() for cache in (keys, values))
            output[rows], lse[rows] = _attend(query[rows].float(), key, value, plan.causal, known)
        self.num_runs += 1
        return output, lse


class PrefillWrapper(_Wrapper):
    NAME = PREFILL
    KERNELS = ("fa2", "fa3")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        self._fixed: list[Any] = [options.get(f"{name}_buf") for name in names]
        assert all(buffer is not None for buffer in self._fixed) == options.get("use_cuda_graph", False)
        self._last_rows = 0
        self._handle = len(_recordable_prefixes)
        if options.get("use_cuda_graph"):
            _recordable_prefixes.append(self)

    def plan(self, *args: Any, **options: Any) -> None:
        self._bind("plan", args, options)
        assert "max_sequence_kv" not in options, "with it, plan of 0.6.18 raises UnboundLocalError"
        assert options.pop("max_token_per_sequence") == args[0].diff().max()
        starts, kv_starts, _, last_lengths = args
        if self._init_options["backend"] == "fa3":
            self._check_fa3(starts, kv_starts, last_lengths, options)
        else:
            self._check_longest(kv_starts, last_lengths, options)
        causal = options.pop("causal")
        self._note_plan(args, causal, options)
        lengths = (kv_starts.diff() - 1).clamp_min(0) * options["page_size"] + last_lengths
        assert not causal or (lengths >= starts.diff()).all(), "rows of a causal segment are its last tokens"
        if self._init_options.get("use_cuda_graph"):
            self._keep_fixed(args)

    def _check_fa3(self, starts: Tensor, kv_starts: Tensor, last_lengths: Tensor, options: dict[str, Any]) -> None:
        """PrefillSM90Plan: it reads the length of each segment, and its plan has entries for each head."""
        lengths = (kv_starts.diff() - 1).clamp_min(0) * options["page_size"] + last_lengths
        given = options.pop("seq_lens")
        assert given.device == CPU
        assert torch.equal(given, lengths), "its planner would read other memory"
        tile = 192 if options["head_dim_qk"] == 64 else 128
        tiles = int((-(-starts.diff() // tile)).sum())
        most = int(-(-starts[-1] // tile)) + len(lengths) - 1
        heads = 1 if most > 4096 else options["num_qo_heads"]
        assert 4 * 7 * tiles * heads + 8 * 16 + 4 * 133 <= self.plan_memory, "plan would fail"

    @property
    def is_fa3(self) -> bool:
        return bool(self._init_options["backend"] == "fa3")

    def _keep_fixed(self, lists: tuple[Tensor, ...]) -> None:
        """In CUDA-graph mode a plan is kept in the buffers, and a run reads these, as with decode."""
        num_rows = int(lists[0][-1])
        self.most_rows = self.most_rows or num_rows
        assert 0 < num_rows <= self.most_rows, "the first plan has most rows; a kernel without rows would not wait"
        self._last_rows = num_rows
        for buffer, planned in zip(self._fixed, lists, strict=True):
            buffer[: len(planned)].copy_(planned)
        assert len(lists[0]) == len(self._fixed[0]), "the number of segments is that of the buffers"

    def run(self, *args: Any, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
        if not self._init_options.get("use_cuda_graph"):
            return super().run(*args, **options)
        self._bind("run", args, options)
        query, kv_cache = args
        output, lse = options["out"], options["lse"]
        assert options["return_lse"]
        assert len(query) == self._last_rows, "while it is recorded, a plan has all rows"
        assert (lse.dtype, lse.shape) == (torch.float32, query.shape[:2])
        assert lse.is_contiguous()
        _recordable_prefix_run(query, *kv_cache, output, lse, self._handle)
        return output, lse

    def run_planned(self, query: Tensor, keys: Tensor, values: Tensor, output: Tensor, lse: Tensor) -> None:
        """By what the buffers have now. Rows after the segments' are left as they are."""
        assert self._plan is not None
        starts, kv_starts, blocks, last_lengths = map(contents_of, self._fixed)
        plan = self._plan
        plan.starts, plan.kv_starts, plan.last_lengths = starts.tolist(), kv_starts.tolist(), last_lengths.tolist()
        plan.blocks = blocks[: plan.kv_starts[-1]]
        rows = slice(plan.starts[-1])
        lse[rows] = self._run(query[rows], (keys, values), output[rows])[1]


class DecodeWrapper(_Wrapper):
    """One row for each segment. With use_cuda_graph, a plan is kept in the buffers, and a run reads these: a recorded
    run sees what was planned last."""

    NAME = DECODE

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._fixed: list[Any] = [
            options.get(f"paged_kv_{name}_buffer") for name in ("indptr", "indices", "last_page_len")
        ]
        assert all(buffer is not None for buffer in self._fixed) == options.get("use_cuda_graph", False)
        self._handle = len(_recordable)
        if options.get("use_cuda_graph"):
            _recordable.append(self)

    def _run(self, query: Tensor, kv_cache: tuple[Tensor, Tensor], output: Tensor | None) -> tuple[Tensor, Tensor]:
        if not self._init_options.get("use_cuda_graph"):
            return super()._run(query, kv_cache, output)
        if output is None:
            output = torch.empty_like(query)
        return output, _recordable_run(query, *kv_cache, output, self._handle)

    def run_planned(self, query: Tensor, keys: Tensor, values: Tensor, output: Tensor) -> Tensor:
        """By what the buffers have now -> LSE."""
        assert self._plan is not None
        starts, blocks, last_lengths = map(contents_of, self._fixed)  # as the operation's arguments
        assert len(query) == len(last_lengths), "a graph has one number of rows"
        kv_starts = starts.tolist()
        self._plan.kv_starts, self._plan.last_lengths = kv_starts, last_lengths.tolist()
        self._plan.blocks = blocks[: kv_starts[-1]]
        return super()._run(query, (keys, values), output)[1]

    def plan(self, *args: Any, **options: Any) -> None:
        self._bind("plan", args, options)
        group = options["num_qo_heads"] // options["num_kv_heads"]
        # DISPATCH_GQA_GROUP_SIZE: the groups that decode on CUDA cores is compiled for.
        assert self._init_options["use_tensor_cores"] or group in (1, 2, 3, 4, 6, 8)
        self._check_longest(args[0], args[2], options)
        self._note_plan((torch.arange(len(args[0]), dtype=torch.int32), *args), False, options)
        if self._init_options.get("use_cuda_graph"):
            for buffer, planned in zip(self._fixed, args, strict=True):
                buffer[: len(planned)].copy_(planned)
            assert len(args[0]) == len(self._fixed[0]), "the number of rows is that of the buffers"

    def plan_fast(self, *args: Any, **options: Any) -> None:
        self._bind("fast_decode_plan", args, options)
        assert self._plan is not None, "a first plan loads the module and keeps the output's dtype"
        assert self._init_options.get("use_cuda_graph"), "the wrapper would read the lists on the host"
        assert len(args[0]) == len(self._fixed[0]), "the number of rows is that of the buffers"
        known = {"o_data_type": self._plan.options["o_data_type"], **options}
        self._note_plan((torch.arange(len(args[0]), dtype=torch.int32), *args), False, known)


_planned_last: dict[int, _Wrapper] = {}
"""By the address of plan memory."""
_recordable: list[DecodeWrapper] = []
_recordable_prefixes: list[PrefillWrapper] = []


@torch.library.custom_op("flashinfer_double::run", mutates_args=("output",))
def _recordable_run(query: Tensor, keys: Tensor, values: Tensor, output: Tensor, handle: int) -> Tensor:
    """One operation, as FlashInfer's launches are: a tape that replays it does not see what it computes inside."""
    return _recordable[handle].run_planned(query, keys, values, output)


@torch.library.custom_op("flashinfer_double::run_prefix", mutates_args=("output", "lse"))
def _recordable_prefix_run(
    query: Tensor, keys: Tensor, values: Tensor, output: Tensor, lse: Tensor, handle: int
) -> None:
    _recordable_prefixes[handle].run_planned(query, keys, values, output, lse)


class DecodeModule:
    @staticmethod
    def fast_decode_plan(wrapper: DecodeWrapper, *args: Any, **options: Any) -> None:
        """Leaves the buffers as they are."""
        wrapper.plan_fast(*args, **options)


class Library:
    decode = DecodeModule
    BatchPrefillWithPagedKVCacheWrapper = PrefillWrapper
    BatchDecodeWithPagedKVCacheWrapper = DecodeWrapper


def install(monkeypatch: pytest.MonkeyPatch, any_dtype: bool = False) -> None:
    """From now on `attention_backend=flashinfer` is the double, on any device.

    any_dtype: accept what FlashInfer's tables lack, to compare in float32 with models in float32.
    """
    monkeypatch.setattr(_Wrapper, "any_dtype", any_dtype)
    monkeypatch.setattr(flashinfer_backend, "why_unfit", lambda _shape: None)
    monkeypatch.setattr(flashinfer_backend, "load_library", Library)
    monkeypatch.setattr(buffer_sizes, "_MIN_WORKSPACE", 1 << 20)


def _attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, known: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """query [R, H, D], key and value [L, K, D] -> output [R, H, D] and base-2 LSE [R, H]. known: options of `plan`."""
    num_rows, num_heads, _ = query.shape
    length, num_kv_heads, _ = key.shape
    key, value = (x.repeat_interleave(num_heads // num_kv_heads, dim=1) for x in (key, value))
    scores = torch.einsum("rhd,lhd->rhl", query, key) * known["sm_scale"]
    if cap := known.get("logits_soft_cap"):
        scores = cap * (scores / cap).tanh()
    scores /= math.log(2)
    own = (torch.arange(num_rows, device=query.device) + (length - num_rows)).unsqueeze(1)
    tokens, window_left = torch.arange(length, device=query.device), known.get("window_left", -1)
    if causal:
        scores.masked_fill_((tokens > own).unsqueeze(1), -torch.inf)
    if window_left >= 0:
        scores.masked_fill_((tokens < own - window_left).unsqueeze(1), -torch.inf)
    lse = torch.logsumexp(scores * math.log(2), dim=-1) / math.log(2)
    weights = torch.exp2(scores - lse.unsqueeze(-1)).nan_to_num(0.0)
    return torch.einsum("rhl,lhd->rhd", weights, value), lse
