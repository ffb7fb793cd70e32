"""`make gpu-kit`: what it gathers, and what its script installs."""

import io
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.gpu import kit
from tests.gpu.part_runner import ROOT

pytestmark = pytest.mark.cuda_path


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    requires: dict[str, list[str]] = {
        "tokasaurus": ["torch>=2", "server[fast]>=1", "only-dev; extra == 'dev'", "numpy"],
        "server": ["loop>=2; extra == 'fast'", "loop<5", "slow; extra == 'slow'", "old; python_version < '3.12'"],
        "loop": ["windows; sys_platform == 'win32'", "server"],
    }
    monkeypatch.setattr(kit, "_requires", lambda name: requires.get(name, []))
    return requires


def test_the_kit_has_what_the_roots_need_directly_or_not(packages: dict[str, list[str]]) -> None:
    found = kit.find_requirements(["tokasaurus", "pytest>=8"], "3.12")
    assert found == {
        "tokasaurus": SpecifierSet(),
        "server": SpecifierSet(">=1"),
        "loop": SpecifierSet(">=2,<5"),
        "pytest": SpecifierSet(">=8"),
    }
    assert "old" in kit.find_requirements(["tokasaurus"], "3.11")
    assert packages


def test_every_requirement_of_the_project_is_in_the_kit_or_of_the_machine() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = kit.find_requirements(kit.ROOTS, "3.12").keys() | kit.OF_THE_MACHINE
    assert {Requirement(text).name for text in project["dependencies"]} <= found
    assert "uvloop" in found, "it comes with an extra of uvicorn"
    assert "flashinfer-python" in found


def test_versions_are_those_of_this_environment() -> None:
    assert kit.pin("pytest", SpecifierSet(">=8")) == f"pytest=={pytest.__version__}"
    assert kit.pin("no-such-package", SpecifierSet(">=3")) == "no-such-package>=3"


def test_a_kit_that_is_too_large_fails_and_names_what_is_largest(capsys: pytest.CaptureFixture[str]) -> None:
    wheels = {"large.whl": 30.0, "medium.whl": 20.0, "small.whl": 0.1}
    assert kit.report(wheels, {"wheels.tar.xz": 40.0}, 50) == 0
    assert kit.report(wheels, {"wheels.tar.xz": 51.0}, 50) == 1
    out, err = capsys.readouterr()
    assert "30.0 MiB  large.whl" in out
    assert "largest wheels are large.whl, medium.whl" in err


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("")
    with pytest.raises(SystemExit):
        kit.main(["--output", str(tmp_path)])
    assert (tmp_path / "thesis.txt").exists()


def make_wheel(folder: Path, name: str, version: str) -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"{name}.py", f"version = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A kit of three packages: missing here, older here than is accepted, and here."""
    wheels, folder = tmp_path / "wheels", tmp_path / "kit"
    for path in (wheels, folder):
        path.mkdir()
    make_wheel(wheels, "missing_here", "1.2")
    make_wheel(wheels, "pytest", "99.0")
    make_wheel(wheels, "rich", "99.0")
    accepted = {"missing-here": SpecifierSet(), "pytest": SpecifierSet(">=99"), "rich": SpecifierSet(">=1")}
    kit.write_lists(wheels, folder, accepted)
    kit.pack(wheels, folder / "wheels.tar.xz")
    return folder


def test_the_archive_has_the_files_of_the_wheels(folder: Path) -> None:
    with tarfile.open(folder / "wheels.tar.xz") as archive:
        file = archive.extractfile("missing_here-1.2-py3-none-any.whl")
        assert file is not None
        with zipfile.ZipFile(io.BytesIO(file.read())) as wheel:
            assert wheel.read("missing_here.py") == b"version = '1.2'\n"
    assert (folder / "requirements.txt").read_text() == "missing-here==1.2\npytest==99.0\nrich==99.0\n"


def test_only_what_is_missing_or_not_accepted_is_installed(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    command = [sys.executable, str(folder / "install.py")]
    dry = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, check=True).stdout
    assert "2 packages to install" in dry
    done = subprocess.run([*command, "--target", str(target)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "2 packages installed" in done.stdout
    assert {path.name for path in target.glob("*.py")} == {"missing_here.py", "pytest.py"}


def test_the_machines_own_torch_is_never_replaced(folder: Path) -> None:
    rows = {"torch": {"version": "9.0", "accepted": ">=9"}}
    (folder / "accepted.json").write_text(json.dumps(rows))
    done = subprocess.run([sys.executable, str(folder / "install.py")], capture_output=True, text=True)
    assert done.returncode != 0
    assert "torch is the machine's own" in done.stderr
