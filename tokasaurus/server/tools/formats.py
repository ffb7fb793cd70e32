"""Formats in which models write tool calls: one table, whose rows docs/api.md lists ("Tools")."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Arguments = Mapping[str, Any] | str
"""Of a call; a text, which may not be JSON, is written as it is."""


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """A call is a JSON object {name_key: …, arguments_key: …}, or a name between `prefix` and `middle`, its arguments,
    and `closing`. Calls stand between marks, each of them or all together."""

    name: str
    """The value of tool_call_format that selects this format."""
    models: str
    """Models that write it, for readers. Their templates, as published with them, are the source of the format."""
    start_mark: str = ""
    """The text that begins a call, or the list of calls."""
    before: str = ""
    """Text between the start mark and the first call; a list may begin with a bracket."""
    after: str = ""
    """Text between the last call and the end mark."""
    end_mark: str = ""
    separator: str = "\n"
    """Written between calls."""
    is_list: bool = False
    """Whether one pair of marks is around all calls."""
    name_key: str = "name"
    """Empty if calls are no objects, but have `prefix`, `middle` and `closing`."""
    arguments_key: str = "arguments"
    prefix: str = ""
    middle: str = ""
    closing: str = ""
    id_mark: str = ""
    """What separates the name from an id, which `middle` follows. Ids are optional, and not written here."""
    syntax: Literal["json", "python", "gemma"] = "json"
    """How arguments are written: as an object in JSON; as Python's named arguments, in parentheses; as an object with
    bare keys, and strings between two `quote`."""
    quote: str = ""
    asked_by: str = ""
    """Text, without white space, by which templates that do not show calls ask for this format."""
    as_metadata: bool = False
    """Whether the template shows a call as a message with the name as its metadata and the arguments as content."""

    @property
    def start(self) -> str:
        return self.start_mark + self.before

    @property
    def end(self) -> str:
        return self.after + self.end_mark

    @property
    def ignored(self) -> str:
        """Characters that are dropped between calls and after the last."""
        return " \t\n\r" if self.is_list else f" \t\n\r{self.separator.strip()}"

    @property
    def marks(self) -> list[str]:
        """Texts that may be single tokens."""
        parts = (self.start_mark, self.end_mark, self.prefix, self.middle, *self.closing.split())
        return [part for part in parts if part]

    def opening(self, name: str) -> str:
        """The text of a call before its arguments."""
        if not self.name_key:
            return f"{self.prefix}{name}{self.middle}"
        return f'{{"{self.name_key}": {json.dumps(name)}, "{self.arguments_key}": '

    @property
    def bracket(self) -> str:
        """With which arguments begin."""
        return "(" if self.syntax == "python" else "{"

    @property
    def ending(self) -> str:
        """The text of a call behind its arguments."""
        return "}" if self.name_key else self.closing

    def write(self, name: str, arguments: Arguments) -> str:
        """An answer with one call, as models are trained to write it."""
        return self.write_all([(name, arguments)])

    def write_all(self, calls: Iterable[tuple[str, Arguments]]) -> str:
        """An answer with these calls."""
        return "".join(text for text, _ in self.parts(calls))

    def parts(self, calls: Iterable[tuple[str, Arguments]]) -> Iterator[tuple[str, bool]]:
        """(text, whether it is of the marks around calls) of an answer with these calls."""
        written = [f"{self.opening(name)}{self._write_arguments(given)}{self.ending}" for name, given in calls]
        for number, text in enumerate([self.separator.join(written)] if self.is_list else written):
            if number > 0:
                yield self.separator, False
            yield self.start, True
            yield text, False
            yield self.end, True

    def _write_arguments(self, arguments: Arguments) -> str:
        if isinstance(arguments, str):
            return arguments
        match self.syntax:
            case "python":
                named = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
                return f"({', '.join(named)})"
            case "gemma":
                return self._write_gemma(arguments)
        return json.dumps(arguments, ensure_ascii=False)

    def _write_gemma(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self.quote}{value}{self.quote}"
        if isinstance(value, Mapping):
            return "{" + ",".join(f"{key}:{self._write_gemma(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(self._write_gemma, value)) + "]"
        return json.dumps(value)


HERMES = ToolCallFormat(
    "hermes",
    "Qwen 2.5, Qwen 3, Hermes, Granite 4, EXAONE 4, SmolLM3; templates without tools",
    start_mark="<tool_call>",
    before="\n",
    after="\n",
    end_mark="</tool_call>",
    asked_by='<tool_call>{"name":',
)
LLAMA3 = ToolCallFormat("llama3", "Llama 3.1 to 3.3", separator="; ", arguments_key="parameters")
_LIST: dict[str, Any] = {"before": "[", "after": "]", "separator": ", ", "is_list": True}
_COHERE: dict[str, Any] = {"is_list": True, "name_key": "tool_name", "arguments_key": "parameters"}
_GEMMA: dict[str, Any] = {"separator": "", "name_key": "", "prefix": "call:", "syntax": "gemma"}
_ALL = (
    HERMES,
    ToolCallFormat("mistral", "Mistral 7B v0.3, Nemo, Ministral 8B", start_mark="[TOOL_CALLS]", **_LIST),
    ToolCallFormat(
        "mistral_args",
        "Mistral Small 3.2 and later, Devstral, Magistral, Ministral 3",
        start_mark="[TOOL_CALLS]",
        separator="",
        name_key="",
        middle="[ARGS]",
        id_mark="[CALL_ID]",
    ),
    # its template has no call: Ollama's for the same model has
    ToolCallFormat("phi4_mini", "Phi-4-mini", start_mark="<|tool_call|>", end_mark="<|/tool_call|>", **_LIST),
    ToolCallFormat("granite", "Granite 3", start_mark="<|tool_call|>", asked_by="<|tool_call|>", **_LIST),
    ToolCallFormat(
        "command_r",
        "Command R, Command R+",
        start_mark="Action:",
        before="\n```json\n[\n",
        after="\n]",
        end_mark="```",
        separator=",\n",
        **_COHERE,
    ),
    ToolCallFormat(
        "command_r7b",
        "Command R7B, Command A",
        start_mark="<|START_ACTION|>",
        before="[\n    ",
        after="\n]",
        end_mark="<|END_ACTION|>",
        separator=",\n    ",
        **_COHERE,
    ),
    ToolCallFormat("nemotron", "Llama Nemotron", start_mark="<TOOLCALL>", end_mark="</TOOLCALL>", **_LIST),
    ToolCallFormat(
        "hunyuan",
        "Hunyuan",
        start_mark="<tool_calls>",
        end_mark="</tool_calls>",
        is_list=True,
        name_key="",
        prefix="<tool_call>",
        middle="\n```json\n",
        closing="\n```</tool_call>",
    ),
    ToolCallFormat(
        "hyperclovax",
        "HyperCLOVA X SEED Think",
        start_mark="-> tool/function_call",
        before="\n[",
        after="]",
        separator=", ",
        is_list=True,
    ),
    ToolCallFormat(
        "apertus",
        "Apertus",
        start_mark="<|tools_prefix|>",
        end_mark="<|tools_suffix|>",
        name_key="",
        prefix='{"',
        middle='": ',
        closing="}",
        **_LIST,
    ),
    ToolCallFormat(
        "function_tag",
        "Kanana 1.5, Functionary 3.1",
        start_mark="<function=",
        end_mark="</function>",
        separator="",
        name_key="",
        middle=">",
    ),
    ToolCallFormat(
        "olmo3",
        "OLMo 3",
        start_mark="<function_calls>",
        end_mark="</function_calls>",
        is_list=True,
        name_key="",
        syntax="python",
    ),
    ToolCallFormat(
        "lfm2",
        "LFM2.5",
        start_mark="<|tool_call_start|>",
        end_mark="<|tool_call_end|>",
        name_key="",
        syntax="python",
        **_LIST,
    ),
    ToolCallFormat(
        "functiongemma",
        "FunctionGemma",
        start_mark="<start_function_call>",
        end_mark="<end_function_call>",
        quote="<escape>",
        **_GEMMA,
    ),
    ToolCallFormat("gemma4", "Gemma 4", start_mark="<|tool_call>", end_mark="<tool_call|>", quote='<|"|>', **_GEMMA),
    ToolCallFormat("glm4", "GLM-4-0414, GLM-Z1", name_key="", middle="\n", as_metadata=True),
    LLAMA3,  # the last: others have its objects between their marks
)
FORMATS = {format_.name: format_ for format_ in _ALL}
