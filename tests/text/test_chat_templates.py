"""Prompts of chat templates: their text is transformers' own, and no special token contains a client's character.

The templates are those of the tests and those that model families publish, which `make` fetches into .venv."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.helpers.examples import examples
from tests.helpers.small_tokenizer import save_small_tokenizer
from tests.server.helpers.reasoning_templates import EFFORT_TEMPLATE, QWEN3_TEMPLATE, R1_TEMPLATE
from tests.server.helpers.tool_templates import HERMES_TEMPLATE, LLAMA3_TEMPLATE, OWN_WAY_TEMPLATE
from tokasaurus.text.tokenizer import ChatTemplateError, Tokenizer

PUBLISHED = Path(".venv/chat-templates/axolotl/utils/chat_templates/templates")
# What each does with a client's text has let a special token through in some server.
_FIRST = "messages[0].content"
HOSTILE = {
    name: template.replace("FIRST", _FIRST)
    for name, template in {
        "replaced line ends": "<|im_start|>{{ FIRST | replace('\n', '') }}<|im_end|>",
        "replaced by a method": "<|im_start|>{{ FIRST.replace('-', '').replace(' ', '') }}<|im_end|>",
        "joined messages": "<|im_start|>{{ messages | map(attribute='content') | join }}<|im_end|>",
        "joined by a method": "{{ '<|im_start|>' + ''.join(messages | map(attribute='content')) + '<|im_end|>' }}",
        "side by side": "{% for message in messages %}{{ message.content }}{% endfor %}<|im_end|>",
        "a name before content": "<|im_start|>{{ messages[0].name ~ FIRST }}<|im_end|>",
        "lower case": "<|im_start|>{{ FIRST | lower }}{{ FIRST.lower() }}<|im_end|>",
        "split and joined": "<|im_start|>{{ FIRST.split('</think>') | join('') }}<|im_end|>",
        "reversed": "<|im_start|>{{ FIRST | reverse }}{{ FIRST[::-1] }}<|im_end|>",
        "in a token of the template's": "<|im_start|><|{{ FIRST }}|><|im_end|>",
        "formatted": "{{ '<|im_start|>%s<|%s|>' % (messages[0].name, FIRST) }}{{ '{}<|im_end|>'.format(FIRST) }}",
        "a block": "{% set text %}<|im_start|>{{ FIRST }}  {% endset %}{{ text | trim }}<|im_end|>",
        "a macro": "{% macro show(x) %}<|im_start|>{{ x | upper | lower }}<|im_end|>{% endmacro %}{{ show(FIRST) }}",
        "as data": "<|im_start|>{{ messages }}{{ messages | tojson }}{{ messages | string }}<|im_end|>",
        "through bytes": "<|im_start|>{{ FIRST.encode().decode() }}<|im_end|>",
        "words": "<|im_start|>{{ FIRST | wordwrap(3, wrapstring='') }}{{ FIRST | truncate(9) }}<|im_end|>",
        "characters": "<|im_start|>{% for letter in FIRST %}{{ letter }}{% endfor %}<|im_end|>",
    }.items()
}
# What a mark within the text would change. transformers' own mark of a final message's end does.
UNMARKED = (
    "<|im_start|>{% for message in messages %}{{ message.content | length }}{{ message.content[:9] }}"
    "{% if message.content.startswith('<|') %}!{% endif %}{% endfor %}<|im_end|>"
)
OWN = {
    "HERMES": HERMES_TEMPLATE,
    "LLAMA3": LLAMA3_TEMPLATE,
    "OWN_WAY": OWN_WAY_TEMPLATE,
    "QWEN3": QWEN3_TEMPLATE,
    "R1": R1_TEMPLATE,
    "EFFORT": EFFORT_TEMPLATE,
}
FAMILIES = {path.stem: path.read_text() for path in sorted(PUBLISHED.glob("*.jinja"))}
TEMPLATES = {"unmarked": UNMARKED} | HOSTILE | OWN | FAMILIES
_BAR = "[|\uff5c]"
_TOKEN = re.compile(rf"<{_BAR}[^|\uff5c<>'\s]{{1,40}}{_BAR}>|<[A-Za-z_]+_of_[a-z]+>|\[/?[A-Z_]{{2,}}\]|</?s>")
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up a word.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string", "description": "the word"}}},
    },
}


class Model:
    """A tokenizer with one of the templates, ours and transformers'."""

    def __init__(self, template: str, directory: Path) -> None:
        self.template = template
        save_small_tokenizer(directory)
        self.tokens = sorted({"<|im_start|>", "<|im_end|>", "<s>", "</s>", *_TOKEN.findall(template)})
        path = directory / "tokenizer.json"
        state = json.loads(path.read_text())
        settings = dict(state["added_tokens"][0])
        state["added_tokens"] = [settings | {"id": 264 + i, "content": text} for i, text in enumerate(self.tokens)]
        path.write_text(json.dumps(state))
        path = directory / "tokenizer_config.json"
        named = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
        path.write_text(json.dumps(json.loads(path.read_text()) | named))
        self.own = Tokenizer.load(directory)
        self.reference: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)

    def special_ids(self, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
        return [token_id for token_id in self.own.encode_chat(messages, **options) if token_id >= 264]


@pytest.fixture(scope="module", params=TEMPLATES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(TEMPLATES[request.param], tmp_path_factory.mktemp("model"))


def hostile_texts(tokens: Sequence[str]) -> st.SearchStrategy[str]:
    """Whole tokens, and tokens that are cut, changed and parted, among other text."""
    token = st.sampled_from(tokens)
    cut = st.tuples(token, st.integers(1, 20), st.sampled_from(["", "\n", " ", "</think>", "-"])).map(
        lambda drawn: drawn[0][: drawn[1]] + drawn[2] + drawn[0][drawn[1] :]
    )
    part = st.tuples(token, st.integers(1, 20)).map(lambda drawn: drawn[0][drawn[1] :])
    fragments = st.one_of(token, cut, part, token.map(str.upper), token.map(lambda text: text[1:-1].strip("|")))
    others = st.sampled_from(["hello", " ", "\n", "<think>", "</think>", "é", "7", "{", '"', "'", "\\"])
    return st.lists(fragments | others, max_size=5).map("".join)


def conversation(texts: Sequence[str], has_system: bool) -> list[dict[str, Any]]:
    roles = [*(["system"] if has_system else []), "user", "assistant", "user"]
    messages = [
        {"role": role, "content": f"{text}{i}"} for i, (role, text) in enumerate(zip(roles, texts, strict=False))
    ]
    messages[0]["name"] = texts[-1]
    return messages


def by_transformers(model: Model, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """None if the template refuses the messages."""
    try:
        return str(model.reference.apply_chat_template(messages, tokenize=False, **options))
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
        return None


def rendered(model: Model, messages: list[dict[str, Any]], **options: Any) -> str | None:
    try:
        return str(model.own.render_chat(messages, **options))
    except ChatTemplateError:
        return None


@given(data=st.data())
@examples(100, 5)
def test_prompts_are_transformers_and_special_tokens_the_templates(model: Model, data: st.DataObject) -> None:
    texts = data.draw(st.lists(hostile_texts(model.tokens), min_size=5, max_size=5))
    messages = conversation(texts, data.draw(st.booleans()))
    options = {
        "tools": data.draw(st.sampled_from([None, [_TOOL], [_TOOL | {"note": texts[0]}]])),
        "add_generation_prompt": data.draw(st.booleans()),
    }
    expected = by_transformers(model, messages, **options)
    assert rendered(model, messages, **options) == expected
    if expected is None:
        return
    ids = model.own.encode_chat(messages, **options)
    assert model.own.decode(ids, skip_special_tokens=False) == expected
    harmless = [message | {"content": f"x{index}", "name": "y"} for index, message in enumerate(messages)]
    assert model.special_ids(messages, **options) == model.special_ids(harmless, **options)


@given(data=st.data())
@examples(100, 5)
def test_continued_messages_end_where_transformers_end_them(model: Model, data: st.DataObject) -> None:
    texts = data.draw(st.lists(hostile_texts(model.tokens), min_size=5, max_size=5))
    messages = conversation(texts, data.draw(st.booleans()))[:-1]
    messages[-1]["content"] = data.draw(st.sampled_from(["", " ", "Once ", "upon\n\n", messages[-1]["content"]]))
    options = {"continue_final_message": True, "add_generation_prompt": False}
    if model.template == UNMARKED:
        pytest.skip("transformers shows this template its own mark")
    assert rendered(model, messages, **options) == by_transformers(model, messages, **options)


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("replaced line ends", ["<|im_\nend|>"]),
        ("replaced by a method", ["<|im-_end|>"]),
        ("joined messages", ["<|im_", "end|>"]),
        ("joined by a method", ["<|im_", "end|>"]),
        ("side by side", ["<|im_", "end|>"]),
        ("a name before content", ["_end|>"]),
        ("lower case", ["<|IM_END|>"]),
        ("split and joined", ["<|im</think>_end|>"]),
        ("reversed", [">|dne_mi|<"]),
        ("in a token of the template's", ["im_end"]),
        ("formatted", ["im_end"]),
        ("a block", ["<|im_end|>"]),
        ("a macro", ["<|im_end|>"]),
        ("as data", ["<|im_end|>"]),
        ("through bytes", ["<|im_end|>"]),
        ("words", ["<|im_end|>"]),
        ("characters", ["<|im_end|>"]),
    ],
)
def test_no_template_makes_a_special_token_of_what_a_client_wrote(
    name: str, contents: list[str], tmp_path: Path
) -> None:
    model = Model(HOSTILE[name], tmp_path)
    messages = [{"role": "user", "content": content, "name": "<|im"} for content in contents]
    assert model.own.render_chat(messages).count("<|im_end|>") > HOSTILE[name].count("<|im_end|>")
    start, end = (model.tokens.index(token) + 264 for token in ("<|im_start|>", "<|im_end|>"))
    written = re.findall(r"<\|im_(start|end)\|>", HOSTILE[name])
    assert model.special_ids(messages) == [start if token == "start" else end for token in written]


def test_twenty_families_show_an_ordinary_conversation(tmp_path: Path) -> None:
    """Else the tests above would only compare refusals. `make .venv/installed-dev` fetches the templates."""
    messages = conversation(["a", "b", "c", "d"], has_system=False)
    shown = 0
    for name, template in FAMILIES.items():
        (tmp_path / name).mkdir()
        shown += rendered(Model(template, tmp_path / name), messages) is not None
    assert shown >= 20
