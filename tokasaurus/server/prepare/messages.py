"""A body of /v1/messages → its request: blocks become messages of a chat, other fields the fields of a chat body."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from tokasaurus.messages.status import EngineLimits
from tokasaurus.server.errors import InvalidRequest, naming_fields, shorten
from tokasaurus.server.prepare.chat import chat_of, count_chat_tokens, draft_chat
from tokasaurus.server.prepare.requests import Draft, Origin
from tokasaurus.server.protocol.chat import ChatCompletionRequest, ChatMessage, TemplateFields
from tokasaurus.server.protocol.messages import (
    SHOWN_AS_TEXT,
    BlockInput,
    CountTokensRequest,
    MessageInput,
    MessagesRequest,
    RedactedThinkingInput,
    TextBlockInput,
    ThinkingInput,
    ToolResultInput,
    ToolUseInput,
    join_texts,
)
from tokasaurus.server.protocol.tools import CalledFunction, MessageToolCall
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.value_words import MAX_TOLD

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
    turns = _combine(body.messages)
    continues = body.continue_final_message
    if turns[-1].role == "assistant" and continues is None and not _is_asked_for_start(body):
        if turns[-1].is_empty:
            turns.pop()
        else:
            continues = True
            _check_start(turns[-1], body)
    return chat_of(
        body,
        messages=_to_messages(body.system, turns),
        continue_final_message=continues,
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


class _Part(NamedTuple):
    """A block, and where the body has it."""

    message: int
    position: int
    block: BlockInput

    @property
    def place(self) -> str:
        return f"messages[{self.message}].content[{self.position}]"


@dataclass(slots=True)
class _Turn:
    """Consecutive messages of one role."""

    role: Literal["user", "assistant", "system"]
    parts: list[_Part]
    last_message: int

    @property
    def place(self) -> str:
        return f"messages[{self.last_message}].content"

    @property
    def is_empty(self) -> bool:
        """There is nothing but empty texts."""
        return all(isinstance(part.block, TextBlockInput) and not part.block.text for part in self.parts)


def _combine(messages: Sequence[MessageInput]) -> list[_Turn]:
    """The turns of the conversation: consecutive messages of the user, or of the assistant, are one.

    Raises InvalidRequest for a message without content. Only the last one may have none, if it is the assistant's.
    Texts of the assistant may be empty, since answers have such."""
    turns: list[_Turn] = []
    for index, message in enumerate(messages):
        is_assistant = message.role == "assistant"
        if not message.content and not (is_assistant and index == len(messages) - 1):
            param = f"messages[{index}].content"
            raise InvalidRequest(f"{param} must not be empty: only a last message of the assistant may be", param)
        parts = [_Part(index, position, block) for position, block in enumerate(message.content)]
        if not is_assistant:
            for part in parts:
                if isinstance(part.block, TextBlockInput) and not part.block.text:
                    raise InvalidRequest(f"{part.place}.text must not be empty", f"{part.place}.text")
        if turns and message.role == turns[-1].role != "system":
            turns[-1].parts += parts
            turns[-1].last_message = index
        else:
            turns.append(_Turn(message.role, parts, index))
    return turns


def _is_asked_for_start(body: TemplateFields) -> bool:
    """The body says itself, by fields of chat, how the prompt ends."""
    names = {"add_generation_prompt", "continue_final_message"}
    return body.add_generation_prompt is not None or not names.isdisjoint(body.apply_chat_template_overrides)


def _check_start(turn: _Turn, body: MessagesRequest | CountTokensRequest) -> None:
    """Raises InvalidRequest unless an answer may continue this turn of the assistant."""
    first, last = turn.parts[0].block, turn.parts[-1].block
    if body.output_config.format is not None:
        raise InvalidRequest(
            f"output_config.format describes a whole answer, and the answer would continue {turn.place}: leave one of "
            "them out",
            "output_config.format",
        )
    if isinstance(last, _THOUGHTS):
        raise InvalidRequest(
            f"{turn.place} must not end with a block of type {last.type}: the answer continues a text", turn.place
        )
    if body.thinking is not None and body.thinking.type == "enabled" and not isinstance(first, _THOUGHTS):
        raise InvalidRequest(
            f"{turn.place} must begin with a block of type thinking, since thinking is enabled and the answer "
            "continues this message",
            turn.place,
        )
    text = _text_of(turn)
    if text != text.rstrip():
        raise InvalidRequest(
            f"{turn.place} must not end with white space, since the answer continues this message", turn.place
        )


_THOUGHTS = (ThinkingInput, RedactedThinkingInput)


def _to_messages(system: str, turns: Sequence[_Turn]) -> list[ChatMessage]:
    """The messages of the chat. Raises InvalidRequest."""
    written = [ChatMessage(role="system", content=system)] if system else []
    unanswered: set[str] = set()
    for turn in turns:
        if unanswered and turn.role != "user":
            raise _missing_result(unanswered, turn)
        if turn.role == "assistant":
            message, unanswered = _of_assistant(turn)
            written.append(message)
            continue
        written += _results(turn, unanswered)
        if unanswered:
            raise _missing_result(unanswered, turn)
        if text := _text_of(turn):
            written.append(ChatMessage(role=turn.role, content=text))
    if unanswered:
        raise _missing_result(unanswered, turns[-1])
    if not written:
        raise InvalidRequest("messages must have a message with content", "messages")
    return written


def _of_assistant(turn: _Turn) -> tuple[ChatMessage, set[str]]:
    """(the message, the ids of its calls)."""
    calls = [_tool_call(part.block) for part in turn.parts if isinstance(part.block, ToolUseInput)]
    ids = {call.id for call in calls}
    if len(ids) < len(calls):
        raise InvalidRequest(f"{turn.place} has several blocks of type tool_use with one id", turn.place)
    thoughts = [part.block.thinking for part in turn.parts if isinstance(part.block, ThinkingInput)]
    message = ChatMessage(
        role="assistant",
        content=_text_of(turn),
        tool_calls=calls,
        reasoning_content="".join(thoughts) or None,
    )
    return message, ids


def _results(turn: _Turn, unanswered: set[str]) -> list[ChatMessage]:
    """The messages with the results of tools. unanswered: ids of the calls before; those with a result are removed.

    Raises InvalidRequest for a result without a call, and for one behind other blocks."""
    written: list[ChatMessage] = []
    for number, part in enumerate(turn.parts):
        block = part.block
        if not isinstance(block, ToolResultInput):
            continue
        if len(written) < number:
            reason = f"{part.place} is of type tool_result, which must come before all other blocks"
            raise InvalidRequest(reason, part.place)
        if block.tool_use_id not in unanswered:
            asked = shorten(block.tool_use_id)
            reason = f"{part.place} has the tool_use_id {asked!r}, which no block of the message before has, or which "
            raise InvalidRequest(f"{reason}has a result already", part.place)
        unanswered.remove(block.tool_use_id)
        written.append(ChatMessage(role="tool", content=block.content, tool_call_id=block.tool_use_id))
    return written


def _missing_result(ids: Collection[str], turn: _Turn) -> InvalidRequest:
    """turn: the one that should have them."""
    shown = ", ".join(repr(shorten(id_)) for id_ in sorted(ids)[:MAX_TOLD])
    more = f" and {len(ids) - MAX_TOLD} others" if len(ids) > MAX_TOLD else ""
    return InvalidRequest(
        f"{turn.place}: each tool_use needs a tool_result in the message that follows: there is none for {shown}{more}",
        turn.place,
    )


def _text_of(turn: _Turn) -> str:
    """Texts and documents. Messages of the user are apart by an empty line; those of the assistant continue each
    other."""
    if len(turn.parts) == 1 and isinstance(block := turn.parts[0].block, TextBlockInput):
        return block.text  # as most turns are
    messages = [
        join_texts([part.block for part in parts if isinstance(part.block, SHOWN_AS_TEXT)])
        for _, parts in itertools.groupby(turn.parts, key=lambda part: part.message)
    ]
    return ("" if turn.role == "assistant" else "\n\n").join(filter(None, messages))


def _tool_call(block: ToolUseInput) -> MessageToolCall:
    function = CalledFunction.model_construct(name=block.name, arguments=block.input)
    return MessageToolCall.model_construct(id=block.id, type="function", function=function)
