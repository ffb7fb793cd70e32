"""What a model's layers compute, layer by layer, in the field's words. Needs no torch.

Loading makes equal what it can, so these are no options: norms that scale by 1 + weight, rotary embedding of
interleaved channels or of a part of each head (see model/decoder/stored_tensors), and tensors stored fused or split.
"""

from dataclasses import dataclass
from typing import Literal

from tokasaurus.checkpoint.rope import RopeInfo

Activation = Literal["silu", "gelu", "gelu_tanh", "relu2", "xielu"]


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A norm over the last dimension."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    has_weight: bool = True
    has_bias: bool = False
    in_float32: bool = False
    """Weights are kept and applied in float32, whatever the model's dtype."""

    @property
    def is_plain(self) -> bool:
        """Whether it is Llama's: an RMS norm with a weight."""
        return self == NormSpec(self.eps)

    @property
    def num_vectors(self) -> int:
        """How many stored vectors it has."""
        return self.has_weight + self.has_bias


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention of a layer, with its projections."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor of the scores, usually head_dim ** -0.5."""
    window: int | None = None
    """A token sees the last `window` tokens, itself among them; None: all."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap); None: they stay."""
    rotary: int | None = 0
    """Index of the rotary table in ModelSpec.rotary; None: queries and keys are not rotated."""
    query_rotary: int | None = None
    """Index of the table of queries; None: they have the table of keys."""
    query_key_norm: NormSpec | None = None
    """Norm of queries and keys, each with its own weights."""
    norm_over: Literal["head", "width"] = "head"
    """Whether query_key_norm is of each head, or of all heads together."""
    norm_by_head: bool = False
    """query_key_norm of "head" has weights for each head, not the same for all."""
    norms_after_rotary: bool = False
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_sinks: bool = False
    """Each query head has a learned score, its sink, beside the tokens' scores; the sink's value is zero."""
    clip: float | None = None
    """Queries, keys and values are clamped to this magnitude, before any norm; None: they are not."""


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """The feed-forward of a layer."""

    width: int
    activation: Activation = "silu"
    is_gated: bool = True
    """down(activation(gate(x)) * up(x)); otherwise down(activation(up(x)))."""
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: hidden + attention, then hidden + MLP, each of the normed hidden states."""

    attention: AttentionSpec
    mlp: MLPSpec
    attention_norm: NormSpec | None
    """Of attention's input."""
    mlp_norm: NormSpec | None
    """Of the MLP's input. With is_parallel, None: the MLP has attention's normed input."""
    attention_out_norm: NormSpec | None = None
    """Of attention's output, before it is added."""
    mlp_out_norm: NormSpec | None = None
    """Of the MLP's output, before it is added."""
    is_parallel: bool = False
    """Attention and MLP have the same input, and both outputs are added to it."""
    residual_multiplier: float = 1.0
    """Factor of what attention and MLP add."""

    @property
    def is_plain(self) -> bool:
        """Whether it is the layer of Llama, Qwen 2 and Qwen 3: RMS norms before attention and MLP, optionally a bias of
        queries, keys and values and a norm of each head's query and key before rotary; gated silu. How scores are made
        is the attention backend's matter."""
        attention, norm = self.attention, self.attention.query_key_norm
        return (
            self.attention_norm is not None
            and self.mlp_norm is not None
            and self.attention_norm.is_plain
            and self.mlp_norm.is_plain
            and self.attention_out_norm is None
            and self.mlp_out_norm is None
            and not self.is_parallel
            and self.residual_multiplier == 1
            and (norm is None or (norm.is_plain and attention.norm_over == "head" and not attention.norm_by_head))
            and not attention.norms_after_rotary
            and attention.query_rotary is None
            and not attention.has_out_bias
            and attention.clip is None
            and self.mlp == MLPSpec(self.mlp.width)
        )

    @property
    def output_sizes(self) -> dict[str, int]:
        """Output features of the linear layers that share an input, by Llama's names."""
        attention, width = self.attention, self.mlp.width
        query, key = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
        sizes = {"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": key, "mlp.up_proj": width}
        return sizes | ({"mlp.gate_proj": width} if self.mlp.is_gated else {})


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole model."""

    layers: tuple[LayerSpec, ...]
    """All have the same heads and head size."""
    hidden_size: int
    vocab_size: int
    final_norm: NormSpec
    rotary: tuple[RopeInfo, ...]
    embedding_scale: float = 1.0
    """Factor of embeddings, rounded to their dtype."""
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    """Logits, scaled, become softcap * tanh(logit / softcap)."""
    has_head_bias: bool = False

    @property
    def num_rotary_tables(self) -> int:
        """Tables of cosines and sines: those of `rotary`, and one that rotates nothing if any layer has none."""
        return len(self.rotary) + any(layer.attention.rotary is None for layer in self.layers)

    def table_of(self, layer: LayerSpec) -> int:
        """Index of the layer's table among the num_rotary_tables."""
        return len(self.rotary) if layer.attention.rotary is None else layer.attention.rotary
