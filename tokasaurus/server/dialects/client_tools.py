"""Tools that Anthropic's reference defines by a type alone, and the client runs: what the model is told of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ClientTool:
    name: str
    """The only name that the tool may have."""
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of a call's input."""


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _whole_number(description: str) -> dict[str, Any]:
    return {"type": "integer", "minimum": 0, "description": description}


_VIEW_RANGE = {
    "type": "array",
    "items": {"type": "integer"},
    "minItems": 2,
    "maxItems": 2,
    "description": "For view of a file: first and last line to show, counted from 1; -1 as the last is the file's end.",
}

_BASH = ClientTool(
    "bash",
    "Runs a command in a bash shell, which stays open from call to call, and returns what it prints.",
    {
        "type": "object",
        "properties": {
            "command": _text("The command to run; needed unless restart is true."),
            "restart": {"type": "boolean", "description": "true: start a new shell, and run no command."},
        },
    },
)


def _editor(name: str, inserted: str, commands: Mapping[str, str]) -> ClientTool:
    """inserted: the field with the text of insert. commands: beside those of all versions, with what they do."""
    does = {
        "view": "shows a file, or lists a directory",
        "create": "writes file_text to a new file",
        "str_replace": "replaces old_str, which must occur exactly once, by new_str",
        "insert": f"puts {inserted} after the line insert_line",
        **commands,
    }
    properties = {
        "command": {"type": "string", "enum": list(does), "description": "What to do."},
        "path": _text("The file or directory."),
        "view_range": _VIEW_RANGE,
        "file_text": _text("For create: the content of the file."),
        "old_str": _text("For str_replace: the text to replace, with its white space."),
        "new_str": _text("For str_replace: the new text."),
        "insert_line": _whole_number("For insert: the line after which the text goes; 0 is the file's beginning."),
    }
    if inserted == "new_str":
        properties["new_str"] = _text("For str_replace and insert: the new text.")
    else:
        properties[inserted] = _text("For insert: the new text.")
    described = "; ".join(f"{command} {what}" for command, what in does.items())
    schema = {"type": "object", "properties": properties, "required": ["command", "path"]}
    return ClientTool(name, f"Shows, creates and changes text files. {described}.", schema)


_MEMORY_COMMANDS = {
    "view": "shows a file, or lists a directory",
    "create": "writes file_text to a file",
    "str_replace": "replaces old_str by new_str",
    "insert": "puts insert_text at the line insert_line",
    "delete": "removes a file or directory",
    "rename": "moves old_path to new_path",
}
_MEMORY = ClientTool(
    "memory",
    "Keeps notes in files below /memories for later conversations: look there before a task, and write down what may "
    f"be needed again. {'; '.join(f'{command} {what}' for command, what in _MEMORY_COMMANDS.items())}.",
    {
        "type": "object",
        "properties": {
            "command": {"type": "string", "enum": list(_MEMORY_COMMANDS), "description": "What to do."},
            "path": _text("The file or directory, such as /memories/notes.txt; not for rename."),
            "view_range": _VIEW_RANGE,
            "file_text": _text("For create: the content of the file."),
            "old_str": _text("For str_replace: the text to replace."),
            "new_str": _text("For str_replace: the new text."),
            "insert_line": _whole_number("For insert: the number of the line."),
            "insert_text": _text("For insert: the new text."),
            "old_path": _text("For rename: the file or directory."),
            "new_path": _text("For rename: its new path."),
        },
        "required": ["command"],
    },
)
_OLD_EDITOR = _editor("str_replace_editor", "new_str", {"undo_edit": "takes the last change of the file back"})
_EDITOR = _editor("str_replace_based_edit_tool", "insert_text", {})

CLIENT_TOOLS: Mapping[str, ClientTool] = {
    "bash_20241022": _BASH,
    "bash_20250124": _BASH,
    "text_editor_20241022": _OLD_EDITOR,
    "text_editor_20250124": _OLD_EDITOR,
    "text_editor_20250429": _EDITOR,
    "text_editor_20250728": _EDITOR,
    "memory_20250818": _MEMORY,
}
"""By type."""
