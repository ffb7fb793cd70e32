"""Samples of a server's /metrics."""

from collections.abc import Mapping
from dataclasses import dataclass

import httpx
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Scrape:
    families: list[Metric]

    def value(self, name: str, **labels: str) -> float:
        """Sum of the samples with this name, as the page has it, and these labels; 0 if there is none."""
        return sum(self.by_labels(name, **labels).values())

    def by_labels(self, name: str, **labels: str) -> Mapping[tuple[tuple[str, str], ...], float]:
        """The samples with this name and these labels, by all their labels."""
        return {
            tuple(sample.labels.items()): sample.value
            for family in self.families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        }


def scrape(url: str) -> Scrape:
    text = httpx.get(f"{url}/metrics", timeout=60).raise_for_status().text
    return Scrape(list(text_string_to_metric_families(text)))
