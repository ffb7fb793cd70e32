"""Bodies and answers of the routes for roll-outs that have SGLang's names."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from tokasaurus.server.protocol.answers import Usage
from tokasaurus.server.protocol.fields import WHOLE_FLOATS, NullMeans, Only, OptionalObject, StrictObject, Text, TokenId
from tokasaurus.server.protocol.sampling_fields import CacheSalt, SamplingNumbers, Seed
from tokasaurus.server.protocol.vllm_rollouts import VersionName, parse_token_ids

DEFAULT_NEW_TOKENS = 128


def _parse_input_ids(value: object) -> list[int] | None:
    return None if value is None else parse_token_ids(value)


InputIds = Annotated[
    list[int] | None,
    PlainValidator(_parse_input_ids, Annotated[list[TokenId], Field(min_length=1)] | None),
]


class TextSampling(SamplingNumbers):
    """SGLang's sampling parameters.

    max_new_tokens: of the completion, 128 if it is not given; null is all that the prompt leaves of max_model_len; 0
    with logprob_start_len scores the prompt alone. skip_special_tokens: leave special tokens out of the text.
    no_stop_trim: the text keeps the stop string or end token that ended it. sampling_seed: as seed elsewhere.
    Without effect, as for the tokenizers that are served: spaces_between_special_tokens.
    """

    max_new_tokens: Annotated[int | None, Field(ge=0), WHOLE_FLOATS] = DEFAULT_NEW_TOKENS
    min_new_tokens: Annotated[int, Field(ge=0), WHOLE_FLOATS, NullMeans(0)] = 0
    sampling_seed: Seed = None
    skip_special_tokens: Annotated[bool, NullMeans(True)] = True
    no_stop_trim: Annotated[bool, NullMeans(False)] = False
    spaces_between_special_tokens: bool | None = None

    n: Annotated[Any, Only(None, 1)] = None
    beam_width: Annotated[Any, Only(None, 1)] = None
    stop_regex: Annotated[Any, Only(None, [])] = None
    json_schema: Annotated[Any, Only(None, "")] = None
    regex: Annotated[Any, Only(None, "")] = None
    ebnf: Annotated[Any, Only(None, "")] = None
    structural_tag: Annotated[Any, Only(None, "")] = None
    stream_interval: Annotated[Any, Only(None)] = None
    custom_params: Annotated[Any, Only(None, {})] = None


class GenerateRequest(StrictObject):
    """One prompt: either text or input_ids.

    rid: a name for /abort_request, returned as meta_info.id; null draws one. session_id: as the header X-Session-ID.
    return_logprob: of each sampled token; with logprob_start_len also of the prompt's tokens from there on, -1: of
    none. top_logprobs_num: and this many most likely tokens. return_text_in_logprobs: with the tokens' texts.
    return_prompt_token_ids: also return the prompt's tokens.
    stream: events whose text and tokens are all until then.

    Accepted without effect, since they do not concern the answer: log_metrics, no_logs, conversation_id.
    """

    text: Text | None = None
    input_ids: InputIds = None
    sampling_params: Annotated[TextSampling, NullMeans(TextSampling())] = Field(default_factory=TextSampling)
    model: str | None = None
    rid: Text | None = None
    session_id: str | None = None
    return_logprob: Annotated[bool, NullMeans(False)] = False
    logprob_start_len: Annotated[int, Field(ge=-1), WHOLE_FLOATS, NullMeans(-1)] = -1
    top_logprobs_num: Annotated[int, Field(ge=0), WHOLE_FLOATS, NullMeans(0)] = 0
    return_text_in_logprobs: Annotated[bool, NullMeans(False)] = False
    return_prompt_token_ids: Annotated[bool, NullMeans(False)] = False
    stream: Annotated[bool, NullMeans(False)] = False
    cache_salt: CacheSalt = ""

    log_metrics: bool | None = None
    no_logs: bool | None = None
    conversation_id: str | None = None

    priority: Annotated[Any, Only(None, 0)] = None
    extra_key: Annotated[Any, Only(None, "")] = None
    lora_path: Annotated[Any, Only(None)] = None
    image_data: Annotated[Any, Only(None, [])] = None
    video_data: Annotated[Any, Only(None, [])] = None
    audio_data: Annotated[Any, Only(None, [])] = None
    input_embeds: Annotated[Any, Only(None)] = None
    modalities: Annotated[Any, Only(None, [])] = None
    token_ids_logprob: Annotated[Any, Only(None, [])] = None
    return_hidden_states: Annotated[Any, Only(None, False)] = None
    return_routed_experts: Annotated[Any, Only(None, False)] = None
    return_sampling_mask: Annotated[Any, Only(None, False)] = None
    return_entropy: Annotated[Any, Only(None, False)] = None
    custom_logit_processor: Annotated[Any, Only(None)] = None
    session_params: Annotated[Any, Only(None)] = None
    data_parallel_rank: Annotated[Any, Only(None)] = None
    routed_dp_rank: Annotated[Any, Only(None)] = None
    background: Annotated[Any, Only(None, False)] = None


@dataclass(frozen=True, slots=True)
class GenerateAnswer:
    """output_ids: as sampled, with the end token and the tokens of a stop string. prompt_token_ids: null unless asked
    for. usage (our extension): as in other answers.

    meta_info: id, finish_reason (type stop, length or abort, and what ended the text), prompt_tokens,
    completion_tokens, cached_tokens, weight_version (of the last token), weight_versions (of all of them; in a stream,
    both only at its end); with
    return_logprob also output_token_logprobs and input_token_logprobs, lists of [logprob, token id, text or null], and
    with top_logprobs_num output_top_logprobs and input_top_logprobs, a list of such for each token.
    """

    text: str
    output_ids: list[int]
    prompt_token_ids: list[int] | None
    meta_info: dict[str, Any]
    usage: Usage


class PauseGenerationRequest(OptionalObject):
    """mode: running requests are ended by "abort" with the tokens that they have; or kept, by either of the others."""

    mode: Annotated[Literal["abort", "retract", "in_place"], NullMeans("abort")] = "abort"


class ContinueGenerationRequest(OptionalObject):
    """torch_empty_cache: without effect; memory that is free is given back at once."""

    torch_empty_cache: bool | None = None


class AbortRequest(OptionalObject):
    """rid: of the request to abort; unknown ones are ignored. abort_all: all requests."""

    rid: str | None = None
    abort_all: Annotated[bool, NullMeans(False)] = False
    abort_message: str | None = None


class UpdateFromDiskRequest(StrictObject):
    """model_path: a directory on the server's machine with safetensors files of all of the model's tensors.

    weight_version: a name for the weights; null counts on from the last number. abort_all_requests: end running
    requests by "abort" first; by default they are waited for, unless the engine is paused. flush_cache: forget the KV
    of all prompts. keep_pause: leave the engine paused.
    Without effect: torch_empty_cache, token_step.
    """

    model_path: Text
    weight_version: VersionName | None = None
    abort_all_requests: Annotated[bool, NullMeans(False)] = False
    abort_all_request: Annotated[bool, NullMeans(False)] = False  # as older trainers spell it
    flush_cache: Annotated[bool, NullMeans(True)] = True
    keep_pause: Annotated[bool, NullMeans(False)] = False

    torch_empty_cache: bool | None = None
    token_step: int | None = None

    load_format: Annotated[Any, Only(None, "auto", "safetensors")] = None
    is_async: Annotated[Any, Only(None, False)] = None
    recapture_cuda_graph: Annotated[Any, Only(None, False)] = None
    manifest: Annotated[Any, Only(None)] = None


MemoryTag = Literal["kv_cache", "weights", "cuda_graph"]


class MemoryRequest(OptionalObject):
    """tags: whose memory; null means all. cuda_graph: without effect, since a server that can sleep records none."""

    tags: Annotated[list[MemoryTag] | None, Field(min_length=1, fail_fast=True)] = None

    @property
    def chosen(self) -> frozenset[str]:
        every: frozenset[str] = frozenset({"kv_cache", "weights"})
        return every if self.tags is None else every.intersection(self.tags)


@dataclass(frozen=True, slots=True)
class Success:
    """message: for people."""

    success: bool
    message: str


@dataclass(frozen=True, slots=True)
class UpdateSuccess(Success):
    """num_paused_requests: requests that go on with the new weights. weight_version: the name of the weights."""

    num_paused_requests: int
    weight_version: str


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Sequences and KV of one replica; each of n samples is a sequence. Those that wait for a replica, or for the end
    of a pause, count as waiting at the first one."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float


@dataclass(frozen=True, slots=True)
class Loads:
    """timestamp: when, in ISO 8601."""

    timestamp: str
    version: str
    loads: list[ReplicaLoad]
