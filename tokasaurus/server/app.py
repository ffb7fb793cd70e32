"""The server process: serves HTTP, exchanges messages with the managers over channels, and drains before it exits."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import resource
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from functools import cache, partial, reduce
from types import FrameType
from typing import Any, cast

import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from tokasaurus import __version__
from tokasaurus.addresses import url_of
from tokasaurus.checkpoint import Checkpoint, UpdateChecks
from tokasaurus.config import ServerConfig
from tokasaurus.flags import split_list
from tokasaurus.messages.channel import Sender
from tokasaurus.messages.commands import Held
from tokasaurus.messages.generation import LogprobsMode
from tokasaurus.messages.status import (
    STOP_AT_ONCE,
    Failed,
    FlagRefused,
    PhaseDone,
    Predecessors,
    Ready,
    ServerTotals,
    UserError,
)
from tokasaurus.monitoring.cores import lower_thread_priority
from tokasaurus.monitoring.metrics import LoopLag
from tokasaurus.monitoring.request_spans import RequestTracer
from tokasaurus.monitoring.shortage import describe_shortage
from tokasaurus.server.access import (
    AllowedHostsMiddleware,
    ApiKey,
    ApiKeyMiddleware,
    CrossSiteMiddleware,
    RequestIdMiddleware,
    allowed_hosts,
    allowed_origins,
    read_api_keys,
)
from tokasaurus.server.answers import AnswersMiddleware, Routes, SpansMiddleware
from tokasaurus.server.compressed_bodies import CompressedBodyMiddleware
from tokasaurus.server.connections.protocol import ConnectionProtocol, watch_for_lost_peers
from tokasaurus.server.connections.table import ConnectionTable
from tokasaurus.server.dialects import adapter_loads, messages, responses, sglang_rollouts, vllm_rollouts
from tokasaurus.server.dialects.messages import MessagesErrorsMiddleware
from tokasaurus.server.endpoints import ALL_ENDPOINTS
from tokasaurus.server.engine_client.client import EngineClient
from tokasaurus.server.engine_client.control import states_alone
from tokasaurus.server.engine_client.limits import QueueLimits
from tokasaurus.server.errors import StorageFailed, StorageIsFull, add_error_handlers, error_response
from tokasaurus.server.grammars.validator import GrammarChecker
from tokasaurus.server.jobs.open_bulk import OpenBulks
from tokasaurus.server.jobs.service import BatchService
from tokasaurus.server.jobs.store.data_dir import StorageFull, StoreError
from tokasaurus.server.jobs.store.store import Store, opened_data_dir
from tokasaurus.server.live import LiveFeed
from tokasaurus.server.openapi import DescribedApp
from tokasaurus.server.paths import PathMiddleware, paths_of
from tokasaurus.server.recording import Recording, opened_recording
from tokasaurus.server.resources import BodyBytes, TextThreads, batch_limits, collect_garbage_when_idle
from tokasaurus.server.routes import batches as batch_routes
from tokasaurus.server.routes import bulk, files, generation, health, pages
from tokasaurus.server.routes import model as model_routes
from tokasaurus.server.served_model import ServedModel
from tokasaurus.server.state import HeadMiddleware, ServerState
from tokasaurus.server.templates.request_templates import RequestTemplates
from tokasaurus.server.tools.support import find_tool_support
from tokasaurus.text.tokenizer import Tokenizer
from tokasaurus.workers import num_replicas

logger = logging.getLogger(__name__)

SERVED_ROUTES = (generation, messages, responses, bulk, files, batch_routes, model_routes, health, pages)
"""Modules with a router, in the order of /openapi.json."""
ROLLOUT_ROUTES = (vllm_rollouts, sglang_rollouts, adapter_loads)
"""Served with rl=T."""

# How long the requests that are open after draining have to end with an error.
GRACE_S = 2
# Longest wait until the launcher has read the last message.
STATUS_S = 1.0
LISTEN_BACKLOG = 4096
_TICKS_PER_SWEEP = 10
# For pages of the flag cors_origins. No credentials: the server has no cookies, and scripts add keys themselves.
CORS_RULES: Mapping[str, Any] = {
    "allow_methods": ("*",),
    "allow_headers": ("*",),
    "allow_private_network": True,
    "expose_headers": ("X-Request-Id", "Retry-After", "X-Should-Retry"),
}


def run_server(
    config: ServerConfig,
    checkpoint: Checkpoint,
    listener: socket.socket,
    launcher: socket.socket,
    predecessors: Predecessors,
    status: Sender[PhaseDone | Ready | Held | ServerTotals | Failed],
) -> None:
    """Entry of the server process: serve on the bound `listener` until SIGTERM. Call from the main thread.

    launcher: hands over the channels of each replica, see `EngineClient`. predecessors: servers that have died, in
    whose place this one goes on; `status` gets what the next one will need. Sends Ready("server") to `status` when
    every replica is up and the chat template is loaded; generation routes answer 503 until the replicas are up. SIGTERM
    drains (see `HttpServer`); at the end it sends ServerTotals. Raises UserError.
    """
    api_keys = read_api_keys(config.api_key, config.api_keys_file)
    _listen(listener, config)
    started = time.perf_counter()
    model = load_served_model(config, checkpoint)
    if twice := [name for name in config.lora or () if model.is_own(name)]:
        raise FlagRefused(f"lora: {twice[0]!r} is a name of the model itself: the adapter needs another one")
    status.send(PhaseDone("server", "load tokenizer", time.perf_counter() - started))
    broken: list[Exception] = []

    def stop_broken(error: Exception) -> None:
        broken.append(error)
        http_server.should_exit = True

    parts = {"engine", "chat template"}
    """What a client's first chat would wait for."""
    lock = threading.Lock()

    def note_part(part: str) -> None:
        with lock:
            is_last = parts == {part}
            parts.discard(part)
        if is_last:
            status.send(Ready("server"))

    def load_chat_template() -> None:
        lower_thread_priority()  # the engine is starting at the same time
        started = time.perf_counter()
        try:
            model.find_tools()
        except UserError as error:
            stop_broken(error)
        except Exception as error:
            shortage = describe_shortage(error)
            if shortage is None:
                note_part("chat template")  # completions need none
                raise
            stop_broken(UserError(shortage))
        else:
            status.send(PhaseDone("server", "chat template", time.perf_counter() - started))
            note_part("chat template")

    engine = EngineClient(
        launcher,
        num_replicas(config),
        on_ready=lambda: note_part("engine"),
        on_broken=stop_broken,
        queue_limits=QueueLimits(config.max_queued_requests, config.max_queued_sequences, config.max_queued_tokens),
        while_restarting=config.while_restarting,
        check_update=UpdateChecks(checkpoint, config).check if config.rl else states_alone,
        logged_model=model.name if config.request_log else None,
        predecessors=predecessors,
        tell_held=status.send,
    )
    connections = ConnectionTable(config)
    hosts = allowed_hosts(config.host if config.unix_socket is None else None, config.allowed_hosts)
    # In the background: it takes longer than everything else here, and completions do not need it.
    threading.Thread(target=load_chat_template, name="chat template", daemon=True).start()
    collect_garbage_when_idle(lambda: engine.num_pending_requests == 0)
    with (
        opened_recording(config.record) as recording,
        opened_data_dir(config, url_of(listener)) as store,
    ):
        app = create_app(model, engine, api_keys, hosts, store, config, recording)
        http_server = HttpServer(http_config(app, connections), engine, connections)
        http_server.run(sockets=[listener])
    status.send(engine.calls.totals())
    status.flush(STATUS_S)
    if broken and isinstance(broken[0], UserError):
        raise broken[0]
    if broken:
        raise RuntimeError(f"cannot read a message from the engine: {broken[0]!r}") from broken[0]


