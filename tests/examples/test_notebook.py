"""The notebook is one that Jupyter opens, and its cells run from the first to the last."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import json
import re
from typing import Any

import pytest

from support.examples import EXAMPLES

NOTEBOOK: dict[str, Any] = json.loads((EXAMPLES / "notebook.ipynb").read_text())
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_it_is_a_notebook_of_version_4_without_outputs() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    assert NOTEBOOK["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) for name in ids)
    for cell in NOTEBOOK["cells"]:
        extra = {"outputs", "execution_count"} if cell["cell_type"] == "code" else set()
        assert cell.keys() == {"cell_type", "id", "metadata", "source", *extra}
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None
        assert all(line.endswith("\n") for line in cell["source"][:-1])


def printed() -> list[str]:
    """What each cell of code prints, run as Jupyter does: one after the other, with `await` at the top."""

    async def run() -> list[str]:
        names: dict[str, Any] = {"__name__": "__main__"}
        outputs = []
        for text in CODE:
            compiled = compile(text, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            with contextlib.redirect_stdout(io.StringIO()) as output:
                result = eval(compiled, names)
                if inspect.isawaitable(result):
                    await result
            outputs.append(output.getvalue())
        return outputs

    return asyncio.run(run())


def test_every_cell_runs(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORTEXMLX_MODEL", str(tiny("llama")))
    outputs = printed()
    assert [bool(output) for output in outputs] == [False, *[True] * (len(CODE) - 2), False]
    assert outputs[-3].startswith(("RequestTimeout", "PromptTooLong"))


@pytest.mark.model
def test_with_the_starter_model_it_says_what_its_texts_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CORTEXMLX_MODEL", raising=False)
    outputs = printed()
    assert "Paris" in outputs[1] and "<|im_start|>user" in outputs[2]
    prompt, cached = map(int, re.findall(r"(\d+) tokens in the prompt, (\d+)", outputs[5])[0])
    assert 0 < cached < prompt
    assert outputs[-3].startswith("RequestTimeout - the request was not finished after 0.2 s")
