"""The application of Ray Serve: `serve run tokasaurus.ray:app`."""

# No annotations of the future: Serve reads the type of the arguments of `app`.
from collections.abc import Callable, Mapping
from typing import Any

import ray
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from starlette.types import ASGIApp

from tokasaurus.config import ServerConfig
from tokasaurus.ray.ingress import build_ingress
from tokasaurus.ray.placement import STRATEGY, checked_words, place, words_on
from tokasaurus.ray.replica import EngineReplica
from tokasaurus.ray.router import PrefixRouter

DRAIN_S = 600.0
"""Longest time that a replica which is no longer needed has for the requests it runs."""
_MAX_ONGOING = 4096
"""Requests that a replica takes at once: toka's own queue keeps the rest of what it cannot run yet."""
_MAX_ONGOING_OF_INGRESS = 100_000


class AppArguments(BaseModel):
    """The `args` of the application in Serve's YAML."""

    model_config = ConfigDict(extra="forbid")

    flags: dict[str, Any] = Field(default_factory=dict)
    """Flags of `toka`, such as model, tp_size and kv_cache_num_tokens."""
    num_cpus: float | None = Field(default=None, gt=0)
    """CPUs that each replica reserves; without GPUs, its processes that compute divide them into threads. None: one for
    each such process."""


class IngressReplica:
    """The class of the ingress' deployment."""

    def __init__(self, engine: Any) -> None:
        """engine: handle of the deployment `Engine`."""
        self._app = build_ingress(engine)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Serve asks for it once."""
        return self._app


def app(arguments: AppArguments) -> Application:
    """What `serve run tokasaurus.ray:app` deploys: the deployments `Ingress` and `Engine`.

    Serve's YAML sets the rest, such as num_replicas and autoscaling_config. Raises TypeError and ValueError for a wrong
    flag."""
    return build_app(arguments.flags, arguments.num_cpus, PrefixRouter)


def build_app(
    flags: Mapping[str, Any], num_cpus: float | None, router: str | Callable[..., Any], num_replicas: int = 1
) -> Application:
    """The deployments `Ingress` and `Engine`, as `app` returns them.

    router: class of the request router of `Engine`, or its import path. num_replicas: of `Engine`."""
    words = checked_words(flags)
    placement = place(ServerConfig.parse(words), num_cpus, ray.cluster_resources().get("GPU", 0.0))
    engine = serve.deployment(
        EngineReplica,
        name="Engine",
        num_replicas=num_replicas,
        ray_actor_options=placement.actor_options,
        placement_group_bundles=placement.bundles,
        placement_group_strategy=STRATEGY,
        max_ongoing_requests=_MAX_ONGOING,
        graceful_shutdown_timeout_s=DRAIN_S,
        graceful_shutdown_wait_loop_s=1.0,
        request_router_config=RequestRouterConfig(request_router_class=router),
    )
    ingress = serve.deployment(
        serve.ingress()(IngressReplica),
        name="Ingress",
        max_ongoing_requests=_MAX_ONGOING_OF_INGRESS,
        graceful_shutdown_timeout_s=DRAIN_S,
        graceful_shutdown_wait_loop_s=1.0,
    )
    return ingress.bind(engine.bind(words_on(placement, words)))
