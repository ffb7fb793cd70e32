"""Bodies and answers of the routes for roll-outs that have vLLM's names."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, PlainValidator

from tokasaurus.messages.generation import FinishReason
from tokasaurus.server.protocol.answers import Usage, WrittenPromptLogprobs
from tokasaurus.server.protocol.fields import (
    WHOLE_FLOATS,
    NullMeans,
    Only,
    OptionalObject,
    StrictObject,
    Text,
    TokenId,
    as_integers,
    not_implemented,
    value_error,
)
from tokasaurus.server.protocol.grammar_fields import StructuredOutputs
from tokasaurus.server.protocol.sampling_fields import (
    AllowedTokenIds,
    BadWords,
    CacheSalt,
    Priority,
    SamplingNumbers,
    Seed,
)
from tokasaurus.server.value_words import MAX_ECHO_CHARS

PauseMode = Literal["abort", "wait", "keep"]

VersionName = Annotated[str, Field(min_length=1, max_length=256)]
"""Name of a version of weights, which each answer has."""


def parse_token_ids(value: object) -> list[int]:
    """For validators: a list with at least one token id. Ids are compared with the vocabulary later."""
    if isinstance(value, list):
        value = as_integers(value)
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:  # refuses bool, a subclass of int
        raise value_error("must be a list of token ids")
    if not value:
        raise value_error("must not be empty")
    return value


TokenIds = Annotated[list[int], PlainValidator(parse_token_ids, Annotated[list[TokenId], Field(min_length=1)])]


class TokensSampling(SamplingNumbers):
    """vLLM's sampling parameters.

    max_tokens: null is all that the prompt leaves of max_model_len. logprobs: of each sampled token, and this many most
    likely ones. prompt_logprobs: of the prompt's tokens, and this many most likely ones at each position.

    Without effect, since the answer has no text and all tokens as sampled: skip_special_tokens,
    spaces_between_special_tokens, include_stop_str_in_output, detokenize. Without effect, since an answer is one
    object: output_kind. Without effect, since no routed experts are returned: routed_experts_prompt_start.
    """

    n: Annotated[int, Field(ge=1), WHOLE_FLOATS, NullMeans(1)] = 1
    max_tokens: Annotated[int | None, Field(ge=1), WHOLE_FLOATS] = None
    min_tokens: Annotated[int, Field(ge=0), WHOLE_FLOATS, NullMeans(0)] = 0
    seed: Seed = None
    logprobs: Annotated[int | None, Field(ge=0), WHOLE_FLOATS] = None
    prompt_logprobs: Annotated[int | None, Field(ge=0), WHOLE_FLOATS] = None
    structured_outputs: StructuredOutputs = None
    cache_salt: CacheSalt = ""
    allowed_token_ids: AllowedTokenIds = None
    bad_words: BadWords = ()

    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    detokenize: bool | None = None
    output_kind: Annotated[int | None, Field(ge=0, le=2), WHOLE_FLOATS] = None
    routed_experts_prompt_start: Annotated[int | None, Field(ge=0), WHOLE_FLOATS] = None

    logits_processors: Annotated[Any, Only(None, [])] = None
    truncate_prompt_tokens: Annotated[Any, Only(None)] = None
    logprob_token_ids: Annotated[Any, Only(None)] = None
    flat_logprobs: Annotated[Any, Only(None, False)] = None
    skip_reading_prefix_cache: Annotated[Any, Only(None, False)] = None
    thinking_token_budget: Annotated[Any, Only(None)] = None
    extra_args: Annotated[Any, Only(None, {})] = None


class TokensRequest(StrictObject):
    """Tokens in, tokens out.

    model: as in other bodies; null is the served model. request_id: returned in the answer; null draws one.
    return_token_ids: also return the prompt's tokens. cache_salt: also accepted in sampling_params.
    """

    model: str | None = None
    request_id: Text | None = None
    token_ids: TokenIds
    sampling_params: Annotated[TokensSampling, NullMeans(TokensSampling())] = Field(default_factory=TokensSampling)
    cache_salt: CacheSalt = ""
    priority: Priority = 0
    return_token_ids: Annotated[bool, NullMeans(False)] = False

    stream: Annotated[Any, Only(None, False)] = None
    stream_options: Annotated[Any, Only(None)] = None
    output_mode: Annotated[Any, Only(None, "tokens")] = None
    features: Annotated[Any, Only(None)] = None
    content_parts: Annotated[Any, Only(None, [])] = None
    kv_transfer_params: Annotated[Any, Only(None)] = None
    ec_transfer_params: Annotated[Any, Only(None)] = None


@dataclass(frozen=True, slots=True)
class RankedToken:
    """token: its id, as "token_id:123". rank: 1 for the most likely token."""

    token: str
    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class SampledToken:
    """rank: null if it is not among the most likely ones that were asked for. top_logprobs: most likely first."""

    token: str
    token_id: int
    logprob: float
    rank: int | None
    top_logprobs: list[RankedToken]


@dataclass(frozen=True, slots=True)
class TokensLogprobs:
    """content: one for each of the choice's token_ids."""

    content: list[SampledToken]


@dataclass(frozen=True, slots=True)
class TokensChoice:
    """token_ids: as sampled, with the end token and the tokens of a stop string."""

    index: int
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: TokensLogprobs | None


