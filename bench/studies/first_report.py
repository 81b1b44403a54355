"""Reads what `cortexmlx doctor --report` wrote on an Apple GPU, and prints the defaults that it asks to change.

`python -m cortexmlx.bench.studies.first_report report.json` judges a report. With `--rules` it prints the table of
docs/first-report.md. It proposes; a person decides. It needs no mlx.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from cortexmlx.cli.doctor.report import FORMAT
from cortexmlx.errors import InvalidRequest
from cortexmlx.kv.sizing import format_bytes

ROOT = Path(__file__).resolve().parents[2]

GAIN = 0.05
"""Times of one candidate differ by as much: the autotuner's `MARGIN`."""

PREFILL_GAIN = 0.10
SLOWER_THAN_MLX, LEAST_SHARE = 0.25, 0.50
DECODE_RATIO = 0.95

IDLE_SECONDS = 0.05
"""For each GB. llama.cpp's users measured 0.02 to 0.04. A model of 40 GB waits for 2 seconds at this."""

Record = dict[str, Any]
Finding = tuple[str, object]
"""What a rule found: the reason, and the value that it proposes; None for the present one."""


@dataclass(frozen=True)
class Rule:
    """A rule: what it reads, when it proposes a change, and the default that it changes."""

    name: str
    statement: str
    """Sentences: "Propose a change if ..." and "Reads ...", the fields of the report."""
    file: str
    constant: str
    """A name, a field or a key that this file sets in one line; of a page, a heading."""
    judge: Callable[[Record, Any], Finding]

    def default(self) -> Any:
        """Return the default in this clone: a literal, or else its text. Raises LookupError if it is not there."""
        text = (ROOT / self.file).read_text()
        if f"\n## {self.constant}\n" in text:
            return "never set"
        match = re.search(rf'^\W*{self.constant}"?(?:.*? = |: )(.+?),?$', text, re.MULTILINE)
        if match is None:
            raise LookupError(f"{self.file} has no {self.constant}")
        try:
            return ast.literal_eval(match[1])
        except (ValueError, SyntaxError):
            return match[1]


RULES: list[Rule] = []
"""The rules, in the order of this file."""


def rule(name: str, file: str, constant: str) -> Callable[[Callable[[Record, Any], Finding]], None]:
    """Return a decorator that adds a function to `RULES`. Its docstring states the rule, with thresholds by name."""

    def add_rule(judge: Callable[[Record, Any], Finding]) -> None:
        RULES.append(Rule(name, (judge.__doc__ or "").format(**globals()), file, constant, judge))

    return add_rule


@rule("kernels", "metal/rules.py", "EVERY_KERNEL")
def judge_kernel_checks(report: Record, now: Any) -> Finding:
    """Propose a change if a kernel's check fails; nothing else is judged before it is mended or refused. Reads
    `checks`: `verdict` of `kernel`."""
    kernels = [check for check in report["checks"] if check["name"] == "kernel"]
    if not kernels:
        raise LookupError("no kernel was checked")
    wrong = "; ".join(check["detail"] for check in kernels if check["verdict"] == "fail")
    return wrong or f"none of {len(kernels)} fails", "a rule that refuses it" if wrong else None


@rule("decode kernel", "metal/rules.py", "GEOMETRIES")
def judge_decode_kernel(report: Record, now: Any) -> Finding:
    """Propose a change if ours is slower than MLX's by {SLOWER_THAN_MLX:.0%} and below {LEAST_SHARE:.0%} of the
    bandwidth, in every step of a model. Reads `decode attention`: `seconds` beside `mlx_seconds`, `bandwidth_share`."""
    slow: dict[str, list[bool]] = defaultdict(list)
    for r in _speed_records(report, "decode attention", "seconds"):
        behind = r["seconds"] >= r["mlx_seconds"] * (1 + SLOWER_THAN_MLX)
        slow[r["model"]].append(behind and r["bandwidth_share"] < LEAST_SHARE)
    names = ", ".join(model for model, steps in slow.items() if all(steps))
    return f"slow in every step of {names or 'no model'}", "another, by its `cycles`" if names else None


