"""Going on with a batch that was interrupted: what its output holds already is not asked again.

Beside OUT lies OUT.run, which says what the run was: the model, the parameters and the input. A run that differs would
mix answers of two kinds in one file, and is refused.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cortexmlx.cli.batch.input import BadLine, BatchRequest
from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.request import SamplingParams
from cortexmlx.scheduling.keep import KeepPolicy

Identity = str | int


@dataclass(frozen=True)
class RunIdentity:
    """What must be the same for the records of two runs to belong together."""

    model: str
    source: str
    system: str | None
    raw: bool
    params: SamplingParams
    adapter: str | Path | None = None
    kv_bits: int | None = None
    kv_group_size: int | None = None
    keep: KeepPolicy | None = None

    def as_json(self) -> dict[str, Any]:
        """As it is kept in the file beside the output."""
        kept = {**asdict(self), "source": self.source if self.source == "-" else str(Path(self.source).resolve())}
        kept["adapter"] = None if self.adapter is None else str(Path(os.path.expanduser(self.adapter)).resolve())
        del kept["params"]["logits_processors"]  # functions, which no command takes
        normal: dict[str, Any] = json.loads(json.dumps(kept, default=dict))
        return normal


def identity_path(output: Path) -> Path:
    """Where the identity of the run that wrote `output` lies."""
    return output.with_name(output.name + ".run")


def start(output: Path, run: RunIdentity) -> None:
    """A new run: remember what it is."""
    path = identity_path(output)
    try:
        path.write_text(json.dumps(run.as_json()) + "\n", encoding="utf-8")
    except OSError as error:
        raise CortexError(f"{path} cannot be written: {error.strerror or error}") from error


def resume(output: Path, run: RunIdentity, *, retry_errors: bool) -> Counter[Identity]:
    """How often each id is in `output` already; a torn last line is cut off, and with `retry_errors` error records are.

    Raises InvalidRequest if another run wrote it.
    """
    if not output.exists():
        start(output, run)
        return Counter()
    _check(output, run)
    whole, done = _read(output)
    kept = [line for line, record in whole if not (retry_errors and record.get("error"))]
    if len(kept) < len(whole) or output.stat().st_size != sum(map(len, kept)):
        _replace(output, kept)
    if retry_errors:
        done = Counter(_identity(record) for _, record in whole if not record.get("error"))
    return done


def remaining(items: Iterable[BatchRequest | BadLine], done: Counter[Identity]) -> Iterator[BatchRequest | BadLine]:
    """The items whose records are missing. An id that occurs n times in the output is left out n times."""
    left = done.copy()
    for item in items:
        if left[item.id] > 0:
            left[item.id] -= 1
        else:
            yield item


def _check(output: Path, run: RunIdentity) -> None:
    path = identity_path(output)
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InvalidRequest(
            f"{path} is missing, so it is not known what {output.name} holds: leave out --resume to begin again"
        ) from None
    now = run.as_json()
    changed = [key for key in now if before.get(key) != now[key] and key != "params"]
    old, new = before.get("params", {}), now["params"]
    changed += [key for key in new if old.get(key) != new[key]]
    if changed:
        raise InvalidRequest(
            f"{output.name} was written with another {' and '.join(changed)}: use the same, "
            "or leave out --resume to begin again"
        )


def _read(output: Path) -> tuple[list[tuple[bytes, dict[str, Any]]], Counter[Identity]]:
    """The whole records of the file, each with its line, up to the first that is torn; and their ids."""
    whole: list[tuple[bytes, dict[str, Any]]] = []
    with output.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n") or not isinstance(record, dict):
                break
            whole.append((line, record))
    return whole, Counter(_identity(record) for _, record in whole)


def _identity(record: dict[str, Any]) -> Identity:
    identity = record.get("custom_id", record.get("id"))
    return identity if isinstance(identity, (str, int)) else ""


def _replace(output: Path, lines: list[bytes]) -> None:
    """Write `lines` as the whole file, so that at every moment either the old or the new one is there."""
    new = output.with_name(output.name + ".new")
    with new.open("wb") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    new.replace(output)
