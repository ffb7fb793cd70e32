"""Vectors, ranks and classes from Python, and a data set's vectors, beside sentence-transformers and transformers."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from tests.end_to_end.helpers.toka_process import running_toka
from tests.helpers.pooling_models import TEXTS, head_outputs, save_classifier, save_embedding_model, vectors_of
from tokasaurus import AsyncClient, Client, JobChanged, RowsFailed, ServerError
from tokasaurus.cli import main

FLAGS = ("dtype=float32", "device=cpu", "kv_cache_num_tokens=8192", "max_seqs_per_forward=16")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, Any]]:
    directory = tmp_path_factory.mktemp("vectors") / "model"
    encoder = save_embedding_model(directory, "qwen3", "lasttoken", normalizes=True)
    with running_toka(f"model={directory}", *FLAGS) as toka, Client(toka.url) as client:
        yield client, encoder


def is_close(found: Any, expected: Any) -> bool:
    return bool(np.abs(np.asarray(found) - np.asarray(expected)).max() < 1e-5)


def rows_of(output: Path) -> list[dict[str, Any]]:
    return pq.read_table(output).to_pylist()


def test_embed_gives_one_array(served: tuple[Client, Any]) -> None:
    client, encoder = served
    found = client.embed([*TEXTS, encoder.tokenizer.encode("krill")], progress=False)
    assert found.dtype == np.float32
    assert is_close(found, vectors_of(encoder, [*TEXTS, "krill"]))
    named = client.embed(TEXTS, prompt_name="query", dimensions=8, progress=False)
    expected = vectors_of(encoder, TEXTS, prompt_name="query")[:, :8]
    assert is_close(named, expected / np.linalg.norm(expected, axis=1, keepdims=True))
    with pytest.warns(RowsFailed, match="1 of 2"):
        found = client.embed(["a", ""], progress=False)
    assert np.isnan(found[1]).all()
    assert is_close(found[0], vectors_of(encoder, ["a"])[0])
    with pytest.raises(RowsFailed):
        client.embed(["a", ""], progress=False, raise_on_error=True)
    with pytest.raises(TypeError, match=r"write .text."):
        client.embed("a")


def test_rerank_orders_documents(served: tuple[Client, Any]) -> None:
    client, encoder = served
    order, scores = client.rerank("krill", TEXTS, progress=False)
    expected = vectors_of(encoder, TEXTS) @ vectors_of(encoder, ["krill"], prompt_name="query")[0]
    assert is_close(scores, expected)
    assert order.tolist() == np.argsort(-expected).tolist()


def test_coroutines_give_the_same(served: tuple[Client, Any], tmp_path: Path) -> None:
    del tmp_path
    client, _ = served

    async def run() -> tuple[Any, Any]:
        async with AsyncClient(client._client._address[0]) as other:
            return await other.embed(TEXTS, progress=False), await other.rerank("krill", TEXTS, progress=False)

    vectors, (order, _) = asyncio.run(run())
    assert (vectors == client.embed(TEXTS, progress=False)).all()
    assert order.tolist() == client.rerank("krill", TEXTS, progress=False)[0].tolist()


def test_classify_gives_labels_and_probabilities(tmp_path: Path) -> None:
    model = save_classifier(tmp_path, "llama", 3)
    expected = torch.tensor(head_outputs(model, tmp_path, TEXTS)).softmax(-1).numpy()
    with running_toka(f"model={tmp_path}", *FLAGS) as toka, Client(toka.url) as client:
        labels, probabilities = client.classify(TEXTS, progress=False)
        assert labels == [f"LABEL_{index}" for index in expected.argmax(-1)]
        assert is_close(probabilities, expected)
        with pytest.raises(ServerError, match="this server has task=classify"):
            client.map([{"text": "a"}], embed="{text}", progress=False)


def test_map_writes_fixed_size_lists_and_goes_on(served: tuple[Client, Any], tmp_path: Path) -> None:
    client, encoder = served
    rows = [{"id": number, "text": f"{text} {number}"} for number, text in enumerate(TEXTS * 4)]
    output = tmp_path / "out"
    client.map(rows[:10], output, embed="{text}", key="id", progress=False)
    summary = client.map(rows, output, embed="{text}", key="id", progress=False)
    assert (summary.num_rows, summary.num_skipped, summary.num_errors) == (24, 10, 0)
    table = pq.read_table(output)
    assert str(table.schema.field("embedding").type) == "fixed_size_list<element: float>[64]"
    assert table.column_names == ["id", "text", "embedding", "error"]
    found = {row["id"]: row["embedding"] for row in table.to_pylist()}
    assert is_close([found[row["id"]] for row in rows], vectors_of(encoder, [row["text"] for row in rows]))
    with pytest.raises(JobChanged):
        client.map(rows, output, embed="{text}", key="id", dimensions=8, progress=False)


def test_rows_without_a_text_have_errors_and_others_vectors(served: tuple[Client, Any], tmp_path: Path) -> None:
    client, encoder = served
    rows = [{"text": "a"}, {"text": None}, {"text": ""}]
    client.map(rows, tmp_path / "out", embed="{text}", progress=False)
    first, second, third = rows_of(tmp_path / "out")
    assert is_close(first["embedding"], vectors_of(encoder, ["a"])[0])
    assert second["embedding"] is None
    assert "the column 'text' is null" in second["error"]
    assert "input must not be empty" in third["error"]
    back = client.map(rows[:1], embed="{text}", prefix="own_", progress=False)
    assert is_close(back[0]["own_embedding"], first["embedding"])
    client.map(rows, tmp_path / "lines", embed="{text}", format="jsonl", progress=False)
    lines = [json.loads(line) for path in (tmp_path / "lines").iterdir() for line in path.read_text().splitlines()]
    assert is_close(lines[0]["embedding"], first["embedding"])
    assert [line["embedding"] for line in lines[1:]] == [None, None]


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        ({"embed": "{text}", "prompt": "{text}"}, "either prompt= or messages= or embed="),
        ({"embed": "{text}", "columns": ["seed"]}, "embed= has none"),
        ({"embed": "{text}", "schema": {}}, "schema: is for answers"),
        ({"embed": "{other}"}, "no column 'other'"),
        ({"embed": "{text}", "embed_dtype": "int8"}, "must be float32 or float16"),
    ],
)
def test_what_embed_does_not_go_with(served: tuple[Client, Any], keywords: dict[str, Any], told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        served[0].map([{"text": "a"}], progress=False, **keywords)


def test_the_command_embeds_files(
    served: tuple[Client, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client, encoder = served
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    words = ["map", f"input={tmp_path / 'in.jsonl'}", f"output={tmp_path / 'out'}", "embed={text}", "format=parquet"]
    words.append("embed_dtype=float16")
    assert main([*words, f"base_url={client._client._address[0]}", "dimensions=16"]) == 0
    assert f"{len(TEXTS)} rows answered, 0 errors" in capsys.readouterr().out
    expected = vectors_of(encoder, TEXTS)[:, :16]
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert (
        str(pq.read_table(tmp_path / "out").schema.field("embedding").type) == "fixed_size_list<element: halffloat>[16]"
    )
    found = np.array([row["embedding"] for row in rows_of(tmp_path / "out")])
    assert (found.astype(np.float16) == expected.astype(np.float16)).mean() > 0.99  # ties round either way
    assert np.abs(found - expected).max() < 1e-3
