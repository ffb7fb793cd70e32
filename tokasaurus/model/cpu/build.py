"""The kernel libraries: which instruction sets this machine has, finding a library or building it, and building ahead.

A library comes prebuilt in a wheel, or is built from source into the cache. The sources include no torch headers and
the functions take plain pointers: the build takes half as long as with torch's extension loader, and needs neither
ninja nor Python's headers. Does not import torch: the launcher builds in advance.

Commands: `python -m tokasaurus.model.cpu.build INSTRUCTION_SET_NAME` builds one library into the cache;
`python -m tokasaurus.model.cpu.build prebuilt [MACHINE_NAME ...]`, run by `make wheel`, builds those of a wheel.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tokasaurus.checkpoint import CheckpointError, cache_directory
from tokasaurus.checkpoint.cache import build_once, cache_key, is_intact, is_intact_file, log_damage, write_checksums
from tokasaurus.inherited import module_command
from tokasaurus.messages.status import FlagRefused
from tokasaurus.monitoring.cores import available_cores

if TYPE_CHECKING:
    from tokasaurus.config import ServerConfig

logger = logging.getLogger(__name__)

PLAIN_TORCH = "torch"
"""The value of cpu_isa that uses no kernels."""

_DIRECTORY = Path(__file__).parent
SOURCES = _DIRECTORY / "csrc"
PREBUILT = _DIRECTORY / "prebuilt"
"""Directory of the libraries in a wheel, whose file names are `prebuilt_name`, and of their checksums."""

COMPILE_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fno-math-errno", "-Wno-psabi")
INCLUDE_FLAGS = ("-I", str(SOURCES))
_LINK_FLAGS = ("-shared", "-pthread")
# The C++ library is linked statically: other distributions may have another version, or none. Of it, only what is used:
# the rest, and the static libgcc, need functions that only the newest C libraries have.
_PREBUILT_LINK_FLAGS = ("-static-libstdc++", "-Wl,--gc-sections")
_EXPORTED = "toka_*"
"""Only these symbols are exported. Otherwise two of the libraries in one process would share variables."""

_TOGETHER = (("gemm", "forward", "decode_step"), ("attention", "sampling", "token_logprobs", "touch", "library"))
"""Sources compiled in one compiler call, in this order: for a short source, most of the time goes into headers."""

_FEATURES_SOURCE = SOURCES / "simd" / "cpu_features.cpp"
_BUILD_TIMEOUT_S = 300

_CUDA_DEVICE = Path("/dev/nvidia0")

_WHEEL = "prebuilt"
"""The command's argument for the libraries of a wheel."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """An instruction set with a kernel library of its own."""

    name: str
    """Name of the library."""

    cpu_isa: str
    """The value of the cpu_isa flag that selects it."""

    machine: str
    """Architecture, as returned by `machine()`."""

    compiler_flags: tuple[str, ...]
    """Flags that let the compiler use these instructions."""

    features: frozenset[str]
    """Features that the processor must have, named as in cpu_features.cpp."""

    @property
    def multiplies_bfloat16(self) -> bool:
        """Whether it has bfloat16 dot products; emulated ones are slower than float32 dot products."""
        return not self.features.isdisjoint(("avx512bf16", "bf16"))


