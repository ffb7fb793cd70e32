"""Bodies of /v1/models."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ModelObject:
    """created: start of the server, as Unix time in seconds.

    max_model_len: most tokens of a request's prompt and completion together on this server, by the model, the KV cache
    or a flag; null while the model is loading.
    """

    id: str
    created: int
    max_model_len: int | None
    object: Literal["model"] = "model"
    owned_by: str = "tokasaurus"


@dataclass(frozen=True, slots=True)
class ModelList:
    data: list[ModelObject]
    object: Literal["list"] = "list"
