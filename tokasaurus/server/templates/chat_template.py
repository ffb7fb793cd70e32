"""A chat template and what the server knows about it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tokasaurus.server.tools.formats import ToolSupport
from tokasaurus.server.tools.reasoning import marks_in
from tokasaurus.text.tokenizer import RenderChat


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    text: str
    """Text to search in: all of the model's templates, or the one of a request."""
    tools: ToolSupport
    render: RenderChat

    @property
    def marks(self) -> Mapping[str, str]:
        """Start of reasoning → its end; empty for a template without reasoning."""
        return marks_in(self.text)

    def knows(self, variable: str) -> bool:
        """Whether the template mentions a variable with this name."""
        return re.search(rf"\b{re.escape(variable)}\b", self.text) is not None
