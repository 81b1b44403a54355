"""Only the tokens that need logits are projected, and they are the model's own."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from cortexmlx.execution.logit_rows import LogitRows
from support.tiny import tokens_of

VOCAB, WIDTH = 20, 8


class Counting(nn.Module):  # type: ignore[misc]
    """A module that counts the rows of each call."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.rows: list[int] = []

    def __call__(self, x: mx.array) -> mx.array:
        self.rows = [*self.rows, x.shape[0]]
        out: mx.array = self.inner(x)
        return out


def rows_of(*rows: int) -> Any:
    return np.array(rows, np.int32)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2", "cohere2", "deepseek_v2", "mixtral"])
def test_the_rows_are_those_of_the_whole_and_no_others_reach_the_norm(name: str, tiny: Any) -> None:
    import mlx_lm
    from mlx_lm.models.cache import make_prompt_cache

    model = mlx_lm.load(str(tiny(name)))[0]
    tokens = mx.array(tokens_of(6, seed=3))[:, None]
    whole = np.array(model(tokens, cache=make_prompt_cache(model))[:, 0])
    logit_rows = LogitRows(model)
    assert logit_rows._pick is not None, "the final norm is found"
    counting = logit_rows._pick.norm = Counting(logit_rows._pick.norm)
    for rows in (rows_of(5), rows_of(0, 3), rows_of(1, 2, 4, 5), rows_of(*range(6))):
        logits = logit_rows.run(tokens, make_prompt_cache(model), rows)
        np.testing.assert_allclose(np.array(logits), whole[rows], atol=2e-4)
    assert counting.rows == [1, 2, 4, 6]
    logit_rows.run(tokens, make_prompt_cache(model), rows_of())
    assert counting.rows[-1] == 6, "nobody looks at the logits, so the graph stays as it is"
    np.testing.assert_allclose(np.array(model(tokens, cache=make_prompt_cache(model))[:, 0]), whole, atol=2e-4)


class Body(nn.Module):  # type: ignore[misc]
    """Embeddings, a layer and a norm, under a name of the test's choice, which may run before the layer, too."""

    def __init__(self, name: str, twice: bool) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
        self[name] = nn.RMSNorm(WIDTH)
        self._name, self._twice = name, twice

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self.embed(tokens)
        if self._twice:
            x = self[self._name](x)
        out: mx.array = self[self._name](x + self.layer(x))
        return out


class Model(nn.Module):  # type: ignore[misc]
    def __init__(self, name: str, twice: bool = False) -> None:
        super().__init__()
        self.model, self.head = Body(name, twice), nn.Linear(WIDTH, VOCAB, bias=False)

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        out: mx.array = self.head(self.model(tokens))
        return out


TOKENS = mx.array([[3], [7], [11], [2]])


def test_a_model_whose_norm_has_another_name_projects_everything_and_is_right() -> None:
    model = Model("closing")
    whole = np.array(model(TOKENS)[:, 0])
    model.head = Counting(model.head)
    logits = LogitRows(model).run(TOKENS, [], rows_of(1, 3))
    np.testing.assert_allclose(np.array(logits), whole[[1, 3]], atol=1e-6)
    assert model.head.rows == [4]


def test_a_model_is_wrapped_once_however_often_it_is_taken() -> None:
    model = Model("norm")
    whole = np.array(model(TOKENS)[:, 0])
    LogitRows(model)
    again = LogitRows(model)
    assert isinstance(model.model.norm.norm, nn.RMSNorm)
    np.testing.assert_allclose(np.array(again.run(TOKENS, [], rows_of(2))), whole[[2]], atol=1e-6)


def test_a_norm_that_runs_twice_is_not_recognised() -> None:
    """What is, so that whoever needs such a model knows: each run of the norm picks, so the second picks from what the
    first has left. `tests/host/test_contract.py` holds that the models of mlx-lm run it once.
    """
    model = Model("norm", twice=True)
    whole = np.array(model(TOKENS)[:, 0])
    logits = np.array(LogitRows(model).run(TOKENS, [], rows_of(1, 0)))
    np.testing.assert_allclose(logits, whole[[0, 1]], atol=1e-6)
    assert not np.allclose(logits, whole[[1, 0]], atol=1e-6)
