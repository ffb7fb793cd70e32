"""Flags that the machine or the model cannot do are refused before anything is loaded."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.tiny_model import option_config, save_tiny_model
from tokasaurus.checkpoint import ModelInfo, read_model_info
from tokasaurus.checkpoint.info import read_config
from tokasaurus.config import ServerConfig
from tokasaurus.messages.status import FlagRefused
from tokasaurus.monitoring.available_memory import AvailableMemory, available_memory
from tokasaurus.monitoring.cuda_devices import CudaDevices
from tokasaurus.processes import feasible
from tokasaurus.processes.feasible import check_devices, check_model

GIB = 1 << 30
LIMITED = AvailableMemory(4 * GIB, "/sys/fs/cgroup/memory.max, 4.5 GiB")
SMOLLM2 = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}


@pytest.fixture
def info(tmp_path: Path) -> ModelInfo:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    return read_config(tmp_path / "config.json")


def refused(words: str, found: CudaDevices | None, info: ModelInfo | None = None) -> str:
    config = ServerConfig.parse(words.split())
    if info is not None:
        check_devices(config, found)
    with pytest.raises(FlagRefused) as caught:
        check_devices(config, found) if info is None else check_model(config, info, found)
    return str(caught.value)


def test_devices_that_a_build_for_cpus_leaves_unused_are_told(caplog: pytest.LogCaptureFixture) -> None:
    found = CudaDevices(0, 0, num_unused=1)
    assert "is a build for CPUs, and 1 NVIDIA device would stay unused; device=cpu" in refused("device=cuda", found)
    for words, count in (([], 1), (["device=cpu"], 0)):
        caplog.clear()
        check_devices(ServerConfig.parse(words), found)
        assert len([record for record in caplog.records if "TORCH=cuda" in record.getMessage()]) == count


@pytest.mark.parametrize(
    ("words", "count", "line"),
    [
        ("device=cuda", 0, "device=cuda: torch sees no CUDA device on this machine; device=cpu needs none"),
        ("tp_size=2", 1, "tp_size=2: needs 2 CUDA devices, one for each model worker, and there is 1; their product"),
        (
            "dp_size=2 tp_size=4",
            4,
            "dp_size=2, tp_size=4: needs 8 CUDA devices, one for each model worker",
        ),
        ("pp_size=3 device=cuda", 2, "pp_size=3: needs 3 CUDA devices"),
    ],
)
def test_devices_that_are_not_there(words: str, count: int, line: str) -> None:
    assert refused(words, CudaDevices(count, 80 * GIB)).startswith(line)


@pytest.mark.parametrize("words", ["", "device=cpu tp_size=8", "dp_size=2 tp_size=2"])
def test_devices_that_suffice(words: str) -> None:
    config = ServerConfig.parse(words.split())
    for found in (CudaDevices(4, GIB), CudaDevices(0, 0), None):
        check_devices(config, found)
    check_devices(ServerConfig.parse(["device=cuda"]), None)  # not known here: the worker finds out


def test_experts_that_cannot_be_divided(tmp_path: Path, info: ModelInfo) -> None:
    """By their number, or by their width as well."""
    cases = {
        "tp_size=4 ep=T": (6, 32, "experts (6) cannot be divided among tp_size=4; tp_size may be 1, 2, and pp_size at"),
        "tp_size=4": (6, 30, "intermediate_size (30) cannot be divided among tp_size=4; tp_size may be 1, 2, and pp_"),
    }
    for words, (num_experts, width, line) in cases.items():
        option_config("qwen3_moe", 0, num_experts=num_experts, moe_intermediate_size=width).save_pretrained(tmp_path)
        assert refused(f"device=cpu {words}", None, read_model_info(tmp_path)).startswith(line)
    assert refused("device=cpu tp_size=3 ep=T", None, info) == "ep=T: the model has no experts"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "tp_size=2",
            "attention heads (9) cannot be divided among tp_size=2; tp_size may be 1, 3, and pp_size at most 30",
        ),
        ("pp_size=31", "pp_size=31 is more than the model's 30 layers; tp_size may be 1, 3, and pp_size at most 30"),
    ],
)
def test_a_model_that_cannot_be_divided(words: str, line: str, info: ModelInfo) -> None:
    assert refused(f"device=cpu {words}", None, info) == line


@pytest.mark.parametrize(("words", "num_workers"), [("", 1), ("dp_size=2", 2), ("tp_size=3", 1), ("pp_size=2", 1)])
def test_the_largest_cache_that_may_fit_is_told(
    words: str, num_workers: int, info: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers and KV heads are once in each replica, however it is divided."""
    monkeypatch.setattr(feasible, "available_memory", lambda: LIMITED)
    bytes_per_token = 2 * 30 * 3 * 64 * 2 * num_workers
    most = 4 * GIB // bytes_per_token
    line = refused(f"device=cpu kv_cache_num_tokens={most * 2} {words}", None, info)
    assert line.startswith(f"kv_cache_num_tokens={most * 2}: needs 8.0 GiB")
    assert f"only 4.0 GiB of memory are available (limit: {LIMITED.limited_by}), enough" in line
    assert int(line.split()[-1]) == pytest.approx(most, abs=1)
    check_model(ServerConfig.parse([*f"device=cpu kv_cache_num_tokens={most - 2} {words}".split()]), info, None)


