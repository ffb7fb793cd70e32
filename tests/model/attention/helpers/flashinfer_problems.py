"""Random ragged batches for the FlashInfer backend."""

import torch
from hypothesis import strategies as st

from tests.model.helpers.paged_problems import CPU, Segment
from tokasaurus.checkpoint.spec import AttentionSpec
from tokasaurus.model.attention.backend import KVShape


@st.composite
def problems(draw: st.DrawFn) -> tuple[KVShape, list[Segment], bool, int]:
    """A shape with 2 layers, segments, whether they are causal, and a seed. Half of the batches only decode. Half of
    the shapes have layers of two kinds, and sinks in the second."""
    num_kv_heads = draw(st.sampled_from([1, 2, 3]))
    num_heads, head_dim = num_kv_heads * draw(st.integers(1, 8)), draw(st.sampled_from([64, 128]))
    causal = draw(st.booleans())
    layers: tuple[AttentionSpec, ...] = ()
    sinks: tuple[torch.Tensor | None, ...] = ()
    if draw(st.booleans()):
        windows = st.sampled_from([None, 1, 7, 100] if causal else [None])
        layers = tuple(
            AttentionSpec(num_heads, num_kv_heads, head_dim, scale, window=draw(windows), softcap=draw(caps))
            for scale, caps in ((head_dim**-0.5, st.none()), (0.07, st.sampled_from([None, 2.0, 30.0])))
        )
        sinks = (None, torch.linspace(-2, 3, num_heads))
    shape = KVShape(
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=layers,
        sinks=sinks,
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
    return shape, draw(st.lists(segment, min_size=1, max_size=5)), causal, draw(st.integers(0, 99))
