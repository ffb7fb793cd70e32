"""Rules for packages: imports point down, only workers load torch.

Tests mirror the package, and import helpers but no other tests."""

import ast
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.import_graph import MODULES, PACKAGE, ROOT, TESTS, imported_modules

# Folders of tests that mirror no other folder; besides them, any folder may have one named helpers.
OWN_FOLDERS = {
    "helpers",
    "clients",
    "clients/lm_eval_tasks",
    "end_to_end",
    "end_to_end/batches",
    "end_to_end/limits",
    "end_to_end/ranks",
    "end_to_end/rollouts",
    "examples",
    "gpu",
    "server/http",
}

# From the top down. A package or module imports from lines below its own, never from its own line.
LAYERS = [
    ["__main__"],
    ["cli"],
    ["commands", "ray"],
    ["library"],
    ["processes"],
    ["startup_report"],
    ["server", "manager", "model"],
    ["text", "monitoring", "checkpoint"],
    ["addresses", "files", "random_ids", "workers"],
    ["command_line"],
    ["habits"],
    ["messages", "config"],
    ["flags", "inherited"],
]
# The same inside the three processes' packages.
INNER_LAYERS = {
    "commands": [
        ["ping", "chat", "batch", "map", "mismatch", "plan", "check", "top", "bench"],
        ["servers", "download", "completion"],
        ["running_server"],
    ],
    "server": [
        ["app"],
        ["routes", "connections"],
        ["live"],
        ["jobs"],
        ["endpoints"],
        ["dialects"],
        ["endpoint", "event_stream", "json_body"],
        ["state", "openapi", "respond"],
        ["prepare"],
        ["grammars", "engine_client"],
        ["served_model", "resources", "access", "compressed_bodies", "recording", "live_past"],
        ["templates"],
        ["tools", "json_values"],
        ["protocol", "errors"],
        ["answers", "paths", "child_process", "page", "docs_page", "value_words"],
    ],
    # planning: pure functions over arrays and numbers, which know no engine state.
    "manager": [["loop"], ["engine"], ["state"], ["planning", "kv_cache"]],
    "model": [
        ["worker"],
        ["execution"],
        ["by_transformers"],
        ["decoder", "sampling"],
        ["attention"],
        ["cpu", "parallel", "staging", "triton_choice"],
        ["buffer_sizes"],
    ],
}


def levels(layers: list[list[str]]) -> dict[str, int]:
    return {name: level for level, names in enumerate(layers) for name in names}


LEVEL = levels(LAYERS)

WITHOUT_TORCH = [
    "server",
    "manager",
    "text",
    "config",
    "flags",
    "habits",
    "command_line",
    "checkpoint",
    "cli",
    "files",
    "commands",
    "library",
    "messages",
]
WITHOUT_TORCH += ["processes", "monitoring"]
if find_spec("ray") is not None:
    WITHOUT_TORCH += ["ray"]


def package_of(module: str, depth: int = 1) -> str:
    """The name at `depth` in a module's path, 1 for the name after `tokasaurus`; "" if the path is shorter."""
    return ".".join(module.split(".")[depth : depth + 1])


def test_every_package_has_its_layer() -> None:
    assert {package_of(module) for module in MODULES} - {""} <= set(LEVEL)
    for package, layers in INNER_LAYERS.items():
        inner = {package_of(module, 2) for module in MODULES if package_of(module) == package} - {""}
        assert inner == set(levels(layers))


def section_of_the_page(heading: str) -> str:
    page = (ROOT / "docs" / "architecture.md").read_text()
    return page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def test_the_architecture_page_draws_the_layers() -> None:
    drawn = section_of_the_page("Packages").split("```")[1]
    layers = [[name.strip() for name in layer.split("|")] for layer in drawn.split("→")]
    assert layers == LAYERS[1:]


def test_the_architecture_page_explains_every_package() -> None:
    rows = re.findall(r"^- (`.*?): ", section_of_the_page("Packages"), flags=re.MULTILINE)
    listed = {part.removesuffix(".py") for row in rows for part in re.split(r"[`/, ()]+", row)}
    every = [name for layers in (LAYERS[1:], *INNER_LAYERS.values()) for names in layers for name in names]
    assert [name for name in every if name not in listed] == []


