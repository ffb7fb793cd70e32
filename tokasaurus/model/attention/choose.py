"""Choose the attention backend by flag, device and model: the first that can be built and computes rightly here."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from tokasaurus.model.attention import flashinfer_backend
from tokasaurus.model.attention.backend import AttentionBackend, KVShape
from tokasaurus.model.attention.cpu import CpuBackend, why_unfit
from tokasaurus.model.attention.flashinfer_backend import missing_tools
from tokasaurus.model.attention.reference import ReferenceBackend
from tokasaurus.model.attention.torch_backend import TorchBackend
from tokasaurus.model.cpu.bindings import Kernels

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend that serves this device and model."""

    name: str
    """As the flag has it."""

    build: Callable[[], AttentionBackend]


def make_backend(
    name: str | None,
    shape: KVShape,
    kernels: Kernels | None,
    max_graph_rows: int = 0,
    check: Callable[[AttentionBackend], None] | None = None,
    all_agree: Callable[[bool], bool] = bool,
    on_left_out: Callable[[str, str], None] = lambda _name, _reason: None,
) -> AttentionBackend:
    """The named backend, or the first of the candidates that can be built and passes `check`; each other one is logged
    in one line. FlashInfer may compile its kernels first, which takes minutes.

    name: "cpu", "torch", "flashinfer", "reference", or None for any. kernels: None if unavailable.
    max_graph_rows: of the largest decode step that will be recorded; 0 for none. check: raises if the backend computes
    wrongly. all_agree: whether all ranks of the replica have got True; they choose alike. on_left_out: called with the
    name of each candidate that failed, and why.

    Raises ValueError if the named backend cannot serve this device or model, or fails.
    """
    choices = candidates(name, shape, kernels, max_graph_rows)
    for candidate in choices:
        backend, error = None, None
        try:
            backend = candidate.build()
            if check is not None:
                check(backend)
        except torch.OutOfMemoryError:
            raise
        except Exception as failure:  # of a package or its compilers, which have errors of many classes
            error = failure
        if all_agree(error is None):
            assert backend is not None
            return backend
        reason = "it fails on another rank" if error is None else _gist(error)
        logger.debug("attention_backend=%s failed", candidate.name, exc_info=error)
        if name is not None:
            raise ValueError(f"attention_backend={name}: {reason}") from error
        if candidate is choices[-1]:
            raise RuntimeError(f"no attention backend works here; {candidate.name}: {reason}") from error
        on_left_out(candidate.name, reason)
        logger.warning(
            "attention_backend=%s is switched off, since it fails at the start: %s%s; others are slower",
            *(candidate.name, reason, _advice(candidate.name)),
        )
    raise AssertionError("there is always a candidate")


def candidates(name: str | None, shape: KVShape, kernels: Kernels | None, max_graph_rows: int = 0) -> list[Candidate]:
    """The named backend alone, or those that support the shape, fastest first. Raises ValueError if the named one does
    not support it."""
    plain = Candidate("torch", partial(TorchBackend, shape))
    if name == "torch":
        return [plain]
    if name == "reference":
        return [Candidate(name, partial(ReferenceBackend, shape))]
    if name == "flashinfer" or (name is None and shape.device.type == "cuda"):
        unfit = flashinfer_backend.why_unfit(shape)
        if unfit is None:
            flashinfer = Candidate("flashinfer", partial(_build_flashinfer, shape, max_graph_rows))
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


def _build_flashinfer(shape: KVShape, max_graph_rows: int) -> AttentionBackend:
    logger.info("preparing FlashInfer's kernels; the first start on a machine compiles them, which takes minutes")
    return flashinfer_backend.FlashInferBackend(shape, flashinfer_backend.load_library(), max_graph_rows)


def _gist(error: Exception) -> str:
    """The line of a compiler's output that says what is wrong; else the error's class and first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    of_compiler = [line for line in lines if "error:" in line]
    return next(iter(of_compiler), f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)[:300]


def _advice(name: str) -> str:
    """How to get what is lost."""
    if name != "flashinfer":
        return ""
    missing = missing_tools(os.environ)
    return f" (its kernels are compiled by {' and '.join(missing)}, which must be installed)" if missing else ""
