"""Facts of the schemas in OpenAI's OpenAPI document (https://github.com/openai/openai-openapi), and what in a JSON
value contradicts them.

A schema is its properties, as `name: type`; `?` after the name says that it is not required. Types: another schema,
string, integer, number, boolean, object, any, null, a literal in quotes; `[type]` is a list, `a | b` either.
"""

import re
from collections.abc import Mapping
from typing import Any

_ITEM_STATUS = "'in_progress' | 'completed' | 'incomplete'"
_ANY_TIER = "'auto' | 'default' | 'flex' | 'scale' | 'priority' | 'fast' | null"
_PLACE = "item_id: string, output_index: integer, sequence_number: integer"
_PART_PLACE = f"{_PLACE}, content_index: integer"
_EVENT_OF_RESPONSE = "response: Response, sequence_number: integer"
_OF_CHAT = f"id: string, created: integer, model: string, service_tier?: {_ANY_TIER}, system_fingerprint?: string"
_END_OF_CHAT = "'stop' | 'length' | 'tool_calls' | 'content_filter' | 'function_call'"
_BATCH_TIMES = ", ".join(
    f"{name}_at?: integer"
    for name in ["in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"]
)

_WRITTEN: Mapping[str, str] = {
    "ErrorResponse": "error: Error",
    "Error": "type: string, message: string, param: string | null, code: string | null",
    # chat
    "CreateChatCompletionResponse": f"{_OF_CHAT}, object: 'chat.completion', choices: [ChatChoice], "
    "usage?: CompletionUsage",
    "ChatChoice": f"index: integer, finish_reason: {_END_OF_CHAT}, message: ChatCompletionResponseMessage, "
    "logprobs: ChatLogprobs | null",
    "ChatCompletionResponseMessage": "role: 'assistant', content: string | null, refusal: string | null, "
    "annotations?: [object], audio?: object | null, tool_calls?: [ChatCompletionMessageToolCall]",
    "ChatCompletionMessageToolCall": "id: string, type: 'function', function: CalledFunction",
    "CalledFunction": "name: string, arguments: string",
    "ChatLogprobs": "content: [ChatCompletionTokenLogprob] | null, refusal: [ChatCompletionTokenLogprob] | null",
    "ChatCompletionTokenLogprob": "token: string, logprob: number, bytes: [integer] | null, "
    "top_logprobs: [ChatTopLogprob]",
    "ChatTopLogprob": "token: string, logprob: number, bytes: [integer] | null",
    "CreateChatCompletionStreamResponse": f"{_OF_CHAT}, object: 'chat.completion.chunk', choices: [ChunkChoice], "
    "usage?: CompletionUsage | null",
    "ChunkChoice": f"index: integer, delta: ChatDelta, finish_reason: {_END_OF_CHAT} | null, "
    "logprobs?: ChatLogprobs | null",
    "ChatDelta": "role?: 'developer' | 'system' | 'user' | 'assistant' | 'tool', content?: string | null, "
    "refusal?: string | null, tool_calls?: [ToolCallChunk]",
    "ToolCallChunk": "index: integer, id?: string, type?: 'function', function?: FunctionChunk",
    "FunctionChunk": "name?: string, arguments?: string",
    "CompletionUsage": "prompt_tokens: integer, completion_tokens: integer, total_tokens: integer, "
    "prompt_tokens_details?: PromptTokensDetails, completion_tokens_details?: CompletionTokensDetails",
    "PromptTokensDetails": "cached_tokens?: integer, audio_tokens?: integer, cache_write_tokens?: integer",
    "CompletionTokensDetails": "reasoning_tokens?: integer, audio_tokens?: integer, "
    "accepted_prediction_tokens?: integer, rejected_prediction_tokens?: integer",
    # completions, whole and streamed
    "CreateCompletionResponse": "id: string, object: 'text_completion', created: integer, model: string, "
    "choices: [CompletionChoice], system_fingerprint?: string, usage?: CompletionUsage",
    "CompletionChoice": "text: string, index: integer, finish_reason: 'stop' | 'length' | 'content_filter', "
    "logprobs: CompletionLogprobs | null",
    "CompletionLogprobs": "text_offset?: [integer], token_logprobs?: [number], tokens?: [string], "
    "top_logprobs?: [object]",
    # responses
    "Response": "id: string, object: 'response', created_at: number, error: ResponseError | null, "
    "incomplete_details: IncompleteDetails | null, instructions: string | [object] | null, model: string, "
    "tools: [FunctionTool], output: [OutputItem], parallel_tool_calls: boolean, metadata: object | null, "
    "tool_choice: 'none' | 'auto' | 'required' | ToolChoiceFunction | ToolChoiceAllowed, "
    "temperature: number | null, top_p: number | null, "
    "status?: 'completed' | 'failed' | 'in_progress' | 'cancelled' | 'queued' | 'incomplete', "
    "completed_at?: number | null, usage?: ResponseUsage, reasoning?: Reasoning | null, "
    "truncation?: 'auto' | 'disabled' | null, max_output_tokens?: integer | null, max_tool_calls?: integer | null, "
    "background?: boolean | null, previous_response_id?: string | null, text?: ResponseTextParam, "
    f"top_logprobs?: integer | null, service_tier?: {_ANY_TIER}, user?: string, safety_identifier?: string | null, "
    "prompt_cache_key?: string | null",
    "ResponseError": "code: 'server_error' | 'rate_limit_exceeded' | 'invalid_prompt', message: string",
    "IncompleteDetails": "reason?: 'max_output_tokens' | 'content_filter'",
    "Reasoning": "effort?: 'none' | 'minimal' | 'low' | 'medium' | 'high' | 'xhigh' | 'max' | null, "
    "summary?: 'auto' | 'concise' | 'detailed' | null",
    "ResponseTextParam": "format?: TextFormat | ObjectFormat | SchemaFormat, "
    "verbosity?: 'low' | 'medium' | 'high' | null",
    "TextFormat": "type: 'text'",
    "ObjectFormat": "type: 'json_object'",
    "SchemaFormat": "type: 'json_schema', name: string, schema: object, description?: string, strict?: boolean | null",
    "FunctionTool": "type: 'function', name: string, strict: boolean | null, parameters: object | null, "
    "description?: string | null",
    "ToolChoiceFunction": "type: 'function', name: string",
    "ToolChoiceAllowed": "type: 'allowed_tools', mode: 'auto' | 'required', tools: [object]",
    "OutputMessage": f"type: 'message', id: string, role: 'assistant', status: {_ITEM_STATUS}, "
    "content: [OutputTextContent]",
    "OutputTextContent": "type: 'output_text', text: string, annotations: [object], logprobs: [LogProb]",
    "LogProb": "token: string, logprob: number, bytes: [integer], top_logprobs: [TopLogProb]",
    "TopLogProb": "token: string, logprob: number, bytes: [integer]",
    "FunctionToolCall": f"type: 'function_call', call_id: string, name: string, arguments: string, id?: string, "
    f"status?: {_ITEM_STATUS}",
    "ReasoningItem": "type: 'reasoning', id: string, summary: [object], content?: [ReasoningTextContent], "
    f"encrypted_content?: string | null, status?: {_ITEM_STATUS}",
    "ReasoningTextContent": "type: 'reasoning_text', text: string",
    "ResponseUsage": "input_tokens: integer, input_tokens_details: InputTokensDetails, output_tokens: integer, "
    "output_tokens_details: OutputTokensDetails, total_tokens: integer",
    "InputTokensDetails": "cached_tokens: integer, cache_write_tokens: integer",
    "OutputTokensDetails": "reasoning_tokens: integer",
    # events of a streamed response
    "ResponseCreatedEvent": f"type: 'response.created', {_EVENT_OF_RESPONSE}",
    "ResponseInProgressEvent": f"type: 'response.in_progress', {_EVENT_OF_RESPONSE}",
    "ResponseCompletedEvent": f"type: 'response.completed', {_EVENT_OF_RESPONSE}",
    "ResponseIncompleteEvent": f"type: 'response.incomplete', {_EVENT_OF_RESPONSE}",
    "ResponseFailedEvent": f"type: 'response.failed', {_EVENT_OF_RESPONSE}",
    "ResponseErrorEvent": "type: 'error', code: string | null, message: string, param: string | null, "
    "sequence_number: integer",
    "ResponseOutputItemAddedEvent": "type: 'response.output_item.added', output_index: integer, "
    "sequence_number: integer, item: OutputItem",
    "ResponseOutputItemDoneEvent": "type: 'response.output_item.done', output_index: integer, "
    "sequence_number: integer, item: OutputItem",
    "ResponseContentPartAddedEvent": f"type: 'response.content_part.added', {_PART_PLACE}, part: OutputContent",
    "ResponseContentPartDoneEvent": f"type: 'response.content_part.done', {_PART_PLACE}, part: OutputContent",
    "ResponseTextDeltaEvent": f"type: 'response.output_text.delta', {_PART_PLACE}, delta: string, "
    "logprobs: [ResponseLogProb]",
    "ResponseTextDoneEvent": f"type: 'response.output_text.done', {_PART_PLACE}, text: string, "
    "logprobs: [ResponseLogProb]",
    "ResponseLogProb": "token: string, logprob: number, top_logprobs?: [ResponseTopLogProb]",
    "ResponseTopLogProb": "token?: string, logprob?: number",
    "ResponseReasoningTextDeltaEvent": f"type: 'response.reasoning_text.delta', {_PART_PLACE}, delta: string",
    "ResponseReasoningTextDoneEvent": f"type: 'response.reasoning_text.done', {_PART_PLACE}, text: string",
    "ResponseFunctionCallArgumentsDeltaEvent": f"type: 'response.function_call_arguments.delta', {_PLACE}, "
    "delta: string",
    "ResponseFunctionCallArgumentsDoneEvent": f"type: 'response.function_call_arguments.done', {_PLACE}, "
    "arguments: string",
    # models, files and batches
    "ListModelsResponse": "object: 'list', data: [Model]",
    "Model": "id: string, object: 'model', created: integer, owned_by: string",
    "OpenAIFile": "id: string, object: 'file', bytes: integer, created_at: integer, filename: string, "
    "purpose: 'assistants' | 'assistants_output' | 'batch' | 'batch_output' | 'fine-tune' | 'fine-tune-results' | "
    "'vision' | 'user_data', status: 'uploaded' | 'processed' | 'error', expires_at?: integer, "
    "status_details?: string",
    "ListFilesResponse": "object: string, data: [OpenAIFile], first_id: string, last_id: string, has_more: boolean",
    "DeleteFileResponse": "id: string, object: 'file', deleted: boolean",
    "Batch": "id: string, object: 'batch', endpoint: string, input_file_id: string, completion_window: string, "
    "status: 'validating' | 'failed' | 'in_progress' | 'finalizing' | 'completed' | 'expired' | 'cancelling' | "
    f"'cancelled', created_at: integer, {_BATCH_TIMES}, model?: string, errors?: BatchErrors, "
    "output_file_id?: string, error_file_id?: string, request_counts?: RequestCounts, usage?: BatchUsage, "
    "metadata?: object | null",
    "BatchErrors": "object?: string, data?: [BatchError]",
    "BatchError": "code?: string, message?: string, param?: string | null, line?: integer | null",
    "RequestCounts": "total: integer, completed: integer, failed: integer",
    "BatchUsage": "input_tokens: integer, input_tokens_details: BatchInputDetails, output_tokens: integer, "
    "output_tokens_details: OutputTokensDetails, total_tokens: integer",
    "BatchInputDetails": "cached_tokens: integer",
    "ListBatchesResponse": "object: 'list', data: [Batch], first_id?: string, last_id?: string, has_more: boolean",
    # lines of batches
    "BatchRequestOutput": "id?: string, custom_id?: string, response?: BatchLineResponse | null, "
    "error?: BatchLineError | null",
    "BatchLineResponse": "status_code?: integer, request_id?: string, body?: object",
    "BatchLineError": "code?: string, message?: string",
}
_UNIONS = {
    "OutputItem": "OutputMessage | FunctionToolCall | ReasoningItem",
    "OutputContent": "OutputTextContent | ReasoningTextContent",
}

