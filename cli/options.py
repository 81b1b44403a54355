"""The options that several commands share, under the names that people know from mlx-lm, llama.cpp and vLLM."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cortexmlx.cli.files.schema_file import parse_schema_option
from cortexmlx.core.config import EngineConfig
from cortexmlx.disk.folder import default_folder
from cortexmlx.errors import InvalidRequest
from cortexmlx.kv.sizing import parse_size
from cortexmlx.models.hub import cached_repo_names
from cortexmlx.models.resolve import STARTER
from cortexmlx.structured.output import StructuredOutput
from cortexmlx.types.sampling_params import NUMBERS, SamplingParams


def complete_model(incomplete: str) -> list[str]:
    """Return the models whose names begin with `incomplete`, for a shell. The shell completes files by itself."""
    return [name for name in (STARTER, *cached_repo_names()) if name.startswith(incomplete)]


def _option(flags: str, metavar: str, help: str, **more: Any) -> Any:
    """Return a typer option with these flags, separated by blanks. Its default is not shown: the help says it."""
    return typer.Option(*flags.split(), metavar=metavar, help=help, show_default=False, **more)


Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help=f"A folder, .gguf file, hub id or {STARTER} (the default).",
        show_default=False,
        autocompletion=complete_model,
    ),
]
ModelOption = Annotated[
    str | None,
    _option(
        "--model -m", "MODEL", f"The model: a folder, .gguf file, hub id or {STARTER}.", autocompletion=complete_model
    ),
]
Adapter = Annotated[
    str | None,
    _option("--adapter --adapter-path", "FOLDER", "A LoRA or DoRA adapter for the model, or fine-tuned layers."),
]
Adapters = Annotated[
    list[str] | None,
    _option("--adapters --lora-modules", "NAME=FOLDER", "A LoRA adapter that requests may name; may be repeated."),
]
MaxAdapterRank = Annotated[int, typer.Option("--max-adapter-rank", metavar="N", help="The largest rank of --adapters.")]
AdapterMemory = Annotated[str, typer.Option("--adapter-memory", metavar="SIZE", help="For all --adapters.")]
Prompt = Annotated[
    list[str] | None, _option("--prompt -p", "TEXT", "The prompt; - reads stdin. What is piped in comes first.")
]
System = Annotated[str | None, _option("--system", "TEXT", "System prompt.")]
TemplateVar = Annotated[
    list[str] | None,
    _option("--template-var", "NAME=VALUE", "A variable of the chat template; VALUE is JSON or text. May be repeated."),
]
FetchImages = Annotated[
    list[str] | None,
    _option(
        "--fetch-images",
        "HOST",
        "Fetch images of requests from this host, like example.com, by https; may be repeated.",
    ),
]
Think = Annotated[
    bool | None,
    typer.Option(
        "--think/--no-think", help="Thoughts before the answer, where the template has a switch.", show_default=False
    ),
]
Stop = Annotated[list[str] | None, _option("--stop", "TEXT", "End before this; may be repeated.")]
Schema = Annotated[
    str | None, _option("--schema", "SCHEMA", "Answer in JSON: a schema, its file, or json for any object.")
]
OpenSchema = Annotated[
    bool,
    typer.Option(
        "--open-schema", help="With --schema: other properties than the listed ones, and blanks, are allowed."
    ),
]
Regex = Annotated[str | None, _option("--regex", "TEXT", "Answer in this form.")]
Choice = Annotated[list[str] | None, _option("--choice", "A,B", "Answer one of these; may be repeated.")]
Draft = Annotated[
    str | None,
    _option(
        "--draft --draft-model",
        "MODEL",
        "What guesses tokens: a smaller model, an assistant, or the original with its draft head.",
        autocompletion=complete_model,
    ),
]
Hosts = Annotated[
    str | None,
    _option("--hosts", "HOSTS", "Spread the model over N processes here, or the machines of MLX's host file."),
]
KVMemory = Annotated[str | None, _option("--kv-memory", "SIZE", "For keys and values, like 4GB; see `plan`.")]
KVBits = Annotated[int | None, _option("--kv-bits", "N", "Keys and values of 8 or 4 bits.")]
KVGroupSize = Annotated[
    int | None, _option("--kv-group-size", "N", "Numbers that share a scale: 64 or 32, with --kv-bits.")
]
BlockSize = Annotated[int, typer.Option("--block-size", metavar="N", help="Tokens per KV block.")]
PrefillBudget = Annotated[
    int | None,
    typer.Option(
        "--prefill-budget",
        metavar="N",
        min=1,
        help="Prompt tokens that a step computes at most. Default: 512; on a Mac up to 2,048 while no answer goes on.",
    ),
]
MaxRows = Annotated[int, typer.Option("--max-rows", metavar="N", help="Sequences that run at once.")]
KeepFirst = Annotated[
    int | None, _option("--keep-first", "N", "With --keep-last: their first N stay, too (default 4).")
]
KeepLast = Annotated[
    int | None, _option("--keep-last", "N", "Let texts outgrow the context: their newest N tokens stay.")
]
Attention = Annotated[str, typer.Option("--attention", metavar="NAME", help="auto, metal or reference.")]
Reproducible = Annotated[
    bool, typer.Option("--reproducible", help="The same attention, to the bit, alone and in any batch.")
]
Speculate = Annotated[
    bool, typer.Option("--speculate/--no-speculate", help="Draft tokens that repeat, and verify several in a step.")
]
KVStore = Annotated[
    str | None, _option("--kv-store", "FOLDER", "Where the keys and values of texts are kept for later runs.")
]
NoKVStore = Annotated[bool, typer.Option("--no-kv-store", help="Keep no keys and values on disk.")]
KVStoreBytes = Annotated[str, typer.Option("--kv-store-bytes", metavar="SIZE", help="At most so many bytes of them.")]


def _number_option(name: str, default_text: str | None = None) -> Any:
    """Return the typer option of a number, as its field in `SamplingParams` declares it."""
    number, optional = NUMBERS[name], getattr(SamplingParams, name) is None
    kind: Any = int if number.whole else float
    metavar = "N" if number.whole else "X"
    flags = number.flags or (f"--{name.replace('_', '-')}",)
    option = typer.Option(*flags, metavar=metavar, help=number.help, show_default=default_text or not optional)
    return Annotated[kind | None if optional else kind, option]


_NUMBERS = {name: _number_option(name) for name, number in NUMBERS.items() if number.help and name != "seed"}
_PENALTIES = list(_NUMBERS)[list(_NUMBERS).index("repetition_penalty") :]

SAMPLING = {
    **{name: option for name, option in _NUMBERS.items() if name not in _PENALTIES},
    "seed": _number_option("seed"),
    "stop": Stop,
    **{name: _NUMBERS[name] for name in _PENALTIES},
    "schema": Schema,
    "open_schema": OpenSchema,
    "regex": Regex,
    "choice": Choice,
}
"""The options that make `SamplingParams`, in the order in which a command's help shows them."""

