"""Lists on the command line."""

from __future__ import annotations

from math import inf

import pytest
import typer

from cortexmlx.cli.bench import lists


def test_lists_are_numbers() -> None:
    assert lists.numbers("-b", "1,4,8", 1) == [1, 4, 8] and lists.block_sizes("16,32") == [16, 32]
    assert lists.only("-p", [5], "here") == 5
    assert lists.promise("ttft:500,tpot:40") == (0.5, 0.04) and lists.promise("tpot:40") == (inf, 0.04)


@pytest.mark.parametrize("text", ["many", "", "1,,2", "0", "1,1", "-3"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        lists.numbers("-b", text, 1)


@pytest.mark.parametrize("text", ["33", "16,20"])
def test_blocks_of_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is none of 8, 16, 32"):
        lists.block_sizes(text)


@pytest.mark.parametrize("text", ["", "ttft", "ttft:x", "itl:5", "ttft:0", "tpot:-1", "ttft:nan"])
def test_other_promises_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="ttft:2000"):
        lists.promise(text)


def test_one_number_is_not_several() -> None:
    with pytest.raises(typer.BadParameter, match="takes one number with --against"):
        lists.only("-p", [1, 2], "with --against")
