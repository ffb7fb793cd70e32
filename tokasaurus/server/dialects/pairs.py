"""/v1/rerank and /v1/score: how well documents meet a query, in the shapes of Cohere, Jina and vLLM.

A model with a score head reads query and document together, a causal model a question about both, whose answer is yes
or no; of an embedding model, it is the cosine of their vectors."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, PlainValidator

from tokasaurus.messages.status import EngineLimits
from tokasaurus.server.dialects.vectors import (
    TextFields,
    activated,
    as_messages,
    chat_ids,
    draft_texts,
    pooling_of,
    prompt_named,
    tokenize_texts,
    unit,
    vector_of,
    with_prompt,
    written,
)
from tokasaurus.server.endpoint import RoutedEndpoint
from tokasaurus.server.engine_client.collectors import FinishedSequence
from tokasaurus.server.errors import InvalidRequest
from tokasaurus.server.prepare.requests import Draft, Origin, Prepared
from tokasaurus.server.protocol.answers import Usage
from tokasaurus.server.protocol.fields import WHOLE_FLOATS, Text, value_error
from tokasaurus.server.respond.whole import Answer, build_usage
from tokasaurus.server.served_model import ServedModel

_TASKS = frozenset(("embed", "score"))

# Of Qwen3-Reranker's model card, which the model was trained with.
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


# Bodies
def _parse_documents(value: object) -> list[str]:
    found = [each.get("text") if isinstance(each, dict) else each for each in value] if isinstance(value, list) else []
    if not found or not all(isinstance(each, str) for each in found):
        raise value_error("must be a list of strings, or of objects with a string as their text")
    return [each for each in found if isinstance(each, str)]


def _parse_texts(value: object) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(each, str) for each in texts):
        raise value_error("must be a string or a list of strings")
    return texts


_Documents = Annotated[list[str], PlainValidator(_parse_documents, list[str | dict[str, Any]])]
_Texts = Annotated[list[str], PlainValidator(_parse_texts, str | list[str])]


class PairFields(TextFields):
    """instruction: what makes a document meet a query, for a causal model; null: that it answers a web search."""

    instruction: str | None = None


class RerankRequest(PairFields):
    """top_n: of how many documents the answer tells; null: of all.
    return_documents: the answer repeats their texts; null: it does.
    """

    query: Text
    documents: _Documents
    top_n: Annotated[int | None, Field(ge=1), WHOLE_FLOATS] = None
    return_documents: bool | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.documents) + 1


class ScoreRequest(PairFields):
    """text_1: a text for all of text_2, or one for each."""

    text_1: _Texts
    text_2: _Texts

    @property
    def num_sequences(self) -> int:
        return len(self.text_1) + len(self.text_2)


# Answers
@dataclass(frozen=True, slots=True)
class Document:
    text: str


@dataclass(frozen=True, slots=True)
class Ranked:
    """index: of the document in the request."""

    index: int
    relevance_score: float
    document: Document | None


@dataclass(frozen=True, slots=True)
class Ranking:
    """results: the best first."""

    id: str
    model: str
    results: list[Ranked]
    usage: Usage


@dataclass(frozen=True, slots=True)
class Score:
    index: int
    score: float
    object: Literal["score"] = "score"


@dataclass(frozen=True, slots=True)
class ScoreList:
    id: str
    created: int
    model: str
    data: list[Score]
    usage: Usage
    object: Literal["list"] = "list"


def _draft_ranking(body: RerankRequest, model: ServedModel, limits: EngineLimits, origin: Origin) -> Draft:
    shown = body.documents if body.return_documents is not False else None
    repeated = {"num_first": 1, "shown": shown, "top_n": body.top_n}
    prompts = dict(pooling_of(model).prompts)
    before = prompts.get("query", ""), prompts.get("document", "")
    return _draft_pairs(
        [body.query], body.documents, body, model, limits, origin, ("query", "documents"), repeated, before
    )


def _draft_scores(body: ScoreRequest, model: ServedModel, limits: EngineLimits, origin: Origin) -> Draft:
    num_first, num_second = len(body.text_1), len(body.text_2)
    if num_first not in (1, num_second):
        raise InvalidRequest(f"text_1 must have one text or as many as text_2, {num_second}, not {num_first}", "text_1")
    params = "text_1", "text_2"
    return _draft_pairs(body.text_1, body.text_2, body, model, limits, origin, params, {"num_first": num_first})


def _draft_pairs(
    first: Sequence[str],
    second: Sequence[str],
    body: PairFields,
    model: ServedModel,
    limits: EngineLimits,
    origin: Origin,
    params: tuple[str, str],
    repeated: dict[str, Any],
    before: tuple[str, str] = ("", ""),
) -> Draft:
    """first: one text, or as many as second. params: the fields that have them. before: prompts of an embedding
    model."""
    prefix, pooling = "rerank-" if "top_n" in repeated else "score-", pooling_of(model)
    if body.instruction is not None and not pooling.uses_answers:
        raise InvalidRequest("instruction is for a causal model that scores, which this one is not", "instruction")
    if pooling.task == "embed":
        ids = []
        for each, prompt, param in zip((first, second), before, params, strict=True):
            ids += tokenize_texts(with_prompt(each, prompt, model, param, limits), body, model, limits, param)
        return draft_texts(ids, body, model, origin, prefix, repeated)
    pairs = [(first[index if len(first) > 1 else 0], text) for index, text in enumerate(second)]
    if not pooling.uses_answers:
        if len(pooling.labels) != 1:
            raise InvalidRequest(f"the model has {len(pooling.labels)} labels and no score: use /classify")
        ids = [_cut_pair(pair, body, model, limits, params[1]) for pair in model.tokenizer.encode_pairs(pairs)]
        return draft_texts(ids, body, model, origin, prefix, repeated)
    if pooling.messages:
        system = prompt_named(None, model) if body.instruction is None else body.instruction
        chats = [as_messages(query, system, "query") | {"document": document} for query, document in pairs]
        ids = [chat_ids(each, model, params[1], limits) for each in chats]
        return draft_texts(tokenize_texts(ids, body, model, limits, params[1]), body, model, origin, prefix, repeated)
    asked = _INSTRUCTION if body.instruction is None else body.instruction
    texts = [f"<Instruct>: {asked}\n<Query>: {query}\n<Document>: {document}" for query, document in pairs]
    encode = model.tokenizer.encode_batch
    (head, tail), inner = encode([_BEFORE, _AFTER], False), encode(texts, False)
    room = limits.max_tokens_per_sequence - len(head) - len(tail)
    most = room if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens
    if most is not None and most != room:
        most = max(1, most - len(head) - len(tail))
    whole: list[Any] = [[*head, *ids[:most], *tail] for ids in inner]
    return draft_texts(
        tokenize_texts(whole, body.model_copy(update={"truncate_prompt_tokens": None}), model, limits, params[1]),
        body,
        model,
        origin,
        prefix,
        repeated,
    )


def _cut_pair(ids: list[int], body: PairFields, model: ServedModel, limits: EngineLimits, param: str) -> list[int]:
    (cut,) = tokenize_texts([ids], body, model, limits, param)
    return cut


def _scores(prepared: Prepared, rows: Sequence[Sequence[FinishedSequence]], model: ServedModel) -> list[float]:
    """Of each pair."""
    pooling = pooling_of(model)
    if pooling.task != "embed":
        outputs = [sequence.vector for (sequence,) in rows]
        # The last output is the score: the only one, or that of yes.
        return [float(activated(each, pooling.activation)[-1]) for each in outputs if each is not None]
    vectors = [unit(vector_of(sequence, pooling)).astype(np.float64) for (sequence,) in rows]
    num_first = prepared.repeated["num_first"]
    first, second = vectors[:num_first], vectors[num_first:]
    return [float(first[index if num_first > 1 else 0] @ vector) for index, vector in enumerate(second)]


def _build_ranking(prepared: Prepared, rows: Sequence[Sequence[FinishedSequence]], model: ServedModel) -> Answer:
    usage, name = build_usage(prepared, rows), prepared.adapter_name or model.name
    scores, shown = _scores(prepared, rows, model), prepared.repeated["shown"]
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: prepared.repeated["top_n"]]
    results = [Ranked(index, scores[index], None if shown is None else Document(shown[index])) for index in best]
    return written(Ranking(prepared.response_id, name, results, usage), usage)


def _build_scores(prepared: Prepared, rows: Sequence[Sequence[FinishedSequence]], model: ServedModel) -> Answer:
    usage, name = build_usage(prepared, rows), prepared.adapter_name or model.name
    data = [Score(index, score) for index, score in enumerate(_scores(prepared, rows, model))]
    return written(ScoreList(prepared.response_id, int(time.time()), name, data, usage), usage)


RERANK = RoutedEndpoint(
    body_model=RerankRequest,
    draft=_draft_ranking,
    build=_build_ranking,
    stream=None,
    renders_template=False,
    name="rerank",
    description="Documents in the order in which they meet a query.",
    operation="embeddings",
    answer_model=Ranking,
    example={"query": "What do whales eat?", "documents": ["Krill.", "In the sea."]},
    tasks=_TASKS,
)
SCORE = RoutedEndpoint(
    body_model=ScoreRequest,
    draft=_draft_scores,
    build=_build_scores,
    stream=None,
    renders_template=False,
    name="score",
    description="How well each of some texts meets another.",
    operation="embeddings",
    answer_model=ScoreList,
    example={"text_1": "What do whales eat?", "text_2": ["Krill.", "In the sea."]},
    tasks=_TASKS,
)