def _listen(listener: socket.socket, config: ServerConfig) -> None:
    """From now on clients wait instead of being refused. Raises UserError."""
    try:
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:  # another process also bound the port and listened first
        raise UserError(f"port={config.port}: cannot listen: {error.strerror}; choose another port=") from None
    _allow_many_connections()
    if listener.family != socket.AF_UNIX:  # its clients are on this machine
        watch_for_lost_peers(listener, config.write_timeout_seconds)


def _allow_many_connections() -> None:
    """Raise the limit of open files: each connection is one, and the usual soft limit of 1,024 would drop the rest."""
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # some systems refuse their own hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def create_app(
    model: ServedModel,
    engine: EngineClient,
    api_keys: Sequence[ApiKey] = (),
    hosts: frozenset[str] | None = None,
    store: Store | None = None,
    config: ServerConfig | None = None,
    recording: Recording | None = None,
) -> ASGIApp:
    """The whole HTTP interface. During the app's lifespan, `engine` receives on the running event loop.

    api_keys: of which clients must send one; empty: no key. hosts: names that requests may be sent to; None: any.
    store: for files and batches; None serves none. config: None for the defaults. recording: gets the events
    of GET /live.
    """
    config = config or ServerConfig()
    state = ServerState(
        model,
        engine,
        grammars=GrammarChecker(model),
        text_threads=TextThreads(),
        body_bytes=BodyBytes(max(config.max_body_bytes_in_all, config.max_request_bytes or 0)),
        loop_lag=LoopLag(),
        config=config,
    )

    endpoint = config.otel_endpoint
    operations = {path: one.operation for path, one in ALL_ENDPOINTS.items()}
    tracer = None if endpoint is None else RequestTracer(endpoint, model.name, __version__, operations)
    batches = None if store is None else BatchService(state, store, batch_limits(config))
    bulks = OpenBulks()
    if len(names := {key.name for key in api_keys}) > 1:  # a single one tells no client from another
        engine.calls.tokens_by_key = dict.fromkeys(sorted(names), (0, 0))
    feed = LiveFeed(state, batches, bulks, recording)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        with engine.listening(), state.loop_lag.measuring():
            async with nullcontext() if batches is None else batches.running(), feed.running():
                yield
        if tracer is not None:
            await asyncio.to_thread(tracer.close)
        await state.grammars.close()
        state.text_threads.close()
        if model.request_templates is not None:
            model.request_templates.close()

    app = DescribedApp(
        title="Tokasaurus",
        version=__version__,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # pages of FastAPI's, which load scripts from another host
        redoc_url=None,
    )
    app.state.server = state
    app.state.batches = batches
    app.state.open_bulks = bulks
    app.state.live = feed
    add_error_handlers(app)
    app.add_exception_handler(StoreError, _on_store_error)
    for routes in (*SERVED_ROUTES, *ROLLOUT_ROUTES) if model.rl else SERVED_ROUTES:
        # Not include_router, which builds each route again at the first request of the app: a fifth of a second.
        app.router.routes.extend(routes.router.routes)
    origins = allowed_origins(config.cors_origins)
    known_routes = Routes(app.router.routes)
    with_keys = partial(ApiKeyMiddleware, keys=list(api_keys), cache_salt_per_key=config.cache_salt_per_key)
    # From the outside in. Not by add_middleware: the answer to an internal error would lack the id and CORS headers.
    layers: list[Callable[[ASGIApp], ASGIApp]] = [
        RequestIdMiddleware,
        HeadMiddleware,
        # before all that looks at the path
        partial(PathMiddleware, routes=paths_of(app.router.routes)),
        partial(AnswersMiddleware, routes=known_routes, counts=state.answers),
        *([] if tracer is None else [partial(SpansMiddleware, routes=known_routes, tracer=tracer)]),
        MessagesErrorsMiddleware,
        partial(CrossSiteMiddleware, origins=origins),
        # before the key: browsers ask without one
        *([partial(CORSMiddleware, **CORS_RULES, allow_origins=origins)] if origins else []),
        *([] if hosts is None else [partial(AllowedHostsMiddleware, names=hosts)]),
        *([with_keys] if api_keys else []),
        CompressedBodyMiddleware,
    ]
    return reduce(lambda inner, layer: layer(inner), reversed(layers), cast(ASGIApp, app))


