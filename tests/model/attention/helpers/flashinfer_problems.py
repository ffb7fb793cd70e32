"""Random ragged batches for the FlashInfer backend."""

import torch
from hypothesis import strategies as st

from tests.model.helpers.paged_problems import CPU, Segment
from tokasaurus.model.attention.backend import KVShape


@st.composite
def problems(draw: st.DrawFn) -> tuple[KVShape, list[Segment], bool, int]:
    """A shape with 2 layers, segments, whether they are causal, and a seed. Half of the batches only decode."""
    num_kv_heads = draw(st.sampled_from([1, 2, 3]))
    shape = KVShape(
        num_layers=2,
        num_heads=num_kv_heads * draw(st.integers(1, 8)),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([64, 128])),
        page_size=draw(st.sampled_from([1, 5, 16])),
        dtype=torch.float32,
        device=CPU,
    )
    max_rows = draw(st.sampled_from([1, 40]))
    segment = st.builds(
        lambda rows, before: Segment(rows, rows + before),
        st.integers(1, max_rows),
        st.sampled_from([0, 1, 15, 16, 100, 300]),
    )
    return shape, draw(st.lists(segment, min_size=1, max_size=5)), draw(st.booleans()), draw(st.integers(0, 99))
