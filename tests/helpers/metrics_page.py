"""The reference in docs/metrics.md, made from the metrics themselves."""

import re
from collections.abc import Iterable
from pathlib import Path

from prometheus_client.metrics_core import Metric

from tokasaurus.config import ServerConfig
from tokasaurus.monitoring.metrics import BatchStats, EngineCollector, VllmLabels

PATH = Path(__file__).parents[2] / "docs" / "metrics.md"
HEADING = "## Reference\n"
INTRODUCTION = """
`make reference` makes this part from `tokasaurus/monitoring/metrics.py`, whose texts `/metrics` shows as well; a test
compares the two. Counters end in `_total`; what is not called a histogram is a gauge. Parentheses have the labels
beside `replica`.
"""
LINKS = {
    "Hydragen": "scheduling.md#shared-prefixes-hydragen",
    "lines of batches": "batches.md",
    "a check of the start": "gpu.md#a-start-checks-itself-toka-check",
    "CUDA graph": "gpu.md#cuda-graphs",
    "a route for roll-outs": "rl.md",
    "nobody read its stderr": "#a-log-that-nobody-reads",
}
"""Words of the texts → what they link to."""


def page() -> str:
    """The whole page: its hand-written part as it is, and the reference anew."""
    written, heading, _ = PATH.read_text().partition(HEADING)
    assert heading, f"{PATH} has no heading {HEADING!r}"
    return written + heading + reference()


def reference() -> str:
    """Every sample of a server that serves batches, without and with vLLM's names."""
    collector = EngineCollector(lambda: [], lambda: [], batches=BatchStats(0, 0, 0, 0, False), vllm=VllmLabels(""))
    families = [family for family in collector.collect() if not family.name.startswith("process_")]
    assert all(_is_vllm(family) or family.name.startswith("toka_") for family in families)
    unused = [words for words in LINKS if not any(words in family.documentation for family in families)]
    assert unused == [], "words that no text has"
    return "\n".join(
        [
            INTRODUCTION,
            *_rows(family for family in families if not _is_vllm(family)),
            "",
            "### vLLM's names\n",
            "With `vllm_metrics=T`, each with the labels `model_name` and `engine`. The meaning is our metric",
            "with the same value, or says what is different.\n",
            *_rows(family for family in families if _is_vllm(family)),
            "",
        ]
    )


def _is_vllm(family: Metric) -> bool:
    return family.name.startswith("vllm:")


def _rows(families: Iterable[Metric]) -> list[str]:
    """Of the families by their names, as samples have them: a counter's ends with _total, a histogram's goes on with
    _bucket, _sum and _count."""
    return sorted(
        f"- `{family.name}{'_total' if family.type == 'counter' else ''}`{_kind(family)}: "
        f"{_linked(family.documentation)}"
        for family in families
    )


def _kind(family: Metric) -> str:
    """The type, unless the name tells it, and the labels that are not the same for all."""
    labels = vars(family)["_labelnames"]
    own = [f"`{label}`" for label in labels if label not in ("replica", "model_name", "engine")]
    notes = [*(["histogram"] if family.type == "histogram" else []), *own]
    if not _is_vllm(family) and "replica" not in labels:
        notes.append("no replica")
    return f" ({', '.join(notes)})" if notes else ""


def _linked(text: str) -> str:
    """Names of metrics and flags as code, and the words of LINKS as links."""
    flags = "|".join(ServerConfig.flags)
    text = re.sub(rf"\b(toka_\w+|vllm:\w+|(?:{flags})=\w*)", r"`\1`", text)
    for words, target in LINKS.items():
        text = text.replace(words, f"[{words}]({target})", 1)
    return text
