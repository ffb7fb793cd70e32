"""The parameters of FlashInfer's calls and the dtypes of its kernels, read from the package's source: it cannot be
imported without its own needs.

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

import torch

RECORD = Path(__file__).with_name("flashinfer_parameters.json")

PREFILL, DECODE = "BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"
_FILES = {PREFILL: "prefill.py", DECODE: "decode.py"}
# The decode wrapper's `plan` takes any keyword and hands all of them to this method.
_BOTH = {"__init__": "__init__", "run": "run", "reset_workspace_buffer": "reset_workspace_buffer"}
_METHODS = {
    PREFILL: {**_BOTH, "plan": "plan"},
    DECODE: {**_BOTH, "plan": "_plan_impl", "fast_decode_plan": "fast_decode_plan"},
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
        methods |= {node.name: _parameters(node.args) for node in tree.body if isinstance(node, ast.FunctionDef)}
        found[name] = {method: methods[source] for method, source in _METHODS[name].items()}
    return found


def read_dtypes(directory: Path) -> dict[str, list[str]]:
    """The tables in which a module's name is looked up -> names in torch, by the argument of `plan`."""
    tree = ast.parse((directory / "flashinfer/jit/utils.py").read_text())
    tables = {
        ast.unparse(node.targets[0]): [ast.unparse(key).removeprefix("torch.") for key in node.value.keys if key]
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    }
    outputs = tables["filename_safe_dtype_map"]
    return {"q_data_type": outputs, "kv_data_type": tables["dtype_map_kv"], "o_data_type": outputs}


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
    return {version: _signature(found["wrappers"][wrapper][method]) for version, found in record.items()}


@functools.cache
def recorded_dtypes(argument: str) -> dict[str, set[torch.dtype]]:
    """By version. argument: of `plan`."""
    record = json.loads(RECORD.read_text())
    return {version: {getattr(torch, name) for name in found["dtypes"][argument]} for version, found in record.items()}


def _signature(parameters: list[list[Any]]) -> Signature:
    return Signature(
        [
            Parameter(name, getattr(Parameter, kind), default=None if has_default else Parameter.empty)
            for name, kind, has_default in parameters
        ]
    )


def read_package(directory: Path) -> dict[str, Any]:
    """What the record has of one version. directory: contains the package `flashinfer`."""
    return {"dtypes": read_dtypes(directory), "wrappers": read_parameters(directory)}


def main() -> None:
    pairs = (argument.split("=", 1) for argument in sys.argv[1:])
    print(json.dumps({version: read_package(Path(directory)) for version, directory in pairs}, indent=1))


if __name__ == "__main__":
    main()
