"""`cortexmlx models`: the models that can run now, without the network."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.harmless import to_single_line
from cortexmlx.kv.sizing import format_bytes

if TYPE_CHECKING:
    from cortexmlx.models.inventory import LocalModel


def models(as_json: Annotated[bool, typer.Option("--json", help="A JSON list.")] = False) -> None:
    """List the models on this machine, with size, quantization and context: the starter model and the hub's cache.

    Any folder with a config.json or any .gguf file can be given by its path as well.
    """
    from cortexmlx.models.inventory import list_models
    from cortexmlx.models.resolve import STARTER, STARTER_INSTALL

    local_models = list_models()
    if as_json:
        console.print_result(json.dumps([model_json(model) for model in local_models]))
        return
    if local_models:
        rows = [("NAME", "SIZE", "QUANTIZATION", "CONTEXT", "FROM"), *map(model_row, local_models)]
        name, size, quantization, context, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
        for each in rows:
            console.print_result(
                f"{each[0]:<{name}}  {each[1]:>{size}}  {each[2]:<{quantization}}  {each[3]:>{context}}  {each[4]}"
            )
    if STARTER not in {model.name for model in local_models}:
        console.print_message(f"the starter model is not installed: {STARTER_INSTALL}")


def model_row(model: LocalModel) -> tuple[str, ...]:
    """Return a model's row of the table."""
    context = "" if model.context is None else f"{model.context:,}"
    return to_single_line(model.name), format_bytes(model.size), model.quantization, context, model.kind.value


def model_json(model: LocalModel) -> dict[str, Any]:
    """Return the facts about a model as a JSON object, for `--json`."""
    return {
        "name": model.name,
        "kind": model.kind.value,
        "path": str(model.path),
        "bytes": model.size,
        "quantization": model.quantization or None,
        "context": model.context,
    }
