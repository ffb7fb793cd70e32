"""OpenAI body → Prepared, final: drafts its requests in a thread, then waits until its grammar is validated."""

from dataclasses import replace

from tokasaurus.messages.lifecycle import EngineLimits
from tokasaurus.server.prepare.origin import Origin
from tokasaurus.server.prepare.requests import Draft, Prepared, draft_chat, draft_completion
from tokasaurus.server.protocol.chat import ChatCompletionRequest
from tokasaurus.server.protocol.completions import CompletionRequest
from tokasaurus.server.resources.text_threads import TextThreads
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.structured_output.validator import GrammarChecker


async def prepare_completion(
    body: CompletionRequest,
    model: ServedModel,
    limits: EngineLimits,
    grammars: GrammarChecker,
    text_threads: TextThreads,
    origin: Origin,
) -> Prepared:
    """The requests of a body. text_threads: where it is tokenized. Raises ApiError."""
    drafting = text_threads.run(origin.num_bytes, draft_completion, body, model, limits, origin)
    return await _with_grammar(await drafting, grammars)


async def prepare_chat(
    body: ChatCompletionRequest,
    model: ServedModel,
    limits: EngineLimits,
    grammars: GrammarChecker,
    text_threads: TextThreads,
    origin: Origin,
) -> Prepared:
    """As `prepare_completion`."""
    drafting = text_threads.run(origin.num_bytes, draft_chat, body, model, limits, origin)
    return await _with_grammar(await drafting, grammars)


async def _with_grammar(draft: Draft, grammars: GrammarChecker) -> Prepared:
    """The final requests. Raises InvalidRequest if the grammar is not valid."""
    prepared, source = draft.prepared, draft.grammar
    if source is None:
        return prepared
    grammar = await grammars.check(source)
    requests = [replace(request, grammar=grammar) for request in prepared.requests]
    return replace(prepared, requests=requests, grammar_param=source.param)
