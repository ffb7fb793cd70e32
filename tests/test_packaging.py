"""`pip install .` installs every file of the package."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from tokasaurus import __version__

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tokasaurus"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="reads TOML with the standard library")
def test_every_file_that_is_not_python_is_installed() -> None:
    """An editable install would hide a C++ source that is left out: the kernels would silently be off."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["tokasaurus"]
    installed = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    others = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert {path.name for path in others} >= {"py.typed", "attention.cpp"}
    assert others == installed


@pytest.mark.skipif(sys.version_info < (3, 11), reason="reads TOML with the standard library")
def test_the_version_is_written_once_and_the_changes_begin_with_it() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "tokasaurus.__version__"}
    releases = re.findall(r"^## ([^\s,]+)(?:, (.+))?$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert releases[0][0] == __version__
    assert [release for release, when in releases if when == "not released yet"] in ([], [__version__])
    assert all(
        when in ("", "not released yet") or re.fullmatch(r"\d+ [A-Z][a-z]+ 20\d\d", when) for _, when in releases
    )
    numbers = [tuple(map(int, release.split("."))) for release, _ in releases]
    assert numbers == sorted(set(numbers), reverse=True)


def test_no_hint_installs_a_package_of_this_name_from_an_index() -> None:
    """The project is not on PyPI: what has its name there is another one."""
    paths = [path for folder in ("tokasaurus", "docs", "tests/gpu") for path in (ROOT / folder).rglob("*.*")]
    texts = {path: path.read_text() for path in [*paths, ROOT / "README.md"] if path.suffix in (".py", ".md")}
    hint = re.compile(r"install[^\n]*\btokasaurus(\[|$|['\"` ])")
    assert [str(path) for path, text in texts.items() if hint.search(text)] == []


def test_type_checkers_find_an_editable_install(tmp_path: Path) -> None:
    """They follow a line of a .pth file that is a path, and no hook of the import system."""
    pytest.importorskip("setuptools", minversion="77")
    clone, wheels = tmp_path / "clone", tmp_path / "wheels"
    (clone / "tokasaurus").mkdir(parents=True)
    wheels.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "tokasaurus/__init__.py", "tokasaurus/py.typed"):
        shutil.copy(ROOT / name, clone / name)
    build = f"from setuptools import build_meta; build_meta.build_editable({str(wheels)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=clone, check=True, capture_output=True)
    (wheel,) = wheels.iterdir()
    with ZipFile(wheel) as archive:
        (path_file,) = (name for name in archive.namelist() if "dist-info" not in name)
        assert path_file.endswith(".pth")
        assert archive.read(path_file).decode().strip() == str(clone)
