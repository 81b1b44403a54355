"""Chat templates in the few lines that decide what a loop of calls costs: whose thoughts are written, until when, and
what is refused, moved or left out. Written after what the templates of these models do.
"""

from __future__ import annotations

from typing import Any

from cortexmlx.models.tokenizers.fitting import ConversationFitter
from cortexmlx.models.tokenizers.templates import render_template

_LAST_USER = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
_JSON_CALLS = (
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
_CHATML = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if m.reasoning_content and loop.index0 > ns.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}" + _JSON_CALLS + "<|im_end|>\n{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n"
    "{{ m.content }}\n</tool_response><|im_end|>\n{% elif m.role == 'user' or m.role == 'system' %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

QWEN3 = _LAST_USER + _CHATML
"""Thoughts since the last user's message. Takes later system messages."""

QWEN35 = (
    _LAST_USER + "{% if ns.last < 0 %}{{ raise_exception('No user query found in messages.') }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}" + _CHATML
)
"""The same, with one system message at the beginning."""

GLM = (
    _LAST_USER + "[gMASK]<sop>{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n"
    "<think>{{ m.reasoning_content if m.reasoning_content and loop.index0 > ns.last }}</think>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}\n"
    "{% for k, v in c.function.arguments.items() %}"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    "{% elif m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% elif m.role in ('user', 'system') %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}<|assistant|>"
)
"""GLM 4.5 and later."""

MINIMAX = (
    "{% set loop_messages = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% set ns = namespace(last=-1) %}{% for m in loop_messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}]~b]system\n{{ messages[0].content if messages[0].role == "
    "'system' }}[e~[\n{% for m in loop_messages %}{% if m.role == 'assistant' %}]~b]ai\n"
    "{% if m.reasoning_content and loop.index0 > ns.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    '{{ m.content }}{% if m.tool_calls %}\n<minimax:tool_call>\n{% for c in m.tool_calls %}<invoke name="'
    '{{ c.function.name }}">\n{% for k, v in c.function.arguments | items %}<parameter name="{{ k }}">{{ v }}'
    "</parameter>\n{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>{% endif %}[e~[\n"
    "{% elif m.role == 'tool' %}]~b]tool\n<response>{{ m.content }}</response>[e~[\n"
    "{% elif m.role == 'user' %}]~b]user\n{{ m.content }}[e~[\n{% endif %}{% endfor %}]~b]ai\n"
)
"""MiniMax M2: leaves later system messages out, in silence."""

GPT_OSS = (
    "{% set loop_messages = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% if messages[0].role == 'system' %}<|start|>developer<|message|>{{ messages[0].content }}<|end|>{% endif %}"
    "{% set last = namespace(name=none) %}{% for m in loop_messages %}{% if m.role == 'assistant' %}"
    "{% if m.tool_calls %}{% set over = namespace(found=false) %}{% for later in loop_messages[loop.index:] %}"
    "{% if later.role == 'assistant' and not later.tool_calls %}{% set over.found = true %}{% endif %}{% endfor %}"
    "{% if m.content and m.thinking %}{{ raise_exception('Cannot pass both content and thinking with tool calls!') }}"
    "{% elif (m.content or m.thinking) and not over.found %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.content or m.thinking }}<|end|>{% endif %}{% set c = m.tool_calls[0].function %}"
    "{% set last.name = c.name %}<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>"
    "{{ c.arguments | tojson }}<|call|>{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% endif %}"
    "{% elif m.role == 'tool' %}{% if last.name is none %}{{ raise_exception('no previous tool call') }}{% endif %}"
    "<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}<|start|>assistant"
)
"""Thoughts until an answer without calls. Leaves later system messages out, and all calls of an answer but one."""

KIMI = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "<|im_{{ m.role if m.role in ('user', 'assistant') else 'system' }}|>{{ m.name or m.role }}<|im_middle|>"
    "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content if loop.index0 > ns.last }}</think>{{ m.content }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c['id'] }}"
    "<|tool_call_argument_begin|>{{ c.function.arguments if c.function.arguments is string else "
    "c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}"
    "{% elif m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{{ m.content }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>{% endfor %}<|im_assistant|>assistant<|im_middle|>"
)
"""Kimi K2 Thinking: names functions by ids only. Thoughts since the last answer without calls."""

