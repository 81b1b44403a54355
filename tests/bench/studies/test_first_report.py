"""What a report asks to change, on made reports of machines that we do not have."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from cortexmlx.bench.studies.first_report import RULES, judge, main, rules_table
from cortexmlx.cli.doctor.report import FORMAT
from support.pages import read

Report = dict[str, Any]
MODELS = ("Llama 3.2 1B", "Qwen3 8B", "Qwen3 30B-A3B")


def made(
    chip: str,
    memory: int,
    *,
    units: bool = False,
    kernels: bool | None = False,
    decode_gain: float = 0.95,
    share: float = 0.7,
    blocks: Mapping[int, float] | None = None,
    products: tuple[float, float, float] = (1.5, 1.4, 1.3),
    pieces: Mapping[int, float] | None = None,
    windows: Mapping[int, float] | None = None,
    run_ahead: float = 1.0,
    ratio: float = 1.0,
    idle: float = 0.02,
) -> Report:
    """A report in which figures are MLX's time over ours. Of `blocks`, it is the speed beside 32; of `pieces`, the cost
    of a token."""
    speeds = []
    for model in MODELS:
        same = {"model": model, "mlx_seconds": 1e-3, "bandwidth_share": share}
        for rows, tokens in ((1, 4096), (8, 1024)):
            for size, speed in {16: 0.9, 32: 1.0, 64: 1.0, **(blocks or {})}.items():
                step = {"kernel": "decode attention", "rows": rows, "tokens": tokens, "block_size": size}
                speeds.append(same | step | {"seconds": 1e-3 / decode_gain / speed})
        experts = 128 if "A3B" in model else None
        for rows, gain in zip((8, 16, 24), products, strict=True):
            speeds.append(same | {"kernel": "matmul", "rows": rows, "experts": experts, "seconds": 1e-3 / gain})
        for rows, cost in {128: 2.0, 512: 1.0, 1024: 1.0, 2048: 1.0, **(pieces or {})}.items() if not experts else ():
            alone = {"kernel": "matmul", "rows": rows, "seconds": None, "mlx_seconds": 1e-6 * rows * cost}
            speeds.append(same | alone)
        for window, gain in {None: 0.9, 128: 2.0, 512: 1.0, 1024: 0.8, **(windows or {})}.items():
            speeds.append(same | {"kernel": "prefill attention", "window": window, "seconds": 1e-3 / gain})
    return {
        "report": FORMAT,
        "machine": {"chip": chip, "memory": memory << 30, "cortexmlx": "0.1.0", "mlx": "0.32.0"},
        "gpu": {"trusted": True, "matrix_units": units, "matrix_kernels": kernels},
        "checks": [{"name": "kernel", "verdict": "ok", "detail": f"variant {n}: it agrees"} for n in range(213)],
        "speeds": speeds,
        "stats": {"command_buffers": {"max_operations": 100, "run_ahead": run_ahead}},
        "a short decode beside mlx-lm": {
            "cortexmlx_tokens_per_second": [100.0 * ratio] * 3,
            "mlx_lm_tokens_per_second": [100.0] * 3,
        },
        "memory after a pause": {
            "bytes": 2 * 10**9,
            "busy_seconds": [0.01] * 3,
            "after_idle_seconds": [0.01 + 2 * idle] * 3,
        },
    }


def m1_8gb() -> Report:
    return made("Apple M1", 8, products=(1.2, 0.9, 0.8), run_ahead=0.5, ratio=0.9)


def m4_max() -> Report:
    return made("Apple M4 Max", 64, blocks={64: 1.08}, pieces={512: 1.15, 1024: 1.05})


def m5(kernels: bool | None = True) -> Report:
    return made("Apple M5", 24, units=True, kernels=kernels, windows={512: 1.2} if kernels else None, idle=0.08)


def with_a_wrong_kernel() -> Report:
    report = m4_max()
    report["checks"][7] |= {"verdict": "fail", "detail": "variant 7: it differs from attention in float64 by 0.5"}
    return report


def slow() -> Report:
    return made("Apple M3 Pro", 18, decode_gain=0.6, share=0.4, products=(0.9, 0.8, 0.7))


@pytest.mark.parametrize(
    ("report", "changes"),
    [
        (m1_8gb, {"matmuls' rows": "propose (8,)", "run-ahead": "is 100: propose 200"}),
        (m4_max, {"prefill pieces": "is 512: propose 1024", "block size": "is 32: propose 64"}),
        (m5, {"prefill on matrix units": "is 128: propose 512", "wired limit": "never set: propose an option"}),
        (lambda: m5(False), {"wired limit": "never set: propose an option"}),
        (lambda: m5(None), {"wired limit": "never set: propose an option"}),
        (with_a_wrong_kernel, {"kernels": "propose a rule that refuses it"}),
        (slow, {"decode kernel": "propose another, by its `cycles`", "matmuls' rows": "propose ()"}),
    ],
)
def test_a_report_asks_for_these_changes_and_no_others(report: Callable[[], Report], changes: dict[str, str]) -> None:
    machine, *lines = judge(report())
    assert machine.startswith("Apple M") and " GiB, cortexmlx 0.1.0, mlx 0.32.0" in machine
    words = {line[9:].partition(": ")[0]: line[:9].strip() for line in lines if line[0] != " "}
    assert {name for name, word in words.items() if word == "CHANGE"} == changes.keys()
    said = iter(line for line in lines if line[0] == " ")
    for rule in RULES:
        if rule.name in changes:
            proposal = next(said)
            assert f" {rule.constant} in {rule.file}" in proposal and changes[rule.name] in proposal
    in_use = report()["gpu"]["matrix_units"] and report()["gpu"]["matrix_kernels"]
    judged = [RULES[0].name] if "kernels" in changes else [rule.name for rule in RULES]
    assert [*words] == judged
    unknown = {name for name, word in words.items() if word == "unknown"}
    assert unknown == (set() if in_use else {"prefill on matrix units"} & set(judged))


EDGES: tuple[tuple[str, Report, Report], ...] = (
    ("block size", {"blocks": {64: 1.04}}, {"blocks": {64: 1.06}}),
    ("matmuls' rows", {"products": (1.5, 1.5, 1.06)}, {"products": (1.5, 1.5, 1.04)}),
    ("prefill pieces", {"pieces": {512: 1.09}}, {"pieces": {512: 1.11}}),
    ("prefill pieces", {"pieces": {512: 1.0, 1024: 1.3}}, {"pieces": {512: 1.3, 1024: 1.2}}),
    ("prefill on matrix units", {"windows": {512: 1.09}}, {"windows": {512: 1.11}}),
    ("prefill on matrix units", {"windows": {128: 0.92}}, {"windows": {128: 0.90}}),
    ("run-ahead", {"run_ahead": 0.9, "ratio": 0.96}, {"run_ahead": 0.9, "ratio": 0.94}),
    ("run-ahead", {"run_ahead": 1.0, "ratio": 0.94}, {"run_ahead": 0.99, "ratio": 0.94}),
    ("decode kernel", {"decode_gain": 0.82, "share": 0.3}, {"decode_gain": 0.79, "share": 0.3}),
    ("decode kernel", {"decode_gain": 0.7, "share": 0.51}, {"decode_gain": 0.7, "share": 0.49}),
    ("wired limit", {"idle": 0.049}, {"idle": 0.051}),
)


@pytest.mark.parametrize(("name", "below", "above"), EDGES)
def test_a_change_is_proposed_from_the_threshold_on(name: str, below: Report, above: Report) -> None:
    for figures, word in ((below, "keep"), (above, "CHANGE")):
        report = made("Apple M5", 16, units=True, kernels=True, **figures)
        assert any(line.startswith(f"{word:<9}{name}: ") for line in judge(report)), (figures, list(judge(report)))


def test_a_block_size_is_changed_only_if_every_step_of_every_model_is_faster() -> None:
    report = m4_max()
    [*_, last] = [r for r in report["speeds"] if r["kernel"] == "decode attention" and r["block_size"] == 64]
    last["seconds"] *= 1.08
    assert not any(line.startswith("CHANGE   block size") for line in judge(report))


def test_nothing_follows_from_a_virtual_gpu_and_little_from_a_report_that_lacks_parts() -> None:
    report = m4_max()
    report["gpu"]["trusted"] = False
    assert len([*judge(report)]) == 2 and "nothing is proposed" in [*judge(report)][1]
    report |= {"gpu": {"trusted": True}, "speeds": [], "stats": {"error": "RuntimeError: no such thing"}}
    report["speeds"] = {"error": "RuntimeError: no such thing"}
    words = [line[:7].strip() for line in judge(report)][1:]
    assert words == ["keep", *["unknown"] * (len(RULES) - 2), "keep"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read: No such file"),
        ("not JSON", "is no report"),
        ("[1]", "is no report"),
        ('{"report": 1, "machine": {}, "checks": []}', f"has format 1, not {FORMAT}"),
    ],
)
def test_what_is_no_report_is_one_message(
    content: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "r.json").write_text(content)
    assert main([str(tmp_path / "r.json")]) == 1
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and says in err and err.count("\n") == 1


def test_every_default_is_where_its_rule_says_and_the_page_has_the_rules() -> None:
    defaults = {rule.constant: rule.default() for rule in RULES}
    assert all(value for value in defaults.values()) and defaults["DEFAULT_BLOCK_SIZE"] == 32
    assert rules_table() in read("docs/first-report.md")


def test_it_needs_no_mlx(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps(m1_8gb()))
    code = "import sys; sys.modules.update(dict.fromkeys(('mlx', 'mlx.core')))\n"
    code += f"from cortexmlx.bench.studies.first_report import main; sys.exit(main([{str(tmp_path / 'r.json')!r}]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "CHANGE   run-ahead" in done.stdout, done.stderr
