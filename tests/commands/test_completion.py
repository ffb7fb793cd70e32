"""Completion in real shells, by the script that `toka completion` prints."""

import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tokasaurus.cli import config_types, main
from tokasaurus.commands.completion import SHELLS, script
from tokasaurus.config import ServerConfig

WAIT_S = 20.0


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("completion")
    paths = {shell: directory / f"toka.{shell}" for shell in SHELLS}
    for shell, path in paths.items():
        path.write_text(script(shell, config_types()))
    return paths


def need(shell: str) -> str:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    return path


def in_bash(path: Path, *words: str) -> set[str]:
    """What is proposed for the last word, by the words as readline splits them."""
    given = " ".join(f"'{word}'" for word in words)
    lines = (
        f'source {path}; COMP_WORDS=({given}); COMP_CWORD={len(words) - 1}; _toka; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", lines], capture_output=True, text=True, check=True, timeout=WAIT_S)
    assert done.stderr == ""
    return set(done.stdout.splitlines())


CASES = [
    (["dev"], {"device="}),
    (["pi"], {"ping "}),
    (["device", "=", "c"], {"cpu ", "cuda "}),
    (["device", "="], {"cpu ", "cuda "}),
    (["device=c"], {"device=cpu ", "device=cuda "}),
    (["rl", "=", ""], {"T ", "F "}),
    (["ping", "po"], {"port="}),
    (["plan", "kv_cache_n"], set()),
    (["batch", "ca"], {"cancel ", "cache_salt_per_key="}),
    (["batch", "list", "da"], {"data_dir="}),
    (["--po"], {"--port="}),
    (["--device", "=", "c"], {"cpu ", "cuda "}),
    (["--print-c"], {"--print-config "}),
    (["kv_cache_size"], {"kv_cache_size_num_tokens="}),
    (["conf"], {"config="}),
    (["completion", ""], {"bash ", "zsh ", "fish "}),
    (["model", "=", "/"], set()),
]


@pytest.mark.parametrize(("words", "proposed"), CASES)
def test_bash_proposes(words: list[str], proposed: set[str], scripts: dict[str, Path]) -> None:
    assert in_bash(scripts["bash"], "toka", *words) - {""} == proposed


def test_before_anything_is_typed_the_flags_that_matter_are_proposed(scripts: dict[str, Path]) -> None:
    found = in_bash(scripts["bash"], "toka", "")
    assert {word for word in found if word.endswith("=")} == {f"{name}=" for name in ServerConfig.main_flags}
    assert {"ping ", "map ", "completion ", "help "} <= found


def test_every_flag_of_every_command_is_completed(scripts: dict[str, Path]) -> None:
    text = scripts["bash"].read_text()
    for command, config_type in config_types().items():
        branch = text.partition(f'    "{command}")\n')[2].partition(";;")[0]
        listed = set(branch.partition('flags="')[2].partition('"')[0].split())
        assert {f"{name}=" for name in config_type.flags} <= listed, command


def test_bash_at_a_terminal(scripts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").touch()
    need("bash")
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(tmp_path)
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], {**os.environ, "PS1": "$ ", "TERM": "dumb"})
    shown = ""

    def wait_for(text: str) -> None:
        nonlocal shown
        deadline = time.monotonic() + WAIT_S
        while text not in shown:
            assert select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0], shown
            shown += os.read(terminal, 4096).decode()

    try:
        os.write(terminal, f"source {scripts['bash']}; echo so''urced\n".encode())
        wait_for("sourced")
        os.write(terminal, b"toka devi\tcu\t model=ti\t")
        wait_for("toka device=cuda  model=tiny.gguf")
    finally:
        os.kill(process, 9)
        os.waitpid(process, 0)
        os.close(terminal)


@pytest.mark.parametrize(
    ("line", "proposed"),
    [
        ("toka dev", {"device=cpu", "device=cuda"}),
        ("toka device=c", {"device=cpu", "device=cuda"}),
        ("toka ping po", {"port="}),
        ("toka batch list da", {"data_dir="}),
        ("toka completion ", {"bash", "zsh", "fish"}),
        ("toka pi", {"ping"}),
    ],
)
def test_fish_proposes(line: str, proposed: set[str], scripts: dict[str, Path]) -> None:
    command = [need("fish"), "--no-config", "-c", f"source {scripts['fish']}; complete -C '{line}'"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=WAIT_S)
    assert set(done.stdout.splitlines()) == proposed


ZSH = """
zmodload zsh/zpty
zpty -b z zsh -f -i
zpty -w z 'PS1=; autoload -U compinit; compinit -D -u; source {path}; zstyle ":completion:*" menu no; print so""urced'
zpty -r z shown '*sourced*'
zpty -w -n z $'toka {begun}\\t'
zpty -r z completed '*{rest}*'
zpty -w -n z $'\\x01print -r -- "<\\x05>"\\n'
zpty -r z shown '*>*' && zpty -r z more '*>*'
print -r -- "$shown$more"
"""


@pytest.mark.parametrize(
    ("begun", "completed"), [("devi", "device="), ("device=cu", "device=cuda"), ("batch li", "batch list")]
)
def test_zsh_completes(begun: str, completed: str, scripts: dict[str, Path], tmp_path: Path) -> None:
    text = ZSH.format(path=scripts["zsh"], begun=begun, rest=completed.removeprefix(begun))
    environment = {**os.environ, "TERM": "dumb", "HOME": str(tmp_path)}
    command = [need("zsh"), "-f", "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, env=environment)
    assert f"<toka {completed}>" in done.stdout


def test_the_name_of_a_shell_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["tcsh"], ["bash", "x"]):
        assert main(["completion", *words]) == 2
        assert capsys.readouterr().err == "toka completion: needs the name of a shell: bash, zsh, fish\n"
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out == script("bash", config_types()) + "\n"
