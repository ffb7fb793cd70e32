"""Bodies and objects of /v1/files, as OpenAI's reference documents them. Times are seconds since 1970."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from tokasaurus.server.protocol.fields import StrictObject

Purpose = Literal["batch", "batch_output"]
"""Purpose of a file that a client sent, and of one that a batch wrote."""


class ExpiresAfter(StrictObject):
    """seconds: how long a file is kept, counted from its creation."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=2_592_000)]


class UploadFields(StrictObject):
    """The parts of an upload beside its file."""

    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None


class ListFiles(BaseModel):
    """Query of GET /v1/files. after: the id of the last file of the page before."""

    model_config = ConfigDict(extra="forbid")

    purpose: str | None = None
    limit: Annotated[int, Field(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


@dataclass(frozen=True, slots=True)
class FileObject:
    """bytes: its size."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    expires_at: int | None = None
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


@dataclass(frozen=True, slots=True)
class FileList:
    """has_more: whether a page follows, after `last_id`."""

    data: list[FileObject]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None
    object: Literal["list"] = "list"


@dataclass(frozen=True, slots=True)
class FileDeleted:
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


# For the OpenAPI page. Not made from UploadFields: a form has no object expires_after, but two fields with brackets. A
# class cannot validate the whole body either, which is read as it arrives.
UPLOAD_SCHEMA = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
    "required": ["file", "purpose"],
    "dependentRequired": {
        "expires_after[anchor]": ["expires_after[seconds]"],
        "expires_after[seconds]": ["expires_after[anchor]"],
    },
    "additionalProperties": False,
}
CONTENT_SCHEMA = {"type": "string", "format": "binary"}
