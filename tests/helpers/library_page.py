"""The reference in docs/library.md, made from the docstrings."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import tokasaurus
from tokasaurus.library.map import options as map_options

ROOT = Path(__file__).parents[2]
PATH = ROOT / "docs" / "library.md"
HEADING = "## Reference\n"
INTRODUCTION = """
`make reference` makes this part from the docstrings, which `help(LLM.generate)` shows as well; a test compares the two.
"""
NAMES = (
    *("LLM", "Client", "AsyncLLM", "AsyncClient", "Sampling"),
    *("Results", "Result", "Sample", "ToolCall", "RowError", "Score", "MapSummary"),
    *("EngineError", "ServerError", "RowsFailed", "JobChanged", "OutputInUse", "OutputFull", "RowMisfit"),
)
"""What the package exports, in the order of the page."""
ALIASES = {
    "Message": "requests",
    "Prompt": "requests",
    "Row": "client",
    "Schema": "requests",
    "ParsedT": "results",
    "PromptOf": "map.prompts",
    "Rows": "map.sources",
}
"""Names in signatures, and their modules below tokasaurus.library."""
_SAME_METHODS = {
    "LLM": "The methods are those of `Client`.",
    "AsyncLLM": "The methods are those of `AsyncClient`.",
}
_NOT_FOR_USERS = ("end", "shared_fields")
_MAX_LINE = 100


def page() -> str:
    """The whole page: its hand-written part as it is, and the reference anew."""
    written, heading, _ = PATH.read_text().partition(HEADING)
    assert heading, f"{PATH} has no heading {HEADING!r}"
    return written + heading + reference()


def reference() -> str:
    parts = [INTRODUCTION]
    for name in NAMES:
        parts += _class_part(name)
    parts.append("### Types\n")
    parts += [_alias_part(name, module) for name, module in ALIASES.items()]
    return "\n".join(parts).rstrip("\n") + "\n"


def _class_part(name: str) -> list[str]:
    node = _class_node(name)
    parts = [f"### {name}\n"]
    docstring = ast.get_docstring(node)
    assert docstring, f"{name} has no docstring"
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
    by_name = {method.name: method for method in methods}  # of overloads, the last
    constructor = by_name.pop("__init__", None)
    if constructor is not None:
        parts.append(_signature(name, constructor))
    parts.append(_markdown(docstring, []))
    if constructor is not None:
        parts.append(_docstring(constructor))
    fields = _fields(node)
    fields += [
        _field(method.name, ast.unparse(method.returns), None, ast.get_docstring(method) or "")
        for method in by_name.values()
        if method.returns is not None and any(ast.unparse(item) == "property" for item in method.decorator_list)
    ]
    if fields:
        parts.append("".join(fields))
    if name in _SAME_METHODS:
        parts.append(_SAME_METHODS[name] + "\n")
        return parts
    same = [method for method in by_name.values() if _is_same_as_blocking(method)]
    if same:
        parts.append("".join(f"- `{method.name}`: {_flow(ast.get_docstring(method) or '')}\n" for method in same))
    for method in by_name.values():
        if method in same:
            continue
        if method.name[0] != "_" and method.name not in _NOT_FOR_USERS and not method.decorator_list:
            parts += [f"#### {name}.{method.name}\n", _signature(method.name, method), _docstring(method)]
    return parts


def _is_same_as_blocking(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it has the arguments of the method of `Client` of its name, where the page tells them."""
    return (ast.get_docstring(method) or "").startswith(f"`Client.{method.name}`") and ast.dump(
        method.args
    ) == ast.dump(
        next(
            item.args
            for item in _class_node("Client").body
            if isinstance(item, ast.FunctionDef) and item.name == method.name and not item.decorator_list
        )
    )


