"""Sleep gives memory back to the system; after waking, the model computes what it did, with the newest weights."""

from pathlib import Path

import psutil
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file

from tests.checkpoint.helpers.gguf_files import random_weights, write_gguf
from tests.checkpoint.helpers.quantised_models import save_quantised_model
from tests.checkpoint.helpers.quantised_weights import Format
from tests.helpers.examples import few
from tests.helpers.limits import join
from tests.helpers.tiny_model import VOCAB_SIZE, family_config, save_random_model, save_tiny_model
from tests.model.attention.helpers import flashinfer_double
from tests.model.execution.helpers.decode_steps import Sampled, assert_same
from tests.model.execution.helpers.launch_tape import LaunchTape, address
from tests.model.helpers.greedy_decoding import load, run_whole_prompt
from tests.model.helpers.pretend_device import HostTransfers
from tests.model.helpers.steps import StepDriver, make_runner
from tokasaurus.checkpoint import file_states, resolve_checkpoint, weight_files
from tokasaurus.messages.commands import UpdateWeights
from tokasaurus.model.attention.backend import KVShape
from tokasaurus.model.attention.choose import make_backend
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.cpu.gemm_choice import GemmChoice
from tokasaurus.model.decoder import uploads
from tokasaurus.model.execution.runner import ModelRunner
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker import sleep as sleep_module
from tokasaurus.model.worker.sleep import Sleeper
from tokasaurus.model.worker.weight_update import WeightUpdates

CPU = torch.device("cpu")
CHOICES = {"plain": None, "kernels": GemmChoice(1.0, 1.0), "torch": GemmChoice(0.5, 0.5), "both": GemmChoice(1.0, 0.5)}
SHAPE = KVShape(3, 4, 2, 16, 16, torch.float32, CPU)
MIB = 1 << 20


def resident_mib() -> float:
    return float(psutil.Process().memory_info().rss) / MIB


