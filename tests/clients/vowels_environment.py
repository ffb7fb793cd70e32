"""An environment for verifiers: the model is asked twice in a conversation, and rewarded for vowels in its answers."""

from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["TwoTurns", "Vowels"]  # verifiers finds them by it


class VowelsTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def vowels(self, trace: vf.Trace) -> float:
        answers = [node.message.content or "" for node in trace.nodes if node.sampled]
        return float(sum(letter in "aeiou" for letter in "".join(answers)))


class Vowels(vf.Taskset[VowelsTask]):
    def load(self) -> list[VowelsTask]:
        return [VowelsTask(vf.TaskData(prompt=f"Say {word}."), self.config.task) for word in ("hello", "goodbye")]


class TwoTurns(vf.Harness[vf.HarnessConfig]):
    """Runs in this process, with OpenAI's client at the address that verifiers gives it."""

    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        _trace: vf.Trace,
        _runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        _mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        messages: list[dict[str, Any]] = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for question in ("And again?", None):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
                messages.append({"role": "user", "content": question})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