EXTENSIONS: Mapping[str, set[str]] = {
    "Model": {"max_model_len", "root", "parent"},
    "PromptTokensDetails": {"computed_tokens", "shared_tokens", "recomputed_tokens"},
    "ChatCompletionResponseMessage": {"reasoning_content", "reasoning"},
    "ChatDelta": {"reasoning_content", "reasoning"},
    "Batch": {"progress"},
}
"""Properties of ours, which the document does not have."""

WRONG_IN_DOCUMENT: Mapping[str, str] = {
    "Response.usage: null": "its own example of response.created has null, until the answer is complete",
    "Response.user: null": "its own examples have null",
    "Response.store: unknown": "its own examples have it",
    "CompletionChoice.finish_reason: null": "chunks have the same schema, and only the last one has a reason",
    "CompletionLogprobs.token_logprobs: null": "the first token of an echoed prompt has no log-probability",
    "CompletionLogprobs.top_logprobs: null": "nor has it likely ones in its place",
    "ListFilesResponse.first_id: null": "an empty page has no first file",
    "ListFilesResponse.last_id: null": "an empty page has no last file",
    "ListBatchesResponse.first_id: null": "an empty page has no first batch",
    "ListBatchesResponse.last_id: null": "an empty page has no last batch",
}
"""What real answers have although the document forbids it, and why."""

