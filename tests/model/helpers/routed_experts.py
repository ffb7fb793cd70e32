"""The experts that transformers' routers choose."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel


def oracle_experts(oracle: PreTrainedModel, token_ids: Sequence[int]) -> NDArray[np.int64]:
    """[tokens, layers, K], those of a token and layer in rising order; of layers without experts, zeros."""
    layers = oracle.model.layers
    chosen: list[Tensor | None] = [None] * len(layers)

    def note(index: int) -> Any:
        def hook(_module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            given = [each for each in (*arguments, *options.values()) if each.dtype == torch.int64]
            (chosen[index],) = given

        return hook

    handles = [
        layer.mlp.experts.register_forward_pre_hook(note(index), with_kwargs=True)
        for index, layer in enumerate(layers)
        if hasattr(layer.mlp, "experts")
    ]
    with torch.inference_mode():
        oracle(torch.tensor([token_ids]))
    for handle in handles:
        handle.remove()
    (num_chosen,) = {each.shape[-1] for each in chosen if each is not None}
    nothing = torch.zeros((len(token_ids), num_chosen), dtype=torch.int64)
    found = [nothing if each is None else each.view(nothing.shape).sort(-1).values for each in chosen]
    return torch.stack(found, 1).numpy()


def assert_are_of(oracle: PreTrainedModel, token_ids: Sequence[int], experts: NDArray[Any], first: int = 0) -> None:
    """experts: [tokens, layers, K], of all token_ids but the last, from number `first` on."""
    np.testing.assert_array_equal(np.sort(experts, -1), oracle_experts(oracle, token_ids)[first:-1])
