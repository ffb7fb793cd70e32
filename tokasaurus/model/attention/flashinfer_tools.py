"""What FlashInfer compiles and links its kernels with: CUDA's toolkit, ninja, and libraries that linkers find; which
builds have failed on this machine; and compiling beside a server."""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pickle
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokasaurus.checkpoint import CheckpointError, cache_directory
from tokasaurus.inherited import module_command
from tokasaurus.messages.status import describe_error

FA3 = "fa3"

_TOOLKITS = Path("/usr/local")
"""Where CUDA's toolkits are installed."""

_FLAGS = "FLASHINFER_EXTRA_LDFLAGS"
"""Environment variable with further words for FlashInfer's linker."""

_LINK_S = 60.0
"""Time limit of one attempt to link, in seconds: a busy machine takes long to start a compiler."""

BUILD_FAILED = "Ninja build failed"
"""How FlashInfer's error begins if a compiler or the linker has failed."""
_OF_THE_MOMENT = (
    *("No space left on device", "Disk quota exceeded", "Cannot allocate memory", "out of memory"),
    *("signal 9", "Killed signal"),
)
"""Words of tools that a full disk or a lack of memory has ended."""


def find_cuda(environment: Mapping[str, str], toolkits: Path = _TOOLKITS) -> Path | None:
    """CUDA's toolkit: a directory with nvcc and the runtime's headers; None if there is none.

    FlashInfer takes CUDA_HOME, or else what lies around the nvcc of PATH, which may be a script elsewhere."""
    named = [Path(environment[name]) for name in ("CUDA_HOME", "CUDA_PATH") if environment.get(name)]
    on_path = shutil.which("nvcc", path=environment.get("PATH", ""))
    if on_path is not None:
        named.append(Path(on_path).resolve().parents[1])
    for directory in (*named, toolkits / "cuda", *sorted(toolkits.glob("cuda-*"), reverse=True), *_packaged_toolkits()):
        if (directory / "bin/nvcc").exists() and (directory / "include/cuda_runtime.h").exists():
            return directory
    return None


def _packaged_toolkits() -> Iterator[Path]:
    """Where the extra [cuda] puts nvcc: NVIDIA's packages for Python share one directory for each version of CUDA."""
    spec = importlib.util.find_spec("nvidia")
    for directory in () if spec is None else spec.submodule_search_locations or ():
        yield from sorted(Path(directory).glob("cu*"), reverse=True)


def provide_tools(environment: MutableMapping[str, str], toolkits: Path = _TOOLKITS) -> None:
    """Sets CUDA_HOME, and where its linker needs it, FLASHINFER_EXTRA_LDFLAGS; and adds the folder of this Python's
    programs to PATH if ninja is only there: a program of a virtual environment may run without the environment being
    activated."""
    cuda = find_cuda(environment, toolkits)
    if cuda is not None:
        environment["CUDA_HOME"] = str(cuda)
        _provide_libraries(environment, cuda)
    programs = Path(sys.executable).parent
    if _which_ninja(environment) is None and (programs / "ninja").exists():
        environment["PATH"] = os.pathsep.join(filter(None, (environment.get("PATH"), str(programs))))


def _provide_libraries(environment: MutableMapping[str, str], cuda: Path) -> None:
    """FlashInfer links -lcudart and -lcuda, from lib64 and lib64/stubs of the toolkit. One laid out from NVIDIA's
    packages for Python has neither stubs nor a libcudart.so without a version, so the linker fails after minutes of
    compiling. What it does not find gets a directory in the cache, with links to what this machine has."""
    compiler = shutil.which(environment.get("CXX", "c++"), path=environment.get("PATH", ""))
    if compiler is None:
        return
    missing = [name for name in ("cudart", "cuda") if not _links(name, compiler, environment, cuda)]
    if not missing:
        return
    try:
        directory = cache_directory() / "flashinfer-libraries" / hashlib.sha256(str(cuda).encode()).hexdigest()[:16]
        directory.mkdir(parents=True, exist_ok=True)
        for name in missing:
            _place_library(name, directory, compiler, cuda)
    except (CheckpointError, OSError, subprocess.SubprocessError):
        return  # FlashInfer's own linker tells what is missing
    environment[_FLAGS] = " ".join(filter(None, (environment.get(_FLAGS), shlex.quote(f"-L{directory}"))))


def _links(name: str, compiler: str, environment: Mapping[str, str], cuda: Path) -> bool:
    """Whether a library links with -lNAME, as FlashInfer's would."""
    with tempfile.TemporaryDirectory() as directory:
        command = [compiler, "-shared", "-x", "c++", os.devnull, "-o", f"{directory}/linked.so"]
        command += [f"-L{cuda}/lib64", f"-L{cuda}/lib64/stubs", *shlex.split(environment.get(_FLAGS, "")), f"-l{name}"]
        try:
            done = subprocess.run(command, env={**environment}, capture_output=True, timeout=_LINK_S)
        except (OSError, subprocess.TimeoutExpired):
            return True  # nothing is known
    return done.returncode == 0


