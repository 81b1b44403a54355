"""`cortexmlx models`: what can be run now, without the network."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from cortexmlx.kv.sizing import format_bytes


def models(as_json: Annotated[bool, typer.Option("--json", help="A JSON list.")] = False) -> None:
    """List the models on this machine: the starter model and those in the hub's cache.

    Any folder with a config.json or any .gguf file can be given by its path as well.
    """
    from cortexmlx.models.inventory import list_models
    from cortexmlx.models.resolve import STARTER, STARTER_INSTALL

    found = list_models()
    if as_json:
        print(json.dumps([{"name": m.name, "kind": m.kind.value, "path": str(m.path), "bytes": m.size} for m in found]))
        return
    width = max((len(model.name) for model in found), default=0)
    for model in found:
        print(f"{model.name:<{width}}  {format_bytes(model.size):>8}  {model.kind.value:<7}  {model.path}")
    if STARTER not in {model.name for model in found}:
        typer.echo(f"the starter model is not installed: {STARTER_INSTALL}", err=True)