ENGINE = {
    "hosts": Hosts,
    "adapter": Adapter,
    "adapters": Adapters,
    "max_adapter_rank": MaxAdapterRank,
    "adapter_memory": AdapterMemory,
    "draft": Draft,
    "kv_memory": KVMemory,
    "kv_bits": KVBits,
    "kv_group_size": KVGroupSize,
    "block_size": BlockSize,
    "max_rows": MaxRows,
    "keep_first": KeepFirst,
    "keep_last": KeepLast,
    "attention": Attention,
    "reproducible": Reproducible,
    "speculate": Speculate,
}
"""The options that make `EngineConfig`, for most commands. `plan` and `bench` declare their own."""

PER_REQUEST = ("adapters", "max_adapter_rank", "adapter_memory")
"""Those about adapters per request, for commands without them."""

STORE = {"kv_store": KVStore, "no_kv_store": NoKVStore, "kv_store_bytes": KVStoreBytes}
"""The options that say what is kept on disk."""

Command = Callable[..., None]


def add_sampling_options(
    *, excluded: Collection[str] = (), follows_model: bool = False, **defaults: Any
) -> Callable[[Command], Command]:
    """Return a decorator that replaces a command's parameter `params` by the options of `SAMPLING`, except those in
    `excluded`. Their defaults are those of `SamplingParams`, except those in `defaults`; with `follows_model`, what the
    model's makers recommend comes before these.
    """

    def make_params(
        stop: list[str] | None = None,
        schema: str | None = None,
        open_schema: bool = False,
        regex: str | None = None,
        choice: list[str] | None = None,
        **other_values: Any,
    ) -> SamplingParams:
        structured = structured_output(schema, regex, choice, open_schema=open_schema)
        return replace_params(SamplingParams(), stop=stop or (), structured=structured, **other_values)

    unset = {**dict.fromkeys(("stop", "schema", "regex", "choice")), "open_schema": False}
    default_values = {**vars(SamplingParams()), **unset, **defaults}
    command_options = {name: (kind, default_values[name]) for name, kind in SAMPLING.items() if name not in excluded}
    for name in (name for name in command_options if follows_model and name in NUMBERS and NUMBERS[name].recommended):
        default = default_values[name]
        command_options[name] = (_number_option(name, f"the model's, else {default}"), default)
    return lambda command: _expand_parameter(command, "params", command_options, make_params)


