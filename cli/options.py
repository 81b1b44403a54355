"""The options that several commands share, under the names that people know from mlx-lm, llama.cpp and vLLM."""

from __future__ import annotations

from typing import Annotated

import typer

from cortexmlx.errors import InvalidRequest
from cortexmlx.kv.sizing import parse_size
from cortexmlx.request import SamplingParams

STARTER = "smollm2"

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help=f"A folder, .gguf file, hub id or {STARTER} (the default).", show_default=False
    ),
]
ModelOption = Annotated[
    str | None, typer.Option("--model", "-m", metavar="MODEL", help="The same, as an option.", show_default=False)
]
Prompt = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt",
        "-p",
        metavar="TEXT",
        help="The prompt; - reads stdin. What is piped in comes first.",
        show_default=False,
    ),
]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System prompt.", show_default=False)]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", metavar="N", help="Tokens to generate at most.")]
Temperature = Annotated[float, typer.Option("--temp", metavar="X", help="Temperature; 0: always the likeliest token.")]
TopP = Annotated[
    float, typer.Option("--top-p", metavar="X", help="Sample from the likeliest, to this probability in all.")
]
TopK = Annotated[int, typer.Option("--top-k", metavar="N", help="Sample from the N likeliest; 0: from all.")]
MinP = Annotated[
    float, typer.Option("--min-p", metavar="X", help="Drop what is less likely than X times the likeliest.")
]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="Repeatable sampling.", show_default=False)]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="End before this; may be repeated.", show_default=False),
]
RepetitionPenalty = Annotated[float, typer.Option("--repetition-penalty", metavar="X", help="Above 1: repeat less.")]
PresencePenalty = Annotated[float, typer.Option("--presence-penalty", metavar="X", help="As in the OpenAI API.")]
FrequencyPenalty = Annotated[float, typer.Option("--frequency-penalty", metavar="X", help="As in the OpenAI API.")]
KVMemory = Annotated[
    str | None,
    typer.Option("--kv-memory", metavar="SIZE", help="For keys and values, like 4GB; see `plan`.", show_default=False),
]
BlockSize = Annotated[int, typer.Option("--block-size", metavar="N", help="Tokens per KV block.")]
MaxRows = Annotated[int, typer.Option("--max-rows", metavar="N", help="Sequences that run at once.")]
Attention = Annotated[str, typer.Option("--attention", metavar="NAME", help="auto, metal or reference.")]


def model_name(argument: str | None, option: str | None) -> str:
    """The model that was asked for, as argument or option; the starter model if neither."""
    if argument is not None and option is not None and argument != option:
        raise typer.BadParameter(f"two models: {argument!r} and --model {option!r}")
    return argument or option or STARTER


def memory_size(text: str | None) -> int | None:
    """Bytes of a size option. Raises typer.BadParameter (wrong usage) if it is none."""
    if text is None:
        return None
    try:
        return parse_size(text)
    except InvalidRequest as error:
        raise typer.BadParameter(str(error), param_hint="--kv-memory") from None


def checked(params: SamplingParams) -> SamplingParams:
    """The same parameters. Raises typer.BadParameter (wrong usage) if one is out of range."""
    try:
        params.validate()
    except InvalidRequest as error:
        raise typer.BadParameter(str(error)) from None
    return params
