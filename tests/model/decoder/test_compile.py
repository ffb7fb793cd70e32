"""Compiled layers: the tokens are the same, and no step after warm-up waits for a compilation."""

import itertools
import logging
import random
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType

import pytest
import torch
from transformers import PreTrainedModel

from tests.helpers.examples import IS_NIGHTLY, few
from tests.helpers.tiny_model import FAMILIES, VOCAB_SIZE, option_config, save_random_model, save_tiny_model
from tests.model.helpers.greedy_decoding import greedy_in_a_mixed_batch, load, oracle_greedy
from tests.model.helpers.prefix_samples import Samples
from tests.model.helpers.steps import StepDriver, make_runner, one_thread
from tokasaurus.checkpoint import cache_directory, resolve_checkpoint
from tokasaurus.config import ServerConfig
from tokasaurus.messages.channel import make_channel
from tokasaurus.messages.status import PhaseDone, UserError
from tokasaurus.model.attention.torch_backend import TorchBackend
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.decoder import compile
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.execution.runner import ModelRunner
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker import device
from tokasaurus.model.worker.entry import start_worker
from tokasaurus.model.worker.loop import run_steps
from tokasaurus.model.worker.warmup import ForwardLimits, single_token, warm_up, widest_prefill

NUM_BLOCKS, NUM_SLOTS = 400, 120
LIMITS = ForwardLimits(max_tokens=256, max_seqs=20, context_length=512, vocab_size=VOCAB_SIZE)
FLAGS = ["dtype=float32", "kv_cache_num_tokens=1000", "max_tokens_per_forward=64", "max_seqs_per_forward=8"]


