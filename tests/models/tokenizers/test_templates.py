"""Chat templates: rendered by transformers' own renderer, and one line for whatever goes wrong in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.core.prompt import tokenize
from cortexmlx.errors import InvalidRequest
from cortexmlx.models.tokenizers.base import SpecialTokens
from cortexmlx.models.tokenizers.folder import load_tokenizer
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.models.tokenizers.templates import (
    FoundTemplate,
    accept_variables,
    filter_hints,
    find_template,
    find_thought_marks,
    find_variables,
    reads_thoughts_field,
    render_template,
)
from support.models.byte_tokenizers import SMOLLM, build
from support.models.thinking import DEGREES, OTHER_NAME, SET_FIRST, SWITCHED, write_thinking
from support.models.tiny import write_tiny


def test_a_template_that_refuses_is_an_invalid_request() -> None:
    special = SpecialTokens()
    tokenizer = build(SMOLLM, special, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])


MESSAGES = [{"role": "user", "content": "hi"}]


def test_tools_and_variables_reach_the_template() -> None:
    template = "{{ tools[0]['name'] }}, {{ mood }}, {{ messages[0]['content'] }}"
    assert render_template(template, MESSAGES, [{"name": "look_up"}], {"mood": "calm"}) == "look_up, calm, hi"
    assert render_template("{{ tools is none }}", MESSAGES, None, {}) == "True"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}",
        "{{ messages[7]['content'] }}",
        "{{ nothing.at.all }}",
        "{{ '{0}'.format() }}",
        "{{ '{a}'.format() }}",
        "{{ 'a' | dictsort }}",
        "{{ 1 + 'a' }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{{ range(10 ** 12) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
    ids=[
        "syntax",
        "index",
        "undefined",
        "no argument",
        "no name",
        "attribute",
        "types",
        "a way out of the sandbox",
        "a change of what it was given",
        "zero",
        "a long range",
        "recursion",
    ],
)
def test_a_template_that_breaks_is_an_invalid_request_of_one_line(template: str) -> None:
    with pytest.raises(InvalidRequest, match="the model's chat template cannot render") as caught:
        render_template(template, MESSAGES, None, {})
    assert "\n" not in str(caught.value)


ORDINARY, OTHER = "o{{ messages[0]['content'] }}", "x"


@pytest.mark.parametrize(
    ("files", "text", "others"),
    [
        ({"chat_template.jinja": ORDINARY, "tokenizer_config.json": OTHER}, ORDINARY, ()),
        ({"tokenizer_config.json": ORDINARY, "chat_template.json": OTHER}, ORDINARY, ()),
        ({"chat_template.json": ORDINARY}, ORDINARY, ()),
        (
            {"additional_chat_templates/rag.jinja": OTHER, "tokenizer_config.json": ORDINARY},
            ORDINARY,
            ("rag",),
        ),
        ({"additional_chat_templates/rag.jinja": OTHER}, None, ("rag",)),
        ({"tokenizer_config.json": [("default", ORDINARY), ("rag", OTHER)]}, ORDINARY, ("rag",)),
        ({"tokenizer_config.json": [("chat", ORDINARY), ("rag", OTHER)]}, None, ("chat", "rag")),
        ({}, None, ()),
    ],
)
def test_a_folder_has_one_template_for_ordinary_conversations(
    tmp_path: Path, files: dict[str, Any], text: str | None, others: tuple[str, ...]
) -> None:
    """And the tokenizer that transformers loads gets it, too, also where transformers finds none or cannot decide."""
    folder = write_tiny(tmp_path / "m")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "additional_chat_templates").mkdir()
    for name, template in files.items():
        if isinstance(template, list):
            template = [{"name": name, "template": text} for name, text in template]
        written = settings if name == "tokenizer_config.json" else {}
        content = template if name.endswith(".jinja") else json.dumps(written | {"chat_template": template})
        (folder / name).write_text(content)
    assert find_template(folder) == FoundTemplate(text, others)
    tokenizer, notes = load_tokenizer(folder, {257})
    assert tokenizer.has_chat_template is (text is not None)
    assert bool(notes) is (text is None and bool(others)) and all(name in "".join(notes) for name in notes and others)
    if text is not None:
        assert tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True) == "ohi"


def test_what_current_templates_use_is_there(tmp_path: Path) -> None:
    """Thinking, dates, loops that end early, and where an answer begins: as mlx-lm renders it."""
    from mlx_lm.tokenizer_utils import load

    folder = write_tiny(tmp_path / "m")
    (folder / "chat_template.jinja").write_text(
        "{{ strftime_now('%Y') | length }} {{ enable_thinking }} {% for m in messages %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% break %}{% endfor %}{% if add_generation_prompt %}<s>{% endif %}{{ tools is none }}"
    )
    ours, _ = load_tokenizer(folder, {257})
    theirs = load(folder, {"trust_remote_code": False})
    rendered = [t.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True) for t in (ours, theirs)]
    assert rendered[0] == rendered[1] == "4 False hi<s>True"


@pytest.mark.parametrize(
    "template",
    [
        "{% if %}",
        "{{ raise_exception('after a\nsystem message') }}",
        "{% for t in tools %}{% endfor %}",
        "{{" + 9999 * "(",
    ],
)
def test_a_folders_template_that_fails_is_one_line_with_the_next_step(tmp_path: Path, template: str) -> None:
    folder = write_tiny(tmp_path / "m")
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = SharedTokenizer(load_tokenizer(folder, {257})[0])
    with pytest.raises(InvalidRequest, match=r"cannot render these messages: .*--raw") as caught:
        tokenize(tokenizer, MESSAGES)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "names"),
    [
        (SWITCHED, {"enable_thinking"}),
        (SET_FIRST, {"enable_thinking"}),
        (OTHER_NAME, {"thinking"}),
        (DEGREES, {"reasoning_effort"}),
        ("{{ bos_token }}{% for t in tools or [] %}{{ t | tojson }}{% break %}{% endfor %}", {"bos_token"}),
        ("{{ messages }}{{ strftime_now('%d') }}{{ raise_exception('x') }}{% set ns = namespace(a=1) %}", set()),
    ],
)
def test_the_variables_of_a_template_are_those_that_change_its_text(template: str, names: set[str]) -> None:
    """The judge is transformers' own list, less what the renderer gives."""
    from transformers.utils.chat_template_utils import _get_template_variables

    assert find_variables(template) == names
    assert _get_template_variables(template) - {"messages", "add_generation_prompt", "tools"} == names


