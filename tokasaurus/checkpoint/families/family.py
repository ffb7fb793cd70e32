"""What a family states: its config.json as a ModelSpec, its keys, and how its tensors are stored."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from tokasaurus.checkpoint.json_files import CheckpointError, Fields, flag, json_object, positive_float, positive_int
from tokasaurus.checkpoint.rope import MAX_CONTEXT, RopeInfo, parse_rope
from tokasaurus.checkpoint.spec import (
    Activation,
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    RouterSpec,
)

# Far above every published model. They keep the products of sizes below 2**63, and refuse a damaged or hostile file
# before memory is allocated for it.
_MAX_LAYERS = 10_000
_MAX_HEADS = 1 << 16
_MAX_HEAD_DIM = 1 << 14
_MAX_WIDTH = 1 << 24  # of hidden states, of the MLP, and of the vocabulary
_MAX_FACTOR = 1e6
_MAX_EXPERTS = 1 << 14

_OF_EXPERT = re.compile(r"(mlp\.experts\.)([0-9]+)(\..+)")

FULL, SLIDING = "full_attention", "sliding_attention"
_LAYER_TYPES = {FULL: FULL, "attention": FULL, SLIDING: SLIDING}
"""Names in layer_types."""

_ACTIVATIONS: dict[str, Activation] = {
    **{"silu": "silu", "swish": "silu", "gelu": "gelu", "relu2": "relu2"},
    **{"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh"},
    "xielu": "xielu",
}


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """How the weights of a layer's experts are stored together: in tensors of one dimension more."""

    gate_up: str
    """Name of the tensor with gates and ups, within a layer."""
    down: str
    is_transposed: bool = False
    """Inputs come before outputs, and biases are stored as name + "_bias"."""
    takes_turns: bool = False
    """Gates and ups are by turns, else all gates come first."""


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """How a family's checkpoint has the tensors of Llama's layer."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Name of a module here -> in the checkpoint, where they differ; within "model.layers.0." or at the top. Modules
    are named as Llama's, and the norms of outputs "attention_out_norm" and "mlp_out_norm"; a router "mlp.gate", a
    module of each expert such as "mlp.experts.*.up_proj", one of the shared expert such as "mlp.shared.up_proj", and
    its gate "mlp.shared_gate"."""
    fused: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Name of a module in the checkpoint -> modules here whose outputs it has, one after another."""
    by_head: tuple[str, ...] = ()
    """Modules of `fused` that are divided by heads first: each head has its outputs of all of them, one after another.
    Heads are those of queries, in layers with a state those of keys."""
    adds_one: bool = False
    """Norms scale by 1 + the stored weight."""
    is_interleaved: bool = False
    """Rotary embedding turns adjacent channels, (0, 1), (2, 3), and so on, not those half a head apart."""
    norms_by_head: bool = False
    """Weights of the norms of queries and keys are stored by head, [heads, head size]."""
    stack: ExpertStack | None = None
    """How experts are stored in files that have them together; None: no files have."""
    choice_bias: str = "e_score_correction_bias"
    """Name of a router's choice bias, within "mlp.choice"."""
    has_choice_bias_row: bool = False
    """A router's choice bias is stored as a matrix of one row."""
    is_shared_alone: bool = False
    """The shared expert is stored as the MLP of layers without experts is."""
    has_draft_layers: bool = False
    """Files may have layers beyond the model's own, which draft tokens and are not read."""

    def name(self, module: str) -> str:
        """Of a module here -> in the checkpoint."""
        if module in self.names or not (expert := _OF_EXPERT.fullmatch(module)):
            return self.names.get(module, module)
        pattern = f"{expert[1]}*{expert[3]}"
        return self.names.get(pattern, pattern).replace("*", expert[2])

    def place(self, module: str) -> tuple[str, list[str]]:
        """The checkpoint's module that has this one, and the modules here whose outputs come before it."""
        if self.is_shared_alone:
            module = module.replace("mlp.shared.", "mlp.")
        for fused, parts in self.fused.items():
            if module in parts:
                return fused, list(parts[: parts.index(module)])
        return self.name(module), []


