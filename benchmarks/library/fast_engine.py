"""The worker of an engine without a model: it answers every step at once with random tokens.

The server's and the manager's processes are the real ones. `use` makes it the engine of every `LLM` of this program."""

# ruff: noqa: ARG001  # the signature is that of the real entry

from contextlib import suppress
from pathlib import Path

import numpy as np

from tests.library.helpers.stub_entry import use_entries
from tokasaurus.checkpoint import Checkpoint
from tokasaurus.config import ServerConfig
from tokasaurus.messages.channel import ChannelClosed, Receiver, Sender
from tokasaurus.messages.forward import ForwardInput, ForwardOutput
from tokasaurus.messages.stages import StageBoard
from tokasaurus.messages.status import EngineLimits, Failed, PhaseDone, Ready
from tokasaurus.monitoring.memory_nodes import Place
from tokasaurus.processes.launch import Entries

NUM_KV_BLOCKS = 1 << 16
PAGE_SIZE = 16
FIRST_TOKEN = 32
"""Of the tests' byte tokens: those from here are single characters."""
NUM_TOKENS = 90


def use() -> None:
    """Before the `LLM` is made; its checkpoint needs the tests' byte tokenizer, and no weights."""
    use_entries(Entries(worker=f"{__name__}:run_worker"))


class FastWorker:
    """Samples random characters, with random log-probabilities."""

    def __init__(self, num_slots: int, num_draws: int = 1 << 16) -> None:
        rng = np.random.default_rng(1)
        self._num_tokens = np.zeros(num_slots + 1, np.int64)
        self._num_prompt_tokens = np.zeros(num_slots + 1, np.int64)
        self._token_ids = rng.integers(FIRST_TOKEN, FIRST_TOKEN + NUM_TOKENS, num_draws, dtype=np.int32)
        self._logprobs = -rng.random(num_draws, dtype=np.float32)

    def forward(self, message: ForwardInput) -> ForwardOutput:
        opened = message.changes.opened
        if opened is not None:
            self._num_tokens[opened.slots] = opened.first_positions
            self._num_prompt_tokens[opened.slots] = opened.num_prompt_tokens
        slots = message.slots
        self._num_tokens[slots] += message.num_tokens
        num_rows = np.count_nonzero(self._num_tokens[slots] >= self._num_prompt_tokens[slots])
        start = int(self._num_tokens[slots].sum()) % (len(self._token_ids) - num_rows)
        rows = slice(start, start + num_rows)
        return ForwardOutput(message.step_id, self._token_ids[rows].copy(), self._logprobs[rows].copy(), 1e-4)


def run_worker(
    config: ServerConfig,
    checkpoint: Checkpoint,
    index: int,
    place: Place | None,
    rendezvous: Path | None,
    inputs: Receiver[ForwardInput],
    outputs: Sender[ForwardOutput | Ready],
    stages: StageBoard | None,
    status: Sender[PhaseDone | Ready | Failed],
) -> None:
    """Process entry, in place of the model worker's."""
    ready = Ready("worker", EngineLimits(NUM_KV_BLOCKS, PAGE_SIZE, checkpoint.info.context_length))
    worker = FastWorker(config.max_seqs_per_forward)
    outputs.send(ready)
    status.send(ready)
    with suppress(ChannelClosed):
        while True:
            outputs.send(worker.forward(inputs.receive()))
