"""`cortexmlx generate`: one prompt in, one answer out."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from cortexmlx.cli import engine as engines
from cortexmlx.cli import options
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.limits import ending
from cortexmlx.cli.terminal.reading import Reading
from cortexmlx.cli.terminal.text import clean, gather_prompt, to_json
from cortexmlx.errors import InvalidRequest
from cortexmlx.messages import NO_VARIABLES, ChatPrompt, TemplateVars
from cortexmlx.request import Completion, FinishReason, Message, SamplingParams
from cortexmlx.serving.config import EngineConfig

if TYPE_CHECKING:
    from cortexmlx.engine import Engine
    from cortexmlx.serving.handle import RequestHandle


@options.takes_sampling()
@options.takes_engine(max_rows=1)
def generate(
    model: options.Model = None,
    model_option: options.ModelOption = None,
    prompt: options.Prompt = None,
    system: options.System = None,
    template_var: options.TemplateVar = None,
    think: options.Think = None,
    *,
    params: SamplingParams,
    raw: Annotated[
        bool, typer.Option("--raw/--chat", help="The prompt as it is, or through the chat template.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
    config: EngineConfig,
) -> None:
    """Answer one prompt, from -p, from stdin, or both.

    The prompt goes through the model's chat template, where it has one. The answer streams to stdout.
    """
    if raw and system is not None:
        raise typer.BadParameter("--system needs the chat template, which --raw leaves out")
    variables = options.template_vars(template_var, think)
    if raw and variables:
        raise typer.BadParameter("--template-var and --think need the chat template, which --raw leaves out")
    config = replace(config, model=options.model_name(model, model_option))
    text = gather_prompt(prompt or [])
    if not text:
        raise typer.BadParameter('no prompt: give -p "..." or pipe it in', param_hint="--prompt")
    with engines.open_engine(config) as engine:
        engines.tell(engine)
        handle = engine.submit(as_prompt(engine, text, system, raw, variables), params)
        completion = collect(handle) if as_json else stream(handle)
        ended = ending(completion, params, engine)
    if as_json:
        print(to_json(record(completion)))
    elif console.is_terminal(sys.stderr):
        console.note(summary(completion, ended))
    if completion.finish_reason is FinishReason.CANCELLED:
        raise KeyboardInterrupt


def as_prompt(
    engine: Engine, text: str, system: str | None, raw: bool, variables: TemplateVars = NO_VARIABLES
) -> str | list[Message] | ChatPrompt:
    """What to submit: messages for a model with a chat template, else the plain text."""
    if raw or not engine.info.chat_template:
        if variables:
            raise InvalidRequest(
                f"{engine.info.name} has no chat template, so there is nothing to set: {', '.join(variables)}"
            )
        if system is not None:
            raise InvalidRequest(
                f"{engine.info.name} has no chat template, so --system has no place: put it into the prompt"
            )
        return text
    messages: list[Message] = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": clean(system, "--system")})
    return ChatPrompt(messages, variables) if variables else messages


def stream(handle: RequestHandle) -> Completion:
    """Print the answer piece by piece; Ctrl-C ends it where it is."""
    with Reading() as reading:
        try:
            for event in handle:
                reading.note(event)
                sys.stdout.write(event.text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            handle.cancel()
            reading.stopping()
        except BrokenPipeError:
            handle.cancel()
            raise
        completion = handle.result()
    print(flush=True)
    return completion


def collect(handle: RequestHandle) -> Completion:
    """Wait for the answer; Ctrl-C keeps what there is."""
    with Reading() as reading:
        try:
            for event in handle:
                reading.note(event)
        except KeyboardInterrupt:
            handle.cancel()
            reading.stopping()
        return handle.result()


def record(completion: Completion) -> dict[str, object]:
    """The completion for `--json`."""
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason.value,
        "usage": {**asdict(completion.usage), "total_tokens": completion.usage.total_tokens},
        "timings": asdict(completion.timings),
    }


def summary(completion: Completion, ended: str) -> str:
    """The line after an answer: `24 tokens · 41.2 tok/s · TTFT 180 ms · prompt 37 tok (32 cached)`, and why it `ended`
    where the model would have gone on.
    """
    usage, timings = completion.usage, completion.timings
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    parts = [
        f"{usage.completion_tokens} token{'s' * (usage.completion_tokens != 1)}",
        f"{timings.decode_tokens_per_second:.1f} tok/s",
        f"TTFT {timings.ttft * 1000:.0f} ms",
        f"prompt {usage.prompt_tokens} tok{cached}",
    ]
    if usage.dropped_tokens:
        parts.append(f"{usage.dropped_tokens:,} tok dropped")
    if ended:
        parts.append(ended)
    return " · ".join(parts)
