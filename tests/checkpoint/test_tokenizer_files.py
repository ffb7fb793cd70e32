"""Layouts of tokenizer files against AutoTokenizer: prompt ids, special tokens and chats, token for token."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as BaseTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.helpers.examples import few
from tests.helpers.trained_tokenizers import byte_level, sentencepiece
from tokasaurus.checkpoint import CheckpointError, tokenizer_files
from tokasaurus.checkpoint.tokenizer_files import native_tokenizer
from tokasaurus.text.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "hello world",
    "  hello  world ",
    "the user's 12345 hällo\n\n\tend",
    "cafe\u0301 日本語 😀",
    "<s>hello</s> world",
    "a <|im_start|> b<|im_end|>\nc",
    "▁hello<extra> <extra>hello",
]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
)
MESSAGES = [
    {"role": "system", "content": "the end"},
    {"role": "user", "content": "  hello world, hällo\n 12 "},
    {"role": "assistant", "content": "日本語 text's"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def as_dict(text: str, **flags: bool) -> dict[str, Any]:
    return {"content": text, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False, **flags}


def config_of(tokenizer_class: str | None, **values: Any) -> dict[str, Any]:
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": TEMPLATE, **values}
    return named if tokenizer_class is None else {"tokenizer_class": tokenizer_class, **named}


class Layout:
    """Files of a model's directory. config: tokenizer_config.json. model_type: of config.json; None: no such file.
    files: further ones, text or JSON. vocabulary_files: vocab.json and merges.txt in place of tokenizer.json."""

    def __init__(
        self,
        make: Callable[[], BaseTokenizer],
        config: dict[str, Any] | None,
        model_type: str | None = "llama",
        files: dict[str, Any] | None = None,
        vocabulary_files: bool = False,
    ) -> None:
        self.make, self.config, self.model_type = make, config, model_type
        self.files, self.vocabulary_files = files or {}, vocabulary_files

    def write(self, directory: Path) -> Path:
        base = self.make()
        if self.vocabulary_files:
            base.model.save(str(directory))
        else:
            base.save(str(directory / "tokenizer.json"))
        files = dict(self.files)
        if self.config is not None:
            files["tokenizer_config.json"] = self.config
        if self.model_type is not None:
            files["config.json"] = {"model_type": self.model_type}
        for name, content in files.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return directory


FAST = "PreTrainedTokenizerFast"
LEGACY, FIRST = sentencepiece, lambda: sentencepiece(prepend_scheme="first")
EXTRA = as_dict("<extra>", lstrip=True, normalized=True)
TYPED = {"__type": "AddedToken", **as_dict("</s>", lstrip=True)}
NAMED = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "T" + TEMPLATE}]
TEMPLATE_FILES = {"chat_template.jinja": "JINJA" + TEMPLATE}

LAYOUTS: dict[str, Layout] = {
    "tokenizer.json alone": Layout(byte_level, None, None),
    "tokenizer.json and config.json": Layout(byte_level, None, "qwen3"),
    "Llama 3": Layout(byte_level, config_of(FAST)),
    "no class": Layout(byte_level, config_of(None), "llama"),
    "bos switched off": Layout(byte_level, config_of(FAST, add_bos_token=False)),
    "eos switched on": Layout(byte_level, config_of(FAST, add_bos_token=True, add_eos_token=True)),
    "Llama class over byte-level": Layout(byte_level, config_of("LlamaTokenizerFast", legacy=False)),
    "Qwen 2": Layout(byte_level, config_of("Qwen2Tokenizer", bos_token=None, eos_token="<|im_end|>"), "qwen2"),
    "Qwen 3 with a prefix space": Layout(byte_level, config_of("Qwen2Tokenizer", add_prefix_space=True), "qwen3"),
    "Qwen 2 with bos": Layout(byte_level, config_of("Qwen2TokenizerFast", add_bos_token=True), "qwen2"),
    "class in config.json": Layout(
        byte_level, None, None, {"config.json": {"model_type": "llama", "tokenizer_class": "Qwen2Tokenizer"}}
    ),
    "unknown type of model": Layout(byte_level, config_of("Qwen2Tokenizer"), "own"),
    "vocab.json and merges.txt": Layout(byte_level, config_of("Qwen2Tokenizer"), "qwen2", vocabulary_files=True),
    "vocabulary files, added_tokens.json": Layout(
        byte_level,
        config_of("Qwen2Tokenizer"),
        "qwen2",
        {"added_tokens.json": {"<extra>": 400}, "special_tokens_map.json": {"eos_token": "<|im_end|>"}},
        vocabulary_files=True,
    ),
    "Llama 2, legacy normalizers": Layout(LEGACY, config_of(FAST)),
    "Llama 2, legacy class": Layout(LEGACY, config_of("LlamaTokenizer", legacy=True)),
    "Llama 2, new class": Layout(LEGACY, config_of("LlamaTokenizer", legacy=False)),
    "Llama 2 without bos, with eos": Layout(
        LEGACY, config_of("LlamaTokenizerFast", add_bos_token=False, add_eos_token=True)
    ),
    "Llama 2 without a prefix space": Layout(LEGACY, config_of("LlamaTokenizer", add_prefix_space=False)),
    "prefix at the first word": Layout(FIRST, config_of(FAST)),
    "prefix at the first word, class": Layout(FIRST, config_of("LlamaTokenizer", legacy=False)),
    "prefix at every piece": Layout(lambda: sentencepiece(prepend_scheme="always"), config_of(FAST)),
    "Llama 2 class for Qwen": Layout(FIRST, config_of("LlamaTokenizer"), "qwen2"),
    "added_tokens_decoder": Layout(
        byte_level,
        config_of(FAST, added_tokens_decoder={"335": EXTRA, "336": as_dict("<more>", rstrip=True, special=True)}),
    ),
    "added_tokens_decoder of Llama 2": Layout(
        LEGACY, config_of("LlamaTokenizer", added_tokens_decoder={"420": as_dict("<extra>", rstrip=True)})
    ),
    "special_tokens_map.json": Layout(
        byte_level, None, "llama", {"special_tokens_map.json": {"bos_token": "<s>", "eos_token": as_dict("<|im_end|>")}}
    ),
    "added_tokens.json": Layout(byte_level, config_of(FAST), "llama", {"added_tokens.json": {"<extra>": 335}}),
    "special tokens as dicts": Layout(
        byte_level,
        config_of(FAST, eos_token=TYPED, pad_token="<pad>", extra_special_tokens=["<extra>"]),
    ),
    "chat_template.jinja": Layout(byte_level, config_of(FAST), "llama", TEMPLATE_FILES),
    "named templates": Layout(
        byte_level,
        config_of(
            FAST,
            chat_template=NAMED,
        ),
    ),
    "additional_chat_templates": Layout(
        byte_level,
        config_of(FAST, chat_template=None),
        "llama",
        {**TEMPLATE_FILES, "additional_chat_templates/tool_use.jinja": "TOOL" + TEMPLATE},
    ),
    "chat_template.json": Layout(
        byte_level, config_of(FAST, chat_template=None), "llama", {"chat_template.json": {"chat_template": TEMPLATE}}
    ),
    "special tokens are split": Layout(byte_level, config_of(FAST, split_special_tokens=True)),
    "training settings": Layout(byte_level, config_of(FAST, model_max_length=4, padding_side="left")),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_ids_and_chats_are_those_of_auto_tokenizer(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source := tmp_path / "source").mkdir()
    (destination := tmp_path / "destination").mkdir()
    LAYOUTS[name].write(source)
    reference = AutoTokenizer.from_pretrained(source)
    monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch"))  # put back after the conversion
    tokenizer_files._convert(str(source), str(destination))
    assert_same(Tokenizer.load(destination), reference)


def assert_same(own: Tokenizer, reference: PreTrainedTokenizerBase) -> None:
    for text in TEXTS:
        for adds in (True, False):
            expected = reference(text, add_special_tokens=adds)["input_ids"]
            assert own.encode(text, add_special_tokens=adds) == expected, (text, adds)
        assert own.decode(expected, skip_special_tokens=False) == reference.decode(
            expected, clean_up_tokenization_spaces=False
        )
    assert own.vocab_size == len(reference)
    assert (own.bos_token, own.eos_token) == (reference.bos_token, reference.eos_token)
    if not reference.chat_template:
        assert own.chat_template is None
        return
    for tools in (None, TOOLS):
        for count, adds in ((3, True), (2, False), (1, True)):
            asked: dict[str, Any] = {"tools": tools, "add_generation_prompt": adds}
            assert own.render_chat(MESSAGES[:count], **asked) == reference.apply_chat_template(
                MESSAGES[:count], tokenize=False, **asked
            )
            expected = reference.apply_chat_template(MESSAGES[:count], return_dict=False, **asked)
            assert own.encode_chat(MESSAGES[:count], **asked) == expected


def test_sizes_that_transformers_refuses_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers demands that hidden_size is a multiple of the number of heads, even with a head_dim."""
    layout = LAYOUTS["Llama 2, new class"]
    reference = AutoTokenizer.from_pretrained(layout.write(tmp_path))
    config = {"model_type": layout.model_type, "hidden_size": 64, "num_attention_heads": 3, "head_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (destination := tmp_path / "destination").mkdir()
    monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch"))
    tokenizer_files._convert(str(tmp_path), str(destination))
    assert_same(Tokenizer.load(destination), reference)


@few(1, "name", ["Llama 2, new class", "Qwen 2", "vocab.json and merges.txt"])
def test_a_process_of_its_own_reads_the_files_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))
    (source := tmp_path / "source").mkdir()
    LAYOUTS[name].write(source)
    lines: list[str] = []
    directory = native_tokenizer(source, lines.append)
    assert_same(Tokenizer.load(directory), AutoTokenizer.from_pretrained(source))
    assert native_tokenizer(source, lines.append) == directory
    assert len(lines) == 1
    config = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": True, "bos_token": "<s>"}))
    changed = native_tokenizer(source, lines.append)
    assert len(lines) == 2
    assert_same(Tokenizer.load(changed), AutoTokenizer.from_pretrained(source))