@pytest.fixture(autouse=True, params=["eager", pytest.param("inductor", marks=pytest.mark.long)])
def _target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What graphs are compiled to. Inductor alone takes 15 seconds to import and to compile a first function, so `make
    test` runs the captured graphs: what is captured, when and how often is the same."""
    if request.param == "eager":
        monkeypatch.setattr("torch._dynamo.lookup_backend", lambda _name: lambda graph, _inputs, **_options: graph)


@pytest.fixture(autouse=True)
def nothing_compiled_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget compiled functions in this process; the cache on disk stays, as between two starts of a server."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache_directory() / "inductor"))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch.compiler.reset()
    with one_thread():
        yield
    torch.compiler.reset()


def whole_warm_up(runner: ModelRunner) -> None:
    warm_up(runner, LIMITS, 16, is_context_costly=False)


def compiled_runner(
    directory: Path, backend: str, do_warm_up: Callable[[ModelRunner], object] = whole_warm_up
) -> tuple[ModelRunner, Compiler]:
    compiler = Compiler()
    model, info = load(directory)
    model.pack(load_kernels(), compiler=compiler)
    runner = make_runner(model, info, backend, num_blocks=NUM_BLOCKS, num_slots=NUM_SLOTS, compiler=compiler)
    do_warm_up(runner)
    compiler.end_warm_up()
    return runner, compiler


@pytest.mark.long
@pytest.mark.parametrize(("family", "backend"), [*((family, "cpu") for family in FAMILIES), ("qwen3", "torch")])
def test_one_compiled_function_of_all_layers_gives_the_tokens_of_transformers(
    family: str, backend: str, tmp_path: Path
) -> None:
    oracle = save_tiny_model(tmp_path, family, tied=family == "llama")
    assert_equals_oracle(tmp_path, oracle, backend, FAMILIES.index(family))


@pytest.mark.parametrize("family", ["qwen2_moe", "glm4_moe"])
def test_layers_with_experts_are_compiled(family: str, tmp_path: Path) -> None:
    """With a router in groups, a shared expert and its gate."""
    oracle = save_random_model(tmp_path, option_config(family, 0))
    assert_equals_oracle(tmp_path, oracle, "cpu", 0)


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "falcon_h1"])
def test_layers_with_states_are_compiled(family: str, tmp_path: Path) -> None:
    """In place of attention, with gates of what is attended, and beside it."""
    oracle = save_random_model(tmp_path, option_config(family, 0))
    assert_equals_oracle(tmp_path, oracle, "cpu", 0)


def assert_equals_oracle(directory: Path, oracle: PreTrainedModel, backend: str, seed: int) -> None:
    """Tokens and log-probabilities in mixed batches, without a recompile."""
    runner, compiler = compiled_runner(directory, backend)
    assert compiler.num_compilations == 1
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 2, 16, 33, 90]))] for _ in range(5)]
    with torch.compiler.set_stance("fail_on_recompile"):
        tokens, logprobs = greedy_in_a_mixed_batch(StepDriver(runner), prompts, 12, rng)
    for prompt, got_tokens, got_logprobs in zip(prompts, tokens, logprobs, strict=True):
        expected_tokens, expected_logprobs = oracle_greedy(oracle, prompt, 12)
        assert got_tokens == expected_tokens
        assert got_logprobs == pytest.approx(expected_logprobs, abs=1e-4)
    assert (compiler.num_compilations, compiler.num_recompiles) == (1, 0)


def run_steps_of_every_kind(runner: ModelRunner) -> list[dict[int, tuple[int, float | None]]]:
    """Prefix groups; prompts of every length up to 70, of the model's own sizes, and of the most tokens of a step; then
    up to fifteen decode rows, with a prompt beside them or alone. -> the tokens that each step sampled."""
    samples = Samples(StepDriver(runner), 16, seed=1)
    samples.run(4, grouped=True)
    assert samples.num_grouped
    rng = random.Random(0)
    driver, steps = StepDriver(runner, num_blocks=NUM_BLOCKS), []
    slots = iter(range(len(samples.sampled) + 1, NUM_SLOTS + 1))
    for length in (*range(1, 71, 1 if IS_NIGHTLY else 9), 96, 128, 192, 256):
        slot = next(slots)
        driver.open(slot, [rng.randrange(VOCAB_SIZE) for _ in range(length)])
        steps.append(driver.run([], [(slot, length)]))
    decode: list[int] = []
    for slot in itertools.islice(slots, 15):
        driver.open(slot, [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 40))])
        steps.append(driver.run(decode, [(slot, driver.remaining(slot))]))
        decode.append(slot)
    return [*steps, driver.run(decode, [])]


@few(1, "backend", ["cpu", "torch"])
def test_no_step_of_any_shape_is_compiled_after_warm_up(backend: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    runner, compiler = compiled_runner(tmp_path, backend)
    with torch.compiler.set_stance("fail_on_recompile"):
        sampled = run_steps_of_every_kind(runner)
    assert (compiler.num_compilations, compiler.num_recompiles) == (1, 0)
    model, info = load(tmp_path)
    eager = run_steps_of_every_kind(make_runner(model, info, backend, num_blocks=NUM_BLOCKS, num_slots=NUM_SLOTS))
    for step, expected in zip(sampled, eager, strict=True):
        assert step.keys() == expected.keys()
        for slot, (token, logprob) in step.items():
            assert token == expected[slot][0]
            assert logprob == pytest.approx(expected[slot][1], abs=1e-4)


def test_every_forward_runs_the_compiled_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and decode rows together too."""
    compile_graph, calls = Compiler._compile_graph, list[int]()

    def counted(compiler: Compiler, graph: torch.fx.GraphModule, inputs: list[object]) -> Callable[..., object]:
        compiled = compile_graph(compiler, graph, inputs)

        def call(*arguments: object) -> object:
            calls.append(1)
            return compiled(*arguments)

        return call

    monkeypatch.setattr(Compiler, "_compile_graph", counted)
    save_tiny_model(tmp_path, "llama", num_layers=1)
    runner, compiler = compiled_runner(tmp_path, "torch")
    for num_decode, num_prefill in ((0, 1), (1, 0), (2, 3), (7, 1)):
        driver = StepDriver(runner, num_blocks=NUM_BLOCKS)
        slots = range(1, num_decode + num_prefill + 1)
        for slot in slots:
            driver.open(slot, [slot, 5, 6])
        decode, prefill = slots[:num_decode], slots[num_decode:]
        if decode:
            driver.run([], [(slot, 3) for slot in decode])
        calls.clear()
        driver.run(list(decode), [(slot, 3) for slot in prefill])
        assert len(calls) == 1
    assert compiler.num_compilations == 1


def test_sizes_that_are_not_marked_dynamic_cause_recompiles_that_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch._dynamo.decorators.mark_unbacked", lambda *_, **__: None)
    save_tiny_model(tmp_path, "llama", num_layers=1)
    runner, compiler = compiled_runner(tmp_path, "cpu", lambda runner: runner.run(widest_prefill(LIMITS)))
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="recompile"):
        runner.run(single_token(LIMITS))
    runner.run(single_token(LIMITS))
    assert compiler.num_recompiles > 0


