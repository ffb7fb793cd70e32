"""What transformers' class of a config.json computes: found by running it once, without weights, and looking at what
its layers ask of attention. `main` is the program of a process of its own.

One function takes the place of transformers' own attention for all models: a layer calls `function(module, query, key,
value, mask, **options)`, and what answers is set from outside (`answering`).
"""

import contextlib
import json
import re
import resource
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tokasaurus.checkpoint.cache import cache_key
from tokasaurus.checkpoint.rope import MAX_CONTEXT
from tokasaurus.messages.status import first_line
from tokasaurus.model.by_transformers.parts import Style, styles_of

# T tokens in this forward, H query heads, K key/value heads, D head size

NAME = "tokasaurus"
"""Of attn_implementation."""
_COMPUTED = frozenset(("scaling", "sliding_window", "softcap", "s_aux"))
"""Options that AttentionSpec has, by their names in transformers."""
_WITHOUT_EFFECT = frozenset(("dropout", "position_ids", "use_cache", "output_attentions", "is_causal"))
"""Options that change nothing of a decoder's layer that does not learn."""

Answers: TypeAlias = Callable[[nn.Module, Tensor, Tensor, Tensor, Any, Mapping[str, Any]], Tensor]
"""Computes the attention of one call, or looks at it: module, query [1, H, T, D], key and value [1, K, T, D], mask and
options -> [1, T, H, D] of the values."""

NUM_TOKENS = 40
"""Of a run without weights."""
_MAX_BYTES = 32 << 30
_MAX_LAYERS = 1000
"""Far above every published model: a damaged or hostile file must not fill the memory."""
_POSITIONS_SEEN = 1 << 18
"""Masks are looked at up to here: beyond every published window."""
_IGNORED = (
    *("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache", "architectures"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "compression_config"),
)
"""Keys of a configuration that ModelInfo has elsewhere, or that change no token."""
CLASS_ERRORS = (RuntimeError, TypeError, AttributeError, LookupError, ValueError, ImportError, AssertionError)
"""What code of a class raises for a configuration that it does not fit."""

_answers: Answers | None = None


@contextlib.contextmanager
def answering(answers: Answers) -> Iterator[None]:
    """Inside, every layer's call is answered so."""
    global _answers  # transformers calls one function for all models
    before, _answers = _answers, answers
    try:
        yield
    finally:
        _answers = before


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    assert _answers is not None, "layers run inside `answering`"
    return _answers(module, query, key, value, attention_mask, options), None


def _mask(
    batch_size: int, q_length: int, kv_length: int, mask_function: Any = None, device: Any = None, **_: Any
) -> Tensor:
    """What a layer gets in the place of a mask. Its `sees` says which keys a query may see, as transformers' function
    does: (batch, head, query position, key position), tensors -> bool."""
    mask = torch.empty(1, dtype=torch.bool, device=device).expand(batch_size, 1, q_length, kv_length)
    mask.sees = mask_function  # type: ignore[attr-defined]
    return mask


transformers.AttentionInterface.register(NAME, _attention)
transformers.masking_utils.AttentionMaskInterface.register(NAME, _mask)


class Unfit(Exception):
    """Why a class cannot be served."""


def main() -> None:
    """Prints the facts of the config.json that the command line names, as JSON, or the error."""
    with contextlib.suppress(ValueError, OSError):  # of a system that allows less already, or no limit at all
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    try:
        print(json.dumps(facts_of(Path(sys.argv[1])), indent=1))
    except Unfit as unfit:
        print(json.dumps({"error": str(unfit)}))


def facts_of(path: Path) -> dict[str, Any]:
    """The facts that checkpoint/by_transformers reads. Raises Unfit."""
    config, model = _class_of(path)
    layers, widest_row = _layers(model)
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int) or not 0 < length <= MAX_CONTEXT:
        raise Unfit(f"max_position_embeddings {length} is not from 1 to {MAX_CONTEXT:,}")
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    linears = [module for module in model.modules() if type(module) is nn.Linear and module is not head]
    told = {name: value for name, value in config.to_dict().items() if name not in _IGNORED}
    return {
        "layers": layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "context_length": length,
        "width": max((max(each.in_features, each.out_features) for each in linears), default=config.hidden_size),
        "settings": cache_key(json.dumps(told, sort_keys=True, default=str)),
        "widest_row": widest_row,
        "counts": _counts(model, len(layers)),
        "num_embedding": embedding.weight.numel(),
        "num_head": sum(each.numel() for each in head.parameters() if each is not embedding.weight),
        "tie_embeddings": head.weight is embedding.weight,
    }


