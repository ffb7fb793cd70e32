"""The class and the question that clients use for structured output."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Animal(BaseModel):
    """An animal and what it is like."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["dog", "spider", "whale"]
    legs: int = Field(ge=0, le=8)
    can_swim: bool


QUESTION = "Tell me about the whale, as JSON."
