"""Most tokens of prompt and completion together, and what the error of a longer request blames."""

from collections.abc import Mapping

from tokasaurus.messages.status import EngineLimits, SequenceLimit
from tokasaurus.server.errors import ContextLengthExceeded
from tokasaurus.text.tokenizer import TextTooLong

_REASONS: Mapping[SequenceLimit, str] = {
    "model": "",
    "max_num_tokens_per_request": " on this server, a limit set by its flag max_num_tokens_per_request=",
    "kv_cache_num_tokens": " on this server, the size of its KV cache, which its flag kv_cache_num_tokens= sets",
}


def room_after(prompt_ids: list[int], limits: EngineLimits, param: str, fewest: int = 1) -> int:
    """Most new tokens that fit after the prompt. Raises ContextLengthExceeded if they are fewer than `fewest`."""
    room = limits.max_tokens_per_sequence - len(prompt_ids)
    if room < fewest:
        raise _exceeded(f"{param} has {len(prompt_ids)} tokens, which leaves no room for an answer", param, limits)
    return room


def check_max_tokens(max_tokens: int, param: str, prompt_ids: list[int], limits: EngineLimits) -> int:
    """`max_tokens`, which the field `param` asks for. Raises ContextLengthExceeded if there is less room."""
    room = limits.max_tokens_per_sequence - len(prompt_ids)
    if max_tokens > room:
        message = f"{param} is {max_tokens}, but after the prompt's {len(prompt_ids)} tokens there is room for {room}"
        raise _exceeded(message, param, limits)
    return max_tokens


def too_long(param: str, error: TextTooLong, limits: EngineLimits) -> ContextLengthExceeded:
    """The error for a prompt that was not even tokenized."""
    return _exceeded(
        f"{param} has at least {error.fewest_tokens} tokens, which leaves no room for an answer", param, limits
    )


def _exceeded(message: str, param: str, limits: EngineLimits) -> ContextLengthExceeded:
    # clients ignore the code field: litellm matches OpenAI's wording, LangChain the code within the message
    words = f"this model's maximum context length is {limits.max_tokens_per_sequence} tokens"
    code = ContextLengthExceeded.code
    return ContextLengthExceeded(f"{words}{_REASONS[limits.limited_by]} ({code}): {message}", param)
