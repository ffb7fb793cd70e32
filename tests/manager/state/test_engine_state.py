"""The comments of the state name every module that writes a field."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

MANAGER = Path(__file__).parents[3] / "tokasaurus/manager"
STATE, SLOTS = MANAGER / "state/engine_state.py", MANAGER / "state/slot_arrays.py"

_CHANGES = {"append", "appendleft", "extend", "popleft", "pop", "clear", "add", "remove", "update"}
_MODULE = re.compile(r"\b(?:engine|state|manager)/\w+")


def named_modules(path: Path, start: str, end: str, field: str) -> dict[str, set[str]]:
    """By field of a class: the modules that its comment and that of its group name.

    start, end: lines around the fields. field: pattern of a line that declares one, with its name as the group."""
    lines = iter(path.read_text().partition(start)[2].partition(end)[0].splitlines())
    found: dict[str, set[str]] = {}
    group: set[str] | None = None
    name = ""
    for line in lines:
        declared = re.match(field, line)
        if line.strip().startswith("# "):
            group, name = set(_MODULE.findall(line)), ""
        elif declared:
            name = declared[1]
            if group is not None:
                found[name] = set(group)
        elif name in found:
            found[name] |= set(_MODULE.findall(line))
    return found


def changed_attributes(tree: ast.AST) -> Iterator[ast.Attribute]:
    """What is assigned, deleted, or changed by a method, as a whole or in part."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
            targets = [node.func.value]
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                whole = part
                while isinstance(whole, ast.Subscript):
                    whole = whole.value
                if isinstance(whole, ast.Attribute):
                    yield whole


def writers(own: Path, holders: tuple[str, ...]) -> dict[str, set[str]]:
    """By field: the modules that write it, apart from `own`. holders: names of variables and fields that hold the
    object."""
    found: dict[str, set[str]] = {}
    for path in MANAGER.rglob("*.py"):
        module = path.relative_to(MANAGER).with_suffix("").as_posix()
        for attribute in changed_attributes(ast.parse(path.read_text())) if path != own else ():
            if ast.unparse(attribute.value).rpartition(".")[2] in holders:
                found.setdefault(attribute.attr, set()).add(module if "/" in module else f"manager/{module}")
    return found


@pytest.mark.parametrize(
    ("path", "start", "end", "field", "holders"),
    [
        (STATE, "class EngineState:", "    def stats(", r"    (\w+): ", ("state",)),
        (SLOTS, "self.num_streamed = 0", "    @property", r"        self\.(\w+)[: ]", ("slots", "_slots", "arrays")),
    ],
)
def test_comments_name_every_module_that_writes_a_field(
    path: Path, start: str, end: str, field: str, holders: tuple[str, ...]
) -> None:
    named, found = named_modules(path, start, end, field), writers(path, holders)
    assert len(named) > 15
    assert {name: unnamed for name in named if (unnamed := found.get(name, set()) - named[name])} == {}
