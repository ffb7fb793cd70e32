"""What transformers' class of a config.json computes: found by running it once, without weights, and looking at what
its layers ask of attention. `main` is the program of a process of its own."""

import contextlib
import json
import re
import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    masking_utils,
)

from tokasaurus.checkpoint.by_transformers import digest_of
from tokasaurus.checkpoint.rope import MAX_CONTEXT
from tokasaurus.messages.status import first_line
from tokasaurus.model.by_transformers.attention import COMPUTED, NAME, WITHOUT_EFFECT, Mask, answering
from tokasaurus.model.by_transformers.ranks import Style, styles_of

_TOKENS = 40
_MAX_BYTES = 32 << 30
_MAX_LAYERS = 1000
"""Far above every published model: a damaged or hostile file must not fill the memory."""
_POSITIONS_SEEN = 1 << 18
"""Masks are looked at up to here: beyond every published window."""


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
    model_type = json.loads(path.read_text(encoding="utf-8")).get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise Unfit(f"transformers {transformers.__version__} has no class for it")
    try:
        config = AutoConfig.from_pretrained(path.parent, trust_remote_code=False)
        if type(config) not in AutoModelForCausalLM._model_mapping:
            raise Unfit(f"transformers {transformers.__version__} has no language model for it")
        for name, value in config.to_dict().items():
            if "layers" in name and isinstance(value, int) and value > _MAX_LAYERS:
                raise Unfit(f"{name} {value} is more than {_MAX_LAYERS:,}")
        model = make_model(config)
    except (ValueError, KeyError, ImportError, TypeError, AttributeError, AssertionError) as error:
        if isinstance(error, KeyError) and error.args == (NAME,):
            raise Unfit(f"{config.model_type} does not call attention through transformers' interface") from error
        raise Unfit(f"transformers {transformers.__version__} cannot make its class: {first_line(error)}") from error
    asked = config.architectures
    if asked not in (None, [], [type(model).__name__]):
        raise Unfit(f"architectures {asked} is not supported; {config.model_type} is {type(model).__name__}")
    if hasattr(config, "text_config") or config.is_encoder_decoder:
        raise Unfit(f"{type(model).__name__} is no language model alone")
    _refuse_rotary(config)
    if model._is_stateful or any(isinstance(module, nn.Conv1d) for module in model.modules()):
        raise Unfit(f"{type(model).__name__} keeps a state beside keys and values")
    layers = _layers(model)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = head.weight is embedding.weight
    linears = [module for module in model.modules() if type(module) is nn.Linear and module is not head]
    return {
        "architecture": type(model).__name__,
        "layers": layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "context_length": _context_length(config),
        "width": max((max(each.in_features, each.out_features) for each in linears), default=config.hidden_size),
        "settings": digest_of(config.to_dict()),
        "counts": _counts(model, len(layers)),
        "num_embedding": embedding.weight.numel(),
        "num_head": sum(each.numel() for each in head.parameters() if each is not embedding.weight),
        "tie_embeddings": is_tied,
    }


def _counts(model: PreTrainedModel, num_layers: int) -> list[list[int]]:
    """As ClassFacts.counts."""
    styles, counts = dict[str, Style](), [[0] * 4 for _ in range(num_layers + 1)]
    with contextlib.suppress(ValueError):
        styles = styles_of(model)
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    for path, module in model.named_modules():
        layer = re.search(r"\.(\d+)(\.|$)", path)
        for name, parameter in module.named_parameters(recurse=False) if module not in ends else ():
            is_divided = f"{path}.{name}" in styles and styles[f"{path}.{name}"].dim is not None
            kind = 2 * (type(module) is not nn.Linear) + (not is_divided)
            counts[num_layers if layer is None else min(int(layer[1]), num_layers)][kind] += parameter.numel()
    return counts


def make_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The class for a config, on the meta device, with our attention."""
    config._experts_implementation = None  # transformers chooses: a file must not
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=NAME)
    assert isinstance(model, PreTrainedModel)
    with contextlib.suppress(Exception):  # of many classes: some configs must have one
        model.config.pad_token_id = None  # else some classes look for it in the token ids
    return model.eval().requires_grad_(False)


def _context_length(config: PreTrainedConfig) -> int:
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            if value > MAX_CONTEXT:
                raise Unfit(f"{name} {value} is more than {MAX_CONTEXT:,}")
            return value
    raise Unfit("config.json has no max_position_embeddings")


def _refuse_rotary(config: PreTrainedConfig) -> None:
    """Sequences of one batch would change each other's angles."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for each in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        if each.get("rope_type") == "longrope":
            raise Unfit("rope_type longrope depends on the longest sequence of a batch")


