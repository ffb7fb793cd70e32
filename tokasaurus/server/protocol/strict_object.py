"""Base class of objects nested in a body."""

from pydantic import BaseModel, ConfigDict, model_validator


class StrictObject(BaseModel):
    """Types are strict; an unknown field is refused with an error that names it."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown_field(cls, value: object) -> object:
        """Drop the others: pydantic would create an error for each, and there may be a million."""
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields):
            return value
        unknown = next(name for name in value if name not in cls.model_fields)
        return {name: value[name] for name in (*cls.model_fields, unknown) if name in value}
