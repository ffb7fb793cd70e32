"""Paths as clients write them → the paths of routes; and what clients may use in place of other servers' paths."""

import difflib
import re
from collections.abc import Iterable, Sequence

from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

_SLASHES = re.compile("/{2,}")
_VERSION = "/v1"
_SAME = {"/v2/rerank": "/v1/rerank"}
"""Path of a newer form of a route that is the same here."""


def squeeze_slashes(path: str) -> str:
    """//v1//models/ -> /v1/models."""
    return _SLASHES.sub("/", path).rstrip("/") or "/"


def paths_of(routes: Iterable[BaseRoute]) -> list[str]:
    """The paths of an application's routes, with names of parameters in braces."""
    return [route.path for route in routes if isinstance(route, Route)]


def methods_at(routes: Iterable[BaseRoute], scope: Scope) -> list[str]:
    """The methods that an application's routes have for the path of a request, sorted."""
    there = (route for route in routes if isinstance(route, Route) and route.matches(scope)[0] != Match.NONE)
    return sorted({method for route in there for method in route.methods or ()})


class PathMiddleware:
    """Gives each request the path of the route that its client means.

    A base URL may end in a slash, or have /v1 or not, and clients add theirs: several slashes count as one, the last
    one is dropped, and /v1 may be left out, be there twice, or precede a route without it. There is no redirect, after
    which many clients send no body. Must be outside of what checks paths, so that all of it sees the same path.
    """

    def __init__(self, app: ASGIApp, routes: Iterable[str]) -> None:
        """routes: paths of all routes."""
        self._app = app
        known = [path.split("/") for path in routes]
        unversioned = {names[1] for names in known if names[1] != "v1"}
        versioned = {names[2] for names in known if names[1] == "v1"}
        # Names with and without /v1 are two routes, of two servers' clients.
        self._unversioned = unversioned - versioned
        """First names of the paths without /v1."""
        self._versioned = versioned - unversioned
        """First names of the paths with it, after /v1."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = self._route(scope["path"])
            if path != scope["path"]:
                scope = {**scope, "path": path}
        await self._app(scope, receive, send)

    def _route(self, path: str) -> str:
        if not path.startswith("/"):  # OPTIONS has a *, for the whole server
            return path
        path = squeeze_slashes(path)
        path = _SAME.get(path, path)
        while path.startswith(f"{_VERSION}{_VERSION}/"):
            path = path.removeprefix(_VERSION)
        _, first, *rest = path.split("/")
        if first in self._versioned:
            return _VERSION + path
        return path.removeprefix(_VERSION) if first == "v1" and rest and rest[0] in self._unversioned else path


_CHAT, _COMPLETIONS, _MODELS = "POST /v1/chat/completions", "POST /v1/completions", "GET /v1/models"
_EMBEDDINGS = "POST /v1/embeddings"
_CHAT_OF_BASE_URL = f"use {_CHAT} of OpenAI's API, with the base URL http://HOST:PORT/v1"
_TEXT_ONLY = f"this server generates text only: use a server of such models; text is at {_CHAT}"

OTHER_SERVERS: tuple[tuple[str, str, str], ...] = (
    (
        "OpenAI: embeddings",
        "(v1/)?(engines/[^/]+/embeddings|embedding)",
        f"use {_EMBEDDINGS}",
    ),
    ("OpenAI: speech, images, video", "(v1/)?(audio|images|videos|realtime)(/.*)?", _TEXT_ONLY),
    (
        "OpenAI: moderations",
        "(v1/)?moderations",
        f"ask the model for a verdict by {_CHAT}, whose response_format enforces a schema",
    ),
    (
        "OpenAI: fine-tuning",
        "(v1/)?fine[_-]tun(ing|es)(/.*)?",
        "this server trains no models; a server with rl=T takes new weights from a trainer",
    ),
    ("OpenAI: uploads in parts", "(v1/)?uploads(/.*)?", "POST /v1/files takes a whole file"),
    (
        "OpenAI: what it stores or evaluates",
        "(v1/)?(assistants|threads|vector_stores|conversations|containers|evals|chatkit|organization)(/.*)?",
        f"this server keeps no state but files and batches: send the history to {_CHAT}",
    ),
    (
        "OpenAI: compaction",
        "(v1/)?responses/compact",
        "this server compacts no conversations: send the items that matter, or a summary of them",
    ),
    ("OpenAI: older routes", "(v1/)?(edits|engines(/.*)?)", f"use {_CHAT}; {_MODELS} lists what is served"),
    ("Azure", "openai/.*", _CHAT_OF_BASE_URL),
    ("Anthropic: batches", "(v1/)?messages/batches(/.*)?", "use POST /v1/bulk, or POST /v1/batches of OpenAI's API"),
    ("Anthropic: older route", "(v1/)?complete", f"use {_COMPLETIONS}"),
    ("Gemini", "v1beta/.*", _CHAT_OF_BASE_URL),
    ("Cohere", "v[12]/(chat|generate)", _CHAT_OF_BASE_URL),
    ("Ollama: chat", "(v1/)?api/chat", f"this server has OpenAI's API, not Ollama's: use {_CHAT}"),
    ("Ollama: completion", "(v1/)?api/generate", f"this server has OpenAI's API, not Ollama's: use {_COMPLETIONS}"),
    ("Ollama: models", "(v1/)?api/(tags|show|ps)", f"this server has OpenAI's API, not Ollama's: use {_MODELS}"),
    (
        "Ollama: embeddings",
        "(v1/)?api/embed(dings)?",
        f"this server has OpenAI's API, not Ollama's: use {_EMBEDDINGS}",
    ),
    ("Ollama: version", "(v1/)?api/version", "use GET /version"),
    (
        "Ollama: changes of models",
        "(v1/)?api/(pull|push|create|copy|delete|blobs(/.*)?)",
        "this server serves one model, which its flag model= names",
    ),
    ("Open WebUI, LM Studio, OpenRouter", "api/v[01]/.*", _CHAT_OF_BASE_URL),
    (
        "fill in the middle",
        "(v1/)?(fim/completions|infill)",
        f"use {_COMPLETIONS}, with the model's own tokens for prefix, suffix and middle in the prompt",
    ),
    (
        "rerank, score, classify, pool",
        "(v[12]/)?(reranking|predict|embed|embed_sparse)",
        f"use {_EMBEDDINGS}, POST /v1/rerank or POST /classify",
    ),
    ("llama.cpp: completion", "completion", f"use {_COMPLETIONS}"),
    ("llama.cpp: server", "(props|slots|lora-adapters)(/.*)?", f"use {_MODELS}, and GET /metrics"),
    (
        "llama.cpp, vLLM: template",
        "(apply-template|(v1/)?chat/completions/render)",
        "POST /tokenize shows the token ids of messages, and POST /detokenize their text",
    ),
    ("TGI", "(generate_stream|info)", f"use {_CHAT} with stream=true, and {_MODELS}"),
    ("SageMaker", "invocations", f"use {_CHAT}"),
    (
        "SGLang, vLLM: profiler",
        "(start|stop)_profile",
        "this server has no profiler that a client starts: its flag trace=FILE writes what each process did at which "
        "time, and GET /metrics has the times of requests",
    ),
)
"""(whose path it is, regular expression of the path without its first slash, what to use)"""

_FILES = "this server takes weights from files only: "
TRAINERS: tuple[tuple[str, str, str, str], ...] = (
    (
        "weights through NCCL, CUDA IPC or a body",
        "(init_weights_update_group|destroy_weights_update_group|update_weights_from_(tensor|distributed|ipc)|"
        "(init_weights_send_group_for|send_weights_to)_remote_instance|pull_weights|(begin|end)_weight_update|"
        "start_draft_weight_update|init_communicator|update_named_param|batch_update_named_params|close_communicator)",
        _FILES,
        "write them to a directory, such as one in /dev/shm, and name it in POST /update_weights_from_disk",
    ),
    (
        "checks and names of weights",
        "(weights?_checker|get_weights_by_name|weight_info|update_weight_version)",
        "no tensor is given out or changed alone; an update is refused unless all of its tensors fit, and ",
        "GET /get_weight_version tells which weights answer",
    ),
    ("SGLang: sessions", "(open|close)_session", "a session need not be opened: ", "the header X-Session-ID names it"),
    ("vLLM: aborts", "abort_requests", "", "use POST /abort_request, with a rid or abort_all"),
)
"""(whose path it is, regular expression, what is always so, what routes for roll-outs do, which rl=T serves)"""

ROLLOUTS = (
    "(generate|inference/v1/generate|(get_)?model_info|(get_)?server_info|get_world_size|get_weight_version|"
    "flush_cache|reset_prefix_cache|collective_rpc|finish_session|pause|resume|is_paused|sleep|wake_up|is_sleeping|"
    "pause_generation|continue_generation|abort_request|update_weights|update_weights_from_disk|"
    "init_weight_transfer_engine|(start|finish)_weight_update|(release|resume)_memory_occupation|health_generate|"
    "v1/loads|((skyrl/)?v1/)?load_lora_adapter|(v1/)?unload_lora_adapter|load_lora_adapter_from_tensors)"
)
"""Regular expression of the paths of routes for roll-outs."""

_OTHERS = [(re.compile(pattern), advice) for _, pattern, advice in OTHER_SERVERS]
_TRAINERS = [(re.compile(pattern), always, with_rl) for _, pattern, always, with_rl in TRAINERS]
_ROLLOUTS = re.compile(ROLLOUTS)
_SERVED_WITH_RL = "/inference/v1/generate"
_LONGEST_PATH = 100


def of_other_server(path: str, known: Sequence[str]) -> str | None:
    """What to use in place of another server's path; None if it is not known as one. known: paths of the routes."""
    name = path.removeprefix("/")
    for pattern, advice in _OTHERS:
        if pattern.fullmatch(name):
            return advice
    needs_flag = "" if _SERVED_WITH_RL in known else " (with the flag rl=T)"
    for pattern, always, with_rl in _TRAINERS:
        if pattern.fullmatch(name):
            return f"{always}{with_rl}{needs_flag}"
    is_off = bool(needs_flag) and _ROLLOUTS.fullmatch(name)
    return "it is one of the routes for roll-outs, which the flag rl=T serves" if is_off else None


def closest_path(path: str, known: Sequence[str]) -> str | None:
    """The question whether another path was meant; None if none is close. known: paths of the routes."""
    closest = difflib.get_close_matches(path, known, n=1, cutoff=0.8) if len(path) <= _LONGEST_PATH else []
    return f"did you mean {closest[0]}?" if closest else None
