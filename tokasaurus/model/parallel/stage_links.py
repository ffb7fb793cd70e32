"""What pipeline stages send each other: hidden states to the next one, and sampled tokens from the last to the first.

All stages get the same steps in the same order, so that each knows the size of what arrives: no sizes are sent. Sends
and receives are asynchronous. A rank exchanges only with the ranks of other stages that have its number in the stage.
"""

# n tokens of a step without padding, T with padding, E hidden size, R rows that sample

from collections import deque
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.monitoring.trace import NO_TRACE, Trace

_MOST_SENDS = 2
"""Sends that may be under way to one stage: each keeps its buffer until the other rank has it."""

_HIDDEN, _TOKENS = "hidden states", "sampled tokens"
"""What is sent, for traces."""


class _Arriving(NamedTuple):
    """A message that a receive has been posted for."""

    buffer: Tensor
    work: Work


class _ArrivingTokens(NamedTuple):
    """The tokens of one step."""

    step_id: int
    slots: Tensor
    """int64 [R], on the device."""
    message: _Arriving


class _Outbox:
    """Sends to one rank, in order."""

    def __init__(self, target: int, group: ProcessGroup) -> None:
        self._target = target
        self._group = group
        self._under_way: deque[_Arriving] = deque()

    def send(self, message: Tensor) -> None:
        """message: contiguous, and never changed afterwards."""
        while len(self._under_way) >= _MOST_SENDS:
            self._under_way.popleft().work.wait()
        work = torch.distributed.isend(message, self._target, group=self._group)
        assert work is not None
        self._under_way.append(_Arriving(message, work))

    def finish(self) -> None:
        while self._under_way:
            self._under_way.popleft().work.wait()


class StageLinks:
    """One rank's links with the stages beside its own. Made only if there are several stages."""

    def __init__(
        self,
        mesh: Mesh,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_slots: int,
        trace: Trace = NO_TRACE,
    ) -> None:
        """dtype: of hidden states."""
        assert mesh.stage_group is not None
        assert mesh.token_group is not None
        self.is_first, self.is_last = mesh.is_first_stage, mesh.is_last_stage
        self._trace = trace
        self._rank = mesh.world_rank
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._stage_group, self._token_group = mesh.stage_group, mesh.token_group
        self._previous = mesh.world_rank - mesh.tp_size
        self._last = (mesh.pp_size - 1) * mesh.tp_size + mesh.tp_rank
        self._to_next = None if mesh.is_last_stage else _Outbox(mesh.world_rank + mesh.tp_size, mesh.stage_group)
        self._to_first = _Outbox(mesh.tp_rank, mesh.token_group) if mesh.is_last_stage else None
        self._arriving: deque[_Arriving] = deque()
        self._tokens: deque[_ArrivingTokens] = deque()
        self._num_expected_tokens = self._num_received_tokens = 0  # messages
        self._last_message = np.zeros(num_slots, np.int64)
        """Of each slot: how many messages must be here before its last token is."""

    def expect_hidden(self, num_tokens: int) -> None:
        """Post the receive of a step's hidden states, [n, E], on all but the first stage; for each step in order.

        A step that runs without it posts its own.
        """
        buffer = torch.empty((num_tokens, self._hidden_size), dtype=self._dtype, device=self._device)
        work = torch.distributed.irecv(buffer, self._previous, group=self._stage_group)
        assert work is not None
        self._arriving.append(_Arriving(buffer, work))

    def receive_hidden(self, num_tokens: int, num_padded: int) -> Tensor:
        """The hidden states of the next step -> [T, E], with zeros as padding."""
        if not self._arriving:
            self.expect_hidden(num_tokens)
        buffer, work = self._arriving.popleft()
        assert len(buffer) == num_tokens, "steps run in the order in which they are expected"
        with self._trace.span(f"wait for {_HIDDEN}"):
            work.wait()
        self._trace.end_transfer(_HIDDEN, self._previous, self._trace.step_id)
        if num_padded == num_tokens:
            return buffer
        return torch.cat((buffer, buffer.new_zeros((num_padded - num_tokens, self._hidden_size))))

    def send_hidden(self, hidden: Tensor) -> None:
        """hidden: [n, E] of this step, which may be overwritten afterwards."""
        assert self._to_next is not None, "the last stage sends none"
        with self._trace.span(f"send {_HIDDEN}"):
            self._trace.begin_transfer(_HIDDEN, self._rank)
            self._to_next.send(hidden.clone(memory_format=torch.contiguous_format))

    def send_tokens(self, tokens: Tensor) -> None:
        """tokens: int64 [R], sampled by the last stage; sent if there are any."""
        assert self._to_first is not None, "only the last stage samples"
        if len(tokens):
            with self._trace.span(f"send {_TOKENS}"):
                self._trace.begin_transfer(_TOKENS, self._rank)
                self._to_first.send(tokens.clone())

    def expect_tokens(self, host_slots: NDArray[np.int32], slots: Tensor) -> None:
        """Post the receive of a step's tokens, on the first stage. host_slots, int32 [R], and slots, int64 [R] on the
        device: those that sample."""
        if not len(host_slots):
            return
        buffer = torch.empty(len(host_slots), dtype=torch.int64, device=self._device)
        work = torch.distributed.irecv(buffer, self._last, group=self._token_group)
        assert work is not None
        self._tokens.append(_ArrivingTokens(self._trace.step_id, slots.clone(), _Arriving(buffer, work)))
        self._num_expected_tokens += 1
        self._last_message[host_slots] = self._num_expected_tokens

    def await_tokens(self, host_slots: NDArray[np.int32], last_tokens: Tensor) -> None:
        """Wait until the last tokens of these slots are here, and put all that came before into last_tokens.

        host_slots: int32 [decode rows]. last_tokens: int64 [slots], on the device.
        """
        needed = int(self._last_message[host_slots].max(initial=0))
        while self._num_received_tokens < needed:
            step_id, slots, (buffer, work) = self._tokens.popleft()
            with self._trace.span(f"wait for {_TOKENS}"):
                work.wait()
            self._trace.end_transfer(_TOKENS, self._last, step_id)
            last_tokens[slots] = buffer
            self._num_received_tokens += 1

    def finish(self) -> None:
        """Wait for what is under way: all stages have run the same steps."""
        for outbox in (self._to_next, self._to_first):
            if outbox is not None:
                outbox.finish()
        while self._tokens:
            self._tokens.popleft().message.work.wait()