def test_a_broken_template_has_no_variables() -> None:
    with pytest.raises(InvalidRequest, match="cannot render"):
        find_variables("{% for m in messages %}")


def test_the_switch_of_thoughts_has_one_name_for_all_templates() -> None:
    assert accept_variables({"enable_thinking": False}, find_variables(SWITCHED)) == {"enable_thinking": False}
    assert accept_variables({"enable_thinking": False}, find_variables(OTHER_NAME)) == {"thinking": False}
    assert accept_variables({"reasoning_effort": "none"}, find_variables(SWITCHED)) == {"enable_thinking": False}
    assert accept_variables({"reasoning_effort": "none"}, find_variables(DEGREES)) == {"reasoning_effort": "none"}
    assert accept_variables({"reasoning_effort": "none", "thinking": True}, find_variables(OTHER_NAME)) == {
        "thinking": True
    }
    assert accept_variables({"anything": 1}, None) == {"anything": 1}, "code that renders checks it itself"


@pytest.mark.parametrize(
    ("variables", "template", "said"),
    [
        ({"enable_thinkin": False}, SWITCHED, "does not read enable_thinkin, .* Its variables: enable_thinking."),
        ({"reasoning_effort": "low"}, SWITCHED, "does not read reasoning_effort"),
        ({"enable_thinking": False}, DEGREES, "does not read enable_thinking, .* reasoning_effort."),
        ({"b": 1, "a": 1}, "{{ messages }}", "does not read a, b, .* Its variables: none."),
        ({"messages": []}, SWITCHED, "does not read messages"),
        ({"add_generation_prompt": False}, SWITCHED, "does not read add_generation_prompt"),
    ],
)
def test_variables_that_a_template_does_not_read_are_refused(
    variables: dict[str, object], template: str, said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        accept_variables(variables, find_variables(template))


KNOWN_TO_MLX_LM = [
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<|channel>", "<channel|>"),
    ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
]
OTHERS = [
    ("<|channel|>", "<|message|>", "<|start|>", "<|end|>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
]


@pytest.mark.parametrize("tokens", [*KNOWN_TO_MLX_LM, *OTHERS, ()])
def test_tags_are_those_that_mlx_lm_finds_and_a_few_more(tokens: tuple[str, ...], tmp_path: Path) -> None:
    from mlx_lm import utils

    path = write_thinking(tmp_path / "m", "{{ messages }}", tokens)
    ours, judge = find_thought_marks(load_tokenizer(path, set())[0]), utils.load_tokenizer(path)
    if tokens in OTHERS:
        assert ours is not None and ours.open.startswith(tokens[0])
    else:
        assert (ours and ours.open, ours and ours.close) == (judge.think_start, judge.think_end)


def test_tags_that_are_no_tokens_are_known_from_the_template() -> None:
    assert find_thought_marks(build(SMOLLM, SpecialTokens(), chat_template="{{ '<think>' ~ '</think>' }}")) is not None
    assert find_thought_marks(build(SMOLLM, SpecialTokens(), chat_template="{{ '<think>' }}")) is None
    assert find_thought_marks(build(SMOLLM, SpecialTokens())) is None


@pytest.mark.parametrize(
    ("template", "apart"),
    [
        ("{% if m.reasoning_content is string %}{% endif %}", True),
        ("{% if 'thinking' in m %}{{ m['thinking'] }}{% endif %}", True),
        ("{{ m.get('reasoning') }}", True),
        ("{% if thinking or enable_thinking %}{{ m.content.split('</think>') }}{% endif %}", False),
        ("{% for", False),
        (None, False),
    ],
)
def test_whether_a_template_reads_thoughts_from_a_field(template: str | None, apart: bool) -> None:
    assert reads_thoughts_field(build(SMOLLM, SpecialTokens(), chat_template=template)) is apart


def test_a_tokenizer_of_ours_switches_as_mlx_lms_wrapper_does() -> None:
    """A template that asks for thoughts only if it is told to is told so where the model thinks."""
    asks = "{{ enable_thinking }}{{ '</think>' if messages[0].x else '' }}"
    plain = SharedTokenizer(build(SMOLLM, SpecialTokens(), chat_template=asks))
    thinks = SharedTokenizer(build(SMOLLM, SpecialTokens(), chat_template=asks + "{# <think> #}"))
    assert plain.thoughts is None and plain.render(MESSAGES) == "False"
    assert thinks.thoughts is not None and thinks.render(MESSAGES) == "True"
    assert thinks.render(MESSAGES, {"enable_thinking": False}) == "False"


def test_a_hint_is_for_templates_that_read_it() -> None:
    hints = {"enable_thinking": False, "reasoning_effort": "low"}
    assert filter_hints(hints, find_variables(SWITCHED)) == {"enable_thinking": False}
    assert filter_hints(hints, find_variables(OTHER_NAME)) == {"enable_thinking": False}
    assert filter_hints(hints, find_variables(DEGREES)) == {"reasoning_effort": "low"}
    assert filter_hints(hints, frozenset()) == filter_hints(hints, None) == {}
