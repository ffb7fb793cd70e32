"""The manager as a process of its own, between a server and a worker over real channels."""

import logging
import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.manager.helpers.fake_grammars import LANGUAGES, NO_GRAMMAR
from tests.manager.helpers.fake_worker import (
    EOS_ID,
    TOKEN_BYTES,
    VOCAB_SIZE,
    FakeWorker,
    decode_text,
    make_request,
    run_fake_worker,
    simulate,
)
from tokasaurus.checkpoint import Checkpoint, ModelInfo, RopeInfo
from tokasaurus.config import ServerConfig
from tokasaurus.manager.loop import run_manager
from tokasaurus.messages.channel import Channel, wait
from tokasaurus.messages.forward import EndOfInputs, ForwardInput
from tokasaurus.messages.generation import CancelRequest, EngineUpdate, SequenceDelta
from tokasaurus.messages.lifecycle import EngineLimits, EngineStats, PhaseDone, Ready, Shutdown
from tokasaurus.text.tokenizer import load_token_decoder

LIMITS = EngineLimits(num_kv_blocks=40, page_size=4, max_tokens_per_sequence=120)
TIMEOUT_S = 30.0


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """A tokenizer whose tokens decode as the fake worker's do. In byte-level BPE every byte has a character of its own;
    a pre-tokenizer spells the whole characters, and the two bytes of é are Ã and ©."""
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
    info = ModelInfo("llama", 1, 8, 1, 1, 8, 8, VOCAB_SIZE, 1000, 1e-5, RopeInfo(1e4), True, (EOS_ID,), "float32")
    return Checkpoint("fake", tmp_path, tmp_path, info)


@dataclass
class Engine:
    requests: Channel[Any]
    updates: Channel[Any]
    inputs: list[Channel[ForwardInput | EndOfInputs]]
    outputs: Channel[Any]
    status: Channel[Any]
    manager: BaseProcess


@contextmanager
def running_manager(checkpoint: Checkpoint, with_worker: bool) -> Iterator[Engine]:
    context = multiprocessing.get_context("spawn")
    requests, updates, input_0, input_1, outputs, status = (Channel[Any](context) for _ in range(6))
    config = ServerConfig()
    config.max_tokens_per_forward = 24
    config.max_seqs_per_forward = 6
    arguments = (config, checkpoint, requests, updates, [input_0, input_1], outputs, status)
    processes = [context.Process(target=run_manager, args=arguments)]
    if with_worker:
        processes.append(context.Process(target=run_fake_worker, args=(LIMITS, 24, 6, input_0, outputs)))
    for process in processes:
        process.start()
    try:
        yield Engine(requests, updates, [input_0, input_1], outputs, status, processes[0])
        for process in processes:
            process.join(TIMEOUT_S)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()


def test_the_fake_tokenizer_is_the_fake_worker_s(checkpoint):
    decoder = load_token_decoder(checkpoint.tokenizer_directory)
    for token_ids in ([0, 1, 2], [4, 5, 3], [6, 7], [1, 4, 5, 8]):
        assert decoder.decode(token_ids) == decode_text(token_ids)


def is_idle(stats: EngineStats) -> bool:
    busy = (stats.num_running, stats.num_waiting, stats.num_kv_blocks_used, stats.worker_queue_depth)
    return busy == (0,) * 4 and stats.num_kv_blocks_total == LIMITS.num_kv_blocks


