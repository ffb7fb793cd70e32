"""The manager process: receive, cancel, apply results, admit, schedule, send; then wait for the next message."""

import logging
import time
from collections.abc import Callable, Iterable

from tokasaurus.checkpoint import Checkpoint
from tokasaurus.config import ServerConfig
from tokasaurus.manager.admission import choose_admissions
from tokasaurus.manager.input_building import add_blocks, build_forward_input
from tokasaurus.manager.intake import add_request, cancel_request
from tokasaurus.manager.outputs import apply_output
from tokasaurus.manager.scheduler import StepPlan, num_steps_to_keep_in_flight, plan_step
from tokasaurus.manager.sequence import Phase
from tokasaurus.manager.state import EngineOptions, EngineState, StepInFlight, make_state
from tokasaurus.messages.channel import Channel, wait
from tokasaurus.messages.forward import EndOfInputs, ForwardInput, ForwardOutput
from tokasaurus.messages.generation import CancelRequest, EngineUpdate, GenerateRequest, SequenceDelta
from tokasaurus.messages.lifecycle import EngineLimits, EngineStats, Failed, PhaseDone, Ready, Shutdown
from tokasaurus.monitoring.step_stats import StepStats
from tokasaurus.text.tokenizer import load_token_decoder

logger = logging.getLogger(__name__)

RequestMessage = GenerateRequest | CancelRequest | Shutdown

STATS_UPDATE_SECONDS = 0.25
"""While no sequence starts or ends, the counters still grow: the server hears of them this often."""


def run_manager(
    config: ServerConfig,
    checkpoint: Checkpoint,
    requests: Channel[RequestMessage],
    updates: Channel[EngineUpdate | Ready],
    inputs: list[Channel[ForwardInput | EndOfInputs]],
    outputs: Channel[ForwardOutput | Ready],
    status: Channel[PhaseDone | Ready | Failed],
) -> None:
    """Process entry. Returns when Shutdown arrives, before or after the worker is ready.

    inputs: one channel per rank of the replica's worker; each gets every message.
    """
    decoder = load_token_decoder(checkpoint.tokenizer_directory)
    early: list[RequestMessage] = []
    limits = _await_worker(requests, outputs, early)
    if limits is not None:
        options = EngineOptions(
            limits=limits,
            max_tokens_per_forward=config.max_tokens_per_forward,
            max_seqs_per_forward=config.max_seqs_per_forward,
            max_steps_ahead=config.scheduling_steps_ahead,
            eos_ids=frozenset(checkpoint.info.eos_ids),
            decode_text=decoder.decode,
            special_ids=decoder.special_ids,
            min_lookback_tokens=config.stop_string_num_token_lookback,
        )
        updates.send(Ready("manager", limits))
        status.send(Ready("manager", limits))
        _serve(make_state(options), StepStats(config.stats_report_seconds), early, requests, updates, inputs, outputs)
    for channel in inputs:
        channel.send(EndOfInputs())
    # Nobody reads on after a shutdown; the queue's thread must not keep this process alive.
    updates.abandon()


def _await_worker(
    requests: Channel[RequestMessage], outputs: Channel[ForwardOutput | Ready], early: list[RequestMessage]
) -> EngineLimits | None:
    """What the worker can hold, once it is ready; None if Shutdown came first. Other requests are put into `early`."""
    while True:
        wait([requests.reader, outputs.reader])
        early.extend(requests.drain())
        if any(isinstance(message, Shutdown) for message in early):
            return None
        for message in outputs.drain():
            assert isinstance(message, Ready), f"{type(message).__name__} before the worker was ready"
            assert message.limits is not None, "the worker is ready without limits"
            return message.limits


