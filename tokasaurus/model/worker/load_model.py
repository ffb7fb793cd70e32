"""The weights of a start: the gemms that multiply by them, their layouts, and reading them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from tokasaurus.checkpoint import CheckpointError, file_states, weight_files
from tokasaurus.checkpoint.block_types import why_dequantised
from tokasaurus.checkpoint.spec import attentions_of
from tokasaurus.messages.status import FlagRefused, UserError
from tokasaurus.model.cpu.bindings import ACTIVATION_DTYPES
from tokasaurus.model.cpu.gemm_choice import choose_gemm
from tokasaurus.model.cpu.quantized_ways import ways_by_type
from tokasaurus.model.decoder.decoder import build_decoder
from tokasaurus.model.decoder.quantize import CannotQuantize, Packing
from tokasaurus.model.decoder.tensor_files import has_quantized
from tokasaurus.model.decoder.uploads import uploads_to
from tokasaurus.model.decoder.weights import FilledModules, load_weights, return_freed_memory
from tokasaurus.model.worker.memory import dtype_name
from tokasaurus.model.worker.memory_plan import NO_STATES_ON_GPUS, WEIGHTS, show_size

if TYPE_CHECKING:
    from tokasaurus.model.worker.start import Start


def has_gemm_choice(start: Start) -> bool:
    """Whether the CPU kernels may multiply by plain weights, so that it matters whether torch is faster."""
    return start.kernels is not None and start.dtype in ACTIVATION_DTYPES and not _packing(start).is_int8


def choose_gemms(start: Start) -> str:
    """Torch's gemms or the kernels', for each number of tokens; the kernels' for weights that will be quantised."""
    assert start.kernels is not None
    choice = choose_gemm(start.kernels, start.info, start.dtype)
    if start.config.quantization is None or not choice.always_torch:
        start.gemm = choice
    return_freed_memory()  # of the timed gemms: the weights would be measured as so much smaller
    return start.gemm.describe()


def make_model(start: Start) -> str:
    """This rank's part of the model, on the meta device. Raises UserError."""
    arguments = start.info, start.mesh, start.dtype
    if start.info.spec.has_states and (reason := _why_no_states(start)):
        raise UserError(f"{start.info.family}: {reason}")
    try:
        if start.info.is_native:
            start.model = build_decoder(*arguments)
        else:  # whose import takes seconds, and memory that is not of weights
            from tokasaurus.model.by_transformers.model import TransformersModel

            start.model = TransformersModel(*arguments, start.checkpoint.directory)
    except (ValueError, CheckpointError) as error:
        raise UserError(str(error)) from error
    return ""


def _why_no_states(start: Start) -> str:
    """Why a model whose layers have states is not served; "" if it is."""
    if start.device.type != "cpu":
        return NO_STATES_ON_GPUS
    if start.info.quantization is not None:
        return "layers with states have no quantised weights yet"
    info, mesh = start.info, start.mesh
    for stage in (replace(mesh, pp_rank=rank) for rank in range(mesh.pp_size)):
        if not attentions_of(info.spec.layers[index] for index in stage.stage_layers(info)):
            return f"pp_size={mesh.pp_size} leaves a stage without a layer with attention; use fewer"
    return ""


def load_model(start: Start) -> str:
    """Its weights, in the layouts of its gemms. Raises FlagRefused."""
    config, model = start.config, start.model
    model.materialize(start.device, start.limits.context_length)
    model.begin_packing(start.kernels, start.gemm, start.compiler, _packing(start))
    if config.quantization is not None and (reason := _why_not_quantizable(start)):
        raise FlagRefused(f"quantization={config.quantization}: {reason}")
    filled = FilledModules(model, model.pack_module)
    dequantised, may_keep_blocks = Counter[str](), model.takes_blocks and not config.rl
    try:
        if start.fill is None:
            dequantised = _read_weights(start, filled, may_keep_blocks)
        else:
            start.fill(model, filled)
    except CannotQuantize as error:
        raise FlagRefused(f"quantization={config.quantization}: {error}") from None
    model.end_packing()
    return_freed_memory()
    dequantised += model.dequantised
    if config.quantization is not None and not model.block_types:
        raise FlagRefused(
            f"quantization={config.quantization}: {start.info.family} has no linear layers but its LM head"
        )
    if model.block_types:
        start.memory.replan(WEIGHTS, -model.saved_bytes)
    elif config.quantized_compute == "int8":
        reason = "the checkpoint's weights are not quantised; quantization=int8 quantises them"
        if start.compiler is not None or config.rl:
            reason = _why_all_plain(start)
        elif dequantised:
            reason = f"the weights, {', '.join(sorted(dequantised))}, are dequantised here"
        raise FlagRefused(f"quantized_compute=int8: {reason}")
    return _describe_blocks(start, dequantised, may_keep_blocks)