async def _on_store_error(_request: Request, error: Exception) -> Response:
    logger.error("files and batches: %s", error)
    return error_response((StorageIsFull if isinstance(error, StorageFull) else StorageFailed)(str(error)))


def load_served_model(config: ServerConfig, checkpoint: Checkpoint) -> ServedModel:
    """Loads the tokenizer; the chat template is loaded when first used. Raises TokenizerError."""
    tokenizer = Tokenizer.load(checkpoint.tokenizer_directory)
    request_templates = RequestTemplates(tokenizer, config.tool_call_format) if config.request_chat_template else None
    formats = (config.dtype, config.kv_cache_dtype, config.cpu_isa, config.quantization, config.quantized_compute)
    identity: Sequence[object] = (__version__, checkpoint.name, *formats, config.device, config.attention_backend)
    identity = (*identity, checkpoint.default_sampling)
    return ServedModel(
        name=checkpoint.name if config.served_model_name is None else config.served_model_name,
        tokenizer=tokenizer,
        vocab_size=checkpoint.info.vocab_size,
        eos_ids=frozenset(checkpoint.info.eos_ids),
        created=int(time.time()),
        system_fingerprint=f"fp_{hashlib.sha256(repr(identity).encode()).hexdigest()[:10]}",
        max_topk_logprobs=config.max_topk_logprobs,
        logprobs_mode=cast(LogprobsMode, config.logprobs_mode),  # the flag has no other values
        request_templates=request_templates,
        find_tools=cache(lambda: find_tool_support(tokenizer, config.tool_call_format)),
        rl=config.rl,
        model_flag=config.model,
        model_aliases=tuple(split_list(config.model_aliases)),
        default_sampling=checkpoint.default_sampling,
        digest=hashlib.sha256(
            repr((checkpoint.files, checkpoint.info, checkpoint.tokenizer_directory)).encode()
        ).hexdigest(),
        source=checkpoint.name,
        pooling=checkpoint.info.pooling,
    )


