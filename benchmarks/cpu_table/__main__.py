"""Measures servers for CPUs with models of six shapes in three formats, in turns: `python -m benchmarks.cpu_table`.

Each server is started once for a model and a round, and gets three loads: one stream, 64 unrelated requests, and 512
samples of one prompt. A figure is given beside what the machine's memory and arithmetic allow.
"""

import argparse
import asyncio
import json
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

import tokasaurus.model  # noqa: F401 - makes thread settings that torch reads on import
from benchmarks.cpu_table.bounds import Load, Machine, loads_of, measure_machine
from benchmarks.cpu_table.models import FORMATS, SHAPES, WeightBytes, num_matrix_weights, write_gguf
from benchmarks.line_plot import LinePlot, write_line_plots
from benchmarks.random_models import NUM_BYTES, ModelShape, write_model
from benchmarks.results import add_result_arguments, begin_results, end_results, make_console
from tokasaurus.commands.bench.client import ServerError
from tokasaurus.commands.bench.config import BenchConfig
from tokasaurus.commands.bench.measure import measure, requests_of
from tokasaurus.commands.bench.peers import program_of, started
from tokasaurus.commands.bench.results import machine_facts
from tokasaurus.monitoring.cores import available_cores

TOKA = "toka"
OPENVINO = "openvino"
SERVERS = (TOKA, "llama.cpp", "vllm", OPENVINO)
_OPENVINO_LOADS = Path(__file__).with_name("openvino_loads.py")
_SLOTS = 64
_SPARE_TOKENS = 2048
_START_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Model:
    """One model as it is stored."""

    name: str
    """In SHAPES."""
    shape: ModelShape
    kind: str
    """One of FORMATS."""
    gguf: Path
    checkpoint: Path | None
    """The same shape in Hugging Face format; bfloat16 without experts only."""
    weight_bytes: WeightBytes

    def path_for(self, server: str) -> Path | None:
        """What the server reads; None if it does not read this format."""
        if server == "vllm":
            return self.checkpoint
        if server == OPENVINO:
            return None if self.kind == "bfloat16" or self.shape.num_experts else self.gguf
        return self.gguf if server == "llama.cpp" or self.checkpoint is None else self.checkpoint


@dataclass(frozen=True, slots=True)
class Measured:
    """One load on one server."""

    shape: str
    kind: str
    load: str
    server: str
    round: int
    tokens_per_s: float
    """Output tokens over the time from the first request to the last answer."""
    share_of_bound: float
    """The least time that the machine allows, over the time taken."""
    command: str


def written_models(directory: Path, names: Sequence[str], kinds: Sequence[str]) -> Iterator[Model]:
    """Each model is there until the next one is asked for. Raises OSError."""
    for name in names:
        for kind in kinds:
            shape, own = SHAPES[name], directory / f"{name}-{kind}"
            own.mkdir()
            try:
                checkpoint = own / "checkpoint" if kind == "bfloat16" and not shape.num_experts else None
                if checkpoint is not None:
                    checkpoint.mkdir()
                    write_model(checkpoint, shape)
                path = own / f"{name}-{kind}.gguf"
                yield Model(name, shape, kind, path, checkpoint, write_gguf(path, shape, kind))
            finally:
                shutil.rmtree(own)


def arguments_of(server: str, load_tokens: int) -> str:
    """Of the command line. load_tokens: that the largest load has in its sequences at once."""
    if server == "llama.cpp":
        threads = available_cores()
        return f"-t {threads} -c {load_tokens} --parallel {_SLOTS} --kv-unified -fa on"
    if server == "vllm":
        return "--dtype bfloat16 --max-model-len 2048 --max-num-seqs 512"
    return ""


