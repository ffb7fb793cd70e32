"""The flags of `toka plan`: its own, and those of the server that change how much memory is used."""

import re
from collections.abc import Iterator

from tokasaurus.config import ServerConfig
from tokasaurus.flags import SUFFIXES, FlagError, flag

_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, **SUFFIXES}


_OF_SERVER = (
    *("dtype", "rope_scaling", "kv_cache_dtype", "tp_size", "pp_size", "symmetric_all_reduce", "page_size"),
    *("max_tokens_per_forward", "max_seqs_per_forward", "max_num_tokens_per_request"),
    *("attention_backend", "use_cudagraphs", "cudagraph_max_size", "cudagraph_step"),
)


class PlanConfig(ServerConfig, only=_OF_SERVER, heading="flags of the server"):
    """The flags of `toka plan`, checked by `finalize`."""

    model: str | None = flag(
        None,
        "directory in Hugging Face format, or a .gguf file, of which config and the tensors' headers are read; for an "
        "estimate, a directory without weights, a config.json, or a Hugging Face repo id, of which that alone is read",
        none_means="required",
        heading="plan",
    )
    device_memory: str = flag("80GiB", "free memory of each CUDA device before the start, such as 80GiB, 24GB or 24G")
    json: bool = flag(False, "print JSON")

    dtype: str = ServerConfig.declared(
        "dtype", default="bfloat16", meaning="data type of the weights and of computation"
    )

    def further_errors(self) -> Iterator[str]:
        try:
            parse_size(self.device_memory)
        except FlagError as error:
            yield from error.lines
        if self.model is None:
            yield "model is missing: toka plan model=NAME [device_memory=80GiB] [name=value ...]"
        if self.attention_backend not in (None, "flashinfer", "torch"):
            yield f"attention_backend={self.attention_backend}: a CUDA device has flashinfer and torch"


def parse_size(text: str) -> int:
    """Bytes of a size such as "80GiB", "24GB" or "1.5 GiB". Raises FlagError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", text.strip())
    if match is None or match[2] not in _UNITS:
        raise FlagError(
            f"device_memory={text}: must be a number and a unit, such as 80GiB; units are {', '.join(_UNITS)}"
        )
    return int(float(match[1]) * _UNITS[match[2]])
