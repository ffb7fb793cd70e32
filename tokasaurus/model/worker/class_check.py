"""Whether a model computes by our attention and head what transformers' class computes by its own."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import transformers
from torch import Tensor

from tokasaurus import __version__
from tokasaurus.checkpoint import file_states, weight_files
from tokasaurus.messages.status import describe_error
from tokasaurus.model.attention.backend import AttentionBackend, KVShape
from tokasaurus.model.by_transformers.model import TransformersModel
from tokasaurus.model.by_transformers.probe import NAME
from tokasaurus.model.decoder.weights import load_weights
from tokasaurus.model.execution.executors import OwnLayers
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker import self_check
from tokasaurus.model.worker.kept_results import keep_results, path_of_results
from tokasaurus.model.worker.start import Start
from tokasaurus.monitoring.available_memory import available_memory

logger = logging.getLogger(__name__)

_VERSION = 3
"""Part of the name of a kept result: increase it when a class is computed otherwise."""
_MAX_UNDIVIDED_BYTES = 4 << 30
"""Of a checkpoint's files: larger models are only compared with the rank's own part of the class."""
_NUM_TOKENS = 64
_CHUNKS = {"whole": (_NUM_TOKENS,), "in two chunks": (40, _NUM_TOKENS)}
"""Where chunks end."""
_FEATURE = "transformers"


def check_class(start: Start) -> str:
    """Raises FlagRefused if the results differ by more than what a few roundings of the input change. What was right is
    not measured again by later starts, but by `toka check`."""
    model, checks, path = start.model, start.checks, _path_of_result(start)
    assert isinstance(model, TransformersModel)
    if checks.all_agree(path is not None and path.is_file() and not checks.is_thorough):
        return "right, as an earlier start has measured"
    places = model, start.backend, start.shape, start.limits.context_length
    words = f"{start.checkpoint.name} cannot be served by transformers' class"
    checks.passes(_FEATURE, lambda: measure_class(*places, lambda: _undivided(start)), "it is", "", words)
    if path is not None:
        keep_results(path, [each.measured for each in checks.results if each.feature == _FEATURE])
    return ""


def _path_of_result(start: Start) -> Path | None:
    """Of a file that is there if this check has passed; its name has a digest of all that the results depend on. None
    where that is not known."""
    if start.fill is not None:
        return None
    code, config = (_VERSION, __version__, transformers.__version__, type(start.backend).__name__), start.config
    flags = config.quantization, config.quantized_compute, config.rl, start.gemm
    dtypes = start.dtype, start.activation_dtype, start.kv_cache_dtype
    ranks = start.mesh.tp_size, start.mesh.pp_size, start.mesh.world_rank
    files = file_states(weight_files(start.checkpoint.directory))
    parts = start.info, files, start.limits.context_length, code, flags, dtypes, config.page_size, ranks
    return path_of_results("class_checks", start.device, start.kernels, *parts)


@torch.inference_mode(False)
def _undivided(start: Start) -> TransformersModel | None:
    """This stage's model on one rank, by plain weights. None on other ranks than the first, and where it is large, or
    rounded otherwise: quantised parts have blocks of their own. Raises MemoryError where memory is short."""
    mesh, model, directory = start.mesh, start.model, start.checkpoint.directory
    if mesh.tp_size == 1 or mesh.tp_rank > 0 or start.fill is not None or model.block_types:
        return None
    files = weight_files(directory)
    if sum(file.stat().st_size for file in files) > _MAX_UNDIVIDED_BYTES:
        return None
    whole = TransformersModel(start.info, Mesh(mesh.pp_rank, mesh.pp_size), start.dtype, directory)
    sizes = [parameter.numel() for parameter in whole.parameters()]
    num_bytes = max(start.dtype.itemsize, model.activation_dtype.itemsize) * (sum(sizes) + max(sizes))  # one is read
    free = torch.cuda.mem_get_info(start.device)[0] if start.on_cuda else available_memory().num_bytes // mesh.pp_size
    if num_bytes > free:
        raise MemoryError(f"it takes {num_bytes:,} bytes undivided, and {free:,} are available")
    whole.materialize(start.device, start.limits.context_length)
    whole.begin_packing(None)
    whole.activation_dtype = model.activation_dtype
    load_weights(files, whole.weight_shards(), whole.ignores, quantization=start.info.quantization)
    whole.end_packing()
    return whole


@torch.inference_mode()
def measure_class(
    model: TransformersModel,
    backend: AttentionBackend,
    shape: KVShape,
    context_length: int,
    make_undivided: Callable[[], TransformersModel | None] = lambda: None,
) -> Iterator[self_check.Measured]:
    """A prompt of random tokens, whole and in chunks, against the class's own attention, head and count of positions:
    hidden states and logits. A later stage gets random states. Replaces the cache by one of a few blocks.

    make_undivided: its model computes what the first rank expects; None: its own part of the class does."""
    num_tokens = min(_NUM_TOKENS, context_length)
    of_cache = torch.bfloat16 if shape.dtype == torch.int8 else shape.dtype  # about as coarse
    dtype = max(model.activation_dtype, of_cache, key=lambda dtype: torch.finfo(dtype).eps)  # the coarser one
    token_ids = torch.randint(model.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(0))
    token_ids, first = token_ids.to(shape.device), self_check.first_hidden(num_tokens, model, seed=0)  # of the same
    entering = None if model.is_first_stage else first
    inputs = entering, self_check.perturbed_rows(first.to(dtype)).to(first.dtype)
    expected = [_by_the_class(model, token_ids, each) for each in inputs]
    if entering is not None and not expected[0][0].isfinite().any():
        raise ValueError("its layers read more than the hidden states of the layer before")
    try:  # on the first rank alone, for which the others wait in the model's collectives
        if (undivided := make_undivided()) is not None:
            sizes = [part.shape[1] for part in expected[0]]  # the first of all token ids
            of_whole = [_by_the_class(undivided, token_ids, each) for each in inputs]
            expected = [[rows[:, :size] for size, rows in zip(sizes, each, strict=True)] for each in of_whole]
    except Exception as error:  # of the class, of files, or for lack of memory
        logger.warning("the parts of transformers' class are not compared with it: %s", describe_error(error))
    blocks = [*range(1, 1 + -(-num_tokens // shape.page_size))]
    for name, ends in _CHUNKS.items():
        with torch.inference_mode(False):
            backend.allocate(len(blocks) + 1)
        rows, done = list[Tensor](), 0
        for end in (min(each, num_tokens) for each in ends):
            forward = self_check.SmallForward(name, (self_check.Context(end - done, end, blocks),))
            _, positions, attends = forward.planned(backend, shape)
            hidden = None if entering is None else entering[done:end]
            rows.append(model(token_ids[done:end], hidden, positions, OwnLayers(), attends).clone())
            done = end
        found = [torch.cat(rows)]
        if model.is_last_stage:
            found.append(model.logits(found[0]))
        for what, *tensors in zip(("", ", logits"), found, *expected, strict=False):
            yield from self_check.compared_rows(name + what, dtype, *tensors)
    with torch.inference_mode(False):
        backend.allocate(1)  # what is measured next must not count this cache


def _by_the_class(model: TransformersModel, token_ids: Tensor, entering: Tensor | None) -> list[Tensor]:
    """token_ids [T], or what enters a later stage, [T, E] -> by the class's own forward, hidden states [T, E] and, on
    the last stage, logits [T, v]."""
    model.whole.set_attn_implementation("eager")
    try:
        found = [model.run(token_ids, entering)]
        if model.is_last_stage:
            found.append(model.whole(**model.given(token_ids, entering), use_cache=False).logits[0])
    finally:
        model.whole.set_attn_implementation(NAME)
    return found