MISTRAL = (
    "{% set said = messages[1:] if messages[0].role == 'system' else messages %}{% set ns = namespace(n=0) %}"
    "{% for m in said %}{% if m.role != 'tool' and not m.tool_calls %}{% if (m.role == 'user') != (ns.n % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}<s>"
    "{% if messages[0].role == 'system' %}[SYSTEM_PROMPT]{{ messages[0].content }}[/SYSTEM_PROMPT]{% endif %}"
    "{% for m in said %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS]["
    "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric "
    'strings with length 9!\') }}{% endif %}{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}'
    "{{ ', ' if not loop.last }}{% endfor %}]</s>{% elif m.role == 'tool' %}[TOOL_RESULTS]{\"content\": "
    "{{ m.content }}, "
    '"call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]{% elif m.role == "assistant" %}'
    "{{ m.content }}</s>{% else %}{{ raise_exception('Only user, assistant and tool roles!') }}{% endif %}{% endfor %}"
)
"""Mistral Small: no thoughts, ids of nine letters, and users and assistants in turns. Leaves out what is said beside
calls.
"""

GEMMA2 = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}<bos>"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
"""No system message, and users and assistants in turns."""

GEMMA4 = (
    _LAST_USER + "<bos>{% for m in messages %}{% if m.role != 'tool' %}{% set ns.result = false %}"
    "{% set before = messages[:loop.index0] | rejectattr('role', 'equalto', 'tool') | list %}"
    "{% if m.role != 'assistant' or not before or before[-1].role != 'assistant' %}"
    "<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{% endif %}"
    "{% if m.reasoning_content and m.tool_calls and loop.index0 > ns.last %}<|channel>thought\n"
    "{{ m.reasoning_content }}<channel|>{% endif %}{% for c in m.tool_calls or [] %}"
    "<|tool_call>call:{{ c.function.name ~ '{' }}"
    '{% if c.function.arguments is mapping %}{% for k, v in c.function.arguments | dictsort %}{{ k }}:<|"|>{{ v }}'
    '<|"|>{% endfor %}{% else %}{{ c.function.arguments }}{% endif %}}<tool_call|>{% endfor %}'
    "{% set ns.open = m.tool_calls %}{% for r in messages[loop.index:] %}"
    "{% set ns.open = ns.open and r.role == 'tool' %}{% if ns.open %}{% set ns.result = true %}"
    "<|tool_response>{{ r.content }}<tool_response|>{% endif %}{% endfor %}"
    "{{ m.content | trim }}{% if m.content or not ns.result %}<turn|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.result %}<|turn>model\n{% endif %}"
)
"""Thoughts beside calls since the last user's message. A text beside calls stands after their results,
and ends the turn.
"""

DEEPSEEK = (
    "<s>{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}\n\n{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.role == 'assistant' %}"
    "<｜Assistant｜>{{ m.content }}{% for c in m.tool_calls or [] %}{{ '<｜tool▁call▁begin｜>' + c.function.name + "
    "'<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}{% endfor %}<｜end▁of▁sentence｜>"
    "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% endif %}{% endfor %}"
    "<｜Assistant｜>"
)
"""DeepSeek V3.1: moves all system messages to the beginning, and adds arguments to its text as they are."""

LLAMA = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{% set c = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}<|eot_id|>'
    "{% else %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n{{ m.content }}"
    "<|eot_id|>{% endif %}{% endfor %}<|start_header_id|>assistant<|end_header_id|>\n\n"
)
"""Llama 3.x: one call at once."""

LFM2 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ '<|tool_response_start|>' if m.role == 'tool' }}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Leaves calls out."""

ALL = {
    "qwen3": QWEN3,
    "qwen3.5": QWEN35,
    "glm": GLM,
    "minimax": MINIMAX,
    "gpt-oss": GPT_OSS,
    "kimi": KIMI,
    "mistral": MISTRAL,
    "gemma2": GEMMA2,
    "gemma4": GEMMA4,
    "deepseek": DEEPSEEK,
    "llama": LLAMA,
    "lfm2": LFM2,
}


def fitted(template: str, *messages: Any, begin: bool = True) -> str:
    """The text of a conversation that was fitted to a template, with the beginning of an answer or without."""

    def written(said: Any) -> str:
        return render_template(template, said, None, {"add_generation_prompt": begin})

    text = ConversationFitter(written).render(list(messages), written)
    assert isinstance(text, str)
    return text
