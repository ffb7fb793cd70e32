"""Bodies of /v1/models."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ModelObject:
    """created: Unix time in seconds at which the server started."""

    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: str = "tokasaurus"


@dataclass(frozen=True, slots=True)
class ModelList:
    data: list[ModelObject]
    object: Literal["list"] = "list"
