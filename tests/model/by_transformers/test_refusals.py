"""Classes that are computed wrongly, or not at all, are refused: by name, or by the check of a start."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, Gemma2Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer, Gemma2RotaryEmbedding

from tests.model.by_transformers.helpers.every_class import is_right_at_start, load_class
from tests.model.by_transformers.helpers.tiny_classes import save_tiny_model, tiny_config
from tokasaurus.checkpoint import CheckpointError, read_model_info
from tokasaurus.messages.status import FlagRefused
from tokasaurus.model.by_transformers import probe
from tokasaurus.model.by_transformers.model import TransformersModel
from tokasaurus.model.by_transformers.probe import NAME
from tokasaurus.model.parallel.mesh import Mesh

Call = Callable[..., tuple[Any, None]]
_CALL: Call = AttentionInterface._global_mapping[NAME]


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path, tiny_config("gemma2"))
    return tmp_path


def with_call(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    """A class whose layers ask for something else than their own attention computes."""
    monkeypatch.setitem(AttentionInterface._global_mapping, NAME, call)


def facts(directory: Path) -> dict[str, Any]:
    return probe.facts_of(directory / "config.json")


def test_a_class_as_it_is_is_right(gemma: Path) -> None:
    assert is_right_at_start(gemma)


def without_softcap(*args: Any, **options: Any) -> tuple[Any, None]:
    del options["softcap"]
    return _CALL(*args, **options)


def with_heads_in_another_order(module: Any, query: Any, *args: Any, **options: Any) -> tuple[Any, None]:
    return _CALL(module, query.flip(1), *args, **options)


def with_another_scale(*args: Any, scaling: float, **options: Any) -> tuple[Any, None]:
    return _CALL(*args, scaling=scaling * 1.1, **options)


@pytest.mark.parametrize("call", [without_softcap, with_heads_in_another_order, with_another_scale])
def test_a_call_that_says_something_else_is_found_at_the_start(
    call: Call, gemma: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_call(monkeypatch, call)
    monkeypatch.setattr("tokasaurus.checkpoint.info.read_facts", lambda path: probe.facts_of(path))
    assert not is_right_at_start(gemma)


def test_logits_without_the_cap_of_the_class_are_found_at_the_start(
    gemma: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TransformersModel, "logits", lambda self, hidden: self.whole.lm_head(hidden))
    assert not is_right_at_start(gemma)


def test_an_unknown_option_is_refused_by_name(gemma: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_call(monkeypatch, lambda *args, **options: _CALL(*args, position_bias=1.0, **options))
    with pytest.raises(probe.Unfit, match=r"^Gemma2Attention gives attention position_bias, which is not computed$"):
        facts(gemma)


def test_two_calls_of_one_layer_are_refused(gemma: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_call(monkeypatch, lambda *args, **options: (_CALL(*args, **options), _CALL(*args, **options))[1])
    with pytest.raises(probe.Unfit, match=r"^Gemma2Attention calls attention twice$"):
        facts(gemma)


NEITHER = "that is neither causal nor a window"


@pytest.mark.parametrize(
    ("sees", "words"),
    [
        (lambda _batch, _head, query, key: (key <= query) & (key % 3 == query % 3), NEITHER),
        (lambda _batch, _head, query, key: (key < 1000) | (query - key < 9), NEITHER),
        (lambda _batch, _head, query, key: key // 64 == query // 64, NEITHER),
        (lambda _batch, _head, query, key: (key <= query) & torch.ones((), device="meta"), "that cannot be computed"),
        (None, "that is not known"),
    ],
)
def test_masks_that_are_neither_causal_nor_windows_are_refused(
    sees: Any, words: str, gemma: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> tuple[Any, None]:
        mask.sees = sees
        return _CALL(module, query, key, value, mask, **options)

    with_call(monkeypatch, call)
    with pytest.raises(probe.Unfit, match=rf"^Gemma2Attention gives attention a mask {words}"):
        facts(gemma)


def test_layers_without_attention_are_refused(gemma: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(module: Any, query: Any, *args: Any, **options: Any) -> tuple[Any, None]:
        if module.layer_idx == 2:
            return query.transpose(1, 2), None
        return _CALL(module, query, *args, **options)

    with_call(monkeypatch, call)
    with pytest.raises(probe.Unfit, match=r"^3 of 4 layers of Gemma2ForCausalLM call attention"):
        facts(gemma)


def test_windows_come_from_masks(gemma: Path) -> None:
    assert [layer["window"] for layer in facts(gemma)["layers"]] == [24, None, 24, None]


def test_classes_of_transformers_classify_nothing(gemma: Path) -> None:
    path = gemma / "config.json"
    config = json.loads(path.read_text()) | {"architectures": ["Gemma2ForSequenceClassification"]}
    path.write_text(json.dumps(config))
    with pytest.raises(FlagRefused, match="task=classify: transformers' class computes model_type 'gemma2'"):
        read_model_info(gemma, impl="transformers")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"model_type": "bert_of_tomorrow"}, "bert_of_tomorrow"),
        ({"hidden_activation": "tomorrow"}, "cannot make its class"),
    ],
)
def test_configurations_that_no_class_computes_are_refused(change: dict[str, Any], words: str, gemma: Path) -> None:
    path = gemma / "config.json"
    config = json.loads(path.read_text()) | change
    if "rope_parameters" in change:
        sizes = [1.0] * 8
        config["rope_parameters"] |= {"rope_theta": 1e4, "short_factor": sizes, "long_factor": sizes}
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=words):
        read_model_info(gemma, impl="transformers")


def test_a_rotary_scaling_of_the_flag_is_refused(gemma: Path) -> None:
    with pytest.raises(FlagRefused, match="rope_scaling"):
        read_model_info(gemma, {"rope_type": "linear", "factor": 2.0}, impl="transformers")


def test_missing_and_surplus_tensors_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_tiny_model(tmp_path, tiny_config("mixtral"))
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    save_file({key: tensor for key, tensor in stored.items() if key != name}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks tensor model\.layers\.1\.mlp\.experts\.down_proj"):
        load_class(tmp_path)
    save_file({**stored, "model.layers.1.new.weight": stored[name].clone()}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"has tensor model\.layers\.1\.new\.weight, which Mixtral"):
        load_class(tmp_path)


def test_a_style_that_is_not_computed_is_refused_by_name(gemma: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gemma2Config, "base_model_tp_plan", {"layers.*.mlp": "sequence_parallel"})
    words = (
        r"^tp_size=2, pp_size=1: Gemma2ForCausalLM cannot be divided: model\.layers\.0\.mlp is divided in the style seq"
    )
    with pytest.raises(ValueError, match=words):
        load_class(gemma, mesh=Mesh(tp_size=2))


def test_parts_that_do_not_fit_together_are_refused_by_name(gemma: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gemma2Config, "base_model_tp_plan", {"layers.*.self_attn.k_proj": "colwise"})
    with pytest.raises(
        ValueError, match=r"^tp_size=2, pp_size=1: Gemma2ForCausalLM cannot be divided: .* has 4 heads and 1 "
    ):
        load_class(gemma, mesh=Mesh(tp_size=2))


class Shared(tuple[Any, ...]):
    """Cosines and sines, and what the first layer has got."""

    first: Any = None


@pytest.fixture
def with_a_value_of_the_first_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers add it to what the first one gives."""
    rotary, layer = Gemma2RotaryEmbedding.forward, Gemma2DecoderLayer.forward

    def forward(self: Any, hidden: Any, position_embeddings: Any, **options: Any) -> Any:
        if self.self_attn.layer_idx == 0:
            position_embeddings.first = hidden
        return layer(self, hidden + position_embeddings.first, position_embeddings, **options)

    monkeypatch.setattr(Gemma2RotaryEmbedding, "forward", lambda *args: Shared(rotary(*args)))
    monkeypatch.setattr(Gemma2DecoderLayer, "forward", forward)


@pytest.mark.usefixtures("with_a_value_of_the_first_layer")
def test_layers_that_share_more_than_hidden_states_are_refused_by_name(gemma: Path) -> None:
    assert is_right_at_start(gemma)
    load_class(gemma, mesh=Mesh(0, 2))
    with pytest.raises(ValueError, match=r"^tp_size=1, pp_size=2: Gemma2ForCausalLM cannot be divided: unsupported"):
        load_class(gemma, mesh=Mesh(1, 2))


def test_later_layers_that_read_the_embeddings_are_found_at_the_start(
    gemma: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(is_right_at_start(gemma, Mesh(stage, 2)) for stage in range(2))
    rotary = Gemma2RotaryEmbedding.forward

    def forward(self: Any, states: Any, *args: Any) -> Any:
        cos, sin = rotary(self, states, *args)
        return cos * states.mean(), sin

    monkeypatch.setattr(Gemma2RotaryEmbedding, "forward", forward)
    with pytest.raises(ValueError, match=r"^its layers read more than the hidden states of the layer before$"):
        is_right_at_start(gemma, Mesh(1, 2))
