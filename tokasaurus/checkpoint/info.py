"""Reads a checkpoint's configuration files.

They are read as plain JSON, since the configuration classes of transformers import torch. config_keys.py lists every
key; both spellings of transformers 4 and 5 are read (torch_dtype and dtype; rope.py has those of rotary settings).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokasaurus.checkpoint.by_transformers import read_facts, spec_of
from tokasaurus.checkpoint.config_keys import left_to_requests, refuse_keys, sampling_defaults_of
from tokasaurus.checkpoint.families import FAMILIES, Settings, is_known, text_fields
from tokasaurus.checkpoint.json_files import CheckpointError, CheckpointUnavailable, Fields, flag, read_json
from tokasaurus.checkpoint.pooling import PoolingInfo, generating_name, read_pooling
from tokasaurus.checkpoint.quantized.config import Quantization, parse_quantization, quantization_beside
from tokasaurus.checkpoint.rope import dropped_theta, extended_context_length, with_rope_scaling
from tokasaurus.checkpoint.spec import ModelSpec
from tokasaurus.messages.sampling import SamplingParams
from tokasaurus.messages.status import FlagRefused, one_line

DTYPES = ("float32", "float16", "bfloat16")

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Names of the two matrices [vocabulary, hidden size] in a checkpoint."""
HEAD_BIAS = "lm_head.bias"


