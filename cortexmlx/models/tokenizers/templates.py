"""Chat templates: find a model's template and the variables that it reads, and render it with transformers' own
renderer.

Templates come with models and are untrusted code. That renderer runs them in a sandbox, which transformers keeps up to
date.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.mlx_lm.package import without_side_effects
from cortexmlx.models.folder_config import read_json_object
from cortexmlx.models.messages import one_line
from cortexmlx.structured.calls.find import find_format
from cortexmlx.structured.calls.format import CallFormat
from cortexmlx.structured.output import Thoughts
from cortexmlx.types.messages import EFFORT, THINKING, TemplateVars

if TYPE_CHECKING:
    from jinja2 import nodes

_RENDERER_VARIABLES = frozenset(
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
        "tools",
        "tokenizer_kwargs",
        "truncation",
    }
)
"""Names that a template may read and no caller sets: the renderer sets them, or takes them as its own options."""


@dataclass(frozen=True)
class FoundTemplate:
    """The chat template of a model's folder, and the names of its templates for other purposes."""

    text: str | None
    """The template for an ordinary conversation; None if there is no such template."""
    other_names: tuple[str, ...] = ()
    """The names of the templates for other purposes."""


def find_template(folder: Path) -> FoundTemplate:
    """Find the chat template in a model's folder.

    It is in a file of its own, in the tokenizer's settings (which may list several by name), or in the file that image
    processors read. Raises ModelCorrupt for a broken file.
    """
    other_names = sorted(path.stem for path in (folder / "additional_chat_templates").glob("*.jinja"))
    file = folder / "chat_template.jinja"
    if file.is_file():
        return FoundTemplate(file.read_text(encoding="utf-8", errors="replace"), tuple(other_names))
    for name in ("tokenizer_config.json", "chat_template.json"):
        template = read_json_object(folder / name).get("chat_template") if (folder / name).is_file() else None
        if isinstance(template, list):
            templates_by_name = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            template = templates_by_name.pop("default", None)
            other_names += map(str, templates_by_name)
        if isinstance(template, str):
            return FoundTemplate(template, tuple(other_names))
    return FoundTemplate(None, tuple(other_names))


def use_default_template(wrapper: Any, folder: Path) -> tuple[str, ...]:
    """Give mlx-lm's wrapper the folder's default chat template if transformers finds none. Return a note for the user
    if the folder has templates for other purposes only.
    """
    template = wrapper.chat_template
    if isinstance(template, str) or (isinstance(template, dict) and "default" in template):
        return ()
    if wrapper.has_chat_template and template is None:  # mlx-lm renders in Python
        return ()
    folder_template = find_template(folder)
    wrapper.chat_template, wrapper.has_chat_template = folder_template.text, folder_template.text is not None
    if folder_template.text is None and folder_template.other_names:
        return (
            f"it has chat templates for special purposes only ({', '.join(folder_template.other_names)}): none is used",
        )
    return ()


def render_template(
    template: str,
    conversation: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    options: Mapping[str, Any],
) -> str:
    """Render `conversation` by a chat template. `options` are those of the renderer and the template's variables.

    Raises InvalidRequest if the template is broken or refuses the conversation.
    """
    renderer = _import_renderer()
    try:
        texts, _ = renderer.render_jinja_template(
            conversations=[[dict(message) for message in conversation]],
            tools=None if tools is None else list(tools),
            chat_template=template,
            **options,
        )
    except Exception as error:  # a template computes what it likes
        raise render_error(error) from error
    return str(texts[0])


@lru_cache(maxsize=8)
def find_variables(template: str) -> frozenset[str]:
    """Return the variables that a template reads and callers may set. Raises InvalidRequest for a broken template."""
    from jinja2 import TemplateError, meta

    try:
        return frozenset(meta.find_undeclared_variables(_parse_template(template))) - _RENDERER_VARIABLES
    except TemplateError as error:
        raise render_error(error) from error


def _parse_template(template: str) -> nodes.Template:
    """Parse a chat template with the extensions that transformers' renderer has. Raises TemplateError."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag `{% generation %}`, which marks an assistant's text for training. It is rendered as its content."""

        tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    try:
        return ImmutableSandboxedEnvironment(extensions=[Generation, loopcontrols]).parse(template)
    except RecursionError:
        raise TemplateError("it is nested too deeply") from None


def find_tokenizer_variables(tokenizer: Any) -> frozenset[str] | None:
    """Return the variables that the chat template of a tokenizer (mlx-lm's or ours) reads. None if Python code renders
    the conversation, since its variables are unknown.
    """
    template = _template_text(tokenizer)
    if getattr(tokenizer, "_chat_template", None) is not None or not template:
        return None if tokenizer.has_chat_template else frozenset()
    return find_variables(template)


