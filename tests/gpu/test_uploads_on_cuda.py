"""Weights through pinned buffers, against plain copies."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.tiny_model import save_tiny_model
from tests.model.helpers.greedy_decoding import load
from tokasaurus.messages.commands import UpdateWeights
from tokasaurus.model.decoder.uploads import Uploads
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.staging.staging import CudaTransfers
from tokasaurus.model.worker.weight_update import WeightUpdates

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

DEVICE = torch.device("cuda", 0)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("stored", DTYPES, ids=str)
@pytest.mark.parametrize("wanted", DTYPES, ids=str)
def test_many_copies_one_after_another_have_the_numbers_of_plain_ones(stored: torch.dtype, wanted: torch.dtype) -> None:
    """Of odd sizes, larger and smaller than a buffer, and of columns; the device is busy meanwhile."""
    generator = torch.Generator().manual_seed(0)
    uploads = Uploads(CudaTransfers(DEVICE), 1 << 20)
    factor = torch.ones(4096, 4096, device=DEVICE)
    sources = [torch.randn(shape, generator=generator).to(stored) for shape in ((999, 1001), (7,), (3000, 777)) * 4]
    sources += [source[:, 5:-3] for source in sources if source.dim() == 2]
    targets = [torch.empty(source.shape, dtype=wanted, device=DEVICE) for source in sources]
    for target, source in zip(targets, sources, strict=True):
        torch.mm(factor, factor)
        uploads.copy(target, source)
    sums = [target.double().sum() for target in targets]  # launched before the copies have ended
    uploads.finish()
    for target, source, found in zip(targets, sources, sums, strict=True):
        expected = torch.empty(source.shape, dtype=wanted).copy_(source)
        assert torch.equal(target.cpu(), expected)
        torch.testing.assert_close(found.cpu(), expected.double().sum())


def test_new_weights_are_in_the_model_after_the_update(tmp_path: Path) -> None:
    for seed, name in enumerate(("old", "new")):
        save_tiny_model(tmp_path / name, "llama", seed=seed)
    model, info = load(tmp_path / "old", device=DEVICE)
    updates = WeightUpdates(model, info, tmp_path / "new", Mesh(), DEVICE)
    assert updates.apply(UpdateWeights(0, str(tmp_path / "new"), "1")) == ""
    expected = load_file(tmp_path / "new" / "model.safetensors")
    for shard in model.weight_shards():
        assert shard.target is not None
        assert torch.equal(shard.target.cpu(), expected[shard.source])
