"""A body of /v1/messages → its request: blocks become messages of a chat, other fields the fields of a chat body."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tokasaurus.messages.status import EngineLimits
from tokasaurus.server.errors import InvalidRequest, naming_fields, shorten
from tokasaurus.server.prepare.chat import chat_of, count_chat_tokens, draft_chat
from tokasaurus.server.prepare.requests import Draft, Origin
from tokasaurus.server.protocol.chat import ChatCompletionRequest, ChatMessage
from tokasaurus.server.protocol.messages import (
    CountTokensRequest,
    MessageInput,
    MessagesRequest,
    TextBlockInput,
    ThinkingInput,
    ToolResultInput,
    ToolUseInput,
)
from tokasaurus.server.protocol.tools import CalledFunction, MessageToolCall
from tokasaurus.server.served_model import ServedModel

# Chat field → the field here.
_NAMES: Mapping[str, str] = {"response_format": "output_config.format", "stop": "stop_sequences"}


def draft_message(body: MessagesRequest, model: ServedModel, limits: EngineLimits, origin: Origin) -> Draft:
    """The request of a body. Tokenizes, so must not run on the event loop. Raises InvalidRequest."""
    with naming_fields(_NAMES):
        draft = draft_chat(_chat_body(body), model, limits, origin, "msg_", max_tokens=body.max_tokens)
    return replace(draft, prepared=replace(draft.prepared, repeated={"max_tokens": body.max_tokens}))


def count_prompt_tokens(body: CountTokensRequest, model: ServedModel, limits: EngineLimits, max_chars: int) -> int:
    """As `count_chat_tokens`, of a body that asks for a message."""
    with naming_fields(_NAMES):
        return count_chat_tokens(_chat_body(body), model, limits, max_chars)


def _chat_body(body: MessagesRequest | CountTokensRequest) -> ChatCompletionRequest:
    choice, thinking = body.tool_choice, body.thinking
    effort = body.output_config.effort
    enable_thinking, included = body.enable_thinking, body.include_reasoning
    if thinking is not None:
        if thinking.type != "adaptive":
            enable_thinking = thinking.type == "enabled"
        included = included and thinking.display != "omitted"
    return chat_of(
        body,
        messages=to_messages(body.system, body.messages),
        max_tokens=None,  # the context may leave fewer than the `max_tokens` of the body
        stop=body.stop_sequences if isinstance(body, MessagesRequest) else (),
        metadata=None,
        tools=[tool.chat_tool() for tool in body.tools],
        tool_choice=None if choice is None else choice.chat_choice(),
        parallel_tool_calls=body.parallel_tool_calls and not (choice and choice.disable_parallel_tool_use),
        response_format=body.output_config.format,
        enable_thinking=enable_thinking,
        include_reasoning=included,
        reasoning_effort=body.reasoning_effort if effort is None else effort,
    )


def to_messages(system: str, messages: Sequence[MessageInput]) -> list[ChatMessage]:
    """The messages of the chat. Raises InvalidRequest."""
    written = [ChatMessage(role="system", content=system)] if system else []
    call_ids: set[str] = set()
    for index, message in enumerate(messages):
        texts: list[str] = []
        if message.role == "assistant":
            calls = [_tool_call(block) for block in message.content if isinstance(block, ToolUseInput)]
            call_ids.update(call.id for call in calls)
            texts = [block.text for block in message.content if isinstance(block, TextBlockInput)]
            thoughts = [block.thinking for block in message.content if isinstance(block, ThinkingInput)]
            written.append(
                ChatMessage(
                    role="assistant",
                    content="".join(texts),
                    tool_calls=calls,
                    reasoning_content="".join(thoughts) or None,
                )
            )
            continue
        results = [block for block in message.content if isinstance(block, ToolResultInput)]
        for block in results:
            if block.tool_use_id not in call_ids:
                param = f"messages[{index}].content"
                asked = shorten(block.tool_use_id)
                raise InvalidRequest(f"{param} has a tool_result for {asked!r}, which no block called", param)
            written.append(ChatMessage(role="tool", content=block.content, tool_call_id=block.tool_use_id))
        texts = [block.text for block in message.content if isinstance(block, TextBlockInput)]
        if texts or not results:
            written.append(ChatMessage(role=message.role, content="".join(texts)))
    return written


def _tool_call(block: ToolUseInput) -> MessageToolCall:
    function = CalledFunction.model_construct(name=block.name, arguments=block.input)
    return MessageToolCall.model_construct(id=block.id, type="function", function=function)
