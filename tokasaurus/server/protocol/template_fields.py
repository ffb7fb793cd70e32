"""Body fields that control the model's chat template."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict

from tokasaurus.server.protocol.sampling_fields import NullMeans

TemplateVariables = Annotated[dict[str, Any], NullMeans({})]


class TemplateFields(BaseModel):
    """add_generation_prompt: end the prompt with the start of an assistant message; null: yes, unless
    continue_final_message is set.
    continue_final_message: leave the final message open, so that the model continues it.
    chat_template_kwargs: variables of the template, such as enable_thinking. Clients cannot send a template.
    apply_chat_template_overrides: all of the above in one object.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables = {}
    apply_chat_template_overrides: TemplateVariables = {}