def add_engine_options(
    *, has_store: bool = False, excluded: Collection[str] = (), **fixed: Any
) -> Callable[[Command], Command]:
    """Return a decorator that replaces a command's parameter `config` by the options of `ENGINE`, except those that
    are `fixed` and those in `excluded`. With `has_store`, the command has a store on disk unless it is switched off;
    other commands have one only if a folder is named.

    The caller still has to set the model: see `model_name`.
    """

    def make_config(
        kv_memory: str | None,
        adapters: list[str] | None = None,
        kv_store: str | None = None,
        kv_store_bytes: str = str(EngineConfig.kv_store_bytes),
        no_kv_store: bool = False,
        **other_values: Any,
    ) -> EngineConfig:
        if no_kv_store and kv_store is not None:
            raise typer.BadParameter(f"--no-kv-store, and --kv-store {kv_store}")
        if kv_store is not None and Path(os.path.expanduser(kv_store)).is_file():
            raise typer.BadParameter(f"{kv_store} is a file: give a folder", param_hint="--kv-store")
        folder = kv_store or (default_folder() if has_store and not no_kv_store else None)
        if (
            "=" in (adapter := str(other_values.get("adapter") or ""))
            and not Path(os.path.expanduser(adapter)).exists()
        ):
            raise typer.BadParameter(f"{adapter!r} is no folder; --adapters takes NAME=FOLDER", param_hint="--adapter")
        limit = parse_memory_size(kv_store_bytes, "--kv-store-bytes")
        memory = parse_memory_size(kv_memory)
        parse_memory_size(other_values.get("adapter_memory"), "--adapter-memory")
        fixed["adapters"] = adapter_folders = parse_adapters(adapters)
        fixed["max_adapters"] = max(EngineConfig.max_adapters, len(adapter_folders or ()))
        return EngineConfig(
            STARTER, kv_memory=memory, kv_store=folder, kv_store_bytes=limit or 0, **fixed, **other_values
        )

    default_values = vars(EngineConfig(STARTER)) | {"no_kv_store": False}
    kinds = {name: kind for name, kind in (ENGINE | STORE).items() if has_store or name != "no_kv_store"}
    command_options = {
        name: (kind, default_values[name]) for name, kind in kinds.items() if name not in fixed and name not in excluded
    }
    return lambda command: _expand_parameter(command, "config", command_options, make_config)


def _expand_parameter(
    command: Command, name: str, options: Mapping[str, tuple[Any, Any]], make: Callable[..., Any]
) -> Command:
    """Return `command` with `options` in place of its parameter `name`, which `make` builds from them. `options` has
    the annotation and the default of each option by its name.
    """

    @functools.wraps(command)
    def run_command(**arguments: Any) -> None:
        command(**{name: make(**{option: arguments.pop(option) for option in options})}, **arguments)

    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if parameter.name != name:
            parameters.append(parameter)
            continue
        kind = inspect.Parameter.KEYWORD_ONLY
        for option, (annotation, default) in options.items():
            parameters.append(inspect.Parameter(option, kind, default=default, annotation=annotation))
    wrapper: Any = run_command
    wrapper.__signature__ = inspect.Signature(parameters)
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return run_command


