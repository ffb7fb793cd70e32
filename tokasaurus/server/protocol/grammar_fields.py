"""Fields that constrain the format of the text: OpenAI's response_format, vLLM's structured_outputs and guided_*,
SGLang's json_schema, regex and ebnf, and llama.cpp's grammar.

Each is parsed to a GrammarSource, or None if it sets no constraint. The grammar itself is validated later, by
`server.grammars`.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import orjson
from pydantic import ConfigDict, Field, PlainValidator
from pydantic_core import PydanticCustomError

from tokasaurus.server.protocol.exact_schema import SchemaError, exact_schema
from tokasaurus.server.protocol.fields import StrictObject, Text, not_implemented, value_error
from tokasaurus.server.value_words import MAX_ECHO_CHARS
from tokasaurus.text.exact_json import dumps, loads

GrammarFormat = Literal["json_schema", "regex", "choice", "lark", "gbnf"]


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """The client's grammar, in one of the formats that the grammar validator reads."""

    format: GrammarFormat
    text: str
    """For json_schema, the schema as JSON; for choice, a list of strings as JSON."""
    param: str
    """The request field that it comes from."""
    line_params: Mapping[int, str] = field(default_factory=dict)
    """If the text was built from several fields: line number (from 1) -> the field of that line."""
    refusal: str = ""
    """Why the grammar cannot be followed, to be read after `param`; "" if nothing is known to be wrong."""


# Whitespace allowed between two JSON tokens: one space, or a newline with limited indentation. Without a limit, a small
# model may generate spaces forever.
WHITESPACE_PATTERN = r"\x20|\r?\n[\x20\t]{0,40}"
# The letters of JSON's short escapes. Each character then has one spelling, so that a property name cannot be repeated
# in another spelling, such as "\u0061".
SHORT_ESCAPES = 'nrbtf\\"'

_SCHEMA_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
# A schema in Lark, or a comment, string or regular expression, which may look like one.
_LARK_SCHEMA = re.compile(r"""//[^\n]*|\#[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|(?P<schema>%json)\s*(?=\{)""")
_GBNF_RULE = re.compile(r"^[ \t]*[A-Za-z0-9_-]+[ \t]*::=", re.ASCII | re.MULTILINE)


def _check_keys(value: Mapping[str, object], known: tuple[str, ...], where: str) -> None:
    for name in value:
        if name not in known:
            raise value_error(f"contains the unknown field {where}{name[:MAX_ECHO_CHARS]!r}")


def _schema_text(schema: Mapping[str, object], whitespace: bool, is_strict: bool) -> str:
    """The schema as JSON with our llguidance options, which clients must not set. Raises SchemaError."""
    if "x-guidance" in schema:
        raise not_implemented("contains x-guidance, which is not implemented")
    schema = exact_schema(schema, is_strict)
    options: dict[str, object] = {"whitespace_flexible": False}
    if whitespace:
        options = {"whitespace_pattern": WHITESPACE_PATTERN}
    try:
        text = dumps({**schema, "x-guidance": options}).decode()
        if r"\u00" not in text and "\x7f" not in text:  # llguidance needs \u to write control characters
            text = dumps({**schema, "x-guidance": options | {"json_allowed_escapes": SHORT_ESCAPES}}).decode()
    except orjson.JSONEncodeError:
        raise value_error("is nested too deeply") from None
    return text


ANY_OBJECT: Mapping[str, object] = {"type": "object"}


def _json_source(value: object, param: str, whitespace: bool = True, is_strict: bool = True) -> GrammarSource:
    """value: a schema as an object or as JSON text. is_strict: keywords that cannot be followed are refused."""
    schema = value
    if isinstance(value, str):
        try:
            schema = loads(value)
        except orjson.JSONDecodeError as error:
            raise value_error(f"is not valid JSON: {error.msg}") from None
    if not isinstance(schema, dict):
        raise value_error("must be a JSON schema: an object, or its text")
    try:
        return GrammarSource("json_schema", _schema_text(schema, whitespace, is_strict), param)
    except SchemaError as error:
        return GrammarSource("json_schema", "", param, refusal=str(error))


def _regex_source(value: object, param: str) -> GrammarSource:
    if not isinstance(value, str) or not value:
        raise value_error("must be a regular expression: a string that is not empty")
    return GrammarSource("regex", value, param)


def _choice_source(value: object, param: str) -> GrammarSource:
    if not isinstance(value, list) or not value or not all(isinstance(choice, str) for choice in value):
        raise value_error("must be a list of strings that is not empty")
    return GrammarSource("choice", orjson.dumps(value).decode(), param)


