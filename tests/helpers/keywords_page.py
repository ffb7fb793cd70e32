"""tokasaurus/library/keywords.py, made from the flags and from the bodies of requests."""

from __future__ import annotations

import inspect
import itertools
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tokasaurus.config import ServerConfig
from tokasaurus.flags import Flag
from tokasaurus.library.llm import NO_FLAGS
from tokasaurus.library.requests import OWN_FIELDS
from tokasaurus.library.sampling import Sampling
from tokasaurus.server.protocol.chat import ChatCompletionRequest
from tokasaurus.server.protocol.completions import CompletionRequest
from tokasaurus.server.protocol.known_fields import KNOWN_FIELDS

PATH = Path(__file__).parents[2] / "tokasaurus" / "library" / "keywords.py"
INTRODUCTION = '''\
"""Keywords of `LLM` and of its methods, for type checkers.

`make reference` makes this file from `tokasaurus/config.py` and the bodies of requests; a test compares them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from typing_extensions import TypedDict
'''
_TYPES = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None", "array": "list[Any]"}


def page() -> str:
    completion, chat = _options(CompletionRequest), _options(ChatCompletionRequest)
    assert completion.items() <= chat.items(), "ChatOptions has all of CompletionOptions"
    further = {name: kind for name, kind in chat.items() if name not in completion}
    parts = [
        INTRODUCTION,
        'class EngineFlags(TypedDict, total=False):\n    """Flags of `toka` that `LLM` takes."""\n',
        *(
            f"{_line(name, _type_of_flag(flag))}\n{_docstring(flag.meaning)}"
            for name, flag in ServerConfig.flags.items()
            if name not in (*NO_FLAGS, "model")
        ),
        '\n\nclass CompletionOptions(TypedDict, total=False):\n    """Other fields of /v1/completions."""\n',
        *itertools.starmap(_line, completion.items()),
        '\n\nclass ChatOptions(CompletionOptions, total=False):\n    """Other fields of /v1/chat/completions."""\n',
        *itertools.starmap(_line, further.items()),
    ]
    text = "\n".join([parts[0], "", *parts[1:]]) + "\n"
    command = [sys.executable, "-m", "ruff", "format", f"--stdin-filename={PATH}", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=PATH.parent).stdout


def _type_of_flag(flag: Flag) -> str:
    words = [*flag.choices, *flag.synonyms]
    kind = _literal(words) if words else flag.kind.__name__
    return {"dict": "dict[str, Any]"}.get(kind, kind) + (" | None" if flag.is_optional else "")


def _docstring(meaning: str) -> str:
    text = meaning[0].upper() + meaning[1:] + "."
    return textwrap.fill(
        f'"""{text}"""', 120, initial_indent=" " * 4, subsequent_indent=" " * 4, break_on_hyphens=False
    )


def _options(body: type[BaseModel]) -> dict[str, str]:
    """Fields that `generate` and `chat` pass on, and that have an effect or at least any value."""
    forms = body.model_json_schema()
    return {
        name: _type_of(forms["properties"][name], forms["$defs"])
        for name in body.model_fields
        if name not in (*inspect.signature(Sampling).parameters, *OWN_FIELDS)
        and not (name in KNOWN_FIELDS and KNOWN_FIELDS[name].is_neutral_only)
    }


def _type_of(form: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    if "$ref" in form:
        return _type_of(definitions[form["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in form or "oneOf" in form:
        kinds = [_type_of(part, definitions) for part in form.get("anyOf") or form["oneOf"]]
        return " | ".join(sorted(dict.fromkeys(kinds), key=lambda kind: kind == "None"))
    if "enum" in form:
        return _literal(form["enum"])
    if form.get("type") == "object":
        return "Mapping[str, Any]"
    if form.get("type") == "array" and "items" in form:
        return f"list[{_type_of(form['items'], definitions)}]"
    return _TYPES.get(form.get("type", ""), "Any")


def _literal(words: Sequence[str]) -> str:
    quoted = ", ".join(f'"{word}"' for word in words)
    return f"Literal[{quoted}]"


def _line(name: str, kind: str) -> str:
    return f"    {name}: {kind}"
