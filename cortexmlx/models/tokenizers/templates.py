"""Chat templates, rendered by transformers' own renderer: templates come with models and are untrusted code, and that
renderer keeps its sandbox up to date.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from cortexmlx.errors import InvalidRequest
from cortexmlx.host.package import without_side_effects
from cortexmlx.models.messages import one_line

_RENDERER = "transformers.utils.chat_template_utils"


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
        raise InvalidRequest(f"the model's chat template cannot render these messages: {one_line(error)}") from error
    return str(rendered[0])


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
