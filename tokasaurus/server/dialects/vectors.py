"""/v1/embeddings, /pooling, /classify and /get_reward: texts → vectors, a head's outputs, or the probabilities of
classes.

The shapes are OpenAI's, vLLM's and, of the last, OpenRLHF's."""

import base64
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import Field

from tokasaurus.checkpoint.pooling import Activation, PoolingInfo
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.messages.sampling import NEUTRAL
from tokasaurus.messages.status import EngineLimits
from tokasaurus.random_ids import random_id
from tokasaurus.server.endpoint import RoutedEndpoint
from tokasaurus.server.engine_client.collectors import FinishedSequence
from tokasaurus.server.errors import InvalidRequest
from tokasaurus.server.prepare.requests import Draft, Origin, Prepared, check_text_length, check_vocabulary, too_long
from tokasaurus.server.protocol.answers import Usage
from tokasaurus.server.protocol.completions import Prompt, Prompts
from tokasaurus.server.protocol.fields import WHOLE_FLOATS, StrictObject
from tokasaurus.server.protocol.sampling_fields import CacheSalt, Priority, PromptTokens, RequestId, StreamOptions
from tokasaurus.server.respond.whole import Answer, build_usage
from tokasaurus.server.served_model import ServedModel
from tokasaurus.text.json_lines import write_json
from tokasaurus.text.tokenizer import ChatTemplateError, TextTooLong

MAX_TEXTS = 65_536
"""Of one body."""

_HEAD_TASKS = frozenset(("score", "classify", "reward"))


# Bodies
class TextFields(StrictObject):
    """Fields of all bodies whose texts become vectors or scores.

    model: null or "" is the served model, as a missing one is.
    truncate_prompt_tokens (vLLM's): keep the first so many tokens of a text, with those that the tokenizer adds; -1: as
    many as the model takes. null: a longer text is an error.
    add_special_tokens (vLLM's): the tokenizer adds its special tokens to texts; null: yes.
    cache_salt, priority, request_id: as in completions.

    Accepted without effect: user.
    """

    model: str | None = None
    truncate_prompt_tokens: PromptTokens = None
    add_special_tokens: bool | None = None
    cache_salt: CacheSalt = ""
    priority: Priority = 0
    request_id: RequestId = None
    user: str | None = None

    @property
    def stream(self) -> bool:
        return False

    @property
    def stream_options(self) -> StreamOptions | None:
        return None

    @property
    def stops(self) -> tuple[tuple[str, ...], str]:
        return (), "stop"

    @property
    @abstractmethod
    def num_sequences(self) -> int:
        """How many texts it has."""


class InputFields(TextFields):
    """input: one or more texts, or lists of token ids."""

    input: Prompts

    @property
    def num_sequences(self) -> int:
        return len(self.input)


class EmbeddingRequest(InputFields):
    """encoding_format: float is a list of numbers, base64 their float32, little-endian.
    dimensions: so many first numbers of each vector, of length 1 again where the model's vectors have it.
    prompt_name (our extension): which of the model's prompts, of sentence-transformers' files, precedes each text;
    null: the model's default, which is mostly none.
    """

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int | None, Field(ge=1), WHOLE_FLOATS] = None
    prompt_name: str | None = None


class ActivationFields(StrictObject):
    """use_activation, in its older versions activation (vLLM's): false leaves sigmoid or softmax of a score head
    out."""

    use_activation: bool | None = None
    activation: bool | None = None

    @property
    def activates(self) -> bool:
        return self.use_activation is not False and self.activation is not False


class PoolingRequest(ActivationFields, EmbeddingRequest):
    pass


class ClassifyRequest(ActivationFields, InputFields):
    pass


class RewardRequest(TextFields):
    """query: texts, each a whole conversation.

    Accepted without effect: prompts, labels."""

    query: Annotated[list[str], Field(min_length=1, fail_fast=True)]
    prompts: Any = None
    labels: Any = None

    @property
    def num_sequences(self) -> int:
        return len(self.query)


# Answers
@dataclass(frozen=True, slots=True)
class Embedding:
    """embedding: the numbers, or with encoding_format=base64 a string."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


@dataclass(frozen=True, slots=True)
class EmbeddingList:
    data: list[Embedding]
    model: str
    usage: Usage
    object: Literal["list"] = "list"


@dataclass(frozen=True, slots=True)
class Pooled:
    """data: as the embedding of /v1/embeddings; of a model with a score head, the head's outputs."""

    index: int
    data: list[float] | str
    object: Literal["pooling"] = "pooling"


