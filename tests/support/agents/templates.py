"""Chat templates of models, reduced to what they do with earlier turns: which thoughts they leave out, what a tool's
result becomes, and what moves. Each comes with how its model writes an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cortexmlx.structured.output import Thoughts

Message = dict[str, Any]

_FIRST_TAG = 270
"""The ids of a template's tags begin here, in the tiny models' vocabulary. Those of bytes are below 256."""


@dataclass(frozen=True)
class Template:
    """A chat template in Jinja. `answer` is an answer as the model writes it. `call` replaces `@call@` in both."""

    name: str
    text: str
    answer: str
    call: str
    thoughts: Thoughts | None = None

    def render(self, messages: Sequence[Message], tools: Sequence[Message]) -> str:
        """The prompt for the answer to some messages. The first one is the system prompt."""
        return str(self._compiled.render(system=messages[0]["content"], messages=messages[1:], tools=tools))

    def written(self, said: Message) -> str:
        """An answer as the model writes it."""
        return str(self._answer.render(m=said))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text: one for each tag, and one for each byte between them."""
        tokens: list[int] = []
        for part in re.split("(" + "|".join(map(re.escape, self._tags)) + ")", text):
            tokens += [self._tags[part]] if part in self._tags else part.encode()
        return tokens

    @cached_property
    def _tags(self) -> dict[str, int]:
        found = re.findall(r"<\|?[^<>{}\s]+\|?>|\[/?[A-Z_]+\]", self.text + self.answer + self.call)
        return {tag: _FIRST_TAG + i for i, tag in enumerate(sorted(set(found)))}

    def _with_call(self, text: str) -> str:
        return text.replace("@if_call@", "{% if m.call %}@call@{% endif %}").replace("@call@", self.call)

    @cached_property
    def _compiled(self) -> Any:
        return _environment().from_string(self._with_call(self.text))

    @cached_property
    def _answer(self) -> Any:
        return _environment().from_string(self._with_call(self.answer))


def _environment() -> Any:
    from jinja2 import Environment

    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters["tojson"] = lambda value: json.dumps(value)
    return environment


_LAST_USER = (
    "{% set ns = namespace(last=-1) %}{% for m in messages if m.role == 'user' %}"
    "{% set ns.last = messages.index(m) %}{% endfor %}"
)
_THINK = Thoughts("<think>", "</think>")
_HERMES_CALL = '<tool_call>\n{"name": "{{ m.call.name }}", "arguments": {{ m.call.arguments | tojson }}}\n</tool_call>'

QWEN3 = Template(
    "Qwen3",
    _LAST_USER
    + "<|im_start|>system\n{{ system }}\n\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools>"
    "\n\nFor each function call, return a JSON object within <tool_call> tags.<|im_end|>\n{% for m in messages %}"
    "{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>assistant\n{% if loop.index0 > ns.last %}<think>\n{{ m.thought }}\n</think>\n\n{% endif %}"
    "{{ m.content }}@if_call@<|im_end|>\n{% endif %}{% endfor %}<|im_start|>assistant\n",
    "<think>\n{{ m.thought }}\n</think>\n\n{{ m.content }}@if_call@<|im_end|>",
    _HERMES_CALL,
    _THINK,
)
"""Thoughts before the last user's message are left out. A tool's result is a user's message, but does not count."""

