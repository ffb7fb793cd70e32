"""Where the tensors of a model lie in its files, whatever the files' format."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a file, as the file's header describes it."""

    file: Path
    dtype: str
    """Type of its numbers in the format's spelling, such as "BF16" in safetensors and "Q4_1" in GGUF."""
    shape: tuple[int, ...]
    begin: int
    """Offset of the first byte from the start of the file."""
    end: int
    """Offset after the last byte."""
    interleaved_head: int = 0
    """Rows of an attention head, if the file has the rows of each head interleaved as `gguf.blocks.unpermuted_rows`
    says; 0 if the rows are in order."""
    name_in_file: str = ""
    """Where it is another one than here; else empty."""
    added: float = 0.0
    """What the file has added to each number, of float32."""
