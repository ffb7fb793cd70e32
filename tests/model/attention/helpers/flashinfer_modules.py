"""Which compiled modules FlashInfer builds for a start of our backend; prints JSON.

`python -m tests.model.attention.helpers.flashinfer_modules PACKAGE NEEDS BUILD`, three directories.

The backend runs over the real Python wrappers, as at a start: each kernel once, then the check of attention. Where the
package would compile a module, its name is noted and ninja's file is written into BUILD. The modules compute nothing.
"""

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch

from tests.model.attention.helpers.flashinfer_real import HEADS, PAGE_SIZE, without_a_device
from tests.model.helpers.paged_problems import CPU
from tokasaurus.model.attention import flashinfer_backend
from tokasaurus.model.attention.backend import KVShape
from tokasaurus.model.worker.self_check import measure_attention

START_HEADS = (*HEADS, (32, 32, 128))
"""With one query head a KV head of size 128 too, so that each head size has decode on CUDA cores."""


def note_modules(found: dict[str, dict[str, Any]], heads: list[str]) -> None:
    """From here on, what would be compiled is added to `found`, with the last of `heads`."""
    from flashinfer.jit.core import JitSpec

    def build_and_load(spec: Any) -> Any:
        spec.write_ninja()
        module = {"directory": str(spec.build_dir), "library": str(spec.jit_library_path)}
        found.setdefault(spec.name, {**module, "files": len(spec.sources), "heads": []})
        found[spec.name]["heads"].append(heads[-1])
        nothing = lambda *_args: None  # noqa: E731
        return SimpleNamespace(plan=lambda *_args: [0] * 15, run=nothing, ragged_run=nothing, paged_run=nothing)

    JitSpec.build_and_load = build_and_load


def run_start(shape: KVShape, library: flashinfer_backend.Library) -> int:
    """What a start does with the backend -> the number of comparisons, which say nothing where nothing is computed."""
    backend = flashinfer_backend.FlashInferBackend(shape, library, max_graph_rows=16)
    return sum(1 for _ in measure_attention(backend, shape))


def main(package: str, needs: str, build: str) -> None:
    os.environ["FLASHINFER_WORKSPACE_BASE"] = build
    sys.path[:0] = [package, needs]
    import flashinfer

    without_a_device()
    found: dict[str, dict[str, Any]] = {}
    heads: list[str] = []
    note_modules(found, heads)
    for num_heads, num_kv_heads, head_dim in START_HEADS:
        heads.append(f"{num_heads}/{num_kv_heads}/{head_dim}")
        for module in (flashinfer.decode, flashinfer.prefill):
            for name in ("get_batch_prefill_module", "get_batch_decode_module"):
                if hasattr(module, name):
                    getattr(module, name).cache_clear()
        shape = KVShape(1, num_heads, num_kv_heads, head_dim, PAGE_SIZE, torch.bfloat16, CPU)
        run_start(shape, flashinfer)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