GPT_OSS = Template(
    "gpt-oss",
    "<|start|>system<|message|>You are ChatGPT.<|end|><|start|>developer<|message|>{{ system }}\n\n# Tools"
    "{% for t in tools %}\n{{ t | tojson }}{% endfor %}<|end|>{% for m in messages %}"
    "{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'tool' %}<|start|>functions to=assistant<|message|>{{ m.content | tojson }}<|end|>"
    "{% elif m.call %}<|start|>assistant"
    "{% if not messages[loop.index0:] | selectattr('role', 'equalto', 'assistant') | rejectattr('call') | list %}"
    "<|channel|>analysis<|message|>{{ m.thought }}<|end|><|start|>assistant{% endif %}@call@"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "<|start|>assistant",
    "<|channel|>analysis<|message|>{{ m.thought }}<|end|><|start|>assistant{% if m.call %}@call@{% else %}"
    "<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}",
    " to=functions.{{ m.call.name }}<|channel|>commentary json<|message|>{{ m.call.arguments | tojson }}<|call|>",
    Thoughts("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
)
"""Thoughts of a loop are left out once there is a final answer after it, and those of a final answer at once."""

GEMMA = Template(
    "Gemma",
    "<bos>{% for m in messages %}{% if m.role == 'user' %}<start_of_turn>user\n{% if loop.first %}{{ system }}\n\n"
    "{% for t in tools %}{{ t | tojson }}\n{% endfor %}\n{% endif %}{{ m.content }}<end_of_turn>\n"
    "{% elif m.role == 'tool' %}<start_of_turn>user\n```tool_output\n{{ m.content }}\n```<end_of_turn>\n"
    "{% else %}<start_of_turn>model\n{{ m.content }}@if_call@<end_of_turn>\n{% endif %}{% endfor %}"
    "<start_of_turn>model\n",
    "{{ m.content }}@if_call@<end_of_turn>",
    "```tool_code\n{{ m.call.name }}({{ m.call.arguments | tojson }})\n```",
)
"""The system prompt is a part of the first user's message. No thoughts."""

GLM = Template(
    "GLM",
    _LAST_USER + "[gMASK]<sop><|system|>\n# Tools\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools>"
    "<|system|>\n{{ system }}{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{% elif m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}<|assistant|>\n<think>{% if loop.index0 > ns.last %}{{ m.thought }}{% endif %}</think>\n{{ m.content }}"
    "@if_call@{% endif %}{% endfor %}<|assistant|>",
    "\n<think>{{ m.thought }}</think>\n{{ m.content }}@if_call@",
    "\n<tool_call>{{ m.call.name }}\n{% for k, v in m.call.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>",
    _THINK,
)
"""Thoughts before the last user's message are left empty."""

KIMI = Template(
    "Kimi",
    "{% set ns = namespace(last=-1) %}{% for m in messages if m.role == 'assistant' and not m.call %}"
    "{% set ns.last = messages.index(m) %}{% endfor %}"
    "<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|><|im_system|>system<|im_middle|>{{ system }}"
    "<|im_end|>{% for m in messages %}{% if m.role == 'user' %}<|im_user|>user<|im_middle|>{{ m.content }}<|im_end|>"
    "{% elif m.role == 'tool' %}<|im_system|>tool<|im_middle|>## Return of functions.{{ m.name }}:{{ loop.index0 }}\n"
    "{{ m.content }}<|im_end|>{% else %}<|im_assistant|>assistant<|im_middle|><think>"
    "{% if loop.index0 > ns.last %}{{ m.thought }}{% endif %}</think>{{ m.content }}@if_call@<|im_end|>"
    "{% endif %}{% endfor %}<|im_assistant|>assistant<|im_middle|>",
    "<think>{{ m.thought }}</think>{{ m.content }}@if_call@<|im_end|>",
    "<|tool_call_begin|>functions.{{ m.call.name }}:0<|tool_call_argument_begin|>{{ m.call.arguments | tojson }}"
    "<|tool_call_end|>",
    _THINK,
)
"""Thoughts up to the last answer without calls are left empty."""

MISTRAL = Template(
    "Mistral",
    _LAST_USER + "<s>{% for m in messages %}{% if m.role == 'user' %}{% if loop.index0 == ns.last %}[AVAILABLE_TOOLS]"
    "{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{% if loop.index0 == ns.last %}{{ system }}\n\n{% endif %}"
    "{{ m.content }}[/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content | tojson }}[/TOOL_RESULTS]"
    "{% else %}{{ m.content }}@if_call@</s>{% endif %}{% endfor %}",
    "{{ m.content }}@if_call@</s>",
    '[TOOL_CALLS][{"name": "{{ m.call.name }}", "arguments": {{ m.call.arguments | tojson }}}]',
)
"""Tools and the system prompt stand before the last user's message, so they move with each of them. No thoughts."""

TEMPLATES = (QWEN3, GPT_OSS, GEMMA, GLM, KIMI, MISTRAL)