def test_modules_in_the_working_directory_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source := tmp_path / "source").mkdir()
    LAYOUTS["Llama 3"].write(source)
    (tmp_path / "transformers.py").write_text("raise SystemExit('imported from the working directory')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert (native_tokenizer(Path("source"), lambda _: None) / "tokenizer.json").is_file()


@pytest.mark.long
def test_a_cache_that_cannot_be_written_is_replaced_by_a_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKA_CACHE", "/dev/null/cache")
    LAYOUTS["Llama 3"].write(tmp_path)
    directory = native_tokenizer(tmp_path, lambda _: None)
    assert_same(Tokenizer.load(directory), AutoTokenizer.from_pretrained(tmp_path))


def test_files_that_cannot_be_read_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))

    def refuse(files: dict[str, str]) -> str:
        for path in (source := tmp_path / "source").glob("*"):
            path.unlink()
        source.mkdir(exist_ok=True)
        for name, content in files.items():
            (source / name).write_text(content)
        with pytest.raises(CheckpointError) as caught:
            native_tokenizer(source, lambda _: None)
        assert str(source) in str(caught.value)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "has no tokenizer.json, nor a vocab.json or tokenizer.model" in refuse({"config.json": "{}"})
    assert "cannot read the tokenizer" in refuse({"tokenizer.json": "{"})
    remote = {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}, "tokenizer_class": "OwnTokenizer"}
    assert "reads no vocabulary" in refuse(
        {"vocab.json": "{}", "tokenizer_config.json": json.dumps(config_of("LlamaTokenizer"))}
    )
    assert "which trust_remote_code=T runs" in refuse(
        {"tokenizer.json": "{}", "tokenizer_config.json": json.dumps(remote)}
    )
    monkeypatch.setattr(tokenizer_files, "_is_installed", lambda module: module != "sentencepiece")
    message = refuse({"tokenizer.model": "\x0a", "config.json": '{"model_type": "llama"}'})
    assert "pip install sentencepiece, or put a tokenizer.json beside it" in message