@dataclass(frozen=True, slots=True)
class PooledList:
    id: str
    created: int
    model: str
    data: list[Pooled]
    usage: Usage
    object: Literal["list"] = "list"


@dataclass(frozen=True, slots=True)
class Classified:
    """label: of the largest of probs, which are in the order of the model's labels."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


@dataclass(frozen=True, slots=True)
class ClassifiedList:
    id: str
    created: int
    model: str
    data: list[Classified]
    usage: Usage
    object: Literal["list"] = "list"


@dataclass(frozen=True, slots=True)
class Rewards:
    """rewards: the last output of the score head for each text, without activation."""

    rewards: list[float]


# Preparation
def pooling_of(model: ServedModel) -> PoolingInfo:
    """Of a model whose task has been checked."""
    assert model.pooling is not None
    return model.pooling


def prompt_named(name: str | None, model: ServedModel) -> str:
    """The text of the model's prompt with this name, or of its default. Raises InvalidRequest."""
    pooling = pooling_of(model)
    prompts = dict(pooling.prompts)
    if name is None:
        return prompts.get(pooling.default_prompt, "")
    if name not in prompts:
        raise InvalidRequest(f"prompt_name must be one of the model's prompts: {sorted(prompts)}", "prompt_name")
    return prompts[name]


def with_prompt(
    texts: Sequence[Prompt], prompt: str, model: ServedModel, param: str, limits: EngineLimits
) -> list[Prompt]:
    """The texts after a prompt; token ids where they become messages. Raises InvalidRequest."""
    if not pooling_of(model).messages:
        return [prompt + text if isinstance(text, str) else text for text in texts]
    return [
        chat_ids(as_messages(text, prompt), model, param, limits) if isinstance(text, str) else text for text in texts
    ]


def tokenize_texts(
    texts: Sequence[Prompt], body: TextFields, model: ServedModel, limits: EngineLimits, param: str
) -> list[list[int]]:
    """The token ids of each text, cut as truncate_prompt_tokens says. param: the field that has the texts. Raises
    InvalidRequest."""
    longest, most = limits.max_tokens_per_sequence, body.truncate_prompt_tokens
    most = longest if most == -1 else most
    adds_special = body.add_special_tokens is not False
    written = [text for text in texts if isinstance(text, str)]
    try:
        encoded = iter(model.tokenizer.encode_batch(written, adds_special, longest if most is None else None))
    except TextTooLong as error:
        raise too_long(param, error, limits) from None
    found = []
    for index, text in enumerate(texts):
        ids = next(encoded) if isinstance(text, str) else text
        if most is not None and len(ids) > most:
            ids = _cut(text, most, adds_special, model)
        ids = without_padding(ids, pooling_of(model))
        if not ids:
            raise InvalidRequest(f"{param} has a text without tokens, number {index}", param)
        check_text_length(len(ids), param, limits)
        check_vocabulary(ids, model, param)
        found.append(ids)
    return found


def chat_ids(messages: Mapping[str, str], model: ServedModel, param: str, limits: EngineLimits) -> list[int]:
    """The token ids of texts by role, as messages of the model's chat template. Raises InvalidRequest."""
    pooling = pooling_of(model)
    is_flat = pooling.messages == "flat"
    shown = [
        {"role": role, "content": text if is_flat else [{"type": "text", "text": text}]}
        for role, text in messages.items()
    ]
    most = limits.max_tokens_per_sequence
    try:
        return model.tokenizer.encode_chat(shown, pooling.adds_generation_prompt, max_tokens=most)
    except ChatTemplateError as error:
        raise InvalidRequest(f"{param}: {error}", param) from error
    except TextTooLong as error:
        raise too_long(param, error, limits) from None


def as_messages(text: str, prompt: str, role: str = "user") -> dict[str, str]:
    """A text by its role, after a prompt if there is one."""
    return {**({"system": prompt} if prompt else {}), role: text}


def _cut(text: Prompt, most: int, adds_special: bool, model: ServedModel) -> list[int]:
    """The first tokens of a text, with the tokens that the tokenizer puts around it."""
    if not isinstance(text, str):
        return text[:most]
    bare = model.tokenizer.encode(text, add_special_tokens=False)
    num_added = len(model.tokenizer.with_added_tokens([])) if adds_special else 0
    kept = bare[: max(0, most - num_added)]
    return model.tokenizer.with_added_tokens(kept)[:most] if adds_special else kept


def without_padding(ids: list[int], pooling: PoolingInfo) -> list[int]:
    """Without padding at the end, which does not count in transformers' classifiers. A text of padding alone stays."""
    if pooling.pad_id is None or ids[-1:] != [pooling.pad_id] or set(ids) == {pooling.pad_id}:
        return ids
    end = len(ids)
    while ids[end - 1] == pooling.pad_id:
        end -= 1
    return ids[:end]


