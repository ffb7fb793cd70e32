"""What a body may say to the model's chat template."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict

from tokasaurus.server.protocol.sampling_fields import NullMeans

TemplateVariables = Annotated[dict[str, Any], NullMeans({})]


class TemplateFields(BaseModel):
    """add_generation_prompt: end with the start of an answer; null: unless the final message is continued.

    continue_final_message: leave the final message open, so that the model goes on with it.
    chat_template_kwargs: variables of the template, such as enable_thinking. Never a template of the client's own.
    apply_chat_template_overrides: all of these in one object.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables = {}
    apply_chat_template_overrides: TemplateVariables = {}