_AVX2 = frozenset({"avx2", "fma", "bmi", "bmi2", "f16c", "lzcnt", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_NEON = frozenset({"neon"})

INSTRUCTION_SETS = (
    InstructionSet(
        *("amx", "amx", "x86_64"),
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        _AVX512 | {"avx512bf16", "avx512vnni", "amx_tile", "amx_bf16", "amx_int8"},
    ),
    InstructionSet(
        *("avx512_bf16", "avx512_bf16", "x86_64"),
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
        _AVX512 | {"avx512bf16", "avx512vnni"},
    ),
    InstructionSet(
        *("avx512_vnni", "avx512_vnni", "x86_64"), ("-march=x86-64-v4", "-mavx512vnni"), _AVX512 | {"avx512vnni"}
    ),
    InstructionSet("avx512", "avx512", "x86_64", ("-march=x86-64-v4",), _AVX512),
    InstructionSet("avx2_vnni", "avx2_vnni", "x86_64", ("-march=x86-64-v3", "-mavxvnni"), _AVX2 | {"avxvnni"}),
    InstructionSet("avx2", "avx2", "x86_64", ("-march=x86-64-v3",), _AVX2),
    InstructionSet("neon_bf16", "neon", "aarch64", ("-march=armv8.2-a+bf16+i8mm",), _NEON | {"bf16", "i8mm"}),
    InstructionSet("neon", "neon", "aarch64", (), _NEON),
)
"""Instruction sets; for each machine, the best comes first."""

MACHINES = tuple(dict.fromkeys(level.machine for level in INSTRUCTION_SETS))


def machine() -> str:
    """The processor's architecture; the name is the same on every operating system."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def supported_sets(machine_name: str, features: Iterable[str]) -> tuple[InstructionSet, ...]:
    """The instruction sets that a processor with these features can run, the best first."""
    have = frozenset(features)
    return tuple(level for level in INSTRUCTION_SETS if level.machine == machine_name and level.features <= have)


def choose_set(cpu_isa: str | None, supported: tuple[InstructionSet, ...]) -> InstructionSet | None:
    """The best of `supported` that cpu_isa selects (None: any); None for plain torch.

    Raises FlagRefused if cpu_isa is not supported.
    """
    if cpu_isa == PLAIN_TORCH:
        return None
    if cpu_isa is None:
        return supported[0] if supported else None
    chosen = next((level for level in supported if level.cpu_isa == cpu_isa), None)
    if chosen is None:
        allowed = dict.fromkeys([*(level.cpu_isa for level in supported), PLAIN_TORCH])
        raise FlagRefused(f"cpu_isa={cpu_isa}: this processor does not have it; allowed are {', '.join(allowed)}")
    return chosen


OnUnit = Callable[[int, int], None]
"""Told how many parts of a library are compiled, and how many it has."""


def _ignore_unit(_num_done: int, _num_total: int) -> None: ...


class LibraryUnavailable(Exception):
    """There is no kernel library; the message says why, in one line."""


@dataclass(frozen=True, slots=True)
class Library:
    """A shared library and how to build it."""

    name: str
    """Start of its file name."""

    machine: str
    """Architecture it runs on, as `machine()` names it."""

    sources: tuple[Path, ...]
    """C++ files."""

    compiler_flags: tuple[str, ...]
    """Compiler flags in addition to COMPILE_FLAGS."""

    def prebuilt_name(self, suffix: str) -> str:
        """Changes with sources and flags, so that a library built from other sources is never loaded."""
        return f"{self.name}-{cache_key(*self._parts())}{suffix}"

    def cache_key(self, compiler: list[str]) -> str:
        version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
        return f"{self.name}-{cache_key(*self._parts(), *self.tuning(), *compiler, version, self.machine)}"

    def tuning(self) -> list[str]:
        """Flags that optimise for this processor; the code still runs on others with the same instruction set."""
        return ["-mtune=native"] if self.machine == machine() == "x86_64" else []

    def _parts(self) -> list[str]:
        flags = (*COMPILE_FLAGS, *_LINK_FLAGS, _EXPORTED, *self.compiler_flags)
        return [*flags, *(path.read_text() for path in (*self.sources, *sorted(SOURCES.rglob("*.h"))))]


def kernel_library(level: InstructionSet) -> Library:
    sources = sorted(path for path in SOURCES.rglob("*.cpp") if path != _FEATURES_SOURCE)
    return Library(level.name, level.machine, tuple(sources), level.compiler_flags)


def features_library(machine_name: str) -> Library:
    return Library(f"cpu_features_{machine_name}", machine_name, (_FEATURES_SOURCE,), ())


def machine_sets() -> tuple[InstructionSet, ...]:
    """The instruction sets that this machine supports, the best first. Raises LibraryUnavailable."""
    if not any(level.machine == machine() for level in INSTRUCTION_SETS):
        return ()
    return supported_sets(machine(), processor_features())


def processor_features() -> list[str]:
    """Features of this machine's processor, named as in cpu_features.cpp. Raises LibraryUnavailable."""
    library = ctypes.CDLL(str(find_or_build(features_library(machine()))))
    library.toka_cpu_features.restype = ctypes.c_char_p
    features: str = library.toka_cpu_features().decode()
    return features.split()


def find_or_build(library: Library, on_unit: OnUnit = _ignore_unit) -> Path:
    """A file that can be loaded. Builds it if needed, or waits while another process builds it.

    Libraries are checked by their checksums: loading one that was cut off would kill the process by SIGBUS.
    Raises LibraryUnavailable.
    """
    if (prebuilt := _find_prebuilt(library)) is not None:
        return prebuilt
    try:
        compiler = find_compiler()
        directory = _cache_place(library, compiler)
        return build_once(directory, lambda to: _build_for_here(library, compiler, to, on_unit)) / _file_name()
    except (OSError, CheckpointError, subprocess.SubprocessError) as error:
        raise LibraryUnavailable(_reason(error)) from error


def is_there(library: Library) -> bool:
    """Whether the library exists, so that `find_or_build` need not build it; logs damage. Raises LibraryUnavailable."""
    try:
        if _find_prebuilt(library) is not None:
            return True
        place = _cache_place(library, find_compiler())
        log_damage(place)  # here, since the log of the process that builds it ahead is not shown
        return is_intact(place)
    except (OSError, subprocess.SubprocessError) as error:
        raise LibraryUnavailable(_reason(error)) from error


def compile_library(
    library: Library,
    compiler: list[str],
    to: Path,
    on_unit: OnUnit = _ignore_unit,
    *,
    tuning: Sequence[str] = (),
    link_flags: Sequence[str] = (),
) -> None:
    """Compile and link the library into the file `to`, with one concurrent compiler call per core.

    tuning: compiler flags that do not change the instruction set. Raises OSError and subprocess.SubprocessError.
    """
    # Not next to `to`: if this process is killed, its compilers may still write files, which nothing would delete.
    with tempfile.TemporaryDirectory(prefix="toka-kernels-") as scratch:
        compile_command = [*compiler, *COMPILE_FLAGS, *INCLUDE_FLAGS, *library.compiler_flags, *tuning]
        commands, objects = [], []
        for sources in _translation_units(library.sources):
            unit = Path(scratch) / sources[0].name
            unit.write_text("".join(f'#include "{source}"\n' for source in sources))
            objects.append(unit.with_suffix(".o"))
            commands.append([*compile_command, "-c", str(unit), "-o", str(objects[-1])])
        on_unit(0, len(commands))
        with ThreadPoolExecutor(available_cores()) as pool:
            compiled = [pool.submit(_run, command) for command in commands]
            for number, future in enumerate(as_completed(compiled), start=1):
                future.result()
                on_unit(number, len(commands))
        export_flag = f"-Wl,-exported_symbol,_{_EXPORTED}"
        if sys.platform != "darwin":
            exports = Path(scratch) / "exports"
            exports.write_text(f"{{ global: {_EXPORTED}; local: *; }};")
            export_flag = f"-Wl,--version-script={exports}"
        _run([*compiler, *_LINK_FLAGS, export_flag, *map(str, objects), *link_flags, "-o", str(to)])


@contextmanager
def kernels_built_ahead(
    config: ServerConfig, show_progress: Callable[[str], None], on_unit: OnUnit = _ignore_unit
) -> Iterator[None]:
    """Inside, a process builds the kernels that the workers will need, unless they exist; it is killed at the end.

    A worker waits for the build. If it fails, the worker reports the error. on_unit: called by a thread.

    Raises UserError if the processor lacks the instruction set that config.cpu_isa names.
    """
    name = _missing_library(config)
    if name is None:
        yield
        return
    show_progress("compiling the CPU kernels, at the first start only")
    # In its own session, so that its compilers can be killed with it. Temporary files lie where this process has them.
    command = [*module_command(__name__), name]
    environment = {**os.environ, "TMPDIR": tempfile.gettempdir()}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, env=environment, text=True
    )
    assert process.stdout is not None
    reader = threading.Thread(target=_read_units, args=(process.stdout, on_unit), name="kernels", daemon=True)
    reader.start()
    try:
        yield
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        reader.join()


def _read_units(output: IO[str], on_unit: OnUnit) -> None:
    """What `_print_unit` has printed."""
    with output:
        for line in output:
            num_done, num_total = line.split()
            on_unit(int(num_done), int(num_total))


def _print_unit(num_done: int, num_total: int) -> None:
    print(num_done, num_total, flush=True)


def _missing_library(config: ServerConfig) -> str | None:
    """The name of the instruction set to build for; None if no build is needed or possible."""
    may_use_cuda = config.device == "cuda" or (config.device is None and _CUDA_DEVICE.exists())
    if may_use_cuda or config.cpu_isa == PLAIN_TORCH:
        return None
    try:
        level = choose_set(config.cpu_isa, machine_sets())
        return None if level is None or is_there(kernel_library(level)) else level.name
    except LibraryUnavailable:
        return None


def build_prebuilt(machine_names: Iterable[str] = MACHINES) -> None:
    """Compile the libraries of a wheel: for every instruction set of these architectures, as far as a compiler for it
    is installed.

    They need the C library (glibc) of about this machine's version or a newer one; elsewhere, kernels are compiled from
    source. Raises LibraryUnavailable and subprocess.CalledProcessError.
    """
    shutil.rmtree(PREBUILT, ignore_errors=True)
    PREBUILT.mkdir()
    for machine_name in machine_names:
        compiler = find_compiler() if machine_name == machine() else _find_cross_compiler(machine_name)
        if compiler is None:
            continue
        levels = [level for level in INSTRUCTION_SETS if level.machine == machine_name]
        for library in (features_library(machine_name), *map(kernel_library, levels)):
            _prebuild(library, compiler)
    write_checksums(PREBUILT)


def _prebuild(library: Library, compiler: list[str]) -> None:
    is_linux = sys.platform == "linux"
    path = PREBUILT / library.prebuilt_name(".so" if is_linux else ".dylib")
    compile_library(library, compiler, path, link_flags=list(_PREBUILT_LINK_FLAGS) if is_linux else [])
    print(f"{path.name}: {path.stat().st_size / 2**10:.0f} KiB")


def _find_cross_compiler(machine_name: str) -> list[str] | None:
    command = f"{machine_name}-linux-gnu-g++"
    if sys.platform == "linux" and shutil.which(command) is not None:
        return [command]
    print(f"no kernels for {machine_name}: {command} is not installed, or this system is not Linux")
    return None


def _translation_units(sources: Sequence[Path]) -> list[list[Path]]:
    by_name = {source.stem: source for source in sources}
    together = [[by_name.pop(name) for name in names if name in by_name] for names in _TOGETHER]
    alone = [[source] for source in by_name.values()]
    return [*alone, *filter(None, together)]


def find_compiler() -> list[str]:
    """The command of a C++ compiler for this machine: CXX, which may have several words, else one of the usual names.

    Raises LibraryUnavailable.
    """
    commands = [shlex.split(os.environ.get("CXX", "")), ["g++"], ["c++"], ["clang++"]]
    for command in commands:
        if command and shutil.which(command[0]):
            return command
    raise LibraryUnavailable("no C++ compiler found (set CXX)")


def _find_prebuilt(library: Library) -> Path | None:
    path = PREBUILT / library.prebuilt_name(Path(_file_name()).suffix)
    if not path.exists():
        return None
    if not is_intact_file(path):
        logger.warning("%s is damaged or has no checksum; using kernels compiled from source instead", path)
        return None
    try:
        ctypes.CDLL(str(path))
    except OSError:  # built on a system with a newer C library
        return None
    return path


def _cache_place(library: Library, compiler: list[str]) -> Path:
    return cache_directory() / "kernels" / library.cache_key(compiler)


def _build_for_here(library: Library, compiler: list[str], directory: Path, on_unit: OnUnit) -> None:
    compile_library(library, compiler, directory / _file_name(), on_unit, tuning=library.tuning())


def _file_name() -> str:
    return "kernels.dylib" if sys.platform == "darwin" else "kernels.so"


def _run(command: list[str]) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True, timeout=_BUILD_TIMEOUT_S)


def _reason(error: Exception) -> str:
    """The first line of a compiler's output that contains "error", else the first line."""
    lines = str(getattr(error, "stderr", None) or error).strip().splitlines() or [repr(error)]
    return next((line for line in lines if "error" in line), lines[0])


def _main(name: str, machine_names: list[str]) -> None:
    if name != _WHEEL:  # run by kernels_built_ahead
        level = next(level for level in INSTRUCTION_SETS if level.name == name)
        find_or_build(kernel_library(level), _print_unit)
        return
    try:
        build_prebuilt(machine_names or MACHINES)
    except LibraryUnavailable as error:
        sys.exit(str(error))
    except subprocess.CalledProcessError as error:
        sys.exit(error.stderr)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2:])
