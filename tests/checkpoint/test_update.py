"""A directory of new weights is taken if a fresh server on it would compute the same; else its difference is named."""

import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.checkpoint.helpers.gguf_files import random_weights, write_gguf
from tests.helpers.tiny_model import option_config, save_byte_tokenizer, save_random_model, save_tiny_model
from tokasaurus.checkpoint import CheckpointError, ModelInfo, RopeInfo, UpdateChecks, resolve_checkpoint
from tokasaurus.checkpoint.info import EMBEDDING, HEAD
from tokasaurus.checkpoint.update import APPLIED_WHILE_READING, DECIDED_BY_TENSORS
from tokasaurus.config import ServerConfig
from tokasaurus.messages.commands import UpdateWeights

NAME = "model.safetensors"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKA_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose embeddings are tied; only the embedding is stored."""
    directory = tmp_path_factory.mktemp("saved")
    save_tiny_model(directory, "llama", tied=True)
    return directory


def checks_of(model: Path, *flags: str) -> UpdateChecks:
    config = ServerConfig.parse([f"model={model}", "rl=T", *flags])
    checkpoint = resolve_checkpoint(config.model, config.tokenizer, rope_scaling=config.rope_scaling)
    return UpdateChecks(checkpoint, config)


def refusal(checks: UpdateChecks, directory: Path, *earlier: Path, is_partial: bool = False) -> str:
    """Why the directory is refused; "" if it is not."""
    updates = [UpdateWeights(0, str(one), "1", is_partial=True) for one in earlier]
    try:
        checks.check(directory, is_partial, updates)
    except CheckpointError as error:
        return str(error)
    return ""


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content, indent=1))


def store(directory: Path, *, embedding: int | None, head: int | None) -> None:
    """Matrices of these seeds, or none, in place of the stored ones."""
    tensors = load_file(directory / NAME)
    shape = next(tensors[name].shape for name in (EMBEDDING, HEAD) if name in tensors)
    for name, seed in ((EMBEDDING, embedding), (HEAD, head)):
        tensors.pop(name, None)
        if seed is not None:
            tensors[name] = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    save_file(tensors, directory / NAME, {"format": "pt"})


STORED = [(0, None), (None, 0), (0, 0), (0, 1), (1, 1), (1, None)]
"""Seeds of embedding and LM head."""


@pytest.mark.parametrize("says_tied", [True, False, None], ids=lambda tied: f"update's tie={tied}")
@pytest.mark.parametrize("old", STORED[:4], ids=str)
def test_an_own_lm_head_is_taken_only_if_the_server_has_one(
    saved: Path, tmp_path: Path, old: tuple[int | None, int | None], says_tied: bool | None
) -> None:
    """Oracle: what a fresh start makes of the update's files; equal matrices are one in either case.

    An update that lacks the matrix that the server has is refused by the workers, which look at the names."""
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(saved, first)
    store(first, embedding=old[0], head=old[1])
    checks = checks_of(first)
    is_tied = resolve_checkpoint(str(first)).info.tie_embeddings
    assert is_tied == (old != (0, 1))
    for new in STORED:
        shutil.copytree(saved, second, dirs_exist_ok=True)
        store(second, embedding=new[0], head=new[1])
        if says_tied is None:
            (second / "config.json").unlink()
        else:
            change_json(second / "config.json", lambda config: config.update(tie_word_embeddings=says_tied))
        heads = [seed for seed in new if seed is not None]
        starts = says_tied is not False or None not in new
        lacks_own = is_tied and new[0 if old[0] is not None else 1] is None
        expected = lacks_own or (starts and (not is_tied or len(set(heads)) == 1))
        if not is_tied and None in new:
            continue
        found = refusal(checks, second)
        assert (found == "") == expected, (new, found)
        assert found == "" or HEAD in found or "tie_word_embeddings" in found


def test_experts_that_are_stored_in_the_other_way_are_refused_by_that(tmp_path: Path) -> None:
    """Together or each by itself, as transformers 5 may save both."""
    own, together = tmp_path / "own", tmp_path / "together"
    oracle = save_random_model(own, option_config("qwen3_moe", 0))
    save_byte_tokenizer(own)
    shutil.copytree(own, together)
    oracle.save_pretrained(together, save_original_format=False)
    ways = "tensors of each expert", "tensors of all experts of a layer"
    for old, new, (of_old, of_new) in ((own, together, ways), (together, own, ways[::-1])):
        checks = checks_of(old)
        assert refusal(checks, old) == ""
        for is_partial in (False, True):
            found = refusal(checks, new, is_partial=is_partial)
            assert f"the new weights have {of_new}, but the server's files have {of_old}" in found
    (together / "config.json").unlink()
    save_file({"model.norm.weight": torch.ones(64)}, together / NAME, {"format": "pt"})
    assert refusal(checks_of(own), together, is_partial=True) == ""


def test_parts_of_an_update_are_compared_with_the_present_embedding(saved: Path, tmp_path: Path) -> None:
    checks = checks_of(saved)
    shape = load_file(saved / NAME)[EMBEDDING].shape
    matrices = {seed: torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)}
    parts = {}
    for name, content in {
        "new embedding": {EMBEDDING: matrices[1]},
        "its head": {HEAD: matrices[1]},
        "another head": {HEAD: matrices[2]},
        "old head": {HEAD: load_file(saved / NAME)[EMBEDDING]},
        "both": {EMBEDDING: matrices[2], HEAD: matrices[2]},
        "two": {EMBEDDING: matrices[1], HEAD: matrices[2]},
    }.items():
        parts[name] = tmp_path / name
        parts[name].mkdir()
        save_file({key: tensor.clone() for key, tensor in content.items()}, parts[name] / "part.safetensors")

    def check(name: str, *earlier: str) -> str:
        return refusal(checks, parts[name], *(parts[one] for one in earlier), is_partial=True)

    assert check("new embedding") == check("old head") == check("both") == ""
    assert check("its head", "new embedding") == check("its head", "both", "new embedding") == ""
    for name, *earlier in [["its head"], ["another head", "new embedding"], ["old head", "new embedding"], ["two"]]:
        assert check(name, *earlier).startswith(f"tensor {HEAD} differs from {EMBEDDING} of "), (name, earlier)


EDITS: dict[str, dict[str, Any]] = {
    "family": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "num_layers": {"num_hidden_layers": 2},
    "hidden_size": {"hidden_size": 32},
    "num_heads": {"num_attention_heads": 8},
    "num_kv_heads": {"num_key_value_heads": 4},
    "head_dim": {"head_dim": 32},
    "intermediate_size": {"intermediate_size": 128},
    "vocab_size": {"vocab_size": 270},
    "context_length": {"max_position_embeddings": 256},
    "norm_eps": {"rms_norm_eps": 1e-5},
    "rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "eos_ids": {"eos_token_id": [256, 257]},
}


def test_every_fact_of_config_json_is_compared(saved: Path, tmp_path: Path) -> None:
    """ModelInfo is all that a start keeps of it: a new field needs an edit here, or a reason."""
    facts = {"family", "spec", "context_length", "eos_ids", "of_class"}
    facts |= {"pooling"}  # vectors are pooled as the start has found: trainers write no sentence-transformers' files
    assert {*facts, *DECIDED_BY_TENSORS, *APPLIED_WHILE_READING} == {field.name for field in fields(ModelInfo)}
    checks = checks_of(saved)
    for name, edit in EDITS.items():
        shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
        change_json(tmp_path / "config.json", lambda config, edit=edit: config.update(edit))  # type: ignore[misc]
        shown = next(iter(edit)) if name != "rope" else "rotary setting scaling_type is default, not llama3"
        assert shown in refusal(checks, tmp_path), name
    change_json(tmp_path / "config.json", lambda config: config.update(attention_bias=True, eos_token_id=256))
    assert "has_qkv_bias is True, not False; has_out_bias is True, not False" in refusal(checks, tmp_path)


ROPES = [
    {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "beta_fast": 32.0, "truncate": True},
    {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
]
ROPE_EDITS: dict[str, Any] = {
    "theta": (0, "rope_theta", 2e4),
    "factor": (0, "factor", 4.0),
    "low_freq_factor": (0, "low_freq_factor", 2.0),
    "high_freq_factor": (0, "high_freq_factor", 3.0),
    "original_context_length": (0, "original_max_position_embeddings", 128),
    "beta_fast": (1, "beta_fast", 16.0),
    "beta_slow": (1, "beta_slow", 2.0),
    "truncate": (1, "truncate", False),
    "attention_factor": (1, "attention_factor", 1.5),
    "short_factors": (2, "short_factor", [1.5] * 8),
    "long_factors": (2, "long_factor", [3.0] * 8),
}


def test_every_rotary_setting_is_compared(saved: Path, tmp_path: Path) -> None:
    # This family turns all channels, and scales no positions.
    others = {"scaling_type", "partial_factor", "position_scale", "position_offset"}
    assert {*ROPE_EDITS, *others} == {field.name for field in fields(RopeInfo)}
    servers = []
    for number, rope in enumerate(ROPES):
        shutil.copytree(saved, tmp_path / str(number))
        settings = {**rope, "original_max_position_embeddings": 256}
        change_json(tmp_path / str(number) / "config.json", lambda c, s=settings: c.update(rope_parameters=s))  # type: ignore[misc]
        servers.append(checks_of(tmp_path / str(number)))
    for name, (number, key, value) in ROPE_EDITS.items():
        new = tmp_path / name
        shutil.copytree(tmp_path / str(number), new)
        assert refusal(servers[number], new) == ""
        change_json(new / "config.json", lambda c, k=key, v=value: c["rope_parameters"].update({k: v}))  # type: ignore[misc]
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        assert f"rotary setting {name} is {shown}, not" in refusal(servers[number], new), name


def test_a_flag_that_replaces_the_models_rotary_scaling_replaces_an_updates_too(saved: Path, tmp_path: Path) -> None:
    checks = checks_of(saved, 'rope_scaling={"rope_type":"linear","factor":2.0}')
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    assert refusal(checks, tmp_path) == ""
    change_json(tmp_path / "config.json", lambda config: config["rope_parameters"].update(factor=4.0))
    assert refusal(checks, tmp_path) == "", "the flag's factor counts"
    change_json(tmp_path / "config.json", lambda config: config["rope_parameters"].update(rope_theta=1e4))
    assert "rotary setting theta is 10000.0, not 500000.0" in refusal(checks, tmp_path)


def test_files_that_are_left_out_are_the_checkpoints(saved: Path, tmp_path: Path) -> None:
    checks = checks_of(saved)
    shutil.copy(saved / NAME, tmp_path)
    assert refusal(checks, tmp_path) == ""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [256]}')
    assert refusal(checks, tmp_path) == ""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [255, 256]}')
    assert "eos_token_id, of all files together, is 255, 256, not 256" in refusal(checks, tmp_path)
    (tmp_path / "generation_config.json").unlink()
    shutil.copy(saved / "config.json", tmp_path)
    change_json(tmp_path / "config.json", lambda config: config.pop("eos_token_id"))
    assert refusal(checks, tmp_path) == "", "generation_config.json of the checkpoint has it"
    shutil.copy(saved / "config.json", tmp_path)
    change_json(tmp_path / "config.json", lambda config: config.update(dtype="bfloat16"))
    assert refusal(checks, tmp_path) == "", "numbers are converted"


def test_the_checkpoints_own_directory_is_compared_as_it_is_now(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    checks = checks_of(tmp_path)
    assert refusal(checks, tmp_path) == ""
    store(tmp_path, embedding=1, head=2)
    assert HEAD in refusal(checks, tmp_path)
    store(tmp_path, embedding=1, head=None)
    change_json(tmp_path / "config.json", lambda config: config.update(rms_norm_eps=1e-5))
    assert "rms_norm_eps is 1e-05, not 1e-06" in refusal(checks, tmp_path)


def edit_tokenizer(directory: Path, change: Callable[[Tokenizer], object]) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    change(tokenizer)
    tokenizer.save(str(directory / "tokenizer.json"))


def edit_settings(**settings: Any) -> Callable[[Path], None]:
    return lambda directory: change_json(directory / "tokenizer_config.json", lambda content: content.update(settings))


SAME_TOKENIZERS: dict[str, Callable[[Path], object]] = {
    "saved by transformers": lambda path: AutoTokenizer.from_pretrained(path).save_pretrained(path),
    "padding, as training sets it": lambda path: edit_tokenizer(
        path, lambda one: one.enable_padding(length=8, pad_token="<|eos|>", pad_id=256)
    ),
    "a token for padding": edit_settings(pad_token="<|eos|>"),
    "no chat template": edit_settings(chat_template=None),
    "only the settings": lambda path: (path / "tokenizer.json").unlink(),
}
OTHER_TOKENIZERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a new token": (lambda path: edit_tokenizer(path, lambda one: one.add_tokens(["abc"])), "the tokenizer (added_tok"),
    "a template": (edit_settings(chat_template="{{ messages }}"), "the chat template differs"),
    "a template of its own file": (
        lambda path: (path / "chat_template.jinja").write_text("{{ messages }}"),
        "the chat template differs",
    ),
    "an end": (edit_settings(eos_token="<|start|>"), "eos_token of tokenizer_config.json"),
}


@pytest.mark.parametrize(
    ("same", "others"),
    [
        (["saved by transformers"], ["a template"]),
        pytest.param(list(SAME_TOKENIZERS), list(OTHER_TOKENIZERS), marks=pytest.mark.long),
    ],
    ids=["few", "all"],
)
def test_tokenizer_files_may_be_written_otherwise_but_not_be_others(
    saved: Path, tmp_path: Path, same: list[str], others: list[str]
) -> None:
    checks = checks_of(saved)
    for name in same:
        shutil.copytree(saved, tmp_path / name)
        SAME_TOKENIZERS[name](tmp_path / name)
        assert refusal(checks, tmp_path / name) == "", name
    with_flag = checks_of(saved, f"tokenizer={saved}")
    for name in others:
        edit, reason = OTHER_TOKENIZERS[name]
        shutil.copytree(saved, tmp_path / name)
        edit(tmp_path / name)
        assert reason in refusal(checks, tmp_path / name), name
        assert refusal(with_flag, tmp_path / name) == "", "a fresh server with the flag would not read it"


def test_an_adapter_beside_new_weights_is_refused(saved: Path, tmp_path: Path) -> None:
    shutil.copy(saved / NAME, tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    assert "is an adapter for 'org/base', not a model" in refusal(checks_of(saved), tmp_path)


def test_a_gguf_server_takes_directories_that_agree(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", random_weights("llama", tied=True), Kind.F16)
    checks = checks_of(path)
    converted = resolve_checkpoint(str(path)).directory
    new = tmp_path / "new"
    shutil.copytree(converted, new, ignore=shutil.ignore_patterns("gguf.json", "checksums.json"))
    embedding = torch.randn(272, 64)
    save_file({EMBEDDING: embedding}, new / NAME)
    assert refusal(checks, new) == refusal(checks, converted) == ""
    AutoTokenizer.from_pretrained(new).save_pretrained(new)
    assert refusal(checks, new) == ""
    save_file({EMBEDDING: embedding, HEAD: embedding + 1}, new / NAME)
    assert HEAD in refusal(checks, new)


def test_quantised_weights_are_refused_where_the_server_quantises_plain_ones(saved: Path, tmp_path: Path) -> None:
    checks = checks_of(saved, "quantization=int8")
    assert refusal(checks, saved) == ""
    tensors = load_file(saved / NAME)
    save_file({**tensors, "a.weight": torch.zeros(2, 2, dtype=torch.int8)}, tmp_path / NAME)
    assert refusal(checks, tmp_path) == "quantization=int8: the new weights are quantised already"
