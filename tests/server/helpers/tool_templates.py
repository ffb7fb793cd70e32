"""Chat templates for the small tokenizer that show tools and calls, each in the format of a model family."""

import json
from pathlib import Path

from tests.helpers.small_tokenizer import save_small_tokenizer

HERMES_TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\n' }}
{%- for tool in tools %}{{ (tool | tojson) + '\n' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>' + message.content + '</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

LLAMA3_TEMPLATE = """
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|im_start|>assistant\n{"name": "' + call.name + '", "parameters": ' }}
        {{- (call.arguments | tojson) + '}<|im_end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>ipython\n' + (message.content | tojson) + '<|im_end|>' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {%- if loop.first and tools is not none %}{{ tools | tojson(indent=4) }}{% endif %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

# Shows tools, and writes calls in a format of its own.
OWN_WAY_TEMPLATE = HERMES_TEMPLATE.replace('{"name": "', "<function=")


# As in Hermes: a separate template for tools, beside a default that shows neither tools nor calls.
_PLAIN = "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}{% endfor %}"
TWO_TEMPLATES = [{"name": "default", "template": _PLAIN}, {"name": "tool_use", "template": HERMES_TEMPLATE}]


def save_tokenizer_with(template: str | list[dict[str, str]], directory: Path) -> Path:
    save_small_tokenizer(directory)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return directory
