"""What was timed and chosen for attention and quantized matmuls: lines of `cortexmlx doctor` and `doctor --time`."""

from __future__ import annotations

from collections.abc import Iterator

from cortexmlx.cli.doctor.report import CheckStatus, DoctorCheck
from cortexmlx.stats import ChoiceSource, TimedChoice

NAME = "choice"

_SECONDS = 30.0
"""How long `doctor --time` times at most."""


def saved_choices() -> Iterator[DoctorCheck]:
    """Yield the choices of earlier runs on this machine, as lines of the report."""
    from cortexmlx.attention.autotuning import current_identity
    from cortexmlx.attention.backends import auto_backend_name
    from cortexmlx.autotune.chooser import read_choices
    from cortexmlx.autotune.table import ChoiceTable

    if auto_backend_name() != "metal":
        yield DoctorCheck(NAME, CheckStatus.OK, "by the rules on a CPU; --time MODEL times the candidates")
        return
    choices = read_choices(ChoiceTable(current_identity()))
    if not choices:
        yield DoctorCheck(
            NAME, CheckStatus.OK, "nothing is timed yet: an engine does so when it opens, --time MODEL does so now"
        )
    yield from map(choice_line, choices)


def time_choices(model: str) -> Iterator[DoctorCheck]:
    """Open a model, time all candidates for its attention and matmuls, save the choices, and yield them as lines."""
    from cortexmlx.cpu import blas
    from cortexmlx.mlx_lm.package import enter_mlx_lm

    blas.preload()
    enter_mlx_lm()
    from cortexmlx.core.config import EngineConfig
    from cortexmlx.core.in_process_model import InProcessModel

    loaded_model = InProcessModel(EngineConfig(model), lambda call: None)
    try:
        loaded_model.choose_attention(seconds=_SECONDS, ignore_table=True)
        choices = loaded_model.choices
    finally:
        loaded_model.release()
    if not choices:
        detail = "nothing to choose: the model runs on mlx-lm's own caches, or a warning says what failed"
        yield DoctorCheck(NAME, CheckStatus.WARN, detail)
    yield from map(choice_line, choices)


def choice_line(choice: TimedChoice) -> DoctorCheck:
    """Return a choice as a line of the report, with the fastest candidate first."""
    times = sorted(choice.seconds.items(), key=lambda each: each[1])
    candidate_texts = [f"{name} {seconds * 1e6:,.0f} us" for name, seconds in times]
    candidate_texts += [f"{name} cannot serve: {reason}" for name, reason in choice.refused.items()]
    if choice.source is ChoiceSource.RULE and not choice.seconds:
        candidate_texts.append("not timed")
    return DoctorCheck(
        NAME, CheckStatus.OK, f"{choice.job}; {choice.batch}: {choice.chosen} ({', '.join(candidate_texts)})"
    )
