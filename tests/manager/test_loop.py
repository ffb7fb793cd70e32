"""Tests the manager's process: its flags, when it sends updates, and a whole run with a server and a worker."""

import ast
import dataclasses
import logging
import multiprocessing
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.helpers.flags import config_with
from tests.helpers.plain_info import plain_info
from tests.manager.helpers.fake_grammars import EOS_ID, INVALID_GRAMMAR, LANGUAGES, TOKEN_BYTES, VOCAB_SIZE
from tests.manager.helpers.fake_worker import FakeWorker, run_fake_worker
from tests.manager.helpers.requests import make_request
from tests.manager.helpers.simulation import decode_text, prompt_tail, simulate
from tokasaurus.checkpoint import Checkpoint, RopeInfo
from tokasaurus.config import ServerConfig
from tokasaurus.manager.loop import (
    IDLE_SECONDS,
    INTAKE_SHARE,
    MIN_MESSAGES,
    Intake,
    common_limits,
    engine_options,
    is_worth_an_update,
    run_manager,
)
from tokasaurus.manager.planning.step_budget import StepLimit
from tokasaurus.manager.state.engine_state import EngineOptions, HydragenOptions
from tokasaurus.messages.channel import (
    ChannelClosed,
    Receiver,
    ReplicaConnection,
    Sender,
    make_channel,
    make_connection,
    send_connection,
    wait,
)
from tokasaurus.messages.forward import ForwardInput
from tokasaurus.messages.generation import CancelRequest, EngineUpdate, SequenceDelta
from tokasaurus.messages.status import EngineLimits, EngineStats, HydragenCosts, PhaseDone, Ready

MANAGER = Path(__file__).parents[2] / "tokasaurus/manager"


def make_stats(**changed: int) -> EngineStats:
    values = dict.fromkeys(EngineStats.__slots__, 0)
    return EngineStats(**{**values, "num_kv_blocks_total": 9, **changed})


@pytest.mark.parametrize(
    ("now", "last", "seconds", "expected"),
    [
        ({}, {}, 100.0, False),
        ({"num_running": 1}, {}, 0.0, True),
        ({"num_waiting": 1}, {}, 0.0, True),
        ({"num_running": 1, "total_generation_tokens": 5}, {"num_running": 1}, 0.1, False),
        ({"num_running": 1, "total_generation_tokens": 5}, {"num_running": 1}, 0.3, True),
        ({"worker_queue_depth": 1}, {"worker_queue_depth": 2}, 0.1, False),
        ({}, {"worker_queue_depth": 1}, 0.0, True),
    ],
)
def test_an_update_is_sent_at_once_when_sequences_start_or_end_or_the_engine_is_idle(now, last, seconds, expected):
    assert is_worth_an_update(make_stats(**now), make_stats(**last), seconds) is expected


LIMITS = EngineLimits(num_kv_blocks=9, page_size=4, max_tokens_per_sequence=30)


class Decoder:
    special_ids = frozenset({3})
    decode = staticmethod(decode_text)
    prompt_tail = staticmethod(prompt_tail)

    def with_special(self) -> "Decoder":
        return self


def options_for(limits: EngineLimits = LIMITS, **flags: object) -> EngineOptions:
    return engine_options(config_with(**flags), (1, 2), limits, Decoder(), None)


@pytest.mark.parametrize(
    "flag",
    [
        *(name for name, flag in ServerConfig.flags.items() if flag.heading == "scheduler"),
        *("max_tokens_per_forward", "max_seqs_per_forward"),
    ],
)
def test_every_scheduling_flag_is_read_by_the_manager(flag: str) -> None:
    assert flag in attributes_of_manager()


