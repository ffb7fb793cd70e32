"""`toka plan` on published shapes, against numbers worked out by hand."""

import contextlib
import io
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from tests.checkpoint.helpers.fake_hub import serve_repository
from tests.checkpoint.helpers.gguf_files import random_weights, write_gguf
from tests.checkpoint.helpers.quantised_models import save_quantised_model
from tests.checkpoint.helpers.quantised_weights import Format
from tests.commands.helpers.checkpoints import CONFIGS, save
from tests.helpers.tiny_model import option_config, save_random_model, save_tiny_model
from tokasaurus.checkpoint import resolve_checkpoint, with_safetensors
from tokasaurus.cli import main
from tokasaurus.commands.plan import parse_size, read_info

GIB = 1 << 30


def toka_plan(*words: str) -> subprocess.CompletedProcess[str]:
    """`toka plan` in this process: a new one imports torch for seconds."""
    with contextlib.redirect_stdout(io.StringIO()) as stdout, contextlib.redirect_stderr(io.StringIO()) as stderr:
        code = main(["plan", *words])
    return subprocess.CompletedProcess(words, code, stdout.getvalue(), stderr.getvalue())


def planned(*words: str) -> dict[str, Any]:
    done = toka_plan(*words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def weights_of(worker: dict[str, Any]) -> int:
    return next(part["bytes"] for part in worker["parts"] if part["name"] == "weights")


# The numbers of parameters are those that the models' cards give. KV of a token: 2 x layers x KV heads x 128 x 2 B.
@pytest.mark.parametrize(
    ("name", "num_parameters", "kv_bytes_per_token"),
    [
        ("Llama-3.1-8B", 8_030_261_248, 131_072),
        ("Llama-3.1-70B", 70_553_706_496, 327_680),
        ("Qwen2.5-7B", 7_615_616_512, 57_344),
    ],
)
def test_weights_and_kv_bytes_are_exact(checkpoint, name: str, num_parameters: int, kv_bytes_per_token: int) -> None:
    plan = planned(f"model={checkpoint(name)}", "device_memory=160GiB")
    (worker,) = plan["workers"]
    assert weights_of(worker) == 2 * num_parameters
    assert worker["kv_bytes_per_token"] == kv_bytes_per_token
    fixed = sum(part["bytes"] for part in worker["parts"])
    left = 160 * GIB - fixed
    assert plan["kv_blocks"] == worker["kv_blocks"] == int(left * 0.95 / (16 * kv_bytes_per_token)) - 1
    assert plan["kv_tokens"] == 16 * plan["kv_blocks"]
    assert plan["sequences_at_once"]["4096"] == plan["kv_tokens"] // 4096
    assert plan["max_tokens_per_sequence"] == min(131_072, plan["kv_tokens"])
    assert all(part["reason"] for part in worker["parts"])


def test_a_stored_head_is_counted_unless_it_equals_the_embedding_that_the_config_ties_it_to(tmp_path: Path) -> None:
    config = CONFIGS["Llama-3.1-8B"] | {"tie_word_embeddings": True, "vocab_size": 10_000, "num_hidden_layers": 1}
    save(tmp_path, config)
    weights = tmp_path / "model.safetensors"
    tied = 2 * (10_000 * 4096 + 218_103_808 + 8192 + 4096)
    assert [weights_of(worker) for worker in planned(f"model={tmp_path}")["workers"]] == [tied]
    with weights.open("r+b") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        file.seek(8 + header_bytes + 4096 * 10_000 * 2 - 1)
        file.write(b"1")  # in the last number of the embedding
    assert [weights_of(worker) for worker in planned(f"model={tmp_path}")["workers"]] == [tied + 2 * 10_000 * 4096]


def test_ranks_have_their_share(checkpoint) -> None:
    """Llama-3.1-8B by hand: a layer has 218,103,808 parameters that are divided, and two norms of 4,096 that are not;
    embedding and LM head have 525,336,576 each."""
    directory = checkpoint("Llama-3.1-8B")
    embedding, divided, norms = 525_336_576, 218_103_808, 8192
    plan = planned(f"model={directory}", "tp_size=2")
    assert [weights_of(worker) for worker in plan["workers"]] == [
        2 * (embedding + 32 * (divided // 2 + norms) + 4096)  # half of two embeddings
    ] * 2
    assert {worker["kv_bytes_per_token"] for worker in plan["workers"]} == {65_536}
    plan = planned(f"model={directory}", "tp_size=16")
    # 8 KV heads on 16 ranks: each rank has 2 query heads and one whole KV head, which two ranks share.
    query_and_mlp = 2 * 4096 * 4096 + 3 * 4096 * 14_336
    of_layer = query_and_mlp // 16 + 2 * 128 * 4096 + norms
    assert {weights_of(worker) for worker in plan["workers"]} == {2 * (2 * embedding // 16 + 32 * of_layer + 4096)}
    assert {worker["kv_bytes_per_token"] for worker in plan["workers"]} == {131_072 // 8}
    plan = planned(f"model={directory}", "pp_size=3")
    assert [weights_of(worker) for worker in plan["workers"]] == [
        # The LM head is as large as 2.41 layers: the slowest stage has 12, and would have 12.41 with 11, 11 and 10.
        2 * (embedding + 12 * (divided + norms)),
        2 * 11 * (divided + norms),
        2 * (9 * (divided + norms) + 4096 + embedding),
    ]
    assert [worker["kv_bytes_per_token"] for worker in plan["workers"]] == [49_152, 45_056, 36_864]
    assert plan["kv_blocks"] == min(worker["kv_blocks"] for worker in plan["workers"])


def test_stages_have_two_buffers_of_hidden_states_for_each_neighbour(checkpoint) -> None:
    """Of the largest step: 8,192 tokens x 8,192 x 2 B for Llama-3.1-70B; 1,000 tokens are padded to 1,024."""
    words = (f"model={checkpoint('Llama-3.1-70B')}", "device_memory=160GiB")
    for num_given, num_padded in ((8192, 8192), (1000, 1024)):
        plan = planned(*words, "pp_size=3", f"max_tokens_per_forward={num_given}")
        sizes = [buffers_of(worker) for worker in plan["workers"]]
        assert sizes == [count * num_padded * 8192 * 2 for count in (2, 4, 2)]
    assert [buffers_of(worker) for worker in planned(*words)["workers"]] == [0]


def test_ranks_share_a_buffer_for_sums_of_up_to_8_mib(checkpoint) -> None:
    """Llama-3.1-8B has 4,096 numbers a token, of 2 B in bfloat16 and of 4 B in float32."""
    words = f"model={checkpoint('Llama-3.1-8B')}", "device_memory=160GiB"

    def sums(*flags: str) -> list[int]:
        parts = [part for worker in planned(*words, *flags)["workers"] for part in worker["parts"]]
        return [part["bytes"] for part in parts if part["name"] == "sums over ranks"]

    assert sums() == []
    assert sums("tp_size=2") == [8 << 20] * 2
    assert sums("tp_size=2", "pp_size=2", "max_tokens_per_forward=512", "max_seqs_per_forward=512") == [4 << 20] * 4
    assert sums("tp_size=2", "max_tokens_per_forward=512", "max_seqs_per_forward=512", "dtype=float32") == [8 << 20] * 2
    assert sums("tp_size=2", "dtype=float16") == []
    assert sums("tp_size=2", "symmetric_all_reduce=F") == []


def test_ranks_have_room_for_logits_of_all_rows_and_for_whole_ones_of_their_own_twice(checkpoint) -> None:
    """Llama-3.1-8B: 128,256 logits, 1,024 rows of 2 B. A rank of two has as many logits as 512 rows, receives as many,
    and joins these; of its rows, 130 at once have penalties, with 8 B a logit."""
    words = f"model={checkpoint('Llama-3.1-8B')}", "device_memory=160GiB"

    def logit_bytes(*flags: str) -> int:
        (part, *_) = [
            part for part in planned(*words, *flags)["workers"][0]["parts"] if part["name"] == "largest forward"
        ]
        num_tokens, widest = map(int, re.findall(r"[\d,]+", part["reason"].replace(",", ""))[:2])
        return int(part["bytes"] - num_tokens * widest * 2)

    assert logit_bytes() == 128_256 * (1024 * 2 + 130 * 8)
    assert logit_bytes("tp_size=2") == 128_256 * (3 * 512 * 2 + 130 * 8)


def buffers_of(worker: dict[str, Any]) -> int:
    return sum(part["bytes"] for part in worker["parts"] if part["name"] == "stage buffers")


# Parameters of a layer that ranks divide; those that every rank has (two norms of the hidden size); the embedding,
# which has as many as the LM head; layers; the hidden size; KV bytes of a token in one layer, undivided.
#   70B: 8192 x (8192 + 2 x 1024 + 8192 + 3 x 28,672)      = 855,638,016
#   8B:  4096 x (4096 + 2 x 1024 + 4096 + 3 x 14,336)      = 218,103,808
#   7B:  3584 x (3584 + 2 x 512 + 3584 + 3 x 18,944) + 3584 + 2 x 512 = 233,050,624, with the biases of q, k and v
#   embeddings: 128,256 x 8192, 128,256 x 4096, 152,064 x 3584. KV: 2 x KV heads x 128 x 2 B.
BY_HAND = {
    "Llama-3.1-70B": (855_638_016, 16_384, 1_050_673_152, 80, 8192, 4096),
    "Llama-3.1-8B": (218_103_808, 8192, 525_336_576, 32, 4096, 4096),
    "Qwen2.5-7B": (233_050_624, 7168, 544_997_376, 28, 3584, 2048),
}


# LM heads as large as 1.23, 2.41 and 2.34 layers; one layer more on the last stage would make it the slowest by more.
LAYERS_OF_TWO_STAGES = {"Llama-3.1-70B": [41, 39], "Llama-3.1-8B": [17, 15], "Qwen2.5-7B": [15, 13]}


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize(("tp_size", "pp_size"), [(4, 2), (1, 1), (4, 1), (1, 2)])
def test_each_worker_has_its_exact_share(checkpoint, name: str, tp_size: int, pp_size: int) -> None:
    divided, norms, embedding, num_layers, hidden, kv_bytes = BY_HAND[name]
    layers_of = LAYERS_OF_TWO_STAGES[name] if pp_size == 2 else [num_layers]
    plan = planned(f"model={checkpoint(name)}", "device_memory=160GiB", f"tp_size={tp_size}", f"pp_size={pp_size}")
    ends = [0] * pp_size
    ends[0] += embedding // tp_size
    ends[-1] += embedding // tp_size + hidden  # LM head and last norm
    places = [(stage, rank) for stage in range(pp_size) for rank in range(tp_size)]
    assert [(worker["pp_rank"], worker["tp_rank"]) for worker in plan["workers"]] == places
    layers = [count * (divided // tp_size + norms) for count in layers_of]
    weights = [2 * (layers[stage] + ends[stage]) for stage, _ in places]
    assert [weights_of(worker) for worker in plan["workers"]] == weights
    of_tokens = [worker["kv_bytes_per_token"] for worker in plan["workers"]]
    assert of_tokens == [kv_bytes * layers_of[stage] // tp_size for stage, _ in places]


ESTIMATE = "estimated from config.json alone"


def test_a_plan_of_config_json_alone_is_the_same_and_says_that_it_is_an_estimate(checkpoint) -> None:
    directory = checkpoint("Llama-3.1-8B")
    whole = planned(f"model={directory}")
    assert whole["estimated_from_config"] is False
    assert ESTIMATE not in toka_plan(f"model={directory}").stdout
    of_file = planned(f"model={directory / 'config.json'}")
    (directory / "model.safetensors").unlink()
    alone = planned(f"model={directory}")
    # As a download of the small files leaves it.
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model-00001-of-00001.safetensors"}}')
    assert planned(f"model={directory}") == alone == of_file
    assert alone["estimated_from_config"] is True
    (weights,) = (part for part in alone["workers"][0]["parts"] if part["name"] == "weights")
    assert weights["exact"] is False
    weights["exact"] = True
    assert alone | {"estimated_from_config": False} == whole
    assert ESTIMATE in " ".join(toka_plan(f"model={directory}").stdout.split())


def test_a_plan_of_a_repository_fetches_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"config.json": json.dumps(CONFIGS["Llama-3.1-8B"]).encode(), "model.safetensors": b"never fetched"}
    with serve_repository("org/large", files) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        # a process of its own, since huggingface_hub reads its environment when it is imported
        command = [sys.executable, "-m", "tokasaurus", "plan", "model=org/large", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert hub.downloaded == ["config.json"]
    assert plan["estimated_from_config"] is True
    assert weights_of(plan["workers"][0]) == 2 * 8_030_261_248


def test_a_gguf_file_is_planned_as_its_weights_in_another_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf", "qwen2", random_weights("qwen2", tied=False), GGMLQuantizationType.Q8_0)
    directory = resolve_checkpoint(str(tmp_path / "tiny.gguf")).directory
    plans = [read_info(str(model)) for model in (tmp_path / "tiny.gguf", directory, with_safetensors(directory))]
    assert plans[0] == plans[1] == plans[2]
    assert not plans[0][1], "not an estimate"


@pytest.mark.parametrize("kind", ["gptq", "config alone", "GGUF", "plain GGUF", "plain"])
def test_a_plan_says_that_quantised_weights_are_dequantised(kind: str, tmp_path: Path) -> None:
    model = tmp_path
    if kind in ("gptq", "config alone"):
        save_quantised_model(tmp_path, "llama", Format("gptq", has_order=True), num_layers=1)
        if kind == "config alone":
            model = tmp_path / "alone"
            model.mkdir()
            (tmp_path / "config.json").rename(model / "config.json")
    elif kind == "plain":
        save_tiny_model(tmp_path, "llama", num_layers=1)
    else:
        model = tmp_path / "tiny.gguf"
        stored = GGMLQuantizationType["Q4_0" if kind == "GGUF" else "F16"]
        write_gguf(model, "llama", random_weights("llama", tied=True), stored)
    is_quantised = not kind.startswith("plain")
    assert planned(f"model={model}")["dequantised"] == is_quantised
    line = "the weights are quantised in the files; on CUDA they are dequantised to float16, as counted\n"
    assert toka_plan(f"model={model}", "dtype=float16").stdout.endswith(line) == is_quantised


def test_layers_that_gpus_do_not_compute_are_not_planned(tmp_path: Path) -> None:
    save_random_model(tmp_path, option_config("qwen3_next", 0))
    done = toka_plan(f"model={tmp_path}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "toka plan: layers with states have no kernels for GPUs yet\n"


def test_a_file_that_is_no_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    (tmp_path / "model.gguf").touch()
    (tmp_path / "other.json").write_text("{}")
    for name, expected in (
        ("model.bin", "a directory in Hugging Face format, a .gguf file or a config.json"),
        ("model.gguf", "the file is empty"),
        ("other.json", "model_type"),
    ):
        done = toka_plan(f"model={tmp_path / name}")
        assert (done.returncode, done.stdout) == (2, "")
        assert expected in done.stderr


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("Llama-3.1-70B", ["--json", "device_memory=80GiB"], "a larger tp_size or pp_size"),
        ("Llama-3.1-70B", ["device_memory=80GiB"], "a larger tp_size or pp_size"),
        ("Llama-3.1-8B", ["device_memory=32GiB", "max_tokens_per_forward=500000"], "a lower max_tokens_per_forward"),
        ("Llama-3.1-8B", ["tp_size=3"], "attention heads (32) cannot be divided among tp_size=3"),
        ("Llama-3.1-8B", ["pp_size=33"], "pp_size=33 is more than the model's 32 layers"),
        ("Llama-3.1-8B", ["device_memory=80"], "device_memory=80: must be a number and a unit"),
        ("Llama-3.1-8B", ["host=x"], "host"),
    ],
)
def test_what_does_not_fit_or_is_wrong_is_one_line_that_names_the_flag(checkpoint, name, words, expected) -> None:
    done = toka_plan(f"model={checkpoint(name)}", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_checkpoint_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    save(tmp_path / "other", CONFIGS["Llama-3.1-8B"], **{"model.embed_tokens.weight": (1000, 4096)})
    for directory, expected in (
        (tmp_path / "other", "config.json makes it (128256, 4096)"),
        (tmp_path, "config.json"),
        ("~no-such-user/x", "model=~no-such-user/x: there is no such home directory"),
        (
            tmp_path / "none" / "config.json",
            "is neither a directory nor a .gguf file nor a config.json nor a Hugging Face repository id",
        ),
    ):
        done = toka_plan(f"model={directory}")
        assert (done.returncode, done.stdout) == (2, "")
        assert expected in done.stderr
        assert done.stderr.count("\n") == 1


def test_the_table_has_every_part_and_the_sizes_add_up(checkpoint) -> None:
    began_s = time.monotonic()
    words = [f"model={checkpoint('Llama-3.1-8B')}", "device_memory=24GB"]
    command = [sys.executable, "-m", "tokasaurus", "plan", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert time.monotonic() - began_s < 60, "nothing large is read or computed"
    assert done.returncode == 0
    for word in ("weights", "rotary table", "slots", "largest forward", "CUDA context", "KV cache", "kept free"):
        assert word in done.stdout
    assert "14.96 GiB" in done.stdout  # 16,060,522,496 B


@pytest.mark.parametrize(
    ("words", "expected"),
    [([], True), (["attention_backend=torch"], False), (["dtype=float32"], False), (["kv_cache_dtype=float16"], False)],
)
def test_flashinfers_workspace_is_planned_where_the_server_would_use_it(checkpoint, words, expected) -> None:
    plan = planned(f"model={checkpoint('Llama-3.1-8B')}", *words)
    names = [part["name"] for part in plan["workers"][0]["parts"]]
    assert ("attention workspaces" in names) == expected


def test_an_int8_cache_holds_twice_the_sequences(checkpoint, capsys) -> None:
    """An 8B: 32 layers with 8 KV heads of size 128, and for each token and head two scales of 2 bytes."""
    words = [f"model={checkpoint('Llama-3.1-8B')}", "device_memory=24GB", "attention_backend=torch"]
    plans = {name: planned(*words, f"kv_cache_dtype={name}") for name in ("bfloat16", "int8")}
    tokens = {name: plan["workers"][0]["kv_bytes_per_token"] for name, plan in plans.items()}
    assert tokens == {"bfloat16": 32 * 8 * 2 * 128 * 2, "int8": 32 * 8 * 2 * (128 + 2)}
    blocks = {name: plan["workers"][0]["kv_blocks"] for name, plan in plans.items()}
    assert 1.96 < blocks["int8"] / blocks["bfloat16"] < 2
    capsys.readouterr()
    assert main(["plan", *words, "kv_cache_dtype=int8"]) == 0
    assert "an int8 KV cache is for CPUs only" in capsys.readouterr().out


def test_the_workspace_grows_with_the_largest_graph(checkpoint) -> None:
    """An 8B: 32 query heads, 8 KV heads of size 128. FlashInfer reserves (1,024 / 4 + 1,023) tiles of 16 rows;
    15 wrappers have 1 MiB each for their plans."""
    sizes = []
    for words in (["use_cudagraphs=F"], ["max_seqs_per_forward=1024"]):
        plan = planned(f"model={checkpoint('Llama-3.1-8B')}", *words)
        parts = plan["workers"][0]["parts"]
        sizes.append(next(part["bytes"] for part in parts if part["name"] == "attention workspaces"))
    reserved = 32 * (1024 // 4 + 1023) * 16 * (128 + 1) * 4
    assert 0 <= sizes[1] - 15 * (1 << 20) - reserved < 1 << 20
    assert sizes[0] < sizes[1]


def test_layers_with_windows_have_wrappers_of_their_own_and_no_graphs_of_prefix_groups(checkpoint) -> None:
    """Of two kinds; "fa3" is not taken then: 24 wrappers in place of 15."""
    directory = checkpoint("Qwen2.5-7B")
    config = json.loads((directory / "config.json").read_text())
    found = []
    for windows in ({}, {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 14}):
        (directory / "config.json").write_text(json.dumps(config | windows))
        parts = planned(f"model={directory}")["workers"][0]["parts"]
        found.append({part["name"]: part for part in parts})
    usual, windowed = found
    name = "attention workspaces"
    assert windowed[name]["bytes"] - usual[name]["bytes"] == (24 - 15) << 20
    assert " 24 wrappers" in windowed[name]["reason"]
    reasons = [parts["CUDA graphs"]["reason"] for parts in found]
    assert [" B of prefixes" in reason for reason in reasons] == [True, False]
    assert [f" {plans << 20:,} B of plans" in reason for plans, reason in zip((1, 2), reasons, strict=True)] == [
        True
    ] * 2


def test_graphs_have_memory_for_a_chunk_and_for_the_logits_of_decode_steps(checkpoint) -> None:
    """An 8B with plain torch's attention: 64 sizes up to 1,024 sequences and 16 up to 2,048 tokens, 33 pieces each."""
    plan = planned(f"model={checkpoint('Llama-3.1-8B')}", "attention_backend=torch")
    (found,) = [part["bytes"] for part in plan["workers"][0]["parts"] if part["name"] == "CUDA graphs"]
    widest_row = 2 * 4096 + 3 * 14336
    inputs = 2048 * 24 + 1024 * 60
    samples = 1024 * 20 + (1024 + 4 * 132) * 16
    assert found == (2048 * widest_row + 1024 * 128256) * 2 + inputs + samples + (64 + 16) * 33 * (256 << 10)


@pytest.mark.parametrize(
    ("text", "expected"), [("80GiB", 80 * GIB), ("24GB", 24 * 10**9), ("1.5 GiB", 3 * GIB // 2), ("100 MiB", 100 << 20)]
)
def test_sizes_are_read_with_their_units(text: str, expected: int) -> None:
    assert parse_size(text) == expected
