"""The model as the API shows it."""

from collections.abc import Callable
from dataclasses import dataclass

from tokasaurus.server.errors import ModelNotFound
from tokasaurus.server.tools.formats import NO_TOOLS_IN_TEMPLATE, ToolSupport
from tokasaurus.text.tokenizer import Tokenizer

# Accepted as a model's name beside the served one.
DEFAULT_ALIAS = "default"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """name: in the API. created: Unix time in seconds at which the server started.

    system_fingerprint: the same as long as equal seeds are meant to give equal answers.
    allow_logprobs, max_top_logprobs: the flags enable_chosen_logprobs and max_topk_logprobs.
    find_tools: what `tools` is; called for the first time, it may have to load the chat template.
    """

    name: str
    tokenizer: Tokenizer
    vocab_size: int
    eos_ids: frozenset[int]
    created: int
    system_fingerprint: str
    allow_logprobs: bool
    max_top_logprobs: int
    find_tools: Callable[[], ToolSupport] = lambda: NO_TOOLS_IN_TEMPLATE

    @property
    def tools(self) -> ToolSupport:
        return self.find_tools()

    def check_name(self, name: str) -> None:
        """Raises ModelNotFound."""
        if name not in (self.name, DEFAULT_ALIAS):
            raise ModelNotFound(name)