def given_parameters(ctx: typer.Context) -> list[str]:
    """Return the parameters that were typed on the command line."""
    return [name for name in ctx.params if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"]


@contextmanager
def wrong_usage(option: str | None = None) -> Iterator[None]:
    """Raise an InvalidRequest of this context as typer.BadParameter (wrong usage), with the option that it is about."""
    try:
        yield
    except InvalidRequest as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def model_name(argument: str | None, option: str | None) -> str:
    """Return the model that was given, as argument or option, or else the starter model."""
    if argument is not None and option is not None and argument != option:
        raise typer.BadParameter(f"two models: {argument!r} and --model {option!r}")
    return argument or option or STARTER


def structured_output(
    schema: str | None, regex: str | None, choice: list[str] | None, *, open_schema: bool = False
) -> StructuredOutput | None:
    """Return the structured output of --schema, --regex or --choice. One --choice is split at its commas, several are
    taken as they are. Raises typer.BadParameter (wrong usage).
    """
    option_values = {"--schema": schema, "--regex": regex, "--choice": choice}
    names = [name for name, value in option_values.items() if value is not None]
    if len(names) > 1:
        raise typer.BadParameter(f"{names[0]} and {names[1]}: an answer has one form")
    if open_schema and schema is None:
        raise typer.BadParameter("it says how --schema is read, and there is none", param_hint="--open-schema")
    with wrong_usage(*names):
        if schema is not None:
            return parse_schema_option(schema, is_open=open_schema)
        if regex is not None:
            return StructuredOutput.regex(regex)
        if choice:
            return StructuredOutput.choice(choice if len(choice) > 1 else map(str.strip, choice[0].split(",")))
    return None


def parse_adapters(assignments: Sequence[str] | None) -> dict[str, str] | None:
    """Return each adapter's folder by name, from NAME=FOLDER options; None for none. Raises typer.BadParameter."""
    folders: dict[str, str] = {}
    for each in assignments or ():
        name, equals, folder = each.partition("=")
        if not (name.strip() and equals and folder):
            raise typer.BadParameter(f"{each!r} is no NAME=FOLDER", param_hint="--adapters")
        if folders.setdefault(name, folder) != folder:
            raise typer.BadParameter(f"{name!r} is {folders[name]} and {folder}", param_hint="--adapters")
    return folders or None


def parse_memory_size(text: str | None, option: str = "--kv-memory") -> int | None:
    """Return the bytes of a size option. Raises typer.BadParameter (wrong usage)."""
    with wrong_usage(option):
        return None if text is None else parse_size(text)


def replace_params(params: SamplingParams, **changes: Any) -> SamplingParams:
    """Return `params` with `changes`. Raises typer.BadParameter (wrong usage) if one is out of range."""
    if (limit := changes.get("max_tokens") or 0) < 0:
        range_text = f"1 to {NUMBERS['max_tokens'].high:,}. A number beyond the context, like 1000000, is no limit"
        raise typer.BadParameter(f"{limit:,} is not in {range_text}", param_hint="-n")
    with wrong_usage():
        return replace(params, **changes)


def given_sampling(context: typer.Context, params: SamplingParams) -> dict[str, Any]:
    """Return the values of `params` that were typed on the command line."""
    names = set(given_parameters(context))
    given_values = {name: value for name, value in vars(params).items() if name in names}
    return given_values if params.form is None else {**given_values, "structured": params.form}


def make_linked_image_reader(hosts: Sequence[str] | None, root: Path | None = None) -> Callable[[str], bytes] | None:
    """Return a reader of images at URLs and paths that the options allow, or None. Raises typer.BadParameter."""
    if not hosts and root is None:
        return None
    from cortexmlx.vision.elsewhere import NamedImageReader

    if root is not None and not root.is_dir():
        raise typer.BadParameter(f"there is no folder {root}", param_hint="--images-from")
    with wrong_usage("--fetch-images"):
        return NamedImageReader(hosts or (), root).read