@cache
def attributes_of_manager() -> frozenset[str]:
    """Attributes of anything called config."""
    nodes = [node for path in MANAGER.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    found = [node for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("config")]
    return frozenset(node.attr for node in found)


def test_the_time_of_a_step_is_limited_by_its_flag_or_by_the_time_of_the_warm_up():
    assert options_for(max_step_seconds=0.5).step_limit == StepLimit(0.5, 0.5)
    slow = dataclasses.replace(LIMITS, seconds_per_step=0.04)
    assert options_for(slow).step_limit == StepLimit(pytest.approx(2.0), 1.0)


def test_limits_eos_and_special_ids_of_the_model_reach_the_engine_options():
    options = options_for()
    assert options.limits is LIMITS
    assert (options.eos_ids, options.special_ids) == ({1, 2}, {3})
    assert (options.decode_text, options.prompt_tail) == (decode_text, prompt_tail)
    assert (options.decode_special, options.special_tail) == (decode_text, prompt_tail)  # of the Decoder above


def test_hydragen_min_prefix_len_in_tokens_is_rounded_up_to_whole_blocks():
    assert options_for(hydragen_min_prefix_len=256).hydragen == HydragenOptions(
        2, 64, HydragenCosts(8192.0), is_tried=True
    )
    for num_tokens, num_blocks in ((1, 1), (4, 1), (5, 2), (17, 5)):
        options = options_for(use_hydragen=True, hydragen_min_prefix_len=num_tokens, hydragen_min_group_size=3)
        assert options.hydragen == HydragenOptions(min_group_size=3, min_blocks=num_blocks)
    assert options_for(use_hydragen=False).hydragen is None


NEVER = HydragenCosts(per_row_token=1.5)
COSTLY = HydragenCosts(per_step=1e12)
MEASURED = HydragenCosts(per_group=40.0, per_group_token=1.0, per_row=3.0, per_row_token=0.25)


@pytest.mark.parametrize(
    ("measured", "flags", "expected"),
    [
        (MEASURED, {}, HydragenOptions(2, 1, MEASURED, is_tried=True)),
        (MEASURED, {"use_hydragen": True, "hydragen_min_group_size": 3}, HydragenOptions(3, 1, MEASURED)),
        (MEASURED, {"hydragen_min_prefix_len": 8}, HydragenOptions(2, 2, MEASURED, is_tried=True)),
        (MEASURED, {"use_hydragen": False, "hydragen_min_group_size": 2}, None),
        (
            MEASURED,
            {"hydragen_min_group_size": 3, "hydragen_min_prefix_len": 8},
            HydragenOptions(3, 2, HydragenCosts()),
        ),
        (NEVER, {}, HydragenOptions(2, 1, NEVER, is_tried=True)),
        (NEVER, {"use_hydragen": True}, HydragenOptions(2, 1, HydragenCosts(8192.0))),
        (COSTLY, {}, HydragenOptions(2, 1, COSTLY, is_tried=True)),
        (COSTLY, {"use_hydragen": True}, HydragenOptions(2, 1, HydragenCosts(8192.0))),
        (NEVER, {"hydragen_min_group_size": 5}, HydragenOptions(5, 1, NEVER, is_tried=True)),
        (MEASURED, {"pp_size": 2}, HydragenOptions(2, 1, MEASURED)),
    ],
)
def test_hydragen_is_on_if_the_worker_measured_a_benefit_or_a_flag_asks_for_it(measured, flags, expected):
    limits = dataclasses.replace(LIMITS, hydragen=measured)
    assert options_for(limits, **flags).hydragen == expected
    cannot = dataclasses.replace(LIMITS, hydragen=None)
    assert options_for(cannot, **flags).hydragen is None, "no attention computes groups"


def test_microbatches_are_more_than_the_pipeline_stages_and_one_without():
    assert options_for(pp_num_buffer_stages=3).num_microbatches == 1
    assert options_for(pp_size=2, pp_num_buffer_stages=3).num_microbatches == 5


PROCESS_LIMITS = EngineLimits(num_kv_blocks=40, page_size=4, max_tokens_per_sequence=120)

TIMEOUT_S = 30.0


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """A checkpoint whose tokens decode like the fake worker's. Byte-level BPE writes each byte as one character: a
    pre-tokenizer spells whole characters, and the two bytes of é are spelled Ã and ©."""
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def spelled(token: bytes) -> str:
        try:
            return spell.pre_tokenize_str(token.decode())[0][0]
        except UnicodeDecodeError:
            return token.decode("latin-1")

    texts = {spelled(token): number for number, token in enumerate(TOKEN_BYTES) if number != EOS_ID}
    tokenizer = Tokenizer(models.BPE({"<eos>": EOS_ID, **texts}, []))
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    info = plain_info("llama", 1, 8, 1, 1, 8, 8, VOCAB_SIZE, 1000, 1e-5, RopeInfo(1e4), True, (EOS_ID,), "float32")
    return Checkpoint("fake", tmp_path, tmp_path, info)


@dataclass
class Engine:
    """The other ends of the manager's channels."""

    launcher: socket.socket
    requests: Sender[Any]
    updates: Receiver[Any]
    inputs: list[Receiver[ForwardInput]]
    status: Receiver[Any]
    manager: BaseProcess


@contextmanager
def running_manager(checkpoint: Checkpoint, with_worker: bool) -> Iterator[Engine]:
    context = multiprocessing.get_context("spawn")
    launcher, manager_end = socket.socketpair()
    server = new_server(launcher)
    (input_0, input_0_out), (input_1, input_1_out) = make_channel(), make_channel()
    outputs, outputs_out = make_channel()
    status, status_out = make_channel()
    config = ServerConfig()
    config.max_tokens_per_forward = 24
    config.max_seqs_per_forward = 6
    arguments = (config, checkpoint, 0, manager_end, [input_0_out, input_1_out], outputs, None, status_out)
    processes = [context.Process(target=run_manager, args=arguments)]
    if with_worker:
        outputs_out.send(Ready("worker", replace(PROCESS_LIMITS, num_kv_blocks=50)))  # of the other rank
        processes.append(context.Process(target=run_fake_worker, args=(PROCESS_LIMITS, 24, 6, input_0, outputs_out)))
    for process in processes:
        process.start()
    for end in (manager_end, input_0_out, input_1_out, status_out):
        end.close()
    try:
        yield Engine(launcher, server.requests, server.updates, [input_0, input_1], status, processes[0])
        for process in processes:
            process.join(TIMEOUT_S)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()


def new_server(launcher: socket.socket) -> ReplicaConnection:
    """A server's ends of new channels, whose other ends the launcher sends to the manager."""
    of_server, of_manager = make_connection()
    send_connection(launcher, 0, of_manager)
    return of_server


def is_idle(stats: EngineStats) -> bool:
    busy = (stats.num_running, stats.num_waiting, stats.num_kv_blocks_used, stats.worker_queue_depth)
    return busy == (0,) * 4 and stats.num_kv_blocks_total == PROCESS_LIMITS.num_kv_blocks


def test_all_requests_are_answered_and_the_last_update_says_idle(checkpoint):
    """Stop strings span tokens, and some begin inside a multi-byte character; some requests have grammars, one of them
    invalid; one request is cancelled. Every rank receives every step."""
    stops = [(), ("ab",), ("éa", "cab"), ("é", "bcb")]
    requests = [make_request(n, 3 + 4 * n, 3, 40, stops[n % 4], n % 2 == 0, n % 3 == 0) for n in range(12)]
    # Generates a, eos, b, eos, c: special tokens that do not end the sequence must not hide the stop string.
    requests.append(make_request(56098, 3, 3, 30, ("abc",), ignore_eos=True))
    assert simulate(requests[-1], 0)[0][-5:] == [1, EOS_ID, 2, EOS_ID, 7]
    requests += [replace(make_request(100 + n, 5, 2, 40), grammar=LANGUAGES[n].grammar) for n in range(len(LANGUAGES))]
    broken = replace(make_request(98, 5, 1, 40), grammar=INVALID_GRAMMAR)
    num_sequences = 39 + 2 * len(LANGUAGES) + 1
    endless = make_request(99, 5, 1, 100, ignore_eos=True)
    with running_manager(checkpoint, with_worker=True) as engine:
        assert engine.updates.receive(TIMEOUT_S) == Ready("manager", PROCESS_LIMITS)
        tokenizer_loaded, ready, *_ = engine.status.drain()  # the launcher has been told before the server
        assert isinstance(tokenizer_loaded, PhaseDone)
        assert tokenizer_loaded.phase == "load tokenizer"
        assert ready == Ready("manager", PROCESS_LIMITS)
        for message in (endless, *requests, broken, CancelRequest(endless.request_id)):
            engine.requests.send(message)
        deltas = {}
        stats = None
        deadline_s = time.monotonic() + TIMEOUT_S
        while len(deltas) < num_sequences or not is_idle(stats):
            update = engine.updates.receive(deadline_s - time.monotonic())
            assert isinstance(update, EngineUpdate)
            for delta in update.deltas:
                assert (delta.request_id, delta.sequence_index) not in deltas
                deltas[delta.request_id, delta.sequence_index] = delta
            stats = update.stats
            num_returned = sum(len(delta.token_ids) for delta in deltas.values())
            assert stats.total_generation_tokens >= num_returned
        num_cached = sum(delta.num_cached_tokens for delta in deltas.values())
        assert stats.total_prefix_cache_hit_tokens >= num_cached > 0
        assert "unclosed group" in deltas.pop(("r98", 0)).error
        num_prompt_tokens = sum(len(request.prompt_ids) for request in requests)
        # Prompts are counted at admission; the cancelled request may or may not have been admitted.
        assert stats.total_prompt_tokens in (num_prompt_tokens, num_prompt_tokens + len(endless.prompt_ids))
        assert 0 <= stats.manager_busy_fraction <= 1
        engine.launcher.close()
        step_ids = []
        with suppress(ChannelClosed):
            while True:
                step_ids.append(engine.inputs[1].receive(TIMEOUT_S).step_id)
    assert step_ids == list(range(len(step_ids)))
    assert len(step_ids) >= 40, "one step per token of the longest sequence"
    for request in requests:
        for index in range(request.num_sequences):
            token_ids, logprobs, finish_reason = simulate(request, index)
            delta = deltas[request.request_id, index]
            assert (delta.token_ids, delta.finish_reason) == (token_ids, finish_reason)
            assert delta.logprobs == (logprobs if request.want_logprobs else None)


def test_a_new_server_finds_an_idle_engine_with_its_cached_prefixes(checkpoint):
    """The one before it died in the middle of many requests, some of which wait; the new one sends the same ids."""
    requests = [make_request(n, 13, 3, 80, ignore_eos=True) for n in range(8)]
    requests += [replace(make_request(100, 5, 2, 40), grammar=LANGUAGES[0].grammar)]
    with running_manager(checkpoint, with_worker=True) as engine:
        server = ReplicaConnection(engine.requests, engine.updates)
        for number in range(3):
            assert server.updates.receive(TIMEOUT_S) == Ready("manager", PROCESS_LIMITS)
            first = server.updates.receive(TIMEOUT_S)
            assert isinstance(first, EngineUpdate)
            stats = first.stats
            assert (stats.num_running, stats.num_waiting, stats.num_kv_blocks_used, first.deltas) == (0, 0, 0, [])
            assert (stats.num_kv_blocks_cached > 0) == (number > 0)
            for request in requests:
                server.requests.send(request)
            while stats.num_running < 1 or stats.num_waiting < 9:
                stats = server.updates.receive(TIMEOUT_S).stats
            if number == 1:  # the launcher may be quicker than the end of the channel
                old, server = server, new_server(engine.launcher)
                old.close()
            else:
                server.close()
                server = new_server(engine.launcher)
        server.updates.receive(TIMEOUT_S)
        server.requests.send(request := make_request(0, 13, 1, 20))
        deltas: list[SequenceDelta] = []
        while not deltas:
            deltas = server.updates.receive(TIMEOUT_S).deltas
        assert [(delta.request_id, delta.token_ids) for delta in deltas] == [("r0", simulate(request, 0)[0])]
        assert deltas[0].num_cached_tokens > 0
        engine.launcher.close()


def test_requests_sent_before_the_worker_is_ready_are_answered_and_the_last_window_is_logged(checkpoint, caplog):
    """The manager runs in a thread, its worker here. The window ends after the last result, when no message wakes the
    manager."""
    launcher, manager_end = socket.socketpair()
    server = new_server(launcher)
    requests, updates = server.requests, server.updates
    inputs, inputs_out = make_channel()
    outputs, outputs_out = make_channel()
    _, status_out = make_channel()
    config = ServerConfig()
    config.stats_report_seconds = 0.2
    statsd = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    statsd.bind(("127.0.0.1", 0))
    statsd.settimeout(TIMEOUT_S)
    config.statsd_server_url = f"127.0.0.1:{statsd.getsockname()[1]}"
    request = make_request(1, 5, 2, 20, ignore_eos=True)
    requests.send(request)
    with caplog.at_level(logging.INFO, logger="tokasaurus.manager.loop"):
        manager = threading.Thread(
            target=run_manager,
            args=(config, checkpoint, 0, manager_end, [inputs_out], outputs, None, status_out),
            daemon=True,
        )
        manager.start()
        outputs_out.send(Ready("worker", PROCESS_LIMITS))
        assert isinstance(updates.receive(TIMEOUT_S), Ready)
        worker = FakeWorker(PROCESS_LIMITS, config.max_tokens_per_forward, config.max_seqs_per_forward)
        deltas: list[SequenceDelta] = []
        while len(deltas) < 2:
            assert wait([updates, inputs], TIMEOUT_S)
            deltas += [delta for update in updates.drain() for delta in update.deltas]
            for message in inputs.drain():
                outputs_out.send(worker.forward(message, forward_seconds=0.002))
        deadline_s = time.monotonic() + TIMEOUT_S
        while " out/s, " not in caplog.text and time.monotonic() < deadline_s:
            time.sleep(0.01)
        launcher.close()
        manager.join(TIMEOUT_S)
    assert [delta.token_ids for delta in deltas] == [simulate(request, index)[0] for index in range(2)]
    assert "0 run, 0 wait –, KV 0%, 1 done, ETA –" in caplog.text
    (fields,) = (vars(record)["fields"] for record in caplog.records if "fields" in vars(record))
    assert (fields["milliseconds_per_step"], fields["finished_requests"]) == (2.0, 1)
    with statsd:
        assert "toka.milliseconds_per_step:2.0|g" in statsd.recv(65_536).decode().splitlines()


def test_the_launchers_end_before_the_worker_is_ready_ends_the_manager(checkpoint):
    with running_manager(checkpoint, with_worker=False) as engine:
        engine.requests.send(make_request(1))
        engine.launcher.close()
        for channel in engine.inputs:
            with pytest.raises(ChannelClosed):
                channel.receive(TIMEOUT_S)


def test_one_worker_has_its_own_limits() -> None:
    limits = EngineLimits(9, 4, 30, HydragenCosts(1.0, 2.0, 3.0, 4.0, 5.0), 0.5)
    assert common_limits([limits]) == limits


def test_the_worker_with_the_least_decides_for_each_limit() -> None:
    limits = [
        EngineLimits(7, 4, 28, HydragenCosts(1.0, 0.5, 3.0, 0.0), 0.1, 0.01, "kv_cache_num_tokens"),
        EngineLimits(9, 4, 20, HydragenCosts(2.0, 0.4, 4.0, 0.1, 9.0), 0.3, 0.02, "max_num_tokens_per_request", 1e-7),
        EngineLimits(8, 4, 30, HydragenCosts(0.0, 0.6, 2.0, 0.0, 7.0), 0.2, 0.04),
    ]
    expected = EngineLimits(
        7, 4, 20, HydragenCosts(2.0, 0.6, 4.0, 0.1, 9.0), 0.3, 0.04, "max_num_tokens_per_request", 1e-7
    )
    assert common_limits(limits) == expected
    recorded = [HydragenCosts(per_recorded_step=price, recorded_groups=num) for price, num in ((3.0, 16), (1.0, 128))]
    both = [dataclasses.replace(limits[0], hydragen=costs) for costs in recorded]
    assert common_limits(both).hydragen == HydragenCosts(per_recorded_step=3.0, recorded_groups=16)
    assert common_limits([*both, dataclasses.replace(limits[0], hydragen=None)]).hydragen is None


@pytest.mark.parametrize("message_seconds", [2e-5, 1e-3])
@pytest.mark.parametrize("seconds_left", [0.0, 0.001, 0.02, 1.0])
def test_accepted_messages_take_a_share_of_the_time_left(message_seconds: float, seconds_left: float) -> None:
    intake = Intake()
    for num_messages in (1, 7, 300) * 30:
        intake.note(num_messages, num_messages * message_seconds)
    num = intake.max_messages(seconds_left, is_idle=False)
    assert num >= MIN_MESSAGES
    if num > MIN_MESSAGES:
        assert num * message_seconds == pytest.approx(INTAKE_SHARE * seconds_left, rel=0.01, abs=2 * message_seconds)
    else:
        assert INTAKE_SHARE * seconds_left < (MIN_MESSAGES + 1) * message_seconds


def test_an_idle_engine_accepts_some_milliseconds_of_requests() -> None:
    intake = Intake()
    for _ in range(100):
        intake.note(10, 0.001)
    assert intake.max_messages(0.0, is_idle=True) == pytest.approx(IDLE_SECONDS / 1e-4, abs=1)


def test_rounds_without_messages_and_times_of_zero_teach_nothing_absurd() -> None:
    intake = Intake()
    before = intake.max_messages(1.0, is_idle=False)
    intake.note(0, 5.0)
    assert intake.max_messages(1.0, is_idle=False) == before
    for _ in range(1000):
        intake.note(5, 0.0)
    assert before < intake.max_messages(1.0, is_idle=False) < 1_000_000
