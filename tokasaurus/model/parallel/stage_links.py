"""What pipeline stages send each other: hidden states to the next one, and sampled tokens from the last to the first.

All stages get the same steps in the same order, so that each knows the size of what arrives: no sizes are sent. Sends
and receives are asynchronous. A rank exchanges only with the ranks of other stages that have its number in the stage.
"""

# n tokens of a step without padding, T with padding, E hidden size, R rows that sample

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from tokasaurus.model.parallel.mesh import NUM_HIDDEN_BUFFERS, Mesh
from tokasaurus.monitoring.trace import NO_TRACE, Trace

_MAX_UNREAD = 64
"""Messages with tokens that no decode row has needed yet: of more, the oldest are read, and their memory is freed."""

_HIDDEN, _TOKENS = "hidden states", "sampled tokens"
"""What is sent, for traces."""


class _Message(NamedTuple):
    """A message in flight."""

    buffer: Tensor
    work: Work


class _Tokens(NamedTuple):
    """The tokens of one step, in flight."""

    step_id: int
    slots: Tensor
    """int64 [R], on the device."""
    message: _Message


class _Outbox:
    """Sends to one rank, in order."""

    def __init__(self, target: int, group: ProcessGroup) -> None:
        self._target = target
        self._group = group
        self._in_flight: deque[_Message] = deque()

    def leave_room(self) -> None:
        """Wait until fewer than NUM_HIDDEN_BUFFERS messages are in flight: the older ones may then be overwritten."""
        while len(self._in_flight) >= NUM_HIDDEN_BUFFERS:
            self._in_flight.popleft().work.wait()

    def send(self, message: Tensor) -> None:
        """message: contiguous. Precondition: `leave_room` was called after the send before."""
        work = torch.distributed.isend(message, self._target, group=self._group)
        assert work is not None
        self._in_flight.append(_Message(message, work))

    def finish(self) -> None:
        while self._in_flight:
            self._in_flight.popleft().work.wait()


class _HiddenOutbox:
    """Sends hidden states to the next stage."""

    def __init__(self, target: int, group: ProcessGroup, buffers: Sequence[Tensor]) -> None:
        self._outbox = _Outbox(target, group)
        self._buffers = deque(buffers)

    def send(self, hidden: Tensor) -> None:
        """hidden: [n, E], which may be overwritten afterwards."""
        self._outbox.leave_room()
        message = self._buffers[0][: len(hidden)]
        self._buffers.rotate(-1)
        message.copy_(hidden)
        self._outbox.send(message)

    def finish(self) -> None:
        self._outbox.finish()


class _HiddenInbox:
    """Receives hidden states from the stage before.

    On CUDA, the receive of a step is a kernel that occupies the device until its message has come. So it is posted only
    once the step before has been launched: what the host does for that step may wait for the device. And it is posted
    on a stream of its own, which waits for the last use of its buffer alone, not for the step before.
    """

    def __init__(self, source: int, group: ProcessGroup, buffers: Sequence[Tensor]) -> None:
        self._source = source
        self._group = group
        device = buffers[0].device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._free: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        """Buffers, each with the moment after its last use."""
        for buffer in buffers:
            self._add_free(buffer)
        self._in_use: Tensor | None = None
        self._expected: deque[int] = deque()
        """Tokens of each step whose receive is not posted yet."""
        self._posted: deque[_Message] = deque()
        """Posted receives with whole buffers, [T, E], of which the first n tokens are received."""

    def expect(self, num_tokens: int) -> None:
        self._expected.append(num_tokens)
        self._post()

    def take(self, num_tokens: int) -> _Message:
        """The next step's message, which may still be in flight. Its buffer is this step's until `end_step`."""
        if not self._posted:
            if not self._expected:
                self._expected.append(num_tokens)
            self._post()
        message = self._posted.popleft()
        self._in_use = message.buffer
        return message

    def end_step(self) -> None:
        """The step that took the last message has been launched."""
        if self._in_use is not None:
            self._add_free(self._in_use)
            self._in_use = None
        self._post()

    def _add_free(self, buffer: Tensor) -> None:
        last_use = None if self._stream is None else torch.cuda.current_stream(buffer.device).record_event()
        self._free.append((buffer, last_use))

    def _post(self) -> None:
        while self._expected and self._free:
            if self._stream is not None and (self._posted or self._in_use is not None):
                return
            buffer, last_use = self._free.popleft()
            received = buffer[: self._expected.popleft()]
            if self._stream is None:
                work = torch.distributed.irecv(received, self._source, group=self._group)
            else:
                assert last_use is not None
                self._stream.wait_event(last_use)
                with torch.cuda.stream(self._stream):
                    work = torch.distributed.irecv(received, self._source, group=self._group)
            assert work is not None
            self._posted.append(_Message(buffer, work))


