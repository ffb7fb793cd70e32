"""`toka top` and a real server: its samples are read, and agree with what was asked of it."""

import json
import subprocess
import sys
import threading

import httpx

from tests.end_to_end.helpers.toka_process import TokaProcess
from tests.helpers.limits import join
from tokasaurus.commands.top.samples import read_sample
from tokasaurus.server.protocol.live import LiveEvent


def test_samples_of_a_real_server(demo_model: TokaProcess) -> None:
    """From before a request until after its end, which comes when a sample has shown it."""
    body = {"model": "default", "prompt": "Once upon a time", "max_tokens": 3000, "n": 4, "ignore_eos": True}
    is_seen = threading.Event()

    def ask() -> None:
        with httpx.stream("POST", f"{demo_model.url}/v1/completions", json=body | {"stream": True}, timeout=120):
            is_seen.wait(120)

    asked = threading.Thread(target=ask)
    command = [sys.executable, "-m", "tokasaurus", "top", demo_model.url, "json=T"]
    samples: list[LiveEvent] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            assert json.loads(line)["format"] == 1
            samples.append(read_sample(line))
            newest = samples[-1]["replicas"][0]
            if len(samples) == 1:
                asked.start()
            elif newest["running"] == 4:
                is_seen.set()
            elif is_seen.is_set() and newest["blocks"].total and newest["running"] == 0:
                break
            assert len(samples) < 120, "the request does not end"
        process.terminate()
    join(asked)
    whole = [sample["replicas"][0] for sample in samples if sample["replicas"][0]["blocks"].total]
    assert whole, "the engine has answered"
    for replica in whole:
        blocks = replica["blocks"]
        assert blocks.total == blocks.own + blocks.shared + blocks.cached + blocks.free > 0
        assert (replica["running"] > 0) == (replica["forecast"] is not None)
        if replica["forecast"] is not None:
            forecast = replica["forecast"]
            assert (forecast.steps[0], forecast.blocks[-1]) == (0, 0)
            assert forecast.peak == max(forecast.blocks) <= forecast.limit
            assert len(forecast.steps) <= 240
    assert max(replica["running"] for replica in whole) == 4
    assert whole[-1]["tokens"]["generated"] > whole[0]["tokens"]["generated"]
    assert samples[-1]["requests"]["aborted"] > samples[0]["requests"]["aborted"]
