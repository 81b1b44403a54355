"""Chat templates: found where a model's folder has them, what they read, and rendered by transformers' own renderer.
Templates come with models and are untrusted code, and that renderer keeps its sandbox up to date.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.host.package import without_side_effects
from cortexmlx.messages import EFFORT, THINKING, TemplateVars
from cortexmlx.models.json_file import read_json_object
from cortexmlx.models.messages import one_line
from cortexmlx.request import Thoughts

if TYPE_CHECKING:
    from jinja2 import nodes

_RENDERER = "transformers.utils.chat_template_utils"

_RENDERERS_OWN = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "raise_exception",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "strftime_now",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)
"""What a template may read that no caller sets: the renderer does, or takes it for an option of its own."""


@dataclass(frozen=True)
class FoundTemplate:
    """The template for an ordinary conversation, if there is one, and the names of those for other purposes."""

    text: str | None
    others: tuple[str, ...] = ()


def find_template(folder: Path) -> FoundTemplate:
    """The chat template of a model's folder: a file of its own, or in the tokenizer's settings, where several may be
    listed by name, or in the file that processors of images read. Raises ModelCorrupt for a file that is broken.
    """
    others = sorted(path.stem for path in (folder / "additional_chat_templates").glob("*.jinja"))
    file = folder / "chat_template.jinja"
    if file.is_file():
        return FoundTemplate(file.read_text(encoding="utf-8", errors="replace"), tuple(others))
    for name in ("tokenizer_config.json", "chat_template.json"):
        template = read_json_object(folder / name).get("chat_template") if (folder / name).is_file() else None
        if isinstance(template, list):
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            template = named.pop("default", None)
            others += map(str, named)
        if isinstance(template, str):
            return FoundTemplate(template, tuple(others))
    return FoundTemplate(None, tuple(others))


def use_default_template(wrapper: Any, folder: Path) -> tuple[str, ...]:
    """Give mlx-lm's wrapper the template for ordinary conversations where transformers finds none, or several and none
    of them the default; notes for the user where there is none.
    """
    template = wrapper.chat_template
    if isinstance(template, str) or (isinstance(template, dict) and "default" in template):
        return ()
    if wrapper.has_chat_template and template is None:  # mlx-lm renders in Python
        return ()
    found = find_template(folder)
    wrapper.chat_template, wrapper.has_chat_template = found.text, found.text is not None
    if found.text is None and found.others:
        return (f"it has chat templates for special purposes only ({', '.join(found.others)}): none is used",)
    return ()


def render(
    template: str,
    conversation: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    options: Mapping[str, Any],
) -> str:
    """The text of `conversation` by `template`; `options` are the renderer's and the template's variables.

    Raises InvalidRequest when the template is broken or refuses the conversation.
    """
    from jinja2 import TemplateError

    renderer = _import_renderer()
    try:
        rendered, _ = renderer.render_jinja_template(
            conversations=[[dict(message) for message in conversation]],
            tools=None if tools is None else list(tools),
            chat_template=template,
            **options,
        )
    except (TemplateError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise render_error(error) from error
    return str(rendered[0])


def variables_of(template: str) -> frozenset[str]:
    """The variables that a template reads and a caller may set. Raises InvalidRequest when the template is broken."""
    from jinja2 import TemplateError, meta

    try:
        return frozenset(meta.find_undeclared_variables(_parsed(template))) - _RENDERERS_OWN
    except TemplateError as error:
        raise render_error(error) from error


def _parsed(template: str) -> nodes.Template:
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what an assistant wrote, for training: its content is the template's."""

        tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return ImmutableSandboxedEnvironment(extensions=[Generation, loopcontrols]).parse(template)


def variables_read(tokenizer: Any) -> frozenset[str] | None:
    """The variables that the chat template of a tokenizer reads, mlx-lm's or ours: see `variables_of`. None where code
    renders, which does not say.
    """
    template = _template_text(tokenizer)
    if getattr(tokenizer, "_chat_template", None) is not None or not template:
        return None if tokenizer.has_chat_template else frozenset()
    return variables_of(template)


