"""Servers of models that make vectors and scores, by real clients, beside sentence-transformers and transformers."""

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from openai import BadRequestError, OpenAI
from sentence_transformers import CrossEncoder
from transformers import AutoTokenizer

from tests.end_to_end.helpers.toka_process import TokaProcess, running_toka, wait_for
from tests.helpers.peft_adapters import merged_model, save_adapter
from tests.helpers.pooling_models import (
    PROMPTS,
    TEXTS,
    head_outputs,
    save_answering_model,
    save_classifier,
    save_embedding_model,
    vectors_of,
)
from tests.helpers.tiny_model import save_tiny_model

FLAGS = (
    *("dtype=float32", "device=cpu", "kv_cache_num_tokens=8192", "max_seqs_per_forward=16"),
    "max_tokens_per_forward=64",  # longer texts are computed in chunks
)


def post(toka: TokaProcess, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{toka.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def error_of(toka: TokaProcess, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{toka.url}{path}", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def embedded(toka: TokaProcess, texts: Any, **body: Any) -> np.ndarray:
    data = post(toka, "/v1/embeddings", input=texts, **body)["data"]
    assert [each["index"] for each in data] == list(range(len(data)))
    return np.array([each["embedding"] for each in data])


def is_close(found: Any, expected: Any) -> bool:
    return bool(np.abs(np.asarray(found) - np.asarray(expected)).max() < 1e-5)


@pytest.fixture(scope="module")
def encoder_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TokaProcess, Any]]:
    directory = tmp_path_factory.mktemp("vectors") / "model"
    encoder = save_embedding_model(directory, "qwen3", "lasttoken", normalizes=True)
    with running_toka(f"model={directory}", *FLAGS) as toka:
        wait_for(lambda: any(line.startswith("try: ") for line in toka.lines), 10)  # it comes after "ready"
        (example,) = [line.removeprefix("try:   ") for line in toka.lines if line.startswith("try: ")]
        shown = subprocess.run(["sh", "-c", example], capture_output=True, text=True, check=True).stdout
        assert is_close(json.loads(shown)["data"][0]["embedding"], vectors_of(encoder, ["Hello"])[0])
        yield toka, encoder
        assert toka.stop() == 0


def test_openais_client_gets_the_vectors_of_sentence_transformers(encoder_server: tuple[TokaProcess, Any]) -> None:
    toka, encoder = encoder_server
    client = OpenAI(base_url=f"{toka.url}/v1", api_key="none")
    expected = vectors_of(encoder, TEXTS)
    answer = client.embeddings.create(model="default", input=TEXTS)  # asks for base64
    assert is_close([each.embedding for each in answer.data], expected)
    ids = [encoder.tokenizer.encode(text) for text in TEXTS]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    as_numbers = client.embeddings.create(model="default", input=ids, encoding_format="float")
    assert is_close([each.embedding for each in as_numbers.data], expected)
    shorter = client.embeddings.create(model="default", input=TEXTS[0], dimensions=10).data[0].embedding
    assert is_close(shorter, expected[0, :10] / np.linalg.norm(expected[0, :10]))
    with pytest.raises(BadRequestError, match="dimensions may be at most 64"):
        client.embeddings.create(model="default", input="a", dimensions=65)


def test_langchains_retriever_finds_the_same(encoder_server: tuple[TokaProcess, Any]) -> None:
    from langchain_core.vectorstores import InMemoryVectorStore
    from langchain_openai import OpenAIEmbeddings

    toka, encoder = encoder_server
    settings: dict[str, Any] = {"base_url": f"{toka.url}/v1", "api_key": "none", "check_embedding_ctx_length": False}
    embeddings = OpenAIEmbeddings(model="default", **settings)
    assert is_close(embeddings.embed_documents(TEXTS), vectors_of(encoder, TEXTS))
    store = InMemoryVectorStore.from_texts(TEXTS, embeddings)
    best = [each.page_content for each in store.similarity_search("krill", k=3)]
    similarities = vectors_of(encoder, TEXTS) @ vectors_of(encoder, ["krill"])[0]
    assert best == [TEXTS[index] for index in np.argsort(-similarities)[:3]]


def test_many_clients_texts_of_mixed_lengths_share_steps_and_prefixes(encoder_server: tuple[TokaProcess, Any]) -> None:
    toka, encoder = encoder_server
    texts = [f"{TEXTS[number % len(TEXTS)]} {number % 7}" for number in range(120)]
    with ThreadPoolExecutor(12) as pool:
        parts = list(pool.map(lambda start: embedded(toka, texts[start : start + 10]), range(0, 120, 10)))
    assert is_close(np.concatenate(parts), vectors_of(encoder, texts))
    assert toka.gauge("toka_prefix_cache_hit_tokens_total") > 0
    assert toka.gauge("toka_kv_blocks_used") == 0


def test_prompts_of_the_model_precede_texts_by_name(encoder_server: tuple[TokaProcess, Any]) -> None:
    toka, encoder = encoder_server
    found = embedded(toka, TEXTS[:2], prompt_name="query")
    assert is_close(found, vectors_of(encoder, TEXTS[:2], prompt_name="query"))
    assert not is_close(found, vectors_of(encoder, TEXTS[:2]))
    error = error_of(toka, "/v1/embeddings", input="a", prompt_name="other")
    assert error["message"] == "prompt_name must be one of the model's prompts: ['document', 'query']"


def test_documents_are_ranked_by_cosines(encoder_server: tuple[TokaProcess, Any]) -> None:
    toka, encoder = encoder_server
    query, documents = "krill", [text for text in TEXTS if text]
    similarities = vectors_of(encoder, documents) @ vectors_of(encoder, [PROMPTS["query"] + query])[0]
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        ranked = post(toka, path, query=query, documents=[{"text": text} for text in documents], top_n=3)["results"]
        assert [each["index"] for each in ranked] == np.argsort(-similarities)[:3].tolist()
        assert is_close([each["relevance_score"] for each in ranked], np.sort(similarities)[::-1][:3])
        assert [each["document"]["text"] for each in ranked] == [documents[each["index"]] for each in ranked]
    scores = post(toka, "/score", text_1=["a", query], text_2=["b", documents[0]])["data"]
    first, second = vectors_of(encoder, ["a", query]), vectors_of(encoder, ["b", documents[0]])
    assert is_close([each["score"] for each in scores], (first * second).sum(-1))


def test_long_texts_are_errors_or_cut(encoder_server: tuple[TokaProcess, Any]) -> None:
    toka, encoder = encoder_server
    long = "whale " * 100
    error = error_of(toka, "/v1/embeddings", input=["a", long])
    assert error["code"] == "context_length_exceeded"
    assert "input has a text of 600 tokens; truncate_prompt_tokens=-1 cuts it" in error["message"]
    assert is_close(embedded(toka, [long], truncate_prompt_tokens=-1), vectors_of(encoder, [long[:512]]))
    assert is_close(embedded(toka, [long], truncate_prompt_tokens=9), vectors_of(encoder, [long[:9]]))


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v1/embeddings", {"input": ""}, "input must not be empty"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input must not be empty"),
        ("/v1/embeddings", {"input": [[5], [999_999]]}, "input has the token id 999999"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents must be a list of strings"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "as many as text_2, 3, not 2"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "instruction": "x"}, "for a causal model that scores"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "this server has task=embed, use"),
        ("/v1/completions", {"prompt": "a"}, "use POST /v1/embeddings: this path needs a server with task=generate"),
        ("/classify", {"input": "a"}, "needs a server with task=score or task=classify or task=reward"),
    ],
)
def test_a_wrong_body_says_what_is_wrong(
    encoder_server: tuple[TokaProcess, Any], path: str, body: dict[str, Any], told: str
) -> None:
    assert told in error_of(encoder_server[0], path, **body)["message"]


