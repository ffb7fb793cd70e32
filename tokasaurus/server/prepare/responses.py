"""A body of /v1/responses → its request: items become messages of a chat, other fields the fields of a chat body."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tokasaurus.messages.status import EngineLimits
from tokasaurus.server.errors import InvalidRequest, naming_fields
from tokasaurus.server.prepare.chat import chat_of, count_chat_tokens, draft_chat
from tokasaurus.server.prepare.requests import Draft, Origin, asked_sampling
from tokasaurus.server.protocol.chat import ChatCompletionRequest, ChatMessage
from tokasaurus.server.protocol.responses import (
    CountInputRequest,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputItem,
    MessageItem,
    ReasoningInputItem,
    ResponsesRequest,
    ResponsesTool,
    write_tool_choice,
)
from tokasaurus.server.protocol.tools import CalledFunction, FunctionDefinition, MessageToolCall, Tool
from tokasaurus.server.served_model import ServedModel

# Chat field → the field here.
_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text.format"}


def draft_response(body: ResponsesRequest, model: ServedModel, limits: EngineLimits, origin: Origin) -> Draft:
    """The request of a body. Tokenizes, so must not run on the event loop. Raises InvalidRequest."""
    with naming_fields(_NAMES):
        draft = draft_chat(_chat_body(body), model, limits, origin, "resp_")
    return replace(draft, prepared=replace(draft.prepared, repeated=repeated_fields(body, model)))


def count_input_tokens(body: CountInputRequest, model: ServedModel, limits: EngineLimits, max_chars: int) -> int:
    """As `count_chat_tokens`, of a body that asks for a response."""
    with naming_fields(_NAMES):
        return count_chat_tokens(_chat_body(body), model, limits, max_chars)


def _chat_body(body: ResponsesRequest) -> ChatCompletionRequest:
    return chat_of(
        body,
        messages=to_messages(body.instructions, body.input),
        max_completion_tokens=body.max_output_tokens,
        logprobs=body.wants_logprobs,
        tools=[_chat_tool(tool) for tool in body.tools],
        response_format=body.text.format.grammar,
        reasoning_effort=body.reasoning_effort if body.reasoning.effort is None else body.reasoning.effort,
    )


def _chat_tool(tool: ResponsesTool) -> Tool:
    fields = {name: getattr(tool, name) for name in FunctionDefinition.model_fields}
    return Tool.model_construct(type="function", function=FunctionDefinition.model_construct(**fields))


@dataclass(slots=True)
class _Turn:
    """One message of the assistant, as items list its parts: reasoning, texts and calls."""

    texts: list[str] = field(default_factory=list)
    calls: list[MessageToolCall] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    ends_with_text: bool = False

    def messages(self) -> list[ChatMessage]:
        """One, or none of reasoning without text, such as an encrypted one."""
        if not self.texts and not self.calls and not any(self.reasoning):
            return []
        message = ChatMessage(
            role="assistant",
            content="".join(self.texts),
            tool_calls=self.calls,
            reasoning_content="".join(self.reasoning) or None,
        )
        return [message]


def to_messages(instructions: str | None, items: Sequence[InputItem]) -> list[ChatMessage]:
    """The messages of the chat. System messages at the beginning become one, since many templates allow only one.

    Items of the assistant that follow each other become one message, as chat answers have it, unless a text follows
    directly after a text, or reasoning begins. Raises InvalidRequest.
    """
    messages: list[ChatMessage] = []
    system = [] if instructions is None else [instructions]
    turn: _Turn | None = None
    call_ids: set[str] = set()
    for index, item in enumerate(items):
        if isinstance(item, MessageItem) and item.role == "system" and not messages and turn is None:
            system.append(item.content)
            continue
        is_text = isinstance(item, MessageItem) and item.role == "assistant"
        goes_on = isinstance(item, FunctionCallItem) or (is_text and not (turn and turn.ends_with_text))
        if turn is not None and not goes_on:
            messages += turn.messages()
            turn = None
        if isinstance(item, FunctionCallItem):
            turn = turn or _Turn()
            turn.calls.append(_tool_call(item))
            turn.ends_with_text = False
            call_ids.add(item.call_id)
        elif isinstance(item, FunctionCallOutputItem):
            if item.call_id not in call_ids:
                param = f"input[{index}].call_id"
                raise InvalidRequest(f"{param} matches no earlier function call", param)
            messages.append(ChatMessage(role="tool", content=item.output, tool_call_id=item.call_id))
        elif isinstance(item, ReasoningInputItem):
            turn = _Turn(reasoning=[part.text for part in item.content])
        elif isinstance(item, MessageItem) and is_text:
            turn = turn or _Turn()
            turn.texts.append(item.content)
            turn.ends_with_text = True
        elif isinstance(item, MessageItem):
            messages.append(ChatMessage(role=item.role, content=item.content))
    if turn is not None:
        messages += turn.messages()
    if system:
        messages.insert(0, ChatMessage(role="system", content="\n\n".join(system)))
    if not messages:
        raise InvalidRequest("input must contain a message", "input")
    return messages


def _tool_call(item: FunctionCallItem) -> MessageToolCall:
    function = CalledFunction.model_construct(name=item.name, arguments=item.arguments)
    return MessageToolCall.model_construct(id=item.call_id, type="function", function=function)


def repeated_fields(body: ResponsesRequest, model: ServedModel) -> Mapping[str, Any]:
    """Fields of ResponseObject that repeat the body, or the defaults that applied."""
    asked_format = body.text.format.asked
    sampling = asked_sampling(body, model)
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning": {"effort": body.reasoning.effort, "summary": body.reasoning.summary},
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"} if asked_format is None else asked_format, "verbosity": "medium"},
        "tool_choice": write_tool_choice(body.tool_choice),
        "tools": [_written_tool(tool) for tool in body.tools],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "user": body.user,
        "prompt_cache_key": body.prompt_cache_key,
        "safety_identifier": body.safety_identifier,
    }


def _written_tool(tool: ResponsesTool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }
