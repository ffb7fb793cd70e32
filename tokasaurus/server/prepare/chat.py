"""A chat body → its request: messages become prompt ids by the chat template, tool fields the calls allowed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokasaurus.messages.status import EngineLimits
from tokasaurus.server.errors import InvalidRequest, Unsupported, UnsupportedField, shorten
from tokasaurus.server.prepare.requests import (
    Draft,
    Origin,
    Prepared,
    asked_experts,
    asked_grammar,
    check_experts,
    check_fields,
    check_max_tokens,
    check_prompt_values,
    check_vocabulary,
    checked_top,
    make_requests,
    prompt_top,
    response_id_of,
    room_after,
    too_long,
    truncate,
)
from tokasaurus.server.protocol.chat import ChatCompletionRequest, ChatForm, ChatMessage, TemplateFields
from tokasaurus.server.protocol.grammar_fields import GrammarSource
from tokasaurus.server.protocol.tools import Tool, ToolChoice
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.templates.request_templates import ChatTemplate
from tokasaurus.server.tools.grammar import write_calls_or_json, write_forced_calls, write_free_calls
from tokasaurus.server.tools.parser import CallRules
from tokasaurus.server.tools.prompt import template_input
from tokasaurus.server.tools.reasoning import (
    ReasoningRules,
    ReasoningStart,
    is_in_reasoning,
)
from tokasaurus.text.token_decoder import REASONING_MARKS
from tokasaurus.text.tokenizer import (
    ChatTemplateError,
    ChatTemplateTooLarge,
    ChatTemplateTooSlow,
    InvalidChatTemplate,
    TemplateVariableError,
    TextTooLong,
)

_MAX_REASON_CHARS = 300
# More than a start of reasoning and the white space after it have.
_MAX_MARK_TOKENS = 32
_FLAGS = ("add_generation_prompt", "continue_final_message")
# Errors that other messages would not avoid.
_FAULTS_OF_TEMPLATE = (InvalidChatTemplate, ChatTemplateTooSlow, ChatTemplateTooLarge)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How one chat answer uses tools."""

    shown: Sequence[Tool] = ()
    """The tools that the prompt describes."""
    rules: CallRules | None = None
    """The calls that the answer may contain; None if all of it is content."""
    grammar: GrammarSource | None = None
    """What the whole answer must match; None for any text."""
    constrains_content: bool = False
    """Whether the grammar allows no other text than what the body asks for."""


def draft_chat(
    body: ChatCompletionRequest,
    model: ServedModel,
    limits: EngineLimits,
    origin: Origin,
    id_prefix: str = "chatcmpl-",
    max_tokens: int | None = None,
) -> Draft:
    """The requests of a body. Tokenizes, so must not run on the event loop. Raises InvalidRequest.

    id_prefix: of the answer's id. max_tokens: most new tokens of a body that has no such field; the answer may have
    fewer if there is less room."""
    check_fields(body, model)
    template = template_of(body, model)
    tool_use = resolve_tools(body, model, template, asked_grammar(body))
    may_truncate = body.truncate_prompt_tokens is not None
    prompt_ids = encode_messages(body.messages, body, model, template, None if may_truncate else limits, tool_use.shown)
    if body.add_special_tokens:
        prompt_ids = model.tokenizer.with_added_tokens(prompt_ids)
    asked = _asked_chat_tokens(body)
    prompt_ids = truncate(prompt_ids, body, max_tokens if asked is None else asked[0], limits)
    check_vocabulary(prompt_ids, model, "messages")
    room = room_after(prompt_ids, limits, "messages")
    max_new_tokens = room if max_tokens is None else min(max_tokens, room)
    if asked is not None:
        max_new_tokens = check_max_tokens(*asked, prompt_ids, limits)
    num_top, num_prompt_top = checked_top(body.top_logprobs or 0, "top_logprobs", model), prompt_top(body, model)
    if num_top and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs=true", "top_logprobs")
    response_id, experts_from = response_id_of(body, id_prefix), asked_experts(body, limits)
    requests = make_requests(
        response_id,
        body,
        [(prompt_ids, max_new_tokens)],
        model,
        origin,
        num_top_logprobs=num_top if body.logprobs else None,
        num_top_prompt_logprobs=num_prompt_top,
        wants_experts=experts_from is not None,
    )
    check_experts(requests, limits)
    if body.return_token_ids and body.stream:  # the first chunk of each choice repeats the prompt's ids
        check_prompt_values(requests, 0, "return_token_ids")
    marks = template.marks
    start: ReasoningStart = "before"
    if body.logprobs_in_fingerprint or tool_use.rules is not None or marks:
        start = reasoning_start(body.messages, body, prompt_ids, model)
    reasoning = None
    if marks:
        reasoning = ReasoningRules(
            marks, _start_of_answer(start, tool_use), body.separate_reasoning, body.include_reasoning
        )
    rules = tool_use.rules
    if rules is not None:
        is_in_content = reasoning is None or not reasoning.is_separate
        starts_inside = is_in_content and _start_of_answer(start, tool_use) == "inside"
        rules = replace(rules, starts_in_thinking=starts_inside)
    prepared = Prepared(
        response_id,
        requests,
        body.logprobs_in_fingerprint,
        body.return_token_ids,
        body.return_tokens_as_token_ids,
        calls=rules,
        num_top_prompt_logprobs=num_prompt_top,
        experts_from=experts_from,
        starts_in_reasoning=start == "inside",
        content_start=_echoed(body),
        keeps_stop=body.include_stop_str_in_output or body.no_stop_trim,
        reasoning=reasoning,
        adapter_name="" if origin.adapter is None else origin.adapter.name,
    )
    return Draft(prepared, tool_use.grammar)


