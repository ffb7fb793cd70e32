"""What keeps the rooms apart: imports point down, torch stays in the workers, modules stay small."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tokasaurus"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

# From the top down. A room imports from those below its own line, never from its own line.
LAYERS = [
    ["__main__"],
    ["cli"],
    ["ping", "download", "cluster"],
    ["launch"],
    ["process_group"],
    ["child_process"],
    ["server", "manager", "model"],
    ["text", "monitoring", "checkpoint"],
    ["messages", "config"],
    ["flags"],
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

WITHOUT_TORCH = ["server", "manager", "text", "config", "flags", "checkpoint", "cli", "ping", "download", "messages"]
WITHOUT_TORCH += ["launch", "process_group", "child_process", "monitoring"]

MAX_LINES = 330  # about 300


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imported_modules(path: Path) -> set[str]:
    """Modules that a file imports anywhere, lazy imports included; `from a import b` counts as a and a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            assert node.module is not None
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_room_has_a_place_in_the_layers() -> None:
    assert {room_of(module) for module in MODULES} - {""} <= set(LEVEL)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    room = room_of(module)
    for name in imported_modules(MODULES[module]):
        if name.startswith("tokasaurus.") and room_of(name) != room and room_of(name) in LEVEL:
            assert LEVEL[room_of(name)] > LEVEL.get(room, -1), f"{module} imports {name}"


def test_only_the_workers_load_torch() -> None:
    """Checked per module, in one process: what is loaded only grows."""
    modules = [module for module in MODULES if room_of(module) in WITHOUT_TORCH]
    script = (
        "import importlib, sys\n"
        f"for module in {modules!r}:\n"
        "    importlib.import_module(module)\n"
        "    assert 'torch' not in sys.modules, f'{module} loads torch'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("library", ["flashinfer", "ray"])
def test_optional_library_has_one_importer_and_loads_late(library: str) -> None:
    importers = []
    for module, path in MODULES.items():
        if any(name.split(".")[0] == library for name in imported_modules(path)):
            importers.append(module)
            at_top = [
                node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)
            ]
            names = {alias.name for node in at_top for alias in node.names} | {getattr(n, "module", "") for n in at_top}
            assert not any(str(name).split(".")[0] == library for name in names), f"{module} loads {library} at once"
    assert len(importers) <= 1, importers


def test_no_module_is_a_grab_bag() -> None:
    grab_bags = {"utils", "util", "common", "helpers", "misc", "types"}
    assert not {module for module in MODULES if module.rpartition(".")[2] in grab_bags}


@pytest.mark.parametrize("path", [*MODULES.values(), *sorted((ROOT / "benchmarks").rglob("*.py"))], ids=str)
def test_file_can_be_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES
