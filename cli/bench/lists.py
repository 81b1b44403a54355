"""Parse options that are lists."""

from __future__ import annotations

import typer

from cortexmlx.kv.spec import BLOCK_SIZES


def numbers(option: str, text: str, least: int) -> list[int]:
    """Return the numbers of a list like `1,4,8`, each once. Raises typer.BadParameter."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers like 1,4,8", param_hint=option) from None
    if min(found) < least:
        raise typer.BadParameter(f"{min(found)} is below {least}", param_hint=option)
    if len(set(found)) < len(found):
        raise typer.BadParameter(f"{text} names a number twice", param_hint=option)
    return found


def block_sizes(text: str) -> list[int]:
    """Return sizes of blocks. Raises typer.BadParameter for one that no engine takes."""
    found = numbers("--block-size", text, 1)
    wrong = [size for size in found if size not in BLOCK_SIZES]
    if wrong:
        raise typer.BadParameter(f"{wrong[0]} is none of {', '.join(map(str, BLOCK_SIZES))}", param_hint="--block-size")
    return found


def only(option: str, found: list[int], why: str) -> int:
    """Return the one number of a list. Raises typer.BadParameter if there are several."""
    if len(found) > 1:
        raise typer.BadParameter(f"takes one number {why}, and here are {len(found)}", param_hint=option)
    return found[0]


def promise(text: str) -> tuple[float, float]:
    """Return the seconds to the first token and per token, from a text like `ttft:2000,tpot:200` (milliseconds). A
    missing one is not limited. Raises typer.BadParameter.
    """
    limits = {"ttft": float("inf"), "tpot": float("inf")}
    for part in text.split(","):
        name, _, value = part.partition(":")
        try:
            seconds = float(value) / 1_000
        except ValueError:
            seconds = 0.0
        if name not in limits or not seconds > 0:
            wrong = f"{part!r} is not like ttft:2000 or tpot:200, in milliseconds"
            raise typer.BadParameter(wrong, param_hint="--goodput")
        limits[name] = seconds
    return limits["ttft"], limits["tpot"]
