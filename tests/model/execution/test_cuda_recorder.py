"""CudaRecorder on a machine without a device: what it calls of Python and of torch."""

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tokasaurus.model.execution.cuda_recorder import CudaRecorder


class Graph:
    def capture_begin(self, **_options: Any) -> None:
        pass

    def capture_end(self) -> None:
        pass


def test_garbage_is_collected_and_set_aside_once_for_all_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: calls.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    for name, value in {
        "graph_pool_handle": lambda: 0,
        "Stream": lambda _device: None,
        "synchronize": lambda _device: None,
        "stream": lambda _stream: nullcontext(),
        "CUDAGraph": Graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    recorder = CudaRecorder(torch.device("cuda", 0))
    for _ in range(3):
        with recorder.preparing():
            recorder.begin()
            assert isinstance(recorder.end(), Graph)
    assert calls == ["collect", "freeze"]