@pytest.mark.parametrize("layout", CHOICES)
@pytest.mark.parametrize("updates_before", [[], ["new"], ["new", "part"], ["part"]])
def test_a_model_that_woke_up_has_the_newest_weights(layout: str, updates_before: list[str], tmp_path: Path) -> None:
    old = save_tiny_model(tmp_path / "old", "llama", seed=0)
    new = save_tiny_model(tmp_path / "new", "llama", seed=1)
    part = {"model.layers.1.mlp.gate_proj.weight": torch.full((96, 64), 0.01)}
    (tmp_path / "part").mkdir()
    save_file(part, tmp_path / "part" / "a.safetensors")
    model, info = load(tmp_path / "old")
    choice = CHOICES[layout]
    if choice is not None:
        model.pack(load_kernels(), choice)
    updates = WeightUpdates(model, info, tmp_path / "old", Mesh(), CPU)
    backend = make_backend("cpu", SHAPE, load_kernels())
    backend.allocate(8)
    sleeper = Sleeper(model, backend, updates, CPU)
    oracle = old
    for name in updates_before:
        assert updates.apply(UpdateWeights(0, str(tmp_path / name), name, is_partial=name == "part")) == ""
        oracle = new if name == "new" else oracle
        if name == "part":
            oracle.load_state_dict(part, strict=False)
    assert sleeper.sleep(with_weights=True) == ""
    assert sleeper.sleep(with_weights=False) == "", "it sleeps already"
    assert sleeper.wake() == ""
    assert sleeper.wake() == ""
    token_ids = torch.randint(VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = oracle(token_ids.unsqueeze(0)).logits[0]
    logits = run_whole_prompt(model, info, Mesh(), None, token_ids)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@few(2, "layout", CHOICES)
def test_the_memory_of_weights_and_cache_is_given_back(layout: str, tmp_path: Path) -> None:
    config = family_config("llama", vocab_size=40_000)
    config.hidden_size, config.intermediate_size = 512, 1024
    save_random_model(tmp_path, config)
    model, info = load(tmp_path)
    choice = CHOICES[layout]
    if choice is not None:
        model.pack(load_kernels(), choice)
    backend = make_backend("cpu", SHAPE, load_kernels())
    cache_mib = 200
    block_bytes = 3 * 2 * 2 * 16 * 16 * 4  # layers, heads, keys and values, tokens, head size, float32
    backend.allocate(cache_mib * MIB // block_bytes)
    updates = WeightUpdates(model, info, tmp_path, Mesh(), CPU)
    sleeper = Sleeper(model, backend, updates, CPU)
    for thread in sleeper._touching:
        join(thread)
    weights_mib = 2 * 40_000 * 512 * 4 / MIB
    awake = resident_mib()
    assert sleeper.sleep(with_weights=False) == ""
    without_cache = resident_mib()
    assert awake - without_cache > 0.9 * cache_mib
    assert sleeper.sleep(with_weights=True) == ""
    assert without_cache - resident_mib() > 0.9 * weights_mib
    assert sleeper.wake() == ""


def test_weights_that_cannot_be_read_again_leave_it_asleep(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    model, info = load(tmp_path)
    updates = WeightUpdates(model, info, tmp_path, Mesh(), CPU)
    backend = make_backend("cpu", SHAPE, load_kernels())
    backend.allocate(8)
    sleeper = Sleeper(model, backend, updates, CPU)
    assert sleeper.sleep(with_weights=True) == ""
    (tmp_path / "model.safetensors").rename(tmp_path / "away")
    assert sleeper.wake().startswith("the weights cannot be read again: ")
    (tmp_path / "away").rename(tmp_path / "model.safetensors")
    assert sleeper.wake() == ""


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.F16])
def test_weights_of_a_gguf_file_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    """Also where its matrices have another dtype than its norms."""
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", random_weights("llama", tied=True), kind)
    directory = resolve_checkpoint(str(path)).directory
    model, info = load(directory)
    model.pack(load_kernels(), GemmChoice(1.0, 0.5))
    updates = WeightUpdates(model, info, directory, Mesh(), CPU)
    backend = make_backend("cpu", SHAPE, load_kernels())
    backend.allocate(8)
    sleeper = Sleeper(model, backend, updates, CPU)
    (tmp_path / "part").mkdir()
    save_file({"model.norm.weight": torch.full((64,), 2.0)}, tmp_path / "part" / "a.safetensors")
    part = UpdateWeights(0, str(tmp_path / "part"), "1", is_partial=True)
    token_ids = torch.arange(40)
    for update in (None, part):
        if update is not None:
            assert sleeper.update(update) == ""
        before = run_whole_prompt(model, info, Mesh(), None, token_ids)
        assert sleeper.sleep(with_weights=True) == ""
        assert sleeper.wake() == ""
        assert torch.equal(run_whole_prompt(model, info, Mesh(), None, token_ids), before)
    assert updates.apply(UpdateWeights(1, str(directory), "2", files=file_states(weight_files(directory)))) == ""
    assert sleeper.sleep(with_weights=True) == ""
    path.touch()
    assert "tiny.gguf has changed" in sleeper.wake()


@pytest.mark.parametrize("how", [Format("awq"), Format("gptq", has_order=True)], ids=lambda how: how.name)
def test_weights_of_quantised_safetensors_are_read_again(tmp_path: Path, how: Format) -> None:
    save_quantised_model(tmp_path, "llama", how)
    model, info = load(tmp_path)
    model.pack(load_kernels(), GemmChoice(1.0, 0.5))
    updates = WeightUpdates(model, info, tmp_path, Mesh(), CPU)
    backend = make_backend("cpu", SHAPE, load_kernels())
    backend.allocate(8)
    sleeper = Sleeper(model, backend, updates, CPU)
    token_ids = torch.arange(40)
    before = run_whole_prompt(model, info, Mesh(), None, token_ids)
    assert sleeper.sleep(with_weights=True) == ""
    assert sleeper.wake() == ""
    assert torch.equal(run_whole_prompt(model, info, Mesh(), None, token_ids), before)


def test_it_may_wake_without_weights_for_an_update_of_all(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "old", "llama", seed=0)
    new = save_tiny_model(tmp_path / "new", "llama", seed=1)
    (tmp_path / "part").mkdir()
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "part" / "a.safetensors")
    model, info = load(tmp_path / "old")
    model.pack(load_kernels(), GemmChoice(1.0, 0.5))
    updates = WeightUpdates(model, info, tmp_path / "old", Mesh(), CPU)
    backend = make_backend("cpu", SHAPE, load_kernels())
    backend.allocate(8)
    sleeper = Sleeper(model, backend, updates, CPU)
    part = UpdateWeights(0, str(tmp_path / "part"), "1", is_partial=True)
    assert sleeper.update(part) == ""
    assert sleeper.sleep(with_weights=True) == ""
    (tmp_path / "part" / "a.safetensors").unlink()
    for _ in range(2):
        assert "cannot be read again" in sleeper.wake()
    assert sleeper.wake(may_lack_weights=True) == ""
    assert "have not been read again" in sleeper.update(part)
    assert "cannot be read again" in sleeper.wake(), "no step with weights that nobody has named"
    assert sleeper.update(UpdateWeights(0, str(tmp_path / "new"), "2")) == ""
    assert sleeper.wake() == ""
    token_ids = torch.randint(VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = new(token_ids.unsqueeze(0)).logits[0]
    logits = run_whole_prompt(model, info, Mesh(), None, token_ids)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def decode(runner: ModelRunner) -> list[Sampled]:
    """Prompts, and decode steps of each number of rows up to the largest graph."""
    driver = StepDriver(runner, num_blocks=40)
    for slot in (1, 2, 3, 4):
        driver.open(slot, [slot, 4, 9], temperature=0.0)
    steps = [driver.run([], [(slot, 3) for slot in (1, 2, 3, 4)])]
    return steps + [driver.run(list(range(1, num_rows + 1)), []) for num_rows in (4, 3, 2, 1, 4)]


@pytest.mark.parametrize("backend", ["torch", "flashinfer"])
def test_graphs_are_recorded_again_where_memory_was_elsewhere_after_waking(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CUDA device whose memory is the host's. The tape's graphs refuse memory that has moved; FlashInfer's double
    has attention in them, too."""
    flashinfer_double.install(monkeypatch, any_dtype=True)  # the model is in float32
    calls: list[str] = []
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, _name=name: calls.append(_name))
    monkeypatch.setattr(uploads, "CudaTransfers", lambda _: HostTransfers())
    cuda = torch.device("cuda", 0)
    save_tiny_model(tmp_path, "llama")
    model, info = load(tmp_path)
    runner = make_runner(model, info, backend, num_blocks=40)
    runner.record_graphs(LaunchTape(), [4, 2])
    expected = decode(runner)
    recorded: list[LaunchTape] = []

    def record() -> None:
        recorded.append(LaunchTape())
        runner.record_graphs(recorded[-1], [4, 2])

    updates = WeightUpdates(model, info, tmp_path, Mesh(), cuda)
    sleeper = Sleeper(model, runner._backend, updates, cuda, Mesh(), runner, record)
    tensors = (*model.parameters(), *runner._backend.caches)
    before = {id(tensor): address(tensor) for tensor in tensors}
    assert sleeper.sleep(with_weights=True) == ""
    assert runner.graph_sizes == [], "no graph that has addresses of memory that was given back"
    assert calls == ["synchronize", "empty_cache"], "torch's allocator keeps what is freed"
    assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) < 5_000, "norms stay"
    assert sleeper.sleep(with_weights=True) == ""
    others = [
        torch.empty(tensor.nbytes, dtype=torch.uint8) for tensor in (*model.parameters(), *runner._backend.caches)
    ]
    assert sleeper.wake() == ""
    after = {id(tensor): address(tensor) for tensor in tensors}
    assert sum(before[key] != after[key] for key in before) > 10, "the others have the memory now"
    assert runner.graph_sizes == [2, 4]
    assert_same(decode(runner), expected)
    del others
    assert sleeper.wake() == ""
    assert len(recorded) == 1, "it was awake"


def test_graphs_that_cannot_be_recorded_again_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny_model(tmp_path, "llama")
    model, info = load(tmp_path)
    runner = make_runner(model, info, "torch", num_blocks=40)
    runner.record_graphs(LaunchTape(), [4, 2])
    expected = decode(runner)

    def record() -> None:
        raise RuntimeError("CUDA out of memory\nmore")

    updates = WeightUpdates(model, info, tmp_path, Mesh(), CPU)
    sleeper = Sleeper(model, runner._backend, updates, CPU, Mesh(), runner, record)
    for _ in range(2):
        assert sleeper.sleep(with_weights=False) == ""
        assert sleeper.wake() == ""
        assert runner.graph_sizes == []
        assert_same(decode(runner), expected)
    (line,) = caplog.messages
    assert line.endswith("decode steps are slower without: CUDA out of memory")


@pytest.mark.parametrize("whose", ["weights", "cache"])
def test_memory_that_another_process_has_leaves_it_asleep(
    whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path, "llama")
    model, info = load(tmp_path)
    runner = make_runner(model, info, "torch", num_blocks=40)
    expected = decode(runner)
    updates = WeightUpdates(model, info, tmp_path, Mesh(), CPU)
    sleeper = Sleeper(model, runner._backend, updates, CPU, Mesh(), runner)
    assert sleeper.sleep(with_weights=True) == ""

    def refuse() -> None:
        for parameter in list(model.parameters())[:1]:
            parameter.untyped_storage().resize_(parameter.nbytes)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    with monkeypatch.context() as patched:
        patched.setattr(model if whose == "weights" else runner._backend, "take_again", refuse)
        for _ in range(2):
            assert sleeper.wake() == "the memory cannot be taken again: CUDA out of memory. Tried to allocate 2 GiB"
    of_weights = sum(parameter.untyped_storage().nbytes() for parameter in model.layers.parameters())
    assert (of_weights < 10_000) == (whose == "weights")
    assert all(cache.untyped_storage().nbytes() == 0 for cache in runner._backend.caches)
    with monkeypatch.context() as patched:
        patched.setattr(sleep_module, "least_of_ranks", lambda *_: 0)
        assert sleeper.wake() == "the memory cannot be taken again: another rank has failed"
    assert all(cache.untyped_storage().nbytes() == 0 for cache in runner._backend.caches)
    assert sleeper.wake() == ""
    assert_same(decode(runner), expected)