def test_a_recompile_is_logged_and_sent_with_its_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny_model(tmp_path, "llama", num_layers=1)
    runner, compiler = compiled_runner(tmp_path, "cpu")
    inputs_in, inputs = make_channel()
    outputs, outputs_out = make_channel()
    for message in (single_token(LIMITS), single_token(LIMITS)):
        inputs.send(message)
    inputs.close()
    torch.set_num_threads(2)  # compiled code has a fixed number of threads
    run_steps(runner, inputs_in, outputs_out, steps_behind=0, carry_out=lambda _: "")
    answers = [outputs.receive(timeout_s=60) for _ in range(2)]
    assert [answer.num_recompiles for answer in answers] == [1, 0]
    assert compiler.num_recompiles == 1
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "compiled again after warm-up" in errors[0].getMessage()


def test_norm_and_lm_head_are_compiled_for_any_number_of_rows_where_they_are_not_packed(tmp_path: Path) -> None:
    """As on CUDA, where nothing is packed."""
    save_tiny_model(tmp_path, "qwen2", tied=False, num_layers=1)
    plain, _ = load(tmp_path)
    model, _ = load(tmp_path)
    compiler = Compiler()
    model.begin_packing(None, compiler=compiler)
    model.end_packing()
    hidden = torch.randn((40, 64), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        model.logits(hidden)
        compiler.end_warm_up()
        for num_rows in (1, 2, 3, 40, 17):
            torch.testing.assert_close(
                model.logits(hidden[:num_rows]), plain.logits(hidden[:num_rows]), rtol=1e-5, atol=1e-5
            )
    assert (compiler.num_compilations, compiler.num_recompiles) == (1, 0)


def test_a_worker_compiles_before_it_is_ready(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", num_layers=1)
    phases: list[PhaseDone] = []
    config = ServerConfig.parse([*FLAGS, "torch_compile=T"])
    worker = start_worker(config, resolve_checkpoint(str(tmp_path)), Mesh(), 0, phases.append)
    assert {done.phase: done.detail for done in phases}["warm-up"] == "compiled functions: 1"
    with torch.compiler.set_stance("fail_on_recompile"):
        assert worker.runner.run(single_token(LIMITS)).num_recompiles == 0


@pytest.mark.long
@pytest.mark.parametrize("_target", ["inductor"], indirect=True)
@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 1", "No working C\\+\\+ compiler found"),
        ('[ "$1" = --version ] && echo g++ || { echo "x.h:1: error: no Python.h" >&2; exit 1; }', "error: no Python.h"),
    ],
)
def test_without_a_working_compiler_the_worker_gives_a_one_line_error(
    script: str, message: str, tmp_path: Path
) -> None:
    from torch._inductor.utils import fresh_cache  # seconds

    compiler = tmp_path / "bad-g++"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    model = tmp_path / "model"
    save_tiny_model(model, "llama", num_layers=1)
    config = ServerConfig.parse([*FLAGS, "torch_compile=T"])
    with (
        fresh_cache(),
        torch._inductor.config.patch({"cpp.cxx": (None, str(compiler))}),
        pytest.raises(UserError, match=f"^torch_compile=T: .*{message}.*$") as caught,
    ):
        start_worker(config, resolve_checkpoint(str(model)), Mesh(), 0, lambda _: None)
    assert "\n" not in str(caught.value)


def test_any_failure_of_the_compiler_is_one_line_that_says_how_to_go_on(tmp_path: Path) -> None:
    """As where Triton finds no ptxas, or one that is too old."""
    save_tiny_model(tmp_path, "llama", num_layers=1)

    def fail(_self: Compiler, _graph: object, _inputs: object) -> Callable[..., object]:
        raise RuntimeError("\nPTXAS error: Internal Triton PTX codegen error\nptxas: sm_99 is unknown")

    with unittest.mock.patch.object(Compiler, "_compile_graph", fail), pytest.raises(UserError) as caught:
        compiled_runner(tmp_path, "torch")
    expected = "cannot compile here, PTXAS error: Internal Triton PTX codegen error; torch_compile=F needs none"
    assert str(caught.value) == f"torch_compile=T: {expected}"


def raise_as_triton() -> None:
    raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable")


raise_in_triton = FunctionType(raise_as_triton.__code__, {**globals(), "__name__": "triton.runtime.build"})

