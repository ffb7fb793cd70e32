"""A log line for each request at its end, with names and numbers alone: never a prompt, an answer or a key.

A request is one prompt with its n samples, as in `request_metrics`.
"""

import logging
import time
from collections import Counter

from tokasaurus.messages.generation import GenerateRequest, SequenceDelta

logger = logging.getLogger("tokasaurus.requests")
logger.setLevel(logging.INFO)  # whatever log_level is: who asks for these lines wants them


class LoggedRequest:
    """One request, from when it is submitted until its line is written."""

    def __init__(self, request: GenerateRequest, model: str) -> None:
        """model: the served name."""
        self._request = request
        self._model = model
        self._arrived_s = request.arrived_s or time.monotonic()
        self.restart()

    def restart(self) -> None:
        """It begins again, in another engine."""
        self._reasons: Counter[str] = Counter()
        self._num_cached_tokens = 0
        self._num_completion_tokens = 0
        self._admitted_s: float | None = None
        self._first_token_s: float | None = None

    def note_sequence(self, delta: SequenceDelta) -> None:
        """delta: the last of one of its sequences."""
        self._reasons[(delta.error_code or "error") if delta.error else str(delta.finish_reason)] += 1
        self._num_cached_tokens = max(self._num_cached_tokens, delta.num_cached_tokens)
        times = delta.times
        if times is None:
            return
        self._num_completion_tokens += times.num_tokens
        if times.admitted_s:
            self._admitted_s = min(times.admitted_s, self._admitted_s or times.admitted_s)
        if times.first_token_s:
            self._first_token_s = min(times.first_token_s, self._first_token_s or times.first_token_s)

    def write(self, num_unfinished: int, reason: str, num_received_tokens: int) -> None:
        """Write its line. num_unfinished: sequences that end without a result, by `reason`. num_received_tokens: that
        have come of all its sequences."""
        if num_unfinished:
            self._reasons[reason] += num_unfinished
        request = self._request
        num_tokens = max(self._num_completion_tokens, num_received_tokens)
        queue_s, first_s = self._since_arrival(self._admitted_s), self._since_arrival(self._first_token_s)
        seconds = time.monotonic() - self._arrived_s
        reasons = dict(self._reasons.most_common())
        fields = {
            "event": "request",
            "id": request.request_id,
            "client": request.client,
            "model": self._model,
            "kind": "batch" if request.is_background else "request",
            "samples": request.num_sequences,
            "prompt_tokens": len(request.prompt_ids),
            "cached_tokens": self._num_cached_tokens,
            "completion_tokens": num_tokens,
            "queue_seconds": queue_s,
            "first_token_seconds": first_s,
            "seconds": round(seconds, 4),
            "reasons": reasons,
        }
        times = [f"queue {queue_s:.3f} s"] if queue_s is not None else []
        times += [f"first token {first_s:.3f} s"] if first_s is not None else []
        ends = ", ".join(word if count == 1 else f"{word} x {count:,}" for word, count in reasons.items())
        logger.info(
            "request %s of %s, %s: %d prompt tokens (%d cached), %d completion tokens; %s; %s",
            request.request_id,
            request.client or "unknown",
            self._model,
            len(request.prompt_ids),
            self._num_cached_tokens,
            num_tokens,
            ", ".join([*times, f"in all {seconds:.3f} s"]),
            ends,
            extra={"fields": fields},
        )

    def _since_arrival(self, moment_s: float | None) -> float | None:
        """moment_s: by time.monotonic; None: it never came."""
        return None if moment_s is None else round(max(0.0, moment_s - self._arrived_s), 4)
