"""What has become of the requests that were accepted, for the live page and the summary when the server ends."""

import asyncio
from dataclasses import dataclass

from tokasaurus.messages.status import ServerTotals


@dataclass(slots=True)
class CallCounts:
    """The `generate` and `stream` calls since the start: a body that a route or a line of a job has sent."""

    num_open: int = 0
    answered: int = 0
    aborted: int = 0
    """The caller no longer waited, mostly because its client had disconnected."""
    failed: int = 0
    """The caller was told an error."""
    num_prompt_tokens: int = 0
    """Prompt tokens of calls that have ended; a prompt counts once, however many samples it has."""
    num_generated_tokens: int = 0
    """Generated tokens that came back for calls that have ended."""

    def note_end(
        self, is_whole: bool, has_error: bool, error: BaseException | None, num_prompt: int, num_generated: int
    ) -> None:
        """is_whole: all its sequences have finished. has_error: its caller was told an error. error: what has ended it.
        num_prompt, num_generated: its tokens."""
        self.num_open -= 1
        self.num_prompt_tokens += num_prompt
        self.num_generated_tokens += num_generated
        is_given_up = isinstance(error, (asyncio.CancelledError, GeneratorExit))
        if has_error or (error is not None and not is_given_up):
            self.failed += 1
        elif is_whole:
            self.answered += 1
        else:
            self.aborted += 1

    def totals(self) -> ServerTotals:
        return ServerTotals(self.answered, self.aborted, self.failed, self.num_prompt_tokens, self.num_generated_tokens)
