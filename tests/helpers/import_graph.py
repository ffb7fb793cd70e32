"""Modules of the repository, and what each imports."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tokasaurus"


def _modules(folder: str) -> dict[str, Path]:
    """By name; a package has the name of its folder."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


MODULES = _modules("tokasaurus")
TESTS = _modules("tests")
FILES = MODULES | TESTS
for _folder in ("benchmarks", "docs_site", "examples", "release", "torture"):
    FILES |= _modules(_folder)


@cache
def imported_modules(path: Path) -> frozenset[str]:
    """Modules that a file imports anywhere, lazy imports included; `from a import b` counts as a and a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            assert node.module is not None
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def importers() -> dict[str, set[str]]:
    """Each module -> those that import it themselves."""
    found: dict[str, set[str]] = {name: set() for name in FILES}
    for name, path in FILES.items():
        for imported in imported_modules(path) & FILES.keys():
            found[imported].add(name)
    return found
