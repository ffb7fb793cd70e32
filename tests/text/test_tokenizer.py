"""The server's tokenizer on a byte-level vocabulary trained here, against transformers and plain Python."""

import functools
import json
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as BaseTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.helpers.limits import join
from tests.helpers.small_tokenizer import save_small_tokenizer
from tokasaurus.messages.status import UserError
from tokasaurus.text import tokenizer as tokenizer_module
from tokasaurus.text.detokenizer import make_detokenizer
from tokasaurus.text.time_limit import TimeLimit
from tokasaurus.text.token_decoder import TokenizerError, load_token_decoder
from tokasaurus.text.tokenizer import ChatTemplateError, ChatTemplateTooSlow, Tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant') %}{{ raise_exception('no such role: ' + message.role) }}"
    "{% endif %}<|start|>{{ message['role'] }}\n{{ message['content'] + '<|end|>' }}\n{% endfor %}"
    "{% if shout is defined %}{{ shout | upper }}{% endif %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
MESSAGES = [{"role": "user", "content": "hällo , 12"}]


def write_tokenizer(directory: Path, **config: object) -> Path:
    base = BaseTokenizer(models.BPE())
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "<|start|>", "<|end|>"],
        show_progress=False,
    )
    base.train_from_iterator(["hello, hällo 日本語 and the assistant, the user ,  '"] * 3, trainer)
    base.add_tokens(["<tool>"])
    base.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    base.enable_truncation(4)  # as a file saved after training may have it
    base.enable_padding(pad_id=0, pad_token="<s>")
    directory.mkdir(exist_ok=True)
    base.save(str(directory / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|end|>", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(content))
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


@functools.cache
def reference_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(directory)


# Hypothesis also takes texts from the source, so it finds the names of special tokens, which are no text.
@given(text=st.text().filter(lambda text: not any(name in text for name in ("<s>", "<|start|>", "<|end|>"))))
def test_any_text_is_restored_from_its_ids_and_from_its_token_bytes(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == text.encode()


@given(ids=st.lists(st.integers(0, 303), max_size=12))
def test_any_ids_decode_as_transformers_decodes_them(directory: Path, tokenizer: Tokenizer, ids: list[int]) -> None:
    reference = reference_tokenizer(directory)
    for skip in (True, False):
        expected = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
    visible = b"".join(tokenizer.token_bytes(i) for i in ids if i not in tokenizer.special_ids)
    assert tokenizer.decode(ids) == visible.decode(errors="replace")
    assert load_token_decoder(directory).decode(ids) == tokenizer.decode(ids)


def test_truncation_and_padding_of_the_file_are_ignored(tokenizer: Tokenizer) -> None:
    texts = ["the user and the assistant and the user", "", "a"]
    plain = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert len(plain[0]) > 4
    assert tokenizer.decode(plain[0]) == texts[0]
    assert tokenizer.encode_batch(texts, add_special_tokens=False) == plain
    assert tokenizer.encode_batch(texts, add_special_tokens=True) == [[0, *ids] for ids in plain]


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    num_ticks = 0
    ended = threading.Event()

    def tick() -> None:
        nonlocal num_ticks
        while not ended.wait(0.001):
            num_ticks += 1

    ticking = threading.Thread(target=tick)
    ticking.start()
    ticks_before = num_ticks
    ids = tokenizer.encode("hello, the user and the assistant " * 20_000, add_special_tokens=False)
    ticks_after = num_ticks
    ended.set()
    join(ticking)
    assert len(ids) > 100_000
    assert ticks_after - ticks_before >= 5


def test_vocabulary_size_special_ids_and_token_bytes(directory: Path, tokenizer: Tokenizer) -> None:
    reference = reference_tokenizer(directory)
    assert tokenizer.vocab_size == len(reference)
    assert tokenizer.special_ids == {0, 1, 2}
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "<|end|>")
    assert tokenizer.token_text(2) == "<|end|>"
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    (first, second) = tokenizer.encode("½", add_special_tokens=False)
    assert (tokenizer.token_bytes(first), tokenizer.token_bytes(second)) == (b"\xc2", b"\xbd")
    assert tokenizer.token_text(first) == "\ufffd"


def test_chat_is_rendered_as_transformers_renders_it_with_one_bos(directory: Path, tokenizer: Tokenizer) -> None:
    expected = "<s><|start|>user\nhällo , 12<|end|>\n<|start|>assistant\n"
    assert tokenizer.render_chat(MESSAGES) == expected
    reference = reference_tokenizer(directory)
    ids = reference.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode_chat(MESSAGES) == ids
    assert ids.count(0) == 1
    without = tokenizer.render_chat(MESSAGES, add_generation_prompt=False)
    assert without == expected.removesuffix("<|start|>assistant\n")


def test_tools_variables_and_an_open_last_message_reach_the_template(tokenizer: Tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    text = tokenizer.render_chat(MESSAGES, False, tools=tools, template_variables={"shout": "hey"})
    assert text.endswith('HEY[{"type": "function", "function": {"name": "add"}}]')
    started = [*MESSAGES, {"role": "assistant", "content": "Sure"}]
    continued = tokenizer.render_chat(started, add_generation_prompt=False, continue_final_message=True)
    assert continued.endswith("<|start|>assistant\nSure")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "wizard", "content": "x"}], "no such role: wizard"),
        ([{"role": "user", "content": None}], "content"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "list"),
        ([{"role": "user"}], "content"),
    ],
)
def test_messages_that_the_template_refuses_give_its_reason(
    tokenizer: Tokenizer, messages: list[dict[str, object]], message: str
) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        tokenizer.encode_chat(messages)


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "conversation", "tools", "return_dict"])
def test_a_client_cannot_set_the_renderers_parameters(tokenizer: Tokenizer, name: str) -> None:
    with pytest.raises(ChatTemplateError, match=f"^{name} is not a variable"):
        tokenizer.render_chat(MESSAGES, template_variables={name: "{{ 1 }}"})


def test_a_template_cannot_leave_its_sandbox(tmp_path: Path) -> None:
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    own = Tokenizer.load(write_tokenizer(tmp_path, chat_template=escape))
    with pytest.raises(ChatTemplateError, match="unsafe"):
        own.render_chat(MESSAGES)


ENDLESS = """{% for message in messages %}{{ message.content }}{% if message.content == 'loop' %}
{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}{% endfor %}"""


def test_a_template_that_loops_for_some_messages_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "_RENDERING", TimeLimit(1))
    own = Tokenizer.load(write_tokenizer(tmp_path, chat_template=ENDLESS))
    assert own.render_chat([{"role": "user", "content": "x"}]) == "x"
    started = time.monotonic()
    with pytest.raises(ChatTemplateTooSlow, match=r"does not finish .* within 1 s"):
        own.encode_chat([{"role": "user", "content": "loop"}])
    assert time.monotonic() - started < 60
    assert own.render_chat([{"role": "user", "content": "y"}]) == "y"


def test_a_template_that_calls_itself_is_refused(tmp_path: Path) -> None:
    recursion = "{% macro m(x) %}{{ m(x + 1) }}{% endmacro %}{{ m(0) }}"
    own = Tokenizer.load(write_tokenizer(tmp_path, chat_template=recursion))
    with pytest.raises(ChatTemplateError, match="nested too deeply"):
        own.render_chat(MESSAGES)


def test_a_template_in_a_separate_file_is_used(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert Tokenizer.load(tmp_path).render_chat(MESSAGES) == "hällo , 12!"


def test_a_missing_template_and_missing_or_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        Tokenizer.load(write_tokenizer(tmp_path)).encode_chat(MESSAGES)
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path / "absent")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"cannot read .*tokenizer\.json") as caught:
        load_token_decoder(tmp_path)
    assert isinstance(caught.value, UserError), "shown as one line, without a traceback"