def _place_library(name: str, directory: Path, compiler: str, cuda: Path) -> None:
    """Make directory/libNAME.so: a link to the library that this process has loaded, or that the toolkit has under a
    name with a version; else, for the driver's, an empty library of its name, which is enough to link."""
    target = next(iter((*_loaded(name), *_in_toolkit(name, cuda))), None)
    place = directory / f"lib{name}.so"
    unfinished = directory / f".{place.name}.{os.getpid()}"
    unfinished.unlink(missing_ok=True)
    if target is not None:
        unfinished.symlink_to(target)
    elif name == "cuda":
        command = [compiler, "-shared", "-x", "c++", os.devnull, "-o", str(unfinished), "-Wl,-soname,libcuda.so.1"]
        subprocess.run(command, check=True, capture_output=True, timeout=_LINK_S)
    else:
        return
    unfinished.replace(place)


def _loaded(name: str) -> Iterator[Path]:
    """The library as this process has loaded it, by torch for example."""
    with suppress(OSError):  # Linux alone has this file
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = Path(line.partition("/")[1] + line.partition("/")[2])
            if path.name.startswith(f"lib{name}.so") and path.exists():
                yield path


def _in_toolkit(name: str, cuda: Path) -> Iterator[Path]:
    for place in ("lib64", "lib", "targets/*/lib"):
        yield from sorted(cuda.glob(f"{place}/lib{name}.so*"), reverse=True)


def missing_tools(environment: Mapping[str, str], toolkits: Path = _TOOLKITS) -> list[str]:
    """Names of the tools that FlashInfer's compilation lacks, "nvcc" or "ninja". Call after `provide_tools`."""
    found = {"nvcc": find_cuda(environment, toolkits), "ninja": _which_ninja(environment)}
    return [name for name, place in found.items() if place is None]


def _which_ninja(environment: Mapping[str, str]) -> str | None:
    return shutil.which("ninja", path=environment.get("PATH", ""))


def failed_build(environment: Mapping[str, str], kernels: str = "") -> tuple[str, Path] | None:
    """Why FlashInfer, or these kernels of it, could not be built by these tools at an earlier start, and the file that
    says so; None if that was not tried, or can be built. Call after `provide_tools`."""
    place = _place_of_failure(environment, kernels)
    try:
        return None if place is None else (json.loads(place.read_text())["reason"], place)
    except (OSError, ValueError, LookupError, TypeError):
        return None


def note_failed_build(environment: Mapping[str, str], error: Exception, kernels: str = "") -> None:
    """Later starts with the same tools need not try for minutes what will fail again. What may pass is not noted.

    kernels: as in failed_build."""
    if any(words in str(error) for words in _OF_THE_MOMENT):
        return
    place, reason = _place_of_failure(environment, kernels), describe_error(error)
    with suppress(OSError):
        if place is not None:
            place.parent.mkdir(parents=True, exist_ok=True)
            unfinished = place.with_suffix(f".{os.getpid()}")
            unfinished.write_text(json.dumps({"reason": reason}))
            unfinished.replace(place)


def _place_of_failure(environment: Mapping[str, str], kernels: str) -> Path | None:
    """By all that another result could come from. None where the cache has no place."""
    parts = [environment.get(name, "") for name in ("CUDA_HOME", "CXX", _FLAGS, "FLASHINFER_CUDA_ARCH_LIST")]
    parts += [kernels] if kernels else []
    for program in (f"{parts[0]}/bin/nvcc", shutil.which(parts[1] or "c++", path=environment.get("PATH", ""))):
        with suppress(OSError):
            status = Path(program or "").stat()
            parts += [str(program), str(status.st_mtime_ns), str(status.st_size)]
    for package in ("flashinfer-python", "torch", "apache-tvm-ffi"):
        with suppress(importlib.metadata.PackageNotFoundError):
            parts += [package, importlib.metadata.version(package)]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    try:
        return cache_directory() / "flashinfer-failures" / f"{key}.json"
    except CheckpointError:
        return None


_compiling: list[subprocess.Popen[bytes]] = []
"""Their standard input stays open as long as this process lives."""


def compile_beside(spec: Any) -> None:
    """Compile a kernel with the lowest priority, in a process that ends with this one. FlashInfer keeps what is done.

    spec: FlashInfer's JitSpec."""
    nowhere, pickled = subprocess.DEVNULL, pickle.dumps(spec)
    command = module_command("tokasaurus.model.attention.flashinfer_tools")
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True)
    assert process.stdin is not None
    process.stdin.write(pickled)
    process.stdin.flush()
    _compiling.append(process)


def main() -> None:
    """Of that process."""
    from filelock import FileLock

    os.nice(19)
    spec = pickle.load(sys.stdin.buffer)

    def end_with_parent() -> None:
        os.read(sys.stdin.fileno(), 1)  # a buffer that a thread is reading cannot be closed: exit would abort
        os.killpg(0, signal.SIGKILL)  # the compilers too

    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        with FileLock(spec.lock_path, thread_local=False):
            spec.build()
    except RuntimeError as error:
        if str(error).startswith(BUILD_FAILED):
            note_failed_build(os.environ, error, FA3)


if __name__ == "__main__":
    main()