def count_chat_tokens(body: ChatCompletionRequest, model: ServedModel, limits: EngineLimits, max_chars: int) -> int:
    """Tokens of the prompt that `draft_chat` makes of a body, which may be longer than the context. Tokenizes, so must
    not run on the event loop. Raises InvalidRequest.

    max_chars: more characters in messages and tools are refused."""
    num_chars = sum(len(part.model_dump_json()) for part in (*body.messages, *body.tools))
    if num_chars > max_chars:
        raise InvalidRequest(
            f"messages may have at most {max_chars} characters to be counted, not {num_chars}",
            "messages",
        )
    template = template_of(body, model)
    tools = resolve_tools(body, model, template, None).shown
    prompt_ids = encode_messages(body.messages, body, model, template, tools=tools)
    if body.add_special_tokens:
        prompt_ids = model.tokenizer.with_added_tokens(prompt_ids)
    asked = _asked_chat_tokens(body)
    return len(truncate(prompt_ids, body, None if asked is None else asked[0], limits))


def _echoed(body: ChatCompletionRequest) -> str:
    last = body.messages[-1]
    return last.content or "" if body.echo and last.role == "assistant" else ""


def chat_of(form: ChatForm, fields: Mapping[str, Any]) -> ChatCompletionRequest:
    """The chat body that asks for the same as a body of another form: with these fields, and the body's fields of equal
    names."""
    shared = ChatCompletionRequest.model_fields.keys() & type(form).model_fields.keys() - fields.keys()
    # no validation: each of its fields was parsed as in a chat body
    return ChatCompletionRequest.model_construct(**{name: getattr(form, name) for name in shared}, **fields)


def _asked_chat_tokens(body: ChatCompletionRequest) -> tuple[int, str] | None:
    """(most new tokens, name of the field that gave them); None if no field did. Raises InvalidRequest."""
    if body.max_completion_tokens is None:
        return None if body.max_tokens is None else (body.max_tokens, "max_tokens")
    if body.max_tokens is not None and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequest("max_tokens is an older name of max_completion_tokens: give one of them", "max_tokens")
    return body.max_completion_tokens, "max_completion_tokens"


def encode_messages(
    messages: Sequence[ChatMessage],
    fields: TemplateFields,
    model: ServedModel,
    template: ChatTemplate,
    limits: EngineLimits | None = None,
    tools: Sequence[Tool] = (),
) -> list[int]:
    """The prompt ids of a chat. Tokenizes, so must not run on the event loop. Raises InvalidRequest.

    template: by `template_of`. limits: a prompt whose text is so long that it must have more tokens than a sequence
    may is refused before it is tokenized. Other prompts with more tokens may be returned, so callers must check the
    length.
    """
    variables = _merged(fields)
    add_generation_prompt, continues = (_take_flag(variables, name) for name in _FLAGS)
    if add_generation_prompt and continues:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt: only one of them may be true",
            "continue_final_message",
        )
    _add_reasoning_variables(variables, fields, template)
    shown_messages, shown_tools = template_input(messages, tools, template.tools)
    try:
        return model.tokenizer.encode_chat(
            shown_messages,
            add_generation_prompt=not continues if add_generation_prompt is None else add_generation_prompt,
            tools=shown_tools,
            continue_final_message=bool(continues),
            template_variables=variables,
            max_tokens=None if limits is None else limits.max_tokens_per_sequence,
            render=template.render,
        )
    except TemplateVariableError as error:
        raise InvalidRequest(f"chat_template_kwargs: {_reason(error)}", "chat_template_kwargs") from error
    except ChatTemplateError as error:
        is_template = fields.chat_template and isinstance(error, _FAULTS_OF_TEMPLATE)
        raise _refused("chat_template" if is_template else "messages", error) from error
    except TextTooLong as error:
        assert limits is not None, "only a limit makes a text too long"
        raise too_long("messages", error, limits) from None


def reasoning_start(
    messages: Sequence[ChatMessage], fields: TemplateFields, prompt_ids: Sequence[int], model: ServedModel
) -> ReasoningStart:
    """Where the prompt ends: inside or after reasoning that the template, or the final message that the answer
    continues, has begun; else before any."""
    if _take_flag(_merged(fields), "continue_final_message"):
        content = messages[-1].content or ""
        if is_in_reasoning(content):
            return "inside"
        if content.strip():
            return "after"
    end = model.tokenizer.decode(prompt_ids[-_MAX_MARK_TOKENS:], skip_special_tokens=False).rstrip()
    if end.endswith(tuple(REASONING_MARKS)):
        return "inside"
    return "after" if end.endswith(tuple(REASONING_MARKS.values())) else "before"


