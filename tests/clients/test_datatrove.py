"""datatrove's inference step over documents, with its type of server `endpoint`."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import PlainPost

QUESTIONS = ["What do whales eat?", "Name a whale.", "Can whales swim?"]
GREEDY = {"max_tokens": 12, "temperature": 0}


@pytest.mark.parametrize("use_chat", [True, False])
def test_each_document_gets_its_answer(use_chat: bool, base_url: str, plain_post: PlainPost, tmp_path: Path) -> None:
    pytest.importorskip("datatrove", reason="datatrove is not installed: `make test-clients` has it")
    from datatrove.data import Document
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceRunner
    from datatrove.pipeline.writers import JsonlWriter

    def prompt(text: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}]} if use_chat else {"prompt": text}

    async def ask(document: Any, generate: Any) -> dict[str, Any]:
        answer = await generate({**prompt(document.text), **GREEDY})
        return {"text": answer.text, "tokens": answer.usage["completion_tokens"], "end": answer.finish_reason}

    config = InferenceConfig(
        server_type="endpoint",
        endpoint_url=base_url.removesuffix("/v1"),
        model_name_or_path="default",
        use_chat=use_chat,
    )
    writer = JsonlWriter(str(tmp_path / "answers"), compression=None)
    documents = [Document(text=text, id=text) for text in QUESTIONS]
    steps = [documents, InferenceRunner(rollout_fn=ask, config=config, output_writer=writer)]
    LocalPipelineExecutor(pipeline=steps, logging_dir=str(tmp_path / "logs"), tasks=1).run()
    (path,) = (tmp_path / "answers").iterdir()
    written = {line["id"]: line["metadata"]["rollout_results"] for line in map(json.loads, path.open())}
    assert written.keys() == set(QUESTIONS)
    for text, (result,) in written.items():
        (choice,) = plain_post("chat/completions" if use_chat else "completions", {**prompt(text), **GREEDY})["choices"]
        expected = choice["message"]["content"] if use_chat else choice["text"]
        assert result == {"text": expected, "tokens": 12, "end": "length"}
