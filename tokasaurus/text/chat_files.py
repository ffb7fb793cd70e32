"""Chat templates and named special tokens of a tokenizer's directory, as transformers reads them, without its import,
which takes a second.

The directory is one that transformers or the conversion of GGUF has saved: forms of these files from before version 5
of transformers are not read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

RESERVED_NAMES = frozenset(
    (
        *("self", "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "kwargs"),
    )
)
"""Names of transformers' renderer, which mean something else than variables of a template."""


@dataclass(frozen=True, slots=True)
class ChatFiles:
    """What the files say."""

    templates: Mapping[str, str]
    """By name; a single template is named "default"."""
    has_names: bool
    """Whether requests may choose a template by its name: there are several files, or a list."""
    named_tokens: Mapping[str, str]
    """Name in tokenizer_config.json (eos_token, bos_token, pad_token, …) → the token's text."""

    @property
    def default(self) -> str | None:
        """The template in use if a request names none; None if there is none."""
        return self.templates.get("default")

    def choose(self, tools: Sequence[object] | None) -> str:
        """The template for a request with these tools. Raises ValueError."""
        if tools is not None and "tool_use" in self.templates:
            return self.templates["tool_use"]
        if self.default is None:
            raise ValueError(f"the model has several chat templates, and none is the default: {sorted(self.templates)}")
        return self.default

    def named(self, name: str) -> str:
        """The template with this name; `name` itself, which then is a template, if there is none."""
        return self.templates.get(name, name) if self.has_names else name


def read_chat_files(directory: Path) -> ChatFiles:
    """Raises OSError, ValueError and TypeError for broken files."""
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not isinstance(config, dict):
        raise TypeError(f"{path.name} is no object")
    files = {"default": directory / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted(directory.glob("additional_chat_templates/*.jinja"))}
    templates = {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}
    has_names = bool(templates.keys() - {"default"})
    if not templates and (found := config.get("chat_template")):
        has_names = not isinstance(found, str)
        templates = {"default": found} if isinstance(found, str) else _listed(found)
    if not has_names and not templates.get("default"):
        templates = {}  # an empty file
    return ChatFiles(templates, has_names, _named_tokens(config))


def _listed(found: object) -> dict[str, str]:
    """The templates of a list, or an object."""
    if isinstance(found, list):
        found = {str(template["name"]): template["template"] for template in found}
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise TypeError("chat_template is neither a text nor a list of named texts")
    return found


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The usual names come first."""
    own = {name: value for name, value in config.items() if name.endswith("_token") and name not in _NAMES}
    texts = {name: value for name, value in own.items() if isinstance(value, str)}
    objects = {name: value for name, value in own.items() if isinstance(value, dict)}
    extra = config.get("extra_special_tokens")
    # transformers itself reads the third of these only where the others are empty
    further = texts | (extra if isinstance(extra, dict) else {}) or config.get("model_specific_special_tokens") or {}
    found = {name: config.get(name) for name in _NAMES} | objects | further
    return {name: text for name, value in found.items() if (text := _text_of(value)) is not None}


def _text_of(value: object) -> str | None:
    """Of a token: a text, or an object with its properties."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