def draft_texts(
    texts_ids: Sequence[list[int]],
    body: TextFields,
    model: ServedModel,
    origin: Origin,
    prefix: str,
    repeated: Mapping[str, Any],
) -> Draft:
    """One request for each text. prefix: begins the answer's id. repeated: what the answer is built with."""
    if len(texts_ids) > MAX_TEXTS:
        raise InvalidRequest(f"a body may have at most {MAX_TEXTS} texts, not {len(texts_ids)}", "input")
    unique, adapter = random_id(), origin.adapter
    salt = f"{origin.key_salt}:{body.cache_salt}" if origin.key_salt else body.cache_salt
    requests = [
        GenerateRequest(
            request_id=f"{prefix}{unique}-{index}",
            prompt_ids=np.array(ids, np.int32),
            num_sequences=1,
            max_new_tokens=0,
            sampling=NEUTRAL,
            seed=0,
            stop_strings=(),
            ignore_eos=True,
            want_logprobs=False,
            # Cached tokens have no hidden states, which all count.
            cache_salt=f"{unique}-{index}" if pooling_of(model).needs_all_tokens else salt,
            client=origin.client,
            priority=body.priority,
            is_background=origin.is_background,
            job=origin.job,
            session=origin.session,
            arrived_s=origin.arrived_s,
            adapter="" if adapter is None else adapter.digest,
            adapter_version="" if adapter is None else adapter.version,
        )
        for index, ids in enumerate(texts_ids)
    ]
    response_id = f"{prefix}{unique if body.request_id is None else body.request_id}"
    name = "" if adapter is None else adapter.name
    return Draft(Prepared(response_id, requests, repeated=repeated, adapter_name=name), None)


def _draft_input(body: EmbeddingRequest, model: ServedModel, limits: EngineLimits, origin: Origin) -> Draft:
    prompt, size = prompt_named(body.prompt_name, model), pooling_of(model).size
    if body.dimensions is not None and body.dimensions > size:
        raise InvalidRequest(f"dimensions may be at most {size}, the model's, not {body.dimensions}", "dimensions")
    texts = with_prompt(body.input, prompt, model, "input", limits)
    ids = tokenize_texts(texts, body, model, limits, "input")
    repeated = {"base64": body.encoding_format == "base64", "dimensions": body.dimensions, "activates": True}
    if isinstance(body, PoolingRequest):
        repeated["activates"] = body.activates
        return draft_texts(ids, body, model, origin, "pool-", repeated)
    return draft_texts(ids, body, model, origin, "embd-", repeated)


def _draft_classes(body: ClassifyRequest, model: ServedModel, limits: EngineLimits, origin: Origin) -> Draft:
    ids = tokenize_texts(body.input, body, model, limits, "input")
    return draft_texts(ids, body, model, origin, "classify-", {"activates": body.activates})


def _draft_rewards(body: RewardRequest, model: ServedModel, limits: EngineLimits, origin: Origin) -> Draft:
    ids = tokenize_texts(body.query, body, model, limits, "query")
    return draft_texts(ids, body, model, origin, "reward-", {})


# From results to answers
def vector_of(sequence: FinishedSequence, pooling: PoolingInfo, dimensions: int | None = None) -> NDArray[np.float32]:
    """[D] of an embedding model; dimensions: so many first numbers."""
    assert sequence.vector is not None, "a model that pools gives each prompt one"
    vector = sequence.vector[:dimensions]
    return unit(vector) if pooling.normalizes else vector