@dataclass(frozen=True, slots=True)
class TokensAnswer:
    """prompt_logprobs: as in other answers. prompt_token_ids: with return_token_ids, else null.

    Each choice also has weight_versions, the versions of the weights that its tokens are from, and the answer
    weight_version, the newest of them."""

    request_id: str
    model: str
    created: int
    choices: Sequence[TokensChoice]
    prompt_logprobs: WrittenPromptLogprobs | None
    prompt_token_ids: list[int] | None
    usage: Usage


def _refuse_nccl(value: object) -> object:
    if value is not None:
        raise not_implemented(
            "tells of weights sent through NCCL or CUDA IPC, which this server does not receive: write them to a "
            "directory of safetensors files, such as one in /dev/shm, and name it in weight_dir"
        )
    return value


_OfNccl = Annotated[Any, PlainValidator(_refuse_nccl, None)]


class _NoNccl(StrictObject):
    names: _OfNccl = None
    dtype_names: _OfNccl = None
    shapes: _OfNccl = None
    packed: _OfNccl = None
    ipc_handles: _OfNccl = None
    ipc_handles_pickled: _OfNccl = None


class WeightsUpdate(_NoNccl):
    """weight_dir: a directory on the server's machine with safetensors files of the model's tensors.

    version: a name for the weights; null counts on from the last number. partial: tensors may be missing, and stay as
    they are. mode: what becomes of running requests, unless the engine is paused already, as for /pause. clear_cache:
    forget the KV of all prompts.
    """

    weight_dir: Text
    version: VersionName | None = None
    partial: Annotated[bool, NullMeans(False)] = False
    mode: Annotated[PauseMode, NullMeans("keep")] = "keep"
    clear_cache: Annotated[bool, NullMeans(True)] = True


class UpdateWeightsRequest(WeightsUpdate):
    """A WeightsUpdate, or an update_info with its fields, as vLLM's own transfers send it."""

    weight_dir: Text | None = None  # type: ignore[assignment]  # one of the two is given
    update_info: WeightsUpdate | None = None


class TransferInfo(OptionalObject):
    """backend: how weights come; files in a directory are the only way."""

    backend: Annotated[Any, Only(None, "files")] = None

    master_address: _OfNccl = None
    master_port: _OfNccl = None
    rank_offset: _OfNccl = None
    world_size: _OfNccl = None
    packed: _OfNccl = None


class InitTransferRequest(StrictObject):
    init_info: Annotated[TransferInfo, NullMeans(TransferInfo())]


class StartUpdateRequest(OptionalObject):
    """is_checkpoint_format: tensors have the names and shapes of the model's files, which is the only form."""

    is_checkpoint_format: Annotated[Any, Only(None, True)] = None


class FinishUpdateRequest(OptionalObject):
    """weight_version: must be the version of the weights that were sent, if given before."""

    weight_version: VersionName | None = None


class ResetCacheRequest(OptionalObject):
    """reset_running_requests: what runs is no obstacle: it keeps its tokens, computes its KV again, and goes on."""

    reset_running_requests: Annotated[bool, NullMeans(False)] = False
    reset_external: Annotated[Any, Only(None, False)] = None


RpcMethod = Literal[
    "start_weight_update",
    "skyrl_start_weight_update",
    "update_weights",
    "update_weights_nccl",
    "update_weights_ipc",
    "finish_weight_update",
    "skyrl_finish_weight_update",
]


def _parse_method(value: object) -> object:
    if not isinstance(value, str):
        raise value_error("must be a string: the name of a method")
    if value not in get_args(RpcMethod):
        raise not_implemented(
            f"may not be {value[:MAX_ECHO_CHARS]!r}: workers run no methods of a client. Only "
            f"{', '.join(get_args(RpcMethod))} are served, as the routes that update weights"
        )
    return value


class RpcArguments(StrictObject):
    """is_checkpoint_format: as for /start_weight_update. update_info: of an update of the weights."""

    is_checkpoint_format: Annotated[Any, Only(None, True)] = None
    update_info: WeightsUpdate | None = None


class RpcRequest(StrictObject):
    """method: what to do; SkyRL's names are those of the methods that it adds to vLLM's workers. timeout: no effect."""

    method: Annotated[RpcMethod, PlainValidator(_parse_method, RpcMethod)]
    args: Annotated[Any, Only(None, [])] = None
    kwargs: Annotated[RpcArguments, NullMeans(RpcArguments())] = Field(default_factory=RpcArguments)
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class RpcResults:
    """results: null for each worker."""

    results: list[None]


@dataclass(frozen=True, slots=True)
class FinishedSession:
    """session_id: the name, which may be unknown."""

    session_id: str


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """weight_version: the name of the weights of all replicas."""

    weight_version: str


@dataclass(frozen=True, slots=True)
class PauseState:
    is_paused: bool


@dataclass(frozen=True, slots=True)
class CacheReset(PauseState):
    """success: true, since a cache that cannot be reset is an error."""

    success: Literal[True] = True


Level = Literal["1", "2"]
"""Level of sleep, as a query parameter."""


@dataclass(frozen=True, slots=True)
class SleepState:
    is_sleeping: bool


@dataclass(frozen=True, slots=True)
class WorldSize:
    """world_size: workers of all replicas, or of one with include_dp=false."""

    world_size: int
