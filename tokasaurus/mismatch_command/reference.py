"""The forward of a trainer: transformers' own model, one completion at a time.

Imported when it is used: torch and transformers take seconds."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tokasaurus.checkpoint import read_model_info, weight_files
from tokasaurus.checkpoint.gguf.model import is_gguf
from tokasaurus.checkpoint.quantized.config import QUANTIZATION_KEYS
from tokasaurus.model.decoder.tensor_files import open_files, read_shard


class TransformersReference:
    """A checkpoint in transformers, on a GPU if torch has one. Quantised weights are dequantised for it."""

    def __init__(self, directory: Path, dtype: str) -> None:
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        files, torch_dtype = weight_files(directory), getattr(torch, dtype)
        model: PreTrainedModel
        quantization = None if is_gguf(files[0]) else read_model_info(directory).quantization
        if is_gguf(files[0]) or quantization is not None:
            tensors = {
                name: read_shard(file, name, tuple(slice(None) for _ in file.shape(name))).to(torch_dtype)
                for file in open_files(files, quantization)
                for name in file.names()
            }
            config = AutoConfig.from_pretrained(directory)
            for key in QUANTIZATION_KEYS:
                vars(config).pop(key, None)
            family = getattr(transformers, config.architectures[0])  # the Auto classes take no tensors
            model = family.from_pretrained(None, config=config, state_dict=tensors, dtype=torch_dtype)
        else:
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch_dtype)
        self._model = model.to(self._device).eval()

    @torch.inference_mode()
    def logprobs(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> NDArray[np.float64]:
        """Log-probability of each of the T tokens after the prompt, float64 [T], computed in float32 from the model's
        logits."""
        ids = torch.tensor([[*prompt_ids, *token_ids]], device=self._device)
        logits = self._model(ids).logits[0, len(prompt_ids) - 1 : -1].float()
        chosen = logits.log_softmax(-1).gather(1, ids[0, len(prompt_ids) :].unsqueeze(1))
        found: NDArray[np.float64] = chosen[:, 0].double().cpu().numpy()
        return found