_HARMONY = "<|channel|>"
_MARKED = (
    (Thoughts("<think>", "</think>"), ("<think>", "</think>")),
    (Thoughts("<longcat_think>", "</longcat_think>"), ("<longcat_think>", "</longcat_think>")),
    (Thoughts("<|think:start|>", "<|think:end|>"), ("<|think:start|>", "<|think:end|>")),
    (Thoughts("<|channel>thought", "<channel|>"), ("<|channel>", "<channel|>")),
    (
        Thoughts("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
    ),
    (
        Thoughts(
            f"{_HARMONY}analysis<|message|>",
            f"<|end|><|start|>assistant{_HARMONY}final<|message|>",
            skipped=f"{_HARMONY}final<|message|>",
        ),
        (_HARMONY, "<|message|>", "<|start|>", "<|end|>"),
    ),
    (Thoughts("[THINK]", "[/THINK]"), ("[THINK]", "[/THINK]")),
    (Thoughts("<|START_THINKING|>", "<|END_THINKING|>"), ("<|START_THINKING|>", "<|END_THINKING|>")),
    (Thoughts("<seed:think>", "</seed:think>"), ("<seed:think>", "</seed:think>")),
)
"""How models mark their thoughts, and the tokens by which one is known: first those that mlx-lm knows."""


def thoughts_of(tokenizer: Any) -> Thoughts | None:
    """How the model of a tokenizer, mlx-lm's or ours, marks its thoughts: known by the tokens that it has, else by the
    tags that its chat template writes. None if it does not think.
    """
    vocabulary = tokenizer.get_vocab()
    for thoughts, tokens in _MARKED:
        if all(token in vocabulary for token in tokens):
            return thoughts
    template = _template_text(tokenizer)
    return next((t for t, _ in _MARKED if t.open in template and t.close in template), None)


def reads_thoughts_field(tokenizer: Any) -> bool:
    """Whether the chat template reads the thoughts of an earlier answer from a field of their own. transformers gives
    `reasoning_content` the names that templates have for it.
    """
    from jinja2 import TemplateError, nodes

    try:
        parsed = _parsed(_template_text(tokenizer))
    except TemplateError:
        return False
    read = {node.attr for node in parsed.find_all(nodes.Getattr)}
    read |= {node.value for node in parsed.find_all(nodes.Const) if isinstance(node.value, str)}
    return not read.isdisjoint({"reasoning_content", "thinking", "reasoning"})


def _template_text(tokenizer: Any) -> str:
    template = tokenizer.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    return template if isinstance(template, str) else ""


def accepted_variables(variables: TemplateVars, names: frozenset[str] | None) -> dict[str, object]:
    """The variables as a template that reads those called `names` takes them (None: code does, which checks them
    itself). Raises InvalidRequest for those that it does not read, which would change nothing.

    `reasoning_effort` "none" switches thoughts off where a template has no such variable, but a switch.
    """
    if names is None:
        return dict(variables)
    switch = "thinking" if THINKING not in names and "thinking" in names else THINKING
    given = {switch if name == THINKING else name: value for name, value in variables.items()}
    if given.get(EFFORT) == "none" and EFFORT not in names and switch in names:
        given = {switch: False, **given}
        del given[EFFORT]
    if unread := sorted(given.keys() - names):
        known = ", ".join(sorted(names)) or "none"
        raise InvalidRequest(
            f"the model's chat template does not read {', '.join(unread)}, so that would change nothing. "
            f"Its variables: {known}."
        )
    return given


def render_error(error: Exception) -> InvalidRequest:
    """What to tell the caller whose messages a template refused, or could not make anything of."""
    return InvalidRequest(
        f"the model's chat template cannot render these messages: {one_line(error)}. Change them, or give a plain text "
        "(--raw), which goes without the template."
    )


def prepare() -> threading.Thread:
    """Import the renderer on a thread of its own: that takes half a second, which loading weights leaves idle.

    Whoever starts it must wait for it: two threads that import transformers at once can see half of it.
    """
    thread = threading.Thread(target=_import_renderer, name="cortexmlx-templates", daemon=True)
    thread.start()
    return thread


def _import_renderer() -> Any:
    with without_side_effects():
        return importlib.import_module(_RENDERER)
