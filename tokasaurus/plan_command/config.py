"""The flags of `toka plan`: its own, and those of the server that change how much memory is used.

Pydra reads the annotations at run time, as in tokasaurus.config.
"""

import re
from typing import TYPE_CHECKING

from tokasaurus.config import ServerConfig
from tokasaurus.config_flags import SERVER_FLAGS
from tokasaurus.flags import Flag, FlagError, FlagTable, assign_flags, check_flags

if TYPE_CHECKING:

    class Config:  # Pydra has no types
        def finalize(self) -> None: ...
else:
    from pydra import Config

_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


class PlanConfig(Config):
    """The flags of `toka plan`, checked by `finalize`. Defaults of the server's flags are the server's."""

    model: str | None = None
    device_memory: str = "80GiB"
    json: bool = False
    dtype: str = "bfloat16"
    kv_cache_dtype: str | None = None
    tp_size: int = 1
    pp_size: int = 1
    symmetric_all_reduce: bool | None = ServerConfig.symmetric_all_reduce
    page_size: int = ServerConfig.page_size
    max_tokens_per_forward: int = ServerConfig.max_tokens_per_forward
    max_seqs_per_forward: int = ServerConfig.max_seqs_per_forward
    max_num_tokens_per_request: int | None = None
    attention_backend: str | None = None
    use_cudagraphs: bool | None = ServerConfig.use_cudagraphs
    cudagraph_max_size: int | None = None
    cudagraph_step: int = ServerConfig.cudagraph_step

    def finalize(self) -> None:
        """Raises FlagError for a wrong value."""
        check_flags(self, PLAN_FLAGS)
        parse_size(self.device_memory)
        if self.model is None:
            raise FlagError("model is missing: toka plan model=NAME [device_memory=80GiB] [name=value ...]")
        if self.attention_backend not in (None, "flashinfer", "torch"):
            raise FlagError(f"attention_backend={self.attention_backend}: a CUDA device has flashinfer and torch")


def parse_size(text: str) -> int:
    """Bytes of a size such as "80GiB", "24GB" or "1.5 GiB". Raises FlagError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", text.strip())
    if match is None or match[2] not in _UNITS:
        raise FlagError(
            f"device_memory={text}: must be a number and a unit, such as 80GiB; units are {', '.join(_UNITS)}"
        )
    return int(float(match[1]) * _UNITS[match[2]])


def _of_server(*names: str) -> dict[str, Flag]:
    return {name: SERVER_FLAGS.flags[name] for name in names}


PLAN_FLAGS = FlagTable(
    groups={
        "plan": {
            "model": Flag(
                "directory in Hugging Face format, of which config.json and the tensors' headers are read; for an "
                "estimate, one without weights, a config.json, or a Hugging Face repo id, of which that alone is read",
                none_means="required",
            ),
            "device_memory": Flag("free memory of each CUDA device before the start, such as 80GiB or 24GB"),
            "json": Flag("print JSON"),
        },
        "flags of the server": {
            "dtype": Flag("data type of the weights and of computation", choices=("bfloat16", "float16", "float32")),
            **_of_server(
                *("kv_cache_dtype", "tp_size", "pp_size", "symmetric_all_reduce", "page_size"),
                *("max_tokens_per_forward", "max_seqs_per_forward", "max_num_tokens_per_request"),
                *("attention_backend", "use_cudagraphs", "cudagraph_max_size", "cudagraph_step"),
            ),
        },
    }
)


def parse_plan_config(words: list[str]) -> PlanConfig:
    """The checked config for `name=value` words. Raises FlagError, whose message is one line."""
    config = PlanConfig()
    assign_flags(config, PLAN_FLAGS, ["json=T" if word == "--json" else word for word in words])
    config.finalize()
    return config