def _grammar_source(value: object, param: str) -> GrammarSource:
    if not isinstance(value, str) or not value.strip():
        raise value_error("must be a grammar: a string that is not empty")
    if _GBNF_RULE.search(value):
        return GrammarSource("gbnf", value, param)
    try:
        return GrammarSource("lark", _with_exact_schemas(value), param)
    except SchemaError as error:
        return GrammarSource("lark", "", param, refusal=f"has a schema after %json that {error}")


def _with_exact_schemas(lark: str) -> str:
    """The grammar with schemas that llguidance follows, after each `%json`. Raises SchemaError."""
    parts, begin, position = [], 0, 0
    while (found := _LARK_SCHEMA.search(lark, position)) is not None:
        position = found.end()
        if found["schema"] is None:
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(lark, position)
        except (ValueError, RecursionError):
            break  # llguidance says what is wrong
        parts += [lark[begin:position], json.dumps(exact_schema(schema), ensure_ascii=False)]
        begin = position = end
    return "".join([*parts, lark[begin:]])


def parse_flat_format(value: Mapping[str, object], param: str, **more: object) -> GrammarSource | None:
    """As `parse_response_format`, of a format that has beside its type what json_schema has in chat. more: further
    fields of json_schema."""
    nested: object = value
    if value["type"] == "json_schema":
        inner = {name: field for name, field in value.items() if name != "type"}
        nested = {"type": "json_schema", "json_schema": {**more, **inner}}
    try:
        return parse_response_format(nested, param)
    except PydanticCustomError as error:
        message = error.message().replace("json_schema.", "")
        raise PydanticCustomError(error.type, "{message}", {"message": message}) from None


def parse_response_format(value: object, param: str = "response_format") -> GrammarSource | None:
    """The grammar of an OpenAI response format; None for any text. param: of the result. Raises PydanticCustomError."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise value_error("must be an object")
    kind = value.get("type")
    if kind == "text":
        _check_keys(value, ("type",), "")
        return None
    if kind == "json_object":
        _check_keys(value, ("type", "schema", "value"), "")
        given = [name for name in ("schema", "value") if value.get(name) is not None]
        if len(given) > 1:
            raise value_error("must have just one of schema and value; it has both")
        # llama.cpp's and together.ai's; that of TGI, which Hugging Face's InferenceClient sends
        return _json_source(value[given[0]] if given else dict(ANY_OBJECT), param, is_strict=False)
    if kind == "json_schema":
        given = [name for name in ("json_schema", "schema", "value") if value.get(name) is not None]
        _check_keys(value, ("type", "json_schema", "schema", "value"), "")
        if len(given) > 1:
            raise value_error(f"must have just one of json_schema, schema and value; it has {' and '.join(given)}")
        if given in (["schema"], ["value"]):  # llama.cpp's and together.ai's; TGI's
            return _json_source(value[given[0]], param, is_strict=False)
        return _parse_json_schema(value.get("json_schema"), param)
    if kind in ("json", "regex"):  # TGI's
        _check_keys(value, ("type", "value"), "")
        schema_or_regex = value.get("value")
        if kind == "json":
            return _json_source(schema_or_regex, param, is_strict=False)
        return _regex_source(schema_or_regex, param)
    if kind == "structural_tag":
        raise not_implemented("of type structural_tag is not implemented")
    raise value_error('must have "text", "json_object", "json_schema", "json" or "regex" as its "type"')


def _parse_json_schema(value: object, param: str) -> GrammarSource:
    """strict: what cannot be followed is refused. name, description: checked, but not shown to the model."""
    if not isinstance(value, dict):
        raise value_error("must have an object as its json_schema")
    _check_keys(value, ("name", "schema", "strict", "description"), "json_schema.")
    name = value.get("name")
    if not isinstance(name, str) or not _SCHEMA_NAME.fullmatch(name):
        raise value_error("must have 1 to 64 letters, digits, - or _ as its json_schema.name")
    if not isinstance(value.get("strict"), bool | None):
        raise value_error("must have true or false as its json_schema.strict")
    if not isinstance(value.get("description"), str | None):
        raise value_error("must have a string as its json_schema.description")
    if not isinstance(value.get("schema"), dict):
        raise value_error("must have a JSON schema, which is an object, as its json_schema.schema")
    return _json_source(value["schema"], param, is_strict=value.get("strict") is True)


BACKENDS = (None, "auto", "guidance")
"""Names of what follows grammars here, as vLLM has them."""

_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_REFUSED_OPTIONS = ("disable_additional_properties", "whitespace_pattern", "structural_tag")
_OPTIONS = ("disable_any_whitespace", *_REFUSED_OPTIONS, "backend")


def _parse_structured_outputs(value: object) -> GrammarSource | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise value_error("must be an object")
    _check_keys(value, _KINDS + _OPTIONS, "")
    for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
        if not isinstance(value.get(name), bool | None):
            raise value_error(f"must have true or false as its {name}")
    for name in _REFUSED_OPTIONS:
        if value.get(name) not in (None, False):
            raise not_implemented(f"contains {name}, which is not implemented")
    if value.get("backend") not in BACKENDS:
        raise not_implemented('has a backend that is not implemented: only null, "auto" and "guidance" are accepted')
    asked = [kind for kind in _KINDS if value.get(kind) not in (None, False)]
    if len(asked) != 1:
        found = " and ".join(asked) or "none"
        raise value_error(f"must have just one of {', '.join(_KINDS)}; it has {found}")
    kind = asked[0]
    param = f"structured_outputs.{kind}"
    whitespace = not value.get("disable_any_whitespace")
    if kind == "json_object":
        return _json_source(dict(ANY_OBJECT), param, whitespace)
    if kind == "json":
        return _json_source(value["json"], param, whitespace)
    if not whitespace:
        raise value_error("has disable_any_whitespace, which goes with json and json_object")
    return _SOURCES[kind](value[kind], param)


_SOURCES: dict[str, Callable[[object, str], GrammarSource]] = {
    "json": _json_source,
    "regex": _regex_source,
    "choice": _choice_source,
    "grammar": _grammar_source,
}


# For the OpenAPI page. They do not validate: of a union, pydantic reports what each alternative misses, and the
# functions above say in one sentence what is wrong with the format that the client means, and tell values that are
# wrong from those that are only not implemented here.
_Choices = Annotated[list[str], Field(min_length=1)]


class PlainFormat(StrictObject):
    type: Literal["text"]


_Schema = dict[str, Any] | Text


class ObjectFormat(StrictObject):
    """schema: of llama.cpp and together.ai."""

    type: Literal["json_object"]
    schema_: Annotated[_Schema | None, Field(alias="schema")] = None


class ValueFormat(StrictObject):
    """TGI's."""

    type: Literal["json", "json_object", "json_schema"]
    value: _Schema


