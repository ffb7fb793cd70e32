"""Chat templates that handle reasoning as those of Qwen 3 and of DeepSeek-R1's distilled models do."""

_ASSISTANT = """
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1] %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if reasoning and loop.index0 > last.question %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- content.lstrip('\n') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}
                {{- call.function.arguments }}
            {%- else %}
                {{- call.function.arguments | tojson }}
            {%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}"""

QWEN3_TEMPLATE = (
    """
{%- if tools %}{{ '<|im_start|>system\n' }}
{%- for tool in tools %}{{ (tool | tojson) + '\n' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- endif %}
{%- set last = namespace(question=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}"""
    + _ASSISTANT
    + """
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""
)
"""The model begins its reasoning itself; enable_thinking=false writes empty reasoning."""

R1_TEMPLATE = """
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1] %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}
"""
"""The prompt begins the reasoning. Earlier reasoning is dropped."""

EFFORT_TEMPLATE = """
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}
{%- if reasoning_effort is defined %}{{ 'effort=' + reasoning_effort + '\n' }}{% endif %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}
"""
"""Reasoning is as long as reasoning_effort asks, and cannot be turned off."""