def test_sentencepiece_tokens_give_their_bytes(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "▁the": 1, "<0xE6>": 2, "▁": 3, "t": 4}
    base = BaseTokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    base.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    base.save(str(tmp_path / "tokenizer.json"))
    own = Tokenizer.load(tmp_path)
    assert [own.token_bytes(i) for i in range(1, 5)] == [b" the", b"\xe6", b" ", b"t"]


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
        decoders.Metaspace(),
        decoders.WordPiece(),
        decoders.ByteLevel(),
        None,
    ],
)
def test_bytes_of_tokens_join_to_the_text_of_any_ids_with_any_decoder(tmp_path: Path, decoder: object) -> None:
    words = ["▁the", "▁", "t", "##ing", "日", "▁▁", "Ġ日", "ĠÃ©", "<0x41>", "</s>", "▁a▁b", "."]
    base = BaseTokenizer(models.BPE(vocab={token: index for index, token in enumerate(words)}, merges=[]))
    base.decoder = decoder
    base.add_tokens(["▁added", "café au lait"])
    base.save(str(tmp_path / "tokenizer.json"))
    own = Tokenizer.load(tmp_path)
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(len(words) + 2) for _ in range(rng.randrange(1, 6))]
        joined = b"".join(own.token_bytes(id_, is_first=index == 0) for index, id_ in enumerate(ids))
        assert joined.decode() == base.decode(ids) == own.decode(ids)


def test_added_tokens_that_look_like_byte_level_letters_keep_their_text(tmp_path: Path) -> None:
    base = BaseTokenizer.from_file(str(save_small_tokenizer(tmp_path) / "tokenizer.json"))
    base.add_tokens(["café", "Ġé", "é日"])
    base.add_special_tokens(["naïf"])
    base.add_tokens([AddedToken("é")])  # a token of the model's own: the byte 0xE9
    base.save(str(tmp_path / "tokenizer.json"))
    for own in (Tokenizer.load(tmp_path), load_token_decoder(tmp_path)):
        assert own.decode(base.encode("un café, Ġé!é日").ids) == "un café, Ġé!é日"
        cafe, spaced, naive = (base.token_to_id(text) for text in ("café", "Ġé", "naïf"))
        assert own.decode([cafe, naive, spaced, 0xC3, 0xA9]) == "caféĠéé"
        assert own.decode([cafe, naive, 0xC3], skip_special_tokens=False) == "cafénaïf\ufffd"
        assert own.decode([0xE9, 0x80, 0x80]) == b"\xe9\x80\x80".decode()
    own = Tokenizer.load(tmp_path)
    assert [own.token_bytes(id_) for id_ in (cafe, spaced, naive, 0xE9)] == [
        "café".encode(),
        "Ġé".encode(),
        "naïf".encode(),
        b"\xe9",
    ]
    detokenizer = make_detokenizer(own)
    assert [detokenizer.add([id_]) for id_ in (0xC3, 0xA9, cafe, naive, spaced)] == ["", "é", "café", "", "Ġé"]


def test_concurrent_threads_get_the_same_ids_as_one_thread(directory: Path) -> None:
    own = Tokenizer.load(directory)
    chats = [[{"role": "user", "content": f"hello {i} the" * (i % 7)}] for i in range(200)]
    expected = [own.encode_chat(chat) for chat in chats]
    fresh = Tokenizer.load(directory)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(fresh.encode_chat, chats)) == expected


def test_tokenizer_and_token_decoder_import_neither_transformers_nor_torch(directory: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from tokasaurus.text.token_decoder import load_token_decoder; from tokasaurus.text.tokenizer import Tokenizer
decoder = load_token_decoder(Path({str(directory)!r}))
assert decoder.decode([1, 300]) is not None
Tokenizer.load(Path({str(directory)!r})).encode_chat({MESSAGES!r})
assert "transformers" not in sys.modules
assert "torch" not in sys.modules
import tokasaurus.checkpoint
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