_PROPERTY = re.compile(r"(\w+)(\??): ((?:[^,\[\]']|'[^']*'|\[[^\]]*\])+)(?:, |$)")


def _parse(name: str, written: str) -> dict[str, tuple[bool, str]]:
    """Property → (whether it is required, its type)."""
    found = list(_PROPERTY.finditer(written))
    assert "".join(match.group() for match in found) == written, name
    return {match[1]: (match[2] == "", match[3]) for match in found}


SCHEMAS = {name: _parse(name, written) for name, written in _WRITTEN.items()}
EVENTS = {properties["type"][1].strip("'"): name for name, properties in SCHEMAS.items() if name.endswith("Event")}
"""Type of an event of a streamed response → its schema."""


def violations(schema: str, value: Any) -> list[str]:
    """What in the value contradicts the schema: "Schema.property: missing", ": unknown" or ": the wrong value"."""
    if not isinstance(value, dict):
        return [f"{schema}: {_shown(value)}"]
    properties = SCHEMAS[schema]
    required = [name for name, (is_required, _) in properties.items() if is_required]
    found = [f"{schema}.{name}: missing" for name in required if name not in value]
    for name, inner in value.items():
        if name in properties:
            found += _type_violations(properties[name][1], inner, f"{schema}.{name}")
        elif name not in EXTENSIONS.get(schema, ()):
            found.append(f"{schema}.{name}: unknown")
    return found


