"""--adapters: LoRA adapters beside a model, which requests name one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapters",
        "--lora-modules",
        metavar="NAME=FOLDER",
        help="A LoRA adapter that requests may name; may be repeated.",
        show_default=False,
    ),
]


def adapters_of(given: Sequence[str] | None) -> dict[str, str] | None:
    """Return the folder of each adapter by its name; None for none. Raises typer.BadParameter (wrong usage)."""
    folders: dict[str, str] = {}
    for each in given or ():
        name, equals, folder = each.partition("=")
        if not (name.strip() and equals and folder):
            raise typer.BadParameter(f"{each!r} is no NAME=FOLDER", param_hint="--adapters")
        if folders.setdefault(name, folder) != folder:
            raise typer.BadParameter(f"{name!r} is {folders[name]} and {folder}", param_hint="--adapters")
    return folders or None
