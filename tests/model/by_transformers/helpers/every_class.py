"""What becomes of each causal language model of transformers: `python -m` writes the table that tests compare with."""

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.model.by_transformers.helpers.tiny_classes import FAMILIES, VOCAB_SIZE, save_tiny_model, tiny_config
from tests.model.helpers.greedy_decoding import greedy_in_a_mixed_batch, oracle_greedy
from tests.model.helpers.steps import CPU, StepDriver, make_runner
from tokasaurus.checkpoint import ModelInfo, read_model_info, weight_files
from tokasaurus.model.attention.choose import make_backend
from tokasaurus.model.by_transformers import probe
from tokasaurus.model.by_transformers.model import TransformersModel
from tokasaurus.model.cpu.bindings import load_kernels
from tokasaurus.model.decoder.compile import Compiler
from tokasaurus.model.decoder.weights import load_weights
from tokasaurus.model.parallel.mesh import Mesh
from tokasaurus.model.worker.class_check import measure_class
from tokasaurus.model.worker.memory import kv_shape

TABLE = Path(__file__).parents[1] / "every_class.json"
RIGHT = "right"
REFUSED = "refused at the start: its results differ from those of its own attention"
NUM_TOKENS = 8
_LENGTHS = (1, 2, 15, 16, 17, 33, 47, 60)


def load_class(
    directory: Path,
    packed: bool = True,
    keeps_blocks: bool = False,
    dtype: torch.dtype = torch.float32,
    mesh: Mesh = Mesh(),  # noqa: B008  (it is frozen)
    compiler: Compiler | None = None,
) -> tuple[TransformersModel, ModelInfo]:
    """keeps_blocks: of quantised weights, where the kernels multiply by them."""
    info = read_model_info(directory, impl="transformers")
    model = TransformersModel(info, mesh, dtype, directory)
    model.materialize(CPU, info.context_length)
    files, shards = weight_files(directory), model.weight_shards()
    load_weights(files, shards, model.ignores, may_keep_blocks=keeps_blocks, quantization=info.quantization)
    model.pack(load_kernels() if packed else None, compiler=compiler)
    return model, info


def outcome(family: str, directory: Path) -> str:
    """RIGHT, or why the family is not served."""
    try:
        config = tiny_config(family)
    except Exception as error:  # of many classes: no small model of it is known
        return f"no small configuration: {' '.join(str(error).split())}"
    config.save_pretrained(directory)
    try:
        probe.facts_of(directory / "config.json")
    except probe.Unfit as unfit:
        return str(unfit)
    oracle = save_tiny_model(directory, config)
    if not is_right_at_start(directory):
        return REFUSED
    assert_equals(directory, oracle)
    return RIGHT


def is_right_at_start(directory: Path, mesh: Mesh = Mesh()) -> bool:  # noqa: B008  (it is frozen)
    """By the check of a start. mesh: with one tensor-parallel rank."""
    model, info = load_class(directory, mesh=mesh)
    shape = kv_shape(info, mesh, 16, torch.float32, torch.float32, CPU, model.sinks)
    backend = make_backend(None, shape, load_kernels())
    return all(measured.is_right for measured in measure_class(model, backend, shape, info.context_length))


def assert_equals(directory: Path, oracle: PreTrainedModel, compiler: Compiler | None = None) -> None:
    """Greedy tokens and log-probabilities of prompts in chunks beside decoding ones, then of one whose beginning is
    cached."""
    model, info = load_class(directory, compiler=compiler)
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in _LENGTHS]
    driver = StepDriver(make_runner(model, info, None, compiler=compiler), seed=1)
    tokens, logprobs = greedy_in_a_mixed_batch(driver, prompts, NUM_TOKENS, rng)
    again = prompts[-1][:40] + prompts[0]
    driver.open(20, again, shares=(len(prompts), 2))
    prompts.append(again)
    cached: list[Any] = [driver.run([], [(20, len(again) - 32)])[20]]
    cached += [driver.run([20], [])[20] for _ in range(NUM_TOKENS - 1)]
    tokens.append([token for token, _ in cached])
    logprobs.append([logprob for _, logprob in cached])
    for prompt, own_tokens, own_logprobs in zip(prompts, tokens, logprobs, strict=True):
        expected_tokens, expected_logprobs = oracle_greedy(oracle, prompt, NUM_TOKENS)
        assert own_tokens == expected_tokens
        assert max(abs(a - b) for a, b in zip(own_logprobs, expected_logprobs, strict=True)) < 1e-4


def main() -> None:
    transformers.logging.set_verbosity_error()
    table = {}
    for family in sys.argv[1:] or FAMILIES:
        with tempfile.TemporaryDirectory() as directory:
            try:
                table[family] = outcome(family, Path(directory))
            except AssertionError as error:
                table[family] = f"WRONG: {str(error).splitlines()[:1]}"
            except Exception as error:
                table[family] = f"CRASH: {type(error).__name__} {error}"
        print(family, table[family], flush=True)
    if not sys.argv[1:]:
        whole = {"transformers": transformers.__version__, **table}
        TABLE.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
