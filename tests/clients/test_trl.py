"""TRL's AsyncGRPOTrainer trains the server's model, which gets new weights through examples/weight_transfer.py.
An adapter is sent by TRL itself. GRPOTrainer's client generates; its transfer of weights is vLLM's."""

import json
import math
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.clients.conftest import PlainPost
from tests.clients.trl_on_a_cpu import replaced_parts, share_of_even_ids

pytest.importorskip("trl", reason="TRL is not installed: `make test-clients` has it")

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from examples.weight_transfer import FileWeightTransfer

NUM_UPDATES = 20
NUM_GENERATIONS = 8
QUESTIONS = [{"prompt": [{"role": "user", "content": f"Question {number}"}]} for number in range(32)]
PROMPTS = [[72, 101, 108, 108, 111], list(range(40, 90)), [7]]
# TRL does not know the chat template of this tokenizer.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|start|>assistant: ",
    "fields": {"content": {"close_pattern": r"<\|eos\|>", "content": "text"}},
}


@dataclass(frozen=True)
class Run:
    versions: list[int]
    """Of the server's weights: before the training, during each step and at the end."""
    weights_left: list[str]
    """Names in the directory for the weights, at the end."""
    log: list[dict[str, float]]
    """TRL's figures of each step."""
    trained: Any
    """The trained model, loaded anew by transformers."""


def weight_version(url: str) -> int:
    """Of the server."""
    with urllib.request.urlopen(f"{url}/get_weight_version", timeout=60) as answer:
        return int(json.load(answer)["weight_version"])


def training(url: str, output: Path, max_steps: int) -> Any:
    return AsyncGRPOConfig(
        output_dir=str(output),
        vllm_server_base_url=url,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=max_steps,
        learning_rate=1e-2,
        num_generations=NUM_GENERATIONS,
        per_device_train_batch_size=NUM_GENERATIONS,
        max_completion_length=16,
        max_staleness=1,
        queue_maxsize=2 * NUM_GENERATIONS,
        save_strategy="no",
        report_to=[],
    )


def trained(model_directory: Path, config: Any, **options: Any) -> Any:
    """A trainer that has trained the model. options: of AsyncGRPOTrainer, beside those of every training."""
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    tokenizer.response_template = RESPONSE_TEMPLATE
    with replaced_parts():
        trainer = AsyncGRPOTrainer(
            model=str(model_directory),
            reward_funcs=share_of_even_ids,
            args=config,
            train_dataset=Dataset.from_list(QUESTIONS),
            processing_class=tokenizer,
            **options,
        )
        trainer.train()
    return trainer


