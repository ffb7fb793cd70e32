"""What the torch backend computes of its own: precision, buckets of segments, blocks gathered."""

import time

import pytest
import torch

from tests.model.helpers.float64_attention import attention_beside_float64
from tests.model.helpers.paged_problems import CPU, Segment, attend_all, make_part
from tokasaurus.model.attention import torch_backend
from tokasaurus.model.attention.backend import KVShape, PagedLayout
from tokasaurus.model.attention.torch_backend import TorchBackend


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_16_bit_operands_are_multiplied_and_softened_in_float32(dtype: torch.dtype, head_dim: int) -> None:
    """Scores or scaled queries rounded to bfloat16 would change the LSE by up to 0.05."""
    shape = KVShape(1, 6, 2, head_dim, 16, dtype, CPU)
    segments = [Segment(1, 600), Segment(1, 33), Segment(40, 200)]
    (output, lse), (expected, expected_lse) = attention_beside_float64("torch", shape, segments)
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-5, rtol=0)
    torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=0)


def planned(shape: KVShape, segments: list[Segment], tables: list[list[int]]) -> TorchBackend:
    backend = TorchBackend(shape)
    part = make_part(segments, tables, first_row=0, causal=True)
    backend.plan(PagedLayout(torch.zeros(0, dtype=torch.int64), (part,)))
    return backend


def test_planning_time_is_linear_in_the_segments_of_a_bucket() -> None:
    """Tens of milliseconds; with a loop over all members for each segment, tens of seconds."""
    num_segments = 2**14
    shape = KVShape(1, 1, 1, 16, 16, torch.float32, CPU)
    started_s = time.process_time()
    planned(shape, [Segment(1, 16)] * num_segments, [[1]] * num_segments)
    assert time.process_time() - started_s < 2


def test_early_rows_of_a_long_prefill_gather_only_the_blocks_that_they_see(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = KVShape(2, 2, 1, 16, 16, torch.float32, CPU)
    segments = [Segment(160, 192)]
    monkeypatch.setattr(torch_backend, "_MAX_SCORES", 192 * 2 * 40)  # 40 rows at once
    gathered: list[int] = []
    index_select = torch.Tensor.index_select

    def record(cache: torch.Tensor, dim: int, blocks: torch.Tensor) -> torch.Tensor:
        gathered.append(len(blocks))
        return index_select(cache, dim, blocks)

    monkeypatch.setattr(torch.Tensor, "index_select", record)
    result = attend_all("torch", shape, segments, causal=True, layer=1, seed=2)
    # The last of each 40 rows sees 72, 112, 152 and 192 tokens.
    assert gathered == [num_blocks for num_blocks in (5, 7, 10, 12) for _ in ("keys", "values")]
    monkeypatch.undo()
    torch.testing.assert_close(result, attend_all("reference", shape, segments, True, 1, 2), atol=1e-5, rtol=1e-5)
