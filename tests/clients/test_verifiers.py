"""verifiers runs an environment with its own clients, and its renderers accept the tokens and log-probabilities."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import PlainPost

pytest.importorskip("verifiers", reason="verifiers is not installed: `make test-clients` has it")

import verifiers.v1 as vf
from openai import AsyncOpenAI
from renderers import Qwen3RendererConfig, create_renderer
from renderers.base import load_tokenizer
from renderers.client import OverlongPromptError, generate

NUM_ROLLOUTS = 3
MAX_TOKENS = 12
VOCAB_SIZE = 272
"""Of the served model."""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> vf.Env:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    config = vf.SingleAgentEnvConfig(taskset={"id": "vowels_environment"}, agent={"runtime": {"type": "subprocess"}})
    return vf.load_environment(config)


@pytest.fixture(scope="session")
def letters(model_directory: Path) -> dict[str, float]:
    """A logit_bias for small letters, the tokens of which give the same text again in the next turn."""
    tokenizer = load_tokenizer(str(model_directory))
    return {str(tokenizer.convert_tokens_to_ids(letter)): 30.0 for letter in "abcdefghijklmnopqrstuvwxyz"}


@pytest.fixture(scope="session")
def qwen3_directory(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's tokenizer with Qwen3's special tokens, of which the model has some and the server knows nothing."""
    tokenizer = load_tokenizer(str(model_directory))
    tags = ("think", "tool_call", "tool_response")
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", *(f"<{end}{tag}>" for tag in tags for end in ("", "/"))]
    tokenizer.add_special_tokens({"extra_special_tokens": special})
    assert len(tokenizer) <= VOCAB_SIZE
    directory = tmp_path_factory.mktemp("qwen3")
    tokenizer.save_pretrained(directory)
    return directory


def run(environment: vf.Env, client: vf.ClientConfig, **sampling: Any) -> list[vf.Trace]:
    """NUM_ROLLOUTS roll-outs of each task, all at once."""
    context = vf.ModelContext("default", client, vf.SamplingConfig(max_tokens=MAX_TOKENS, **sampling))

    async def run_all() -> list[vf.Trace]:
        async with environment.serving():
            slots = [slot for task in environment.taskset for slot in environment.slots(task, NUM_ROLLOUTS)]
            episodes = await asyncio.gather(*(environment.run_slot(slot, context) for slot in slots))
        assert not [error for episode in episodes for error in episode.errors]
        return [trace for episode in episodes for trace in episode.traces]

    traces = asyncio.run(run_all())
    assert len(traces) == 2 * NUM_ROLLOUTS
    for trace in traces:
        assert trace.ok, trace.errors
        assert trace.num_turns == 2
        assert trace.usage.completion_tokens == 2 * MAX_TOKENS
        answers = "".join(node.message.content or "" for node in trace.nodes if node.sampled)
        assert trace.rewards["vowels"].value == sum(map(answers.count, "aeiou"))
    return traces


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("renderer", ["chat template", "qwen3"])
def test_roll_outs_have_tokens_and_their_log_probabilities(
    renderer: str,
    temperature: float,
    environment: vf.Env,
    base_url: str,
    model_directory: Path,
    qwen3_directory: Path,
    letters: dict[str, float],
    plain_post: PlainPost,
) -> None:
    """The renderer of a family, as training uses it, appends to the tokens of the first turn; a chat template writes
    the conversation anew."""
    tokenizer: dict[str, Any] = {"renderer_model_name": str(model_directory)}
    if renderer == "qwen3":
        tokenizer = {
            "renderer_model_name": str(qwen3_directory),
            "renderer": Qwen3RendererConfig(enable_thinking=False),
        }
    client = vf.TrainClientConfig(base_url=base_url, api_key_var="TOKA_KEY", **tokenizer)
    for trace in run(environment, client, temperature=temperature, logit_bias=letters):
        (branch,) = trace.branches
        token_ids, is_sampled, logprobs = branch.token_ids, branch.sampled_mask, branch.logprobs
        assert len(token_ids) == len(is_sampled) == len(logprobs)
        assert sum(is_sampled) == 2 * MAX_TOKENS
        # Once more, as a prompt.
        body = {"prompt": token_ids, "max_tokens": 1, "prompt_logprobs": 0}
        expected = plain_post("completions", body)["choices"][0]["prompt_logprobs"]
        for index, is_from_model in enumerate(is_sampled):
            if is_from_model:
                entry = expected[index][str(token_ids[index])]
                assert logprobs[index] == pytest.approx(entry["logprob"], abs=1e-3)


def test_evaluations_relay_chats(environment: vf.Env, base_url: str, letters: dict[str, float]) -> None:
    client = vf.EvalClientConfig(base_url=base_url, api_key_var="TOKA_KEY")
    for trace in run(environment, client, temperature=1.0, logit_bias=letters):
        assert {call.finish_reason for call in trace.calls} == {"length"}


def test_renderers_generates_by_itself(base_url: str, model_directory: Path, plain_post: PlainPost) -> None:
    """As plain HTTP does. A prompt longer than the server's max_model_len is refused before it is sent."""
    renderer = create_renderer(load_tokenizer(str(model_directory)))
    messages: list[Any] = [{"role": "user", "content": "Say hello."}]

    async def ask(messages: list[Any]) -> dict[str, Any]:
        sampling = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
        async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            (model,) = (await client.models.list()).data  # by this name renderers finds max_model_len
            return await generate(
                client=client, renderer=renderer, messages=messages, model=model.id, sampling_params=sampling
            )

    answer = asyncio.run(ask(messages))
    body = {"messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS, "logprobs": True}
    expected = plain_post("chat/completions", {**body, "return_token_ids": True})
    (choice,) = expected["choices"]
    assert answer["prompt_ids"] == expected["prompt_token_ids"]
    assert answer["completion_ids"] == choice["token_ids"]
    assert answer["finish_reason"] == choice["finish_reason"]
    assert answer["content"] == choice["message"]["content"]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert answer["completion_logprobs"] == pytest.approx(logprobs, abs=1e-4)
    assert all(math.isfinite(logprob) for logprob in answer["completion_logprobs"])
    with pytest.raises(OverlongPromptError):
        asyncio.run(ask([{"role": "user", "content": "Say hello." * 100}]))
