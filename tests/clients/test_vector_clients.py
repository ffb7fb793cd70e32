"""Clients of embeddings and of reranking, at a server with task=embed."""

import os
from typing import Any

import pytest

from tests.clients.conftest import PlainPost

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise it downloads a list of prices
litellm = pytest.importorskip("litellm", reason="litellm is not installed: `make test-clients` has it")
cohere = pytest.importorskip("cohere", reason="cohere is not installed: `make test-clients` has it")
openai_like = pytest.importorskip("llama_index.embeddings.openai_like", reason="llama-index is not installed")

TEXTS = ["Whales eat krill.", "Berlin is in Germany.", "What do whales eat?"]
QUERY = "What do whales eat?"


@pytest.fixture
def vectors(plain_post: PlainPost) -> list[list[float]]:
    return [each["embedding"] for each in plain_post("embeddings", {"input": TEXTS})["data"]]


@pytest.fixture
def ranking(plain_post: PlainPost) -> list[tuple[int, float]]:
    results = plain_post("rerank", {"query": QUERY, "documents": TEXTS})["results"]
    assert results[0]["index"] == 2
    return [(each["index"], each["relevance_score"]) for each in results]


def dot(first: list[float], second: list[float]) -> float:
    return sum(a * b for a, b in zip(first, second, strict=True))


def are_close(found: list[list[float]], expected: list[list[float]]) -> bool:
    """Batches of other sizes may round otherwise."""
    return all(dot(first, second) > 0.9999 for first, second in zip(found, expected, strict=True))


@pytest.mark.parametrize("model", ["openai/default", "hosted_vllm/default"])
def test_litellm_embeds(model: str, base_url: str, vectors: list[list[float]]) -> None:
    answer = litellm.embedding(model=model, input=TEXTS, api_base=base_url, api_key="none")
    assert are_close([each["embedding"] for each in answer.data], vectors)


@pytest.mark.parametrize("model", ["hosted_vllm/default", "jina_ai/default", "cohere/default"])
def test_litellm_reranks(model: str, base_url: str, ranking: list[tuple[int, float]]) -> None:
    base = f"{base_url}/rerank" if model.startswith("cohere") else base_url
    answer = litellm.rerank(model=model, query=QUERY, documents=TEXTS, top_n=2, api_base=base, api_key="none")
    found = [(each["index"], each["relevance_score"]) for each in answer.results]
    assert [index for index, _ in found] == [index for index, _ in ranking[:2]]
    assert [score for _, score in found] == pytest.approx([score for _, score in ranking[:2]], abs=1e-3)


def test_cohere_reranks(base_url: str, ranking: list[tuple[int, float]]) -> None:
    root = base_url.removesuffix("/v1")
    for client in (cohere.Client("none", base_url=root), cohere.ClientV2("none", base_url=root)):
        answer = client.rerank(model="default", query=QUERY, documents=TEXTS, top_n=3)
        assert [each.index for each in answer.results] == [index for index, _ in ranking]
        scores = [each.relevance_score for each in answer.results]
        assert scores == pytest.approx([score for _, score in ranking], abs=1e-3)


def test_llama_indexs_retriever_finds_the_closest(base_url: str, vectors: list[list[float]]) -> None:
    from llama_index.core import VectorStoreIndex
    from llama_index.core.schema import TextNode

    model: Any = openai_like.OpenAILikeEmbedding(model_name="default", api_base=base_url, api_key="none")
    assert are_close(model.get_text_embedding_batch(TEXTS), vectors)
    index = VectorStoreIndex([TextNode(text=text) for text in TEXTS], embed_model=model)
    (found,) = index.as_retriever(similarity_top_k=1).retrieve(QUERY)
    assert found.text == QUERY
