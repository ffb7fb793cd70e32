"""LoRA adapters as PEFT stores them: what the files of one change of which weights of its base model.

The names and shapes of tensors decide whether an adapter fits a base model. base_model_name_or_path is only told to the
user: the same model has one name on the hub and another one on each disk.

A key of adapter_config.json is applied, says nothing of the computation, or is refused by name. So is every tensor.
Which modules have an adapter, the tensors say: target_modules and the like are not read.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

import hashlib
import io
import math
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokasaurus.checkpoint.info import ADAPTER_CONFIG, ADAPTER_WEIGHTS, EMBEDDING, HEAD
from tokasaurus.checkpoint.json_files import (
    CheckpointError,
    Fields,
    flag,
    json_object,
    positive_int,
    read_json,
    unreadable,
    write_json,
)
from tokasaurus.checkpoint.stored_tensors import StoredTensor
from tokasaurus.checkpoint.weight_files import TEXT_PREFIXES, parse_header, write_header

# O rows and I columns of a weight as the checkpoint has it, R rank of its change

MAX_RANK = 256
_MAX_ALPHA = 1e9

_APPLIED = (
    *("peft_type", "base_model_name_or_path", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("init_lora_weights", "bias", "modules_to_save"),
)
_WITHOUT_EFFECT = (
    *("auto_mapping", "peft_version", "revision", "task_type", "inference_mode", "runtime_config", "lora_dropout"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    # Both of the tied layers are stored.
    "ensure_weight_tying",
    # Settings of what another key asks for.
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core", "qalora_group_size"),
)
_REFUSED_IF_EMPTY = (
    *("velora_config", "kasa_config", "arrow_config", "use_bdlora", "monteclora_config", "alora_invocation_tokens"),
)
"""Keys that ask for something unless they are null or false. All others that are in no table are refused unless their
value is null, false, 0 or empty."""

_OF_THE_BASE = (True, False, None, "gaussian", "orthogonal", "eva", "mica")
"""Values of init_lora_weights that leave the base model's weights as they are."""
_CONVERTED = ("pissa", "olora", "corda", "lora_ga")
"""What the values begin with that PEFT can store relative to the base model's weights."""

_PREFIX = "base_model.model."
_LOW_RANK = re.compile(r"(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")
_OF_EMBEDDING = re.compile(r"(.+)\.lora_embedding_([AB])(?:\.[^.]+)?")
_WHOLE = re.compile(r"(.+?)(?:\.modules_to_save(?:\.[^.]+)?)?\.weight")
_COPY = re.compile(r"(.+)\.base_layer\.weight")
_EXPERTS = re.compile(r"(^|\.)(experts|router|gate|shared_expert_gate)(\.|$)")
_MAX_NAME = 200
_MAX_REPEATS = 3
_ENDLESS = re.compile(r"\)[*+?{]|\(\?(?!:)|\\[1-9]")
"""In a pattern: what may take time without bound. A repeated group, an option or assertion, a reference."""