def unit(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """[D] -> the same direction with length 1."""
    length = max(float(np.linalg.norm(vector.astype(np.float64))), 1e-12)
    scaled: NDArray[np.float32] = (vector / np.float64(length)).astype(np.float32)
    return scaled


def activated(outputs: NDArray[np.float32], activation: Activation) -> NDArray[np.float32]:
    """[L], the outputs of a score head -> the same after its activation."""
    numbers = outputs.astype(np.float64)
    if activation == "sigmoid":
        numbers = 1 / (1 + np.exp(-numbers))
    elif activation == "softmax":
        powers = np.exp(numbers - numbers.max())
        numbers = powers / powers.sum()
    return numbers.astype(np.float32)


def outputs_of(sequence: FinishedSequence, pooling: PoolingInfo, activates: bool) -> NDArray[np.float32]:
    """[L], of a model with a score head."""
    assert sequence.vector is not None, "a model that pools gives each prompt one"
    return activated(sequence.vector, pooling.activation) if activates else sequence.vector


def _number_list(vector: NDArray[np.float32]) -> orjson.Fragment:
    return orjson.Fragment(orjson.dumps(np.ascontiguousarray(vector), option=orjson.OPT_SERIALIZE_NUMPY))


def _vectors(prepared: Prepared, rows: Sequence[Sequence[FinishedSequence]], model: ServedModel) -> list[Any]:
    """Of each text, what its entry has: numbers as JSON, or base64."""
    pooling, asked = pooling_of(model), prepared.repeated
    found = list[Any]()
    for (sequence,) in rows:
        if pooling.task == "embed":
            vector = vector_of(sequence, pooling, asked["dimensions"])
        else:
            vector = outputs_of(sequence, pooling, asked["activates"])
        packed = base64.b64encode(vector.astype("<f4").tobytes()).decode() if asked["base64"] else _number_list(vector)
        found.append(packed)
    return found


def written(answer: Any, usage: Usage) -> Answer:
    """answer: a dataclass, or an object of JSON."""
    return Answer(write_json(answer), usage)


def _build_embeddings(prepared: Prepared, rows: Sequence[Sequence[FinishedSequence]], model: ServedModel) -> Answer:
    usage, name = build_usage(prepared, rows), prepared.adapter_name or model.name
    data = [Embedding(index, vector) for index, vector in enumerate(_vectors(prepared, rows, model))]
    return written(EmbeddingList(data, name, usage), usage)


def _build_pooled(prepared: Prepared, rows: Sequence[Sequence[FinishedSequence]], model: ServedModel) -> Answer:
    usage, name = build_usage(prepared, rows), prepared.adapter_name or model.name
    data = [Pooled(index, vector) for index, vector in enumerate(_vectors(prepared, rows, model))]
    return written(PooledList(prepared.response_id, int(time.time()), name, data, usage), usage)


def _build_classes(prepared: Prepared, rows: Sequence[Sequence[FinishedSequence]], model: ServedModel) -> Answer:
    usage, name, pooling = build_usage(prepared, rows), prepared.adapter_name or model.name, pooling_of(model)
    data = []
    for index, (sequence,) in enumerate(rows):
        outputs = outputs_of(sequence, pooling, prepared.repeated["activates"])
        label, probs = pooling.labels[int(outputs.argmax())], _number_list(outputs)
        data.append({"index": index, "label": label, "probs": probs, "num_classes": len(outputs)})
    fields = {"id": prepared.response_id, "object": "list", "created": int(time.time()), "model": name}
    return written({**fields, "data": data, "usage": usage}, usage)


def _build_rewards(prepared: Prepared, rows: Sequence[Sequence[FinishedSequence]], model: ServedModel) -> Answer:
    outputs = [outputs_of(sequence, pooling_of(model), activates=False) for (sequence,) in rows]
    return written(Rewards([float(each[-1]) for each in outputs]), build_usage(prepared, rows))


EMBEDDINGS = RoutedEndpoint(
    body_model=EmbeddingRequest,
    draft=_draft_input,
    build=_build_embeddings,
    stream=None,
    renders_template=False,
    name="create_embeddings",
    description="A vector of each text; of a reward model, what its head gives.",
    operation="embeddings",
    answer_model=EmbeddingList,
    example={"input": ["What do whales eat?", "Krill."]},
    tasks=frozenset(("embed", "reward")),
)
POOLING = RoutedEndpoint(
    body_model=PoolingRequest,
    draft=_draft_input,
    build=_build_pooled,
    stream=None,
    renders_template=False,
    name="pool",
    description="What the model makes of each text: a vector, or the outputs of its score head.",
    operation="embeddings",
    answer_model=PooledList,
    example={"input": "What do whales eat?"},
    tasks=_HEAD_TASKS | {"embed"},
)
CLASSIFY = RoutedEndpoint(
    body_model=ClassifyRequest,
    draft=_draft_classes,
    build=_build_classes,
    stream=None,
    renders_template=False,
    name="classify",
    description="The probabilities of the model's classes for each text.",
    operation="embeddings",
    answer_model=ClassifiedList,
    example={"input": ["What a nice whale!"]},
    tasks=_HEAD_TASKS,
)
REWARDS = RoutedEndpoint(
    body_model=RewardRequest,
    draft=_draft_rewards,
    build=_build_rewards,
    stream=None,
    renders_template=False,
    name="get_reward",
    description="The reward of each text, as OpenRLHF asks a remote reward model.",
    operation="embeddings",
    answer_model=Rewards,
    example={"query": ["What do whales eat? Krill."]},
    tasks=_HEAD_TASKS,
)