FAILURES: dict[str, tuple[dict[str, object], str]] = {
    "in the compiler": ({"side_effect": RuntimeError("\nPTXAS error: no sm_99\nmore")}, "PTXAS error: no sm_99"),
    "at the first launch": ({"return_value": lambda *_: raise_in_triton()}, "RuntimeError: Failed to find C compiler."),
}


@few(1, "kind", FAILURES)
def test_without_a_compiler_that_nobody_asked_for_all_steps_run_uncompiled(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    oracle = save_tiny_model(tmp_path, "qwen2", tied=False, num_layers=1)
    how, reason = FAILURES[kind]
    compiler = Compiler(is_required=False)
    model, info = load(tmp_path)
    with unittest.mock.patch.object(Compiler, "_compile_graph", **how) as compile_graph:
        model.begin_packing(None, compiler=compiler)  # as on CUDA: the LM head is compiled too
        model.end_packing()
        runner = make_runner(model, info, "torch", num_blocks=NUM_BLOCKS, num_slots=NUM_SLOTS, compiler=compiler)
        whole_warm_up(runner)
        compiler.end_warm_up()
        assert compile_graph.call_count == 1, "one failure is enough"
        assert compiler.describe() == "compiled functions: none"
        prompts = [[3, 4, 5], [7] * 20]
        tokens, _ = greedy_in_a_mixed_batch(StepDriver(runner), prompts, 8, random.Random(0))
        assert runner.run(single_token(LIMITS)).num_recompiles == 0
        assert compile_graph.call_count == 1
    assert tokens == [oracle_greedy(oracle, prompt, 8)[0] for prompt in prompts]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning == (
        f"the layers run uncompiled, which is slower, since torch.compile cannot compile here: {reason}; it needs "
        "Triton and a C compiler, and torch_compile=F does without"
    )


def test_what_fails_uncompiled_too_is_no_failure_of_the_compiler(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model(tmp_path, "llama", num_layers=1)
    compiler = Compiler(is_required=False)
    model, info = load(tmp_path)
    model.pack(None, compiler=compiler)
    runner = make_runner(model, info, "torch", compiler=compiler)
    with (
        unittest.mock.patch.object(TorchBackend, "attend", side_effect=ValueError("attention is broken")),
        pytest.raises(ValueError, match="attention is broken"),
    ):
        runner.run(single_token(LIMITS))
    assert not compiler.has_failed
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_worker_starts_where_compiling_is_the_default_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model(tmp_path, "llama", num_layers=1)
    phases: list[PhaseDone] = []
    monkeypatch.setattr(device, "is_compiled", lambda flag, *_: flag is not False)  # as on CUDA
    with unittest.mock.patch.object(Compiler, "_compile_graph", side_effect=RuntimeError("no Triton")):
        worker = start_worker(ServerConfig.parse(FLAGS), resolve_checkpoint(str(tmp_path)), Mesh(), 0, phases.append)
        assert worker.runner.run(single_token(LIMITS)) is not None
    assert {done.phase: done.detail for done in phases}["warm-up"] == "compiled functions: none"
    (warning,) = [record.getMessage() for record in caplog.records if record.name == compile.__name__]
    assert "cannot compile here: RuntimeError: no Triton; " in warning


def test_a_plain_error_from_the_code_of_triton_is_one_line_too(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", num_layers=1)
    with (
        unittest.mock.patch.object(Compiler, "_compile_graph", return_value=lambda *_: raise_in_triton()),
        pytest.raises(
            UserError, match=r"^torch_compile=T: cannot compile here, RuntimeError: Failed to find C compiler\.; "
        ),
    ):
        compiled_runner(tmp_path, "torch")


@pytest.mark.parametrize(
    ("module", "expected", "message"),
    [
        ("triton.runtime.errors", UserError, "torch_compile=T: cannot compile here, OutOfResources: out of resource"),
        ("somewhere.else", RuntimeError, "out of resource: shared memory"),
    ],
)
def test_a_failure_of_triton_at_the_first_launch_is_one_line_too(
    module: str, expected: type[Exception], message: str, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path, "llama", num_layers=1)
    error = type("OutOfResources", (RuntimeError,), {"__module__": module})

    def launch(*_inputs: object) -> None:
        raise error("out of resource: shared memory, Required: 300000")

    with (
        unittest.mock.patch.object(Compiler, "_compile_graph", return_value=launch),
        pytest.raises(expected, match=f"^{message}"),
    ):
        compiled_runner(tmp_path, "torch")
