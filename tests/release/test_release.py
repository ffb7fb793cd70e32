"""What `make release-check` refuses."""

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

import release.__main__ as checked
from release.__main__ import ROOT, Checks, check_changes, check_sdist
from release.install import CheckFailed
from tokasaurus import __version__


@pytest.mark.parametrize(
    ("heading", "is_draft", "error"),
    [
        (f"{__version__}, 1 December 2026", False, None),
        (f"{__version__}, not released yet", True, None),
        (f"{__version__}, not released yet", False, "write the day"),
        ("0.0.1, 1 December 2026", False, "the version is"),
        ("0.0.1, 1 December 2026", True, "the version is"),
    ],
)
def test_the_newest_changes_are_this_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heading: str, is_draft: bool, error: str | None
) -> None:
    monkeypatch.setattr(checked, "ROOT", tmp_path)
    (tmp_path / "CHANGELOG.md").write_text(f"# Changes\n\n## {heading}\n\n- x\n\n## 0.0.0, 1 May 2026\n")
    if error is None:
        check_changes(is_draft)
    else:
        with pytest.raises(CheckFailed, match=error):
            check_changes(is_draft)


def test_a_source_that_lacks_a_file_of_the_package_is_refused(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("the files are those that git knows")
    tracked = subprocess.run(["git", "ls-files", "tokasaurus"], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [*tracked.stdout.split(), "LICENSE", "README.md", "pyproject.toml"]
    missing = "tokasaurus/model/cpu/csrc/gemm/blocks.h"
    assert missing in names
    for left_out in (None, missing):
        path = tmp_path / "source.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for name in names:
                if name != left_out:
                    archive.addfile(tarfile.TarInfo(f"tokasaurus-{__version__}/{name}"), io.BytesIO())
        if left_out is None:
            check_sdist(path)
        else:
            with pytest.raises(CheckFailed, match=missing):
                check_sdist(path)


def test_a_failed_check_is_counted_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise CheckFailed("of a reason")

    checks = Checks()
    checks.run("good", lambda: None)
    checks.run("bad", fail)
    assert checks.num_failed == 1
    assert capsys.readouterr().out == "passed   good\nFAILED   bad: of a reason\n"
