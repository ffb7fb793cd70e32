"""Commands that change a running engine, from the server to each manager and, where they concern the model, on to its
workers; and their answers."""

from dataclasses import dataclass

FIRST_VERSION = "0"
"""Name of the weights that the checkpoint has."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Run no steps until Resume. Done when no step runs: every sequence then waits, with the tokens that it has."""

    command_id: int
    aborts: bool
    """End all sequences with the tokens that they have, for the reason "abort"."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on: waiting sequences are admitted. Does nothing if the engine is not paused."""

    command_id: int


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """End these requests with the tokens that they have, for the reason "abort"; all others go on."""

    command_id: int
    request_ids: tuple[str, ...]
    """Ids that are unknown, or whose sequences have all finished, are ignored."""
    only_waiting: bool = False
    """Requests with a running sequence go on, too."""


@dataclass(frozen=True, slots=True)
class ClearCache:
    """Forget the KV of all prefixes that no running sequence uses."""

    command_id: int


@dataclass(frozen=True, slots=True)
class FileState:
    """What tells whether a file of weights is still the same."""

    name: str
    header: str
    """Digest of the header, which names the tensors; of a GGUF file, of its beginning."""
    changed_ns: int
    """Time of its last change, in nanoseconds."""


@dataclass(frozen=True, slots=True)
class UpdateWeights:
    """Replace weights in place. The engine must be paused."""

    command_id: int
    directory: str
    """Contains safetensors files with the model's tensors."""
    version: str
    """Name of the weights from then on."""
    is_partial: bool = False
    """Tensors may be missing: they stay as they are."""
    clears_cache: bool = True
    """Forget the KV of all prefixes, and of the prefixes that waiting sequences will need."""
    number: int = 0
    """Number of the update among the server's, from 1 on: later updates have higher numbers."""
    files: tuple[FileState, ...] = ()
    """Only these may be read, also when the weights are read again later; () if any may."""

    def replaces(self, earlier: "UpdateWeights") -> bool:
        """Whether nothing of an earlier update is left after this one, as far as the files tell."""
        if not self.is_partial:
            return True
        headers = {file.name: file.header for file in self.files}
        is_known = self.directory == earlier.directory and earlier.is_partial and bool(earlier.files)
        return is_known and all(headers.get(file.name) == file.header for file in earlier.files)


def add_update(updates: list[UpdateWeights], update: UpdateWeights) -> None:
    """Add an update to the list that leads from the checkpoint's weights to the newest, and drop what it replaces."""
    updates[:] = [*(earlier for earlier in updates if not update.replaces(earlier)), update]


WeightVersions = tuple[tuple[int, str], ...]
"""(index of the first token, version) of each span of a completion's tokens, in order; the first index is 0."""

FIRST_VERSIONS: WeightVersions = ((0, FIRST_VERSION),)


@dataclass(frozen=True, slots=True)
class Sleep:
    """Give memory back to the system. The engine must be paused; all cached KV is lost."""

    command_id: int
    with_weights: bool
    """Give the weights' memory back, too. They are read from their files again."""


@dataclass(frozen=True, slots=True)
class Wake:
    """Take the memory again, with the newest weights. Does nothing unless the engine sleeps, or lacks weights."""

    command_id: int
    may_lack_weights: bool = False
    """If the weights cannot be read again, wake without: a whole update or another Wake must come before a step."""


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Load an adapter, which requests name by its digest. Steps go on. Done at once if it is loaded."""

    command_id: int
    digest: str
    """Of checkpoint/adapters."""
    directory: str
    """Contains its two files, which do not change."""


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Forget an adapter, which no request uses any more. An unknown one is ignored."""

    command_id: int
    digest: str


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter that requests may ask for."""

    name: str
    digest: str
    directory: str
    """As of LoadAdapter: the server's own copy."""
    source: str
    """Where the client had it, as it was written; "" if it came in a request."""
    version: str
    """What answers tell as the version of their weights."""


def adapter_version(name: str, digest: str) -> str:
    """NamedAdapter.version of one that requests name."""
    return f"{name}@{digest[:12]}"


BASE_NAME = ""
"""NamedAdapter.name of the one that requests for the model itself get: a weight update has put it there."""


@dataclass(frozen=True, slots=True)
class StartedUpdate:
    """Weights that come in parts have begun to come."""

    version: str
    """Name of the weights with all parts."""
    has_paused: bool
    """The engine was not paused before."""


@dataclass(frozen=True, slots=True)
class Held:
    """What clients have asked of the engine that holds until they ask for something else. The server tells the launcher
    of each change, for the server that is started if this one dies."""

    is_paused: bool = False
    sleep: Sleep | None = None
    """The command with which the engine was put to sleep; None while it is awake."""
    was_asleep: bool = False
    """It is awake, and still paused until it may go on."""
    pauses_after_sleep: bool = False
    """The engine was paused before it slept."""
    refuses_asleep: bool = False
    """New requests are refused instead of waiting while the engine sleeps."""
    started_update: StartedUpdate | None = None
    adapters: tuple[NamedAdapter, ...] = ()
    """No two have the same name."""


NOTHING_HELD = Held()

WorkerCommand = UpdateWeights | Sleep | Wake | LoadAdapter | UnloadAdapter
"""What a manager passes on to its workers."""

EngineCommand = Pause | Resume | AbortRequests | ClearCache | WorkerCommand


@dataclass(frozen=True, slots=True)
class CommandDone:
    """The command has been carried out, or refused without any change."""

    command_id: int
    error: str = ""
    """Why it was refused, in one line; "" if it was carried out."""
