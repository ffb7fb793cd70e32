"""Weights reach a device through two pinned buffers, with the numbers that plain copies give."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from tests.checkpoint.helpers.gguf_files import random_weights, write_gguf
from tests.checkpoint.helpers.quantised_models import save_quantised_model
from tests.checkpoint.helpers.quantised_weights import Format
from tests.helpers.tiny_model import save_tiny_model
from tests.model.helpers.pretend_device import HostTransfers, PretendEvent
from tokasaurus.checkpoint import CheckpointError, fit_to_tensors, read_model_info, resolve_checkpoint, weight_files
from tokasaurus.model.decoder import uploads as uploads_module
from tokasaurus.model.decoder import weights as weights_module
from tokasaurus.model.decoder.decoder import Decoder, build_decoder
from tokasaurus.model.decoder.uploads import Uploads, uploads_to
from tokasaurus.model.decoder.weights import load_weights, write_update
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.staging.staging import Event

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8)


class CountingTransfers(HostTransfers):
    """Transfers to the host's memory that say what was sent, and what was on its way meanwhile."""

    def __init__(self, is_late: bool = False) -> None:
        super().__init__(is_late)
        self.events: list[PretendEvent] = []
        self.sent: list[tuple[int, int]] = []
        """Bytes of each upload, and how many uploads before it were not done."""

    def upload(self, source: Tensor, target: Tensor, after: Event) -> Event:
        self.sent.append((source.nbytes, sum(not event.is_done for event in self.events)))
        event = super().upload(source, target, after)
        assert isinstance(event, PretendEvent)
        self.events.append(event)
        return event


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 50).to(dtype)


@pytest.mark.parametrize("num_buffer_bytes", [8, 24, 120, 1 << 20])
@pytest.mark.parametrize(
    "source",
    [
        pytest.param(numbers((1,)), id="one number"),
        pytest.param(numbers((31,)), id="vector"),
        pytest.param(numbers((7, 13)), id="rows"),
        pytest.param(numbers((7, 26))[:, 5:18], id="columns"),
        pytest.param(numbers((9, 4))[2:9], id="later rows"),
        pytest.param(numbers((5, 11)).T, id="transposed"),
        pytest.param(numbers((3, 2, 7)), id="three dimensions"),
        pytest.param(numbers((0, 4)), id="nothing"),
    ],
)
def test_copies_that_end_late_have_the_bytes_of_the_source(source: Tensor, num_buffer_bytes: int) -> None:
    """Copies run when the host waits for their end: a buffer that is filled before that would spoil them."""
    transfers = CountingTransfers(is_late=True)
    uploads = Uploads(transfers, num_buffer_bytes)
    targets = [torch.full_like(source, torch.nan) for _ in range(3)]
    sources = [source.clone() * factor for factor in (1, -1, 2)]
    for target, each in zip(targets, sources, strict=True):
        uploads.copy(target, each)
    expected = [each.clone() for each in sources]
    for each in sources:
        each.zero_()  # it has been read
    uploads.finish()
    for target, each in zip(targets, expected, strict=True):
        assert torch.equal(target, each)
    assert sum(num_bytes for num_bytes, _ in transfers.sent) == 3 * source.nbytes
    assert all(num_bytes <= num_buffer_bytes for num_bytes, _ in transfers.sent)


def test_one_buffer_is_filled_while_the_other_is_copied() -> None:
    transfers = CountingTransfers(is_late=True)
    uploads = Uploads(transfers, 64)
    uploads.copy(torch.empty(16, 7), numbers((16, 7)))
    assert [on_the_way for _, on_the_way in transfers.sent] == [0] + [1] * 7
    assert len(transfers.buffers) == 2
    assert len({source for source, _ in transfers.uploads}) == 2
    uploads.finish()
    assert all(event.is_done for event in transfers.events)


