"""What a model makes of a text in place of new tokens: a vector, a score, or the probabilities of classes.

Read from a checkpoint's `architectures`, and from the files that sentence-transformers keeps beside it. Needs no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from tokasaurus.checkpoint.json_files import CheckpointError, flag, json_object, parse_json, positive_int, read_json
from tokasaurus.checkpoint.stored_tensors import StoredTensor
from tokasaurus.messages.status import FlagRefused

PoolingTask = Literal["embed", "score", "classify", "reward"]
Activation = Literal["none", "sigmoid", "softmax"]

HEAD_PREFIX = "score."
"""Begins the names of a score head's tensors."""

SCORE_ANSWERS = ("no", "yes")
"""The answers of a causal model that scores: it judges whether a document meets a query, as Qwen3-Reranker does."""

_ENDINGS = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForRewardModel", "Model")
_MODES = {
    **{"lasttoken": "last", "pooling_mode_lasttoken": "last"},
    **{"mean": "mean", "pooling_mode_mean_tokens": "mean"},
    **{"cls": "first", "pooling_mode_cls_token": "first"},
}
"""sentence-transformers' names of ways to pool, in its older and newer form."""
_MAX_LABELS = 1 << 16


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """A linear layer of a score head; a ReLU is between two."""

    name: str
    """In the checkpoint, such as "score"."""
    num_outputs: int
    num_inputs: int
    has_bias: bool


@dataclass(frozen=True, slots=True)
class PoolingInfo:
    """How the hidden states of a text, after the final norm, become the answer."""

    task: PoolingTask
    kind: Literal["last", "mean", "first"] = "last"
    """Which tokens' hidden states count: the last one's, the mean of all, or the first one's."""
    size: int = 0
    """Numbers of a hidden state."""
    normalizes: bool = False
    """Vectors have length 1."""
    activation: Activation = "none"
    """Of the head's outputs."""
    labels: tuple[str, ...] = ()
    """Of the head's outputs, in their order."""
    head: tuple[HeadLayer, ...] = ()
    """The stored head, see fit_head; none of an embedding model."""
    answers: tuple[int, int] | None = None
    """Of a causal model that scores: the token ids of SCORE_ANSWERS, whose rows of the LM head are the head."""
    uses_answers: bool = False
    """Whether it is such a model; the tokenizer has the ids, unless sentence-transformers' files do."""
    prompts: tuple[tuple[str, str], ...] = ()
    """Texts that precede a client's, by name."""
    default_prompt: str = ""
    """Name of the one for texts without a named one; "": none."""
    messages: Literal["", "flat", "structured"] = ""
    """Texts become messages of the chat template, whose content is the text, or a list of one part; "": they do not."""
    adds_generation_prompt: bool = False
    """Of these messages."""
    pad_id: int | None = None
    """Padding at a text's end does not count, as in transformers' classifiers; None: no token is padding."""
    max_tokens: int | None = None
    """Longest text, where sentence-transformers has a limit below the model's context."""

    @property
    def needs_all_tokens(self) -> bool:
        """Whether more than the last token's hidden state counts: cached tokens have none."""
        return self.kind != "last"


