"""What a job gives back: a result for each prompt, with its samples or the reason why there are none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asks for."""

    id: str
    """Made by the server; the message with the call's result names it."""
    name: str
    """Name of the function."""
    arguments: str
    """Arguments as the model wrote them: JSON, unless the completion was cut or the model made a mistake."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One completion of a prompt."""

    text: str
    """All of the completion if the prompt is a text or token ids. In a chat, the content of the message, without tool
    calls and reasoning."""
    token_ids: NDArray[np.int32]
    """[T]: the tokens as sampled, with the end token and the tokens of a stop string."""
    logprobs: NDArray[np.float32] | None
    """[T]: log-probability of each token, finite, by `Sampling.logprobs_mode`; None if `Sampling.logprobs` is False."""
    finish_reason: str
    """"stop", "length" or "tool_calls"; "abort" if a trainer has ended the completion early, for new weights."""
    seed: int
    """The request's seed. The same request with it gives the same n samples."""
    index: int = 0
    """Which of the n samples it is."""
    parsed: Any = None
    """The object that the text means, if there is a schema: an instance of the pydantic class, or what the JSON is.
    None if the text was cut, or if a validator of the class refuses it."""
    parse_error: str | None = None
    """Why there is a schema and `parsed` is None."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Only of a chat with tools."""
    reasoning: str | None = None
    """The text between the marks of reasoning, such as `<think>` and `</think>`; None if there is none. In a chat it is
    what the server splits off the text, if the model's chat template has such marks. Else it counts where the text
    begins with a mark, and remains in the text."""
    prompt_tokens: int = 0
    """Tokens of the prompt."""
    cached_tokens: int = 0
    """Tokens of the prompt that did not have to be computed for any sample."""
    top_token_ids: NDArray[np.int32] | None = None
    """[T, N]: the N most likely tokens at each position, most likely first; None if `Sampling.top_logprobs` is 0."""
    top_logprobs: NDArray[np.float32] | None = None
    """[T, N]: their log-probabilities; -inf after the last possible token, where fewer than N are possible."""
    weight_version: str | None = None
    """Name of the weights that the last token is from; None if the server's weights cannot be replaced (flag rl)."""


@dataclass(frozen=True, slots=True)
class RowError:
    """Why a prompt has no samples."""

    code: str
    """A word for programs, such as "context_length_exceeded"."""
    message: str
    """For people; `str(error)` is the same."""
    param: str | None = None
    """The field of the request that is wrong, if one is."""
    status: int | None = None
    """The HTTP status that a single request would have got; None for what never reached the server."""

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """The samples of one prompt, or its error."""

    key: Any
    """The row's key; by default its number in the input, from 0."""
    row: Any
    """The prompt, the messages, or the row with them, as it was given."""
    samples: tuple[Sample, ...]
    """`Sampling.n` of them; none if there is an error."""
    error: RowError | None = None
    """Why there are no samples."""

    @property
    def text(self) -> str | None:
        """Text of the first sample; None if there is an error."""
        return self.samples[0].text if self.samples else None

    @property
    def parsed(self) -> Any:
        """Parsed answer of the first sample; None if there is an error."""
        return self.samples[0].parsed if self.samples else None

    @property
    def finish_reason(self) -> str | None:
        """Finish reason of the first sample; None if there is an error."""
        return self.samples[0].finish_reason if self.samples else None


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """The log-probabilities of a given completion."""

    token_ids: NDArray[np.int32]
    """[T]: the tokens of the completion. A token that begins in the prompt and ends in the completion belongs to it."""
    logprobs: NDArray[np.float32]
    """[T]: log-probability of each, given the prompt and the tokens before it. NaN for the first token of all: a model
    without a start token has no probability for it."""
    error: RowError | None = None
    """Why there are none; the arrays are then empty."""

    @property
    def total(self) -> float:
        """Log-probability of the whole completion; NaN if there is an error, or if one of its tokens has NaN."""
        return float("nan") if self.error else float(self.logprobs.sum(dtype=np.float64))


NO_TOKENS = (np.zeros(0, np.int32), np.zeros(0, np.float32))
"""Token ids and log-probabilities of a score with an error."""


def row_error(status: int, body: Mapping[str, Any]) -> RowError:
    """The error of an answer. body: the server's error object, or what another program has answered."""
    error = body.get("error")
    if not isinstance(error, dict):
        return RowError("unknown", f"the server answered {status} without a reason", None, status)
    code = error.get("code") or error.get("type") or "unknown"
    return RowError(str(code), str(error.get("message")), error.get("param"), status)
