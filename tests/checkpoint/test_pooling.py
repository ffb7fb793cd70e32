"""Which checkpoints make vectors and scores, and how."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.pooling_models import PROMPTS, save_classifier, save_embedding_model, save_reward_model
from tests.helpers.tiny_model import save_tiny_model
from tests.model.by_transformers.helpers.tiny_classes import save_tiny_model as save_class
from tests.model.by_transformers.helpers.tiny_classes import tiny_config
from tokasaurus.checkpoint import CheckpointError, ModelInfo, fit_to_tensors, read_model_info, weight_files
from tokasaurus.checkpoint.pooling import PoolingInfo
from tokasaurus.checkpoint.resolve import resolve_checkpoint
from tokasaurus.messages.status import FlagRefused


def read(directory: Path, task: str | None = None) -> ModelInfo:
    return fit_to_tensors(read_model_info(directory, task=task), weight_files(directory))


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(("pooling", "kind"), [("lasttoken", "last"), ("mean", "mean"), ("cls", "first")])
def test_files_of_sentence_transformers_say_how_to_pool(tmp_path: Path, pooling: str, kind: str) -> None:
    directory = tmp_path / "model"
    save_embedding_model(directory, "qwen3", pooling, normalizes=pooling == "mean")
    expected = PoolingInfo("embed", kind, 64, normalizes=pooling == "mean", prompts=tuple(sorted(PROMPTS.items())))
    assert read(directory).pooling == expected
    older = {f"pooling_mode_{name}": name == pooling for name in ("lasttoken", "cls", "mean", "max")}
    names = {"pooling_mode_cls": "pooling_mode_cls_token", "pooling_mode_mean": "pooling_mode_mean_tokens"}
    older = {names.get(name, name): value for name, value in older.items()}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(older))
    assert read(directory).pooling == expected
    change(directory / "sentence_bert_config.json", max_seq_length=100)
    assert read(directory).context_length == 100


def test_without_them_a_model_without_head_has_its_last_token_normalised(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    save_embedding_model(directory, "llama", "mean", normalizes=False)
    (directory / "modules.json").unlink()
    assert read(directory).pooling == PoolingInfo("embed", size=64, normalizes=True)


def test_a_class_of_older_models_has_an_lm_head(tmp_path: Path) -> None:
    save_class(tmp_path, tiny_config("gpt2"))
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    assert read_model_info(tmp_path).pooling is None


def test_a_causal_model_generates_unless_the_flag_or_a_file_says_otherwise(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3")
    assert read(tmp_path).pooling is None
    assert read(tmp_path, "generate").pooling is None
    embedding = read(tmp_path, "embed")
    assert embedding.pooling == PoolingInfo("embed", size=64, normalizes=True)
    assert embedding.tie_embeddings, "no LM head is loaded"
    scoring = read(tmp_path, "score")
    assert scoring.pooling.uses_answers
    assert not scoring.tie_embeddings
    for task in ("classify", "reward"):
        with pytest.raises(FlagRefused, match=f"task={task}: the model is Qwen3ForCausalLM, which has no score head"):
            read(tmp_path, task)
    with pytest.raises(CheckpointError, match="vocabulary has no token 'no'"):
        resolve_checkpoint(str(tmp_path), task="score")
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "a.Transformer", "path": ""}]))
    assert read(tmp_path).pooling.task == "embed"
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "a.LogitScore", "path": "1_LogitScore"}]))
    (tmp_path / "1_LogitScore").mkdir()
    (tmp_path / "1_LogitScore" / "config.json").write_text('{"true_token_id": 9, "false_token_id": 4}')
    assert resolve_checkpoint(str(tmp_path)).info.pooling.answers == (4, 9)


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({"num_labels": 3}, "softmax"),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, "sigmoid"),
        ({"num_labels": 1}, "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, "none"),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "none"),
    ],
)
def test_a_classifier_has_labels_and_an_activation(tmp_path: Path, config: dict[str, Any], activation: str) -> None:
    save_classifier(tmp_path, "mistral", **config)
    pooling = read(tmp_path).pooling
    assert pooling.activation == activation
    assert pooling.task == ("score" if config["num_labels"] == 1 else "classify")
    assert pooling.labels == tuple(f"LABEL_{index}" for index in range(config["num_labels"]))
    assert read(tmp_path, "reward").pooling.activation == "none"
    assert read(tmp_path, "embed").pooling.head == ()
    with pytest.raises(FlagRefused, match="task=generate: the model is MistralForSequenceClassification"):
        read(tmp_path, "generate")


def test_reward_models_have_heads_of_several_layers_or_one_label_for_each_token(tmp_path: Path) -> None:
    save_reward_model(tmp_path / "layers")
    pooling = read(tmp_path / "layers").pooling
    assert (pooling.task, pooling.activation) == ("reward", "none")
    sizes = [(layer.name, layer.num_outputs, layer.num_inputs, layer.has_bias) for layer in pooling.head]
    assert sizes == [("score.0", 64, 64, True), ("score.2", 1, 64, True)]
    save_classifier(tmp_path / "tokens", "llama", 1, by_token=True)
    assert read(tmp_path / "tokens").pooling.task == "reward"
    save_classifier(tmp_path / "many", "llama", 3, by_token=True)
    with pytest.raises(CheckpointError, match="LlamaForTokenClassification with 3 labels for each token"):
        read(tmp_path / "many")


@pytest.mark.parametrize(
    ("file", "content", "error"),
    [
        ("modules.json", [{"type": "a.Dense", "path": "2_Dense"}], "modules of the kind Dense are not supported"),
        ("modules.json", [{"type": "a.Pooling", "path": "../other"}], "'../other', which is no folder beside it"),
        ("1_Pooling/config.json", {"pooling_mode": "weightedmean"}, "pooling by .'weightedmean'. is not supported"),
        ("1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": False}, "include_prompt = False"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case is not supported"),
        ("sentence_bert_config.json", {"modality_config": {"message": {"format": "auto"}}}, "format 'auto'"),
        ("config_sentence_transformers.json", {"default_prompt_name": "q"}, "'q' is none of the prompts"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path: Path, file: str, content: Any, error: str) -> None:
    directory = tmp_path / "model"
    save_embedding_model(directory, "qwen3", "mean", normalizes=False)
    (directory / file).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=error):
        read(directory)


def test_a_model_of_an_unknown_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    with pytest.raises(FlagRefused, match="task=embed: transformers' class computes model_type 'bert'"):
        read_model_info(tmp_path)
