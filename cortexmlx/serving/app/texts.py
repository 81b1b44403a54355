"""What an engine says of texts and tokens without computing anything."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import TYPE_CHECKING

from cortexmlx.errors import InvalidRequest
from cortexmlx.serving.app.arguments import is_list
from cortexmlx.serving.prompt import Prompt, tokenize

if TYPE_CHECKING:
    from cortexmlx.models.tokenizers.shared import SharedTokenizer
    from cortexmlx.serving.worker import Worker
    from cortexmlx.stats import ModelInfo


class Texts:
    """The part of `Engine` that needs its tokenizer alone. It waits for nobody, and goes on when the engine is closed.
    Everything raises ForkedProcess in a forked child.
    """

    info: ModelInfo
    _worker: Worker
    _tokenizer: SharedTokenizer

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: text as it is, messages through the chat template. Raises InvalidRequest."""
        self._worker.check_process()
        return list(tokenize(self._tokenizer, prompt))

    def count_tokens(self, prompt: Prompt) -> int:
        """How many tokens a prompt has: what `usage.prompt_tokens` of its answer will say. Raises InvalidRequest."""
        return len(self.encode(prompt))

    def decode(self, tokens: Iterable[int], *, special_tokens: bool = False) -> str:
        """The text of token ids. What the tokenizer calls special, such as the beginnings and ends of turns, is left
        out unless `special_tokens`. Raises InvalidRequest for what is no token of the model.
        """
        self._worker.check_process()
        if not is_list(tokens):
            raise InvalidRequest(f"tokens are a list of token ids, not {tokens!r:.80}")
        ids: list[int] = []
        for token in tokens:
            if not isinstance(token, Integral) or not 0 <= token < self.info.vocab_size:
                raise InvalidRequest(f"token id {token!r} is outside the vocabulary of {self.info.vocab_size} tokens")
            ids.append(int(token))
        return self._tokenizer.decode(ids, special_tokens)

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for by itself, as UTF-8, which may be a part of a character; none for what is no token of
        the model. Raises InvalidRequest for what is no integer.
        """
        self._worker.check_process()
        if not isinstance(token, Integral):
            raise InvalidRequest(f"a token id is an integer, not {token!r:.80}")
        return self._tokenizer.token_bytes(int(token))
