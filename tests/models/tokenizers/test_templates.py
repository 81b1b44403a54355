"""Chat templates: rendered by transformers' own renderer, and one line for whatever goes wrong in them."""

from __future__ import annotations

import pytest

from cortexmlx.errors import InvalidRequest
from cortexmlx.models.tokenizers.base import SpecialTokens
from support.byte_tokenizers import SMOLLM, build


def test_a_template_that_refuses_is_an_invalid_request() -> None:
    special = SpecialTokens()
    tokenizer = build(SMOLLM, special, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
