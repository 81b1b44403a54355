"""One further token takes few calls. These bounds are lowered when the code becomes simpler. Two were raised: what
speculates is a file more, and to see which adapters the rows have takes two calls.
"""

from __future__ import annotations

from typing import Any

import pytest

from cortexmlx.bench.studies.token_path import count_step_calls


def test_one_row(tiny: Any) -> None:
    path = count_step_calls(str(tiny("llama")), 1)
    assert path.file_count <= 25 and path.calls.total() <= 127
    assert str(path).split() == ["1", str(path.file_count), str(len(path.calls)), str(path.calls.total())]


def test_a_further_row_takes_the_calls_of_its_text_and_few_more(tiny: Any) -> None:
    """Planning, dispatching and collecting are of the step: of each row only its text, its events and its books."""
    one, many = (count_step_calls(str(tiny("llama")), rows) for rows in (1, 16))
    assert many.file_count <= 30
    more = {name: many.calls[file, name] - one.calls[file, name] for file, name in many.calls}
    of_rows = {name for name, count in more.items() if count >= 15}
    assert sum(more[name] for name in of_rows) <= 15 * 22
    assert not any(name.startswith(("Gate", "StepBuilder", "ModelRunner", "DecodeWindow")) for name in of_rows)


@pytest.mark.parametrize(("rows", "calls"), [(1, 222), (16, 1040)])
def test_who_drafts_is_asked_in_few_calls(tiny: Any, rows: int, calls: int) -> None:
    """Some 30 of each row, mostly to look for its newest tokens in what was said before."""
    path = count_step_calls(str(tiny("llama")), rows, drafts=True)
    assert path.file_count <= 41 and path.calls.total() <= calls