def test_a_file_of_which_reading_fails_is_one_line(tmp_path: Path) -> None:
    LAYOUTS["Llama 3"].write(tmp_path)
    (tmp_path / "notes.json").symlink_to("/proc/self/mem")
    with pytest.raises(CheckpointError, match=r"cannot read .*notes\.json: "):
        native_tokenizer(tmp_path, lambda _: None)


@pytest.mark.long
def test_files_beside_the_tokenizer_take_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))
    LAYOUTS["Llama 3"].write(tmp_path)
    with (tmp_path / "texts.json").open("wb") as file:
        file.truncate(64 << 30)
    assert (native_tokenizer(tmp_path, lambda _: None) / "tokenizer.json").is_file()


def test_the_launcher_imports_no_transformers_for_it() -> None:
    script = "import sys, tokasaurus.checkpoint.tokenizer_files; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


CODE = """
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast


class LowercaseTokenizer(PreTrainedTokenizerFast):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.backend_tokenizer.normalizer = normalizers.Lowercase()
"""


def test_code_of_a_tokenizer_runs_only_with_trust_remote_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))
    (source := tmp_path / "source").mkdir()
    byte_level().save(str(source / "tokenizer.json"))
    named = [None, "tokenization_lowercase.LowercaseTokenizer"]
    config = {"tokenizer_class": "LowercaseTokenizer", "auto_map": {"AutoTokenizer": named}, "chat_template": TEMPLATE}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    (source / "config.json").write_text(json.dumps({"model_type": "llama"}))
    code = source / "tokenization_lowercase.py"
    code.write_text(CODE)
    refusal = r"needs Python code of the model's repository, which trust_remote_code=T runs$"
    trusted = native_tokenizer(source, lambda _: None, trust_remote_code=True)
    own = Tokenizer.load(trusted)
    assert own.encode("Hello WORLD", add_special_tokens=False) == own.encode("hello world", add_special_tokens=False)
    with pytest.raises(CheckpointError, match=refusal):
        native_tokenizer(source, lambda _: None)
    code.write_text(CODE.replace("Lowercase()", "Strip()"))
    assert native_tokenizer(source, lambda _: None, trust_remote_code=True) != trusted