def _type_violations(type_: str, value: Any, place: str) -> list[str]:
    """None if one alternative has none; else those of the alternative that has the value's literals."""
    alternatives = [part.strip() for part in _UNIONS.get(type_, type_).split("|")]
    results = [_one_type_violations(one, value, place) for one in alternatives]
    if [] in results:
        return []
    inner = [result for result in results if result != [f"{place}: {_shown(value)}"]]
    likely = [result for result in inner if not any(".type: " in line for line in result)]
    return (likely or inner or [[f"{place}: {_shown(value)}"]])[0]


def _one_type_violations(type_: str, value: Any, place: str) -> list[str]:
    is_right: bool
    if type_.startswith("["):
        if not isinstance(value, list):
            return [f"{place}: {_shown(value)}"]
        return [line for one in value for line in _type_violations(type_[1:-1], one, place)]
    if type_ in _UNIONS:
        return _type_violations(type_, value, place)
    if type_ in SCHEMAS:
        return violations(type_, value) if isinstance(value, dict) else [f"{place}: {_shown(value)}"]
    if type_.startswith("'"):
        is_right = value == type_[1:-1]
    elif type_ == "null":
        is_right = value is None
    elif type_ == "boolean":
        is_right = isinstance(value, bool)
    elif type_ in ("integer", "number"):
        is_number = isinstance(value, int) or (type_ == "number" and isinstance(value, float))
        is_right = is_number and not isinstance(value, bool)
    else:
        is_right = isinstance(value, {"string": str, "object": dict}[type_])
    return [] if is_right else [f"{place}: {_shown(value)}"]


def _shown(value: Any) -> str:
    return "null" if value is None else repr(value)[:60]


def assert_as_documented(schema: str, value: Any) -> None:
    """But for what is wrong in the document."""
    found = [line for line in violations(schema, value) if line not in WRONG_IN_DOCUMENT]
    assert not found, found
