"""Chat templates of models that call tools, in the few lines that matter: how tools, calls and results are written."""

from __future__ import annotations

_EACH_CALL = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"

HERMES = (
    "{% if tools %}<|im_start|>system\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools><|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + _EACH_CALL
    + '{% if not loop.first or m.content %}\n{% endif %}<tool_call>\n{"name": "{{ f.name }}", "arguments": '
    "{{ f.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
"""Qwen 2.5, Qwen 3, Hermes 3."""

QWEN_CODER = (
    "{% for t in tools or [] %}<function><name>{{ t.function.name }}</name></function>{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + _EACH_CALL
    + "{% if not loop.first or m.content %}\n{% endif %}<tool_call>\n<function={{ f.name }}>\n"
    "{% for k, v in f.arguments | items %}<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
"""Qwen3-Coder."""

LLAMA = (
    '{% if tools %}Answer with {"name": function name, "parameters": its arguments}.\n{% for t in tools %}'
    "{{ t | tojson(indent=4) }}\n{% endfor %}{% endif %}{% for m in messages %}<|start_header_id|>{{ m.role }}"
    "<|end_header_id|>\n\n{{ m.content }}"
    + _EACH_CALL
    + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endfor %}<|eot_id|>{% endfor %}'
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
"""Llama 3.1 to 3.3. `"parameters":` stands in what it tells the model."""

MISTRAL_LIST = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
    "{% if m.tool_calls %}{{ m.content }}[TOOL_CALLS][{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{{ ', ' if not loop.last }}{% endfor %}]</s>{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
)
"""Mistral 7B v0.3, Nemo."""

MISTRAL_TAGS = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
    "{% if m.tool_calls %}{{ m.content }}{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
    "{{ c.function.arguments | tojson }}{% endfor %}</s>{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
)
"""Magistral, Devstral, Ministral."""

MISTRAL_IDS = MISTRAL_TAGS.replace("[ARGS]", "[CALL_ID]{{ c.id }}[ARGS]")
"""Mistral Small 3.2."""

HARMONY = (
    "{% if tools %}namespace functions {% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.tool_calls %}"
    + _EACH_CALL
    + " to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>{% endfor %}"
    "{% else %}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}<|start|>assistant"
)
"""gpt-oss."""

DEEPSEEK_V3 = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<｜{{ m.role }}｜>{{ m.content }}"
    "{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
    + _EACH_CALL
    + "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```"
    "<｜tool▁call▁end｜>{{ '\\n' if not loop.last }}{% endfor %}<｜tool▁calls▁end｜>{% endif %}{% endfor %}"
    "<｜Assistant｜>"
)
"""DeepSeek V3, R1."""

DEEPSEEK_V31 = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<｜{{ m.role }}｜>{{ m.content }}"
    "{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
    + _EACH_CALL
    + "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}<｜tool▁call▁end｜>"
    "{% endfor %}<｜tool▁calls▁end｜>{% endif %}{% endfor %}<｜Assistant｜>"
)
"""DeepSeek V3.1."""

GLM = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    + _EACH_CALL
    + "<tool_call>{{ f.name }}\n{% for k, v in f.arguments | items %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
    "{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}{% endfor %}<|assistant|>"
)
"""GLM 4.5."""

MINIMAX = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% if m.tool_calls %}"
    "<minimax:tool_call>\n"
    + _EACH_CALL
    + '<invoke name="{{ f.name }}">\n{% for k, v in f.arguments | items %}<parameter name="{{ k }}">'
    "{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>"
    "{% endif %}{% endfor %}"
)
"""MiniMax M2."""

KIMI = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% if m.tool_calls %}"
    "<|tool_calls_section_begin|>"
    + _EACH_CALL
    + "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
    "{{ f.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}{% endfor %}"
)
"""Kimi K2."""

LFM = (
    "{% if tools %}<|tool_list_start|>{{ tools | tojson }}<|tool_list_end|>{% endif %}{% for m in messages %}"
    "{{ m.content }}{% if m.tool_calls %}<|tool_call_start|>[{% for c in m.tool_calls %}{{ c.function.name }}("
    "{% for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %})"
    "{{ ', ' if not loop.last }}{% endfor %}]<|tool_call_end|>{% endif %}{% endfor %}"
)
"""LFM 2."""

TOOLLESS = "{% for m in messages %}{{ m.role }}: {{ m.content }} <tool_call>{% endfor %}"
"""Reads no tools."""

UNKNOWN = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
"""Reads tools, but says nothing of calls."""