@rule("matmuls' rows", "cortexmlx/matmul/autotuning.py", "ROWS")
def judge_matmul_rows(report: Record, now: Any) -> Finding:
    """Propose a change if our kernel is faster by {GAIN:.0%} for no model. Reads `matmul`: `seconds` beside
    `mlx_seconds`, by `rows`."""
    gains = _speedups(report, "matmul", "rows")
    kept = tuple(rows for rows, of in gains.items() if max(of) >= 1 + GAIN)
    return "MLX's time over ours at best: " + _format_speedups(gains, max), None if len(kept) == len(gains) else kept


@rule("prefill pieces", "cortexmlx/kv/sizing.py", "PREFILL_BUDGET")
def judge_prefill_pieces(report: Record, now: int) -> Finding:
    """Propose a change if a token takes {PREFILL_GAIN:.0%} less in a longer piece, for a model. Reads `matmul`:
    `mlx_seconds` of one token, by `rows`."""
    costs: dict[str, dict[int, float]] = defaultdict(dict)
    for r in _speed_records(report, "matmul", "mlx_seconds"):
        if r["rows"] >= now:
            costs[r["model"]][r["rows"]] = r["mlx_seconds"] / r["rows"]
    costs = {model: of for model, of in costs.items() if now in of}
    over = {rows: max(of[rows] / min(of.values()) - 1 for of in costs.values()) for rows in next(iter(costs.values()))}
    best = min((rows for rows in over if over[rows] < PREFILL_GAIN), default=max(over))
    return f"a token of {now} costs {over[now]:.0%} more than at the best length", best if best != now else None


@rule("prefill on matrix units", "metal/prefill.py", "NARROW")
def judge_prefill_on_matrix_units(report: Record, now: int) -> Finding:
    """Propose a change if ours is faster by {PREFILL_GAIN:.0%} in a longer window, or MLX's in this one, for all
    models. Reads `prefill attention`: `seconds` beside `mlx_seconds`, by `window`; `gpu`."""
    if not (report["gpu"]["matrix_units"] and report["gpu"]["matrix_kernels"]):
        raise LookupError("no matrix units in use: the GPU has none, or this build of MLX no NAX kernels")
    gains = _speedups(report, "prefill attention", "window")
    proposed = now
    if max(gains[now]) <= 1 / (1 + PREFILL_GAIN):
        proposed = max((window for window in gains if window < now), default=0)
    for window in sorted(window for window in gains if window > now):
        if min(gains[window]) < 1 + PREFILL_GAIN:
            break
        proposed = window
    return "MLX's time over ours at least: " + _format_speedups(gains, min), proposed if proposed != now else None


@rule("block size", "cortexmlx/kv/spec.py", "DEFAULT_BLOCK_SIZE")
def judge_block_size(report: Record, now: int) -> Finding:
    """Propose a change if another size is faster by {GAIN:.0%}, in every step of every model. Reads `decode attention`:
    `seconds`, by `block_size`."""
    steps: dict[tuple[Any, ...], dict[int, float]] = defaultdict(dict)
    for r in _speed_records(report, "decode attention", "seconds"):
        steps[r["model"], r["rows"], r["tokens"]][r["block_size"]] = r["seconds"]
    sizes = next(iter(steps.values())).keys() - {now}
    gain, best = max((min(of[now] / of[size] - 1 for of in steps.values()), size) for size in sizes)
    return f"blocks of {best} are faster by {gain:.0%} at least", best if gain >= GAIN else None


