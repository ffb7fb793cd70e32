"""From a model's name to its local files and its facts. Imports no torch: all three processes read it."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RopeInfo:
    """Rotary embedding. scaling_type: "default" or "llama3"; the other fields are read for "llama3" alone.

    Source of the llama3 scaling: the Llama 3.1 model card's reference code.
    """

    theta: float
    scaling_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_context_length: int = 0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a checkpoint's config.json and generation_config.json say, in one vocabulary for every family.

    family: config.json's model_type, such as "llama". dtype: of the stored weights, such as "bfloat16".
    eos_ids: union of both files' eos_token_id.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope: RopeInfo
    tie_embeddings: bool
    eos_ids: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk. directory: config.json and *.safetensors. tokenizer_directory: tokenizer.json and its kin."""

    name: str
    directory: Path
    tokenizer_directory: Path
    info: ModelInfo
