"""Small random models that make vectors and scores, as transformers and sentence-transformers write them, with what
those compute."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Normalize
from sentence_transformers.base.modules import Transformer as TransformerModule
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch.nn import functional
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
)

from tests.helpers.tiny_model import EOS_ID, family_config, save_byte_tokenizer, save_tiny_model

TEXTS = ["A whale is", "no fish.", "It" * 60, "x", "Krill " * 9, "What do whales eat? " * 11]
PROMPTS = {"query": "Find: ", "document": ""}


def _fill(model: PreTrainedModel) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.15)


def save_embedding_model(
    directory: Path,
    family: str,
    pooling: str,
    normalizes: bool,
    prompts: dict[str, str] = PROMPTS,
    has_messages: bool = False,
    adds_end: bool = False,
) -> SentenceTransformer:
    """pooling: lasttoken, mean or cls. has_messages: texts become messages of a chat template. adds_end: the end token
    is added to texts."""
    base = directory.with_name(f"{directory.name}-base")
    base.mkdir(parents=True)
    model = AutoModel.from_config(family_config(family), dtype=torch.float32)
    _fill(model)
    model.save_pretrained(base)
    save_byte_tokenizer(base)
    if not has_messages:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|eos|>"}
        (base / "tokenizer_config.json").write_text(json.dumps(settings))
    if adds_end:
        tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
        tokenizer.post_processor = TemplateProcessing("$A <|eos|>", "$A $B <|eos|>", [("<|eos|>", EOS_ID)])
        tokenizer.save(str(base / "tokenizer.json"))
    transformer = TransformerModule(str(base))
    transformer.tokenizer.pad_token = "<|eos|>"
    modules: list[Any] = [transformer, Pooling(64, pooling_mode=pooling), *([Normalize()] if normalizes else [])]
    encoder = SentenceTransformer(modules=modules, prompts=prompts, device="cpu")
    encoder.save(str(directory))
    return encoder


def vectors_of(encoder: SentenceTransformer, texts: list[str], **options: Any) -> np.ndarray:
    found: np.ndarray = encoder.encode(texts, batch_size=1, convert_to_numpy=True, **options)
    return found


PAIR_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}: {{ message.content }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>answer: {% endif %}"
)


def save_answering_model(directory: Path, yes: int, no: int) -> CrossEncoder:
    """A causal model whose logits of two tokens are the score, of pairs in a chat template."""
    base = directory.with_name(f"{directory.name}-base")
    save_tiny_model(base, "qwen3")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|eos|>", "chat_template": PAIR_TEMPLATE}
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    variables = {"chat_template": {"add_generation_prompt": True}}
    transformer = TransformerModule(str(base), transformer_task="text-generation", processing_kwargs=variables)
    transformer.tokenizer.pad_token = "<|eos|>"
    modules = [transformer, LogitScore(yes, no)]
    encoder: CrossEncoder = CrossEncoder(
        modules=modules, prompts={"query": "Judge."}, default_prompt_name="query", device="cpu"
    )
    encoder.save_pretrained(str(directory))
    return encoder


def save_classifier(
    directory: Path, family: str, num_labels: int = 3, by_token: bool = False, **config: Any
) -> PreTrainedModel:
    """by_token: ForTokenClassification, whose head has biases."""
    settings = family_config(family)
    settings.num_labels = num_labels
    for name, value in config.items():
        setattr(settings, name, value)
    kind = AutoModelForTokenClassification if by_token else AutoModelForSequenceClassification
    model: PreTrainedModel = kind.from_config(settings, dtype=torch.float32).eval()
    _fill(model)
    model.save_pretrained(directory)
    save_byte_tokenizer(directory)
    return model


def save_reward_model(directory: Path) -> PreTrainedModel:
    """Qwen2ForRewardModel, which is no class of transformers: two layers with biases, and a ReLU between them."""
    base = AutoModel.from_config(family_config("qwen2"), dtype=torch.float32).eval()
    _fill(base)
    base.save_pretrained(directory)
    save_byte_tokenizer(directory)
    tensors = {f"model.{name}": tensor for name, tensor in load_file(directory / "model.safetensors").items()}
    torch.manual_seed(1)
    for layer, shape in (("0", (64, 64)), ("2", (1, 64))):
        tensors[f"score.{layer}.weight"] = torch.randn(shape) / 8
        tensors[f"score.{layer}.bias"] = torch.randn(shape[0])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["Qwen2ForRewardModel"]}))
    return base


def head_outputs(model: PreTrainedModel, directory: Path, texts: list[str]) -> np.ndarray:
    """[texts, labels]: the logits of a classifier; of each text's last token, if it has some of each token; of a model
    without head, those of the stored two layers."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    rows = []
    with torch.inference_mode():
        for text in texts:
            output = model(torch.tensor([tokenizer.encode(text)]))
            if not hasattr(output, "logits"):
                stored, row = load_file(directory / "model.safetensors"), output.last_hidden_state[0, -1]
                row = functional.linear(row, stored["score.0.weight"], stored["score.0.bias"]).relu()
                rows.append(functional.linear(row, stored["score.2.weight"], stored["score.2.bias"]))
            else:
                rows.append(output.logits[0] if output.logits.dim() == 2 else output.logits[0, -1])
    return torch.stack(rows).numpy()
