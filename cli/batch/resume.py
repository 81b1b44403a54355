"""Resume an interrupted batch: a request that already has a record in the output is not run again.

OUT.run, beside OUT, holds the settings of the run: the model, the parameters and the input. A run with other settings
is refused, since it would mix two kinds of answers in one file. A second run is refused while the first one writes.

For an input that is a file, OUT.run also has a digest of each line. A record is not taken for the answer to a line that
has changed. The file itself may be moved.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cortexmlx.cli.files.outputs import descriptor_of, rewrite_path
from cortexmlx.cli.terminal.text import shorten_start
from cortexmlx.errors import CortexError, InvalidRequest
from cortexmlx.protocols.batch import BatchRequest, InvalidLine, request_key
from cortexmlx.scheduling.keep_policy import KeepPolicy
from cortexmlx.types.messages import TemplateVars
from cortexmlx.types.sampling_params import SamplingParams

_LONGEST_NAME, _LONGEST_VALUE = 80, 300
_APART = ("params", "defaults", "errors")


@dataclass(frozen=True)
class RunIdentity:
    """The settings that must be equal for a run to resume another run's files."""

    model: str
    source: str
    system: str | None
    raw: bool
    params: SamplingParams
    adapter: str | Path | None = None
    kv_bits: int | None = None
    kv_group_size: int | None = None
    keep: KeepPolicy | None = None
    errors: Path | None = None
    template_vars: TemplateVars | None = None
    adapters: Mapping[str, str | Path] | None = None
    """The folders of the adapters that lines may name."""
    weights: str | None = None
    """Identity of the content of the model's files. None before they are loaded."""
    adapter_weights: Mapping[str, str] | None = None
    """Digests of the adapters that lines may name. None before they are loaded, and if there are none."""

    def as_json(self) -> dict[str, Any]:
        """Return the settings as JSON, as OUT.run stores them."""
        settings = {**asdict(self), "source": _stable_source(self.source)}
        settings["adapter"] = None if self.adapter is None else os.path.realpath(os.path.expanduser(self.adapter))
        settings["adapters"] = {
            name: os.path.realpath(os.path.expanduser(each)) for name, each in (self.adapters or {}).items()
        } or None
        settings["errors"] = None if self.errors is None else str(self.errors.resolve())
        settings["defaults"] = asdict(SamplingParams())
        for params in (settings["params"], settings["defaults"]):
            del params["logits_processors"]  # functions, which no command takes
        normal: dict[str, Any] = json.loads(json.dumps(settings, default=dict))
        return normal


def side_paths(output: Path) -> tuple[Path, Path]:
    """Return the paths of OUT.run and of the copy that replaces OUT in a rewrite. Links are resolved."""
    return run_path(output), rewrite_path(Path(os.path.realpath(output)))


def run_path(output: Path) -> Path:
    """Return the path of OUT.run. If OUT is a link, it is beside the link's target."""
    target = Path(os.path.realpath(output))
    return target.with_name(target.name + ".run")


