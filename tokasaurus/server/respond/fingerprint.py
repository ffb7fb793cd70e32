"""The system_fingerprint of an answer with logprobs_in_fingerprint: JSON text with token ids and packed logprobs."""

import base64
from collections.abc import Sequence

import numpy as np
import orjson
from numpy.typing import NDArray

from tokasaurus.server.engine_client.collectors import FinishedSequence


def build_fingerprint(sequences: Sequence[FinishedSequence]) -> str:
    """JSON object of lists with one entry per choice, for its G tokens as sampled: end token or stop string included.

    completion_ids: G ids. packed_chosen_logprobs: base64 of float32 [G]. packed_topk_indices, packed_topk_logprobs:
    base64 of int32 and float32 [G, k]. Arrays are row-major and little-endian. A list is null if not requested.
    """
    chosen = [sequence.logprobs for sequence in sequences if sequence.logprobs is not None]
    tops = [sequence.top for sequence in sequences]
    top = [entry for entry in tops if entry is not None]
    assert len(chosen) in (0, len(sequences)), "either all sequences of an answer have logprobs or none"
    assert len(top) in (0, len(sequences)), "either all sequences of an answer have top-k logprobs or none"
    fingerprint = {
        "completion_ids": [sequence.token_ids for sequence in sequences],
        "packed_chosen_logprobs": [_pack(np.array(logprobs, "<f4")) for logprobs in chosen] or None,
        "packed_topk_indices": [_pack(entry.token_ids.astype("<i4")) for entry in top] or None,
        "packed_topk_logprobs": [_pack(entry.logprobs.astype("<f4")) for entry in top] or None,
    }
    return orjson.dumps(fingerprint).decode()


def _pack(numbers: NDArray[np.float32] | NDArray[np.int32]) -> str:
    return base64.b64encode(numbers.tobytes()).decode()