def _class_of(path: Path) -> tuple[PreTrainedConfig, PreTrainedModel]:
    """Of a decoder without a state of its own. Raises Unfit."""
    model_type = json.loads(path.read_text(encoding="utf-8")).get("model_type")
    library = f"transformers {transformers.__version__}"
    if model_type not in CONFIG_MAPPING:
        raise Unfit(f"{library} has no class for it")
    with _refusing(f"{library} cannot make its class"):
        config = AutoConfig.from_pretrained(path.parent, trust_remote_code=False)
        if type(config) not in AutoModelForCausalLM._model_mapping:
            raise Unfit(f"{library} has no language model for it")
        for name, value in config.to_dict().items():
            if "layers" in name and isinstance(value, int) and value > _MAX_LAYERS:
                raise Unfit(f"{name} {value} is more than {_MAX_LAYERS:,}")
        model = make_model(config)
    class_name, asked = type(model).__name__, config.architectures
    if asked not in (None, [], [class_name]):
        raise Unfit(f"architectures {asked} is not supported; {config.model_type} is {class_name}")
    if hasattr(config, "text_config") or config.is_encoder_decoder:
        raise Unfit(f"{class_name} is no language model alone")
    rotary = getattr(config, "rope_parameters", None) or {}
    if any(each.get("rope_type") == "longrope" for each in (rotary, *rotary.values()) if isinstance(each, dict)):
        raise Unfit("rope_type longrope depends on the longest sequence of a batch")
    if model._is_stateful or any(isinstance(module, nn.Conv1d) for module in model.modules()):
        raise Unfit(f"{class_name} keeps a state beside keys and values")
    return config, model


def make_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The class for a config, on the meta device, with our attention."""
    config._experts_implementation = None  # transformers chooses: a file must not
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=NAME)
    assert isinstance(model, PreTrainedModel)
    with contextlib.suppress(Exception):  # of many classes: some configs must have one
        model.config.pad_token_id = None  # else some classes look for it in the token ids
    return model.eval().requires_grad_(False)


def _counts(model: PreTrainedModel, num_layers: int) -> list[list[int]]:
    """As ClassFacts.counts."""
    styles, counts = dict[str, Style](), [[0] * 4 for _ in range(num_layers + 1)]
    with contextlib.suppress(ValueError):
        styles = styles_of(model)
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    for path, module in model.named_modules():
        layer = re.search(r"\.(\d+)(\.|$)", path)
        index = num_layers if layer is None else min(int(layer[1]), num_layers)
        for name, parameter in module.named_parameters(recurse=False) if module not in ends else ():
            is_divided = styles.get(f"{path}.{name}", Style()).dim is not None
            counts[index][2 * (type(module) is not nn.Linear) + (not is_divided)] += parameter.numel()
    return counts


@contextlib.contextmanager
def _refusing(reason: str) -> Iterator[None]:
    """For the class's own code: inside, Unfit is raised for its errors."""
    try:
        yield
    except CLASS_ERRORS as error:
        if isinstance(error, KeyError) and error.args == (NAME,):
            raise Unfit("its layers do not call attention through transformers' interface") from error
        raise Unfit(f"{reason}: {first_line(error)}") from error


