"""Messages → prompt ids, with the model's chat template and the template fields of a body."""

from collections.abc import Sequence
from typing import Any

from tokasaurus.messages.status import EngineLimits
from tokasaurus.server.errors import InvalidRequest, shorten
from tokasaurus.server.prepare.context_length import too_long
from tokasaurus.server.protocol.chat import ChatMessage, TemplateFields
from tokasaurus.server.protocol.tools import Tool
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.tools.parser import THINKING_MARKS, is_in_thinking
from tokasaurus.server.tools.prompt import template_input
from tokasaurus.text.tokenizer import ChatTemplateError, TemplateVariableError, TextTooLong

_MAX_REASON_CHARS = 300
# More than a start of reasoning and the white space after it have.
_MAX_MARK_TOKENS = 32
_FLAGS = ("add_generation_prompt", "continue_final_message")


def encode_messages(
    messages: Sequence[ChatMessage],
    fields: TemplateFields,
    model: ServedModel,
    limits: EngineLimits | None = None,
    tools: Sequence[Tool] = (),
) -> list[int]:
    """The prompt ids of a chat. Tokenizes, so must not run on the event loop. Raises InvalidRequest.

    limits: a prompt whose text is so long that it must have more tokens than a sequence may is refused before it is
    tokenized. Other prompts with more tokens may be returned, so callers must check the length.
    """
    variables = _merged(fields)
    add_generation_prompt, continues = (_take_flag(variables, name) for name in _FLAGS)
    if add_generation_prompt and continues:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt: only one of them may be true",
            "continue_final_message",
        )
    shown_messages, shown_tools = template_input(messages, tools, model.tools)
    try:
        return model.tokenizer.encode_chat(
            shown_messages,
            add_generation_prompt=not continues if add_generation_prompt is None else add_generation_prompt,
            tools=shown_tools,
            continue_final_message=bool(continues),
            template_variables=variables,
            max_tokens=None if limits is None else limits.max_tokens_per_sequence,
        )
    except TemplateVariableError as error:
        raise InvalidRequest(f"chat_template_kwargs: {_reason(error)}", "chat_template_kwargs") from error
    except ChatTemplateError as error:
        raise InvalidRequest(f"messages: {_reason(error)}", "messages") from error
    except TextTooLong as error:
        assert limits is not None, "only a limit makes a text too long"
        raise too_long("messages", error, limits) from None


def opens_thinking(
    messages: Sequence[ChatMessage], fields: TemplateFields, prompt_ids: Sequence[int], model: ServedModel
) -> bool:
    """Whether the answer continues reasoning that the template, or the final message that it continues, has begun."""
    if _take_flag(_merged(fields), "continue_final_message"):
        return is_in_thinking(messages[-1].content or "")
    end = model.tokenizer.decode(prompt_ids[-_MAX_MARK_TOKENS:], skip_special_tokens=False).rstrip()
    return end.endswith(tuple(THINKING_MARKS))


def _reason(error: ChatTemplateError) -> str:
    """The error's text, shortened: some errors quote the whole prompt."""
    return str(error)[:_MAX_REASON_CHARS]


def _merged(fields: TemplateFields) -> dict[str, Any]:
    """The values of all four fields, under the names of apply_chat_template_overrides; null flags are left out.

    Raises InvalidRequest if two fields contradict each other.
    """
    said = {name: getattr(fields, name) for name in _FLAGS if getattr(fields, name) is not None}
    for name in _FLAGS:
        if name in fields.chat_template_kwargs:
            raise InvalidRequest(
                f"{name} is a field of the body and may not be in chat_template_kwargs", "chat_template_kwargs"
            )
    said |= fields.chat_template_kwargs
    for name, value in fields.apply_chat_template_overrides.items():
        if name in said and (type(said[name]), said[name]) != (type(value), value):
            raise InvalidRequest(
                f"apply_chat_template_overrides: {shorten(name)!r} is also given in another field, with another value",
                "apply_chat_template_overrides",
            )
    return said | fields.apply_chat_template_overrides


def _take_flag(variables: dict[str, Any], name: str) -> bool | None:
    """Removes a flag from the variables and returns its value; None if it is not given."""
    value = variables.pop(name, None)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(
            f"apply_chat_template_overrides: {name} must be true or false", "apply_chat_template_overrides"
        )
    return value