@pytest.fixture(scope="module")
def run(base_url: str, model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    url = base_url.removesuffix("/v1")
    versions: list[int] = []

    def note_version() -> None:
        versions.append(weight_version(url))

    class Noting(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
            note_version()

    output, weights = tmp_path_factory.mktemp("trl"), tmp_path_factory.mktemp("weights")
    config = training(url, output, max_steps=NUM_UPDATES)
    transfer = FileWeightTransfer(url, str(weights), max_file_bytes=1 << 17)  # several files
    note_version()
    trainer = trained(model_directory, config, callbacks=[Noting()], weight_transfer=transfer)
    note_version()
    trainer.save_model(str(output / "trained"))
    model = AutoModelForCausalLM.from_pretrained(output / "trained", dtype=torch.float32).eval()
    weights_left = [path.name for path in weights.iterdir()]
    return Run(versions, weights_left, [entry for entry in trainer.state.log_history if "loss" in entry], model)


def test_each_update_gives_the_server_the_next_version(run: Run) -> None:
    before, *during, after = run.versions
    # The first is sent before the first step.
    assert during == list(range(before + 1, before + 1 + NUM_UPDATES))
    assert after == before + 1 + NUM_UPDATES
    assert len(run.weights_left) == 1  # of the newest, for an engine that starts again


def test_losses_are_finite_and_the_reward_grows(run: Run) -> None:
    assert len(run.log) == NUM_UPDATES
    assert all(math.isfinite(entry[name]) for entry in run.log for name in ("loss", "grad_norm", "ratio", "kl"))
    rewards = [entry["reward"] for entry in run.log]
    assert sum(rewards[-5:]) > sum(rewards[:5])


def test_log_probabilities_of_the_server_equal_the_trainers(run: Run) -> None:
    """In the first step both have the same weights: TRL's ratio of probabilities is 1 at each token, and the mean of
    ratio - 1 - log(ratio), which is positive elsewhere, is 0."""
    first = run.log[0]
    assert first["sample/staleness_max"] == 0
    assert first["ratio"] == pytest.approx(1, abs=1e-4)
    assert first["kl"] == pytest.approx(0, abs=1e-6)
    assert all(entry["kl"] > 1e-4 for entry in run.log if entry["sample/staleness_mean"] == 1)


def test_the_server_has_the_trained_weights(run: Run, model_directory: Path, plain_post: PlainPost) -> None:
    untrained = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32).eval()
    for prompt in PROMPTS:
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        (choice,) = plain_post("completions", {**body, "logprobs": 0, "return_token_ids": True})["choices"]
        given = torch.tensor(choice["logprobs"]["token_logprobs"])
        expected = log_probabilities(run.trained, prompt, choice["token_ids"])
        of_tokens = expected.gather(1, torch.tensor(choice["token_ids"])[:, None])[:, 0]
        torch.testing.assert_close(given, of_tokens, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(of_tokens, expected.amax(1), atol=1e-4, rtol=0)  # greedy
        earlier = log_probabilities(untrained, prompt, choice["token_ids"])
        assert (earlier - expected).abs().max() > 1


@pytest.fixture
def vllm_client(base_url: str) -> Any:
    """Of GRPOTrainer with `vllm_mode="server"`. It refuses to start unless vLLM is installed, of which it uses nothing
    until weights are sent."""
    from trl.generation import vllm_client

    with mock.patch.object(vllm_client, "is_vllm_available", return_value=True):
        return vllm_client.VLLMClient(base_url=base_url.removesuffix("/v1"), connection_timeout=60)


def test_the_client_of_grpo_generates(vllm_client: Any, plain_post: PlainPost) -> None:
    answer = vllm_client.generate(PROMPTS, n=2, temperature=0, max_tokens=8, generation_kwargs={"ignore_eos": True})
    assert answer["prompt_ids"] == PROMPTS
    for number, prompt in enumerate(PROMPTS):
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        (choice,) = plain_post("completions", {**body, "return_token_ids": True})["choices"]
        for sample in (2 * number, 2 * number + 1):
            assert answer["completion_ids"][sample] == choice["token_ids"]
            logprobs = [value for (value,) in answer["logprobs"][sample]]
            assert logprobs == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
    chats = [[{"role": "user", "content": "Hello"}], [{"role": "user", "content": "Bye"}]]
    answer = vllm_client.chat(chats, temperature=0, max_tokens=4, generation_kwargs={"ignore_eos": True})
    assert [len(ids) for ids in answer["completion_ids"]] == [4, 4]
    assert vllm_client.get_world_size() == 2
    vllm_client.reset_prefix_cache()


def test_the_client_of_grpo_says_that_its_transfer_of_weights_is_missing(vllm_client: Any) -> None:
    with pytest.raises(RuntimeError, match="has no weight-transfer engine"):
        vllm_client.init_communicator()


def log_probabilities(model: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """By transformers: [completion, vocabulary], float32."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1)


@dataclass(frozen=True)
class AdapterRun:
    sends_adapters: bool
    log: list[dict[str, float]]
    """TRL's figures of each step."""
    listed: list[str]
    """Adapters of the server, at the end."""
    merged: Any
    """The trained adapter in its model, by peft."""


@pytest.fixture(scope="module")
def adapter_run(base_url: str, model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> AdapterRun:
    """TRL's own client loads each version on both replicas, under a new name. Last: it begins with the model's own
    weights, which another training may have replaced."""
    url, output = base_url.removesuffix("/v1"), tmp_path_factory.mktemp("trl-adapter")
    body = json.dumps({"weight_dir": str(model_directory)}).encode()
    urllib.request.urlopen(urllib.request.Request(f"{url}/update_weights", body), timeout=60).close()
    config = training(url, output, max_steps=NUM_UPDATES)
    config.learning_rate = 3e-2
    lora = LoraConfig(r=8, target_modules="all-linear", lora_alpha=16)
    trainer = trained(model_directory, config, peft_config=lora)
    with urllib.request.urlopen(f"{base_url}/models", timeout=60) as answer:
        listed = [model["id"] for model in json.load(answer)["data"] if model["parent"] is not None]
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    trainer.save_model(str(output / "trained"))
    base = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, str(output / "trained")).merge_and_unload().eval()
    return AdapterRun(trainer._lora_sync, log, listed, merged)


def test_the_client_sends_adapters_and_unloads_what_is_stale(adapter_run: AdapterRun) -> None:
    assert adapter_run.sends_adapters
    assert len(adapter_run.log) == NUM_UPDATES
    # One is sent before the first step; with max_staleness=1 two of them are kept.
    assert adapter_run.listed == [f"trl-policy-v{number}" for number in (NUM_UPDATES, NUM_UPDATES + 1)]


def test_an_adapter_learns_from_log_probabilities_of_its_own(adapter_run: AdapterRun) -> None:
    first = adapter_run.log[0]
    assert first["ratio"] == pytest.approx(1, abs=1e-4)
    assert first["kl"] == pytest.approx(0, abs=1e-6)
    rewards = [entry["reward"] for entry in adapter_run.log]
    assert sum(rewards[-5:]) > sum(rewards[:5])


def test_the_server_has_the_trained_adapter_beside_the_model(
    adapter_run: AdapterRun, model_directory: Path, plain_post: PlainPost
) -> None:
    untrained = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32).eval()
    for name, model in ((adapter_run.listed[-1], adapter_run.merged), ("default", untrained)):
        for prompt in PROMPTS * 2:  # of both replicas
            body = {"model": name, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
            (choice,) = plain_post("completions", {**body, "logprobs": 0, "return_token_ids": True})["choices"]
            expected = log_probabilities(model, prompt, choice["token_ids"])
            of_tokens = expected.gather(1, torch.tensor(choice["token_ids"])[:, None])[:, 0]
            given = torch.tensor(choice["logprobs"]["token_logprobs"])
            torch.testing.assert_close(given, of_tokens, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(of_tokens, expected.amax(1), atol=1e-4, rtol=0)  # greedy
