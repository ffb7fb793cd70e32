"""What a model's layers compute, layer by layer, in the field's words. Needs no torch.

Loading makes equal what it can, so these are no options: norms that scale by 1 + weight, rotary embedding of
interleaved channels or of a part of each head (see model/decoder/stored_tensors), and tensors stored fused or split.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from tokasaurus.checkpoint.rope import RopeInfo

ROUTER = "mlp.gate"
"""Name of a router within a layer."""

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
    chunk: int | None = None
    """A token sees only tokens of its own chunk, of so many from position 0 on; None: all. Has no window then."""
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
class GateLimits:
    """A gated output is gate * sigmoid(alpha * gate) * (up + up_offset), with gates of at most `limit` and ups of at
    most this magnitude."""

    limit: float
    alpha: float = 1.0
    up_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """A feed-forward of all tokens."""

    width: int
    activation: Activation = "silu"
    is_gated: bool = True
    """down(activation(gate(x)) * up(x)); otherwise down(activation(up(x)))."""
    has_bias: bool = False
    gate_limits: GateLimits | None = None
    """Of gates, in place of an activation; None: there is one."""

    def widths(self, _has_whole_experts: bool = False) -> tuple[int, ...]:
        """What tensor-parallel ranks divide."""
        return (self.width,)

    num_rows: ClassVar[int] = 0
    """Copies of a token's input."""

    @property
    def row_width(self) -> int:
        """Numbers that its activation gives for a token."""
        return self.width

    @property
    def num_outputs(self) -> int:
        """Outputs of the linear layers whose input is x."""
        return (1 + self.is_gated) * self.width


RouterScores = Literal["softmax", "softmax_of_chosen", "sigmoid", "sparsemixer", "sigmoid_of_chosen"]


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How a token's experts are chosen and weighted: in float32, by scores of the outputs of a linear layer. Of experts
    with the same score, the first are chosen."""

    num_experts: int
    num_chosen: int
    scores: RouterScores = "softmax"
    """"softmax_of_chosen": the largest outputs are chosen, and weights are the softmax of these; "sigmoid_of_chosen":
    the sigmoid of each. "sparsemixer": the weight of each in turn is its softmax among those that are nearly as large,
    arXiv 2409.12136."""
    has_bias: bool = False
    has_choice_bias: bool = False
    """Numbers are added to scores where experts are chosen, but not to weights."""
    num_groups: int = 1
    """Groups of adjacent experts. A token's experts are of its best groups: those whose two largest scores have the
    largest sums."""
    num_chosen_groups: int = 1
    normalizes: bool = False
    """Weights are divided by their sum over a token's experts."""
    min_sum: float = 0.0
    """What they are at least divided by."""
    scale: float = 1.0
    """Factor of weights, applied last."""
    weighs_inputs: bool = False
    """Weights are factors of the experts' inputs, not of their outputs."""
    jitter: float = 0.0
    """Half of the relative distance at which "sparsemixer" leaves outputs out."""


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The feed-forward of a layer where a router chooses some of the experts for each token."""

    router: RouterSpec
    expert: MLPSpec
    """Each of them."""
    shared: MLPSpec | None = None
    """One that every token has, too."""
    has_shared_gate: bool = False
    """The shared one's output is multiplied by the sigmoid of a linear layer's."""

    def widths(self, has_whole_experts: bool = False) -> tuple[int, ...]:
        """What tensor-parallel ranks divide. has_whole_experts: each has some of the experts."""
        parts = (None if has_whole_experts else self.expert, self.shared)
        return tuple(part.width for part in parts if part is not None)

    @property
    def num_rows(self) -> int:
        """Copies of a token's input, one for each of its experts."""
        return self.router.num_chosen

    @property
    def row_width(self) -> int:
        """Numbers that activations give for a token."""
        own = self.router.num_chosen * self.expert.row_width
        return own if self.shared is None else own + self.shared.row_width

    @property
    def num_outputs(self) -> int:
        """Outputs of the linear layers whose input is x, for a token."""
        own = self.router.num_experts + self.router.num_chosen * self.expert.num_outputs
        return own if self.shared is None else own + self.shared.num_outputs


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: hidden + attention, then hidden + MLP, each of the normed hidden states."""

    attention: AttentionSpec
    mlp: MLPSpec | ExpertsSpec
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
            and self.mlp == MLPSpec(self.mlp.row_width)
        )

    @property
    def output_sizes(self) -> dict[str, int]:
        """Output features of the linear layers that share an input, by Llama's names."""
        attention, mlp = self.attention, self.mlp
        query, key = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
        sizes = {"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": key}
        if isinstance(mlp, ExpertsSpec):
            return sizes | {ROUTER: mlp.router.num_experts}
        return sizes | {"mlp.up_proj": mlp.width} | ({"mlp.gate_proj": mlp.width} if mlp.is_gated else {})


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
    def num_chosen_experts(self) -> int:
        """Most experts that a layer chooses for a token; 0 if none has experts."""
        return max(layer.mlp.num_rows for layer in self.layers)

    @property
    def num_experts(self) -> int:
        """Most experts of a layer among which a router chooses."""
        return max(layer.mlp.router.num_experts if isinstance(layer.mlp, ExpertsSpec) else 0 for layer in self.layers)

    @property
    def num_rotary_tables(self) -> int:
        """Tables of cosines and sines: those of `rotary`, and one that rotates nothing if any layer has none."""
        return len(self.rotary) + any(layer.attention.rotary is None for layer in self.layers)

    def table_of(self, layer: LayerSpec) -> int:
        """Index of the layer's table among the num_rotary_tables."""
        return len(self.rotary) if layer.attention.rotary is None else layer.attention.rotary
