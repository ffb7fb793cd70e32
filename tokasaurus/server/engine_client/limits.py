"""Limits of the requests that may be unfinished."""

from dataclasses import dataclass, field

from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.server.errors import InvalidRequest, QueueFull


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Flags; None: no limit. Sequences and tokens count from submission; each sample of a prompt is a sequence.

    A client below its fair share, which is a limit divided by the number of clients with unfinished requests, is
    accepted even when others have filled the queue. C clients together may therefore exceed a limit, but less than
    1 + 1/2 + ... + 1/C times.
    """

    max_queued_requests: int | None = None
    """A body is accepted whole while fewer sequences than this wait, as far as the engine has reported."""
    max_queued_sequences: int | None = None
    """Unfinished sequences, the new body's included."""
    max_queued_tokens: int | None = None
    """Prompt tokens of unfinished requests, the new body's included; once per request, however many samples."""


NO_LIMITS = QueueLimits()

_UNITS = {"max_queued_sequences": "sequences", "max_queued_tokens": "prompt tokens"}


@dataclass(slots=True)
class _Counts:
    num_requests: int = 0
    num_sequences: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class UnfinishedWork:
    """Unfinished requests, sequences and prompt tokens, in all and by client; without background requests."""

    limits: QueueLimits
    _total: _Counts = field(default_factory=_Counts)
    _by_client: dict[str, _Counts] = field(default_factory=dict)
    """Clients with unfinished requests."""

    def check(self, client: str, num_sequences: int, num_tokens: int, num_running: int) -> None:
        """Whether a body of `client` may be added.

        num_tokens: of its prompts, each counted once. num_running: sequences that run, without background ones,
        as far as the engine has reported. Raises QueueFull; InvalidRequest if the body alone exceeds a limit.
        """
        limits, total = self.limits, self._total
        own = self._by_client.get(client, _Counts())
        num_clients = len(self._by_client) + (client not in self._by_client)
        self.check_size(num_sequences, num_tokens)
        bounds = (
            ("max_queued_sequences", num_sequences, own.num_sequences, total.num_sequences),
            ("max_queued_tokens", num_tokens, own.num_tokens, total.num_tokens),
        )
        max_waiting = limits.max_queued_requests
        if max_waiting is not None:
            is_full = total.num_sequences - num_running >= max_waiting
            if is_full and own.num_sequences >= max_waiting // num_clients:
                raise QueueFull(f"{max_waiting} or more sequences are already waiting (max_queued_requests)")
        for flag, num_new, num_own, num_all in bounds:
            limit: int | None = getattr(limits, flag)
            if limit is not None and num_all + num_new > limit and num_own + num_new > limit // num_clients:
                raise QueueFull(
                    f"{num_all} {_UNITS[flag]} are unfinished and the body has {num_new}: "
                    f"at most {limit} are accepted ({flag})"
                )

    def check_size(self, num_sequences: int, num_tokens: int) -> None:
        """Raises InvalidRequest if a body alone exceeds a limit. num_tokens: as for `check`."""
        for flag, num_new in (("max_queued_sequences", num_sequences), ("max_queued_tokens", num_tokens)):
            limit: int | None = getattr(self.limits, flag)
            if limit is not None and num_new > limit:
                raise InvalidRequest(f"the body has {num_new} {_UNITS[flag]}: at most {limit} are accepted ({flag})")

    def add(self, client: str, num_requests: int, num_sequences: int, num_tokens: int) -> None:
        """A body of `client` is submitted. Each of its requests must be removed.

        num_sequences, num_tokens: of its requests together, each prompt counted once.
        """
        for counts in (self._total, self._by_client.setdefault(client, _Counts())):
            counts.num_requests += num_requests
            counts.num_sequences += num_sequences
            counts.num_tokens += num_tokens

    def finish_sequence(self, request: GenerateRequest) -> None:
        """A sequence of `request` has finished."""
        if request.is_background:
            return
        self._total.num_sequences -= 1
        self._by_client[request.client].num_sequences -= 1

    def restart_sequences(self, request: GenerateRequest, num_finished: int) -> None:
        """`num_finished` sequences of `request`, all that had finished, will run again."""
        if request.is_background:
            return
        self._total.num_sequences += num_finished
        self._by_client[request.client].num_sequences += num_finished

    def remove(self, request: GenerateRequest, num_unfinished: int) -> None:
        """`request` has ended with `num_unfinished` of its sequences not finished."""
        if request.is_background:
            return
        own = self._by_client[request.client]
        for counts in (self._total, own):
            counts.num_requests -= 1
            counts.num_sequences -= num_unfinished
            counts.num_tokens -= len(request.prompt_ids)
        if not own.num_requests:
            del self._by_client[request.client]