def read_pooling(directory: Path, config: Mapping[str, Any], task: str | None) -> PoolingInfo | None:
    """None if the model generates. config: the content of config.json. task: the flag.

    Raises CheckpointError for what is not supported, and FlagRefused if the checkpoint does not fit the task."""
    ending = _ending_of(config)
    modules = _modules_of(directory)
    derived: str = "generate"
    has_head = ending not in ("ForCausalLM", "Model")
    num_labels = _num_labels(config) if has_head else 0
    scorer = next((place for kind, place in modules if kind == "LogitScore"), None)
    if scorer is not None:
        derived = "score"
    elif ending == "Model" or (ending == "ForCausalLM" and modules):
        derived = "embed"
    elif ending == "ForSequenceClassification":
        derived = "classify" if num_labels > 1 else "score"
    elif ending in ("ForTokenClassification", "ForRewardModel"):
        derived = "reward"
    chosen = derived if task is None else task
    if chosen == "generate":
        if ending != "ForCausalLM":
            raise FlagRefused(f"task=generate: the model is {_name_of(config)}, which has no LM head; leave task= out")
        return None
    if ending == "ForTokenClassification" and chosen != "embed" and num_labels != 1:
        raise CheckpointError(f"{_name_of(config)} with {num_labels} labels for each token is not supported, only 1")
    if chosen == "embed":
        return _embedding(directory, modules)
    if has_head:
        settings = {} if ending == "ForRewardModel" else _labels_of(config, num_labels)
        pad_id = config.get("pad_token_id") if ending == "ForSequenceClassification" else None
        activation: Activation = "none" if chosen == "reward" else _activation(config, num_labels)
        return PoolingInfo(_task(chosen), activation=activation, pad_id=pad_id, **settings)
    if chosen == "score" and ending == "ForCausalLM":
        pooling = PoolingInfo("score", activation="softmax", labels=SCORE_ANSWERS, uses_answers=True)
        if scorer is None:
            return pooling
        return replace(pooling, answers=_answers(scorer / "config.json"), **_prompts(directory), **_settings(directory))
    raise FlagRefused(f"task={chosen}: the model is {_name_of(config)}, which has no score head; it has task=embed")


def _task(name: str) -> PoolingTask:
    (task,) = (each for each in get_args(PoolingTask) if each == name)
    found: PoolingTask = task
    return found


def _name_of(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else str(config.get("model_type"))


def _ending_of(config: Mapping[str, Any]) -> str:
    return _known_ending(_name_of(config)) or "ForCausalLM"


def _known_ending(architecture: str) -> str:
    """Older classes with an LM head are GPT2LMHeadModel and XLMWithLMHeadModel."""
    if architecture.endswith("LMHeadModel"):
        return ""
    return next((ending for ending in _ENDINGS if architecture.endswith(ending)), "")


def generating_name(architecture: str) -> str:
    """The class with an LM head of the model that this class has the layers of."""
    ending = _known_ending(architecture)
    return architecture.removesuffix(ending) + "ForCausalLM" if ending else architecture


def _modules_of(directory: Path) -> list[tuple[str, Path]]:
    """(kind, directory) of each module of sentence-transformers; none without its file. Raises CheckpointError."""
    path = directory / "modules.json"
    if not path.is_file():
        return []
    try:
        listed = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise CheckpointError(f"{path} does not contain a list of modules")
    found = []
    for each in listed:
        place = each.get("path") or ""
        if not isinstance(place, str) or place.startswith("/") or ".." in Path(place).parts:
            raise CheckpointError(f"{path} names {place!r}, which is no folder beside it")
        found.append((str(each.get("type")).rpartition(".")[2], directory / place))
    for kind, _ in found:
        if kind not in ("Transformer", "Pooling", "Normalize", "LogitScore"):
            raise CheckpointError(f"{path}: modules of the kind {kind} are not supported")
    return found


def _embedding(directory: Path, modules: Sequence[tuple[str, Path]]) -> PoolingInfo:
    """Without sentence-transformers' files, the last token's hidden state with length 1."""
    if not modules:
        return PoolingInfo("embed", normalizes=True)
    pooling = PoolingInfo("embed", normalizes=any(kind == "Normalize" for kind, _ in modules))
    for kind, place in modules:
        if kind == "Pooling":
            pooling = replace(pooling, kind=_kind(place / "config.json"))
    return replace(pooling, **_prompts(directory), **_settings(directory))


def _kind(path: Path) -> Any:
    settings = read_json(path)
    modes = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value is True]
    if isinstance(mode := settings.get("pooling_mode"), str):
        modes = [mode]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise CheckpointError(f"{path}: pooling by {modes} is not supported, only by one of {', '.join(_MODES)}")
    kind = _MODES[modes[0]]
    if settings.get("include_prompt") is False and kind == "mean":
        raise CheckpointError(f"{path}: include_prompt = False is not supported")
    return kind


def _answers(path: Path) -> tuple[int, int]:
    settings = read_json(path)
    no, yes = (settings.get(f"{name}_token_id") for name in ("false", "true"))
    if type(no) is not int or type(yes) is not int:
        raise CheckpointError(f"{path}: true_token_id and false_token_id must both be token ids")
    return no, yes