@rule("run-ahead", "cli/start.py", "MLX_MAX_OPS_PER_BUFFER")
def judge_run_ahead(report: Record, now: str) -> Finding:
    """Propose a change if `run_ahead` is below 1, and decoding below {DECODE_RATIO} of mlx-lm's. Reads `stats`:
    `command_buffers`; `a short decode beside mlx-lm`."""
    buffers, decode = report["stats"]["command_buffers"], report["a short decode beside mlx-lm"]
    ratio = median(decode["cortexmlx_tokens_per_second"]) / median(decode["mlx_lm_tokens_per_second"])
    reason = f"MLX queues {buffers['run_ahead']:.0%} of a step, and decoding is {ratio:.2f} of mlx-lm's"
    operations = round(-(-buffers["max_operations"] / buffers["run_ahead"] // 50) * 50)
    return reason, operations if buffers["run_ahead"] < 1 and ratio < DECODE_RATIO else None


@rule("wired limit", "docs/memory.md", "The wired limit")
def judge_wired_limit(report: Record, now: Any) -> Finding:
    """Propose a change if a GB takes {IDLE_SECONDS} s longer. Reads `memory after a pause`: `after_idle_seconds`,
    `busy_seconds`, `bytes`."""
    pause = report["memory after a pause"]
    more = (median(pause["after_idle_seconds"]) - median(pause["busy_seconds"])) / (pause["bytes"] / 1e9)
    proposed = "an option that keeps a model warm by a small step each second"
    return f"a GB takes {more:.3f} s longer after a pause", proposed if more >= IDLE_SECONDS else None


def _speed_records(report: Record, kernel: str, figure: str) -> list[Record]:
    """Return the speed records of a kernel in which `figure` is given. Raises LookupError without any."""
    records = [r for r in report["speeds"] if r["kernel"] == kernel and r.get(figure)]
    if not records:
        raise LookupError(f"no figures of {kernel}")
    return records


def _speedups(report: Record, kernel: str, key: str) -> dict[int, list[float]]:
    """Return MLX's times over our kernel's, by the value of the field `key`, without the matmuls of experts."""
    found: dict[int, list[float]] = defaultdict(list)
    for record in _speed_records(report, kernel, "seconds"):
        if record[key] and not record.get("experts"):
            found[record[key]].append(record["mlx_seconds"] / record["seconds"])
    return found


def _format_speedups(speedups: dict[int, list[float]], pick: Callable[[list[float]], float]) -> str:
    return ", ".join(f"{value}: {pick(of):.2f}" for value, of in speedups.items())


def rules_table() -> str:
    """Return the rules as a Markdown table."""
    lines = ["| rule | fields | it proposes a change if | default |", "|---|---|---|---|"]
    for each in RULES:
        condition, fields = " ".join(each.statement.split()).removeprefix("Propose a change if ")[:-1].split(". Reads ")
        lines.append(f"| {each.name} | {fields} | {condition} | `{each.constant}` in `{each.file}` |")
    return "\n".join(lines)


def read_report(path: Path) -> Record:
    """Read a report. Raises InvalidRequest if it is none, or of another format."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        content = None
    if not isinstance(content, dict) or not {"report", "machine", "checks"} <= content.keys():
        raise InvalidRequest(f"{path} is no report: name a file that `cortexmlx doctor --report` wrote")
    if content["report"] != FORMAT:
        text = f"{path} has format {content['report']}, not {FORMAT}: ask for a report of this version of cortexmlx"
        raise InvalidRequest(text)
    return content


def judge(report: Record) -> Iterator[str]:
    """Yield the machine, and a line for each rule: a change that it proposes, what it keeps, or why it cannot tell."""
    machine = {"chip": "unknown", "memory": 0, "cortexmlx": "unknown", "mlx": "unknown"} | report["machine"]
    size = format_bytes(machine["memory"])
    yield f"{machine['chip']}, {size}, cortexmlx {machine['cortexmlx']}, mlx {machine['mlx']}"
    if report.get("gpu", {}).get("trusted") is not True:
        yield "nothing is proposed: this is not from an Apple GPU, or from a virtual machine's"
        return
    for each in RULES:
        now = each.default()
        try:
            reason, proposed = each.judge(report, now)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:  # a part that failed on that machine
            yield f"unknown  {each.name}: {f'{error.args[0]} is missing' if isinstance(error, KeyError) else error}"
            continue
        yield f"{'keep  ' if proposed is None else 'CHANGE'}   {each.name}: {reason}"
        if proposed is not None:
            present = f" is {now}:" if str(now)[-1].isalnum() else ":"
            yield f"         {each.constant} in {each.file}{present} propose {proposed}"
            if each is RULES[0]:
                return


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what a report asks to change, or the rules. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cortexmlx.bench.studies.first_report", description=judge.__doc__)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("report", nargs="?", type=Path, help="a file of `cortexmlx doctor --report`")
    choice.add_argument("--rules", action="store_true", help="print the rules as a table")
    options = parser.parse_args(arguments)
    try:
        print(rules_table() if options.rules else "\n".join(judge(read_report(options.report))))
    except InvalidRequest as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
