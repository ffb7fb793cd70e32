"""Bodies of the routes for roll-outs → a completions body, from which their requests are made."""

from collections.abc import Mapping

from tokasaurus.server.errors import InvalidRequest
from tokasaurus.server.protocol.completions import CompletionRequest
from tokasaurus.server.protocol.sampling_fields import SamplingNumbers
from tokasaurus.server.protocol.sglang_rollouts import DEFAULT_NEW_TOKENS, GenerateRequest
from tokasaurus.server.protocol.vllm_rollouts import TokensRequest

_NUMBERS = tuple(SamplingNumbers.model_fields)

TOKENS_FIELDS: Mapping[str, str] = {
    "prompt": "token_ids",
    **{name: f"sampling_params.{name}" for name in _NUMBERS},
    **{
        name: f"sampling_params.{name}"
        for name in (
            *("n", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "structured_outputs"),
            *("allowed_token_ids", "bad_words"),
        )
    },
}
"""Fields of TokensRequest, by the field of a completions body that each becomes."""


def completion_of_tokens(body: TokensRequest) -> CompletionRequest:
    """Validated already, as `body` is. Raises InvalidRequest."""
    sampling = body.sampling_params
    if body.cache_salt and sampling.cache_salt and body.cache_salt != sampling.cache_salt:
        raise InvalidRequest("cache_salt and sampling_params.cache_salt differ: one of them is enough", "cache_salt")
    return CompletionRequest.model_construct(
        model=body.model,
        prompt=[body.token_ids],
        cache_salt=body.cache_salt or sampling.cache_salt,
        priority=body.priority,
        return_token_ids=body.return_token_ids,
        **{name: getattr(sampling, name) for name in _NUMBERS},
        n=sampling.n,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        seed=sampling.seed,
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words=sampling.bad_words,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        structured_outputs=sampling.structured_outputs,
    )


GENERATE_FIELDS: Mapping[str, str] = {
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "logprob_start_len",
    "return_token_ids": "return_prompt_token_ids",
    **{name: f"sampling_params.{name}" for name in _NUMBERS},
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
}
"""Fields of GenerateRequest, by the field of a completions body that each becomes."""


def generate_fields(body: GenerateRequest) -> Mapping[str, str]:
    """GENERATE_FIELDS, with the field that has the prompt."""
    return {**GENERATE_FIELDS, "prompt": "text" if body.input_ids is None else "input_ids"}


def default_new_tokens(body: GenerateRequest) -> int | None:
    """Most new tokens unless the body has a number; None: all that there is room for."""
    return None if "max_new_tokens" in body.sampling_params.model_fields_set else DEFAULT_NEW_TOKENS


def completion_of_generate(body: GenerateRequest) -> CompletionRequest:
    """Validated already, as `body` is. Raises InvalidRequest."""
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("just one of text and input_ids is needed", "input_ids")
    if not body.return_logprob:
        for name, neutral in (("logprob_start_len", -1), ("top_logprobs_num", 0), ("return_text_in_logprobs", False)):
            if getattr(body, name) != neutral:
                raise InvalidRequest(f"{name} goes with return_logprob=true", name)
    scores_prompt = body.logprob_start_len >= 0
    if scores_prompt and body.stream:
        raise InvalidRequest("logprob_start_len cannot be streamed", "logprob_start_len")
    sampling = body.sampling_params
    if sampling.max_new_tokens == 0 and not scores_prompt:
        name = "sampling_params.max_new_tokens"
        raise InvalidRequest(f"{name} may be 0 only to score the prompt, with logprob_start_len", name)
    prompt: str | list[int] = body.text if body.text is not None else body.input_ids or []
    return CompletionRequest.model_construct(
        model=body.model,
        prompt=[prompt],
        cache_salt=body.cache_salt,
        stream=body.stream,
        return_token_ids=body.return_prompt_token_ids,
        skip_special_tokens=sampling.skip_special_tokens,
        no_stop_trim=sampling.no_stop_trim,
        **{name: getattr(sampling, name) for name in _NUMBERS},
        max_tokens=sampling.max_new_tokens if "max_new_tokens" in sampling.model_fields_set else None,
        min_tokens=sampling.min_new_tokens,
        seed=sampling.sampling_seed,
        logprobs=body.top_logprobs_num if body.return_logprob else None,
        prompt_logprobs=body.top_logprobs_num if scores_prompt else None,
    )
