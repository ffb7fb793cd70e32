"""What form a text must have, as a client writes it."""

from dataclasses import dataclass
from typing import Literal

GrammarFormat = Literal["json_schema", "regex", "lark", "gbnf", "llguidance"]


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """What the client wrote, in one of the forms that the grammar checker reads.

    text: for json_schema the schema as JSON. param: the field that it comes from.
    """

    format: GrammarFormat
    text: str
    param: str
