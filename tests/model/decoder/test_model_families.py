"""Every family and each of its options against transformers' own class, in float32."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, Gemma3TextConfig, PreTrainedModel

from tests.helpers.tiny_model import LONGROPE, OPTIONS, VOCAB_SIZE, option_config, save_random_model
from tests.model.helpers.greedy_decoding import assert_equals_oracle, load, run_stages, run_whole_prompt
from tokasaurus.checkpoint import read_model_info
from tokasaurus.checkpoint.families import FAMILIES
from tokasaurus.model.parallel.mesh import Mesh

CASES = [(family, number) for family, options in OPTIONS.items() for number in range(len(options))]


def test_every_family_is_tested() -> None:
    assert set(OPTIONS) == set(FAMILIES)


def test_where_sequences_may_be_long_all_have_the_long_factors(tmp_path: Path) -> None:
    """transformers gives them to prompts beyond the original length, as this one is."""
    config = option_config("phi3", 0, original_max_position_embeddings=16, rope_parameters=dict(LONGROPE))
    oracle = save_random_model(tmp_path, config)
    assert_logits_equal(tmp_path, oracle)


def assert_logits_equal(directory: Path, oracle: PreTrainedModel) -> None:
    """Of a prompt of 40 tokens, by two pipeline stages."""
    token_ids = torch.randint(VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(0))
    logits, _ = run_stages(directory, token_ids, pp_size=2)
    with torch.inference_mode():
        expected = oracle(token_ids.unsqueeze(0)).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("family", "number"), CASES)
def test_stages_and_mixed_batches_equal_transformers(family: str, number: int, tmp_path: Path) -> None:
    """Greedy tokens and log-probabilities of prompts in chunks, beside decoding ones, and logits of two stages."""
    config = option_config(family, number, tied=number % 2 == 1 and family != "phi")
    oracle = save_random_model(tmp_path, config, seed=number)
    assert_logits_equal(tmp_path, oracle)
    assert_equals_oracle(tmp_path, oracle, None, seed=number)


IN_SHARDS = [
    *(("olmo2", 1), ("cohere", 1), ("phi", 0), ("phi3", 0), ("gemma3_text", 0), ("glm4", 1), ("starcoder2", 0)),
    *(("granite", 1), ("nemotron", 1), ("granite_swa", 1), ("gpt_oss", 0), ("granitemoe", 1), ("qwen2_moe", 0)),
    *(("qwen3_next", 0), ("qwen3_5_text", 1), ("lfm2", 1), ("granitemoehybrid", 0), ("bamba", 1)),
]
"""Norms over all ranks' heads, or by head; biases that are added once; fused tensors; interleaved channels; sinks;
experts, stored together or not, and a shared one; states."""


OTHERS = [(family, 0) for family in OPTIONS if family not in dict(IN_SHARDS)]


def run_shards(rank: int, directory: Path, families: list[str]) -> None:
    """In a process of its own: saves the logits of its token ids, of each model."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory / 'rendezvous'}", rank=rank, world_size=2
    )
    mesh = Mesh(tp_rank=rank, tp_size=2, tp_group=torch.distributed.group.WORLD)
    for family in families:
        for way in ways_of(directory / family):
            own = replace(mesh, whole_experts=way != "divided")
            model, model_info = load(directory / family, own, packed=way != "whole experts by torch")
            logits = run_whole_prompt(model, model_info, own, None, torch.arange(40) * 5)
            torch.save(logits, directory / f"{family} {way} {rank}.pt")
    torch.distributed.destroy_process_group()


def ways_of(directory: Path) -> tuple[str, ...]:
    """In which a layer's MLP is divided."""
    num_experts = read_model_info(directory).spec.num_experts
    has_shares = num_experts and num_experts % 2 == 0
    return "divided", *(("whole experts", "whole experts by torch") if has_shares else ())


@pytest.mark.parametrize("cases", [IN_SHARDS, pytest.param(OTHERS, marks=pytest.mark.long)], ids=["some", "others"])
def test_two_tensor_parallel_processes_equal_transformers(cases: list[tuple[str, int]], tmp_path: Path) -> None:
    expected = {}
    for family, number in cases:
        (tmp_path / family).mkdir()
        oracle = save_random_model(tmp_path / family, option_config(family, number), seed=number)
        with torch.inference_mode():
            expected[family] = oracle(torch.arange(40).unsqueeze(0) * 5).logits[0]
    torch.multiprocessing.spawn(run_shards, args=(tmp_path, [family for family, _ in cases]), nprocs=2)
    for family, way in ((each, way) for each in expected for way in ways_of(tmp_path / each)):
        name = f"{family} {way}"
        found = torch.cat([torch.load(tmp_path / f"{name} {rank}.pt") for rank in range(2)], dim=1)
        torch.testing.assert_close(
            *(found, expected[family]), atol=1e-4, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


VISION = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 14},
}


def save_with_images(directory: Path, family: str, vision: dict[str, Any]) -> PreTrainedModel:
    """A checkpoint of the family's text model beside one for images, with small random weights."""
    outer, _ = FAMILIES[family].with_images or ("", "")
    text = option_config(family, 0, max_position_embeddings=131_072).to_dict()
    config = AutoConfig.for_model(outer, text_config=text, vision_config=vision)
    torch.manual_seed(0)
    oracle = AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.normal_(0, 0.15)
    oracle.save_pretrained(directory)
    return oracle


def assert_text_is_served(directory: Path, oracle: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING")
    # transformers' whole class of Llama 4 fails without images.
    assert_logits_equal(directory, oracle.language_model if oracle.config.model_type == "llama4" else oracle)
    (line,) = {record.message for record in caplog.records if "passed over" in record.message}
    names = [name for name, _ in oracle.named_parameters()]
    assert line.split()[0] == str(sum("language_model" not in name and "lm_head" not in name for name in names))


OF_MISTRAL = {**VISION, "head_dim": 16, "model_type": "pixtral"}


@pytest.mark.parametrize(
    ("family", "vision"),
    [
        *(("gemma3_text", VISION), ("mistral", OF_MISTRAL), ("ministral3", OF_MISTRAL)),
        ("llama4_text", {**VISION, "projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32}),
    ],
)
def test_the_text_model_of_a_checkpoint_with_images_is_served(
    family: str, vision: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert_text_is_served(tmp_path, save_with_images(tmp_path, family, vision), caplog)


def test_keys_that_a_text_config_lacks_have_its_classs_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in the published files of Gemma 3."""
    oracle = save_with_images(tmp_path, "gemma3_text", VISION)
    path, default = tmp_path / "config.json", Gemma3TextConfig().to_dict()
    content = json.loads(path.read_text())
    text = content["text_config"]
    content["text_config"] = {key: text[key] for key in text if key == "model_type" or text[key] != default.get(key)}
    assert "max_position_embeddings" not in content["text_config"]
    path.write_text(json.dumps(content))
    assert_text_is_served(tmp_path, oracle, caplog)
