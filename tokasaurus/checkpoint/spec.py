"""What a model's layers compute, layer by layer, in the field's words. Needs no torch.

Loading makes equal what it can, so these are no options: norms that scale by 1 + weight, rotary embedding of
interleaved channels or of a part of each head (see model/decoder/stored_tensors), and tensors stored fused or split.
"""

from collections.abc import Iterable
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
    has_out_gate: bool = False
    """What is attended is multiplied by the sigmoid of a linear layer's outputs, before the output projection."""


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


def _state_row(recurrent: int, conv: int) -> int:
    """Numbers of a sequence's state in a layer: whole cache lines."""
    return -(-(recurrent + conv) // 16) * 16


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec:
    """Gated DeltaNet, arXiv 2412.06464: queries, keys and values pass a short convolution; each value head has a matrix
    as its state, which decays by a token's gate, and learns the token's value for its key. An RMS norm of each head's
    output comes before the output gate."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    """Numbers of a head's key, and of its query."""
    value_dim: int
    conv_size: int
    """Tokens that the convolution sees, the current one among them."""
    eps: float
    """Of the norm of outputs."""

    def num_recurrent(self, tp_size: int) -> int:
        """Numbers of a rank's recurrent state: [value heads, key_dim, value_dim]."""
        return self.num_value_heads // tp_size * self.key_dim * self.value_dim

    def num_channels(self, tp_size: int) -> int:
        """Channels of a rank's convolution: of queries, keys, and values."""
        return (2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim) // tp_size

    def num_numbers(self, tp_size: int) -> int:
        """Of a sequence's state on one rank: recurrent, then [conv_size - 1, channels], then padding."""
        return _state_row(self.num_recurrent(tp_size), (self.conv_size - 1) * self.num_channels(tp_size))

    @property
    def units(self) -> dict[str, int]:
        """What tensor-parallel ranks divide."""
        return {"key heads of states": self.num_key_heads}

    @property
    def output_sizes(self) -> dict[str, int]:
        """As of LayerSpec."""
        key, value = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        sizes = {"q_proj": key, "k_proj": key, "v_proj": value, "z_proj": value}
        sizes |= {"b_proj": self.num_value_heads, "a_proj": self.num_value_heads}
        return {f"state.{name}": size for name, size in sizes.items()}


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """A gated convolution over the last tokens, c * conv(b * x), between two linear layers."""

    width: int
    conv_size: int
    has_bias: bool = False
    """The convolution and both linear layers have biases."""

    def num_recurrent(self, tp_size: int) -> int:  # noqa: ARG002  (as the others have it)
        return 0

    def num_channels(self, tp_size: int) -> int:
        return self.width // tp_size

    def num_numbers(self, tp_size: int) -> int:
        """As of GatedDeltaSpec."""
        return _state_row(0, (self.conv_size - 1) * self.num_channels(tp_size))

    @property
    def units(self) -> dict[str, int]:
        return {"channels of states": self.width}

    @property
    def output_sizes(self) -> dict[str, int]:
        """As of LayerSpec."""
        return {f"state.{name}_proj": self.width for name in "bcx"}


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """Mamba 2, arXiv 2405.21060: x, B and C pass a short convolution; each head has a matrix as its state, which decays
    by the head's rate and the token's time step, and gets the token's x for its B; heads of a group share B and C."""

    num_heads: int
    head_dim: int
    state_size: int
    """Numbers of a group's B, and of its C."""
    num_groups: int
    conv_size: int
    eps: float
    has_conv_bias: bool = True
    has_bias: bool = False
    """Of the projection of inputs."""
    has_out_bias: bool = False
    has_norm: bool = True
    """Outputs are normalised, group by group."""
    norm_before_gate: bool = False
    """The norm is of outputs that the gate has not multiplied yet."""
    min_step: float = 0.0
    """Of time steps."""
    scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """Factors of the projections: gate, x, B, C, time step."""

    def num_rank_groups(self, tp_size: int) -> int:
        """All ranks have a single group; they divide several."""
        return max(1, self.num_groups // tp_size)

    def num_recurrent(self, tp_size: int) -> int:
        """Numbers of a rank's recurrent state: [heads, state_size, head_dim]."""
        return self.num_heads // tp_size * self.state_size * self.head_dim

    def num_channels(self, tp_size: int) -> int:
        """Channels of a rank's convolution: of x, B and C."""
        return self.num_heads // tp_size * self.head_dim + 2 * self.num_rank_groups(tp_size) * self.state_size

    def num_numbers(self, tp_size: int) -> int:
        """As of GatedDeltaSpec."""
        return _state_row(self.num_recurrent(tp_size), (self.conv_size - 1) * self.num_channels(tp_size))

    @property
    def units(self) -> dict[str, int]:
        groups = {"groups of states": self.num_groups} if self.num_groups > 1 else {}
        return {"heads of states": self.num_heads, **groups}

    @property
    def output_sizes(self) -> dict[str, int]:
        """As of LayerSpec."""
        width, group = self.num_heads * self.head_dim, self.num_groups * self.state_size
        sizes = {"z_proj": width, "x_proj": width, "b_proj": group, "c_proj": group, "dt_proj": self.num_heads}
        return {f"state.{name}": size for name, size in sizes.items()}


StateSpec = GatedDeltaSpec | ShortConvSpec | Mamba2Spec
"""A state of fixed size beside, or in place of, keys and values."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: hidden + attention, then hidden + MLP, each of the normed hidden states."""

    attention: AttentionSpec | None
    """None: the layer has a state in its place, or neither."""
    mlp: MLPSpec | ExpertsSpec | None
    attention_norm: NormSpec | None
    """Of the input of attention and state."""
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
    state: StateSpec | None = None
    """Of the layer's state; its output is added as attention's is."""
    weight_factors: tuple[tuple[str, float], ...] = ()
    """What tensors are multiplied by while they are loaded, by names such as "self_attn.q_proj.weight"."""

    @property
    def has_out_gate(self) -> bool:
        """Whether what is attended has a gate."""
        return self.attention is not None and self.attention.has_out_gate

    @property
    def own_attention(self) -> AttentionSpec:
        """Of a layer that is known to have it."""
        assert self.attention is not None
        return self.attention

    @property
    def is_plain(self) -> bool:
        """Whether it is the layer of Llama, Qwen 2 and Qwen 3: RMS norms before attention and MLP, optionally a bias of
        queries, keys and values and a norm of each head's query and key before rotary; gated silu. How scores are made
        is the attention backend's matter."""
        attention = self.attention
        if attention is None or self.mlp is None or self.state is not None or attention.has_out_gate:
            return False
        norm = attention.query_key_norm
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
        sizes = {} if self.state is None else self.state.output_sizes
        if attention is not None:
            query, key = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
            sizes |= {"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": key}
            sizes |= {"self_attn.gate_proj": query} if attention.has_out_gate else {}
        if mlp is None:
            return sizes
        if isinstance(mlp, ExpertsSpec):
            return sizes | {ROUTER: mlp.router.num_experts}
        return sizes | {"mlp.up_proj": mlp.width} | ({"mlp.gate_proj": mlp.width} if mlp.is_gated else {})


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole model."""

    layers: tuple[LayerSpec, ...]
    """Those with attention have the same heads and head size."""
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
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """Of the layers that have it."""
        return attentions_of(self.layers)

    @property
    def mlps(self) -> tuple[MLPSpec | ExpertsSpec, ...]:
        """Of the layers that have one."""
        return tuple(layer.mlp for layer in self.layers if layer.mlp is not None)

    @property
    def has_states(self) -> bool:
        """Whether any layer has a state."""
        return any(layer.state is not None for layer in self.layers)

    @property
    def num_chosen_experts(self) -> int:
        """Most experts that a layer chooses for a token; 0 if none has experts."""
        return max((mlp.num_rows for mlp in self.mlps), default=0)

    @property
    def num_experts(self) -> int:
        """Most experts of a layer among which a router chooses."""
        return max((mlp.router.num_experts for mlp in self.mlps if isinstance(mlp, ExpertsSpec)), default=0)

    @property
    def num_rotary_tables(self) -> int:
        """Tables of cosines and sines: those of `rotary`, and one that rotates nothing if any layer has none."""
        return len(self.rotary) + any(attention.rotary is None for attention in self.attentions)

    def table_of(self, layer: LayerSpec) -> int:
        """Index of the layer's table among the num_rotary_tables; 0 if it has no attention."""
        if layer.attention is None:
            return 0
        return len(self.rotary) if layer.attention.rotary is None else layer.attention.rotary


def attentions_of(layers: Iterable[LayerSpec]) -> tuple[AttentionSpec, ...]:
    """Of those that have it."""
    return tuple(layer.attention for layer in layers if layer.attention is not None)