_ENDS = ("embed_tokens", "lm_head")
_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """adapter_config.json, which computes nothing but low-rank changes."""

    base: str
    """Name or path of the model that it was trained with; "" if it is not stored."""
    rank: int
    alpha: float
    is_rank_stabilised: bool
    """Changes are scaled by alpha / sqrt(rank), arXiv 2312.03732, not by alpha / rank."""
    ranks: tuple[tuple[re.Pattern[str], int], ...]
    """Pattern of a module's name -> its rank; the first that matches counts."""
    alphas: tuple[tuple[re.Pattern[str], float], ...]
    saved: tuple[str, ...]
    """Ends of the names of modules that are stored whole."""

    def rank_of(self, module: str) -> int:
        return next((rank for pattern, rank in self.ranks if pattern.match(module)), self.rank)

    def scale_of(self, module: str, rank: int) -> float:
        alpha = next((alpha for pattern, alpha in self.alphas if pattern.match(module)), self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """A change of one weight of the base model: scale * b @ a is added to it.

    A change of the embedding is not one of an LM head that is tied to it, nor the other way round."""

    source: str
    """Name of the weight in the checkpoint, such as "model.layers.0.self_attn.q_proj.weight"; fused as it is there."""
    a: NDArray[np.float32]
    """[R, I]."""
    b: NDArray[np.float32]
    """[O, R]."""
    scale: float

    @property
    def rank(self) -> int:
        return len(self.a)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        return len(self.b), self.a.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class WholeWeight:
    """What replaces the embedding or the LM head, but not one that is tied to it."""

    source: str
    """EMBEDDING or HEAD."""
    weight: NDArray[np.float32]
    """[vocabulary, hidden size]."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """All numbers are finite, and float32: those that are stored as float16 or bfloat16 have the same values."""

    low_rank: tuple[LowRank, ...]
    """Sorted by source."""
    whole: tuple[WholeWeight, ...]
    copies: tuple[tuple[str, tuple[int, ...]], ...]
    """Sources and shapes of the base model's own weights, which PEFT stores beside the changes of an embedding. They
    are not read."""
    base: str
    """As of AdapterConfig."""
    digest: str
    """SHA-256 of what it computes, in hexadecimal: of weights' names, scales and numbers. The directory's name, the
    order, prefix and dtype of tensors, and what else is in the configuration make no difference."""

    @property
    def rank(self) -> int:
        """The largest."""
        return max((each.rank for each in self.low_rank), default=0)


def read_adapter_config(directory: Path) -> AdapterConfig:
    """Raises CheckpointError, naming the key and its value, if the file is missing, malformed, or asks for more than
    this code computes."""
    path = directory / ADAPTER_CONFIG
    fields = read_json(path)
    try:
        return _parse_config(fields)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def read_adapter(directory: Path, max_rank: int = MAX_RANK) -> Adapter:
    """Reads both files once, so that what has been checked is what is returned. Sources are still the names that PEFT
    has: see fit_to_base.

    Raises CheckpointError as read_adapter_config; and if a file is cut off, a tensor is of no known kind or lacks its
    other half, a number is not finite, or a rank is above max_rank."""
    config, path = read_adapter_config(directory), directory / ADAPTER_WEIGHTS
    if not path.is_file():
        hint = "; PyTorch .bin files are not read: save it as safetensors" if any(directory.glob("*.bin")) else ""
        raise CheckpointError(f"{directory} has no {ADAPTER_WEIGHTS}{hint}")
    try:
        content = path.read_bytes()
        tensors = parse_header(path, io.BytesIO(content))
    except (OSError, ValueError) as error:
        raise unreadable(path, "safetensors", error) from None
    try:
        return _parse_tensors(config, content, tensors, max_rank)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def copy_adapter(source: Path, directory: Path, max_rank: int = MAX_RANK) -> Adapter:
    """Copies both files into an empty directory, and reads the copies. Raises as read_adapter, with the source's names,
    and OSError."""
    read_adapter_config(source)
    if (source / ADAPTER_WEIGHTS).is_file():
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            shutil.copyfile(source / name, directory / name)
    else:
        directory = source
    try:
        return read_adapter(directory, max_rank)
    except CheckpointError as error:
        raise CheckpointError(str(error).replace(str(directory), str(source))) from None


def fit_to_base(adapter: Adapter, weight_shapes: Mapping[str, tuple[int, ...]]) -> Adapter:
    """The adapter with the base model's names of its weights.

    weight_shapes: name -> shape of each weight of the checkpoint that may be changed, as it is stored; of an embedding
    and an LM head that are tied, one suffices. Raises CheckpointError if one that the adapter changes is not among
    them, or has another shape."""

    def fitted(name: str, shape: tuple[int, ...]) -> str:
        module = name.removesuffix(".weight")
        if _EXPERTS.search(module):
            raise CheckpointError(f"the adapter changes {module}: adapters of experts and routers are not served")
        short = next((new + name.removeprefix(old) for old, new in TEXT_PREFIXES.items() if name.startswith(old)), name)
        source = name if name in weight_shapes else short
        tied = {EMBEDDING: HEAD, HEAD: EMBEDDING}.get(source, source)
        expected = weight_shapes.get(source, weight_shapes.get(tied))
        if expected is None:
            raise CheckpointError(f"the adapter changes {module}, which the base model does not have")
        if shape != tuple(expected):
            raise CheckpointError(f"the adapter is for {module} of shape {shape}, but the base model's is {expected}")
        return source

    def fit(each: Any) -> Any:
        return replace(each, source=fitted(each.source, each.shape))

    for name, shape in adapter.copies:
        fitted(name, shape)
    low_rank, whole = (tuple(fit(each) for each in parts) for parts in (adapter.low_rank, adapter.whole))
    counts = Counter(each.source for each in (*low_rank, *whole))
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise CheckpointError(f"the adapter changes {twice[0]} twice, by two names")
    if others := sorted({each.source for each in whole} - {EMBEDDING, HEAD}):
        raise CheckpointError(f"the adapter replaces {others[0]}; only embedding and LM head may be in modules_to_save")
    return replace(adapter, low_rank=low_rank, whole=whole)


def write_adapter(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]
) -> None:
    """Write both files. tensors: by name, the dtype in safetensors' spelling, the shape, and the numbers."""
    write_json(directory / ADAPTER_CONFIG, dict(config))
    with (directory / ADAPTER_WEIGHTS).open("wb") as output:
        write_header(output, ((name, dtype, shape, len(data)) for name, (dtype, shape, data) in tensors.items()))
        for _, _, data in tensors.values():
            output.write(data)


def _parse_config(fields: Fields) -> AdapterConfig:
    if fields.get("peft_type") != "LORA":
        raise CheckpointError(f"peft_type = {fields.get('peft_type')!r} is not supported, only 'LORA'")
    for key, value in fields.items():
        is_asked = value not in (None, False) if key in _REFUSED_IF_EMPTY else bool(value)
        if is_asked and key not in (*_APPLIED, *_WITHOUT_EFFECT):
            raise CheckpointError(f"{key} = {value!r} is not supported")
    if (bias := fields.get("bias")) not in ("none", None):
        raise CheckpointError(f"bias = {bias!r} is not supported, only 'none'")
    initial = fields.get("init_lora_weights")
    if not any(initial is value or (isinstance(value, str) and initial == value) for value in _OF_THE_BASE):
        is_converted = isinstance(initial, str) and initial.startswith(_CONVERTED)
        hint = ": save it with path_initial_model_for_weight_conversion" if is_converted else ""
        raise CheckpointError(f"init_lora_weights = {initial!r} changes the base model's weights{hint}")
    base, saved = fields.get("base_model_name_or_path"), fields.get("modules_to_save")
    if base is not None and not isinstance(base, str):
        raise CheckpointError(f"base_model_name_or_path must be a string, not {base!r}")
    if saved is not None and not (isinstance(saved, list) and all(isinstance(each, str) for each in saved)):
        raise CheckpointError(f"modules_to_save must be a list of strings, not {saved!r}")
    ranks, alphas = json_object(fields, "rank_pattern"), json_object(fields, "alpha_pattern")
    return AdapterConfig(
        base or "",
        rank=positive_int(fields, "r", 1 << 16, default=8),
        alpha=_alpha(fields, "lora_alpha"),
        is_rank_stabilised=flag(fields, "use_rslora"),
        ranks=tuple((_pattern("rank_pattern", key), positive_int(ranks, key, 1 << 16)) for key in ranks),
        alphas=tuple((_pattern("alpha_pattern", key), _alpha(alphas, key)) for key in alphas),
        saved=tuple(saved or ()),
    )


def _alpha(fields: Fields, name: str) -> float:
    value = fields.get(name, 8)
    if type(value) not in (int, float) or not -_MAX_ALPHA <= value <= _MAX_ALPHA:
        raise CheckpointError(f"{name} must be a number of at most {_MAX_ALPHA:g}, not {value!r}")
    return float(value)


def _pattern(key: str, text: str) -> re.Pattern[str]:
    """A module's name ends with it, after a dot."""
    if _ENDLESS.search(text) or sum(map(text.replace("(?:", "(").count, "*+?{")) > _MAX_REPEATS:
        raise CheckpointError(
            f"{key} has {text!r}, which may take too long: {_MAX_REPEATS} repetitions are allowed, but none of a group"
        )
    try:
        return re.compile(rf"(.*\.)?({text})$")
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{key} has {text!r}, which is no regular expression ({error})") from None


class _Places:
    """Which tensor is what, by the names of modules."""

    def __init__(self, names: Iterable[str]) -> None:
        """Raises CheckpointError for a tensor of an unknown kind, and for two of one place."""
        self.low_rank: dict[str, dict[str, str]] = {}
        """The tensors A and B of each."""
        self.whole: dict[str, str] = {}
        self.copies: dict[str, str] = {}
        self.embeddings = set[str]()
        """Modules of low_rank whose tensors are those of an embedding."""
        for stored_name in names:
            name = stored_name.removeprefix(_PREFIX)
            if len(name) > _MAX_NAME:
                raise CheckpointError(f"a tensor's name begins with {name[:_MAX_NAME]} and is too long")
            place, key = self._place(name)
            if place is None:
                raise CheckpointError(f"tensor {stored_name} is of a kind that is not supported")
            if key in place:
                raise CheckpointError(f"tensors {place[key]} and {stored_name} have the same place")
            place[key] = stored_name
        for module, halves in self.low_rank.items():
            if len(halves) != 2:
                ((half, name),) = halves.items()
                raise CheckpointError(f"tensor {name} lacks its other half, lora_{'B' if half == 'A' else 'A'}")
            if module in self.whole:
                raise CheckpointError(f"tensors {halves['A']} and {self.whole[module]} have the same place")

    def _place(self, name: str) -> tuple[dict[str, str] | None, str]:
        if half := _LOW_RANK.fullmatch(name) or _OF_EMBEDDING.fullmatch(name):
            if half.re is _OF_EMBEDDING:
                self.embeddings.add(half[1])
            return self.low_rank.setdefault(half[1], {}), half[2]
        for pattern, place in ((_COPY, self.copies), (_WHOLE, self.whole)):
            if (found := pattern.fullmatch(name)) and ".lora_" not in name:
                return place, found[1]
        return None, ""


def _parse_tensors(
    config: AdapterConfig, content: bytes, tensors: Mapping[str, StoredTensor], max_rank: int
) -> Adapter:
    places = _Places(tensors)
    if not places.low_rank and not places.whole:
        raise CheckpointError("it has no tensors")
    for end in config.saved:
        if end.rpartition(".")[2] in _ENDS and not any(name.endswith(end) for name in places.whole):
            raise CheckpointError(f"there is no tensor of {end}, which is in modules_to_save")
    low_rank = []
    for module, names in sorted(places.low_rank.items()):
        a, b = (_numbers(content, names[half], tensors[names[half]]) for half in "AB")
        rank, expected = len(a), config.rank_of(module)
        if not b.shape[1] == rank == expected:
            shapes = f"{a.shape} and {b.shape}"
            raise CheckpointError(f"tensors of {module} are {shapes}, but {ADAPTER_CONFIG} makes the rank {expected}")
        if rank > max_rank:
            raise CheckpointError(f"{module} has rank {rank}, more than max_lora_rank={max_rank}")
        if module in places.embeddings:  # the embedding's outputs are the columns of its weight
            a, b = np.ascontiguousarray(b.T), np.ascontiguousarray(a.T)
        scale = config.scale_of(module, rank)
        if abs(scale) * float(np.abs(b).max(initial=0)) > np.finfo(np.float32).max:
            raise CheckpointError(f"{module} has numbers that its scale, {scale:g}, makes too large")
        low_rank.append(LowRank(f"{module}.weight", a, b, scale))
    whole = [
        WholeWeight(f"{module}.weight", _numbers(content, name, tensors[name]))
        for module, name in sorted(places.whole.items())
    ]
    copies = tuple((f"{module}.weight", tensors[name].shape) for module, name in sorted(places.copies.items()))
    return Adapter(tuple(low_rank), tuple(whole), copies, config.base, _digest(low_rank, whole))


def _digest(low_rank: Iterable[LowRank], whole: Iterable[WholeWeight]) -> str:
    """Both are sorted."""
    digest = hashlib.sha256()
    for each in low_rank:
        digest.update(f"{each.source} {each.scale!r} {each.a.shape} {each.b.shape} ".encode())
        digest.update(each.a.ravel().data)
        digest.update(each.b.ravel().data)
    for one in whole:
        digest.update(f"{one.source} {one.shape} ".encode())
        digest.update(one.weight.ravel().data)
    return digest.hexdigest()


def _numbers(content: bytes, name: str, tensor: StoredTensor) -> NDArray[np.float32]:
    """float32 of the tensor's shape, which is that of a matrix."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise CheckpointError(f"tensor {name} has dtype {tensor.dtype}; allowed are {', '.join(_DTYPES)}")
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise CheckpointError(f"tensor {name} has shape {tensor.shape}, which is not that of a matrix")
    stored = np.frombuffer(content, dtype, (tensor.end - tensor.begin) // dtype.itemsize, tensor.begin)
    widened = (stored.astype(np.uint32) << 16).view(np.float32) if tensor.dtype == "BF16" else stored.astype(np.float32)
    numbers: NDArray[np.float32] = widened.reshape(tensor.shape)
    if not np.isfinite(numbers).all():
        raise CheckpointError(f"tensor {name} has numbers that are not finite")
    return numbers
