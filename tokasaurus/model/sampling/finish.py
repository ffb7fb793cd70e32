"""What is done with the sampled rows of a decode step: check that all is finite, store the last tokens, pack the
results for the host."""

# R rows, each a token of the forward that samples; E hidden size

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Finished(NamedTuple):
    """Finished rows, on the device."""

    tokens: Tensor
    """int64 [R], as in Sampled: -1 for rows with a logit that is NaN or positive infinity."""

    packed: Tensor
    """int32 [R, 3]: the token, 0 in place of -1; its logprob, a float32; whether hidden state and logits are finite."""

    @classmethod
    def allocate(cls, num_rows: int, device: torch.device) -> "Finished":
        tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
        return cls(tokens, torch.empty((num_rows, 3), dtype=torch.int32, device=device))


def finish_by_torch(
    tokens: Tensor, logprobs: Tensor | None, hidden: Tensor, slots: Tensor, last_tokens: Tensor
) -> Finished:
    """Store the tokens of R rows as the last ones of their slots, and pack their results.

    tokens, logprobs: as in Sampled; without logprobs, they are packed as 0. hidden: [R, E], of the forward, in any
    float dtype. slots: int64 [R]; rows of padding share slot 0. last_tokens: int64 [slots], of which those of the rows
    are changed.
    """
    is_finite = are_finite(hidden) & (tokens >= 0)
    usable = tokens.clamp(min=0)  # later steps may embed it before the manager ends the sequence
    last_tokens[slots] = usable
    if logprobs is None:
        logprobs = torch.zeros(len(tokens), dtype=torch.float32, device=tokens.device)
    return Finished(tokens, torch.stack((usable.int(), logprobs.view(torch.int32), is_finite.int()), dim=1))


def are_finite(hidden: Tensor) -> Tensor:
    """[R, E] -> bool [R], whether all numbers of a row are."""
    largest: Tensor = torch.linalg.vector_norm(hidden, torch.inf, dim=-1)  # NaN if one is
    return largest < torch.inf


def unpacked(packed: NDArray[np.int32], has_logprobs: bool) -> dict[str, NDArray[np.generic]]:
    """`Finished.packed` on the host -> token_ids int32 [R], is_finite bool [R], and logprobs float32 [R] if the rows
    have them."""
    token_ids, logprobs, is_finite = np.ascontiguousarray(packed.T)
    arrays: dict[str, NDArray[np.generic]] = {"token_ids": token_ids, "is_finite": is_finite != 0}
    if has_logprobs:
        arrays["logprobs"] = logprobs.view(np.float32)
    return arrays