def test_the_ten_files_of_the_architecture_page_and_their_functions_exist() -> None:
    section = section_of_the_page("Read it in an hour")
    rows = re.findall(r"^\| `(.*?)` \| (.*?): ", section, flags=re.MULTILINE)
    assert len(rows) == 10
    (said,) = re.findall(r"about ([\d,]+) lines", section)
    num_lines = sum(len((PACKAGE / name).read_text().splitlines()) for name, _ in rows)
    assert int(said.replace(",", "")) == pytest.approx(num_lines, rel=0.1)
    for name, functions in rows:
        tree = ast.parse((PACKAGE / name).read_text())
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef)}
        defined |= {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        named = [part for dotted in re.findall(r"`([\w.]+)`", functions) for part in dotted.split(".")]
        assert named, name
        assert set(named) <= defined, name


def upward_imports(module: str, path: Path) -> list[str]:
    """One line for each import of a module from its own layer or one above."""
    places = [(1, LEVEL)]
    if package_of(module) in INNER_LAYERS:
        places.append((2, levels(INNER_LAYERS[package_of(module)])))
    found = []
    for depth, level in places:
        own = package_of(module, depth)
        for name in sorted(imported_modules(path)):
            imported = package_of(name, depth)
            is_sibling = name.split(".")[:depth] == module.split(".")[:depth]
            if is_sibling and imported in level and imported != own and level[imported] <= level.get(own, -1):
                found.append(f"{module} imports {name}")
    return found


def test_imports_point_down() -> None:
    assert [line for module, path in MODULES.items() for line in upward_imports(module, path)] == []


def test_an_upward_import_is_detected(tmp_path: Path) -> None:
    changed = tmp_path / "changed.py"
    changed.write_text("from tokasaurus.manager.state.engine_state import EngineState\n")
    assert upward_imports("tokasaurus.manager.planning.changed", changed) != []
    later = tmp_path / "later.py"
    later.write_text("def later():\n    import tokasaurus.server.app\n")
    assert upward_imports("tokasaurus.manager.loop", later) == ["tokasaurus.manager.loop imports tokasaurus.server.app"]


def test_imports_have_no_cycle() -> None:
    imports = {module: imported_modules(path) & set(MODULES) - {module} for module, path in MODULES.items()}
    while leaves := [module for module, imported in imports.items() if not imported]:
        for leaf in leaves:
            del imports[leaf]
        imports = {module: imported - set(leaves) for module, imported in imports.items()}
    assert not imports, "each of these imports another of them"


def test_only_the_workers_load_torch() -> None:
    """Checked after each module in one process, since loaded modules stay loaded."""
    modules = [module for module in MODULES if package_of(module) in WITHOUT_TORCH]
    script = (
        "import importlib, sys\n"
        f"for module in {modules!r}:\n"
        "    importlib.import_module(module)\n"
        "    assert 'torch' not in sys.modules, f'{module} loads torch'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_ray_has_a_package_of_its_own_that_nothing_else_imports() -> None:
    for module, path in MODULES.items():
        if package_of(module) != "ray":
            names = imported_modules(path)
            assert not any(name.split(".")[0] == "ray" or name.startswith("tokasaurus.ray") for name in names), module
    tops = ast.parse(MODULES["tokasaurus.ray"].read_text()).body
    assert not any(isinstance(node, ast.Import) for node in tops), "each part is loaded when it is used"


def test_flashinfer_has_one_importer_and_loads_late() -> None:
    library = "flashinfer"
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


def test_each_package_says_what_it_knows_and_what_it_does_not() -> None:
    for path in sorted(PACKAGE.rglob("__init__.py")):
        if path.parent != PACKAGE:
            said = ast.get_docstring(ast.parse(path.read_text())) or ""
            assert re.search(r"\bKnows\b", said), path
            assert re.search(r"Does not|does not|Imports little|Loads no|What an endpoint does", said), path


def test_folders_of_tests_mirror_the_package() -> None:
    for path in TESTS.values():
        folder = path.parent.relative_to(ROOT / "tests").as_posix().removesuffix("/helpers")
        # tests of what is not in the package
        is_beside = folder.split("/")[0] in ("benchmarks", "deploy", "docs_site", "release", "torture")
        is_mirrored = ((ROOT if is_beside else PACKAGE) / folder).is_dir()
        assert folder in OWN_FOLDERS or is_mirrored, path


def test_no_test_imports_another() -> None:
    """What two tests need is in a helper module: a test that changes cannot break another."""
    importers = [
        module
        for module, path in TESTS.items()
        if any(name.rpartition(".")[2].startswith("test_") for name in imported_modules(path) & set(TESTS))
    ]
    assert importers == []
    assert [path for path in TESTS.values() if "/helpers/" in path.as_posix() and path.name.startswith("test_")] == []
