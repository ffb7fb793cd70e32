"""The files in deploy/, parsed as far as the tests need it."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tokasaurus.config import ServerConfig

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
PORT = 10210
"""The server's default, which the files name."""
# What each file leaves to the server's end after draining: the launcher's limits for a server and an engine to end.
END_S = 20


@dataclass(frozen=True, slots=True)
class Instruction:
    """Of a Dockerfile."""

    name: str
    options: list[str]
    """Words that begin with -- after the name."""
    text: str
    """The rest of the instruction, on one line."""
    stage: int
    """Number of its FROM, from 0 on; -1 before the first."""


def read_dockerfile(path: Path) -> list[Instruction]:
    joined: list[str] = []
    is_continued = False
    for line in path.read_text().splitlines():
        if line.startswith("#") or not line.strip():
            continue
        if is_continued:
            joined[-1] += " " + line.strip()
        else:
            joined.append(line.strip())
        is_continued = line.endswith("\\")
        joined[-1] = joined[-1].removesuffix("\\").strip()
    stage = -1
    instructions = []
    for line in joined:
        name, _, rest = line.partition(" ")
        stage += name == "FROM"
        options = []
        while rest.startswith("--"):
            option, _, rest = rest.strip().partition(" ")
            options.append(option)
            rest = rest.strip()
        instructions.append(Instruction(name, options, rest, stage))
    return instructions


def image_environment(instructions: list[Instruction]) -> dict[str, str]:
    """What the last stage's ENV sets."""
    words = [word for one in instructions if one.name == "ENV" for word in shlex.split(one.text)]
    return dict(word.split("=", 1) for word in words)


def read_unit(path: Path) -> dict[str, list[str]]:
    """Values by key, in their order; keys of all sections together."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def read_yaml(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def read_manifest() -> dict[str, dict[str, Any]]:
    """Objects of kubernetes.yaml by kind."""
    objects = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    assert len({found["kind"] for found in objects}) == len(objects)
    return {found["kind"]: found for found in objects}


def unknown_flags(names: Iterator[str] | list[str]) -> set[str]:
    """Names that are neither flags nor the variables of flags."""
    flags = (name.removeprefix("TOKA_").lower() if name.startswith("TOKA_") else name for name in names)
    return set(flags) - set(ServerConfig.flags)