@pytest.mark.parametrize("stored", DTYPES, ids=str)
@pytest.mark.parametrize("wanted", DTYPES, ids=str)
def test_numbers_of_another_dtype_are_those_of_a_plain_copy(stored: torch.dtype, wanted: torch.dtype) -> None:
    source = numbers((9, 7), stored)
    expected, found = torch.empty(9, 7, dtype=wanted), torch.empty(9, 7, dtype=wanted)
    expected.copy_(source)
    transfers = CountingTransfers()
    uploads = Uploads(transfers, 48)
    uploads.copy(found, source)
    assert torch.equal(found, expected)
    sent = sum(num_bytes for num_bytes, _ in transfers.sent)
    assert sent == 63 * min(stored.itemsize, wanted.itemsize), "the smaller dtype is sent"


def test_targets_between_other_numbers_leave_these_alone() -> None:
    around = torch.zeros(8, 10)
    uploads = Uploads(CountingTransfers(is_late=True), 32)
    uploads.copy(around[1:7, 2:9], numbers((6, 7)))
    uploads.finish()
    assert torch.equal(around[1:7, 2:9], numbers((6, 7)))
    around[1:7, 2:9] = 0
    assert not around.any()


def build(directory: Path, mesh: Mesh, dtype: torch.dtype) -> Decoder:
    info = fit_to_tensors(read_model_info(directory), weight_files(directory))
    model = build_decoder(info, mesh, dtype)
    model.materialize(torch.device("cpu"), 512)
    return model


def save_model(name: str, directory: Path) -> Path:
    if name.startswith("gguf"):
        path = directory / "model.gguf"
        kind = Kind.F16 if name == "gguf" else Kind.Q4_1
        write_gguf(path, "llama", random_weights("llama", tied=False), kind)
        return resolve_checkpoint(str(path)).directory
    if name == "awq":
        save_quantised_model(directory, "llama", Format("awq"))
    else:
        save_tiny_model(directory, "qwen2", max_shard_size="300KB")
    return directory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["safetensors", "gguf", "gguf blocks", "awq"])
def test_a_loaded_or_updated_model_has_the_weights_of_plain_copies(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))
    directory = save_model(name, tmp_path)
    files, quantization = weight_files(directory), read_model_info(directory).quantization
    for rank in range(2):
        mesh = Mesh(tp_rank=rank, tp_size=2)
        expected = build(directory, mesh, dtype)
        load_weights(files, expected.weight_shards(), expected.ignores, quantization=quantization)
        for write in (False, True):
            found = build(directory, mesh, dtype)
            uploads = Uploads(CountingTransfers(), 1000)
            shards = found.weight_shards()
            if write:
                write_update(files, shards, quantization, uploads)
            else:
                load_weights(files, shards, found.ignores, quantization=quantization, uploads=uploads)
            uploads.finish()
            for parameter, other in zip(found.parameters(), expected.parameters(), strict=True):
                assert torch.equal(parameter, other)


@pytest.mark.parametrize("update", [False, True])
def test_after_an_error_no_copy_is_on_its_way(update: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path, "llama")
    made: list[CountingTransfers] = []

    def make(_device: torch.device) -> CountingTransfers:
        made.append(CountingTransfers(is_late=True))
        return made[-1]

    monkeypatch.setattr(uploads_module, "CudaTransfers", make)
    monkeypatch.setattr(uploads_module, "BUFFER_BYTES", 1000)
    model = build(tmp_path, Mesh(), torch.float32)
    real_open = weights_module.open_files

    def open_files(*args: Any) -> Iterator[Any]:
        """A file whose last tensor cannot be read."""
        for file in real_open(*args):
            last, real_parts = file.names()[-1], file.parts

            def parts(name: str, shard: tuple[slice, ...], last: str = last, real: Any = real_parts) -> Any:
                if name == last:
                    raise CheckpointError("the disk has failed")
                return real(name, shard)

            file.parts = parts
            yield file

    monkeypatch.setattr(weights_module, "open_files", open_files)
    files, shards = weight_files(tmp_path), model.weight_shards()

    def read() -> None:
        with uploads_to(torch.device("cuda", 0)) as uploads:
            if update:
                write_update(files, shards, None, uploads)
            else:
                load_weights(files, shards, model.ignores, uploads=uploads)

    with pytest.raises(CheckpointError, match="the disk has failed"):
        read()
    (transfers,) = made
    assert transfers.events
    assert all(event.is_done for event in transfers.events)


def test_a_cpu_has_no_uploads() -> None:
    with uploads_to(torch.device("cpu")) as uploads:
        assert uploads is None
