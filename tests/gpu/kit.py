"""`make gpu-kit`: one folder with what a machine with a GPU and no package registry lacks.

It has wheels pinned to the versions of this environment, which the project's requirements resolved to, the project as
a wheel, FlashInfer, and an install script that replaces nothing that the machine has. Tests and benchmarks run from a
checkout beside it. The wheels are stored in one xz archive, two thirds as large as the wheels that pip downloads.
"""

import argparse
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[2]
MAX_MIB = 50.0
OF_THE_MACHINE = frozenset({"torch", "triton", "numpy", "hf-xet", "setuptools"})
"""Never carried: they are large, and come with the machine's PyTorch or are not needed without a network."""
ROOTS = (
    "tokasaurus",
    "flashinfer-python==0.6.18.post1",
    "apache-tvm-ffi==0.1.15.post2",
    "nvidia-ml-py",
    "ninja",  # FlashInfer builds its kernels by it
    "requests",
    "tabulate",
    "tqdm",
    "pytest",
    "pytest-timeout",
    "hypothesis",  # tests/conftest.py
    "httpx",
    "aiohttp",
)
"""The project, and what tests/gpu, benchmarks/gpu and FlashInfer import. The rest of what FlashInfer's package asks for
is for kernels that the server does not use."""
NOT_FOLLOWED = frozenset({"flashinfer-python", "apache-tvm-ffi"})
_PROJECT = "tokasaurus"
_PLATFORMS = ("manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64", "linux_x86_64")
_GLIBC_MINORS = range(5, 36)


def find_requirements(roots: Iterable[str], python: str) -> dict[str, SpecifierSet]:
    """What the roots need, directly or not, by name, with the versions that all of them accept."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "os_name": "posix",
    }
    found: dict[str, SpecifierSet] = {}
    pending = [Requirement(root) for root in roots]
    seen: set[str] = set()
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        if name in OF_THE_MACHINE:
            continue
        found[name] = found.get(name, SpecifierSet()) & requirement.specifier
        key = f"{name} {sorted(requirement.extras)}"
        if key in seen or name in NOT_FOLLOWED:
            continue
        seen.add(key)
        extras = ["", *requirement.extras]
        pending += [
            needed
            for needed in map(Requirement, _requires(name))
            if needed.marker is None or any(needed.marker.evaluate(environment | {"extra": extra}) for extra in extras)
        ]
    return found


def _requires(name: str) -> Sequence[str]:
    try:
        return distribution(name).requires or ()
    except PackageNotFoundError:
        return ()


def pin(name: str, accepted: SpecifierSet) -> str:
    """The version of this environment; what is not installed here is left to pip."""
    try:
        version = distribution(name).version
    except PackageNotFoundError:
        return f"{name}{accepted}"
    return f"{name}=={version}" if version in accepted else f"{name}{accepted}"


def fetch(pins: Sequence[str], python: str, folder: Path) -> None:
    """Downloads wheels for Linux on x86-64. Raises CalledProcessError."""
    platforms = [*_PLATFORMS, *(f"manylinux_2_{minor}_x86_64" for minor in _GLIBC_MINORS)]
    abi = "cp" + python.replace(".", "")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "--dest", str(folder)]
    command += [word for name in (abi, "abi3", "none") for word in ("--abi", name)]
    command += [word for name in platforms for word in ("--platform", name)]
    subprocess.run([*command, *pins], check=True)


def build_project(folder: Path) -> None:
    """The project's wheel without compiled kernels, which are the CPU's. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory)
        ignored = shutil.ignore_patterns("__pycache__", "prebuilt")
        shutil.copytree(ROOT / _PROJECT, source / _PROJECT, ignore=ignored)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder)]
        subprocess.run([*command, str(source)], check=True)


def pack(wheels: Path, archive: Path) -> None:
    """All wheels, without the compression of their own, which would hide from xz what they have in common."""
    with tarfile.open(archive, "w:xz", preset=1) as tar:
        for path in sorted(wheels.glob("*.whl")):
            stored = io.BytesIO()
            with zipfile.ZipFile(path) as packed, zipfile.ZipFile(stored, "w", zipfile.ZIP_STORED) as plain:
                for item in packed.infolist():
                    entry = zipfile.ZipInfo(item.filename, item.date_time)
                    entry.external_attr = item.external_attr
                    plain.writestr(entry, packed.read(item))
            info = tarfile.TarInfo(path.name)
            info.size = stored.tell()
            stored.seek(0)
            tar.addfile(info, stored)


def write_lists(wheels: Path, folder: Path, accepted: dict[str, SpecifierSet]) -> None:
    """requirements.txt, what the install script accepts instead, and the script."""
    pins = {}
    for wheel in sorted(wheels.glob("*.whl")):
        name, version, _, _ = parse_wheel_filename(wheel.name)
        pins[str(name)] = str(version)
    (folder / "requirements.txt").write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
    accepts = {name: {"version": version, "accepted": str(accepted[name])} for name, version in pins.items()}
    (folder / "accepted.json").write_text(json.dumps(accepts, indent=1) + "\n")
    shutil.copy(Path(__file__).with_name("kit_install.py"), folder / "install.py")


def sizes_mib(folder: Path) -> dict[str, float]:
    """By file, the largest first."""
    sizes = {path.name: path.stat().st_size / 2**20 for path in folder.iterdir()}
    return dict(sorted(sizes.items(), key=lambda pair: -pair[1]))


def report(wheels: dict[str, float], kit: dict[str, float], max_mib: float) -> int:
    """Prints the sizes of the wheels as pip downloads them, and of the kit; returns the exit code."""
    for name, size in wheels.items():
        if size >= 0.5:
            print(f"{size:6.1f} MiB  {name}")
    print(f"{sum(wheels.values()):6.1f} MiB  in {len(wheels)} wheels")
    total = sum(kit.values())
    print(f"{total:6.1f} MiB  the kit")
    if total <= max_mib:
        return 0
    print(f"the kit may have {max_mib:g} MiB; the largest wheels are {', '.join(list(wheels)[:3])}", file=sys.stderr)
    return 1


def main(argv: Sequence[str]) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.kit", description="Makes the kit; see docs/gpu.md.")
    parser.add_argument("--python", default="3.12", help="Python version of the machine (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / "gpu-kit", metavar="FOLDER", help="replaced as a whole")
    parser.add_argument("--max-mib", type=float, default=MAX_MIB, help="largest kit (default: %(default)g)")
    args = parser.parse_args(argv)
    folder: Path = args.output
    if folder.exists() and not (folder / "accepted.json").exists() and any(folder.iterdir()):
        parser.error(f"{folder} has other files than a kit's, and is not replaced")
    folder.parent.mkdir(parents=True, exist_ok=True)
    accepted = find_requirements(ROOTS, args.python)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".gpu-kit-") as directory:
        wheels, new = Path(directory) / "wheels", Path(directory) / "kit"
        wheels.mkdir()
        new.mkdir()
        try:
            fetch([pin(name, accepted[name]) for name in sorted(accepted) if name != _PROJECT], args.python, wheels)
            build_project(wheels)
        except subprocess.CalledProcessError as error:
            print(f"pip ended with exit code {error.returncode}; there is no kit", file=sys.stderr)
            return 1
        write_lists(wheels, new, accepted)
        pack(wheels, new / "wheels.tar.xz")
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
        return report(sizes_mib(wheels), sizes_mib(folder), args.max_mib)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
