"""Installs what this machine lacks of the folder that this file is in: `python FOLDER/install.py [--dry-run]`.

Nothing is fetched, and nothing that is installed in a version that serves is replaced. The folder has no torch, triton
or numpy, so that those of the machine stay. Further arguments go to pip, as --target does.

`python FOLDER/install.py --unpack WHEELS` only unpacks the wheels, for
`pip install --no-index --no-deps --find-links WHEELS -r FOLDER/requirements.txt`.
"""

import json
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pip._vendor.packaging.specifiers import SpecifierSet

HERE = Path(__file__).resolve().parent
_NEVER_REPLACED = ("torch", "triton", "numpy")


def installed_version(name: str) -> "str | None":
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def choose(accepted: "dict[str, dict[str, str]]") -> "list[str]":
    """Pins of what is missing, or installed in a version that the project does not accept."""
    pins = []
    for name, row in accepted.items():
        found = installed_version(name)
        if found is not None and SpecifierSet(row["accepted"]).contains(found, prereleases=True):
            continue
        if name in _NEVER_REPLACED:
            raise SystemExit(f"{name} is the machine's own and is not replaced")
        pins.append(f"{name}=={row['version']}")
        print(f"{name}: {found or 'not installed'}, the kit has {row['version']}")
    return pins


def unpack(folder: Path) -> None:
    with tarfile.open(HERE / "wheels.tar.xz") as archive:
        archive.extractall(folder, filter="data")


def main() -> int:
    """The exit code."""
    if sys.argv[1:2] == ["--unpack"]:
        unpack(Path(sys.argv[2]))
        return 0
    arguments = [word for word in sys.argv[1:] if word != "--dry-run"]
    own = {name: installed_version(name) for name in _NEVER_REPLACED}
    print("the machine's own:", ", ".join(f"{name} {found or 'missing'}" for name, found in own.items()))
    if own["torch"] is None or own["numpy"] is None:
        print("PyTorch and numpy must be installed before the kit", file=sys.stderr)
        return 1
    pins = choose(json.loads((HERE / "accepted.json").read_text()))
    if not pins or "--dry-run" in sys.argv:
        print(f"{len(pins)} packages to install")
        return 0
    with tempfile.TemporaryDirectory() as wheels:
        unpack(Path(wheels))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
        command += ["--no-deps", "--no-cache-dir", "--find-links", wheels, *arguments, *pins]
        code = subprocess.run(command).returncode
    print(f"{len(pins)} packages installed" if code == 0 else f"pip ended with exit code {code}")
    return code


if __name__ == "__main__":
    sys.exit(main())
