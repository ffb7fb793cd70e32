"""`toka check`: loads a model, or random weights of its shape, and compares what computes it here with plain torch."""

import json
import logging
import math
import sys
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from tokasaurus.checkpoint import Checkpoint, read_model_info, resolve_checkpoint
from tokasaurus.checkpoint.cache import expand_home
from tokasaurus.checkpoint.info import read_config
from tokasaurus.checkpoint.weight_files import has_weights
from tokasaurus.config import DEMO, ServerConfig
from tokasaurus.flags import flag
from tokasaurus.messages.status import PhaseDone, UserError, first_line
from tokasaurus.monitoring.log_lines import no_status
from tokasaurus.monitoring.log_writer import log_writer, setup_logging
from tokasaurus.monitoring.shortage import LESS_MEMORY, describe_shortage
from tokasaurus.startup_report import StartupReport

if TYPE_CHECKING:  # the functions that need torch import it: the flags are read without it
    from tokasaurus.model.decoder.model import Model
    from tokasaurus.model.decoder.weights import FilledModules
    from tokasaurus.model.worker.self_check import Result
    from tokasaurus.model.worker.start import Start

logger = logging.getLogger(__name__)

_OF_SERVER = (
    *("rope_scaling", "model_impl", "device", "trust_remote_code", "dtype", "kv_cache_dtype", "cpu_isa", "page_size"),
    *("quantization", "quantized_compute"),
    *("max_tokens_per_forward", "max_seqs_per_forward", "max_num_tokens_per_request", "attention_backend"),
    *("max_loras", "torch_compile", "use_cudagraphs", "log_level"),
)


class CheckConfig(ServerConfig, only=_OF_SERVER, heading="flags of the server"):
    """The flags of `toka check`."""

    model: str | None = flag(
        None,
        "as for the server; or for random weights, a config.json or a directory that has no weights beside it",
        none_means="demo",
        heading="check",
    )
    json: bool = flag(
        False, "print a JSON line for the device, for each result as it is found, and for what is switched off"
    )


def check(config: CheckConfig, _words: list[str]) -> int:
    """Run all checks and print their results; returns the exit code: 1 if something is wrong or the model cannot be
    fetched, 2 if it cannot be read, or a flag asks for what does not work here."""
    from tokasaurus.model.cpu.build import kernels_built_ahead
    from tokasaurus.model.parallel.mesh import Mesh
    from tokasaurus.model.worker.entry import load_worker
    from tokasaurus.model.worker.self_check import Checks, Result
    from tokasaurus.model.worker.start import PhaseLog

    setup_logging(config, "check", has_terminal=True)
    report = StartupReport()
    log = PhaseLog(partial(_show_phase, report), partial(report.note_progress, "check"))
    if config.json:
        _print_json({"device": _device_name(config)})
    code, checks = 0, Checks(is_thorough=True, on_result=_print_result if config.json else lambda _: None)
    log_writer().show_status(report.rows)
    try:
        checkpoint, has_weights = _find(config)
        with kernels_built_ahead(
            config, lambda line: print(f"toka check: {line}", file=sys.stderr), report.show_kernels
        ):
            _check_the_rest(load_worker(config, checkpoint, Mesh(), 0, log, None if has_weights else _fill, checks))
    except KeyboardInterrupt:
        print("toka check: stopped", file=sys.stderr)
        return 1
    except UserError as error:
        print(f"toka check: {error}", file=sys.stderr)
        code = error.exit_code
    except Exception as error:  # on a broken machine, of anything; the results so far may say why
        logger.debug("the checks ended early", exc_info=error)
        print(f"toka check: {describe_shortage(error, LESS_MEMORY) or first_line(error)}", file=sys.stderr)
        checks.add(Result("start", None, f"{type(error).__name__}: {first_line(error)}", 0.0))
    finally:
        log_writer().show_status(no_status)
        log_writer().flush_lines()  # before the results, which may go to the same terminal
    if config.json:
        _print_json({"switched_off": checks.switched_off})
    elif checks.results:
        _print_table(config, checks.results)
    return code or int(any(result.failure is not None for result in checks.results))


def _print_json(row: dict[str, object]) -> None:
    """At once: whatever ends this process, what was found is there."""
    print(json.dumps(row), flush=True)


def _print_result(result: "Result") -> None:
    _print_json(_as_json(result))


def _find(config: ServerConfig) -> tuple[Checkpoint, bool]:
    """The model, and whether it has weights. Raises CheckpointError and FlagRefused."""
    scaling, impl = config.rope_scaling, config.model_impl
    if config.model is not None and config.model != DEMO:
        path = expand_home("model", config.model)
        if path.is_file() and path.suffix == ".json":
            return Checkpoint(
                path.parent.name, path.parent, path.parent, read_config(path, rope_scaling=scaling, impl=impl)
            ), False
        if path.is_dir() and not has_weights(path):
            return Checkpoint(path.name, path, path, read_model_info(path, scaling, impl)), False

    def show(line: str) -> None:
        print(f"toka check: {line}", file=sys.stderr)

    checkpoint = resolve_checkpoint(
        config.model, on_phase=show, rope_scaling=scaling, impl=impl, trust_remote_code=config.trust_remote_code
    )
    return checkpoint, True


