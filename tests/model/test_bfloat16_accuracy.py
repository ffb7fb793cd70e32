"""bfloat16 logprobs of fixed continuations are about as close to float32 as bfloat16 logprobs of transformers."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.model.helpers.steps import CPU, NOTHING, int32, open_greedy
from tokasaurus.checkpoint import Checkpoint, resolve_checkpoint, weight_files, with_safetensors
from tokasaurus.commands.bench.workloads import DATA
from tokasaurus.messages.forward import ForwardInput, PromptLogprobsInput, SlotChanges
from tokasaurus.model.attention.backend import KVShape
from tokasaurus.model.attention.choose import make_backend
from tokasaurus.model.attention.row_split import attends_over
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.decoder.decoder import build_decoder
from tokasaurus.model.decoder.weights import load_weights
from tokasaurus.model.execution.device_batch import DeviceBatch, build_batch
from tokasaurus.model.execution.executors import choose_executor
from tokasaurus.model.execution.slot_table import SlotTable, SlotTableSize
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.sampling.prompt_logprobs import compute_prompt_logprobs, fill_token_logprobs
from tokasaurus.model.staging.staging import ON_HOST
from tokasaurus.model.worker.device import choose_kv_cache_dtype
from tokasaurus.text.tokenizer import Tokenizer

QUESTIONS = DATA / "gsm8k_test_200.jsonl"
NUM_TEXTS = 3
PAGE_SIZE = 16
MAX_TOKENS = 320


def read_texts(tokenizer: Tokenizer) -> list[tuple[list[int], list[int]]]:
    """(prompt, continuation) ids: a question and its worked answer."""
    items = [json.loads(line) for line in QUESTIONS.read_text().splitlines()[:NUM_TEXTS]]
    return [
        (tokenizer.encode(item["question"], False), tokenizer.encode("\n" + item["answer"], False)) for item in items
    ]


def logprobs_of(logits: torch.Tensor, tokens: list[int]) -> np.ndarray:
    """logits [N, V], one token per row -> the logprobs of the tokens, [N]."""
    return logits.double().log_softmax(dim=-1)[range(len(tokens)), tokens].numpy()


def by_transformers(model: torch.nn.Module, prompt: list[int], continuation: list[int]) -> np.ndarray:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + continuation])).logits[0]
    return logprobs_of(logits[len(prompt) - 1 : -1], continuation)


class LogprobModel:
    """Our model with bfloat16 weights. kv_cache_dtype: None for the server's default."""

    def __init__(self, checkpoint: Checkpoint, backend: str, kv_cache_dtype: str | None) -> None:
        info = checkpoint.info
        self.model = build_decoder(info, Mesh(), torch.bfloat16)
        self.model.materialize(CPU, MAX_TOKENS)
        load_weights(weight_files(checkpoint.directory), self.model.weight_shards(), self.model.ignores, lambda _: None)
        self.model.pack(load_kernels())
        activation_dtype = self.model.activation_dtype
        shape = KVShape(
            *(info.num_layers, info.num_heads, info.num_kv_heads, info.head_dim, PAGE_SIZE),
            *(choose_kv_cache_dtype(kv_cache_dtype, torch.bfloat16, activation_dtype), CPU, activation_dtype),
        )
        self.backend = make_backend(backend, shape, load_kernels())
        self.backend.allocate(MAX_TOKENS // PAGE_SIZE + 1)
        self.executor = choose_executor(self.model, self.backend)
        self.slots = SlotTable(SlotTableSize(2, MAX_TOKENS // PAGE_SIZE), CPU)
        self.slots.rules.allocate(MAX_TOKENS + PAGE_SIZE)

    def sampled_logprobs(self, prompt: list[int], continuation: list[int]) -> np.ndarray:
        """The prompt as one chunk, then the continuation token by token, as if it were sampled."""
        rows = [self._logits(prompt, first=True)]
        rows += [self._logits([token]) for token in continuation[:-1]]
        return logprobs_of(torch.cat(rows), continuation)

    def prompt_logprobs(self, prompt: list[int], continuation: list[int]) -> np.ndarray:
        """Prompt and continuation together as one prompt."""
        tokens = prompt + continuation
        prompt_logprobs = PromptLogprobsInput(int32([0]), int32([len(tokens) - 1]), int32(tokens[1:]), 0)
        hidden, batch = self._forward(tokens, first=True, prompt_logprobs=prompt_logprobs)
        assert batch.prompt_logprobs is not None
        fill = partial(fill_token_logprobs, kernels=load_kernels())
        computed = compute_prompt_logprobs(
            hidden, batch.prompt_logprobs, lambda rows: self.model.logits(hidden[rows]), fill
        )
        return computed.logprobs.double().numpy()[len(prompt) - 1 :]

    def _logits(self, tokens: list[int], first: bool = False) -> torch.Tensor:
        hidden, batch = self._forward(tokens, first)
        with torch.inference_mode():
            # The next call writes to the same memory.
            return self.model.logits(hidden[batch.logit_rows]).to(torch.float32, copy=True)

    def _forward(
        self, tokens: list[int], first: bool, prompt_logprobs: PromptLogprobsInput | None = None
    ) -> tuple[torch.Tensor, DeviceBatch]:
        blocks = np.arange(1, MAX_TOKENS // PAGE_SIZE + 1, dtype=np.int32) if first else NOTHING
        # The slot's prompt has one token: every chunk ends past it, so the logits of its last token are computed.
        opened = open_greedy(1, num_prompt_tokens=1)
        changes = SlotChanges(int32([1] if first else []), opened if first else None, np.full_like(blocks, 1), blocks)
        step = ForwardInput(
            1, int32([1]), int32([len(tokens)]), 0, int32(tokens), changes, prompt_logprobs=prompt_logprobs
        )
        self.slots.apply(changes)
        batch = build_batch(step, self.slots, PAGE_SIZE, ON_HOST)
        self.backend.plan(batch.layout)
        with torch.inference_mode():
            return self.model(
                batch.token_ids, None, batch.positions, self.executor, attends_over(self.backend, batch.layout)
            ), batch


@pytest.fixture(scope="module")
def demo() -> Checkpoint:
    return resolve_checkpoint(None)


@pytest.fixture(scope="module")
def errors_of_transformers(demo: Checkpoint) -> tuple[list[np.ndarray], float]:
    """float32 logprobs of each text, and the mean error of transformers' bfloat16 logprobs."""
    texts = read_texts(Tokenizer.load(demo.tokenizer_directory))
    directory = with_safetensors(demo.directory)
    exact_model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    exact = [by_transformers(exact_model, *text) for text in texts]
    rounded_model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    rounded = [by_transformers(rounded_model, *text) for text in texts]
    return exact, float(np.abs(np.concatenate(rounded) - np.concatenate(exact)).mean())


@pytest.mark.parametrize(
    ("backend", "kv_cache_dtype"),
    [("cpu", None), ("cpu", "bfloat16"), pytest.param("torch", None, marks=pytest.mark.long)],
)
@pytest.mark.long
def test_the_mean_error_is_at_most_a_fifth_above_that_of_transformers(
    backend: str, kv_cache_dtype: str | None, demo: Checkpoint, errors_of_transformers: tuple[list[np.ndarray], float]
) -> None:
    exact, allowed = errors_of_transformers
    model = LogprobModel(demo, backend, kv_cache_dtype)
    texts = read_texts(Tokenizer.load(demo.tokenizer_directory))
    for logprobs_of in (model.sampled_logprobs, model.prompt_logprobs):
        ours = [logprobs_of(*text) for text in texts]
        error = float(np.abs(np.concatenate(ours) - np.concatenate(exact)).mean())
        print(f"mean error {error:.4f}, transformers' {allowed:.4f}, {sum(map(len, ours))} tokens")
        assert error <= 1.2 * allowed
    assert 0 < allowed < 0.2
