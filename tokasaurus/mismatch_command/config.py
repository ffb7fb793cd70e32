"""The flags of `toka mismatch`: its own, and those of the engine that it starts."""

from typing import Any

from tokasaurus.config import FLAGS_OF_ACCESS, ServerConfig
from tokasaurus.flags import count, flag

# How others reach a server, and what the modes set themselves.
_NOT_HERE = (
    *(*FLAGS_OF_ACCESS, "api_key", "rl", "logprobs_mode", "sampling_defaults"),
    *("use_hydragen", "hydragen_min_group_size", "hydragen_min_prefix_len"),
)


class MismatchConfig(ServerConfig, without=_NOT_HERE):
    """The flags of a comparison, checked by `finalize`."""

    reference: str = flag(
        "transformers", "what the log-probabilities are compared with", choices=("transformers",), heading="mismatch"
    )
    reference_dtype: str | None = flag(
        None,
        "data type in which the reference computes",
        choices=("bfloat16", "float16", "float32"),
        none_means="of the model's weights",
    )
    prompts: str | None = flag(None, "file with one prompt a line", none_means="some that are built in")
    num_prompts: int = count(64, "prompts that are sampled at once; 8 of them one at a time")
    max_tokens: int = count(64, "tokens of each completion")
    bound: float = flag(0.1, "differences above it are counted", minimum=0)
    seed: int = flag(0, "of the sampling", minimum=0)
    json: str | None = flag(None, "file for all figures, as JSON", none_means="none")
    picture: str | None = flag(None, "file for a picture of them, an SVG", none_means="none")

    log_level: str = ServerConfig.declared("log_level", default="warning")
    uvicorn_log_level: str = ServerConfig.declared("uvicorn_log_level", default="warning")

    @classmethod
    def why_not_here(cls, name: str) -> str | None:
        return "toka mismatch sets it itself, or nobody else reaches its engine" if name in _NOT_HERE else None


_OWN_FLAGS = [name for name, flag in MismatchConfig.flags.items() if flag.heading == "mismatch"]


def engine_flags(config: MismatchConfig, words: list[str]) -> dict[str, Any]:
    """The flags of the engine that the words name, and the defaults of `toka mismatch` for it."""
    names = {word.partition("=")[0] for word in words}
    chosen = {
        name: getattr(config, name)
        for name, flag in ServerConfig.flags.items()
        if name not in (*_OWN_FLAGS, *_NOT_HERE) and (name in names or flag.alias in names)
    }
    return {
        "sampling_defaults": "neutral",
        "log_level": config.log_level,
        "uvicorn_log_level": config.uvicorn_log_level,
        **chosen,
    }