def http_config(app: ASGIApp, connections: ConnectionTable) -> uvicorn.Config:
    """How uvicorn serves `app`. connections: empty; also needed by `HttpServer`."""
    log_level = connections.config.log_level
    protocol = partial(ConnectionProtocol, connections)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=cast(type[asyncio.Protocol], protocol),  # uvicorn only calls it
        ws="none",
        lifespan="on",
        log_config=None,
        log_level=log_level,
        # one line per request is costly and useless with thousands of requests
        access_log=log_level == "debug",
        backlog=LISTEN_BACKLOG,
        timeout_graceful_shutdown=GRACE_S,
    )
    if log_level == "info":  # at this level it tells its own start and end, which the launcher does
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    return config


class HttpServer(uvicorn.Server):
    """SIGTERM drains: new work is refused, and the server exits when its open requests and running lines have finished.

    Requests still open after drain_seconds, while the engine is paused, or when STOP_AT_ONCE arrives, end with an
    error; lines of batches go on at the next start.
    """

    def __init__(self, config: uvicorn.Config, engine: EngineClient, connections: ConnectionTable) -> None:
        super().__init__(config)
        self._engine = engine
        self._connections = connections
        self._drains_until_s: float | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's: that one would re-raise the signals at the end, and also handle Ctrl-C."""
        if threading.current_thread() is not threading.main_thread():  # signals go to the main thread only
            yield
            return
        loop = asyncio.get_running_loop()

        def on_loop(call: Callable[..., None], *args: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed: the server has ended
                loop.call_soon_threadsafe(call, *args)

        signal.signal(signal.SIGTERM, lambda *_: on_loop(self.drain))
        signal.signal(STOP_AT_ONCE, lambda *signaled: on_loop(self.handle_exit, *signaled))
        yield

    def drain(self) -> None:
        """Refuse new work from now on, and exit soon."""
        self._engine.begin_drain("it was stopped (SIGTERM or Ctrl-C)")
        if self._drains_until_s is None:
            self._drains_until_s = time.monotonic() + self._connections.config.drain_seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a stop signal as uvicorn does; clients that watch the server are told to leave first."""
        self._engine.begin_drain("one of its processes has failed")
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second; true ends the server."""
        if counter % _TICKS_PER_SWEEP == 0:
            self._connections.sweep(time.monotonic())
        if self._drains_until_s is not None:
            # Lines of batches have no HTTP request.
            has_open_requests = len(self.server_state.tasks) > 0 or self._engine.num_pending_requests > 0
            # While it drains, no client can resume a paused engine.
            is_in_vain = self._engine.control.waits_to_resume
            self.should_exit |= not has_open_requests or is_in_vain or time.monotonic() >= self._drains_until_s
        return await super().on_tick(counter)
