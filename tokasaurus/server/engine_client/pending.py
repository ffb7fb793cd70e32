"""Requests that their callers wait for, and how far the jobs are that they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tokasaurus.messages.generation import GenerateRequest, SequenceDelta, SequenceProgress
from tokasaurus.messages.status import StepCost, TimeLeft
from tokasaurus.monitoring.request_log import LoggedRequest
from tokasaurus.monitoring.request_spans import RequestSpan
from tokasaurus.monitoring.time_left import Done, Pace, Sample, Work, lengths_to_come, outlasting_shares, time_left
from tokasaurus.server.engine_client.collectors import Results, StreamCollector
from tokasaurus.server.engine_client.replicas import Replica

MAX_SAMPLES = 1024
"""Completions of a job whose lengths are remembered; of more, every second one is, then every fourth, and so on."""
_NUM_WAITING = 256
"""A sample of lengths that stands for all completions that have not begun."""
_ERROR_OF_EXPECTATION = 0.7
"""Relative error of the manager's expectation, which is all that is known before a completion of the job has ended."""
_KEPT_AT_ONCE = 0.9
"""Fewest completions that are expected to run at once, relative to the look before."""

Collector = Results | StreamCollector
"""Collects the deltas of one call's requests."""


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request that its caller is still waiting for."""

    request: GenerateRequest
    collector: Collector
    index: int
    """The request's index in the collector."""
    replica: Replica | None = None
    """Where it runs; None while no replica is up."""
    num_unfinished: int = field(init=False)
    """Number of its sequences that have not finished."""
    num_replays: int = 0
    """How often its replica has died."""
    has_failed: bool = False
    """Its caller gets an error, and will remove it."""
    has_error: bool = False
    """Its caller gets an error: it has failed, or one of its sequences was aborted."""
    span: RequestSpan | None = None
    """Span of the HTTP request that it belongs to, if that is traced."""
    logged: LoggedRequest | None = None
    """Writes its line of the log, if requests are logged."""
    longest: int = 0
    """Tokens of its longest finished sequence."""
    num_finished_tokens: int = 0
    """Tokens of its finished sequences, unless they are streamed."""
    num_received_tokens: int = field(init=False)
    """Tokens of all its deltas, without tokens that an earlier server has sampled."""
    progress: dict[int, SequenceProgress] = field(default_factory=dict)
    """The last report on each of its unfinished sequences, by index; of requests of jobs."""
    job: JobPace | None = None
    """The job that it belongs to."""

    def __post_init__(self) -> None:
        self.num_unfinished = self.request.num_sequences
        self.num_received_tokens = -self.request.num_kept_tokens

    @property
    def line(self) -> str:
        """Which body it belongs to, such as a line of a batch: one has a request for each prompt."""
        return self.request.request_id.rpartition("-")[0]

    @property
    def num_tokens(self) -> int:
        """Prompt and completion of one of its sequences, at full length."""
        return len(self.request.prompt_ids) + self.request.max_new_tokens

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all its sequences so far, by the last reports."""
        return self.num_finished_tokens + sum(progress.num_tokens for progress in self.progress.values())

    def note_end(self, delta: SequenceDelta) -> None:
        """delta: the last of one of its sequences."""
        self.num_unfinished -= 1
        self.has_error |= delta.error != ""
        if delta.times is not None:
            self.longest = max(self.longest, delta.times.num_tokens)
        self.num_finished_tokens += len(delta.token_ids)
        self.progress.pop(delta.sequence_index, None)

    def fail(self, error: Exception) -> None:
        self.has_failed = self.has_error = True
        self.collector.fail(error)

    def restart(self) -> bool:
        """Start from the beginning; False if the caller has received a part of the answer already."""
        if not self.collector.restart(self.index):
            return False
        self.num_unfinished = self.request.num_sequences
        self.num_received_tokens = -self.request.num_kept_tokens
        self.num_finished_tokens = self.longest = 0
        self.progress.clear()
        if self.logged is not None:
            self.logged.restart()
        return True


class JobPace:
    """How far the lines of a batch, or of a bulk request, are, and how long all of them will still take."""

    def __init__(self, num_lines: int | None = None) -> None:
        self.num_lines = num_lines
        """Lines that get a result in all; None while that is not known."""
        self.num_done = 0
        """Lines that have their result."""
        self.num_running_tokens = 0
        """Generated for requests that their callers wait for, as of the last look, as all that follows."""
        self.num_tokens_left: int | None = None
        """To be generated; None while there is no basis."""
        self.time_left: TimeLeft | None = None
        """None while there is no basis."""
        self._pending: dict[PendingRequest, int] = {}
        """Requests that run or wait, and the number of the first completion of each."""
        self._num_open_lines = 0
        self._num_begun_lines = 0
        self._num_begun = 0
        """Completions of these lines."""
        self._num_asked = 0.0
        """Prompt tokens of these completions. Each prompt counts once."""
        self._stride = 1
        self._lengths: list[tuple[int, int]] = []
        """(number, tokens) of completions that have ended, or whose length is known."""
        self._prompts: list[tuple[int, int]] = []
        """(number, prompt tokens) of completions."""
        self._ended = Done(0.0)
        self._num_asked_of_ended = 0.0
        self._asked_pace = Pace()
        """Prompt tokens of ended completions, and how many of them were computed."""
        self._pace = Pace()
        self._num_at_once = self._num_steps = self._num_tokens = 0.0
        self._num_running = 0
        self._max_tokens = 1

    @property
    def requests(self) -> list[PendingRequest]:
        """Requests that run or wait."""
        return list(self._pending)

    @property
    def num_requests(self) -> int:
        """Requests that run or wait."""
        return len(self._pending)

    def tokens_per_s(self) -> float | None:
        """None until there is a basis."""
        return self._pace.tokens_per_s()

    def begin_line(self) -> None:
        """A line is in the engine until `end_line`; its requests are added next."""
        self._num_open_lines += 1
        self._num_begun_lines += 1

    def end_line(self) -> None:
        self._num_open_lines -= 1

    def add(self, pending: PendingRequest, now_s: float) -> None:
        """now_s: as for `look`."""
        request = pending.request
        if not self._num_begun:
            self._pace.note(Done(now_s))
        self._max_tokens = max(self._max_tokens, request.max_new_tokens)
        self._pending[pending] = self._num_begun
        for number in range(self._num_begun, self._num_begun + request.num_sequences):
            if number % self._stride == 0:
                self._prompts.append((number, len(request.prompt_ids)))
                if _has_known_length(request):
                    self._lengths.append((number, request.max_new_tokens))
        self._num_begun += request.num_sequences
        self._num_asked += len(request.prompt_ids)
        if max(len(self._lengths), len(self._prompts)) > MAX_SAMPLES:
            self._stride *= 2
            self._lengths = [sample for sample in self._lengths if sample[0] % self._stride == 0]
            self._prompts = [sample for sample in self._prompts if sample[0] % self._stride == 0]

    def remove(self, pending: PendingRequest) -> None:
        del self._pending[pending]

    def note_end(self, pending: PendingRequest, delta: SequenceDelta) -> None:
        """delta: the last of one of the request's completions."""
        request = pending.request
        number = self._pending[pending] + delta.sequence_index
        num_kept = request.num_kept_tokens / request.num_sequences
        num_tokens = self._ended.num_tokens + len(delta.token_ids) - num_kept
        num_prompt = self._ended.num_prompt_tokens + delta.num_computed_tokens + delta.num_recomputed_tokens
        self._ended = Done(0.0, num_tokens, 0.0, num_prompt)
        self._num_asked_of_ended += len(request.prompt_ids) / request.num_sequences
        if number % self._stride == 0 and not _has_known_length(request):
            self._lengths.append((number, len(delta.token_ids)))

    def look(self, now_s: float, cost: StepCost) -> None:
        """Call it when the progress of the requests was reported. now_s: by time.monotonic."""
        share = self._computed_share(now_s)
        running: list[_Running] = []
        num_waiting = prompt_done = prompt_left = num_kept = 0.0
        self.num_running_tokens = 0
        for pending, first in self._pending.items():
            request = pending.request
            self.num_running_tokens += pending.num_generated_tokens
            to_compute = share * len(request.prompt_ids) / request.num_sequences
            for index, progress in pending.progress.items():
                running.append(_Running(first + index, progress.num_tokens, progress.num_expected_tokens, request))
                if progress.num_tokens:
                    prompt_done += to_compute
                else:
                    prompt_left += to_compute
            num_kept += request.num_kept_tokens * len(pending.progress) / request.num_sequences
            num_new = pending.num_unfinished - len(pending.progress)
            num_waiting += num_new
            prompt_left += num_new * to_compute
        self._note_pace(now_s, running, num_kept, prompt_done)
        if self.num_lines is None or not self._num_begun:
            return
        num_unsent_lines = max(0, self.num_lines - self.num_done - self._num_open_lines)
        num_unsent = num_unsent_lines * self._num_begun / max(1, self._num_begun_lines)
        if num_unsent:
            prompts = [Sample(*prompt, has_ended=True) for prompt in self._prompts]
            _, growth = lengths_to_come(
                prompts, max(sample.num_tokens for sample in prompts), self._num_begun + num_unsent / 2
            )
            prompt_left += growth * share * num_unsent * self._num_asked / self._num_begun
        work = self._work(running, num_waiting, num_unsent, prompt_left)
        self.num_tokens_left = None if work is None else round(work.num_tokens)
        self.time_left = None if work is None else time_left(work, self._pace, cost)

    def _computed_share(self, now_s: float) -> float:
        """The share of the prompt tokens that is computed, and not cached, of what ended lately."""
        ended = self._ended
        self._asked_pace.note(Done(now_s, self._num_asked_of_ended, 0.0, ended.num_prompt_tokens))
        lately = self._asked_pace.lately
        asked, computed = lately.num_tokens, lately.num_prompt_tokens
        if not asked:
            asked, computed = self._num_asked_of_ended, ended.num_prompt_tokens
        return min(1.0, computed / asked) if asked else 1.0

    def _note_pace(self, now_s: float, running: Sequence[_Running], num_kept: float, prompt_done: float) -> None:
        """num_kept: tokens of the running completions that an earlier server has generated."""
        num_tokens = self._ended.num_tokens + sum(one.num_tokens for one in running) - num_kept
        num_between = (len(running) + (self._num_running or len(running))) / 2
        self._num_steps += max(0.0, num_tokens - self._num_tokens) / max(1.0, num_between)
        self._num_tokens, self._num_running = num_tokens, len(running)
        self._num_at_once = max(len(running), _KEPT_AT_ONCE * self._num_at_once)
        self._pace.note(Done(now_s, num_tokens, self._num_steps, self._ended.num_prompt_tokens + prompt_done))

    def _work(
        self, running: Sequence[_Running], num_waiting: float, num_unsent: float, num_prompt_tokens: float
    ) -> Work | None:
        """None while nothing is known of the lengths of completions. num_waiting, num_unsent: completions that wait in
        the engine, and those of lines that are not in it yet."""
        samples = [Sample(*length, has_ended=True) for length in self._lengths]
        unknown = [one for one in running if not _has_known_length(one.request)]
        samples += [Sample(one.number, one.num_tokens, False) for one in unknown if one.number % self._stride == 0]
        if self._lengths:
            middle = self._num_begun + (num_unsent - num_waiting) / 2
            lengths, growth = lengths_to_come(samples, self._max_tokens, middle)
            finals = [
                lengths.final(share, one.num_tokens, one.request.max_new_tokens)
                for share, one in zip(outlasting_shares(len(unknown)), unknown, strict=True)
            ]
            new = [min(float(self._max_tokens), growth * length) for length in lengths.spread(_NUM_WAITING)]
            error, deviation = lengths.error(), lengths.deviation()
        else:
            new = [float(one.num_expected) for one in unknown if one.num_expected is not None]
            finals = [sum(new) / len(new) if one.num_expected is None else one.num_expected for one in unknown if new]
            error, deviation = _ERROR_OF_EXPECTATION, 0.0
            if not new:
                return None
        known = [one.request.max_new_tokens - one.num_tokens for one in running if _has_known_length(one.request)]
        left = [*known, *(max(1.0, final - one.num_tokens) for final, one in zip(finals, unknown, strict=True))]
        num_new = num_waiting + num_unsent
        num_tokens = sum(left) + num_new * sum(new) / len(new)
        most = sum(one.request.max_new_tokens - one.num_tokens for one in running) + num_new * self._max_tokens
        error = min(error, most / max(1.0, num_tokens) - 1) if unknown or num_unsent else 0.0
        num_at_once = round(self._num_at_once) if num_new else len(running)
        return Work(left, num_new, new, num_at_once, num_prompt_tokens, max(0.0, error), deviation)


class _Running(NamedTuple):
    """A completion that runs."""

    number: int
    num_tokens: int
    num_expected: int | None
    """By the manager."""
    request: GenerateRequest


def _has_known_length(request: GenerateRequest) -> bool:
    """Nothing ends its completions before they have all their tokens."""
    return request.ignore_eos and not (request.stop_strings or request.stop_token_ids or request.grammar)
