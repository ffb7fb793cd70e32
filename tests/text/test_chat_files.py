"""Chat templates and named tokens: ours against what transformers reads from the same directory."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.helpers.small_tokenizer import save_small_tokenizer
from tokasaurus.text.chat_files import RESERVED_NAMES, read_chat_files
from tokasaurus.text.token_decoder import TokenizerError
from tokasaurus.text.tokenizer import Tokenizer

PAD = {"__type": "AddedToken", "content": "<pad>", "lstrip": False, "normalized": False, "rstrip": False}
LISTED = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}, {"name": "rag", "template": "R"}]
CONFIGS: dict[str, dict[str, Any]] = {
    "none": {},
    "usual": {"bos_token": "<s>", "eos_token": "</s>", "pad_token": None, "chat_template": "C"},
    "objects": {"eos_token": {**PAD, "content": "</s>"}, "pad_token": PAD, "unk_token": "<unk>", "add_bos_token": True},
    "another order": {"mask_token": "<m>", "image_token": "<i>", "eos_token": "</s>", "bos_token": "<s>"},
    "further": {"image_token": "<i>", "extra_special_tokens": {"boi_token": "<b>", "odd": "<o>"}, "eos_token": "</s>"},
    "specific": {"model_specific_special_tokens": {"audio_token": "<a>"}, "extra_special_tokens": ["<x>", "<y>"]},
    "list": {"chat_template": LISTED},
    "one in a list": {"chat_template": LISTED[:1]},
    "empty": {"chat_template": ""},
}
FILES: dict[str, dict[str, str]] = {
    "none": {},
    "single": {"chat_template.jinja": "F"},
    "empty": {"chat_template.jinja": ""},
    "several": {"chat_template.jinja": "F", "tool_use": "FT", "rag": "FR"},
    "no default": {"rag": "FR"},
    "default beside": {"chat_template.jinja": "F", "default": "G"},
}


def write(directory: Path, config: dict[str, Any], files: dict[str, str]) -> None:
    save_small_tokenizer(directory)
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config})
    )
    for name, text in files.items():
        path = directory / name if "." in name else directory / "additional_chat_templates" / f"{name}.jinja"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize("is_saved", [False, True], ids=["as written", "saved by transformers"])
@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize("config", CONFIGS)
def test_what_is_read_equals_what_transformers_reads(config: str, files: str, is_saved: bool, tmp_path: Path) -> None:
    write(tmp_path, CONFIGS[config], FILES[files])
    expected = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    directory = tmp_path
    if is_saved:
        directory = tmp_path / "saved"
        expected.save_pretrained(directory)
        expected = PreTrainedTokenizerFast.from_pretrained(directory)
    own = read_chat_files(directory)
    assert list(own.named_tokens.items()) == list(expected.special_tokens_map.items())
    tokenizer = Tokenizer.load(directory)
    assert (tokenizer.bos_token, tokenizer.eos_token) == (expected.bos_token, expected.eos_token)
    templates = expected.chat_template or {}
    assert own.templates == ({"default": templates} if isinstance(templates, str) else templates)
    assert own.has_names == (isinstance(expected.chat_template, dict))
    for tools in (None, [], [{"type": "function"}]):
        try:
            chosen = expected.get_chat_template(None, tools)
        except ValueError:
            chosen = ""
        if chosen:
            assert own.choose(tools) == chosen
        elif templates:
            with pytest.raises(ValueError, match="several chat templates, and none is the default"):
                own.choose(tools)
    for name in ("default", "rag", "tool_use", "{{ messages }}"):
        assert own.named(name) == expected.get_chat_template(name)


def test_reserved_names_are_the_renderers_parameters() -> None:
    parameters = inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters
    assert {"messages", *parameters} == RESERVED_NAMES


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"chat_template": 3}', '{"chat_template": [{"name": "a"}]}', '{"chat_template": {"a": 1}}', "\xff"],
)
def test_broken_files_are_named(text: str, tmp_path: Path) -> None:
    save_small_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(TokenizerError, match=f"cannot read the tokenizer in {tmp_path}: "):
        _ = tokenizer.chat_template