def _layers(model: PreTrainedModel) -> list[dict[str, Any]]:
    """The fields of AttentionSpec of each layer, in the order of their calls. Raises Unfit."""
    found: dict[nn.Module, dict[str, Any]] = {}
    parameters = {id(parameter) for parameter in model.parameters()}

    def look(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: Mapping[str, Any]
    ) -> Tensor:
        if module in found:
            raise Unfit(f"{type(module).__name__} calls attention twice")
        if len(query) != 1 or not query.shape[2] == key.shape[2] == value.shape[2] == _TOKENS:
            raise Unfit(f"{type(module).__name__} attends to other keys than those of its tokens")
        for name, option in options.items():
            if name not in COMPUTED | WITHOUT_EFFECT and option is not None:
                raise Unfit(f"{type(module).__name__} gives attention {name}, which is not computed")
        sinks = options.get("s_aux")
        if sinks is not None and (id(sinks) not in parameters or sinks.shape != (query.shape[1],)):
            raise Unfit(f"{type(module).__name__} gives attention an s_aux that is no weight of each head")
        found[module] = {
            "num_heads": query.shape[1],
            "num_kv_heads": key.shape[1],
            "head_dim": max(query.shape[-1], value.shape[-1]),
            "scale": query.shape[-1] ** -0.5 if options.get("scaling") is None else float(options["scaling"]),
            "window": _window(module, mask),
            "softcap": options.get("softcap"),
            "has_sinks": sinks is not None,
        }
        return torch.empty(1, _TOKENS, query.shape[1], value.shape[-1], dtype=value.dtype, device="meta")

    token_ids = torch.zeros((1, _TOKENS), dtype=torch.int64, device="meta")
    positions = torch.arange(_TOKENS, device="meta").unsqueeze(0)
    with answering(look), _positions_in_one_piece(), torch.inference_mode(), torch.device("meta"):
        try:
            model.base_model(input_ids=token_ids, position_ids=positions, use_cache=False)
        except (RuntimeError, TypeError, NotImplementedError, AttributeError, KeyError, ValueError) as error:
            raise Unfit(f"{type(model).__name__} does not run without weights: {first_line(error)}") from error
    return _alike(model, list(found.values()))


def _alike(model: PreTrainedModel, layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The layers with the heads that a KV cache has for all of them. Raises Unfit."""
    num_layers = getattr(model.config, "num_hidden_layers", None)
    if len(layers) != num_layers:
        name = type(model).__name__
        raise Unfit(f"{len(layers)} of {num_layers} layers of {name} call attention through transformers' interface")
    num_heads, num_kv_heads = ({layer[name] for layer in layers} for name in ("num_heads", "num_kv_heads"))
    if len(num_heads) > 1 or any(max(num_kv_heads) % each for each in num_kv_heads):
        raise Unfit(f"layers of {type(model).__name__} have different numbers of heads")
    head_dim = max(layer["head_dim"] for layer in layers)
    return [{**layer, "num_kv_heads": max(num_kv_heads), "head_dim": head_dim} for layer in layers]


@contextlib.contextmanager
def _positions_in_one_piece() -> Iterator[None]:
    """Masks are made without looking for several sequences in the positions, which on the meta device have no
    numbers."""
    find = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda _positions: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find


def _window(module: nn.Module, mask: Any) -> int | None:
    """The window of a layer's mask; None: a query sees all keys up to its own. Raises Unfit for any other mask."""
    if not isinstance(mask, Mask) or getattr(mask, "sees", None) is None:
        raise Unfit(f"{type(module).__name__} gives attention a mask that is not known")
    last = _POSITIONS_SEEN - 1
    with torch.device("cpu"):
        zero, keys = torch.zeros((), dtype=torch.int64), torch.arange(_POSITIONS_SEEN)
        queries = torch.tensor([last, last - 1, last * 3 // 4, last // 2, 1000, 99, 5, 0]).unsqueeze(1)
        seen = mask.sees(zero, zero, queries, keys).expand(len(queries), -1)
        window = int(seen[0].sum())
        if not torch.equal(seen, (keys <= queries) & (keys > queries - window)):
            raise Unfit(f"{type(module).__name__} gives attention a mask that is neither causal nor a window")
    return None if window > last else window
