"""One prompt's next token, by a model of the server and by transformers."""

import pytest
import torch
from transformers import PreTrainedModel

from tests.model.by_transformers.helpers.tiny_classes import VOCAB_SIZE
from tests.model.helpers.steps import StepDriver, make_runner
from tokasaurus.checkpoint import ModelInfo
from tokasaurus.model.by_transformers.model import TransformersModel

PROMPT = torch.randint(VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(0))


def assert_next_token(
    model: TransformersModel, info: ModelInfo, oracle: PreTrainedModel, tolerance: float = 1e-4
) -> None:
    """The most likely token after PROMPT, and its log-probability."""
    driver = StepDriver(make_runner(model, info, None))
    driver.open(1, PROMPT.tolist())
    token, logprob = driver.run([], [(1, len(PROMPT))])[1]
    with torch.inference_mode():
        expected = oracle(PROMPT.unsqueeze(0)).logits[0, -1].log_softmax(dim=-1)
    assert token == int(expected.argmax())
    assert logprob == pytest.approx(float(expected.max()), abs=tolerance)