_HARMONY = "<|channel|>"
_THOUGHT_MARKS = (
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
            skip_text=f"{_HARMONY}final<|message|>",
        ),
        (_HARMONY, "<|message|>", "<|start|>", "<|end|>"),
    ),
    (Thoughts("[THINK]", "[/THINK]"), ("[THINK]", "[/THINK]")),
    (Thoughts("<|START_THINKING|>", "<|END_THINKING|>"), ("<|START_THINKING|>", "<|END_THINKING|>")),
    (Thoughts("<seed:think>", "</seed:think>"), ("<seed:think>", "</seed:think>")),
)
"""How models mark their thoughts, each with the tokens of a vocabulary that it is recognised by. The first ones are
those that mlx-lm knows.
"""


def find_thought_marks(tokenizer: Any) -> Thoughts | None:
    """Return the marks that a model puts around its thoughts; None if it does not think.

    The marks are recognised by the tokens of the tokenizer (mlx-lm's or ours), otherwise by the tags that its chat
    template writes.
    """
    vocabulary = tokenizer.get_vocab()
    for thoughts, tokens in _THOUGHT_MARKS:
        if all(token in vocabulary for token in tokens):
            return thoughts
    template = _template_text(tokenizer)
    return next((t for t, _ in _THOUGHT_MARKS if t.open in template and t.close in template), None)


def find_call_format(tokenizer: Any) -> CallFormat | None:
    """Return the tool-call format, by chat template and vocabulary; None if unknown or the template reads no tools."""
    from jinja2 import TemplateError, meta

    template = _template_text(tokenizer, "tool_use")
    if getattr(tokenizer, "_chat_template", None) is None:
        try:
            if "tools" not in meta.find_undeclared_variables(_parse_template(template)):
                return None
        except TemplateError:
            return None
    vocabulary = tokenizer.get_vocab()
    call_format = find_format(template, vocabulary)
    if call_format is not None:
        call_format.opener = vocabulary.get(call_format.trigger)
    return call_format


def reads_thoughts_field(tokenizer: Any) -> bool:
    """Return whether the chat template reads the thoughts of an earlier answer from a separate field. transformers
    passes `reasoning_content` under the names that templates use for it.
    """
    from jinja2 import TemplateError, nodes

    try:
        tree = _parse_template(_template_text(tokenizer))
    except TemplateError:
        return False
    read_names = {node.attr for node in tree.find_all(nodes.Getattr)}
    read_names |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return not read_names.isdisjoint({"reasoning_content", "thinking", "reasoning"})


def _template_text(tokenizer: Any, purpose: str = "default") -> str:
    """Return a tokenizer's chat template for a purpose, or else the default one; empty if there is none."""
    template = tokenizer.chat_template
    template = template.get(purpose, template.get("default")) if isinstance(template, dict) else template
    return template if isinstance(template, str) else ""


def accept_variables(variables: TemplateVars, names: frozenset[str] | None) -> dict[str, object]:
    """Return the variables under the names that the template has for them. `names` are those that it reads. Raises
    InvalidRequest for other variables, since they would change nothing.

    `names` is None if Python code renders the conversation. Then all variables are returned, and the code checks them
    itself. `reasoning_effort` "none" switches thoughts off if the template has no such variable, but has a switch.
    """
    if names is None:
        return dict(variables)
    switch = "thinking" if THINKING not in names and "thinking" in names else THINKING
    accepted = {switch if name == THINKING else name: value for name, value in variables.items()}
    if accepted.get(EFFORT) == "none" and EFFORT not in names and switch in names:
        accepted = {switch: False, **accepted}
        del accepted[EFFORT]
    if unread_names := sorted(accepted.keys() - names):
        names_text = ", ".join(sorted(names)) or "none"
        raise InvalidRequest(
            f"the model's chat template does not read {', '.join(unread_names)}, so that would change nothing. "
            f"Its variables: {names_text}."
        )
    return accepted


def filter_hints(hints: TemplateVars, names: frozenset[str] | None) -> dict[str, object]:
    """Return those of the `hints` (variables that may have no effect) that a template with these variables reads."""
    return {name: value for name, value in hints.items() if _reads_variable(name, value, names or frozenset())}


def _reads_variable(name: str, value: object, names: frozenset[str]) -> bool:
    """Return whether a template that reads `names` reads this variable."""
    try:
        accept_variables({name: value}, names)
    except InvalidRequest:
        return False
    return True


def render_error(error: Exception) -> InvalidRequest:
    """Return the error for a conversation that a template refuses or cannot render."""
    return InvalidRequest(
        f"the model's chat template cannot render these messages: {one_line(error).rstrip('.')}. Change them, or give "
        "a plain text (--raw), which goes without the template."
    )


def import_renderer_in_background() -> threading.Thread:
    """Import transformers' renderer of chat templates on a thread, and return the thread. The import takes half a
    second, while weights are loaded.

    The caller must join the thread: if two threads import transformers at once, one can see half of it.
    """
    thread = threading.Thread(target=_import_renderer, name="cortexmlx-templates", daemon=True)
    thread.start()
    return thread


def _import_renderer() -> Any:
    """Import the module of transformers that renders chat templates."""
    with without_side_effects():
        return importlib.import_module("transformers.utils.chat_template_utils")