class BatchRunFile:
    """OUT.run of a batch, locked by one run at a time: its first line has the run's settings, and the others digests
    of the input's lines. Raises CortexError if it cannot be written, InvalidRequest if another run has locked it.
    """

    def __init__(self, output: Path) -> None:
        self.path = run_path(output)
        self._output = output
        try:
            self._file = self.path.open("a+b", buffering=0)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidRequest(f"another batch is writing {output}: wait for it, or give -o another name") from None
        except OSError as error:
            raise CortexError(f"{self.path} cannot be written: {error.strerror or error}") from error

    def read_settings(self) -> dict[str, Any]:
        """Return the run's settings, with its start as `created` (Unix time). Raises InvalidRequest if unreadable."""
        self._file.seek(0)
        try:
            settings = json.loads(self._file.readline())
            defaults, created = {**settings.get("defaults", {})}, int(settings["created"])
            return {**settings, "params": {**settings["params"]}, "defaults": defaults, "created": created}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            raise InvalidRequest(
                f"{self.path} is missing, so it is not known what {self._output.name} holds: --force starts again"
            ) from None

    def start(self, run: RunIdentity) -> int:
        """Begin a new run and save its settings. Return its start time, in seconds since 1970."""
        start_time = int(time.time())
        self._file.truncate(0)
        self.append({**run.as_json(), "created": start_time})
        return start_time

    def read_entries(self) -> Iterator[Any]:
        """Yield the JSON values that were appended after the settings. An incomplete line is left out."""
        self._file.seek(0)
        for line in self._file.read().split(b"\n")[1:]:  # unbuffered: `readlines` would read byte by byte
            try:
                yield json.loads(line)
            except ValueError:
                continue

    def append(self, values: Mapping[str, Any], prefix: bytes = b"") -> None:
        """Append a JSON value as a line, after the bytes `prefix`. Raises CortexError if that fails."""
        data = memoryview(prefix + json.dumps(values).encode() + b"\n")
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise CortexError(f"{self.path} cannot be written: {error.strerror or error}") from error

    def close(self) -> None:
        """Unlock the file for other runs. Delete it if no run has begun."""
        if not os.fstat(self._file.fileno()).st_size:
            self.path.unlink(missing_ok=True)
        self._file.close()

    def check_settings(self, run: RunIdentity, *, is_retry: bool) -> int:
        """Check that the run to resume had the same settings, and return when it began, in seconds since 1970. Raises
        InvalidRequest if they differ from `run` or cannot be read. With `is_retry`, `max_tokens` may differ.
        """
        saved_settings = self.read_settings()
        current_settings = run.as_json()
        if run.weights is None:  # not known yet
            saved_settings["weights"] = saved_settings["adapter_weights"] = None
        changes = _differing_settings(saved_settings, current_settings)
        only_length = changes.keys() == {"max_tokens"}
        if changes and not (is_retry and only_length):
            texts = [
                name if name.endswith("weights") else f"{name} was {_value_text(old)}, now {_value_text(new)}"
                for name, (old, new) in changes.items()
            ]
            retry = "--retry-errors to ask again what failed or ended before its form was whole, "
            raise InvalidRequest(
                f"{self._output.name} was written with other settings ({'; '.join(texts)}): use the same, "
                f"{retry if only_length else ''}or --force to begin again"
            )
        return int(saved_settings["created"])

    def check_lines(
        self, source: str, digests: Mapping[str, str], done_keys: Collection[str], failed_keys: Collection[str] = ()
    ) -> None:
        """Raise InvalidRequest if an input line changed after its record was written, or if the input is not the same
        file and lacks such a line. The keys are those of lines.
        """
        saved_source = self.read_settings().get("source")
        if saved_source != _stable_source(source) and (missing_keys := sorted(set(done_keys) - digests.keys())):
            raise InvalidRequest(
                f"{self._output.name} holds what {saved_source} asked, and {source} lacks the requests named "
                f"{_key_summary(missing_keys)}: give an input with them, or give -o another name"
            )
        saved_digests = self._saved_digests()
        changed_keys = [
            key for key in digests if key in done_keys and saved_digests.get(key, digests[key]) != digests[key]
        ]
        answered_keys = [key for key in changed_keys if key not in failed_keys]
        if answered_keys:
            raise InvalidRequest(
                f"the input has changed: {self._output.name} holds answers to what the requests named "
                f"{_key_summary(answered_keys)} said before. Put these lines back as they were, and add the changed "
                "ones after them (in JSON with new ids), or use --force to begin again"
            )
        if changed_keys:
            raise InvalidRequest(
                f"the input has changed: what was named {_key_summary(changed_keys)} failed, and says something else "
                "now. --resume --retry-errors asks again what failed"
            )

    def save_digests(self, digests: Mapping[str, str]) -> None:
        """Append the digests of the input lines, by key."""
        saved_digests = self._saved_digests()
        new = {key: digest for key, digest in digests.items() if saved_digests.get(key) != digest}
        if new:
            self.append({"lines": new}, b"\n")  # the last line may have been cut in half

    def _saved_digests(self) -> dict[str, str]:
        """Return the saved digests by key. The latest one counts; an incomplete list is ignored."""
        digests: dict[str, str] = {}
        for line in self.read_entries():
            with contextlib.suppress(KeyError, TypeError, ValueError):
                digests.update(line["lines"])
        return digests


def _differing_settings(
    saved_settings: Mapping[str, Any], current_settings: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return the saved and the current value of each setting in which two runs differ. Two input files do not differ.

    A setting that one version of the program does not know has its default in that version's runs. Only the version
    that knows the setting can tell the default, so each run writes its defaults down.
    """
    values = {**asdict(RunIdentity("", "", None, False, SamplingParams())), **saved_settings}
    pairs = {key: (values[key], current_settings.get(key)) for key in values if key not in (*_APART, "created")}
    if "-" not in pairs["source"]:
        del pairs["source"]
    saved_params, current_params = saved_settings["params"], current_settings["params"]
    defaults = {**saved_settings["defaults"], **current_settings["defaults"]}
    for name in {**current_params, **saved_params}:
        default = defaults.get(name)
        pairs[name] = saved_params.get(name, default), current_params.get(name, default)
    return {name: (old, new) for name, (old, new) in pairs.items() if old != new}


def _stable_source(source: str) -> str:
    """Return the input's name, the same in every run: stdin for a pipe like `<(...)`, whose number varies."""
    path = Path(source)
    is_piped = descriptor_of(path) is not None and not path.is_file()
    return "-" if source == "-" or is_piped else str(path.resolve())


def _value_text(value: object) -> str:
    """Return a setting's value for a message."""
    return "none" if value is None else f"{json.dumps(value, ensure_ascii=False):.{_LONGEST_VALUE}}"


def _key_summary(keys: Sequence[str]) -> str:
    """Return, for an error, the first of these keys in words, and how many more there are."""
    first = shorten_start(keys[0], _LONGEST_NAME)
    return f"{first} and {len(keys) - 1} more" if len(keys) > 1 else first


def skip_done(
    items: Iterable[BatchRequest | InvalidLine | None], done_keys: Collection[str]
) -> Iterator[BatchRequest | InvalidLine | None]:
    """Yield the items that have no record yet. None, for an item that has not arrived yet, is passed on."""
    return (item for item in items if item is None or request_key(item.id, item.line) not in done_keys)
