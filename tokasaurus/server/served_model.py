"""The served model as the API presents it."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from tokasaurus.checkpoint.pooling import PoolingInfo
from tokasaurus.messages.generation import LogprobsMode
from tokasaurus.messages.sampling import NEUTRAL, SamplingParams
from tokasaurus.server.errors import ModelNotFound, WrongTask
from tokasaurus.server.paths import squeeze_slashes
from tokasaurus.server.templates.request_templates import ChatTemplate, RequestTemplates
from tokasaurus.server.tools.support import NO_TOOLS_IN_TEMPLATE, ToolSupport
from tokasaurus.text.tokenizer import Tokenizer

# Also accepted as the served model's name. Hugging Face's clients send the last two where no model is named.
ANY_NAME = "*"
"""Among the aliases: a request may name any model."""
ALWAYS_ACCEPTED = ("default", "tgi", "dummy")
TASKS: Mapping[str, str] = {
    "generate": "POST /v1/chat/completions",
    "embed": "POST /v1/embeddings",
    "score": "POST /v1/rerank or /v1/score",
    "classify": "POST /classify",
    "reward": "POST /classify or /pooling",
}
"""What a model may do, and the path for it."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Facts about the served model that routes need. A field with the name of a flag has its value."""

    name: str
    """Its name in the API."""
    tokenizer: Tokenizer
    vocab_size: int
    eos_ids: frozenset[int]
    created: int
    """Start of the server, as Unix time in seconds."""
    system_fingerprint: str
    """Unchanged while equal seeds are expected to give equal completions."""
    max_topk_logprobs: int
    logprobs_mode: LogprobsMode
    rl: bool
    """Answers name the weights that their tokens are from."""
    model_flag: str | None
    """The flag model= as given, a path or repository id; also accepted as the model's name. None: not given."""
    model_aliases: tuple[str, ...]
    """Further names of the model, in their order in the flag; with *, any name is accepted."""
    default_sampling: SamplingParams = NEUTRAL
    """For bodies that do not say how their tokens are sampled."""
    find_tools: Callable[[], ToolSupport] = lambda: NO_TOOLS_IN_TEMPLATE
    """How the model's own chat template supports tools; the first call may load it."""
    request_templates: RequestTemplates | None = None
    """Renders the chat templates of requests; None: they may bring none (the flag request_chat_template)."""
    digest: str = ""
    """Digest of everything else that decides tokens: weight files, the configuration as it was read, the tokenizer."""
    source: str | None = None
    """The checkpoint's own name, whatever it is served as; None: `name`."""
    pooling: PoolingInfo | None = None
    """What the model makes of a text in place of new tokens; None: it generates."""

    @property
    def template(self) -> ChatTemplate:
        """The model's own chat template."""
        return ChatTemplate(self.tokenizer.template_text, self.find_tools(), self.tokenizer.render_chat)

    @property
    def listed_names(self) -> list[str]:
        """Its name and its aliases."""
        return [name for name in dict.fromkeys((self.name, *self.model_aliases)) if name != ANY_NAME]

    def is_own(self, name: str) -> bool:
        """Whether it is the model's name, or one that is always accepted for it, so that no adapter may have it."""
        return name in self._accepted_names

    def check_name(self, name: str | None) -> None:
        """Raises ModelNotFound unless requests may call the served model by `name`. An adapter's name is no name of the
        model: see ServerState.adapter_for.

        name: None or empty if a request names no model, which is this one."""
        if name and name not in self._accepted_names and ANY_NAME not in self.model_aliases:
            raise ModelNotFound(name)

    def check_task(self, tasks: Collection[str]) -> None:
        """Raises WrongTask unless the model does one of these."""
        own = "generate" if self.pooling is None else self.pooling.task
        if own in tasks:
            return
        wanted = " or ".join(f"task={task}" for task in TASKS if task in tasks)
        raise WrongTask(f"this server has task={own}, use {TASKS[own]}: this path needs a server with {wanted}")

    def name_in_path(self, name: str) -> str:
        """The listed name that `name`, the end of a path, stands for. In paths, several slashes are one, and the last
        one is dropped. Raises ModelNotFound."""
        found = next((one for one in self._accepted_names if squeeze_slashes(f"/{one}") == f"/{name}"), None)
        if found is None and ANY_NAME not in self.model_aliases:
            raise ModelNotFound(name)
        return found if found in self.model_aliases else self.name

    @property
    def _accepted_names(self) -> list[str]:
        flag = self.model_flag
        others = ALWAYS_ACCEPTED if flag is None else (*ALWAYS_ACCEPTED, flag, flag.rstrip("/") or flag)
        return [*self.listed_names, *others]