def test_lines_of_bulk_requests_have_vectors(encoder_server: tuple[TokaProcess, Any]) -> None:
    toka, encoder = encoder_server
    lines = [
        json.dumps({"custom_id": str(index), "url": "/v1/embeddings", "body": {"input": text}})
        for index, text in enumerate(TEXTS)
    ]
    answer = httpx.post(f"{toka.url}/v1/bulk", content="\n".join(lines), timeout=60)
    found = {each["custom_id"]: each["response"]["body"] for each in map(json.loads, answer.text.splitlines())}
    vectors = [found[str(index)]["data"][0]["embedding"] for index in range(len(TEXTS))]
    assert is_close(vectors, vectors_of(encoder, TEXTS))


def test_texts_become_messages_where_the_checkpoint_says_so(tmp_path: Path) -> None:
    encoder = save_embedding_model(tmp_path / "model", "qwen3", "lasttoken", normalizes=True, has_messages=True)
    with running_toka(f"model={tmp_path / 'model'}", *FLAGS) as toka:
        assert is_close(embedded(toka, TEXTS), vectors_of(encoder, TEXTS))
        assert is_close(embedded(toka, TEXTS, prompt_name="query"), vectors_of(encoder, TEXTS, prompt_name="query"))
    answering = save_answering_model(tmp_path / "answering", yes=70, no=12)
    with running_toka(f"model={tmp_path / 'answering'}", *FLAGS) as toka:
        scores = post(toka, "/v1/score", text_1="krill", text_2=TEXTS)["data"]
    expected = answering.predict([("krill", text) for text in TEXTS], batch_size=1)
    assert is_close([each["score"] for each in scores], expected)


