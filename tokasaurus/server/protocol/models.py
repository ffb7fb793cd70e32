"""Bodies of /v1/models."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ModelObject:
    """created: start of the server, as Unix time in seconds."""

    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: str = "tokasaurus"


@dataclass(frozen=True, slots=True)
class ModelList:
    data: list[ModelObject]
    object: Literal["list"] = "list"
