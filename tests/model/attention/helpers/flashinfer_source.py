"""The parameters of FlashInfer's calls, read from the package's source: it cannot be imported without its own needs.

Recorded for the versions that the backend is written for: `python -m tests.model.attention.helpers.flashinfer_source
VERSION=DIRECTORY ...`, where each directory has the unpacked package, prints the record. `make test-flashinfer`
compares it with both packages.
"""

import ast
import functools
import json
import sys
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("flashinfer_parameters.json")

PREFILL, DECODE = "BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"
_FILES = {PREFILL: "prefill.py", DECODE: "decode.py"}
# The decode wrapper's `plan` takes any keyword and hands all of them to this method.
_METHODS = {PREFILL: {"__init__": "__init__", "plan": "plan", "run": "run"}}
_METHODS[DECODE] = {
    **{"__init__": "__init__", "plan": "_plan_impl", "run": "run"},
    "reset_workspace_buffer": "reset_workspace_buffer",
}

Parameters = list[tuple[str, str, bool]]
"""Name, kind as in inspect.Parameter, and whether there is a default, of each parameter but self."""


def read_parameters(directory: Path) -> dict[str, dict[str, Parameters]]:
    """directory: contains the package `flashinfer` -> by wrapper and method."""
    found: dict[str, dict[str, Parameters]] = {}
    for name, file in _FILES.items():
        tree = ast.parse((directory / "flashinfer" / file).read_text())
        (wrapper,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        # Overloads come before the method that they describe, so that the last one stays.
        methods = {node.name: _parameters(node.args) for node in wrapper.body if isinstance(node, ast.FunctionDef)}
        found[name] = {method: methods[source] for method, source in _METHODS[name].items()}
    return found


def _parameters(arguments: ast.arguments) -> Parameters:
    positional = arguments.posonlyargs + arguments.args
    first_default = len(positional) - len(arguments.defaults)
    found = [(arg.arg, "POSITIONAL_OR_KEYWORD", i >= first_default) for i, arg in enumerate(positional)][1:]
    if arguments.vararg is not None:
        found.append((arguments.vararg.arg, "VAR_POSITIONAL", False))
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    found += [(arg.arg, "KEYWORD_ONLY", default is not None) for arg, default in pairs]
    if arguments.kwarg is not None:
        found.append((arguments.kwarg.arg, "VAR_KEYWORD", False))
    return found


@functools.cache
def recorded_signatures(wrapper: str, method: str) -> dict[str, Signature]:
    """By version."""
    record = json.loads(RECORD.read_text())
    return {version: _signature(wrappers[wrapper][method]) for version, wrappers in record.items()}


def _signature(parameters: list[list[Any]]) -> Signature:
    return Signature(
        [
            Parameter(name, getattr(Parameter, kind), default=None if has_default else Parameter.empty)
            for name, kind, has_default in parameters
        ]
    )


def main() -> None:
    pairs = (argument.split("=", 1) for argument in sys.argv[1:])
    print(json.dumps({version: read_parameters(Path(directory)) for version, directory in pairs}, indent=1))


if __name__ == "__main__":
    main()