def test_tokens_that_the_tokenizer_adds_stay_where_texts_are_cut(tmp_path: Path) -> None:
    encoder = save_embedding_model(tmp_path / "model", "llama", "lasttoken", normalizes=False, adds_end=True)
    expected = vectors_of(encoder, TEXTS)
    encoder.max_seq_length = 9
    with running_toka(f"model={tmp_path / 'model'}", *FLAGS) as toka:
        assert is_close(embedded(toka, TEXTS), expected)
        assert is_close(embedded(toka, TEXTS, truncate_prompt_tokens=9), vectors_of(encoder, TEXTS))
        bare = embedded(toka, TEXTS[0], add_special_tokens=False)
        assert not is_close(bare, expected[0])


def test_batches_have_vectors(tmp_path: Path) -> None:
    encoder = save_embedding_model(tmp_path / "model", "llama", "mean", normalizes=True)
    lines = [
        json.dumps({"custom_id": str(index), "method": "POST", "url": "/v1/embeddings", "body": {"input": text}})
        for index, text in enumerate(TEXTS)
    ]
    with running_toka(f"model={tmp_path / 'model'}", f"data_dir={tmp_path / 'data'}", *FLAGS) as toka:
        client = OpenAI(base_url=f"{toka.url}/v1", api_key="none")
        file = client.files.create(file=("lines.jsonl", "\n".join(lines).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
        wait_for(lambda: client.batches.retrieve(batch.id).status == "completed", 60)
        output = client.batches.retrieve(batch.id).output_file_id
        assert output is not None
        answers = [json.loads(line) for line in client.files.content(output).text.splitlines()]
    found = {each["custom_id"]: each["response"]["body"]["data"][0]["embedding"] for each in answers}
    assert is_close([found[str(index)] for index in range(len(TEXTS))], vectors_of(encoder, TEXTS))


@pytest.mark.parametrize(
    ("pooling", "flags"), [("mean", ("tp_size=2",)), ("cls", ("dp_size=2",)), ("lasttoken", ("pp_size=2",))]
)
def test_ranks_stages_and_replicas_give_the_same(tmp_path: Path, pooling: str, flags: tuple[str, ...]) -> None:
    encoder = save_embedding_model(tmp_path / "model", "llama", pooling, normalizes=False)
    with running_toka(f"model={tmp_path / 'model'}", *FLAGS, *flags) as toka:
        texts = TEXTS * 3  # some are cached
        assert is_close(embedded(toka, texts), vectors_of(encoder, texts))
        assert toka.stop() == 0


def test_a_cross_encoder_scores_pairs(tmp_path: Path) -> None:
    save_classifier(tmp_path, "qwen3", 1, pad_token_id=256)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|eos|>",
    }  # no template, for pairs
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    encoder = CrossEncoder(str(tmp_path), device="cpu")
    encoder.tokenizer.pad_token = "<|eos|>"
    with running_toka(f"model={tmp_path}", *FLAGS) as toka:
        expected = encoder.predict([("krill", text) for text in TEXTS], batch_size=1)
        scores = post(toka, "/v1/score", text_1="krill", text_2=TEXTS)["data"]
        assert is_close([each["score"] for each in scores], expected)
        ranked = post(toka, "/v1/rerank", query="krill", documents=TEXTS, return_documents=False)["results"]
        assert [each["index"] for each in ranked] == np.argsort(-expected).tolist()
        assert {each["document"] for each in ranked} == {None}
        classes = post(toka, "/classify", input=["krill" + text for text in TEXTS])["data"]
        assert is_close([each["probs"] for each in classes], expected[:, None])
        padded = [*encoder.tokenizer.encode("krill"), 256, 256]
        once, twice = post(toka, "/classify", input=[padded[:-2], padded])["data"]
        assert once["probs"] == twice["probs"], "padding does not count"
        assert error_of(toka, "/v1/embeddings", input="a")["code"] == "wrong_task"


def test_a_classifier_and_a_reward_model(tmp_path: Path) -> None:
    model = save_classifier(tmp_path, "llama", 3)
    logits = head_outputs(model, tmp_path, TEXTS)
    with running_toka(f"model={tmp_path}", *FLAGS) as toka:
        classes = post(toka, "/classify", input=TEXTS)["data"]
        probabilities = torch.tensor(logits).softmax(-1).numpy()
        assert is_close([each["probs"] for each in classes], probabilities)
        assert [each["label"] for each in classes] == [f"LABEL_{index}" for index in probabilities.argmax(-1)]
        plain = post(toka, "/classify", input=TEXTS, use_activation=False)["data"]
        assert is_close([each["probs"] for each in plain], logits)
        assert error_of(toka, "/v1/score", text_1="a", text_2="b")["code"] == "wrong_task"
    with running_toka(f"model={tmp_path}", "task=reward", *FLAGS) as toka:
        # as verl asks vLLM, in two versions, and SGLang; and OpenRLHF its own server
        for body in ({"activation": False}, {"use_activation": False, "add_special_tokens": False}):
            answer = post(toka, "/classify", model=str(tmp_path), input=TEXTS[0], **body)
            assert is_close(answer["data"][-1]["probs"][-1], logits[0, -1])
        answer = post(toka, "/v1/embeddings", model=str(tmp_path), input=TEXTS[0])
        assert is_close(answer["data"][-1]["embedding"][-1], logits[0, -1])
        answer = post(toka, "/get_reward", query=TEXTS, prompts=TEXTS, labels=["a"] * len(TEXTS))
        assert answer.keys() == {"rewards"}
        assert is_close(answer["rewards"], logits[:, -1])
        assert is_close([each["data"] for each in post(toka, "/pooling", input=TEXTS)["data"]], logits)


def test_a_causal_model_embeds_or_answers_yes_or_no(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "qwen3")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save_pretrained(tmp_path)
    ids = {word: tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no")}
    with running_toka(f"model={tmp_path}", "task=score", *FLAGS) as toka:
        ranked = post(toka, "/v1/rerank", query="krill", documents=TEXTS[:2], instruction="Find food")["results"]
    for each in ranked:
        text = (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
            'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
            f"<Instruct>: Find food\n<Query>: krill\n<Document>: {TEXTS[each['index']]}<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )
        with torch.inference_mode():
            logits = model(torch.tensor([tokenizer.encode(text)])).logits[0, -1, [ids["no"], ids["yes"]]]
        assert is_close(each["relevance_score"], logits.softmax(0)[1])
    with running_toka(f"model={tmp_path}", "task=embed", *FLAGS) as toka:
        vectors = embedded(toka, TEXTS)
    for text, vector in zip(TEXTS, vectors, strict=True):
        with torch.inference_mode():
            last = model(torch.tensor([tokenizer.encode(text)]), output_hidden_states=True).hidden_states[-1][0, -1]
        assert is_close(vector, torch.nn.functional.normalize(last, dim=0))


def test_adapters_change_vectors(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "llama")
    adapter = save_adapter(tmp_path / "model", tmp_path / "adapter", 1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    lora = json.dumps({"own": str(adapter)})
    with running_toka(f"model={tmp_path / 'model'}", "task=embed", f"lora={lora}", *FLAGS) as toka:
        found = {name: embedded(toka, TEXTS, model=name) for name in ("own", "default")}
    assert not is_close(found["own"], found["default"])
    for name, merged in (("own", adapter), ("default", None)):
        model = merged_model(tmp_path / "model", merged)
        for text, vector in zip(TEXTS, found[name], strict=True):
            with torch.inference_mode():
                states = model(torch.tensor([tokenizer.encode(text)]), output_hidden_states=True).hidden_states
            assert is_close(vector, torch.nn.functional.normalize(states[-1][0, -1], dim=0))


def test_a_model_that_generates_says_what_it_lacks(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    with running_toka(f"model={tmp_path}", *FLAGS) as toka:
        client = OpenAI(base_url=f"{toka.url}/v1", api_key="none")
        with pytest.raises(BadRequestError, match=r"this server has task=generate.* needs a server with task=embed"):
            client.embeddings.create(model="default", input="a")
        for path, body in (
            ("/v1/rerank", {"query": "a", "documents": ["b"]}),
            ("/v1/score", {"text_1": "a", "text_2": "b"}),
            ("/classify", {"input": "a"}),
            ("/pooling", {"input": "a"}),
        ):
            assert error_of(toka, path, **body)["code"] == "wrong_task"
