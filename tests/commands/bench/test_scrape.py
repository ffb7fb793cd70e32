"""What is read of a server's metrics."""

import asyncio
from typing import Any

import pytest

from tokasaurus.commands.bench import scrape
from tokasaurus.commands.bench.client import ClientOptions, open_client
from tokasaurus.commands.bench.scrape import Scrape, ServerFigures

TOKA = """\
# HELP toka_kv_blocks_used used
# TYPE toka_kv_blocks_used gauge
toka_kv_blocks_used{{replica="0"}} {used}
toka_kv_blocks_used{{replica="1"}} 0
toka_kv_blocks{{replica="0"}} 50
toka_kv_blocks{{replica="1"}} 50
toka_preemptions_total{{replica="0"}} {preemptions}
toka_prefix_cache_hit_tokens_total{{replica="0"}} {cached}
toka_asked_prompt_tokens_total{{replica="0"}} {asked}
toka_device_idle_seconds_total{{replica="0"}} {idle}
toka_request_seconds_bucket{{le="1"}} 5
"""
VLLM = """\
vllm:kv_cache_usage_perc{{engine="0"}} {used}
vllm:num_preemptions_total{{engine="0"}} {preemptions}
vllm:prefix_cache_hits_total{{engine="0"}} {cached}
vllm:prefix_cache_queries_total{{engine="0"}} {asked}
"""


@pytest.mark.parametrize(
    ("page", "full", "idle_share"), [(TOKA, 80, 3.0 / (10.0 * 2)), (VLLM, 0.8, None)], ids=["toka", "vllm"]
)
def test_figures_by_hand(page: str, full: float, idle_share: float | None) -> None:
    pages = [
        page.format(used=used, preemptions=preemptions, cached=cached, asked=asked, idle=idle)
        for used, preemptions, cached, asked, idle in (
            (full / 8, 5, 100, 1000, 2.0),
            (full, 6, 200, 1200, 4.0),
            (full / 2, 7, 400, 1400, 5.0),
        )
    ]
    found = Scrape([scrape._sample(text) for text in pages]).figures(wall_s=10.0)
    assert found.kv_peak == pytest.approx(0.8)
    assert found.preemptions == 2
    assert found.cached_share == pytest.approx(300 / 400)
    assert found.idle_share == (None if idle_share is None else pytest.approx(idle_share))


def watch(base_url: str, seconds: float) -> Scrape:
    async def run() -> Scrape:
        async with open_client(ClientOptions(base_url, None, 10.0, False, {})) as client, client.watched() as found:
            await asyncio.sleep(seconds)
        return found

    return asyncio.run(run())


def test_it_is_read_before_during_and_after(scripted_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "_INTERVAL_S", 0.05)
    scripted_server.metrics = VLLM.format(used=0.5, preemptions=0, cached=1, asked=2)
    found = watch(scripted_server.base_url, 0.3)
    assert len(found.samples) >= 3
    assert found.figures(1.0).kv_peak == 0.5


@pytest.mark.parametrize("page", ["", "<html>", "other_total 5\n"])
def test_a_server_without_known_metrics_has_no_figures(scripted_server: Any, page: str) -> None:
    scripted_server.metrics = page
    assert watch(scripted_server.base_url, 0.0).figures(1.0) == ServerFigures()
