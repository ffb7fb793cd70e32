"""A served checkpoint with a tokenizer as in Llama 2, against transformers: ids, texts, stop strings."""

import itertools
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from tests.end_to_end.helpers.toka_process import running_toka
from tests.helpers.tiny_model import save_tiny_model
from tests.helpers.trained_tokenizers import sentencepiece

FLAGS = ("dtype=float32", "kv_cache_num_tokens=4096", "max_tokens_per_forward=256", "max_seqs_per_forward=16")
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
NUM_TOKENS = 12


@pytest.mark.long
def test_ids_texts_and_stop_strings_are_those_of_decoding_all_ids(tmp_path: Path) -> None:
    oracle = save_tiny_model(tmp_path, "llama", vocab_size=448)
    sentencepiece().save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": True, "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "<s>", "eos_token": "</s>"}))
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "hello world"}]
    with running_toka(f"model={tmp_path}", *FLAGS) as toka:

        def complete(**fields: Any) -> dict[str, Any]:
            body = {"model": "default", "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **fields}
            answer = httpx.post(f"{toka.url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            return answer.json()

        def tokenize(**body: Any) -> list[int]:
            token_ids: list[int] = httpx.post(f"{toka.url}/tokenize", json=body, timeout=60).json()["tokens"]
            return token_ids

        asked = {"messages": messages, "add_generation_prompt": False}
        assert tokenize(**asked) == reference.apply_chat_template(messages, return_dict=False)
        byte_ids = [reference.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in range(256)]
        prompts = (
            "hello world:",
            "the user said: hällo\n",
            None,
        )  # None: bos alone, which has no text
        for prompt, excluded in itertools.product(prompts, ([], byte_ids)):
            prompt_ids = reference(prompt or "")["input_ids"]
            if prompt is not None:
                assert tokenize(prompt=prompt) == prompt_ids
            inputs, limits = torch.tensor([prompt_ids]), {"max_new_tokens": NUM_TOKENS, "eos_token_id": None}
            (row,) = oracle.generate(
                inputs, do_sample=False, pad_token_id=0, suppress_tokens=excluded or None, **limits
            ).tolist()
            before = reference.decode(prompt_ids, skip_special_tokens=True)
            texts = [  # after each token
                reference.decode(row[:end], skip_special_tokens=True)[len(before) :]
                for end in range(len(prompt_ids), len(row) + 1)
            ]
            bias = {str(token_id): -100 for token_id in excluded}
            assert complete(prompt=prompt or prompt_ids, logit_bias=bias)["choices"][0]["text"] == texts[-1]
            echoed = complete(prompt=prompt_ids, echo=True, logit_bias=bias)["choices"][0]["text"]
            assert echoed == reference.decode(prompt_ids) + texts[-1]
            if excluded:
                stop = texts[-1][:2]
                stopped = complete(prompt=prompt or prompt_ids, stop=stop, logit_bias=bias)
                assert (stopped["choices"][0]["text"], stopped["choices"][0]["finish_reason"]) == ("", "stop")
                num_expected = next(count for count, text in enumerate(texts) if stop in text)
                assert stopped["usage"]["completion_tokens"] == num_expected
