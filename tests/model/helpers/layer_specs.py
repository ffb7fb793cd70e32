"""Layers with the options of LayerSpec: a few named ones and random ones."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tests.model.helpers.layer_stage import NUM_LAYERS, Layers
from tokasaurus.checkpoint.spec import AttentionSpec, LayerSpec, MLPSpec, NormSpec
from tokasaurus.model.decoder.layers import ACTIVATIONS

_HEADS, _WIDTH = (1, 1, 2, 1.0), 1  # those of the case and of the stage replace them
_RMS, _FLOAT_RMS = NormSpec(1e-5), NormSpec(1e-5, in_float32=True)
_LAYER, _BARE_LAYER = NormSpec(1e-5, "layer", has_bias=True), NormSpec(1e-5, "layer", has_weight=False)


def fitted(layers: Sequence[LayerSpec]) -> Layers:
    """These layers, with the heads and the width of the stage."""

    def fit(layer: LayerSpec, plain: LayerSpec) -> LayerSpec:
        assert isinstance(layer.mlp, MLPSpec)
        assert isinstance(plain.mlp, MLPSpec)
        own, mlp = plain.attention, replace(layer.mlp, width=plain.mlp.width)
        sizes: dict[str, Any] = {name: getattr(own, name) for name in ("num_heads", "num_kv_heads", "head_dim")}
        return replace(layer, attention=replace(layer.own_attention, **sizes), mlp=mlp)

    return lambda plain: [fit(layer, plain) for layer in layers]


def _attention(**options: Any) -> AttentionSpec:
    return replace(AttentionSpec(*_HEADS), **options)


GEMMA, OLMO, PHI, COHERE, OLD_OLMO = (
    LayerSpec(
        _attention(query_key_norm=_FLOAT_RMS, rotary=1),
        MLPSpec(_WIDTH, "gelu_tanh"),
        *(_FLOAT_RMS, _FLOAT_RMS, _FLOAT_RMS, _FLOAT_RMS),
    ),
    LayerSpec(
        _attention(query_key_norm=_RMS, norm_over="width", rotary=None),
        *(MLPSpec(_WIDTH), None, None, _RMS, _RMS),
        residual_multiplier=0.4,
    ),
    LayerSpec(
        _attention(query_key_norm=_LAYER, has_qkv_bias=True, has_out_bias=True),
        *(MLPSpec(_WIDTH, "gelu", is_gated=False, has_bias=True), _LAYER, None),
        is_parallel=True,
    ),
    LayerSpec(
        _attention(query_key_norm=NormSpec(1e-5, "layer"), norm_by_head=True, norms_after_rotary=True),
        *(MLPSpec(_WIDTH, "silu", has_bias=True), _LAYER, _RMS),
        is_parallel=True,
    ),
    LayerSpec(_attention(clip=0.7), MLPSpec(_WIDTH, "relu2", is_gated=False), _BARE_LAYER, _BARE_LAYER),
)
FAMILIES = [fitted((GEMMA, OLMO, PHI)), fitted((COHERE, OLD_OLMO, GEMMA))]
"""Layers as these families have them, with further options that no family of these has."""

_norms = st.builds(
    NormSpec,
    eps=st.sampled_from([1e-6, 1e-2]),
    kind=st.sampled_from(["rms", "layer"]),
    has_weight=st.booleans(),
    has_bias=st.booleans(),
    in_float32=st.booleans(),
)


@st.composite
def _one_layer(draw: st.DrawFn) -> LayerSpec:
    attention_norm = draw(st.none() | _norms)
    norm_over = draw(st.sampled_from(["head", "width"]))
    attention = _attention(
        rotary=draw(st.sampled_from([None, 0, 1])),
        # One of the two: scores have a size at which rounding errors stay small.
        query_key_norm=draw(_norms if attention_norm is None else st.none() | _norms),
        norm_over=norm_over,
        norm_by_head=norm_over == "head" and draw(st.booleans()),
        norms_after_rotary=draw(st.booleans()),
        has_qkv_bias=draw(st.booleans()),
        has_out_bias=draw(st.booleans()),
        clip=draw(st.sampled_from([None, 0.7])),
    )
    activation, is_gated, has_bias = st.sampled_from(list(ACTIVATIONS)), st.booleans(), st.booleans()
    return LayerSpec(
        attention,
        MLPSpec(_WIDTH, draw(activation), draw(is_gated), draw(has_bias)),
        attention_norm,
        draw(st.none() | _norms),
        draw(st.none() | _norms),
        draw(st.none() | _norms),
        is_parallel=draw(st.booleans()),
        residual_multiplier=draw(st.sampled_from([1.0, 0.3])),
    )


def random_layers() -> st.SearchStrategy[Layers]:
    """Each layer is another."""
    return st.lists(_one_layer(), min_size=NUM_LAYERS, max_size=NUM_LAYERS).map(fitted)