def _start_of_answer(start: ReasoningStart, tool_use: ToolUse) -> ReasoningStart:
    """Where the answer begins. A grammar for the whole answer describes content or calls, and not reasoning that the
    prompt has begun. start: by `reasoning_start`."""
    if tool_use.rules is not None and tool_use.rules.is_forced:
        return "after"
    return "before" if start == "inside" and tool_use.constrains_content else start


def template_of(fields: TemplateFields, model: ServedModel) -> ChatTemplate:
    """The chat template of a body. Renders a new one, so must not run on the event loop. Raises InvalidRequest."""
    if not fields.chat_template:
        return model.template
    if model.request_templates is None:
        raise UnsupportedField(
            "chat_template is not accepted by this server; the flag request_chat_template=T allows it", "chat_template"
        )
    try:
        return model.request_templates.find(fields.chat_template)
    except ChatTemplateError as error:
        raise _refused("chat_template", error) from error


def _refused(param: str, error: ChatTemplateError) -> InvalidRequest:
    return InvalidRequest(f"{param}: {_reason(error)}", param)


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


def _add_reasoning_variables(variables: dict[str, Any], fields: TemplateFields, template: ChatTemplate) -> None:
    """Adds enable_thinking and reasoning_effort where the body has them, the template knows them, and they are not in
    `variables`."""
    effort = fields.reasoning_effort
    asked: dict[str, Any] = {}
    if fields.enable_thinking is not None:
        asked["enable_thinking"] = fields.enable_thinking
    elif effort is not None:
        asked["enable_thinking"] = effort != "none"
    knows = template.knows
    if effort is not None and (effort != "none" or not knows("enable_thinking")):
        asked["reasoning_effort"] = effort
    for name, value in asked.items():
        if name not in variables and knows(name):
            variables[name] = value


def _take_flag(variables: dict[str, Any], name: str) -> bool | None:
    """Removes a flag from the variables and returns its value; None if it is not given."""
    value = variables.pop(name, None)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(
            f"apply_chat_template_overrides: {name} must be true or false", "apply_chat_template_overrides"
        )
    return value


def resolve_tools(
    body: ChatCompletionRequest, model: ServedModel, template: ChatTemplate, content: GrammarSource | None
) -> ToolUse:
    """template: by `template_of`. content: the grammar that the body asks for, which applies to the content.

    Raises InvalidRequest."""
    support = template.tools
    choice = body.tool_choice or ToolChoice("auto")
    names = check_names(body.tools)
    plain = ToolUse(grammar=content, constrains_content=content is not None)
    if not body.tools:
        if choice.mode in ("required", "named") or choice.names is not None:
            raise InvalidRequest("tool_choice asks for a call, but there are no tools", "tool_choice")
        return plain
    if choice.mode == "none":
        return plain
    unknown = next((name for name in choice.names or () if name not in names), None)
    if unknown is not None:
        raise InvalidRequest(f"tool_choice names {shorten(unknown)!r}, which is not one of the tools", "tool_choice")
    if support.format is None:
        raise InvalidRequest(
            "tools: the chat template writes calls in an unknown format (tool_call_format= sets one)",
            "tools",
        )
    rules = CallRules(
        support.format,
        names if choice.names is None else frozenset(choice.names),
        parallel=body.parallel_tool_calls and choice.mode != "named",
        is_named=choice.mode == "named",
        is_forced=choice.mode in ("required", "named"),
    )
    grammar = _grammar(body.tools, rules, model, content)
    return ToolUse(body.tools, rules, grammar, constrains_content=content is not None or rules.is_forced)


def _grammar(
    tools: Sequence[Tool], rules: CallRules, model: ServedModel, content: GrammarSource | None
) -> GrammarSource | None:
    if content is not None and content.format != "json_schema":
        raise Unsupported(f"{content.param} can be used with tools only if tool_choice is none", content.param)
    added_tokens = {text: id_ for text, id_ in model.tokenizer.added_tokens.items() if id_ < model.vocab_size}
    if rules.is_forced:
        return write_forced_calls(tools, rules, added_tokens)  # the answer has no content to constrain
    if content is not None:
        return write_calls_or_json(tools, rules, added_tokens, content)
    if any(tool.function.strict for tool in tools):
        return write_free_calls(tools, rules, added_tokens)
    return None


def check_names(tools: Sequence[Tool]) -> frozenset[str]:
    """The functions' names. Raises InvalidRequest if one occurs twice."""
    names: set[str] = set()
    for tool in tools:
        if tool.function.name in names:
            raise InvalidRequest(f"tools has two functions named {tool.function.name!r}", "tools")
        names.add(tool.function.name)
    return frozenset(names)