def test_more_workers_than_the_memory_has_room_for(info: ModelInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feasible, "available_memory", lambda: LIMITED)
    small = "device=cpu max_seqs_per_forward=1 max_tokens_per_forward=16"
    line = refused(f"{small} dp_size=11 pp_size=3", None, info)
    assert line == (
        "dp_size=11, pp_size=3: 33 model workers need 4.1 GiB besides the model, but only 4.0 GiB of memory are "
        "available (limit: /sys/fs/cgroup/memory.max, 4.5 GiB); their product may be at most 32"
    )
    check_model(ServerConfig.parse([*small.split(), "dp_size=32"]), info, None)


def test_every_cuda_worker_has_a_device_of_its_own(info: ModelInfo) -> None:
    devices = CudaDevices(3, 4 * GIB)
    most = 4 * GIB // (2 * 30 * 64 * 2)  # one KV head each
    assert refused(f"tp_size=3 kv_cache_num_tokens={most * 2}", devices, info).endswith(
        f"but only 4.0 GiB are on the largest device, enough for at most {most}"
    )
    check_model(ServerConfig.parse(["tp_size=3", f"kv_cache_num_tokens={most}"]), info, devices)


@pytest.mark.parametrize("flag", ["max_seqs_per_forward", "max_tokens_per_forward"])
def test_forwards_larger_than_the_memory(flag: str, info: ModelInfo) -> None:
    line = refused(f"device=cpu {flag}=2000000000", None, info)
    assert line.startswith(f"{flag}=2000000000: needs ")
    assert 0 < int(line.split()[-1]) < 2_000_000_000
    check_model(ServerConfig.parse(["device=cpu"]), info, None)


@pytest.mark.parametrize(
    "words", [["tp_size=3"], ["kv_cache_num_tokens=2000000000"], ["max_seqs_per_forward=2000000000"]]
)
def test_a_start_is_refused_before_any_process_is_started(words: list[str], tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    command = [sys.executable, "-X", "importtime", "-m", "tokasaurus", f"model={tmp_path}", "device=cpu", "port=0"]
    started = time.monotonic()
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=60)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 2, lines
    assert lines[-1].startswith("toka: ")
    assert words[0].partition("=")[0] in lines[-1]
    assert [line for line in lines if "manager" in line or "server" in line or "worker" in line] == []
    assert "| torch\n" not in done.stderr, "nothing heavy is loaded"
    assert time.monotonic() - started < 30


def test_available_memory_is_that_of_the_machine() -> None:
    assert available_memory().num_bytes > 0