def _class_node(name: str, module: ModuleType | None = None) -> ast.ClassDef:
    module = module or inspect.getmodule(getattr(tokasaurus, name))
    assert module is not None
    tree = ast.parse(inspect.getsource(module))
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def _signature(name: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """As a caller sees it."""
    returns = "" if function.returns is None or name[0].isupper() else f" -> {ast.unparse(function.returns)}"
    # an async generator is iterated, other coroutines are awaited
    word = "async " if isinstance(function, ast.AsyncFunctionDef) and "AsyncIterator" not in returns else ""
    arguments = _arguments(function.args)
    line = f"{word}{name}({', '.join(arguments)}){returns}"
    if len(line) > _MAX_LINE:
        line = "\n".join([f"{word}{name}(", *(f"    {argument}," for argument in arguments), f"){returns}"])
    return f"```python\n{line}\n```\n"


def _arguments(arguments: ast.arguments) -> list[str]:
    """Without self."""
    required = [None] * (len(arguments.args) - len(arguments.defaults))
    pairs = zip(arguments.args, [*required, *arguments.defaults], strict=True)
    parts = [_argument(*pair) for pair in list(pairs)[1:]]
    if arguments.kwonlyargs:
        parts.append("*")
        parts += [_argument(*pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg is not None and arguments.kwarg.arg == "keywords":
        fields = [item for item in _class_node("MapOptions", map_options).body if isinstance(item, ast.AnnAssign)]
        parts += ["*", *map(ast.unparse, fields), "**options: Unpack[ChatOptions]"]
    elif arguments.kwarg is not None:
        parts.append(f"**{_argument(arguments.kwarg, None)}")
    return [part.replace("'", '"') for part in parts]


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    assert argument.annotation is not None, argument.arg
    value = "" if default is None else f" = {ast.unparse(default)}"
    return f"{argument.arg}: {ast.unparse(argument.annotation)}{value}"


def _docstring(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    arguments = function.args
    names = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
    names += [argument.arg for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    if "keywords" in names:
        names += [*map_options.KEYWORDS, "options"]
    return _markdown(ast.get_docstring(function) or "", names)


def _markdown(docstring: str, arguments: list[str]) -> str:
    """A docstring without its programs, which the page has above, whose lines `name: meaning` become a list."""
    lines: list[str] = []
    is_item = False
    for line in re.sub(r"```python\n.*?```\n\n?", "", docstring, flags=re.DOTALL).splitlines():
        found = re.match(r"(\w+(?:, \w+)*): (.*)", line)
        if found and set(found[1].split(", ")) <= set(arguments):
            if not is_item and lines and lines[-1]:
                lines.append("")
            is_item = True
            names = ", ".join(f"`{name}`" for name in found[1].split(", "))
            lines.append(f"- {names}: {found[2]}")
        else:
            is_item = is_item and bool(line)
            lines.append(f"  {line}" if is_item else line)
    return "\n".join(lines) + "\n"


def _fields(node: ast.ClassDef) -> list[str]:
    """The fields of a dataclass, each with the docstring below it."""
    parts = []
    for item, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            default = None if item.value is None else ast.unparse(item.value)
            default = {"dataclasses.field(default_factory=dict)": "{}"}.get(default or "", default)
            parts.append(_field(item.target.id, ast.unparse(item.annotation), default, _text_of(following)))
    return parts


def _flow(text: str) -> str:
    return " ".join(text.split())


def _text_of(node: ast.AST | None) -> str:
    """Of a docstring below a field, without line breaks."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return _flow(str(node.value.value)) if is_text else ""  # type: ignore[union-attr]


def _field(name: str, annotation: str, default: str | None, text: str) -> str:
    value = f" = {default}" if default is not None else ""
    meaning = f": {text}" if text else ""
    return f"- `{name}: {annotation}{value}`{meaning}\n"


def _alias_part(name: str, module: str) -> str:
    tree = ast.parse(inspect.getsource(import_module(f"tokasaurus.library.{module}")))
    body = [item for node in tree.body for item in (node.body if isinstance(node, ast.If) else [node])]
    for item, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(item, ast.AnnAssign | ast.Assign) and item.value is not None:
            target = item.targets[0] if isinstance(item, ast.Assign) else item.target
            if ast.unparse(target) == name:
                value = str(item.value.value) if isinstance(item.value, ast.Constant) else ast.unparse(item.value)
                return f"- `{name}`: `{value}`. {_text_of(following)}"
    raise AssertionError(f"{module} has no {name}")
