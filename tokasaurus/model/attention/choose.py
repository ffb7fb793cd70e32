"""Choose the attention backend by flag, device and model."""

import logging

from tokasaurus.model.attention import flashinfer_backend
from tokasaurus.model.attention.backend import AttentionBackend, KVShape
from tokasaurus.model.attention.cpu import CpuBackend, why_unfit
from tokasaurus.model.attention.reference import ReferenceBackend
from tokasaurus.model.attention.torch_backend import TorchBackend
from tokasaurus.model.cpu.bindings import Kernels

logger = logging.getLogger(__name__)


def make_backend(
    name: str | None, shape: KVShape, kernels: Kernels | None, max_graph_rows: int = 0
) -> AttentionBackend:
    """name: "cpu", "torch", "flashinfer", "reference", or None for the fastest that supports the shape. kernels: None
    if unavailable. max_graph_rows: of the largest decode step that will be recorded; 0 for none. FlashInfer may compile
    its kernels first, which takes minutes.

    Raises ValueError if the named backend cannot serve this device or model.
    """
    if name == "reference":
        return ReferenceBackend(shape)
    if name == "flashinfer" or (name is None and shape.device.type == "cuda"):
        return _make_flashinfer(shape, max_graph_rows, is_required=name is not None)
    if name == "torch" or (name is None and shape.device.type != "cpu"):
        return TorchBackend(shape)
    if name is None:
        unfit = None if kernels is None else why_unfit(shape, kernels)
        if unfit is not None:
            logger.warning("the CPU kernels do not support %s; using plain torch attention, which is slower", unfit)
        return TorchBackend(shape) if kernels is None or unfit is not None else CpuBackend(shape, kernels)
    if name != "cpu":
        raise ValueError(f"attention_backend={name} is not known; it is one of cpu, torch, flashinfer, reference")
    if shape.device.type != "cpu":
        raise ValueError(f"attention_backend=cpu does not run on device={shape.device.type}")
    if kernels is None:
        why = "cpu_isa=torch turns them off, or they could not be built"
        raise ValueError(f"attention_backend=cpu needs the CPU kernels: {why}")
    return CpuBackend(shape, kernels)


def _make_flashinfer(shape: KVShape, max_graph_rows: int, is_required: bool) -> AttentionBackend:
    unfit = flashinfer_backend.why_unfit(shape)
    if unfit is None:
        logger.info("preparing FlashInfer's kernels; the first start on a machine compiles them, which takes minutes")
        return flashinfer_backend.FlashInferBackend(shape, flashinfer_backend.load_library(), max_graph_rows)
    if is_required:
        raise ValueError(f"attention_backend=flashinfer: {unfit}")
    logger.warning("FlashInfer is not used, since %s; using plain torch attention, which is slower", unfit)
    return TorchBackend(shape)
