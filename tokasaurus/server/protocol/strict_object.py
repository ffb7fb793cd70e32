"""The base of objects within a body."""

from pydantic import BaseModel, ConfigDict, model_validator


class StrictObject(BaseModel):
    """Of strict types; a field that it does not have is refused by name."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown_field(cls, value: object) -> object:
        """pydantic would make an error of each, and there may be a million."""
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields):
            return value
        unknown = next(name for name in value if name not in cls.model_fields)
        return {name: value[name] for name in (*cls.model_fields, unknown) if name in value}