class RegexFormat(StrictObject):
    """TGI's."""

    type: Literal["regex"]
    value: Text


class SchemaFormat(StrictObject):
    """A schema beside the type, as llama.cpp and together.ai have it."""

    type: Literal["json_schema"]
    schema_: Annotated[_Schema, Field(alias="schema")]


class NamedSchema(StrictObject):
    name: Annotated[str, Field(pattern=f"^{_SCHEMA_NAME.pattern}$")]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None
    description: str | None = None


class JsonSchemaFormat(StrictObject):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class StructuredOutputsForm(StrictObject):
    """Just one of json, regex, choice, grammar and json_object."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    json_: Annotated[dict[str, Any] | Text | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: _Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    backend: Literal["auto", "guidance"] | None = None


def _guided(kind: str, form: Any) -> PlainValidator:
    param = f"guided_{kind}"
    return PlainValidator(lambda value: None if value is None else _SOURCES[kind](value, param), form | None)


_Formats = PlainFormat | ObjectFormat | JsonSchemaFormat | ValueFormat | SchemaFormat | RegexFormat
ResponseFormat = Annotated[
    GrammarSource | None, PlainValidator(lambda value: parse_response_format(value), _Formats | None)
]
StructuredOutputs = Annotated[
    GrammarSource | None, PlainValidator(_parse_structured_outputs, StructuredOutputsForm | None)
]
GuidedJson = Annotated[GrammarSource | None, _guided("json", dict[str, Any] | Text)]
GuidedRegex = Annotated[GrammarSource | None, _guided("regex", Text)]
GuidedChoice = Annotated[GrammarSource | None, _guided("choice", _Choices)]
GuidedGrammar = Annotated[GrammarSource | None, _guided("grammar", Text)]


def _top(param: str, kind: str, form: Any) -> PlainValidator:
    """A field of its own, which clients also send empty for no grammar."""
    return PlainValidator(
        lambda value: None if value is None or value in ("", {}) else _SOURCES[kind](value, param), form | None
    )


TopJsonSchema = Annotated[GrammarSource | None, _top("json_schema", "json", dict[str, Any] | str)]
TopRegex = Annotated[GrammarSource | None, _top("regex", "regex", str)]
TopEbnf = Annotated[GrammarSource | None, _top("ebnf", "grammar", str)]
TopGrammar = Annotated[GrammarSource | None, _top("grammar", "grammar", str)]
