"""The parts of `python -m tests.gpu`: which test files each has, and how long they may take."""

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PART_MINUTES = 7.5
"""Longest time of a part. A machine whose commands may take ten minutes also has to start and to answer."""


@dataclass(frozen=True, slots=True)
class TestFile:
    __test__ = False  # it is no test, whatever its name looks like
    path: Path
    limit_s: float
    """Longest time of each of its tests, in seconds."""
    what: str
    """One line for the reader of `--list`."""


Part = tuple[TestFile, ...]


def _file(subject: str, limit_s: float, what: str) -> TestFile:
    return TestFile(HERE / f"test_{subject}_on_cuda.py", limit_s, what)


PARTS: dict[str, Part] = {
    "attention": (
        _file("attention", 60, "torch attention in 16 bits against float64"),
        # The first test of each head size compiles FlashInfer's kernels.
        _file("flashinfer", 240, "FlashInfer against float64; windows, caps, sinks, prefix groups against torch"),
    ),
    "kernels": (
        _file("device", 60, "the device of each worker"),
        _file("stopwatch", 60, "the clock of the device"),
        _file("uploads", 60, "weights through pinned buffers against plain copies"),
        _file("each_kernel", 120, "each Triton kernel against plain torch at the sizes of models, as toka check does"),
        _file("triton_kernels", 60, "Triton kernels of attention against slow oracles"),
        _file("triton_layers", 60, "Triton kernels of the layers against float64"),
        _file(
            "triton_low_rank",
            120,
            "Triton kernels of adapters against float64; graphs with adapters against launches",
        ),
        _file("triton_experts", 60, "Triton kernels of experts against float64 and plain torch, and recorded"),
        _file("triton_sample", 120, "the Triton sampler at the size of Llama 3's vocabulary against the C++ kernels"),
        _file("sampling", 60, "torch sampling against the CPU"),
        _file("graphs", 120, "CUDA graphs, eager and compiled, against eager steps"),
        _file("recorded_flashinfer", 240, "whole steps with FlashInfer inside graphs in bfloat16, 80 sequences"),
        _file("sync_debug", 120, "whole steps while torch refuses calls that wait for the device"),
    ),
    "servers": (
        _file("decoder", 60, "each model family against transformers in float32"),
        _file("stages", 120, "pipeline stages against the whole model"),
        _file("nccl", 120, "NCCL and symmetric memory with one rank: sums inside CUDA graphs, and a quick end"),
        _file("server", 120, "whole servers against transformers in float32"),
        _file("flashinfer_server", 240, "a server with FlashInfer: errors of log-probabilities beside torch attention"),
        _file("default_start", 300, "a server with every default at the shapes of Llama 1B and 8B, 80 sequences"),
        _file("random_requests", 300, "ten thousand random requests leave nothing behind"),
    ),
    "faults": (
        _file("killed_worker", 240, "kill -9 of a model worker under load: a restart, and no answer is lost"),
        _file("too_little_memory", 200, "starts beside a process that has the memory; a KV cache that is too large"),
    ),
}
