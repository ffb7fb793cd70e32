"""Compiles what a default start asks FlashInfer for, for an H100, without a GPU: `make test-flashinfer-build`.

The modules come from `flashinfer_modules`, and ninja and nvcc build them as FlashInfer does. What is built stays in
.venv-flashinfer/build, so that the next call goes on with the file that the last one was cut at.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tokasaurus.model.attention.flashinfer_tools import find_cuda, provide_tools

ROOT = Path(__file__).parents[4]
PACKAGES = ROOT / ".venv-flashinfer"
VERSIONS = ("0.6.18.post1", "0.7.2.post1")
FAILED, NOT_ALL_BUILT = 1, 6
"""Exit codes; the second if nothing failed, but time was up."""
ARCHITECTURE = "9.0a"
_NAME = re.compile(r"batch_(prefill|decode)_with_kv_cache_dtype_q_(\w+?)_.*head_dim_qk_(\d+)_")
_FUNCTIONS = {"prefill": ("plan", "paged_run"), "decode": ("plan", "run")}
"""What the wrappers call of each kind of module."""


@dataclass(frozen=True, slots=True)
class Module:
    name: str
    directory: Path
    """With ninja's file."""
    library: Path
    files: int
    heads: list[str]
    """Query heads / KV heads / head size of the starts that ask for it."""

    @property
    def short_name(self) -> str:
        kind, dtype, head_dim = _NAME.match(self.name).groups()  # type: ignore[union-attr]
        return f"{kind} {dtype} head size {head_dim} ({', '.join(dict.fromkeys(self.heads))})"


def build_environment(build: Path) -> dict[str, str]:
    """As a start has it, with ninja of `needs`, and what is built in `build`."""
    path = os.pathsep.join((str(PACKAGES / "ninja/bin"), os.environ.get("PATH", "")))
    environment = os.environ | {
        "PATH": path,
        "FLASHINFER_CUDA_ARCH_LIST": ARCHITECTURE,
        "FLASHINFER_WORKSPACE_BASE": str(build),
    }
    provide_tools(environment)
    return environment


def find_modules(version: str, build: Path, environment: Mapping[str, str]) -> list[Module]:
    """In a process of its own, since both packages have the same name."""
    words = ["tests.model.attention.helpers.flashinfer_modules", str(PACKAGES / version), str(PACKAGES / "needs")]
    command = [sys.executable, "-m", *words, str(build)]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return [
        Module(name, Path(row["directory"]), Path(row["library"]), row["files"], row["heads"])
        for name, row in found.items()
    ]


def build_module(module: Module, environment: Mapping[str, str], jobs: int, deadline_s: float) -> int | None:
    """ninja's exit code, or None if time is up (by time.monotonic()): then what is compiled so far stays."""
    command = ["ninja", "-j", str(jobs), "-C", str(module.directory), "-f", "build.ninja"]
    log = module.directory / "ninja.out"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            return process.wait(timeout=max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)  # ninja removes what is half written
            process.wait()


def compile_seconds(directory: Path) -> dict[str, float]:
    """Of each file that ninja has built there, whichever call did it."""
    seconds = {}
    for line in (directory / ".ninja_log").read_text().splitlines():
        if not line.startswith("#"):
            began, ended, _, output, _ = line.split("\t")
            seconds[Path(output).name] = (int(ended) - int(began)) / 1000
    return seconds


def load_error(module: Module, cuda: Path) -> str | None:
    """Loads the library as FlashInfer does, in a process of its own, and looks up what the wrappers call. One line if
    that fails."""
    kind = _NAME.match(module.name).group(1)  # type: ignore[union-attr]
    program = (
        "import sys, tvm_ffi\n"
        "module = tvm_ffi.load_module(sys.argv[1])\n"
        "for name in sys.argv[2:]: module.get_function(name)"
    )
    folders = (str(cuda / "lib64"), str(cuda / "lib"), os.environ.get("LD_LIBRARY_PATH", ""))
    libraries = os.pathsep.join(filter(None, folders))
    environment = os.environ | {"PYTHONPATH": str(PACKAGES / "needs"), "LD_LIBRARY_PATH": libraries}
    command = [sys.executable, "-c", program, str(module.library), *_FUNCTIONS[kind]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stderr.strip().rpartition("\n")[2]


def main(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="Compile FlashInfer's modules of a default start for sm_90a.")
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"default: {' '.join(VERSIONS)}")
    parser.add_argument("--minutes", type=float, default=60.0, help="then it stops, and can be called again (60)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="files at once (all cores)")
    args = parser.parse_args(argv)
    deadline_s = time.monotonic() + 60 * args.minutes
    cuda = find_cuda(os.environ)
    if cuda is None:
        print("skipped: no nvcc with its headers, neither in CUDA_HOME nor on PATH nor in /usr/local/cuda*")
        return 0
    codes = [build_version(version, cuda, args.jobs, deadline_s) for version in args.versions or VERSIONS]
    return next((code for code in (FAILED, NOT_ALL_BUILT) if code in codes), 0)


def build_version(version: str, cuda: Path, jobs: int, deadline_s: float) -> int:
    """Returns the exit code."""
    build = PACKAGES / "build" / version
    environment = build_environment(build)
    modules = find_modules(version, build, environment)
    print(f"FlashInfer {version}: {len(modules)} modules for sm_{ARCHITECTURE.replace('.', '')} by {cuda}", flush=True)
    code = 0
    for number, module in enumerate(modules, 1):
        print(f"[{number}/{len(modules)}] {module.short_name}: {module.files} files", flush=True)
        ninja_code = build_module(module, environment, jobs, deadline_s)
        if ninja_code is None:
            print(f"  time is up with {len(compile_seconds(module.directory))} outputs; call it again to go on")
            return code or NOT_ALL_BUILT
        if ninja_code:
            print((module.directory / "ninja.out").read_text()[-3000:])
            print(f"  failed, ninja's exit code {ninja_code}")
            code = FAILED
            continue
        if (error := load_error(module, cuda)) is not None:
            print(f"  cannot be loaded: {error}")
            code = FAILED
        seconds = compile_seconds(module.directory)
        size = module.library.stat().st_size / (1 << 20)
        print(
            f"  compiled: {sum(seconds.values()):.0f} s, the longest file {max(seconds.values()):.0f} s; {size:.1f} MiB"
        )
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