@dataclass(frozen=True, slots=True)
class ClassFacts:
    """What only transformers' class knows of a model."""

    counts: tuple[tuple[int, ...], ...]
    """Parameters of each layer, and last of all that is in no layer, without embedding and LM head: of linear layers
    what tensor-parallel ranks divide and what each of them has; then of other modules likewise."""
    num_embedding: int
    num_head: int
    """Of an LM head, without weights that are the embedding."""
    widest_row: int
    """Most numbers that its layers have in memory at once for each token, on one rank; of float32, each counts as two
    of the model's dtype."""
    settings: str
    """A digest of config.json, but for what says nothing of the computation: two models with the same compute alike."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The contents of config.json and generation_config.json, with the same field names for every family."""

    family: str
    """config.json's model_type, such as "llama"."""
    spec: ModelSpec
    context_length: int
    tie_embeddings: bool
    """Whether embedding and LM head are one matrix: read_model_info takes it from config.json, and
    weight_files.fit_to_tensors corrects it from the stored tensors."""
    eos_ids: tuple[int, ...]
    """Union of eos_token_id in both files; tokenizer_files.with_tokenizer_end adds the tokenizer's."""
    dtype: str
    """dtype of the stored weights, such as "bfloat16"."""
    embedding_tensor: str = EMBEDDING
    """The stored tensor that is the embedding: HEAD where the two are tied and only the LM head is stored."""
    stacks_experts: bool = False
    """Whether the weights of a layer's experts are stored together, as in StoredTensors.stack."""
    expert_block: int = 1
    """Inputs of an expert's last layer that are quantised together."""
    quantization: Quantization | None = None
    """How weights in safetensors files are quantised; None: they are plain numbers. GGUF files say so themselves."""
    of_class: "ClassFacts | None" = None
    """Of a model that transformers' own class computes; None: the families' layers compute it, and spec tells all."""
    pooling: PoolingInfo | None = None
    """What the model makes of a text in place of new tokens; None: it generates."""

    @property
    def is_native(self) -> bool:
        return self.of_class is None

    @property
    def num_layers(self) -> int:
        return len(self.spec.layers)

    @property
    def hidden_size(self) -> int:
        return self.spec.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def num_heads(self) -> int:
        return self.spec.attentions[0].num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.spec.attentions[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.spec.attentions[0].head_dim

    @property
    def intermediate_size(self) -> int:
        """Width of the widest MLP; of experts, those of a token together."""
        return max((mlp.row_width for mlp in self.spec.mlps), default=0)

    @property
    def head_layers(self) -> float:
        """How many layers, of the mean of all, have as much work for a token as the LM head: as many parameters, but of
        experts those of the chosen ones."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        in_mlps = sum(mlp.num_outputs + mlp.row_width for mlp in self.spec.mlps)
        return self.vocab_size / (attention + in_mlps / self.num_layers)


def read_model_info(
    directory: Path, rope_scaling: Fields | None = None, impl: str = "auto", task: str | None = None
) -> ModelInfo:
    """Parse config.json and, if it exists, generation_config.json.

    rope_scaling: the flag, which replaces the model's rotary scaling; raises FlagRefused if it is wrong. impl: the flag
    model_impl, auto, native or transformers. task: the flag; raises FlagRefused if the model does not fit it.

    Raises CheckpointError, naming the file and the field, if a file is missing or malformed, or if this code would
    compute the model wrongly (unknown family, unsupported rotary scaling or format of quantised weights, an adapter).
    """
    refuse_adapter(directory)
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    return read_config(directory / "config.json", generation, rope_scaling, impl, task)


def refuse_adapter(directory: Path) -> None:
    """Raises CheckpointError if transformers, where peft is installed, would add an adapter of this directory to the
    model. It does so by adapter_config.json alone, whatever other files there are."""
    path = directory / ADAPTER_CONFIG
    if not path.is_file():
        return
    merge = "merge it with peft's merge_and_unload"
    if (directory / "config.json").is_file():
        raise CheckpointError(
            f"{directory} has an adapter ({ADAPTER_CONFIG}), which transformers adds to the model and this server does "
            f"not: {merge}, or move that file away to serve the model without it"
        )
    base = read_json(path).get("base_model_name_or_path")
    raise CheckpointError(f"{directory} is an adapter for {base!r}, not a model: {merge}, and serve the result")


def read_config(
    path: Path,
    generation: Mapping[str, Any] | None = None,
    rope_scaling: Fields | None = None,
    impl: str = "auto",
    task: str | None = None,
) -> ModelInfo:
    """Parse one config.json, with the files of SETTINGS_FILES beside it. Raises as read_model_info does.

    generation: the content of generation_config.json."""
    whole = read_json(path)
    pooling = read_pooling(path.parent, whole, task)
    if impl == "transformers" or (impl == "auto" and not is_known(whole)):
        if pooling is not None:
            raise FlagRefused(
                f"task={pooling.task}: transformers' class computes model_type {whole.get('model_type')!r}, and only "
                "layers of this project give vectors and scores; supported are " + ", ".join(FAMILIES)
            )
        if rope_scaling is not None:
            raise FlagRefused("rope_scaling= changes no model that transformers' class computes")
        try:
            return _of_class(path, whole, {} if generation is None else generation)
        except CheckpointUnavailable:
            raise
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
    try:
        config = text_fields(whole)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    if rope_scaling is not None:
        try:
            config = with_rope_scaling(config, rope_scaling)
        except CheckpointError as error:
            raise FlagRefused(f"rope_scaling={one_line(json.dumps(rope_scaling))}: {error}") from None
    try:
        info = _parse(config, {} if generation is None else generation)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    if pooling is not None:
        info = _with_pooling(info, pooling)
    return replace(info, quantization=quantization_beside(path.parent)) if info.quantization is None else info


def _with_pooling(info: ModelInfo, pooling: PoolingInfo) -> ModelInfo:
    """No LM head is read, unless its rows are the score head: the embedding has its place. Raises CheckpointError."""
    if pooling.uses_answers and info.spec.has_head_bias:
        raise CheckpointError("task=score is not supported for an LM head with biases")
    longest = min(info.context_length, pooling.max_tokens or info.context_length)
    is_tied = info.tie_embeddings or not pooling.uses_answers
    spec = info.spec if pooling.uses_answers else replace(info.spec, has_head_bias=False)
    return replace(
        info, spec=spec, context_length=longest, tie_embeddings=is_tied, pooling=replace(pooling, size=info.hidden_size)
    )


def read_sampling_defaults(directory: Path) -> SamplingParams:
    """The sampling parameters for requests that have none. Raises CheckpointError if one is out of range."""
    path = directory / "generation_config.json"
    try:
        return sampling_defaults_of(read_json(path) if path.exists() else {})
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def notes_on_settings(directory: Path, rope_scaling: Fields | None = None, applies_sampling: bool = False) -> list[str]:
    """Lines for the user about settings that read_model_info accepts, but that may surprise. applies_sampling: requests
    have the values of read_sampling_defaults."""
    whole = read_json(directory / "config.json")
    config = text_fields(whole) if is_known(whole) else whole
    lines = [dropped_theta(config) if rope_scaling is None else None]
    if config.get("auto_map"):
        family = config.get("model_type")
        lines.append(
            f"config.json: auto_map names Python code of the model, which is not run: it is computed as {family}"
        )
    if (directory / ADAPTER_WEIGHTS).is_file():
        lines.append(f"{ADAPTER_WEIGHTS} is not read: without {ADAPTER_CONFIG}, nothing says how to apply it")
    generation_path = directory / "generation_config.json"
    if generation_path.exists() and (left := left_to_requests(read_json(generation_path), applies_sampling)):
        lines.append(f"generation_config.json: {', '.join(left)}: left to each request")
    return [line for line in lines if line is not None]


def _of_class(path: Path, config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelInfo:
    """Of a model that transformers' own class computes."""
    try:
        facts = read_facts(path)
    except CheckpointUnavailable:
        raise
    except CheckpointError as error:
        raise CheckpointError(f"model_type {config.get('model_type')!r} is not supported: {error}") from None
    spec = spec_of(facts)
    quantization = parse_quantization(config)
    return ModelInfo(
        family=str(config["model_type"]),
        spec=spec,
        context_length=facts["context_length"],
        tie_embeddings=facts["tie_embeddings"],
        eos_ids=tuple(sorted(_eos_ids(config, spec.vocab_size) | _eos_ids(generation, spec.vocab_size))),
        dtype=_parse_dtype(config),
        quantization=quantization_beside(path.parent) if quantization is None else quantization,
        of_class=ClassFacts(
            counts=tuple(map(tuple, facts["counts"])),
            **{name: facts[name] for name in ("num_embedding", "num_head", "widest_row", "settings")},
        ),
    )


def _parse(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelInfo:
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise CheckpointError(f"model_type {name!r} is not supported; supported are {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    architectures = config.get("architectures") or [family.architecture]
    generating = [generating_name(each) if isinstance(each, str) else each for each in architectures]
    if generating not in [[each] for each in (family.architecture, *family.other_architectures)]:
        raise CheckpointError(f"architectures {architectures} is not supported; {name} is {family.architecture}")
    refuse_keys(config, family, name)
    settings = Settings(config, family)
    spec = family.spec_of(settings)
    return ModelInfo(
        family=name,
        spec=spec,
        context_length=extended_context_length(config, spec.rotary[0], settings.max_positions),
        tie_embeddings=flag(settings.fields, "tie_word_embeddings"),
        eos_ids=tuple(sorted(_eos_ids(config, spec.vocab_size) | _eos_ids(generation, spec.vocab_size))),
        dtype=_parse_dtype(config),
        quantization=parse_quantization(config),
    )


def _parse_dtype(config: Mapping[str, Any]) -> str:
    """An absent dtype means float32, as in transformers."""
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is not supported; supported are {', '.join(DTYPES)}")
    return str(dtype)


def _eos_ids(config: Mapping[str, Any], vocab_size: int) -> set[int]:
    value = config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise CheckpointError(f"eos_token_id {value!r} is not a token id below vocab_size {vocab_size}")
    return set(ids)