def _packing(start: Start) -> Packing:
    """Activations have 8 bits if the flag says so, or else if weights are, or will be, quantised for that."""
    config, stored = start.config, start.info.quantization
    is_int8 = config.quantized_compute == "int8"
    if config.quantized_compute is None:
        is_stored = stored is not None and stored.quantizes_activations and not config.rl
        is_int8 = config.quantization == "int8" or is_stored
    return Packing(config.quantization, is_int8)


def _why_not_quantizable(start: Start) -> str | None:
    """Why the flag quantization cannot be followed; None if it can."""
    model = start.model
    if start.compiler is not None:
        return _why_all_plain(start)
    if not model.takes_blocks or model.weight_dtype not in ACTIVATION_DTYPES:
        return "only the CPU kernels multiply by such weights, of bfloat16 or float32"
    if start.fill is None and has_quantized(weight_files(start.checkpoint.directory), start.info.quantization):
        return "the checkpoint's weights are quantised already"
    return None


def _read_weights(start: Start, filled: FilledModules, may_keep_blocks: bool) -> Counter[str]:
    """Returns as load_weights. Of several ranks, each reads about the same."""
    checkpoint, model = start.checkpoint, start.model
    files = weight_files(checkpoint.directory)
    is_replaced = any(not update.is_partial for update in checkpoint.weight_updates)
    if checkpoint.files and not is_replaced and file_states(files) != checkpoint.files:
        raise UserError(f"the weights in {checkpoint.directory} have changed since the server was started")
    num_total = max(1, sum(file.stat().st_size for file in files) // start.mesh.num_ranks)
    num_done = 0

    def on_bytes(num_bytes: int) -> None:
        nonlocal num_done
        num_done = min(num_done + num_bytes, num_total)
        start.log.show_amount("bytes", num_done, num_total)

    shards = iter(model.weight_shards())  # a list would keep packed weights in memory
    quantization = start.info.quantization
    with uploads_to(model.device) as uploads:
        return load_weights(files, shards, model.ignores, on_bytes, filled.note, may_keep_blocks, quantization, uploads)


def _describe_blocks(start: Start, dequantised: Counter[str], may_keep_blocks: bool) -> str:
    """What has become of quantised weights, for the user."""
    model, stored, details = start.model, start.info.quantization, list[str]()
    if model.block_types:
        details.append(f"quantised as {', '.join(model.block_types)}, {_describe_way(start)}")
    if start.config.quantization is not None and (plain := model.bytes_outside_linears):
        details.append(f"{show_size(plain)} of experts and other matrices stay {dtype_name(model.activation_dtype)}")
    for block_type in sorted(dequantised):
        why = why_dequantised(block_type) if may_keep_blocks else _why_all_plain(start)
        details.append(f"{dequantised[block_type]} weights of {block_type} dequantised ({why})")
    if dequantised and stored is not None and stored.quantizes_activations:
        details.append("whose activations are not quantised")
    return ", ".join(details)


def _describe_way(start: Start) -> str:
    """How quantised weights are multiplied, why, and what the other way would take and cost."""
    others = [ways.describe(name) for name, ways in ways_by_type(start.model.packed_weights).items()]
    config = start.config
    why = "by default"
    if config.quantized_compute is not None:
        why = f"quantized_compute={config.quantized_compute}"
    elif _packing(start).is_int8:
        why = "quantization=int8" if config.quantization == "int8" else "as the checkpoint asks"
    how = "multiplied in integers" if _packing(start).is_int8 else "exact"
    return f"{how} ({why})" + (f"; integers take, of {'; of '.join(others)}" if others else "")


def _why_all_plain(start: Start) -> str:
    """Why no weights may stay quantised."""
    if start.compiler is not None:
        return "compiled layers have plain weights: torch_compile=F"
    return "with rl=T, all weights are plain numbers" if start.config.rl else "only the CPU kernels multiply by blocks"
