"""Choose the attention backend by flag, device and model: the first that can be built and computes rightly here."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from tokasaurus.messages.status import describe_error
from tokasaurus.model.attention import flashinfer_backend
from tokasaurus.model.attention.backend import AttentionBackend, KVShape
from tokasaurus.model.attention.cpu import CpuBackend, why_unfit
from tokasaurus.model.attention.flashinfer_tools import (
    BUILD_FAILED,
    FA3,
    compile_beside,
    failed_build,
    missing_tools,
    note_failed_build,
    provide_tools,
)
from tokasaurus.model.attention.reference import ReferenceBackend
from tokasaurus.model.attention.torch_backend import TorchBackend
from tokasaurus.model.cpu.bindings import Kernels

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend that serves this device and model."""

    name: str
    """A value of the flag attention_backend."""

    build: Callable[[], AttentionBackend]


def make_backend(
    name: str | None,
    shape: KVShape,
    kernels: Kernels | None,
    max_graph_rows: int = 0,
    attempt: Callable[[Candidate], AttentionBackend | None] = lambda candidate: candidate.build(),
) -> AttentionBackend:
    """The named backend, or the first of the candidates that works. FlashInfer may compile its kernels first, which
    takes minutes.

    name: "cpu", "torch", "flashinfer", "reference", or None for any. kernels: None if unavailable.
    max_graph_rows: of the largest decode step that will be recorded; 0 for none. attempt: builds a candidate; None if
    it does not work here.

    Raises ValueError if the named backend cannot serve this device or model.
    """
    for candidate in candidates(name, shape, kernels, max_graph_rows):
        backend = attempt(candidate)
        if backend is not None:
            return backend
    raise RuntimeError("no attention backend works here")


def candidates(name: str | None, shape: KVShape, kernels: Kernels | None, max_graph_rows: int = 0) -> list[Candidate]:
    """The named backend alone, or all backends that support the shape, fastest first. Raises ValueError if the named
    one does not support it."""
    if shape.dtype == torch.int8:
        unfit = _why_no_int8(name, shape, kernels)
        if unfit is not None or kernels is None:
            raise ValueError(f"kv_cache_dtype=int8: {unfit}")
        return [Candidate("cpu", partial(CpuBackend, shape, kernels))]
    plain = Candidate("torch", partial(TorchBackend, shape))
    if name == "torch":
        return [plain]
    if name == "reference":
        return [Candidate(name, partial(ReferenceBackend, shape))]
    if name == "flashinfer" or (name is None and shape.device.type == "cuda"):
        unfit = flashinfer_backend.why_unfit(shape)
        if unfit is None:
            flashinfer = Candidate("flashinfer", partial(_build_flashinfer, shape, max_graph_rows, name is not None))
            return [flashinfer] if name is not None else [flashinfer, plain]
        if name is not None:
            raise ValueError(f"attention_backend=flashinfer: {unfit}")
        logger.warning("FlashInfer is not used, since %s; using plain torch attention, which is slower", unfit)
        return [plain]
    if name is None:
        if kernels is None or shape.device.type != "cpu":
            return [plain]
        unfit = why_unfit(shape, kernels)
        if unfit is None:
            return [Candidate("cpu", partial(CpuBackend, shape, kernels)), plain]
        logger.warning("the CPU kernels do not support %s; using plain torch attention, which is slower", unfit)
        return [plain]
    if name != "cpu":
        raise ValueError(f"attention_backend={name} is not known; it is one of cpu, torch, flashinfer, reference")
    if shape.device.type != "cpu":
        raise ValueError(f"attention_backend=cpu does not run on device={shape.device.type}")
    if kernels is None:
        why = "cpu_isa=torch turns them off, or they could not be built"
        raise ValueError(f"attention_backend=cpu needs the CPU kernels: {why}")
    return [Candidate(name, partial(CpuBackend, shape, kernels))]


def _why_no_int8(name: str | None, shape: KVShape, kernels: Kernels | None) -> str | None:
    """Why there is no int8 KV cache, of which only the CPU kernels know. Arguments as of `candidates`."""
    if shape.device.type != "cpu" or name not in (None, "cpu"):
        return f"only the CPU kernels have it, not {f'attention_backend={name}' if name else shape.device.type}"
    if kernels is None:
        return "it needs the CPU kernels, which cpu_isa=torch turns off, or which could not be built"
    unfit = why_unfit(shape, kernels)
    return None if unfit is None else f"the CPU kernels do not support {unfit}"


def _build_flashinfer(shape: KVShape, max_graph_rows: int, is_asked_for: bool) -> AttentionBackend:
    """is_asked_for: try again what could not be built at an earlier start. Raises what FlashInfer raises."""
    provide_tools(os.environ)
    if not is_asked_for and (failed := failed_build(os.environ)) is not None:
        reason, place = failed
        raise RuntimeError(f"{reason} (found at an earlier start; it is tried again without the file {place})")
    logger.info("preparing FlashInfer's kernels; the first start on a machine compiles them, which takes minutes")
    try:
        return flashinfer_backend.FlashInferBackend(shape, flashinfer_backend.load_library(), max_graph_rows)
    except RuntimeError as error:
        if str(error).startswith(BUILD_FAILED):
            note_failed_build(os.environ, error)
        raise


def has_compiled_fa3(backend: flashinfer_backend.FlashInferBackend) -> bool:
    """Whether "fa3" can be loaded at once. If not, its kernel is compiled for later starts while this process serves:
    that takes minutes, for which prompts have fa2."""
    with flashinfer_backend.compiling_nothing() as missing:
        try:
            backend.prepare_fa3()
        except Exception:
            logger.debug("fa3 was not prepared", exc_info=True)  # the check of attention says why
    if not missing:
        return True
    if failed_build(os.environ, FA3) is None:
        try:
            compile_beside(missing[0])
        except Exception as error:  # prompts have fa2
            logger.warning("FlashInfer's fa3 is not compiled for later starts: %s", describe_error(error))
    return False


def prepare_fa3(backend: flashinfer_backend.FlashInferBackend) -> None:
    """Let prompts take FlashInfer's "fa3", whose kernel may have to be compiled. Raises what FlashInfer raises, also if
    it could not be built at an earlier start."""
    if (failed := failed_build(os.environ, FA3)) is not None:
        reason, place = failed
        raise RuntimeError(f"{reason} (found at an earlier start; it is tried again without the file {place})")
    try:
        backend.prepare_fa3()
    except RuntimeError as error:
        if str(error).startswith(BUILD_FAILED):
            note_failed_build(os.environ, error, FA3)
        raise


def install_advice(name: str) -> str:
    """What must be installed for the backend of this name, as a sentence; empty if nothing is missing."""
    environment = dict(os.environ)
    provide_tools(environment)
    missing = missing_tools(environment) if name == "flashinfer" else []
    return f". Its kernels are compiled by {' and '.join(missing)}, which must be installed" if missing else ""
