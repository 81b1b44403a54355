"""`cortexmlx generate`: one prompt in, one answer out."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import TYPE_CHECKING, Annotated

import typer

from cortexmlx.cli import engine as engines
from cortexmlx.cli import options
from cortexmlx.cli.answer_statistics import statistics_line, statistics_lines
from cortexmlx.cli.limits import cut_reason, incomplete_form_note
from cortexmlx.cli.prompts import make_prompt, parse_template_vars
from cortexmlx.cli.terminal import console
from cortexmlx.cli.terminal.console import ThoughtsPrinter
from cortexmlx.cli.terminal.exits import FAILED
from cortexmlx.cli.terminal.progress import PrefillProgress
from cortexmlx.cli.terminal.text import gather_prompt, to_json
from cortexmlx.core.config import EngineConfig
from cortexmlx.models.resolve import STARTER
from cortexmlx.types.logprobs import TokenLogprob
from cortexmlx.types.request import Completion, FinishReason
from cortexmlx.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cortexmlx.core.handle import RequestHandle
    from cortexmlx.engine import Engine


TokenText = Callable[[int], str]
"""A function that returns the text of a token id."""

_WIDEST = 24


def logprob_table(tokens: Sequence[TokenLogprob], text: TokenText) -> Iterator[str]:
    """Yield a line for each token: text, log-probability, probability, and the likeliest tokens at its position."""
    from rich.cells import cell_len, set_cell_size

    token_text = cache(lambda token: json.dumps(text(token), ensure_ascii=False))
    width = min(max((cell_len(token_text(each.token_id)) for each in tokens), default=0), _WIDEST)
    width = max(width, len("token"))
    yield f"{'token':<{width}}  {'logprob':>8}  {'prob':>6}  likeliest"
    for each in tokens:
        name = token_text(each.token_id)
        name = name if cell_len(name) > width else set_cell_size(name, width)
        likeliest = "  ".join(f"{token_text(token)} {_format_probability(logprob)}" for token, logprob in each.top)
        yield f"{name}  {each.logprob:8.3f}  {_format_probability(each.logprob):>6}  {likeliest}".rstrip()


def logprob_json(tokens: Sequence[TokenLogprob], text: TokenText) -> list[dict[str, object]]:
    """Return the log-probabilities of tokens for `--json`. A token that is half a character has U+FFFD in its text."""
    token_text = cache(text)
    return [
        {
            "token": token_text(each.token_id),
            "token_id": each.token_id,
            "logprob": each.logprob,
            "top": [{"token": token_text(token), "token_id": token, "logprob": logprob} for token, logprob in each.top],
        }
        for each in tokens
    ]


def _format_probability(logprob: float) -> str:
    """Return a log-probability as a percentage."""
    return f"{math.exp(min(logprob, 0.0)):.1%}"


@options.add_sampling_options()
@options.add_engine_options(excluded=options.PER_REQUEST, max_rows=1)
def generate(
    model: options.Model = None,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="The prompt, as with -p.", show_default=False)
    ] = None,
    model_option: options.ModelOption = None,
    prompt: options.Prompt = None,
    system: options.System = None,
    template_var: options.TemplateVar = None,
    think: options.Think = None,
    *,
    params: SamplingParams,
    answers: Annotated[int, typer.Option("--n", metavar="N", help="Answers, parted by a line ---.")] = 1,
    logprobs: Annotated[
        int | None,
        typer.Option(
            "--logprobs",
            metavar="K",
            help="Below, each token's log-probability and the K likeliest in its place.",
            show_default=False,
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw/--chat", help="The prompt as it is, or through the chat template.")
    ] = False,
    hide_thinking: Annotated[bool, typer.Option("--hide-thinking", help="Print no thoughts.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Counts, rates and memory, on stderr.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
    config: EngineConfig,
) -> None:
    """Answer one prompt, given as PROMPT, with -p, or on stdin.

    The prompt goes through the model's chat template, where it has one. The answer streams to stdout, and what the
    model thinks before it to stderr.
    """
    if raw and system is not None:
        raise typer.BadParameter("--system needs the chat template, which --raw leaves out")
    variables = parse_template_vars(template_var, think, raw=raw)
    if model_option is not None and model is not None and model != model_option and not prompt:
        words, model = [model, *(words or ())], None
    params = options.replace_params(params, n=answers, logprobs=logprobs)
    config = replace(config, model=options.model_name(model, model_option), max_rows=answers)
    if model is not None and len(model.split()) > 1 and not os.path.exists(os.path.expanduser(model)):
        line = shlex.join(["cortexmlx", "generate", *(words or [STARTER]), model])
        raise typer.BadParameter(f"{model!r} was taken as the model; the question goes after it or with -p: {line}")
    text = gather_prompt([*([" ".join(words)] if words else []), *(prompt or [])])
    if not text:
        raise typer.BadParameter('no prompt: give one after MODEL or with -p "...", or pipe it in', param_hint="PROMPT")
    start_time = time.monotonic()
    with engines.open_engine(config) as engine:
        load_seconds = time.monotonic() - start_time
        engines.print_notes(engine)
        handle = engine.submit(make_prompt(engine, text, system, raw, variables), params)
        completion = wait_for_answer(handle) if as_json else print_stream(handle, hide_thinking)
        if as_json:
            console.print_result(to_json(completion_json(engine, completion, hide_thinking)))
        elif logprobs is not None:
            print_logprobs(engine, completion)
        end_reason = cut_reason(completion, params, engine)
        cut_note = end_reason + ". -n allows more" * end_reason.startswith("stopped at")
        peak = engine.stats().peak_memory
    if verbose:
        for line in statistics_lines(completion, end_reason, load_seconds, peak):
            console.print_message(line)
    elif not as_json and console.is_terminal(sys.stderr):
        console.print_note(statistics_line(completion, end_reason))
    elif completion.finish_reason is FinishReason.LENGTH and params.form is None:
        console.print_note(cut_note)
    if completion.finish_reason is FinishReason.CANCELLED:
        raise KeyboardInterrupt
    if form_note := incomplete_form_note(completion, params, cut_note):
        console.print_error(form_note)
        raise typer.Exit(FAILED)


def print_stream(handle: RequestHandle, hide_thinking: bool = False) -> Completion:
    """Print the first answer as it arrives, then the others. Ctrl-C ends them early."""
    thoughts = ThoughtsPrinter(hidden=hide_thinking)
    with PrefillProgress() as progress:
        try:
            for event in handle:
                progress.update(event)
                if event.index:
                    continue
                thoughts.print_thought(event.thinking)
                if event.text:
                    thoughts.end()
                    console.print_result(event.text, end="", flush=True)
        except KeyboardInterrupt:
            handle.cancel()
            progress.show_stopping()
        except BrokenPipeError:
            handle.cancel()
            raise
        completion = handle.result()
    thoughts.end()
    console.print_result(flush=True)
    for answer in completion.others:
        console.print_result("---")
        thoughts.print_thought(answer.thinking)
        thoughts.end()
        console.print_result(answer.text, flush=True)
    return completion


def wait_for_answer(handle: RequestHandle) -> Completion:
    """Wait for the complete answer. Ctrl-C keeps the text so far."""
    with PrefillProgress() as progress:
        try:
            for event in handle:
                progress.update(event)
        except KeyboardInterrupt:
            handle.cancel()
            progress.show_stopping()
        return handle.result()


def completion_json(engine: Engine, completion: Completion, hide_thinking: bool = False) -> dict[str, object]:
    """Return a completion as a JSON object, for `--json`."""
    first, *others = [_answer_json(engine, each, hide_thinking) for each in (completion, *completion.others)]
    return {"model": engine.info.name, **first, **({"others": others} if others else {})}


def _answer_json(engine: Engine, completion: Completion, hide_thinking: bool) -> dict[str, object]:
    """Return one answer of a completion as a JSON object, for `--json`."""
    record: dict[str, object] = {
        "text": completion.text,
        "reasoning_content": None if hide_thinking else completion.thinking or None,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason.value,
        "usage": {**asdict(completion.usage), "total_tokens": completion.usage.total_tokens},
        "timings": asdict(completion.timings),
    }
    if completion.logprobs is not None:
        record["logprobs"] = logprob_json(completion.logprobs, _token_decoder(engine))
    return record


def print_logprobs(engine: Engine, completion: Completion) -> None:
    """Print a table of each answer's token log-probabilities."""
    for answer in (completion, *completion.others):
        console.print_result()
        for line in logprob_table(answer.logprobs or (), _token_decoder(engine)):
            console.print_result(line)


def _token_decoder(engine: Engine) -> Callable[[int], str]:
    """Return a function that decodes one token."""
    return lambda token: engine.decode([token], special_tokens=True)
