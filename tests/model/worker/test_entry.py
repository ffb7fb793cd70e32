"""A worker from start to end, over real channels, in a thread of the test."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.tiny_model import save_tiny_model
from tests.model.execution.helpers.launch_tape import LaunchTape, TapedGraph
from tests.model.helpers.steps import NOTHING, int32, open_greedy
from tokasaurus.checkpoint import file_states, resolve_checkpoint, weight_files
from tokasaurus.config import ServerConfig
from tokasaurus.messages.channel import make_channel
from tokasaurus.messages.commands import UpdateWeights
from tokasaurus.messages.forward import ForwardInput, SlotChanges
from tokasaurus.messages.status import FlagRefused, PhaseDone, Ready, UserError
from tokasaurus.model.decoder.decoder import Decoder
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker import entry
from tokasaurus.model.worker.entry import run_worker, start_worker

FLAGS = ["dtype=float32", "max_tokens_per_forward=64", "max_seqs_per_forward=8"]


def prompt_step(step_id: int, prompt: list[int]) -> ForwardInput:
    opened = open_greedy(1, len(prompt))
    changes = SlotChanges(int32([]), opened, int32([1]), int32([1]))
    return ForwardInput(step_id, int32([1]), int32([len(prompt)]), 0, int32(prompt), changes)


def decode_step(step_id: int) -> ForwardInput:
    changes = SlotChanges(NOTHING, None, NOTHING, NOTHING)
    return ForwardInput(step_id, int32([1]), int32([1]), 1, NOTHING, changes)


def test_a_worker_reports_its_phases_then_answers_every_step_in_order_and_ends(tmp_path: Path) -> None:
    oracle = save_tiny_model(tmp_path, "llama")
    checkpoint = resolve_checkpoint(str(tmp_path))
    inputs_in, inputs = make_channel()
    outputs, outputs_out = make_channel()
    status, status_out = make_channel()
    config = ServerConfig.parse([*FLAGS, "kv_cache_num_tokens=100"])
    worker = threading.Thread(
        target=run_worker,
        args=(config, checkpoint, 0, None, None, inputs_in, outputs_out, None, status_out),
        daemon=True,
    )
    worker.start()
    ready = outputs.receive(timeout_s=60)
    assert isinstance(ready, Ready)
    assert ready.limits is not None
    assert (ready.limits.num_kv_blocks, ready.limits.page_size) == (7, 16)
    assert ready.limits.max_tokens_per_sequence == 112, "the KV pool is smaller than the context"
    assert ready.limits.limited_by == "kv_cache_num_tokens"
    phases = [message.phase for message in status.drain() if isinstance(message, PhaseDone)]
    assert phases == ["device", "gemm", "weights", "KV cache", "warm-up", "shared prefixes", "memory"]

    prompt = [5, 6, 7]
    for step in (prompt_step(1, prompt), decode_step(2), decode_step(3)):
        inputs.send(step)
    inputs.close()
    answers = [outputs.receive(timeout_s=60) for _ in range(3)]
    worker.join(timeout=60)
    assert not worker.is_alive()
    expected = oracle.generate(torch.tensor([prompt]), max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert [answer.step_id for answer in answers] == [1, 2, 3]
    assert [answer.token_ids.tolist() for answer in answers] == [[token] for token in expected[0, 3:].tolist()]


def test_a_worker_reads_no_other_weights_than_the_start_has_seen(tmp_path: Path) -> None:
    """What the start has decided from them, such as tied embeddings, would be wrong for others."""
    save_tiny_model(tmp_path, "llama", tied=True)
    checkpoint = resolve_checkpoint(str(tmp_path))
    save_tiny_model(tmp_path, "llama", tied=True, seed=1)
    config = ServerConfig.parse([*FLAGS, "kv_cache_num_tokens=100"])
    with pytest.raises(UserError, match=r"^the weights in .* have changed since the server was started$"):
        start_worker(config, checkpoint, Mesh(), 0, lambda _: None)
    update = UpdateWeights(0, str(tmp_path), "1", files=file_states(weight_files(tmp_path)))
    assert start_worker(config, replace(checkpoint, weight_updates=(update,)), Mesh(), 0, lambda _: None)


def test_ranks_that_cannot_divide_the_model_are_a_user_error_before_they_meet(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen2")
    config = ServerConfig.parse([*FLAGS, "kv_cache_num_tokens=100", "tp_size=3"])
    (inputs, _), (_, outputs), (_, status) = make_channel(), make_channel(), make_channel()
    with pytest.raises(UserError, match=r"^attention heads \(4\) cannot be divided among tp_size=3$"):
        run_worker(
            config, resolve_checkpoint(str(tmp_path)), 0, None, tmp_path / "rendezvous", inputs, outputs, None, status
        )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["attention_backend=cpu", "page_size=8"], "page_size=8"),
        (["kv_cache_num_tokens=2000000000"], "kv_cache_num_tokens=2000000000"),
        (["expert_counts=T"], "^expert_counts=T: the model has no experts$"),
        (
            ["async_tp_threshold=32", "tp_size=2", "torch_compile=T", "device=cpu"],
            "^async_tp_threshold=32: needs GPUs that are joined by NVLink, not device=cpu$",
        ),
        pytest.param(
            *(["device=cuda"], "device=cuda"),
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a CUDA device"),
        ),
    ],
)
def test_a_flag_that_the_worker_cannot_satisfy_is_a_user_error(flags: list[str], message: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen2")
    config = ServerConfig.parse([*FLAGS, "kv_cache_num_tokens=100", *flags])
    with pytest.raises(UserError, match=message):
        start_worker(config, resolve_checkpoint(str(tmp_path)), Mesh(), 0, lambda _: None)


def test_graphs_are_freed_before_the_group_of_ranks_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path, "llama")
    graphs: list[weakref.ref[TapedGraph]] = []
    at_end: list[int] = []

    class ForgetfulTape(LaunchTape):
        def end(self) -> TapedGraph:
            graphs.append(weakref.ref(graph := super().end()))
            self.graphs.clear()
            return graph

    @contextmanager
    def joined(mesh: Mesh, *_: Any) -> Iterator[Mesh]:
        yield mesh
        at_end.append(sum(graph() is not None for graph in graphs))

    monkeypatch.setattr(entry, "_joined", joined)
    monkeypatch.setattr(Decoder, "pack_module", lambda *_: None)  # a tape reads no packed weights
    monkeypatch.setattr(entry, "graph_sizes_of", lambda *_: [8, 4])
    monkeypatch.setattr(entry, "CudaRecorder", lambda _device: ForgetfulTape())
    config = ServerConfig.parse([*FLAGS, "kv_cache_num_tokens=100", "use_hydragen=F", "cpu_isa=torch"])
    (inputs, input_end), (_, outputs), (_, status) = make_channel(), make_channel(), make_channel()
    input_end.close()
    run_worker(config, resolve_checkpoint(str(tmp_path)), 0, None, None, inputs, outputs, None, status)
    assert len(graphs) > 2
    assert at_end == [0]


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("fault", [None, "stale", "raises"])
def test_graphs_that_replay_wrongly_are_switched_off_or_refused_by_name(
    fault: str | None, by_name: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model(tmp_path, "llama")
    monkeypatch.setattr(Decoder, "pack_module", lambda *_: None)  # a tape reads no packed weights
    monkeypatch.setattr(entry, "graph_sizes_of", lambda *_: [8, 4])
    monkeypatch.setattr(entry, "CudaRecorder", lambda _device: LaunchTape())

    def replay(_graph: TapedGraph) -> None:
        if fault == "raises":
            raise RuntimeError("illegal instruction")

    if fault is not None:
        monkeypatch.setattr(TapedGraph, "replay", replay)
    flags = ["kv_cache_num_tokens=100", "use_hydragen=F", "cpu_isa=torch", *(["use_cudagraphs=T"] if by_name else [])]
    config, checkpoint = ServerConfig.parse([*FLAGS, *flags]), resolve_checkpoint(str(tmp_path))
    if fault is not None and by_name:
        with pytest.raises(
            FlagRefused, match=r"^use_cudagraphs=T: (graph of 4 rows: worst row differs|RuntimeError: illegal)"
        ):
            start_worker(config, checkpoint, Mesh(), 0, lambda _: None)
        return
    worker = start_worker(config, checkpoint, Mesh(), 0, lambda _: None)
    assert (worker.runner._graphs is None) == (fault is not None)
    lines = [record.getMessage() for record in caplog.records if "use_cudagraphs" in record.getMessage()]
    assert len(lines) == (fault is not None)
