"""A Ray cluster of two nodes on this machine, and the processes of its actors."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import httpx
import psutil

OBJECT_STORE_BYTES = 100 << 20
TINY_FLAGS = {
    **{"dtype": "float32", "device": "cpu", "cpu_isa": "torch"},
    **{"kv_cache_num_tokens": 8192, "max_seqs_per_forward": 16},
}
"""For a tiny model."""


@contextmanager
def two_nodes(cpus_of_each: int = 4) -> Iterator[Path]:
    """Within the context, this process is a driver of the cluster. Yields the directory of its logs."""
    # Serve kills proxies that do not start within 5 s, as on a machine that does other work.
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120"}
    with mock.patch.dict(os.environ, variables):
        import ray
        from ray.cluster_utils import Cluster

        cluster = Cluster()
        memory = OBJECT_STORE_BYTES
        try:
            head = cluster.add_node(num_cpus=cpus_of_each, object_store_memory=memory, include_dashboard=False)
            cluster.add_node(num_cpus=cpus_of_each, object_store_memory=memory)
            ray.init(address=cluster.address, log_to_driver=False)
            yield Path(head.get_logs_dir_path())
        finally:
            ray.shutdown()
            cluster.shutdown()


def actors(title: str) -> list[psutil.Process]:
    """Processes of this process' cluster that run an actor with this in its title, oldest first."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            shown = " ".join(child.cmdline())
            if shown.startswith("ray::") and title in shown:
                found.append(child)
        except psutil.Error:  # it has ended
            continue
    return sorted(found, key=lambda process: process.create_time())


def family(process: psutil.Process) -> list[int]:
    """Its process id, and those of its descendants."""
    return [process.pid, *(child.pid for child in process.children(recursive=True))]


def num_running(actor: psutil.Process) -> int:
    """Sequences that the engine of an actor runs; 0 if it is not up."""
    try:
        lines = [" ".join(child.cmdline()) for child in actor.children(recursive=True)]
    except psutil.Error:
        return 0
    # The title of the launcher has its flags.
    found = next((match for line in lines if (match := re.search(r"^toka .*unix_socket=(\S+)", line))), None)
    if found is None:
        return 0
    with httpx.Client(transport=httpx.HTTPTransport(uds=found[1]), base_url="http://localhost") as client:
        try:
            text = client.get("/metrics").text
        except httpx.TransportError:
            return 0
    return sum(int(float(value)) for value in re.findall(r"^toka_requests_running\S* (\S+)", text, re.MULTILINE))
