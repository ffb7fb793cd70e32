"""The check of a start of what transformers' class computes: once for a model, a machine and its flags."""

import gc
import os
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig

from tests.helpers.tiny_model import save_byte_tokenizer
from tests.model.by_transformers.helpers.tiny_classes import save_tiny_model, tiny_config
from tests.model.helpers.steps import CPU
from tests.model.sampling.helpers.shard_ranks import run_ranks
from tokasaurus.checkpoint import resolve_checkpoint
from tokasaurus.config import ServerConfig
from tokasaurus.messages.status import UserError
from tokasaurus.model.by_transformers.model import TransformersModel
from tokasaurus.model.parallel.collectives import joined
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker import class_check, kept_results
from tokasaurus.model.worker.entry import load_worker
from tokasaurus.model.worker.self_check import Checks
from tokasaurus.model.worker.start import PhaseLog
from tokasaurus.monitoring.available_memory import AvailableMemory

RESULTS = [
    f"{chunks}{what}: {which} row"
    for chunks in ("whole", "in two chunks")
    for what in ("", ", logits")
    for which in ("worst", "median")
]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "model"
    config = tiny_config("gemma2")
    config.final_logit_softcapping = 2.0  # of logits as small as those of a tiny model
    save_tiny_model(directory, config)
    save_byte_tokenizer(directory)
    monkeypatch.setattr(kept_results, "cache_directory", lambda: tmp_path / "cache")
    return directory


def measured(directory: Path, *flags: str, is_thorough: bool = False) -> list[str]:
    """What a start measures of the class, by name."""
    words = ["device=cpu", "model_impl=transformers", "kv_cache_num_tokens=1024", *flags]
    checks, checkpoint = Checks(is_thorough=is_thorough), resolve_checkpoint(str(directory), impl="transformers")
    load_worker(ServerConfig.parse(words), checkpoint, Mesh(), 0, PhaseLog(lambda _: None), checks=checks)
    return [result.measured.name for result in checks.results if result.feature == "transformers" and result.measured]


def test_what_was_right_is_not_measured_again(model: Path) -> None:
    assert measured(model) == RESULTS
    assert measured(model) == []
    assert measured(model, is_thorough=True) == RESULTS, "toka check shows its table"


@pytest.mark.parametrize("flag", ["dtype=float32", "kv_cache_dtype=float32", "page_size=64", "quantization=int8"])
def test_other_flags_are_measured(flag: str, model: Path) -> None:
    measured(model)
    assert measured(model, flag) == RESULTS


def test_other_files_are_measured(model: Path) -> None:
    measured(model)
    os.utime(model / "model.safetensors", ns=(1, 1))
    assert measured(model) == RESULTS
    config = model / "config.json"
    config.write_text(config.read_text().replace('"final_logit_softcapping": 2.0', '"final_logit_softcapping": 3.0'))
    assert measured(model) == RESULTS


