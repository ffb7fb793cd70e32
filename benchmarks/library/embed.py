"""Vectors of texts by `LLM.embed` and by sentence-transformers with the same weights, in turns: tokens per second.

The texts are words of the vocabulary; their lengths are spread as those of passages, about a mean of 120 tokens.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

from tokasaurus import LLM
from tokasaurus.checkpoint import resolve_checkpoint, with_safetensors
from tokasaurus.text.tokenizer import Tokenizer

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_TEXT_ONLY = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}


def make_texts(tokenizer: Tokenizer, num_texts: int, mean_tokens: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    found = [tokenizer.decode([token_id], skip_special_tokens=True) for token_id in range(1000, 12_000)]
    words = np.array([word for word in found if word.startswith(" ") and word[1:].isalpha()])
    lengths = np.maximum(4, rng.gamma(2, mean_tokens / 2, num_texts)).astype(int)
    return ["".join(rng.choice(words, length)) for length in lengths]


def measure(calls: dict[str, Callable[[list[str]], np.ndarray]], rounds: list[list[str]], tokenizer: Tokenizer) -> None:
    """Calls in turns, each round with texts of its own, since prompts are cached; prints tokens/s."""
    rates: dict[str, list[float]] = {name: [] for name in calls}
    vectors = {}
    for texts in rounds:
        num_tokens = sum(map(len, tokenizer.encode_batch(texts, add_special_tokens=True)))
        for name, call in calls.items():
            started = time.perf_counter()
            vectors[name] = call(texts)
            rates[name].append(num_tokens / (time.perf_counter() - started))
    for name, own in rates.items():
        print(f"{name}: {statistics.median(own):,.0f} tokens/s ({min(own):,.0f} to {max(own):,.0f})")
    cosines = (vectors["toka"] * vectors["sentence-transformers"]).sum(-1)
    print(f"cosines of the last round: {cosines.min():.5f} to {cosines.max():.5f}")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=300)
    parser.add_argument("--mean-tokens", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16")
    options = parser.parse_args(words)
    checkpoint = resolve_checkpoint(None)
    directory = str(with_safetensors(checkpoint.directory))
    tokenizer = Tokenizer.load(checkpoint.tokenizer_directory)
    rounds = [make_texts(tokenizer, options.texts, options.mean_tokens, seed) for seed in range(options.rounds)]
    as_text = {"modality_config": _TEXT_ONLY, "module_output_name": "token_embeddings"}
    transformer = Transformer(directory, model_kwargs={"dtype": _DTYPES[options.dtype]}, **as_text)
    pooling = Pooling(checkpoint.info.hidden_size, pooling_mode="lasttoken")
    encoder = SentenceTransformer(modules=[transformer, pooling, Normalize()], device="cpu")

    def encode(texts: list[str]) -> np.ndarray:
        encoded: np.ndarray = encoder.encode(texts, batch_size=32, convert_to_numpy=True)
        return encoded

    with LLM(directory, task="embed", dtype=options.dtype) as llm:
        llm.embed(["the first call"], progress=False)
        measure(
            {"toka": lambda texts: llm.embed(texts, progress=False), "sentence-transformers": encode}, rounds, tokenizer
        )


if __name__ == "__main__":
    main()
