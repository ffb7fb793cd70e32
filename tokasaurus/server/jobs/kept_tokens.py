"""What a stop of the server keeps of a line that runs: the tokens of its sequences, as bytes, with which a later server
continues the same requests.

Knows what must be equal for that. Whoever reads the bytes gets requests that continue, or nothing: then the line starts
over, which gives the same text."""

import hashlib
import io
import logging
import zipfile
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from tokasaurus.messages.commands import FIRST_VERSIONS
from tokasaurus.messages.generation import FinishReason, GenerateRequest, SequenceDelta, TopLogprobs
from tokasaurus.server.engine_client.collectors import FinishedSequence
from tokasaurus.server.served_model import ServedModel

logger = logging.getLogger(__name__)

_REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length")
"""How a sequence has ended, by its number in the bytes; None: it goes on."""
_FREE = frozenset(
    (
        *("request_id", "prompt_ids", "max_new_tokens", "cache_salt", "client", "priority", "is_background"),
        *("job", "session", "arrived_s", "kept"),
    )
)
"""Fields of a request that may differ when it is continued, or that are compared otherwise."""


def write_kept(
    model: ServedModel, requests: Sequence[GenerateRequest], results: Sequence[Sequence[FinishedSequence]]
) -> bytes | None:
    """results: of each request, whose sequences have finished or were aborted. None if there is nothing to continue
    with: no tokens, or tokens of weights that the next server does not have."""
    sequences = [sequence for row in results for sequence in row]
    tokens = [np.array(sequence.token_ids, np.int32) for sequence in sequences]
    of_first_weights = all(sequence.weight_versions == FIRST_VERSIONS for sequence in sequences)
    if not of_first_weights or not any(map(len, tokens)):
        return None
    arrays: dict[str, NDArray[np.generic]] = {
        "identity": np.frombuffer(_identity(model, requests), np.uint8),
        "lengths": np.array([len(own) for own in tokens], np.int64),
        "reasons": np.array([_number(sequence.finish_reason) for sequence in sequences], np.int8),
        "counts": np.array([_counts(sequence) for sequence in sequences], np.int64),
        "token_ids": np.concatenate(tokens),
    }
    if requests[0].want_logprobs:
        logprobs = [np.array(sequence.logprobs or (), np.float32) for sequence in sequences]
        arrays["logprobs"] = np.concatenate(logprobs)
    if requests[0].num_top_logprobs:
        tops = [sequence.top for sequence in sequences]
        arrays["top_ids"] = np.concatenate([top.token_ids for top in tops if top is not None])
        arrays["top_logprobs"] = np.concatenate([top.logprobs for top in tops if top is not None])
    content = io.BytesIO()
    # with a checksum of each array; NumPy 1.26 knows no allow_pickle, for which mypy takes one of them
    np.savez(content, **arrays)  # type: ignore[arg-type]
    return content.getvalue()


def continued(model: ServedModel, requests: Sequence[GenerateRequest], content: bytes) -> list[GenerateRequest] | None:
    """The requests, which continue with what `write_kept` has written of them; None if it is of other requests, of
    another model, or damaged."""
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            if arrays["identity"].tobytes() != _identity(model, requests):
                return None
            deltas = _deltas(requests, {name: arrays[name] for name in arrays.files})
    except (ValueError, KeyError, IndexError, OSError, EOFError, zipfile.BadZipFile) as error:
        logger.warning("kept tokens of a line cannot be read, and it starts over: %s", error)
        return None
    return None if deltas is None else [replace(one, kept=own) for one, own in zip(requests, deltas, strict=True)]


def _deltas(
    requests: Sequence[GenerateRequest], arrays: dict[str, NDArray[np.generic]]
) -> list[tuple[SequenceDelta, ...]] | None:
    """For each request; None if they do not fit it."""
    ends = np.cumsum(arrays["lengths"]).tolist()
    starts = [0, *ends[:-1]]
    reasons, counts = arrays["reasons"].tolist(), arrays["counts"].tolist()
    token_ids, logprobs = arrays["token_ids"].tolist(), arrays.get("logprobs")
    top_ids, top_logprobs = arrays.get("top_ids"), arrays.get("top_logprobs")
    found: list[tuple[SequenceDelta, ...]] = []
    row = 0
    for request in requests:
        own: list[SequenceDelta] = []
        for index in range(request.num_sequences):
            start, end, reason = starts[row], ends[row], _REASONS[reasons[row]]
            if not _fits(request, end - start, reason):
                return None
            if end > start or reason is not None:
                top = None
                if top_ids is not None and top_logprobs is not None:
                    top = TopLogprobs(top_ids[start:end].astype(np.int32), top_logprobs[start:end].astype(np.float32))
                num_cached, num_computed, num_recomputed, num_shared = counts[row]
                own.append(
                    SequenceDelta(
                        request.request_id,
                        index,
                        token_ids[start:end],
                        None if logprobs is None else logprobs[start:end].tolist(),
                        reason,
                        num_cached,
                        num_computed,
                        num_recomputed,
                        num_shared,
                        top,
                    )
                )
            row += 1
        found.append(tuple(own))
    return found


def _fits(request: GenerateRequest, num_tokens: int, reason: FinishReason | None) -> bool:
    """The most tokens may have changed, if the body leaves them to the server."""
    if reason == "length":
        return num_tokens == request.max_new_tokens
    return num_tokens < request.max_new_tokens + (reason == "stop")


def _number(reason: FinishReason) -> int:
    return 0 if reason == "abort" else _REASONS.index(reason)


def _counts(sequence: FinishedSequence) -> list[int]:
    """In the order of SequenceDelta's fields."""
    counts = [sequence.num_cached_tokens, sequence.num_computed_tokens]
    return [*counts, sequence.num_recomputed_tokens, sequence.num_shared_tokens]


def _identity(model: ServedModel, requests: Sequence[GenerateRequest]) -> bytes:
    """Equal for requests of which the same tokens are expected."""
    digest = hashlib.sha256(repr((model.system_fingerprint, model.digest)).encode())
    for request in requests:
        named = [(field.name, getattr(request, field.name)) for field in fields(request) if field.name not in _FREE]
        digest.update(repr((len(request.prompt_ids), named)).encode())
        digest.update(request.prompt_ids.tobytes())
    return digest.digest()