def test_other_versions_are_measured(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(model)
    monkeypatch.setattr(class_check, "__version__", "tomorrow's")
    assert measured(model) == RESULTS


def test_what_was_wrong_is_measured_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(TransformersModel, "logits", lambda self, hidden: self.whole.lm_head(hidden))
        for _ in range(2):
            with pytest.raises(UserError, match=r"class: whole, logits: worst row differs by"):
                measured(model)
    assert measured(model) == RESULTS


def test_a_cache_that_cannot_be_written_changes_no_result(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError

    monkeypatch.setattr(kept_results, "replace_text", fail)
    for _ in range(2):
        assert measured(model) == RESULTS


EXPERTS = "layers.*.mlp.experts"
PLAN = MixtralConfig.base_model_tp_plan
assert EXPERTS in PLAN


def check_with_plan(rank: int, num_ranks: int, rendezvous: Path, answers: Connection) -> None:
    """Sends what the check finds wrong by the plan of the class, and by one without the sum of experts' parts."""
    torch.set_num_threads(1)
    flags = ["device=cpu", "dtype=float32", "tp_size=2", "model_impl=transformers", "kv_cache_num_tokens=1024"]
    checkpoint = resolve_checkpoint(str(rendezvous.parent), impl="transformers")
    with joined(Mesh(tp_rank=rank, tp_size=num_ranks), rendezvous, CPU) as mesh:
        for plan in (PLAN, {name: style for name, style in PLAN.items() if name != EXPERTS}):
            checks = Checks(is_thorough=True)
            with suppress(UserError), patch.object(MixtralConfig, "base_model_tp_plan", plan):
                load_worker(ServerConfig.parse(flags), checkpoint, mesh, rank, PhaseLog(lambda _: None), checks=checks)
            answers.send([result.failure is not None for result in checks.results if result.feature == "transformers"])


def check_without_memory(rank: int, num_ranks: int, rendezvous: Path, answers: Connection) -> None:
    """Sends how many results are right where the undivided class has no memory, cannot be loaded, or fails."""
    torch.set_num_threads(1)
    flags = ["device=cpu", "dtype=float32", "tp_size=2", "model_impl=transformers", "kv_cache_num_tokens=1024"]
    checkpoint = resolve_checkpoint(str(rendezvous.parent), impl="transformers")
    own = TransformersModel.run

    def run(model: TransformersModel, *inputs: Any, **options: Any) -> Tensor:
        if model._mesh.tp_size == 1 and not inputs[0].is_meta:
            raise torch.OutOfMemoryError
        return own(model, *inputs, **options)

    changes = (
        patch.object(class_check, "available_memory", lambda: AvailableMemory(1000, "")),
        patch.object(class_check, "load_weights", side_effect=RuntimeError("it fails")),
        patch.object(TransformersModel, "run", run),
    )
    with joined(Mesh(tp_rank=rank, tp_size=num_ranks), rendezvous, CPU) as mesh:
        for change in changes:
            checks = Checks(is_thorough=True)
            with change, patch.object(class_check.logger, "warning") as warning:
                load_worker(ServerConfig.parse(flags), checkpoint, mesh, rank, PhaseLog(lambda _: None), checks=checks)
            results = [result.failure is None for result in checks.results if result.feature == "transformers"]
            answers.send((results, [str(call.args[1]) for call in warning.call_args_list]))


def test_what_fails_on_the_first_rank_alone_leaves_the_comparison_with_its_part(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, tiny_config("mixtral"))
    save_byte_tokenizer(tmp_path)
    first, second = run_ranks(2, tmp_path, 3, check_without_memory)
    assert [results for results, _ in first] == [results for results, _ in second] == [[True] * len(RESULTS)] * 3
    assert [lines for _, lines in second] == [[]] * 3
    (no_memory,), (no_weights,), (fails,) = (lines for _, lines in first)
    assert "and 1,000 are available" in no_memory
    assert "it fails" in no_weights
    assert "OutOfMemoryError" in fails


def count_threads(rank: int, num_ranks: int, rendezvous: Path, answers: Connection) -> None:
    """Sends how many threads of gloo there are before the model's end and after."""
    torch.set_num_threads(1)
    flags = ["device=cpu", "dtype=float32", "tp_size=2", "model_impl=transformers", "kv_cache_num_tokens=1024"]
    checkpoint = resolve_checkpoint(str(rendezvous.parent), impl="transformers")

    def send() -> None:
        names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        answers.send(sum("gloo" in name for name in names))

    with joined(Mesh(tp_rank=rank, tp_size=num_ranks), rendezvous, CPU) as mesh:
        start = load_worker(ServerConfig.parse(flags), checkpoint, mesh, rank, PhaseLog(lambda _: None))
    send()
    del mesh, start
    gc.collect()
    send()


@pytest.mark.skipif(sys.platform != "linux", reason="threads are told by /proc")
def test_no_thread_of_gloo_outlives_the_model(tmp_path: Path) -> None:
    """It would abort the process if it freed a tensor while the interpreter ends."""
    save_tiny_model(tmp_path, tiny_config("mixtral"))
    save_byte_tokenizer(tmp_path)
    for before, after in run_ranks(2, tmp_path, 2, count_threads):
        assert before > 0
        assert after == 0


@pytest.mark.long
def test_a_division_that_computes_something_else_is_found_by_the_first_rank(tmp_path: Path) -> None:
    """Each rank by itself computes what its part of the class does."""
    save_tiny_model(tmp_path, tiny_config("mixtral"))
    save_byte_tokenizer(tmp_path)
    first, second = run_ranks(2, tmp_path, 2, check_with_plan)
    assert first == [[False] * len(RESULTS), [True] * len(RESULTS)]
    assert second == [[False] * len(RESULTS)] * 2