def test_requests_are_answered_and_the_last_update_says_idle(checkpoint):
    """Stop strings lie across tokens, some inside a character; some have grammars, one of which is none; one request is
    cancelled; every rank gets every step."""
    stops = [(), ("ab",), ("éa", "cab"), ("é", "bcb")]
    requests = [make_request(n, 3 + 4 * n, 3, 40, stops[n % 4], n % 2 == 0, n % 3 == 0) for n in range(12)]
    # Spells a, eos, b, eos, c: special tokens that end nothing must not hide the stop string.
    requests.append(make_request(56098, 3, 3, 30, ("abc",), ignore_eos=True))
    assert simulate(requests[-1], 0)[0][-5:] == [1, EOS_ID, 2, EOS_ID, 7]
    requests += [replace(make_request(100 + n, 5, 2, 40), grammar=LANGUAGES[n].grammar) for n in range(len(LANGUAGES))]
    broken = replace(make_request(98, 5, 1, 40), grammar=NO_GRAMMAR)
    num_sequences = 39 + 2 * len(LANGUAGES) + 1
    endless = make_request(99, 5, 1, 100, ignore_eos=True)
    with running_manager(checkpoint, with_worker=True) as engine:
        assert engine.updates.receive(TIMEOUT_S) == Ready("manager", LIMITS)
        tokenizer_loaded = engine.status.receive(TIMEOUT_S)
        assert isinstance(tokenizer_loaded, PhaseDone)
        assert tokenizer_loaded.phase == "load tokenizer"
        assert engine.status.receive(TIMEOUT_S) == Ready("manager", LIMITS)
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
        # Counted when it starts: the one that was cancelled may have, or not.
        assert stats.total_prompt_tokens in (num_prompt_tokens, num_prompt_tokens + len(endless.prompt_ids))
        assert 0 <= stats.manager_busy_fraction <= 1
        engine.requests.send(Shutdown())
        step_ids = []
        while isinstance(message := engine.inputs[1].receive(TIMEOUT_S), ForwardInput):
            step_ids.append(message.step_id)
    assert step_ids == list(range(len(step_ids)))
    assert len(step_ids) >= 40, "a step for each token of the longest"
    for request in requests:
        for index in range(request.num_sequences):
            token_ids, logprobs, finish_reason = simulate(request, index)
            delta = deltas[request.request_id, index]
            assert (delta.token_ids, delta.finish_reason) == (token_ids, finish_reason)
            assert delta.logprobs == (logprobs if request.want_logprobs else None)


def test_requests_sent_before_the_worker_is_ready_are_kept_and_the_last_window_is_logged(checkpoint, caplog):
    """The manager in a thread, its worker here: a window ends after the last result, when no message wakes anyone."""
    context = multiprocessing.get_context("spawn")
    requests, updates, inputs, outputs, status = (Channel[Any](context) for _ in range(5))
    config = ServerConfig()
    config.stats_report_seconds = 0.2
    request = make_request(1, 5, 2, 20, ignore_eos=True)
    requests.send(request)
    assert wait([requests.reader], TIMEOUT_S), "the request is there before the worker"
    with caplog.at_level(logging.INFO, logger="tokasaurus.manager.loop"):
        manager = threading.Thread(
            target=run_manager, args=(config, checkpoint, requests, updates, [inputs], outputs, status), daemon=True
        )
        manager.start()
        outputs.send(Ready("worker", LIMITS))
        assert isinstance(updates.receive(TIMEOUT_S), Ready)
        worker = FakeWorker(LIMITS, config.max_tokens_per_forward, config.max_seqs_per_forward)
        deltas: list[SequenceDelta] = []
        while len(deltas) < 2:
            assert wait([updates.reader, inputs.reader], TIMEOUT_S)
            deltas += [delta for update in updates.drain() for delta in update.deltas]
            for message in inputs.drain():
                outputs.send(worker.forward(message, forward_seconds=0.002))
        deadline_s = time.monotonic() + TIMEOUT_S
        while not caplog.records and time.monotonic() < deadline_s:
            time.sleep(0.01)
        requests.send(Shutdown())
        manager.join(TIMEOUT_S)
    assert [delta.token_ids for delta in deltas] == [simulate(request, index)[0] for index in range(2)]
    assert "sequences a step, 2.0 ms a step" in caplog.text


def test_a_shutdown_before_the_worker_is_ready_ends_the_manager(checkpoint):
    with running_manager(checkpoint, with_worker=False) as engine:
        engine.requests.send(make_request(1))
        engine.requests.send(Shutdown())
        for channel in engine.inputs:
            assert channel.receive(TIMEOUT_S) == EndOfInputs()
