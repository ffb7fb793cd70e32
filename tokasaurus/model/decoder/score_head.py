"""The score head of a model that judges texts: linear layers over the last hidden state, in float32."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from tokasaurus.checkpoint import ModelInfo
from tokasaurus.checkpoint.info import HEAD
from tokasaurus.model.decoder.weights import WeightShard, whole

# R texts, E hidden size, L outputs


class ScoreHead(nn.Module):
    """hidden [R, E] -> float32 [R, L]. Every rank has all of it."""

    def __init__(self, info: ModelInfo) -> None:
        super().__init__()
        assert info.pooling is not None
        self._spec = info.spec
        self._layers = info.pooling.head
        self._answers = info.pooling.answers
        self._answer_source = info.embedding_tensor if info.tie_embeddings else HEAD
        sizes = [(layer.num_outputs, layer.num_inputs, layer.has_bias) for layer in self._layers]
        if self._answers is not None:
            sizes = [(len(self._answers), info.hidden_size, False)]
        self._weights, self._biases = list[nn.Parameter](), list[nn.Parameter | None]()
        for index, (num_outputs, num_inputs, has_bias) in enumerate(sizes):
            self._add(f"weight{index}", (num_outputs, num_inputs))
            if has_bias:
                self._add(f"bias{index}", (num_outputs,))

    def _add(self, name: str, shape: tuple[int, ...]) -> None:
        self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False))

    def forward(self, hidden: Tensor) -> Tensor:
        outputs = hidden.float()
        for index in range(max(1, len(self._layers))):
            if index:
                outputs = outputs.relu()
            outputs = functional.linear(
                outputs, self.get_parameter(f"weight{index}"), self._parameters.get(f"bias{index}")
            )
        if self._answers is None:
            return outputs
        outputs = outputs * self._spec.logit_scale
        softcap = self._spec.logit_softcap
        return outputs if softcap is None else torch.tanh(outputs / softcap) * softcap

    def weight_shards(self, vocab_shape: tuple[int, int]) -> list[WeightShard]:
        """vocab_shape: of the LM head, whose rows of the answers may be this head."""
        shards = []
        for index, layer in enumerate(self._layers):
            for name in ("weight", "bias") if layer.has_bias else ("weight",):
                target = self.get_parameter(f"{name}{index}").data
                shards.append(whole(f"{layer.name}.{name}", target, partial(_write, target)))
        for row, token_id in enumerate(self._answers or ()):
            target = self.get_parameter("weight0").data[row : row + 1]
            place = (slice(token_id, token_id + 1), slice(None))
            shards.append(WeightShard(self._answer_source, vocab_shape, place, target, partial(_write, target)))
        return shards


def _write(target: Tensor, values: Tensor) -> None:
    target.copy_(values)