class _MemoryInUse(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds the most bytes of tensors that operations make and that live at once."""

    most_bytes = 0

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made = weakref.WeakSet[torch.UntypedStorage]()

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        self._made |= _storages(output) - _storages((args, kwargs))
        self.most_bytes = max(self.most_bytes, sum(storage.nbytes() for storage in self._made))
        return output


def _storages(tensors: Any) -> set[torch.UntypedStorage]:
    return {each.untyped_storage() for each in tree_leaves(tensors) if isinstance(each, Tensor)}


class Call(NamedTuple):
    """What a layer asks of attention, as of Answers."""

    query: torch.Size
    key: torch.Size
    value: torch.Size
    mask: Any
    options: Mapping[str, Any]

    @property
    def heads(self) -> list[int]:
        """Numbers of heads and of KV heads."""
        return [self.query[1], self.key[1]]


@torch.inference_mode()
def calls_of(run: Callable[[Tensor, Tensor], Any]) -> dict[nn.Module, Call]:
    """One call of each layer, in their order, in a run without weights. run: of layers, for token ids and positions.
    Raises Unfit, or what they raise."""
    calls = dict[nn.Module, Call]()

    def look(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
        call, caller = Call(query.shape, key.shape, value.shape, *others), type(module).__name__
        if module in calls:
            raise Unfit(f"{caller} calls attention twice")
        calls[module] = call
        if len(query) != 1 or not query.shape[2] == key.shape[2] == value.shape[2] == NUM_TOKENS:
            raise Unfit(f"{caller} attends to other keys than those of its tokens")
        # TransformersModel has copies of all three in heads of one size, and two results.
        (num_heads, num_kv_heads), value_dim = call.heads, value.shape[-1]
        size = 3 * num_heads + 2 * num_kv_heads, max(query.shape[-1], value_dim)
        return value.new_empty((1, NUM_TOKENS, *size))[:, :, :num_heads, :value_dim]

    # It looks for several sequences in the positions, which have no numbers here.
    no_search = mock.patch.object(transformers.masking_utils, "find_packed_sequence_indices", return_value=None)
    with torch.device("meta"), answering(look), no_search:
        run(torch.zeros(NUM_TOKENS, dtype=torch.int64), torch.arange(NUM_TOKENS))
    return calls


def _layers(model: PreTrainedModel) -> tuple[list[dict[str, Any]], int]:
    """The fields of AttentionSpec of each layer, with the heads that a KV cache has for all of them; and
    ClassFacts.widest_row. Raises Unfit."""
    layers, parameters, name = list[dict[str, Any]](), {*model.parameters()}, type(model).__name__
    memory = _MemoryInUse()

    def run(token_ids: Tensor, positions: Tensor) -> None:
        with _refusing(f"{name} does not run without weights"), memory:
            model.base_model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)

    for module, (query, key, value, mask, options) in calls_of(run).items():
        caller, num_heads, sinks, scale = type(module).__name__, query[1], options.get("s_aux"), options.get("scaling")
        for option, given in options.items():
            if option not in _COMPUTED | _WITHOUT_EFFECT and given is not None:
                raise Unfit(f"{caller} gives attention {option}, which is not computed")
        if sinks is not None and (sinks not in parameters or sinks.shape != (num_heads,)):
            raise Unfit(f"{caller} gives attention an s_aux that is no weight of each head")
        sizes = {"num_heads": num_heads, "num_kv_heads": key[1], "head_dim": max(query[-1], value[-1])}
        scores = {"scale": query[-1] ** -0.5 if scale is None else float(scale), "softcap": options.get("softcap")}
        layers.append(sizes | scores | {"window": _window(caller, mask), "has_sinks": sinks is not None})
    num_layers = getattr(model.config, "num_hidden_layers", None)
    if len(layers) != num_layers:
        raise Unfit(f"{len(layers)} of {num_layers} layers of {name} call attention through transformers' interface")
    of_all = {key: max(layer[key] for layer in layers) for key in ("num_heads", "num_kv_heads", "head_dim")}
    if any(
        each["num_heads"] != of_all["num_heads"] or of_all["num_kv_heads"] % each["num_kv_heads"] for each in layers
    ):
        raise Unfit(f"layers of {name} have different numbers of heads")
    widest_row = memory.most_bytes // (NUM_TOKENS * torch.bfloat16.itemsize)
    return [layer | of_all for layer in layers], widest_row


def _window(caller: str, mask: Any) -> int | None:
    """The window of a layer's mask; None: a query sees all keys up to its own. Raises Unfit for any other mask."""
    sees, last = getattr(mask, "sees", None), _POSITIONS_SEEN - 1
    if sees is None:
        raise Unfit(f"{caller} gives attention a mask that is not known")
    with torch.device("cpu"):
        zero, keys = torch.zeros((), dtype=torch.int64), torch.arange(_POSITIONS_SEEN)
        queries = torch.tensor([last, last - 1, last * 3 // 4, last // 2, 1000, 99, 5, 0]).unsqueeze(1)
        with _refusing(f"{caller} gives attention a mask that cannot be computed without weights"):
            seen = sees(zero, zero, queries, keys).expand(len(queries), -1)
    window = int(seen[0].sum())
    if not torch.equal(seen, (keys <= queries) & (keys > queries - window)):
        raise Unfit(f"{caller} gives attention a mask that is neither causal nor a window")
    return None if window > last else window
