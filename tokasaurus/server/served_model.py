"""The served model as the API presents it."""

from collections.abc import Callable
from dataclasses import dataclass

from tokasaurus.messages.generation import LogprobsMode
from tokasaurus.server.errors import ModelNotFound
from tokasaurus.server.tools.formats import NO_TOOLS_IN_TEMPLATE, ToolSupport
from tokasaurus.text.tokenizer import Tokenizer

# Also accepted as the served model's name.
DEFAULT_ALIAS = "default"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Facts about the served model that routes need."""

    name: str
    """Its name in the API."""
    tokenizer: Tokenizer
    vocab_size: int
    eos_ids: frozenset[int]
    created: int
    """Start of the server, as Unix time in seconds."""
    system_fingerprint: str
    """Unchanged while equal seeds are expected to give equal completions."""
    allow_logprobs: bool
    """The flag enable_chosen_logprobs."""
    max_top_logprobs: int
    """The flag max_topk_logprobs."""
    logprobs_mode: LogprobsMode = "raw"
    """The flag logprobs_mode."""
    find_tools: Callable[[], ToolSupport] = lambda: NO_TOOLS_IN_TEMPLATE
    """Returns `tools`; the first call may load the chat template."""
    rl: bool = False
    """The flag rl: answers name the weights that their tokens are from."""
    model_flag: str | None = None
    """The flag model= as given, a path or repository id; also accepted as the model's name. None: not given."""

    @property
    def tools(self) -> ToolSupport:
        return self.find_tools()

    def check_name(self, name: str) -> None:
        """Raises ModelNotFound unless `name` is the served model's name or another that is accepted for it."""
        if name not in (self.name, DEFAULT_ALIAS, self.model_flag):
            raise ModelNotFound(name)
