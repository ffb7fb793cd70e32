"""Compile the libraries for a wheel: `python -m tokasaurus.model.cpu.prebuild`, run by `make wheel`.

Compiles for every instruction set of this machine's architecture and, where a cross compiler is installed, of others.
The libraries need a C library (glibc) at least as new as this machine's; elsewhere, kernels are compiled from source.
"""

import shutil
import subprocess
import sys

from tokasaurus.checkpoint.checksums import write_checksums
from tokasaurus.model.cpu.build import (
    PREBUILT,
    Library,
    LibraryUnavailable,
    compile_library,
    features_library,
    find_compiler,
    kernel_library,
)
from tokasaurus.model.cpu.isa import INSTRUCTION_SETS, machine


def main() -> None:
    shutil.rmtree(PREBUILT, ignore_errors=True)
    PREBUILT.mkdir()
    for machine_name in dict.fromkeys(level.machine for level in INSTRUCTION_SETS):
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
    # Link the C++ library statically: other distributions may have another version, or none.
    compile_library(library, compiler, path, link_flags=["-static-libstdc++", "-static-libgcc"] if is_linux else [])
    print(f"{path.name}: {path.stat().st_size / 2**10:.0f} KiB")


def _find_cross_compiler(machine_name: str) -> list[str] | None:
    command = f"{machine_name}-linux-gnu-g++"
    if sys.platform == "linux" and shutil.which(command) is not None:
        return [command]
    print(f"no kernels for {machine_name}: {command} is not installed, or this system is not Linux")
    return None


if __name__ == "__main__":
    try:
        main()
    except LibraryUnavailable as error:
        sys.exit(str(error))
    except subprocess.CalledProcessError as error:
        sys.exit(error.stderr)
