"""Parameters are counted without torch as the decoder has them."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.plain_info import with_layers
from tests.helpers.tiny_model import OPTIONS, option_config
from tokasaurus.checkpoint import ModelInfo, read_model_info
from tokasaurus.checkpoint.families.experts import FAMILIES as WITH_EXPERTS
from tokasaurus.checkpoint.spec import ExpertsSpec
from tokasaurus.model.decoder.decoder import build_decoder
from tokasaurus.model.decoder.experts import ExpertLinear
from tokasaurus.model.decoder.parameters import num_in_adapter, num_parameters
from tokasaurus.model.parallel.mesh import Mesh


@pytest.mark.parametrize("family", OPTIONS)
def test_each_rank_has_the_parameters_that_are_counted(family: str, tmp_path: Path) -> None:
    for number in range(len(OPTIONS[family])):
        option_config(family, number).save_pretrained(tmp_path)
        _check_counts(with_layers(read_model_info(tmp_path), 5))


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_active_parameters_are_all_but_those_of_experts_that_are_not_chosen(family: str, tmp_path: Path) -> None:
    option_config(family, 0).save_pretrained(tmp_path)
    info = read_model_info(tmp_path)
    expected = 0.0
    for layer in (decoder := build_decoder(info, Mesh(), torch.float32)).decoder_layers():
        mlp = layer.spec.mlp
        for module in layer.modules():
            share = 1.0
            if isinstance(module, ExpertLinear):
                assert isinstance(mlp, ExpertsSpec)
                share = mlp.router.num_chosen / mlp.router.num_experts
            expected += sum(share * each.numel() for each in module.parameters(recurse=False))
    others = sum(each.numel() for name, each in decoder.named_parameters() if not name.startswith("layers."))
    assert num_parameters(info, Mesh(), is_active=True) == expected + others
    assert expected + others < num_parameters(info, Mesh())


def _check_counts(stored: ModelInfo) -> None:
    for tied in (True, False):
        info = replace(stored, tie_embeddings=tied)
        for pp_size, tp_size in ((1, 1), (1, 2), (2, 1), (3, 2)):
            has_shares = tp_size > 1 and info.spec.num_experts and info.spec.num_experts % tp_size == 0
            wholes = (False, True) if has_shares else (False,)
            for index, whole_experts in itertools.product(range(pp_size * tp_size), wholes):
                mesh = Mesh.of_worker(index, pp_size, tp_size, whole_experts)
                decoder = build_decoder(info, mesh, torch.float32)
                numbers = [parameter.numel() for parameter in decoder.parameters()]
                assert num_parameters(info, mesh) == sum(numbers), (tied, mesh)
                assert info.spec.has_states or num_in_adapter(info, mesh, 4) == 4 * sum(
                    linear.weight.shape[0] + len(linear_shards) * linear.weight.shape[1]
                    for layer in decoder.decoder_layers()
                    for linear in layer.dense_linears()
                    if (linear_shards := [one for one in linear.weight_shards("") if one.source.endswith("weight")])
                )
