"""The tokens that end a generation: config, generation config, and the tokenizer's own, against AutoTokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind
from tokenizers import AddedToken, Tokenizer, models
from transformers import AutoTokenizer

from tests.checkpoint.helpers.fake_hub import CONFIG, weights
from tests.checkpoint.helpers.gguf_files import random_weights, write_gguf
from tests.helpers.examples import few
from tokasaurus.checkpoint import read_model_info, resolve_checkpoint
from tokasaurus.checkpoint.tokenizer_files import with_tokenizer_end

WORDS = ["a", "b", "</s>", "<|endoftext|>", "<|im_end|>"]


def write_tokenizer(directory: Path, added: list[str], config: dict[str, Any], special_map: object = None) -> None:
    """The other WORDS are in the model's vocabulary."""
    directory.mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="a"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in added])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config})
    )
    if special_map is not None:
        (directory / "special_tokens_map.json").write_text(json.dumps(special_map))


def write_model(directory: Path, eos: object = None, generation_eos: object = None, vocab_size: int = 100) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": eos, "vocab_size": vocab_size}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    (directory / "model.safetensors").write_bytes(weights())


ADDED = {"5": {"content": "<|turn|>", "special": True}, "4": {"content": "<|im_end|>", "special": True}}
LAYOUTS: dict[str, tuple[list[str], dict[str, Any], object]] = {
    "a string": ([], {"eos_token": "<|im_end|>"}, None),
    "an added token": (["<|turn|>"], {"eos_token": "<|turn|>"}, None),
    "an object": (["<|im_end|>"], {"eos_token": {"content": "<|im_end|>", "__type": "AddedToken"}}, None),
    "the map alone": ([], {}, {"eos_token": "<|im_end|>"}),
    "an object in the map": ([], {}, {"eos_token": {"content": "<|im_end|>", "lstrip": False}}),
    "the map over the config": ([], {"eos_token": "</s>"}, {"eos_token": "<|im_end|>"}),
    "the map beside the newer list": (
        ["<|turn|>"],
        {"eos_token": "</s>", "added_tokens_decoder": ADDED},
        {"eos_token": "<|im_end|>"},
    ),
    "none": ([], {}, None),
    "null": ([], {"eos_token": None}, None),
    "null, of a class with an end token": ([], {"tokenizer_class": "Qwen2Tokenizer", "eos_token": None}, None),
    "that of the class": ([], {"tokenizer_class": "Qwen2Tokenizer"}, None),
}


@few(2, "layout", sorted(LAYOUTS, key=lambda layout: "class" not in layout))
def test_the_end_token_is_that_of_autotokenizer(layout: str, tmp_path: Path) -> None:
    added, config, special_map = LAYOUTS[layout]
    write_tokenizer(tmp_path, added, config, special_map)
    write_model(tmp_path)
    expected = AutoTokenizer.from_pretrained(tmp_path)
    ids = () if expected.eos_token is None else (expected.eos_token_id,)
    assert resolve_checkpoint(str(tmp_path)).info.eos_ids == ids


def test_all_three_sources_end_a_generation(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, ["<|turn|>"], {"eos_token": "<|turn|>"})
    write_model(tmp_path, 3, [0, 9])
    assert resolve_checkpoint(str(tmp_path)).info.eos_ids == (0, 3, 5, 9)
    write_model(tmp_path, [5, 3], 5)
    assert resolve_checkpoint(str(tmp_path)).info.eos_ids == (3, 5)


def test_another_tokenizers_end_token_counts_where_the_model_has_its_id(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    write_tokenizer(own, [], {"eos_token": "</s>"})
    write_model(own, 3)
    write_tokenizer(other, [f"<{index}>" for index in range(200)], {"eos_token": "<90>"})
    assert resolve_checkpoint(str(own), str(other)).info.eos_ids == (3, 95)
    (other / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<150>"}))
    assert resolve_checkpoint(str(own), str(other)).info.eos_ids == (3,)
    (other / "tokenizer_config.json").write_text(json.dumps({"eos_token": "no such token"}))
    assert resolve_checkpoint(str(own), str(other)).info.eos_ids == (3,)


@pytest.mark.parametrize(
    ("text", "token_id"),
    [
        ('{"model": {"vocab": {"\\"added_tokens\\": [": 1, "E": 7}}}', 7),
        ('{"model": {"vocab": {"added_tokens": 3, "E": 7}}, "added_tokens": [{"id": 8, "content": "E"}]}', 7),
        ('{"added_tokens" : [ {"content": "E", "id": 6} ], "model": {}}', 6),
        ('{"added_tokens": [3, {"id": "4"}], "model": {"vocab": [["a", 0.5], ["E", -1.5]]}}', 1),
        ('{"added_tokens": [], "model": {"vocab": [[], 3]}}', None),
        ('{"model": null}', None),
    ],
)
def test_the_id_is_found_wherever_the_file_has_it(text: str, token_id: int | None, tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text(text)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "E"}')
    info = with_tokenizer_end(read_model_info(tmp_path), tmp_path)
    assert info.eos_ids == (() if token_id is None else (token_id,))


@pytest.mark.parametrize(
    ("text", "token_type", "is_end"),
    [
        ("<|im_end|>", 3, True),
        ("<|im_end|>", 4, False),
        ("<|im_end|>", 1, False),
        ("<|eot_id|>", 3, True),
        ("<|eom_id|>", 3, True),
        ("<|end|>", 3, True),
        ("<end_of_turn>", 3, True),
        ("<|endoftext|>", 3, True),
        ("<EOT>", 3, True),
        ("<|im_start|>", 3, False),
    ],
)
def test_control_tokens_of_gguf_whose_text_ends_a_turn_end_a_generation(
    text: str, token_type: int, is_end: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))
    tokens, types = ["x", "a", "<2>", "b", "<4>", "<5>", "ab", text], [1, 1, 3, 1, 3, 3, 1, token_type]
    fields = {
        **{"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types, "tokenizer.ggml.eos_token_id": 2},
        **{"tokenizer.ggml.eot_token_id": 4, "tokenizer.ggml.eom_token_id": 5},
    }
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", random_weights("llama", True), Kind.F32, fields)
    assert resolve_checkpoint(str(path)).info.eos_ids == ((2, 4, 5, 7) if is_end else (2, 4, 5))
