"""`python -m release [--python PYTHON]…`: build a release into dist/, and check all of it before it is published.

Prints a line for each check; the exit code is 1 if any fails. Publishes nothing.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from email.parser import HeaderParser
from functools import partial
from pathlib import Path
from typing import TypeVar

from release.build import DIST, ROOT, build_sdist, build_wheel
from release.install import CheckFailed, check_kernels, check_server, install, version_of
from tokasaurus import __version__
from tokasaurus.model.cpu.build import MACHINES, machine

Result = TypeVar("Result")


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__)
    parser.add_argument(
        "--python",
        dest="pythons",
        action="append",
        metavar="PYTHON",
        help="install the wheel for this interpreter, such as python3.13; may be repeated (default: this one)",
    )
    parser.add_argument("--constraint", metavar="FILE", help="pip's constraints for what is installed beside the wheel")
    parser.add_argument("--draft", action="store_true", help="CHANGELOG.md may call the version not released yet")
    arguments = parser.parse_args()
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    checks = Checks()
    checks.run("version and changes agree", lambda: check_changes(arguments.draft))
    sdist = checks.run("source", build_sdist)
    wheels = {name: checks.run(f"wheel for {name}", partial(build_wheel, name)) for name in MACHINES}
    files = [path for path in (sdist, *wheels.values()) if path is not None]
    checks.run("metadata, and README as PyPI shows it", lambda: check_metadata(files))
    if sdist is not None:
        checks.run("the source has what its wheel needs", lambda: check_sdist(sdist))
    wheel = wheels.get(machine())
    if wheel is None:
        print(f"FAILED   no wheel for {machine()}, so nothing was installed")
        return 1
    more = ["--constraint", arguments.constraint] if arguments.constraint else []
    for python in arguments.pythons or [sys.executable]:
        with tempfile.TemporaryDirectory() as directory:
            check_installed(checks, python, [str(wheel), *more], Path(directory))
    print("\n".join(f"{path.stat().st_size / 2**20:6.1f} MiB  {path.relative_to(ROOT)}" for path in files))
    return 1 if checks.num_failed else 0


class Checks:
    """Runs checks, and prints a line for each."""

    def __init__(self) -> None:
        self.num_failed = 0

    def run(self, name: str, check: Callable[[], Result]) -> Result | None:
        """What `check` returns; None if it fails."""
        try:
            result = check()
        except (CheckFailed, subprocess.CalledProcessError) as error:
            self.num_failed += 1
            print(f"FAILED   {name}: {error}", flush=True)
            return None
        shown = f": {result.name}" if isinstance(result, Path) and result.parent == DIST else ""
        print(f"passed   {name}{shown}", flush=True)
        return result


def check_installed(checks: Checks, python: str, files: list[str], directory: Path) -> None:
    """Install for `python` in `directory`, and serve."""
    version = checks.run(f"{python} is there", lambda: version_of(python))
    if version is None:
        return
    inner = checks.run(f"pip install for Python {version}", lambda: install(python, files, directory / "environment"))
    if inner is not None:
        checks.run(f"Python {version}, no compiler: the wheel's kernels", lambda: check_kernels(inner))
        checks.run(f"Python {version}, no compiler: serves the demo, answers, ends", lambda: check_server(inner))


def check_changes(is_draft: bool) -> None:
    """The newest section of the changes is this version's, and names its day, or is a draft. Raises CheckFailed."""
    heading = re.search(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    if heading is None or heading[1].partition(",")[0] != __version__:
        raise CheckFailed(f"CHANGELOG.md begins with {heading and heading[1]!r}, the version is {__version__}")
    if not is_draft and heading[1].endswith("not released yet"):
        raise CheckFailed(f"CHANGELOG.md calls {__version__} not released yet: write the day, such as 1 December 2026")


def check_metadata(files: list[Path]) -> None:
    """Raises CheckFailed."""
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, files)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise CheckFailed(done.stdout)
    for path in files:
        metadata = HeaderParser().parsestr(_metadata_of(path))
        if metadata["Version"] != __version__ or metadata["License-Expression"] != "Apache-2.0":
            raise CheckFailed(f"{path.name}: Version {metadata['Version']}, {metadata['License-Expression']}")


def _metadata_of(path: Path) -> str:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            return wheel.read(name).decode()
    with tarfile.open(path) as sdist:
        member = sdist.extractfile(f"tokasaurus-{__version__}/PKG-INFO")
        assert member is not None
        return member.read().decode()


def check_sdist(sdist: Path) -> None:
    """It has every file of the package. Raises CheckFailed."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files", "tokasaurus"], cwd=ROOT, capture_output=True, text=True, check=True)
    missing = {*tracked.stdout.split(), "LICENSE", "README.md", "pyproject.toml"} - names
    if missing:
        raise CheckFailed(f"missing: {', '.join(sorted(missing))}")


if __name__ == "__main__":
    sys.exit(main())