def requests_file(path: Path, load: Load, seed: int) -> None:
    """Random tokens that are bytes of printable letters, since these are one token each in every server."""
    letters = range(NUM_BYTES // 4, NUM_BYTES // 3)
    source = random.Random(f"{load.name} {seed}")
    prompts = [
        source.choices(letters, k=load.prompt_tokens) for _ in range(1 if load.has_one_prompt else load.num_requests)
    ]
    body = {"max_tokens": load.output_tokens, "ignore_eos": True, "temperature": 1.0}
    lines = [json.dumps({"prompt": prompts[index % len(prompts)], **body}) for index in range(load.num_requests)]
    path.write_text("\n".join(lines) + "\n")


def measure_server(
    model: Model, server: str, environment: str | None, machine: Machine, number: int, directory: Path
) -> Iterator[Measured]:
    """Each load. Raises ServerError."""
    path = model.path_for(server)
    if path is None:
        return
    loads = loads_of(model.shape)
    files = [directory / f"requests-{index}.jsonl" for index in range(len(loads))]
    for load, file in zip(loads, files, strict=True):
        requests_file(file, load, number)

    def measured(load: Load, tokens: int, seconds: float, command: str) -> Measured:
        share = load.least_seconds(machine, model.shape, model.weight_bytes) / seconds
        return Measured(model.name, model.kind, load.name, server, number, tokens / seconds, share, command)

    if server == OPENVINO:
        assert environment is not None
        command = [str(Path(environment) / "bin" / "python"), str(_OPENVINO_LOADS), str(path), *map(str, files)]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode:
            lines = found.stderr.strip().splitlines() or [f"ended with {found.returncode}"]
            raise ServerError(f"{server}: {lines[-1]}")
        for load, line in zip(loads, found.stdout.splitlines()[-len(loads) :], strict=True):
            one = json.loads(line)
            yield measured(load, one["tokens"], one["seconds"], shlex.join(command))
        return
    tokens = max(_SLOTS * (load.prompt_tokens + load.output_tokens) for load in loads) + _SPARE_TOKENS
    with started(server, str(path), environment, arguments_of(server, tokens), _START_TIMEOUT_S) as address:
        for load, file in zip(loads, files, strict=True):
            config = BenchConfig.parse(["workload=file", f"input={file}", "stream=F", "concurrency=0", "warmup=2"])
            requests = requests_of(config, number)
            run = asyncio.run(measure(config, requests, server, address.base_url, None, number, address.command))
            if run.summary.num_failed:
                error = next(result.error for result in run.requests if result.error is not None)
                raise ServerError(f"{server}, {load.name}: {run.summary.num_failed} requests failed: {error}")
            yield measured(load, run.summary.completion_tokens, run.summary.wall_s, address.command)


def print_table(rows: Sequence[Measured], console: Console) -> None:
    """Medians over rounds, and the median of the ratios within a round."""
    num_cores = available_cores()
    table = Table("model", "format", "load", "server")
    for heading in ("tokens/s", "a core", "of the bound", "toka over it"):
        table.add_column(heading, justify="right")
    for key, by_round in grouped(rows).items():
        shape, kind, load, server = key
        speed = median(row.tokens_per_s for row in by_round.values())
        share = median(row.share_of_bound for row in by_round.values())
        ratios = ratios_to_toka(rows, key)
        ratio = f"{median(ratios):.2f}" if ratios and server != TOKA else ""
        table.add_row(shape, kind, load, server, f"{speed:,.1f}", f"{speed / num_cores:,.1f}", f"{share:.0%}", ratio)
    console.print(table)


Key = tuple[str, str, str, str]


def grouped(rows: Sequence[Measured]) -> dict[Key, dict[int, Measured]]:
    """By shape, format, load and server; then by round."""
    found: dict[Key, dict[int, Measured]] = {}
    for row in rows:
        found.setdefault((row.shape, row.kind, row.load, row.server), {})[row.round] = row
    return dict(sorted(found.items(), key=lambda item: _position(item[0])))


def _position(key: Key) -> tuple[int, int, int, int]:
    shape, kind, load, server = key
    loads = [one.name for one in loads_of(SHAPES[shape])]
    return list(SHAPES).index(shape), FORMATS.index(kind), loads.index(load), SERVERS.index(server)


def ratios_to_toka(rows: Sequence[Measured], key: Key) -> list[float]:
    """This server's time over toka's, of each round that has both."""
    all_rows = grouped(rows)
    ours, theirs = all_rows.get((*key[:3], TOKA), {}), all_rows[key]
    return [ours[number].tokens_per_s / row.tokens_per_s for number, row in theirs.items() if number in ours]


def write_picture(path: Path, rows: Sequence[Measured]) -> None:
    """A plot for each load: tokens/s over the weights, a line for each server and format. Of models without experts."""
    sizes = {name: num_matrix_weights(shape) / 1e9 for name, shape in SHAPES.items() if not shape.num_experts}
    lines: dict[str, dict[str, dict[float, float]]] = {}
    for (shape, kind, load, server), by_round in grouped(rows).items():
        if shape not in sizes:
            continue
        speed = median(row.tokens_per_s for row in by_round.values())
        lines.setdefault(load, {}).setdefault(f"{server} {kind}", {})[sizes[shape]] = speed
    plots = [LinePlot(load, "billions of weights", "tokens/s", of_load) for load, of_load in lines.items()]
    write_line_plots(path, plots)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu_table", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument(
        "--shapes",
        nargs="*",
        choices=SHAPES,
        default=list(SHAPES),
        metavar="NAME",
        help="(none: only show what is added)",
    )
    parser.add_argument("--add", nargs="+", type=Path, default=[], metavar="FILE", help="JSON of earlier runs, to show")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="starts of each server (default: 1)")
    parser.add_argument("--llama-server", metavar="PROGRAM", help="measure llama.cpp's server too")
    parser.add_argument("--vllm", metavar="DIRECTORY", help="measure the vLLM of this environment too; bfloat16 only")
    parser.add_argument("--openvino", metavar="DIRECTORY", help="measure the openvino-genai of this environment too")
    parser.add_argument("--directory", type=Path, metavar="DIRECTORY", help="for the models (default: a temporary one)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write all speeds as an SVG picture")
    add_result_arguments(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 1 if a server could not be measured; what the others measured is kept."""
    args = parse(argv)
    console = make_console(140)
    environments: Mapping[str, str | None] = {
        TOKA: None,
        "llama.cpp": args.llama_server,
        "vllm": args.vllm,
        OPENVINO: args.openvino,
    }
    servers = [name for name in SERVERS if name == TOKA or environments[name] is not None]
    try:
        for name in servers:
            if name != OPENVINO:
                program_of(name, environments[name])
            elif not (Path(args.openvino) / "bin" / "python").is_file():
                raise ServerError(f"{name}: {args.openvino} is no environment with bin/python")
    except ServerError as error:
        console.print(str(error), style="red", markup=False)
        return 2
    results = begin_results(args, machine_facts("torch", "gguf"), console)
    machine = measure_machine()
    read, rate = machine.bytes_per_s / 1e9, machine.operations_per_s / 1e9
    console.print(f"reads {read:.1f} GB/s, multiplies at {rate:,.0f} GFLOP/s")
    rows = [Measured(**row) for file in args.add for row in json.loads(file.read_text())["rows"]]
    failures: list[str] = []
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        for model in written_models(Path(directory), args.shapes, args.formats):
            for number in range(args.rounds):
                for server in servers if number % 2 == 0 else reversed(servers):
                    try:
                        for row in measure_server(
                            model, server, environments[server], machine, number, Path(directory)
                        ):
                            rows.append(row)
                            what = f"{row.shape} {row.kind}, {row.load}, {row.server}"
                            console.print(f"{what}: {row.tokens_per_s:,.1f} tokens/s ({row.share_of_bound:.0%})")
                    except ServerError as error:  # the others may serve this model
                        failures.append(f"{model.name} {model.kind}, {server}: {error}")
                        console.print(failures[-1], style="red", markup=False)
    print_table(rows, console)
    if args.picture is not None and rows:
        write_picture(args.picture, rows)
    found = {"limits": asdict(machine), "rows": rows, "failures": failures}
    return end_results(results | found, (), args, console) or (1 if failures else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
