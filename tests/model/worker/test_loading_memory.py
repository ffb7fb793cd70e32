"""What loading a model takes beside its packed weights, by a real worker's phases."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.cpu_table.models import write_gguf
from benchmarks.random_models import ModelShape
from tests.model.helpers.peak_memory import anonymous
from tokasaurus.checkpoint import resolve_checkpoint
from tokasaurus.config import ServerConfig
from tokasaurus.model.decoder.weights import return_freed_memory
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker.entry import load_worker
from tokasaurus.model.worker.start import PhaseLog

SHAPE = ModelShape("0.6B", 1024, 2048, 768, 2, 16, 4, 128, is_tied=False, num_experts=64, num_chosen=8)
MOST_BESIDE = 512 << 20
"""Bytes: the gates and ups of a layer's experts in bfloat16 take 384 MiB of them."""


@contextmanager
def highest() -> Iterator[list[int]]:
    """Yields the largest number of bytes within the context, without mapped files: looked at every few milliseconds."""
    found, is_over = [anonymous()], threading.Event()

    def look() -> None:
        while not is_over.wait(0.005):
            found[0] = max(found[0], anonymous())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "flags"), [("Q4_K_M", []), ("bfloat16", []), ("bfloat16", ["quantization=int8"])], ids=str
)
def test_experts_are_in_memory_once(
    kind: str, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "model.gguf", SHAPE, kind)
    config = ServerConfig.parse(["device=cpu", "dtype=bfloat16", "kv_cache_num_tokens=4096", *flags])
    with monkeypatch.context() as changed:  # the cache has the kernels, too
        changed.setenv("TOKA_CACHE", str(tmp_path / "cache"))
        checkpoint = resolve_checkpoint(str(tmp_path / "model.gguf"))
    gc.collect()  # what an earlier test has loaded
    return_freed_memory()
    before = anonymous()
    with highest() as most:
        loaded = load_worker(config, checkpoint, Mesh(), 0, PhaseLog(lambda _: None))
    num_bytes = sum(each.num_bytes for each in loaded.model.packed_weights)
    num_bytes += sum(each.nbytes for each in loaded.model.parameters())
    assert num_bytes > 300 << 20
    assert most[0] - before < 1.05 * num_bytes + MOST_BESIDE