def _serve(
    state: EngineState,
    step_stats: StepStats,
    messages: list[RequestMessage],
    requests: Channel[RequestMessage],
    updates: Channel[EngineUpdate | Ready],
    inputs: list[Channel[ForwardInput | EndOfInputs]],
    outputs: Channel[ForwardOutput | Ready],
) -> None:
    """Turn after turn until Shutdown. `messages`: requests that have been received already."""

    def send(forward_input: ForwardInput) -> None:
        for channel in inputs:
            channel.send(forward_input)

    last_stats, last_update_s = state.stats(), time.monotonic()
    while not any(isinstance(message, Shutdown) for message in messages):
        results = [message for message in outputs.drain() if isinstance(message, ForwardOutput)]
        deltas = take_turn(state, messages, results, send)
        now_s, stats = time.monotonic(), state.stats()
        if deltas or is_worth_an_update(stats, last_stats, now_s - last_update_s):
            updates.send(EngineUpdate(deltas, stats))
            last_stats, last_update_s = stats, now_s
        line = step_stats.report(now_s, state.step_totals, stats)
        if line is not None:
            logger.info(line)
        wait([requests.reader, outputs.reader], step_stats.seconds_to_report(now_s))
        messages = requests.drain()


def take_turn(
    state: EngineState,
    messages: Iterable[RequestMessage],
    results: Iterable[ForwardOutput],
    send: Callable[[ForwardInput], None],
) -> list[SequenceDelta]:
    """Everything that can be done now. Sends the steps that the worker should have, and returns what finished."""
    for message in messages:
        if isinstance(message, GenerateRequest):
            add_request(state, message)
        elif isinstance(message, CancelRequest):
            cancel_request(state, message.request_id)
    deltas: list[SequenceDelta] = []
    for result in results:
        deltas += apply_output(state, result)
    num_free_blocks = state.blocks.num_blocks - state.num_blocks_reserved
    for sequence in choose_admissions(state.queues.waiting, len(state.free_slots), num_free_blocks):
        state.admit(sequence)
    options = state.options
    num_steps = num_steps_to_keep_in_flight(state.step_seconds, options.max_steps_ahead)
    while len(state.steps_in_flight) < num_steps:
        plan = plan_step(
            state.queues.decoding,
            state.queues.prefilling,
            options.max_tokens_per_forward,
            options.max_seqs_per_forward,
        )
        if plan is None:
            break
        send(start_step(state, plan))
    return deltas


def start_step(state: EngineState, plan: StepPlan) -> ForwardInput:
    """Carry out `plan`: take its blocks, move its sequences past it, and note who samples."""
    step_id = state.next_step_id
    added = add_blocks(plan, state.blocks, state.options.limits.page_size)
    message = build_forward_input(step_id, plan, state.slots_to_close, added)
    sampled = plan.decode.copy()
    for sequence in plan.decode:
        sequence.num_kv_tokens += 1
        if sequence.num_kv_tokens == sequence.max_kv_tokens:
            state.queues.move(sequence, Phase.DRAINING)
    for chunk in plan.prefill:
        sequence = chunk.sequence
        sequence.slot_is_open = True
        sequence.num_kv_tokens += chunk.num_tokens
        if sequence.num_kv_tokens == sequence.num_prompt_tokens:
            sampled.append(sequence)
            is_last = sequence.num_kv_tokens == sequence.max_kv_tokens
            state.queues.move(sequence, Phase.DRAINING if is_last else Phase.DECODE)
    state.slots_to_close = []
    state.next_step_id += 1
    state.steps_in_flight.append(StepInFlight(step_id, sampled, len(message.slots), len(message.prompt_ids)))
    return message


def is_worth_an_update(stats: EngineStats, last: EngineStats, seconds_since_last: float) -> bool:
    """Whether the server should hear of `stats` although no sequence has finished.

    At once when sequences came, started or were cancelled, and when the engine falls idle, for nothing would correct
    the server's figures after that; otherwise every STATS_UPDATE_SECONDS.
    """
    if stats == last:
        return False
    if (stats.num_running, stats.num_waiting) != (last.num_running, last.num_waiting):
        return True
    is_idle = stats.num_running == 0 and stats.num_waiting == 0 and stats.worker_queue_depth == 0
    return is_idle or seconds_since_last >= STATS_UPDATE_SECONDS
