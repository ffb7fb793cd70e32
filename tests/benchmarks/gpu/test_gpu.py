"""The measurements for a GPU, with a tiny model on the CPU."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.client import ServerError
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.models import LLAMA_1B, LLAMA_8B, TINY, num_bytes, write_model
from benchmarks.own_server import child_pids, own_server


def test_a_dry_run_measures_every_part(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert gpu.main(["--dry-run", "--output", str(path), "max_seqs_per_forward=8", "max_tokens_per_forward=256"]) == 0
    results = json.loads(path.read_text())
    assert results["packages"]["torch"] == torch.__version__
    measured = [(part["part"], part["flags"]) for part in results["parts"]]
    plain: list[str] = []
    assert measured == [
        *(("attention", flags) for flags in (plain, ["attention_backend=torch"])),
        *(
            (name, flags)
            for flags in (plain, ["torch_compile=F"], ["attention_backend=torch"])
            for name in ("start", "steps")
        ),
        *((name, plain) for name in ("start", "groups", "sharegpt", "top_p")),
        *((name, ["use_hydragen=F"]) for name in ("start", "groups")),
        *((name, plain) for name in ("start", "steps", "monkeys", "sharegpt")),
    ]
    assert {part["status"] for part in results["parts"]} == {"measured"}
    by_name = {part["part"]: part for part in results["parts"]}
    sizes = gpu.TINY_SIZES
    num_monkeys = sizes.questions * sizes.samples * sizes.max_tokens
    for part in ("monkeys", "top_p"):
        # one warm-up request of at most 8 tokens comes before
        assert num_monkeys < by_name[part]["metrics"]["toka_generation_tokens_total"] <= num_monkeys + 8
    for part in results["parts"]:
        if part["part"] == "groups":
            assert [row["num_rows"] for row in part["groups"]] == list(sizes.group_rows)
            assert all(row["summary"]["output_tokens_per_s"] > 0 for row in part["groups"])
        if part["part"] == "start":
            assert any("KV cache" in line for line in part["memory"])
    assert by_name["sharegpt"]["summary"]["num_requests"] == sizes.requests
    for part, backend in zip(results["parts"], ("CpuBackend", "TorchBackend"), strict=False):
        values = part["attention"]
        assert values["backend"] == backend
        for share, rate, of in (("decode", "decode_bytes", "copy_bytes"), ("prefix", "prefix_flop", "matmul_flop")):
            assert values[f"{share}_share"] == pytest.approx(values[f"{rate}_per_s"] / values[f"{of}_per_s"])
            assert values[f"{rate}_per_s"] > 0
    for row, num_rows in zip(by_name["steps"]["steps"], sizes.num_rows, strict=True):
        assert row["num_rows"] == num_rows
        assert 0 < row["step_ms"] < row["wall_ms"] * 1.01
        assert 0 <= row["idle_share"] < 1


def test_what_time_does_not_allow_is_not_run_and_said(tmp_path: Path) -> None:
    results = gpu.Results(tmp_path / "results.json", {"started_at": "now"})
    gpu.measure(
        gpu.tiny(gpu.SERVER_PARTS["8b"]),
        ["device=cpu"],
        gpu.TINY_SIZES,
        results,
        time.monotonic() + gpu.LEAST_SECONDS - 1,
    )
    written = json.loads(results.path.read_text())
    assert written["started_at"] == "now"
    assert [(part["part"], part["status"], part["reason"]) for part in written["parts"]] == [
        (name, "not run", "no time is left") for name in ("steps", "monkeys", "sharegpt")
    ]


def test_sigterm_ends_the_server_and_keeps_what_is_measured(tmp_path: Path) -> None:
    path, temporary = tmp_path / "results.json", tmp_path / "temporary"
    temporary.mkdir()
    program = f"""
import sys
from dataclasses import replace
from benchmarks.gpu import __main__ as gpu
gpu.TINY_SIZES = replace(gpu.TINY_SIZES, num_rows=(1, *[4] * 10_000))
flags = ["max_seqs_per_forward=8", "max_tokens_per_forward=256"]
sys.exit(gpu.main(["8b", "--dry-run", "--output", {str(path)!r}, *flags]))
"""
    environment = os.environ | {"TMPDIR": str(temporary)}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while '"part": "start"' not in path.read_text() if path.exists() else True:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        children = child_pids(process.pid)
        time.sleep(2)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == gpu.INTERRUPTED
    parts = json.loads(path.read_text())["parts"]
    assert [(part["part"], part["status"]) for part in parts] == [
        ("start", "measured"),
        ("steps", "failed"),
        ("monkeys", "not run"),
        ("sharegpt", "not run"),
    ]
    assert {part["reason"] for part in parts[1:]} == {"interrupted"}
    assert parts[1]["steps"][0]["num_rows"] == 1, "what was measured before the signal is kept"
    assert "1 rows:" in output
    assert children
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    assert list(temporary.iterdir()) == []


def test_an_unknown_part_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["step"])
    assert "attention, steps, workloads, 8b" in capsys.readouterr().err


def test_a_server_that_does_not_start_is_said_and_the_next_one_measured(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results = gpu.Results(path, {})
    runs = [gpu.ServerRun(TINY, ("steps",), ("page_size=nothing",)), gpu.ServerRun(TINY, ("steps",))]
    flags = ["device=cpu", "kv_cache_num_tokens=2048", "max_seqs_per_forward=8", "max_tokens_per_forward=256"]
    gpu.measure(runs, flags, gpu.TINY_SIZES, results, time.monotonic() + 300)
    parts = json.loads(path.read_text())["parts"]
    assert [(part["part"], part["status"]) for part in parts] == [
        ("steps", "not run"),
        ("start", "measured"),
        ("steps", "measured"),
    ]
    assert "page_size" in parts[0]["reason"]


def test_a_server_that_starts_too_slowly_is_ended(tmp_path: Path) -> None:
    write_model(tmp_path, TINY)
    with pytest.raises(ServerError, match="did not start"), own_server([f"model={tmp_path}", "device=cpu"], 0.5):
        pass


def test_the_checkpoint_is_one_that_transformers_reads(tmp_path: Path) -> None:
    write_model(tmp_path, TINY)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    assert model.config.tie_word_embeddings
    first, last = model.model.layers
    assert torch.equal(first.mlp.up_proj.weight, last.mlp.up_proj.weight)
    assert 0.01 < float(first.mlp.up_proj.weight.detach().float().std()) < 0.03
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(tokenizer("Grüße 1234")["input_ids"]) == "Grüße 1234"
    assert len(tokenizer("Grüße")["input_ids"]) == len("Grüße".encode())


def test_the_size_of_a_checkpoint_is_known_before(tmp_path: Path) -> None:
    write_model(tmp_path, TINY)
    total = 0
    for path in tmp_path.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            total += sum(2 * file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118 (not a mapping)
    assert 0 <= total - num_bytes(TINY) <= 2 * TINY.hidden_size * (2 * TINY.num_layers + 1)  # the norms
    assert round(num_bytes(LLAMA_1B) / 2e9, 2) == 1.24  # parameters of Llama 3.2 1B, in billions
    assert round(num_bytes(LLAMA_8B) / 2e9, 2) == 8.03
