"""Renders chat templates, as transformers' `apply_chat_template` does, to texts that know who wrote each character.

Templates run in Jinja's sandbox, with the names and the conventions that transformers gives them: messages without
fields that are null, reasoning under each of its names, the named tokens as variables. A template sees a client's
strings as they are.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from secrets import token_hex
from string import Formatter
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tokasaurus.text.template_text import (
    TemplateText,
    client_text,
    concatenated,
    end_of_marked,
    marked_text,
    template_format,
    template_text,
)

# A template may join a token from a role, such as "<|" + role + "|>". A client may send only these.
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
# The names that templates know a message's reasoning by, the most usual first
_REASONING = ("reasoning_content", "thinking", "reasoning")
_MAX_COMPILED = 128
# Methods by which a client's text may take in a text of the template
_JOINING_METHODS = frozenset({"join", "replace"})


class _Generator(CodeGenerator):
    """Compiles each text that the template contains to a TemplateText. Names of fields, and texts that others are
    compared with, stay ordinary strings, which are faster."""

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return _literal("".join(group))

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if isinstance(node.value, str):
            self.write(_literal(node.value))
        else:
            super().visit_Const(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.write("str(")
            self.visit(part, frame)
            self.write("), ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Const):
            self.write("environment.getitem(")
            self.visit(node.node, frame)
            self.write(f", {node.arg.value!r})")
        else:
            super().visit_Getitem(node, frame)

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:
        if isinstance(node.expr, nodes.Const) and isinstance(node.expr.value, str) and node.op in ("eq", "ne"):
            self.write(f" {'==' if node.op == 'eq' else '!='} {node.expr.value!r}")
        else:
            super().visit_Operand(node, frame)


def _literal(text: str) -> str:
    return f"environment.literal({text!r})"


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _Generator
    concat = staticmethod(concatenated)
    literal = staticmethod(template_text)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if attribute in _JOINING_METHODS and isinstance(obj, str):
            obj = client_text(obj)
        return super().getattr(obj, attribute)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        written = super().wrap_str_format(value)
        template = getattr(value, "__self__", None)
        if written is None or not isinstance(template, TemplateText) or value.__name__ != "format":
            return written

        def formatted(*args: Any, **kwargs: Any) -> str:
            return template_format(template, _fields(template, args, kwargs), written(*args, **kwargs))

        return formatted


def _fields(template: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Each literal text of a format, with the value of the field that follows; "" for a field that is not just a name
    or a number."""
    fields: list[tuple[str, object]] = []
    number = 0
    for literal, name, spec, conversion in Formatter().parse(template):
        value: object = ""
        if name is not None and not spec and not conversion:
            if name == "":
                name, number = str(number), number + 1
            value = args[int(name)] if name.isdecimal() and int(name) < len(args) else kwargs.get(name, "")
        fields.append((literal, value))
    return fields


class _Generation(Extension):
    """`{% generation %}`: marks what the model writes, for training. Has no effect here."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _TemplateNamespace(Namespace):
    """Without names that begin with an underscore, by which a template might leave the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a name of the template's
        own, *given = args
        values: dict[str, Any] = dict(*given, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(own, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace of a chat template may not have the name {name!r}")


def _raise(message: str) -> None:
    raise TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the escapes for HTML that Jinja's own filter writes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(format_: str) -> str:
    return datetime.now().strftime(format_)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _safe(value: Any) -> Any:
    return value if isinstance(value, TemplateText) else FILTERS["safe"](value)


@pass_eval_context
def _replace(context: EvalContext, value: Any, *given: Any, **named: Any) -> Any:
    return FILTERS["replace"](context, client_text(str(value)), *given, **named)


@pass_eval_context
def _join(context: EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> Any:
    return FILTERS["join"](context, value, client_text(d), attribute)


@lru_cache(maxsize=1)
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, loopcontrols],
        optimized=False,  # it would hide constants within lists from the generator
    )
    environment.filters |= {"tojson": _to_json, "safe": _safe, "replace": _replace, "join": _join}
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": _now,
        "dict": _dict,
        "namespace": _TemplateNamespace,
    }
    return environment


@lru_cache(maxsize=_MAX_COMPILED)
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


def render(
    template: str,
    messages: Iterable[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: Mapping[str, Any],
    named_tokens: Mapping[str, str],
) -> TemplateText:
    """A prompt's text. The caller limits the time: a template may have a loop that never ends.

    variables: of the client; they come before `named_tokens`, such as bos_token. Raises ValueError, TemplateError, and
    whatever a template raises for what it does not expect."""
    chat = [_as_template_knows(message) for message in messages]
    if not chat:
        raise ValueError("there are no messages")
    tokens = {name: template_text(text) for name, text in named_tokens.items()}

    def rendered() -> TemplateText:
        given = {"messages": chat, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        text = _compiled(template).render({**tokens, **variables, **given})
        assert isinstance(text, TemplateText)
        return text

    return _cut_after_final_content(template, chat, rendered) if continue_final_message else rendered()


def _as_template_knows(message: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: value for name, value in message.items() if value is not None}
    reasoning = next((shown[name] for name in _REASONING if name in shown), None)
    if reasoning is not None:
        shown = {"thinking": reasoning, **shown, "reasoning_content": reasoning}
    if shown.get("role") in _ROLES:
        shown["role"] = template_text(shown["role"])
    return shown


def _cut_after_final_content(
    template: str, chat: list[dict[str, Any]], render: Callable[[], TemplateText]
) -> TemplateText:
    """The prompt, which ends with the content of the final message.

    The content is followed through the template. Where nothing of it gets into the prompt, as nothing does of an empty
    one, it is rendered once more with a word behind it. Raises ValueError."""
    content = chat[-1].get("content")
    if content is None:
        raise ValueError("the final message has no content to continue")
    if "content" not in template:
        raise ValueError("the chat template shows no content that could be continued")
    chat[-1]["content"] = marked_text(content)
    text = render()
    end = end_of_marked(text)
    if not end:
        word = f"end{token_hex(16)}"
        chat[-1]["content"] = f"{content}{word} "
        text = render()
        end = text.rfind(word)
        if end >= 0 and not text.startswith(f"{word} ", end):  # white space at the end is cut off
            end = len(text[:end].rstrip())
    if end < 0 or content.strip() not in text:
        raise ValueError(
            "the chat template does not show the whole content of the final message, which is to be continued"
        )
    return text[:end]