class StageLinks:
    """One rank's links with the stages beside its own. Made only if there are several stages."""

    def __init__(
        self,
        mesh: Mesh,
        hidden_buffers: Sequence[Tensor],
        num_slots: int,
        trace: Trace = NO_TRACE,
    ) -> None:
        """hidden_buffers: mesh.num_hidden_buffers of [T, E] each, for the largest step."""
        assert len(hidden_buffers) == mesh.num_hidden_buffers
        self._mesh = mesh
        self._trace = trace
        self._device = hidden_buffers[0].device
        self._previous = mesh.world_rank - mesh.tp_size
        self._last = (mesh.pp_size - 1) * mesh.tp_size + mesh.tp_rank
        self._from_previous: _HiddenInbox | None = None
        self._to_next: _HiddenOutbox | None = None
        self._to_first: _Outbox | None = None
        if mesh.previous_group is not None:
            self._from_previous = _HiddenInbox(self._previous, mesh.previous_group, hidden_buffers[:NUM_HIDDEN_BUFFERS])
        if mesh.next_group is not None:
            target = mesh.world_rank + mesh.tp_size
            self._to_next = _HiddenOutbox(target, mesh.next_group, hidden_buffers[-NUM_HIDDEN_BUFFERS:])
        if mesh.is_last_stage:
            assert mesh.token_group is not None
            self._to_first = _Outbox(mesh.tp_rank, mesh.token_group)
        self._tokens: deque[_Tokens] = deque()
        self._num_expected_tokens = self._num_received_tokens = 0  # messages
        self._last_message = np.zeros(num_slots, np.int64)
        """Messages that must have arrived before a slot's last token is known, for each slot."""

    @property
    def is_first(self) -> bool:
        return self._mesh.is_first_stage

    @property
    def is_last(self) -> bool:
        return self._mesh.is_last_stage

    def expect_hidden(self, num_tokens: int) -> None:
        """Post the receive of a step's hidden states, [n, E], as soon as that may be; for each step in order.

        A step that runs without it posts its own. Nothing on the first stage.
        """
        if self._from_previous is not None:
            self._from_previous.expect(num_tokens)

    def receive_hidden(self, num_tokens: int, num_padded: int) -> Tensor:
        """The hidden states of the next step -> [T, E], with zeros as padding; the step's own until `end_step`."""
        assert self._from_previous is not None, "the first stage receives none"
        buffer, work = self._from_previous.take(num_tokens)
        with self._trace.span(f"wait for {_HIDDEN}"):
            work.wait()
        self._trace.end_transfer(_HIDDEN, self._previous, self._trace.step_id)
        buffer[num_tokens:num_padded] = 0
        return buffer[:num_padded]

    def end_step(self) -> None:
        """The step that took the last hidden states, if any, has been launched; on a CPU it has been computed."""
        if self._from_previous is not None:
            self._from_previous.end_step()

    def send_hidden(self, hidden: Tensor) -> None:
        """hidden: [n, E] of this step, which may be overwritten afterwards."""
        assert self._to_next is not None, "the last stage sends none"
        with self._trace.span(f"send {_HIDDEN}"):
            self._trace.begin_transfer(_HIDDEN, self._mesh.world_rank)
            self._to_next.send(hidden)

    def send_tokens(self, tokens: Tensor) -> None:
        """tokens: int64 [R], sampled by the last stage; sent if there are any."""
        assert self._to_first is not None, "only the last stage samples"
        if len(tokens):
            with self._trace.span(f"send {_TOKENS}"):
                self._trace.begin_transfer(_TOKENS, self._mesh.world_rank)
                self._to_first.leave_room()
                self._to_first.send(tokens.clone())

    def expect_tokens(self, host_slots: NDArray[np.int32], slots: Tensor, last_tokens: Tensor) -> None:
        """Post the receive of a step's tokens, on the first stage. host_slots, int32 [R], and slots, int64 [R] on the
        device: the slots that sample. last_tokens: as for await_tokens."""
        if not len(host_slots):
            return
        buffer = torch.empty_like(slots)
        work = torch.distributed.irecv(buffer, self._last, group=self._mesh.token_group)
        assert work is not None
        self._tokens.append(_Tokens(self._trace.step_id, slots.clone(), _Message(buffer, work)))
        self._num_expected_tokens += 1
        self._last_message[host_slots] = self._num_expected_tokens
        if len(self._tokens) > _MAX_UNREAD:
            self._read_tokens(last_tokens)

    def await_tokens(self, host_slots: NDArray[np.int32], last_tokens: Tensor) -> None:
        """Wait until the last tokens of these slots are here, and put all that came before into last_tokens.

        host_slots: int32 [decode rows]. last_tokens: int64 [slots], on the device.
        """
        needed = int(self._last_message[host_slots].max(initial=0))
        while self._num_received_tokens < needed:
            self._read_tokens(last_tokens)

    def _read_tokens(self, last_tokens: Tensor) -> None:
        """The oldest message, once it is here."""
        step_id, slots, (buffer, work) = self._tokens.popleft()
        with self._trace.span(f"wait for {_TOKENS}"):
            work.wait()
        self._trace.end_transfer(_TOKENS, self._last, step_id)
        last_tokens[slots] = buffer
        self._num_received_tokens += 1

    def finish(self) -> None:
        """Wait until all messages have come and gone: all stages have run the same steps."""
        for outbox in (self._to_next, self._to_first):
            if outbox is not None:
                outbox.finish()
        while self._tokens:
            self._tokens.popleft().message.work.wait()
        if self._device.type == "cuda":  # there, these waits hold up later work on the device, not the host
            torch.cuda.synchronize(self._device)