@dataclass(frozen=True, slots=True)
class GGUFFiles:
    """How llama.cpp writes a family's models. Norms that scale by 1 + weight have the 1 in their weights there."""

    architecture: str
    """general.architecture; of families that share one, the last whose `needed` keys a file has is meant."""
    needed: tuple[str, ...] = ()
    """Keys of the metadata, without the architecture."""
    is_permuted: bool = False
    """The rows of queries and keys have another order than in the checkpoint: see gguf.blocks.unpermuted_rows."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Name of a layer's tensor in files, without "weight" -> of the module here, where it is not the usual one."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Of config.json, where the metadata lack a key."""
    ignored: tuple[str, ...] = ()
    """Keys of the metadata whose value the family always has."""
    required: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the metadata -> their only value that the family computes, if a file has them."""


class Settings:
    """One config.json, as the families read it. Errors are CheckpointError, and name the field."""

    def __init__(self, fields: Fields, family: "Family") -> None:
        self.family = family
        self._stored = fields
        self.fields = {**family.defaults, **fields}
        self.hidden_size = positive_int(self.fields, "hidden_size", _MAX_WIDTH)
        self.num_layers = positive_int(self.fields, "num_hidden_layers", _MAX_LAYERS)
        self.num_heads = positive_int(self.fields, "num_attention_heads", _MAX_HEADS)
        default = self.num_heads if family.is_kv_heads_optional else None
        self.num_kv_heads = positive_int(self.fields, "num_key_value_heads", _MAX_HEADS, default)
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}"
            )
        default_head_dim = self.hidden_size // self.num_heads
        self.head_dim = default_head_dim
        if not family.ignores_head_dim:
            self.head_dim = positive_int(self.fields, "head_dim", _MAX_HEAD_DIM, default_head_dim)
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim {self.head_dim} is odd, which rotary embedding does not allow")
        self.vocab_size = positive_int(self.fields, "vocab_size", _MAX_WIDTH)
        self.width = positive_int(self.fields, "intermediate_size", _MAX_WIDTH)
        self.max_positions = positive_int(self.fields, "max_position_embeddings", MAX_CONTEXT)

    def flag(self, name: str) -> bool:
        return flag(self.fields, name)

    def number(self, name: str, default: float | None = None) -> float:
        return positive_float(self.fields, name, _MAX_FACTOR, default)

    def optional(self, name: str) -> float | None:
        """None if the field is absent or null."""
        return None if self.fields.get(name) is None else self.number(name)

    def count(self, name: str) -> int:
        value = self.fields.get(name)
        if type(value) is not int or value < 0:
            raise CheckpointError(f"{name} must be a whole number, not {value!r}")
        return value

    def norm(self, key: str = "rms_norm_eps", **options: Any) -> NormSpec:
        """key: of eps. options: fields of NormSpec."""
        return NormSpec(positive_float(self.fields, key, 1.0, default=1e-6), **options)

    def attention(self, **options: Any) -> AttentionSpec:
        """options: fields of AttentionSpec, whose heads and head size are those of config.json."""
        return AttentionSpec(
            *(self.num_heads, self.num_kv_heads, self.head_dim), **{"scale": self.head_dim**-0.5, **options}
        )

    def mlp(self, activation_key: str = "hidden_act", **options: Any) -> MLPSpec:
        """options: fields of MLPSpec, whose width and activation are those of config.json."""
        name = self.fields.get(activation_key, "silu")
        if not isinstance(name, str) or name not in _ACTIVATIONS:
            allowed = ", ".join(map(repr, _ACTIVATIONS))
            raise CheckpointError(f"{activation_key} {name!r} is not supported, only {allowed}")
        return MLPSpec(self.width, **{"activation": _ACTIVATIONS[name], **options})

    def experts(
        self,
        num_experts: str,
        width: str = "intermediate_size",
        num_chosen: str = "num_experts_per_tok",
        shared_width: int = 0,
        has_shared_gate: bool = False,
        mlp: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> ExpertsSpec:
        """num_experts, width, num_chosen: keys; "|" is between keys of which one is there. shared_width: 0 if no expert
        is shared. mlp: options of Settings.mlp. options: fields of RouterSpec."""
        count_key, count = self._one_of(num_experts, _MAX_EXPERTS)
        chosen_key, chosen = self._one_of(num_chosen, _MAX_EXPERTS)
        if chosen > count:
            raise CheckpointError(f"{chosen_key} {chosen} is more than {count_key} {count}")
        router = RouterSpec(count, chosen, **options)
        groups = router.num_groups
        if count % groups or router.num_chosen_groups > groups:
            raise CheckpointError(f"{count_key} {count}: {router.num_chosen_groups} of {groups} groups is not possible")
        if groups > 1 and (count // groups < 2 or chosen > router.num_chosen_groups * (count // groups)):
            raise CheckpointError(f"{chosen_key} {chosen}: {groups} groups have too few of {count_key} {count}")
        expert = replace(self.mlp(**mlp), width=self._one_of(width, _MAX_WIDTH)[1])
        if shared_width > _MAX_WIDTH:
            raise CheckpointError(f"a shared expert of width {shared_width} is too large")
        shared = replace(expert, width=shared_width) if shared_width else None
        return ExpertsSpec(router, expert, shared, has_shared_gate)

    def _one_of(self, keys: str, maximum: int) -> tuple[str, int]:
        """The key that is there, or else has a default, and its value."""
        names = keys.split("|")
        name = next((each for each in names if self._stored.get(each) is not None), names[0])
        return name, positive_int(self.fields, name, maximum)

    @cached_property
    def rope(self) -> RopeInfo:
        """The rotary setting of a model that has one."""
        return self._checked(parse_rope(self.fields, self.max_positions, self.family.has_partial_rotary))

    def _checked(self, rope: RopeInfo) -> RopeInfo:
        num_rotated = rope.num_rotated(self.head_dim)
        if num_rotated < 2 or num_rotated % 2:
            raise CheckpointError(f"partial_rotary_factor {rope.partial_factor:g} makes {num_rotated} channels rotate")
        for name, factors in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors)):
            if rope.scaling_type == "longrope" and len(factors) != num_rotated // 2:
                raise CheckpointError(f"{name} has {len(factors)} numbers for {num_rotated // 2} frequencies")
        return rope

    def rotary_by_type(self, theta_of_windows: str) -> tuple[RopeInfo, RopeInfo]:
        """The rotary settings of layers that see all tokens, and of those with a window, which have no scaling unless
        rope_parameters give them one. theta_of_windows: key of their rope_theta beside these."""
        parameters = json_object(self.fields, "rope_parameters")
        by_type = parameters if any(isinstance(each, dict) for each in parameters.values()) else {}
        # One setting for all is that of the flag rope_scaling=, which leaves windows as they are.
        settings = [dict(json_object(by_type, FULL) if by_type else parameters), dict(json_object(by_type, SLIDING))]
        settings[0].update(json_object(self.fields, "rope_scaling"))
        for setting, key in zip(settings, ("rope_theta", theta_of_windows), strict=True):
            setting.setdefault("rope_theta", self.fields[key])
        names = ("original_max_position_embeddings", "partial_rotary_factor")
        beside = {name: self.fields[name] for name in names if name in self.fields}
        full, sliding = (
            self._checked(parse_rope({**beside, "rope_parameters": each}, self.max_positions)) for each in settings
        )
        return full, sliding

    def layer_types(self, default: Callable[[int], bool] | None = None) -> list[str]:
        """FULL or SLIDING for each layer. default: whether a layer has a window where the field is absent."""
        types = self.fields.get("layer_types") or []
        allowed = _LAYER_TYPES if default is not None else {name for name in _LAYER_TYPES if name != SLIDING}
        if not isinstance(types, list) or any(not isinstance(each, str) or each not in allowed for each in types):
            raise CheckpointError(f"layer_types {types!r} is not supported, only {', '.join(map(repr, allowed))}")
        if types and len(types) != self.num_layers:
            raise CheckpointError(f"layer_types has {len(types)} entries for num_hidden_layers {self.num_layers}")
        if types:
            return [_LAYER_TYPES[each] for each in types]
        return [SLIDING if default is not None and default(index) else FULL for index in range(self.num_layers)]

    def windows(self, default: Callable[[int], bool] = lambda _: False) -> list[int | None]:
        """The window of each layer; None: it sees all. default: as of layer_types."""
        types = self.layer_types(default)
        if SLIDING not in types:
            return [None] * self.num_layers
        window = positive_int(self.fields, "sliding_window", MAX_CONTEXT)
        return [window if each == SLIDING else None for each in types]

    @property
    def window(self) -> int | None:
        """The one window of a family whose layers are all alike; None: they see all tokens."""
        self.no_windows()
        name = "sliding_window"
        return None if self.fields.get(name) is None else positive_int(self.fields, name, MAX_CONTEXT)

    def no_windows(self) -> list[None]:
        """None for each layer, once layer_types is known to agree."""
        self.layer_types()
        return [None] * self.num_layers

    def model(self, layers: LayerSpec | Sequence[LayerSpec], final_norm: NormSpec, **options: Any) -> ModelSpec:
        """layers: one for all, or each. options: fields of ModelSpec."""
        if isinstance(layers, LayerSpec):
            layers = [layers for _ in self.no_windows()]
        if "rotary" not in options:
            options["rotary"] = (self.rope,)
        return ModelSpec(tuple(layers), self.hidden_size, self.vocab_size, final_norm, **options)


@dataclass(frozen=True, slots=True)
class Family:
    """One model_type of config.json."""

    architecture: str
    """The class name in `architectures`, or one of `other_architectures`; no other is accepted."""
    spec_of: Callable[[Settings], ModelSpec]
    applied: tuple[str, ...] = ()
    """Keys of config.json that spec_of reads, beyond those of every family (config_keys)."""
    refused: tuple[str, ...] = ()
    """Keys of features that are not computed: a checkpoint that sets one is refused, by name."""
    without_effect: tuple[str, ...] = ()
    """Keys that change no token, here and in transformers, beyond those of every family."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of absent keys, as of its class in transformers."""
    stored: StoredTensors = field(default_factory=StoredTensors)
    is_kv_heads_optional: bool = False
    """Without num_key_value_heads, there are as many as query heads."""
    ignores_head_dim: bool = False
    """Heads always divide the hidden size."""
    has_partial_rotary: bool = False
    """partial_rotary_factor counts."""
    with_images: tuple[str, str] | None = None
    """model_type and architecture of checkpoints that have this text model, in text_config, beside one for images."""
    other_architectures: tuple[str, ...] = ()
    gguf: GGUFFiles | None = None
    """None: GGUF files of it are not read."""
