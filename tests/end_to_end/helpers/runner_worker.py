"""A worker for EngineDriver that runs a real model in this process."""

from tokasaurus.messages.forward import ForwardInput, ForwardOutput
from tokasaurus.messages.generation import GenerateRequest
from tokasaurus.model.execution.runner import ModelRunner


class Worker:
    """Answers forward inputs as the worker process does."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.num_computed = 0
        self.requests: dict[int, GenerateRequest] = {}

    def forward(self, message: ForwardInput, forward_seconds: float) -> ForwardOutput:
        self.num_computed += len(message.prompt_ids)
        result = self._runner.run(message)
        assert result is not None
        return result.output(forward_seconds)