def _prompts(directory: Path) -> dict[str, Any]:
    path = directory / "config_sentence_transformers.json"
    if not path.is_file():
        return {}
    settings = read_json(path)
    prompts, default = json_object(settings, "prompts"), settings.get("default_prompt_name")
    if not all(isinstance(text, str) for text in prompts.values()):
        raise CheckpointError(f"{path}: prompts must be strings")
    if default is not None and default not in prompts:
        raise CheckpointError(f"{path}: default_prompt_name {default!r} is none of the prompts")
    return {"prompts": tuple(sorted(prompts.items())), "default_prompt": default or ""}


def _settings(directory: Path) -> dict[str, Any]:
    """How texts become tokens."""
    path = directory / "sentence_bert_config.json"
    if not path.is_file():
        return {}
    settings = read_json(path)
    if settings.get("do_lower_case"):
        raise CheckpointError(f"{path}: do_lower_case is not supported")
    found: dict[str, Any] = {}
    if settings.get("max_seq_length") is not None:
        found["max_tokens"] = positive_int(settings, "max_seq_length", 1 << 30)
    if message := json_object(json_object(settings, "modality_config"), "message"):
        if (form := message.get("format")) not in ("flat", "structured"):
            raise CheckpointError(f"{path}: messages of the format {form!r} are not supported")
        variables = json_object(json_object(settings, "processing_kwargs"), "chat_template")
        if others := variables.keys() - {"add_generation_prompt", "restore_suffix"}:
            raise CheckpointError(f"{path}: {min(others)} of the chat template is not supported")
        found |= {"messages": form, "adds_generation_prompt": flag(variables, "add_generation_prompt")}
    return found


def _num_labels(config: Mapping[str, Any]) -> int:
    """As transformers counts them: two, if config.json says nothing."""
    labels = json_object(config, "id2label")
    return len(labels) if labels else positive_int(config, "num_labels", _MAX_LABELS, 2)


def _labels_of(config: Mapping[str, Any], num_labels: int) -> dict[str, Any]:
    named = json_object(config, "id2label")
    return {"labels": tuple(str(named.get(str(index), f"LABEL_{index}")) for index in range(num_labels))}


def _activation(config: Mapping[str, Any], num_labels: int) -> Activation:
    """sentence-transformers' setting, else that of transformers' pipeline."""
    kept = json_object(config, "sentence_transformers").get("activation_fn")
    named = kept or config.get("sbert_ce_default_activation_function")
    if named is not None:
        by_class: dict[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
        if (found := by_class.get(str(named).rpartition(".")[2])) is None:
            raise CheckpointError(f"the activation {named!r} is not supported, only {', '.join(by_class)}")
        return found
    problem = config.get("problem_type")
    if problem == "regression":
        return "none"
    if problem == "multi_label_classification" or (problem is None and num_labels == 1):
        return "sigmoid"
    return "softmax"


def fit_head(pooling: PoolingInfo, tensors: Mapping[str, StoredTensor], hidden_size: int) -> PoolingInfo:
    """`pooling` with the layers of the stored head. Raises CheckpointError if they do not follow each other."""
    if pooling.task == "embed" or pooling.uses_answers:
        return pooling
    names = sorted(
        (name.removesuffix(".weight") for name in tensors if name.startswith(HEAD_PREFIX) and name.endswith(".weight")),
        key=lambda name: (len(name), name),
    )
    if not names:
        raise CheckpointError(f"the checkpoint lacks tensor {HEAD_PREFIX}weight")
    layers, size = list[HeadLayer](), hidden_size
    for name in names:
        shape = tensors[f"{name}.weight"].shape
        if len(shape) != 2 or shape[1] != size:
            raise CheckpointError(f"tensor {name}.weight has shape {shape}, but its inputs are {size}")
        layers.append(HeadLayer(name, *shape, has_bias=f"{name}.bias" in tensors))
        size = shape[0]
    labels = pooling.labels
    if len(labels) != size:
        if labels and pooling.task != "reward":
            raise CheckpointError(f"the score head has {size} outputs, but config.json has {len(labels)} labels")
        labels = tuple(f"LABEL_{index}" for index in range(size))
    return replace(pooling, head=tuple(layers), labels=labels)
