"""An answer ends with the tokens that a chat template ends a turn with, and with no other of its tokens."""

from __future__ import annotations

from types import SimpleNamespace

from cortexmlx.models.tokenizers.turn_ends import find_named_ends, find_template_ends
from support.models import tool_templates


def ends_of(template: object, *tokens: str) -> set[str]:
    tokenizer = SimpleNamespace(chat_template=template, bos_token="<s>", eos_token="</s>", unk_token=None)
    return {tokens[index] for index in find_template_ends(tokenizer, {token: i for i, token in enumerate(tokens)})}


def test_the_last_token_after_an_answer_ends_it() -> None:
    for template, tokens, ends in (
        ("<|over|>", ("<|over|>", "<|im_end|>"), {"<|over|>"}),
        ("<|over|>\n{{ '<|fin|> ' if loop.last }}", ("<|over|>", "<|fin|>"), {"<|fin|>"}),
        ("<|close|>part<|over|>", ("<|close|>", "<|over|>"), set()),
        ("<|over|><|a|>assistant", ("<|over|>", "<|a|>"), set()),
        ("<|a|><|a|>b", ("<|a|>", "<|a|>b"), {"<|a|>b"}),
        ("{{ eos_token }}", ("</s>",), {"</s>"}),
        ("", ("<|over|>", ""), set()),
        ("{{ raise_exception('no') }}<|over|>", ("<|over|>",), set()),
        ("{% endif %}<|over|>", ("<|over|>",), set()),
        ("{{ m.thinking.length }}<|over|>", ("<|over|>",), set()),
    ):
        assert ends_of("{% for m in messages %}{{ m.content }}" + template + "{% endfor %}", *tokens) == ends
    assert ends_of({"default": "{{ messages[-1].content }}<|over|>", "tools": ""}, "<|over|>") == {"<|over|>"}
    assert ends_of(None, "<|over|>") == ends_of({"tools": "<|over|>"}, "<|over|>") == set()


def test_a_named_end_of_the_template_ends_an_answer_too() -> None:
    """Also where the template writes something else after it, as the beginning of the next turn."""
    assert ends_of("{{ messages[-1].content }}<|im_end|>\n<|im_start|>assistant", "<|im_end|>", "<|eot_id|>") == {
        "<|im_end|>"
    }
    assert ends_of(tool_templates.HERMES, "<|im_start|>", "<|im_end|>", "<tool_call>") == {"<|im_end|>"}
    assert ends_of(tool_templates.LLAMA, "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>") == {"<|eot_id|>"}
    assert ends_of("{{ messages[-1].content }}<|end|>", "<|end|>", "<|return|>", "<|call|>") == set()
    assert ends_of("{{ messages[-1].content }}<|end|>", "<|end|>") == {"<|end|>"}
    assert find_named_ends({"<|end|>": 1, "<|return|>": 2, "<|call|>": 3, "a": 4}) == {2, 3}
    assert find_named_ends({"<|end|>": 1, "<|call|>": 3}) == {1, 3}