def _fill(model: "Model", filled: "FilledModules") -> None:
    from tokasaurus.model.decoder.weights import fill_randomly

    fill_randomly(iter(model.weight_shards()), filled.note)


def _check_the_rest(start: "Start") -> None:
    """What the start of a server checks later than its loading, and what it takes for granted."""
    from tokasaurus.model.worker.entry import record_graphs
    from tokasaurus.model.worker.kernel_checks import (
        check_each_kernel,
        check_layers,
        compare_sampling,
        measure_one_call_decode,
    )
    from tokasaurus.model.worker.self_check import NUM_SEQUENCES

    checks, runner, model, kernels = start.checks, start.runner, start.model, start.kernels
    if start.on_cuda and start.info.is_native:
        with start.log("each kernel"):
            check_each_kernel(start.shape, start.decoder, checks)
    if start.compiler is None and start.info.is_native:  # else its layers were checked
        with start.log("layers"):
            check_layers(start)
    if kernels is not None:
        with start.log("sampling"):
            from tokasaurus.model.sampling.sample import sample

            checks.describe_wrong(
                "sampling",
                lambda: compare_sampling(
                    model.vocab_size,
                    model.activation_dtype,
                    start.device,
                    lambda logits, rows: sample(logits, rows, kernels),
                ),
            )
    if runner.decodes_in_one_call:
        with start.log("decode steps"):
            num_blocks = NUM_SEQUENCES + 1  # one is shared
            _allocate(start, num_blocks)
            sizes = start.config.page_size, num_blocks, start.limits
            checks.describe_wrong("decode steps", partial(measure_one_call_decode, runner, *sizes))
    if start.graph_sizes:
        with start.log("CUDA graphs") as details:
            largest, smallest = start.graph_sizes[0], start.graph_sizes[-1]
            _allocate(start, largest + 1)
            start.graph_sizes = sorted({largest, smallest}, reverse=True)
            start.chunk_sizes = start.chunk_sizes[:1]
            start.group_sizes = [size for size in start.group_sizes if size in (largest, smallest)]
            details.append(record_graphs(start))
        runner.drop_graphs()


def _allocate(start: "Start", num_blocks: int) -> None:
    """A KV cache for steps. num_blocks: without the padding block."""
    start.num_blocks = num_blocks
    start.backend.allocate(num_blocks + 1)
    if start.states is not None:
        start.runner.allocate_states(start.states.num_snapshots)
    start.slots.rules.allocate((num_blocks + 1) * start.config.page_size)


def _show_phase(report: StartupReport, phase: PhaseDone) -> None:
    report.forget_process("check")
    detail = f"  {phase.detail}" if phase.detail else ""
    print(f"{phase.phase:<16} {phase.seconds:7.2f} s{detail}", file=sys.stderr)


def _device_name(config: ServerConfig) -> str:
    import torch

    return torch.cuda.get_device_name() if config.device != "cpu" and torch.cuda.is_available() else "the CPU"


def _as_json(result: "Result") -> dict[str, object]:
    measured = result.measured
    error = None if measured is None or not math.isfinite(measured.error) else measured.error
    return {
        "feature": result.feature,
        "name": None if measured is None else measured.name,
        "error": error,
        "allowed": None if measured is None else measured.tolerance,
        "failure": result.failure,
        "seconds": round(result.seconds, 4),
    }


def _print_table(config: ServerConfig, results: list["Result"]) -> None:
    title = f"{'the demo model' if config.model in (None, DEMO) else config.model} on {_device_name(config)}"
    table = Table(title=title, title_justify="left")
    table.add_column("feature")
    table.add_column("compared with plain torch")
    table.add_column("difference", justify="right")
    table.add_column("allowed", justify="right")
    table.add_column("ms", justify="right")
    table.add_column("result")
    for result in results:
        measured = result.measured
        row = [result.feature, "", "", ""]
        if measured is not None:
            row = [result.feature, measured.name, f"{measured.error:.2g}", f"{measured.tolerance:.2g}"]
        verdict = "right" if result.failure is None else "wrong" if measured is not None else "fails"
        table.add_row(*row, f"{1000 * result.seconds:.0f}", verdict)
    console = Console()
    console.print(table)
    for result in results:
        if result.failure is not None:
            console.print(f"{result.feature}: {result.failure}", highlight=False, markup=False, soft_wrap=True)
