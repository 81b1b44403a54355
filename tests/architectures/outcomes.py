"""What the checks found of each model type, and what was found when `results.json` was last written."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

import mlx.core as mx

from cortexmlx.errors import ModelUnsupported
from cortexmlx.execution.execution_modes import ExecutionMode, choose_execution_mode
from cortexmlx.kv.spec import KVSpec
from cortexmlx.models import load_model
from support.engine.core_driver import Driver
from tests.architectures.configurations import TYPES, configuration
from tests.architectures.parity import CHECKS, Wrong, subject
from tests.architectures.weights import write_folder

RESULTS = Path(__file__).with_name("results.json")


class Status(str, Enum):
    """What became of a model type."""

    SERVED = "served"
    REFUSED = "refused"
    UNJUDGED = "not judged"
    WRONG = "wrong"


@dataclass(frozen=True)
class Outcome:
    """Of one type: `why` it is refused, could not be judged (mlx-lm itself does not run it here), is wrong or runs one
    request at a time;
    what is `kept`, by how many caches; the names of the `checks` that it passed and in which there was what they are
    about.
    """

    status: Status
    why: str = ""
    kept: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()


def outcome(name: str, folder: Path, report: Callable[[str], None] = lambda _: None) -> Outcome:
    """Everything that is checked of a type, with its model in `folder`; `report` is told the figures of each check."""
    try:
        with no_exit():
            made = subject(name, folder)
    except (ImportError, RuntimeError) as error:
        return unjudged(name, folder, error)
    except Exception as error:
        if name in TYPES:
            raise
        return Outcome(Status.UNJUDGED, f"it needs numbers of its own in configurations.json ({error})")
    notes, kept, passed = "", (), []
    try:
        way = choose_execution_mode(load_model(folder).model)
        notes, kept = "; ".join(way.notes), kept_by(way)
        for check, run in CHECKS.items():
            found = run(made)
            report(f"{check} {found:.2g}")
            if found > 0:
                passed.append(check)
    except ModelUnsupported as error:
        return Outcome(Status.REFUSED, without_folder(error, folder))
    except Exception as error:  # a failure of any kind is a result
        what = "" if isinstance(error, Wrong) else f"{type(error).__name__}: "
        return Outcome(Status.WRONG, f"{what}{without_folder(error, folder)}", kept, tuple(passed))
    return Outcome(Status.SERVED, notes, kept, tuple(passed))


def unjudged(name: str, folder: Path, error: Exception) -> Outcome:
    """A type that mlx-lm itself does not run on this machine: refused by the engine, too, or else on trust."""
    if not folder.exists():
        write_folder(folder, configuration(name), {f"tensor.{i}": mx.zeros(1) for i in range(100)})
    try:
        Driver(folder)
    except ModelUnsupported as refusal:
        return Outcome(Status.REFUSED, without_folder(refusal, folder))
    return Outcome(Status.UNJUDGED, f"mlx-lm does not run it here: {without_folder(error, folder)}")


@contextmanager
def no_exit() -> Iterator[None]:
    """A module of mlx-lm's that wants to end the process because a package is missing only cannot be imported."""
    try:
        yield
    except SystemExit as error:
        raise ImportError("a package that mlx-lm does not bring is missing") from error


def kept_by(way: ExecutionMode) -> tuple[str, ...]:
    """How many caches of a model keep what, such as "2 × window"; nothing where they are mlx-lm's own."""
    if way.max_rows is not None:
        return ()
    kinds: Counter[str] = Counter()
    for group in way.groups:
        kinds[kind_of(group.spec)] += len(group.layers)
    return tuple(f"{count} × {kind}" for kind, count in kinds.items())


def kind_of(spec: KVSpec) -> str:
    """What a cache keeps, in a word or two."""
    if not spec.kv_heads:
        return "state" if spec.row_bytes else "nothing"
    if spec.value_in_key:
        return "latent"
    if spec.window is None:
        return "all tokens"
    return "chunk" if spec.chunked else "window"


def without_folder(error: BaseException, folder: Path) -> str:
    """An error's message, which is not to depend on where the model lies."""
    return str(error).replace(str(folder), "the model")


def read_results() -> dict[str, Outcome]:
    """What `results.json` says, by type."""
    stored: Mapping[str, Mapping[str, object]] = json.loads(RESULTS.read_text())
    return {
        name: Outcome(
            Status(entry["status"]),
            str(entry["why"]),
            tuple(entry["kept"]),  # type: ignore[arg-type]
            tuple(entry["checks"]),  # type: ignore[arg-type]
        )
        for name, entry in stored.items()
    }


def write_results(outcomes: Mapping[str, Outcome]) -> None:
    """Keep outcomes in `results.json`, a line for each type."""
    lines = [f"{json.dumps(name)}: {json.dumps(asdict(found), ensure_ascii=False)}" for name, found in outcomes.items()]
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
