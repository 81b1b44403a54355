"""Whether two models mean the same by a token, so that one can draft for the other."""

from __future__ import annotations

from cortexmlx.errors import InvalidRequest
from cortexmlx.models import LoadedModel
from cortexmlx.models.tokenizers.shared import SharedTokenizer, TokenTable


def check_same_tokens(model: LoadedModel, draft: LoadedModel, size: int) -> None:
    """Raise InvalidRequest, with the numbers, if one of the first `size` ids, which both models can choose, is another
    token in each of them, or is special or ends an answer in one of them only.

    Only ids that stand for something in both count: the rest pads embeddings, or is a special token that only one
    tokenizer has.
    """
    mine, theirs = (_table(each, size) for each in (model, draft))
    both = [i for i in range(size) if mine.pieces[i] and theirs.pieces[i]]
    differ = [i for i in both if mine.pieces[i] != theirs.pieces[i]]
    if differ or not both:
        shown = "".join(f", such as {i}: {_shown(mine, i)} and {_shown(theirs, i)}" for i in differ[:1])
        raise _refused(model, draft, f"{len(differ):,} of {len(both):,} ids stand for other texts{shown}")
    for what, one, other in (
        ("are special", mine.special, theirs.special),
        ("end an answer", mine.ends, theirs.ends),
    ):
        if alone := sorted((one ^ other).intersection(both)):
            name = model.name if alone[0] in one else draft.name
            raise _refused(model, draft, f"{len(alone):,} ids {what} in one of them only, such as {alone[0]} in {name}")


def _table(model: LoadedModel, size: int) -> TokenTable:
    """Return what the first `size` tokens of a model stand for. Where their text depends on the tokens before them: by
    themselves.
    """
    tokenizer = SharedTokenizer(model.tokenizer)
    table = tokenizer.token_table(size)
    if table is not None:
        return table
    special = frozenset(getattr(model.tokenizer, "all_special_ids", ()))
    pieces = tuple(tokenizer.token_bytes(i) for i in range(size))
    return TokenTable(pieces, special, tokenizer.eos_token_ids, drops_space=False)


def _shown(table: TokenTable, token: int) -> str:
    return repr(table.pieces[token].decode("utf-8", "backslashreplace")[:40])


def _refused(model: LoadedModel, draft: LoadedModel, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"{draft.name} cannot draft for {model.name}, whose tokens are others: {why}. Choose a draft model with the "
        "same tokenizer, or none (--draft)"
    )
