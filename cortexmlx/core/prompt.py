"""Prompts: the types that callers may pass, and how they become token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from cortexmlx.core.arguments import is_list
from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.models.tokenizers.shared import SharedTokenizer
from cortexmlx.models.tokenizers.templates import filter_hints, render_error
from cortexmlx.structured.calls.format import AllowedCalls
from cortexmlx.structured.output import Thoughts
from cortexmlx.types.images import ImageLayout
from cortexmlx.types.messages import (
    NO_VARIABLES,
    ChatPrompt,
    PromptMemory,
    TemplateVars,
    check_role,
    checked_vars,
    plain_message,
)
from cortexmlx.types.request import Message
from cortexmlx.types.sampling_params import SamplingParams


@dataclass(frozen=True)
class PromptSource:
    """What the tokens of a chat were made of: messages, the text that they became, and how it was rendered."""

    messages: Sequence[Message]
    text: str
    variables: TemplateVars
    render: Callable[[Sequence[Message]], str | list[int]]
    """Renders other messages with the same variables and tools."""


class ChatTokens(list[int]):
    """The token ids of a rendered chat, and how its answer marks thoughts and calls. Lengths: see `QueuedRequest`."""

    def __init__(
        self,
        ids: Iterable[int],
        thoughts: Thoughts | None,
        calls: AllowedCalls | None = None,
        *,
        thinking_tag_length: int = 0,
        anchor_length: int = 0,
        source: PromptSource | None = None,
        images: ImageLayout | None = None,
    ) -> None:
        super().__init__(ids)
        self.thoughts = thoughts
        self.calls = calls
        self.thinking_tag_length = thinking_tag_length
        self.anchor_length = anchor_length
        self.source = source
        self.images = images


Prompt = str | Sequence[int] | Sequence[Message] | ChatPrompt
"""Plain text (encoded as it is), token ids, or chat messages (rendered with the model's chat template), which may come
with variables for the template.
"""

_PROMPT_KINDS = (
    "a prompt is a text, a list of token ids, a list of messages or a ChatPrompt; generate_batch takes several prompts"
)


_NAMES = {"role", "name", "tool_call_id"}
"""Fields of a message that say who wrote it, and nothing else."""

_QUICK = 1 << 14
"""Characters of a text whose tokenization takes some 10 ms."""

_LONG = 1 << 16
"""A text with this many characters is first checked by a lower bound of its tokens, before time is spent to tokenize
it.
"""


def tokenize(
    tokenizer: SharedTokenizer,
    prompt: Prompt,
    check_length: Callable[[int], None] | None = None,
    params: SamplingParams | None = None,
) -> list[int]:
    """Return the prompt's token ids. Before a long text is tokenized, `check_length` is called with the least number of
    tokens that it has; it raises if that is too many. `params` have the tools that the model is told about.

    Raises InvalidRequest for what is no prompt, or what the chat template cannot render.
    """
    if isinstance(prompt, ChatTokens):
        return prompt
    calls = None if params is None else make_allowed_calls(tokenizer, params)
    if isinstance(prompt, ChatPrompt):
        variables = template_variables(tokenizer, prompt)
        with forget_images_after(tokenizer):
            return _tokenize_messages(tokenizer, prompt.messages, variables, check_length, calls, prompt.memory)
    items: list[Any] = [] if isinstance(prompt, str) or not is_list(prompt) else list(prompt)
    if calls is not None and not (items and isinstance(items[0], Mapping)):
        raise InvalidRequest("`tools` need messages, since the chat template tells the model about them", field="tools")
    if isinstance(prompt, str):
        prompt = _replace_surrogates(prompt)
        bos = tokenizer.bos_token
        return _encode(tokenizer, prompt, bos is None or not prompt.startswith(bos), check_length)
    if not is_list(prompt):
        raise InvalidRequest(_PROMPT_KINDS)
    if all(isinstance(item, Integral) and not isinstance(item, bool) for item in items):
        return [int(item) for item in items]
    with forget_images_after(tokenizer):
        return _tokenize_messages(tokenizer, items, NO_VARIABLES, check_length, calls)


def make_allowed_calls(tokenizer: SharedTokenizer, params: SamplingParams) -> AllowedCalls | None:
    """Return which tools answers may call and how; None without tools. A model without any may be offered tools that no
    answer may call (`tool_choice` is "none"); else raises InvalidRequest.
    """
    if not params.offered or (tokenizer.call_format is None and params.tool_choice == "none"):
        return None
    if tokenizer.call_format is None:
        raise InvalidRequest(
            "this model cannot call tools: its chat template reads none, or the format of its calls is not known. "
            "Describe them in a message, and ask for an answer of a JSON schema",
            field="tools",
        )
    return AllowedCalls(tokenizer.call_format, params.offered, params.tool_choice, params.parallel_tool_calls)


def template_variables(tokenizer: SharedTokenizer, prompt: ChatPrompt) -> TemplateVars:
    """Return a prompt's variables for the chat template, and those of its hints that the template reads."""
    if not prompt.hints:
        return prompt.template_vars
    return {**prompt.template_vars, **filter_hints(checked_vars(prompt.hints), tokenizer.template_vars)}


def is_quick_to_tokenize(prompt: object) -> bool:
    """Return whether a prompt surely tokenizes fast: short text, or token ids. A chat template may loop."""
    if isinstance(prompt, str):
        return len(prompt) < _QUICK
    return isinstance(prompt, (list, tuple)) and not (prompt and isinstance(prompt[0], Mapping))


@contextmanager
def forget_images_after(tokenizer: SharedTokenizer) -> Iterator[None]:
    """Context in which a prompt is tokenized. At its end, this thread forgets its images; only the tokens keep them."""
    try:
        yield
    finally:
        if tokenizer.images is not None:
            tokenizer.images.begin()


def _tokenize_messages(
    tokenizer: SharedTokenizer,
    messages: Sequence[Message],
    variables: TemplateVars,
    check_length: Callable[[int], None] | None,
    calls: AllowedCalls | None,
    memory: PromptMemory | None = None,
) -> ChatTokens:
    """Render messages with the chat template, and return their tokens as ChatTokens."""
    is_message_list = isinstance(messages, Sequence) and len(messages) > 0
    if not is_message_list or not all(isinstance(message, Mapping) for message in messages):
        raise InvalidRequest(_PROMPT_KINDS)

    def render_messages(others: Sequence[Message]) -> str | list[int]:
        return render(tokenizer, others, variables, calls)

    rendered_prompt, source = render_messages(messages), None
    if not isinstance(rendered_prompt, str):
        ids = rendered_prompt
    elif memory is None:
        ids = _encode(tokenizer, rendered_prompt, False, check_length)
    else:
        _reject_overlong(tokenizer, rendered_prompt, check_length)
        ids = memory.tokens(tokenizer, rendered_prompt, render_messages)
    thoughts = thoughts_of_answer(tokenizer, rendered_prompt, calls)
    thinking_tag_length, anchor_length = (
        count_thinking_tag_tokens(tokenizer, rendered_prompt, ids, thoughts),
        0 if memory is None else memory.anchor(thoughts),
    )
    if isinstance(rendered_prompt, str):
        source = PromptSource(messages, rendered_prompt, variables, render_messages)
    images = None if tokenizer.images is None else tokenizer.images.find_images(ids)
    return ChatTokens(
        ids,
        thoughts,
        calls,
        thinking_tag_length=thinking_tag_length,
        anchor_length=anchor_length,
        source=source,
        images=images,
    )


def thoughts_of_answer(
    tokenizer: SharedTokenizer, rendered_prompt: str | list[int], calls: AllowedCalls | None = None
) -> Thoughts | None:
    """Return how the answer to a rendered prompt marks its thoughts. The prompt may have opened them already."""
    thoughts = tokenizer.thoughts if calls is None else calls.format.adapt_thoughts(tokenizer.thoughts)
    if thoughts is None:
        return None
    if isinstance(rendered_prompt, str):
        return replace(thoughts, opened_by_prompt=rendered_prompt.rstrip().endswith(thoughts.open))
    tag_id_lists = (tokenizer.encode(thoughts.open + blank, False) for blank in ("", "\n"))
    ends_with_tag = any(ids and rendered_prompt[-len(ids) :] == ids for ids in tag_id_lists)
    return replace(thoughts, opened_by_prompt=ends_with_tag)


def count_thinking_tag_tokens(
    tokenizer: SharedTokenizer, rendered_prompt: str | list[int], ids: Sequence[int], thoughts: Thoughts | None
) -> int:
    """Return how many tokens at the end of a prompt are thinking tags; 0 if the tags are not whole tokens there."""
    if thoughts is None or not isinstance(rendered_prompt, str):
        return 0
    trailing_tags = trailing_thinking_tags(rendered_prompt, thoughts)
    tag_ids = tokenizer.encode(trailing_tags, False) if trailing_tags else []
    return len(tag_ids) if tag_ids and list(ids[-len(tag_ids) :]) == tag_ids else 0


def trailing_thinking_tags(rendered_prompt: str, thoughts: Thoughts) -> str:
    """Return the thinking tags that end a rendered prompt: the opening one, or both; "" if there are none."""
    tag_start = rendered_prompt.rfind(thoughts.open)
    if tag_start < 0 or rendered_prompt[tag_start:].replace(thoughts.open, "").replace(thoughts.close, "").strip():
        return ""
    return rendered_prompt[tag_start:]


def render(
    tokenizer: SharedTokenizer,
    messages: Sequence[Message],
    variables: TemplateVars = NO_VARIABLES,
    calls: AllowedCalls | None = None,
) -> str | list[int]:
    """Render messages, and the tools that may be called, with the chat template: see `SharedTokenizer.render`. Raises
    InvalidRequest if it cannot.

    Null fields of a message are left out: templates would write "None". The content beside tool calls is then empty.
    """
    try:
        images = tokenizer.images
        write = None
        if images is not None:
            images.begin()
            write = images.write
            messages = [images.arrange(message) for message in messages]
        template_messages = [_template_message(number, message, write) for number, message in enumerate(messages, 1)]
        tools = [] if calls is None else [tool.as_mapping() for tool in calls.tools]
        rendered_prompt = tokenizer.render(template_messages, checked_vars(variables), tools)
    except CortexError:
        raise
    except Exception as error:
        raise render_error(error) from error
    return _replace_surrogates(rendered_prompt) if isinstance(rendered_prompt, str) else rendered_prompt


def _template_message(
    number: int, message: Message, write_image: Callable[[Mapping[str, Any]], str] | None
) -> dict[str, Any]:
    """Return a message in the form that templates read. Raises InvalidRequest if it has no role or no content."""
    fields = {name: value for name, value in plain_message(message, write_image).items() if value is not None}
    if not isinstance(role := fields.get("role"), str):
        raise InvalidRequest(f'message {number} needs a `role` that is a text, such as "user"')
    check_role(role)
    if fields["role"] == "developer":
        fields["role"] = "system"
    if "content" not in fields and (fields["role"] in ("system", "user") or not fields.keys() - _NAMES):
        raise InvalidRequest(f"message {number}, of the role {fields['role']!r:.40}, has no `content`: give it a text")
    content = fields.setdefault("content", "")
    if not isinstance(content, (str, Mapping)):
        raise InvalidRequest(f"the `content` of message {number} is {content!r:.80}, but must be a text")
    return fields


def _replace_surrogates(text: str) -> str:
    """Return a text with its lone surrogates, which have no tokens, replaced by question marks."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode("utf-8")
    return text


def _encode(
    tokenizer: SharedTokenizer, text: str, add_special_tokens: bool, check_length: Callable[[int], None] | None
) -> list[int]:
    """Return the tokens of a text. `check_length` raises before a text that is too long is tokenized."""
    _reject_overlong(tokenizer, text, check_length)
    return tokenizer.encode(text, add_special_tokens)


def _reject_overlong(tokenizer: SharedTokenizer, text: str, check_length: Callable[[int], None] | None) -> None:
    """Have `check_length` refuse a long text by a lower bound of its tokens, before time is spent to tokenize it."""
    if check_length is not None and len(text) >= _LONG:
        check_length(tokenizer.token_lower_bound.compute(text))


def common_length(first: str, second: str) -> int:
    """Return the length of the common prefix of two texts, in characters, found by binary search."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
