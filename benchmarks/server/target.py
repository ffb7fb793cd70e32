"""The server to measure, and its own counters."""

import urllib.error
import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from tokasaurus.commands.bench.client import ServerError


@dataclass(frozen=True, slots=True)
class Target:
    """The server to measure."""

    base_url: str
    """Up to and including /v1."""
    api_key: str

    def counter(self, name: str) -> float:
        """A metric of the server without labels, or summed over replicas. Raises ServerError."""
        value = read_counters(self.base_url, self.api_key).get((name, ""))
        if value is None:
            raise ServerError(f"no counter {name}: is it a server of this project, and ready?")
        return value


def read_counters(base_url: str, api_key: str = "none") -> dict[tuple[str, str], float]:
    """Values of the server's metrics by name and phase ("" for metrics without one), summed over replicas.

    Raises ServerError."""
    url = base_url.removesuffix("/v1") + "/metrics"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {api_key}"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read().decode()
    except (urllib.error.URLError, TimeoutError) as error:
        raise ServerError(f"{url}: {error}") from error
    counters: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, sample.labels.get("phase", ""))
            counters[key] = counters.get(key, 0.0) + sample.value
    return counters
