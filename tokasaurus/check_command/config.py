"""The flags of `toka check`: its own, and those of the server that change what computes a model."""

from tokasaurus.config import ServerConfig
from tokasaurus.flags import flag

_OF_SERVER = (
    *("rope_scaling", "device", "trust_remote_code", "dtype", "kv_cache_dtype", "cpu_isa", "page_size"),
    *("quantization", "quantized_compute"),
    *("max_tokens_per_forward", "max_seqs_per_forward", "max_num_tokens_per_request", "attention_backend"),
    *("torch_compile", "use_cudagraphs", "cudagraph_max_size", "cudagraph_step", "log_level"),
)


class CheckConfig(ServerConfig, only=_OF_SERVER, heading="flags of the server"):
    """The flags of `toka check`."""

    model: str | None = flag(
        None,
        "as for the server; or for random weights, a config.json or a directory that has no weights beside it",
        none_means="demo",
        heading="check",
    )
    json: bool = flag(
        False, "print a JSON line for the device, for each result as it is found, and for what is switched off"
    )
