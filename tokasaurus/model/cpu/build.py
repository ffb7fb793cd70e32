"""Find the shared libraries of the kernels: prebuilt ones in a wheel, else built from source into the cache.

The sources include no torch headers and the functions take plain pointers: the build takes half as long as with torch's
extension loader, and needs neither ninja nor Python's headers. Does not import torch: the launcher builds in advance.
"""

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tokasaurus.checkpoint import CheckpointError, cache_directory
from tokasaurus.checkpoint.cache import build_once, is_intact, log_damage
from tokasaurus.checkpoint.checksums import is_intact_file
from tokasaurus.model.cpu.isa import INSTRUCTION_SETS, InstructionSet, machine, supported_sets
from tokasaurus.monitoring.cores import available_cores

logger = logging.getLogger(__name__)

_DIRECTORY = Path(__file__).parent
SOURCES = _DIRECTORY / "csrc"
PREBUILT = _DIRECTORY / "prebuilt"
"""Directory of the libraries in a wheel, whose file names are `prebuilt_name`, and of their checksums."""

COMPILE_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fno-math-errno", "-Wno-psabi")
INCLUDE_FLAGS = ("-I", str(SOURCES))
_LINK_FLAGS = ("-shared", "-pthread")
_EXPORTED = "toka_*"
"""Only these symbols are exported. Otherwise two of the libraries in one process would share variables."""

_TOGETHER = (("gemm", "forward"), ("attention", "sampling", "token_logprobs", "touch", "library"))
"""Sources compiled in one compiler call, in this order: for a short source, most of the time goes into headers."""

_FEATURES_SOURCE = SOURCES / "simd" / "cpu_features.cpp"
_BUILD_TIMEOUT_S = 300


class LibraryUnavailable(Exception):
    """There is no kernel library; the message says why, in one line."""


@dataclass(frozen=True, slots=True)
class Library:
    """A shared library and how to build it."""

    name: str
    """Start of its file name."""

    machine: str
    """Architecture it runs on, as `isa.machine()` names it."""

    sources: tuple[Path, ...]
    """C++ files."""

    compiler_flags: tuple[str, ...]
    """In addition to COMPILE_FLAGS."""

    def prebuilt_name(self, suffix: str) -> str:
        """Changes with sources and flags, so that a library built from other sources is never loaded."""
        return f"{self.name}-{_digest(*self._parts())}{suffix}"

    def cache_key(self, compiler: list[str]) -> str:
        version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
        return f"{self.name}-{_digest(*self._parts(), *self.tuning(), *compiler, version, self.machine)}"

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


def find_or_build(library: Library) -> Path:
    """A file that can be loaded. Builds it if needed, or waits while another process builds it.

    Libraries are checked by their checksums: loading one that was cut off would kill the process by SIGBUS.
    Raises LibraryUnavailable.
    """
    if (prebuilt := _find_prebuilt(library)) is not None:
        return prebuilt
    try:
        compiler = find_compiler()
        directory = _cache_place(library, compiler)
        return build_once(directory, lambda to: _build_for_here(library, compiler, to)) / _file_name()
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
    library: Library, compiler: list[str], to: Path, *, tuning: Sequence[str] = (), link_flags: Sequence[str] = ()
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
        with ThreadPoolExecutor(available_cores()) as pool:
            list(pool.map(_run, commands))
        export_flag = f"-Wl,-exported_symbol,_{_EXPORTED}"
        if sys.platform != "darwin":
            exports = Path(scratch) / "exports"
            exports.write_text(f"{{ global: {_EXPORTED}; local: *; }};")
            export_flag = f"-Wl,--version-script={exports}"
        _run([*compiler, *_LINK_FLAGS, export_flag, *map(str, objects), *link_flags, "-o", str(to)])


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


def _build_for_here(library: Library, compiler: list[str], directory: Path) -> None:
    compile_library(library, compiler, directory / _file_name(), tuning=library.tuning())


def _file_name() -> str:
    return "kernels.dylib" if sys.platform == "darwin" else "kernels.so"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _run(command: list[str]) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True, timeout=_BUILD_TIMEOUT_S)


def _reason(error: Exception) -> str:
    """The first line of a compiler's output that contains "error", else the first line."""
    lines = str(getattr(error, "stderr", None) or error).strip().splitlines() or [repr(error)]
    return next((line for line in lines if "error" in line), lines[0])


if __name__ == "__main__":
    # The launcher runs this to build in advance: `python -m tokasaurus.model.cpu.build INSTRUCTION_SET_NAME`.
    find_or_build(next(kernel_library(level) for level in INSTRUCTION_SETS if level.name == sys.argv[1]))
