"""The Dockerfiles: their lint, the files they copy, and their commands in fresh directories."""

import fnmatch
import os
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import yaml

from tests.deploy.helpers.files import DEPLOY, PORT, ROOT, image_environment, read_dockerfile, unknown_flags
from tests.deploy.helpers.play import started
from tests.end_to_end.helpers.toka_process import free_port, wait_for
from tests.helpers.tiny_model import save_tiny_model

DOCKERFILES = [DEPLOY / "Dockerfile", DEPLOY / "Dockerfile.cuda"]
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
by_name = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)


@by_name
@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed")
def test_hadolint_finds_nothing(path: Path) -> None:
    assert HADOLINT is not None
    done = subprocess.run([HADOLINT, str(path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def is_sent(path: str) -> bool:
    """Whether .dockerignore lets a file of the project into the build: by the last line that matches the file or a
    directory that it is in."""
    parts = path.split("/")
    places = {"/".join(parts[:count]) for count in range(1, len(parts) + 1)}
    found = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        anywhere = pattern.removeprefix("**/")
        names = set(parts) if anywhere != pattern else places
        if not line.startswith("#") and anywhere and fnmatch.filter(names, anywhere):
            found = line.startswith("!")
    return found


@by_name
def test_copied_files_exist_and_suffice_for_the_package(path: Path) -> None:
    copied = [word for one in read_dockerfile(path) if one.name == "COPY" for word in one.text.split()[:-1]]
    assert all((ROOT / word).exists() and is_sent(word) for word in copied)
    listing = subprocess.run(
        ["git", "ls-files", "tokasaurus", "pyproject.toml", "README.md", "LICENSE"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    needed = listing.stdout.splitlines()
    assert [name for name in needed if not is_sent(name) or name.split("/")[0] not in copied] == []
    assert not is_sent("deploy/api_key")
    assert not is_sent("tokasaurus/model/__pycache__/a.pyc")
    assert not is_sent("tokasaurus/model/cpu/prebuilt/avx2-0.so")


@by_name
def test_the_server_runs_as_another_user_and_receives_signals(path: Path) -> None:
    last = max(one.stage for one in read_dockerfile(path))
    final = {one.name: one.text for one in read_dockerfile(path) if one.stage == last}
    user = final["USER"].partition(":")[0]
    assert int(user) > 0  # a number: Kubernetes' runAsNonRoot cannot check a name
    created = [one.text for one in read_dockerfile(path) if one.name == "RUN" and f"--uid {user} " in one.text]
    assert len(created) == 1
    assert yaml.safe_load(final["ENTRYPOINT"]) == ["tini", "--", "toka"]
    assert final["EXPOSE"] == str(PORT)
    environment = image_environment(read_dockerfile(path))
    assert f"--home-dir {environment['HOME']} " in created[0]
    assert unknown_flags([name for name in environment if name.startswith("TOKA_")]) == set()
    assert environment["TOKA_DATA_DIR"] in created[0].split()


@pytest.mark.long
def test_the_commands_of_the_image_work_in_fresh_directories(tmp_path: Path) -> None:
    """All but those of apt-get and useradd, which change the machine: the wheel with its kernels, its installation into
    a new environment, the entry point and the health check, without a compiler on the path."""
    instructions = read_dockerfile(DEPLOY / "Dockerfile")
    source, wheels = tmp_path / "source", tmp_path / "wheels"
    source.mkdir()
    for one in instructions:
        if one.name == "COPY":
            *names, target = one.text.split()
            for name in names:
                copy = source / target / name if target.endswith("/") else source / target
                ignore = shutil.ignore_patterns("__pycache__", "prebuilt")
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, copy, ignore=ignore)
                else:
                    shutil.copy(ROOT / name, copy)
    commands = [one.text for one in instructions if one.name == "RUN"]
    own = [text for text in commands if "apt-get" not in text and "useradd" not in text]
    assert len(own) == 2
    build, install = (text.replace("/wheels", str(wheels)) for text in own)
    python = make_environment(tmp_path / "builder")
    run(build, source, path=f"{python.parent}{os.pathsep}{os.environ['PATH']}")
    (wheel,) = wheels.iterdir()
    assert wheel.stat().st_size > 1e6  # with kernels

    bin_directory = make_environment(tmp_path / "installed").parent
    index = {"TORCH_INDEX": torch_index(), "EXTRAS": ""}
    run(install, tmp_path, path=f"{bin_directory}{os.pathsep}/usr/bin{os.pathsep}/bin", **index)
    shutil.rmtree(source)

    # The image's programs that the server may use: without a compiler
    for name in ("sh", "wget"):
        program = shutil.which(name)
        assert program is not None, f"{name} is not installed"
        (bin_directory / name).symlink_to(program)
    cache, data, port = tmp_path / "cache", tmp_path / "data", free_port()
    cache.mkdir()
    environment = image_environment(instructions) | {"PATH": str(bin_directory)}
    environment |= {"HOME": str(cache), "TOKA_DATA_DIR": str(data), "TOKA_PORT": str(port), "TOKA_CACHE": ""}
    save_tiny_model(tmp_path / "model", "llama")
    (entry_point,) = [yaml.safe_load(one.text) for one in instructions if one.name == "ENTRYPOINT"]
    (check,) = [yaml.safe_load(one.text.removeprefix("CMD ")) for one in instructions if one.name == "HEALTHCHECK"]
    toka = [str(bin_directory / entry_point[-1]), f"model={tmp_path / 'model'}", "kv_cache_num_tokens=4096"]
    with started(toka, environment) as process:

        def is_healthy() -> bool:
            return subprocess.run(check, env=environment, timeout=30).returncode == 0

        wait_for(lambda: is_healthy() or process.poll() is not None, 240)
        assert process.poll() is None
        ready = [word.replace("/health", "/ready") for word in check]
        wait_for(lambda: subprocess.run(ready, env=environment, timeout=30).returncode == 0, 240)
        process.terminate()
        assert process.wait(timeout=60) == 0
        assert not is_healthy()
    assert data.is_dir()
    assert (cache / ".cache" / "tokasaurus").is_dir()
    assert not list(cache.rglob("*.so"))  # the wheel's kernels were used


def make_environment(directory: Path) -> Path:
    """A new environment -> its Python."""
    venv.create(directory, with_pip=True)
    return directory / "bin" / "python"


def run(command: str, directory: Path, path: str, **variables: str) -> None:
    environment = {**os.environ, "PATH": path, **variables}
    done = subprocess.run(
        ["sh", "-c", command], cwd=directory, env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr


def torch_index() -> str:
    """The index with torch for CPUs that pip is set up with on this machine; else the Dockerfile's."""
    shown = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    for line in shown.stdout.splitlines():
        if "extra-index-url" in line:
            return shlex.split(line.partition("=")[2])[0].split()[0]
    arguments = [one.text.partition("=") for one in read_dockerfile(DEPLOY / "Dockerfile") if one.name == "ARG"]
    return {name: value for name, _, value in arguments}["TORCH_INDEX"]
