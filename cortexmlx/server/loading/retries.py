"""Retries: when a model whose load failed may be tried again. Plain data, without threads and mlx."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_SECONDS, MOST_SECONDS = 5.0, 300.0


@dataclass(frozen=True)
class _Failure:
    cause: BaseException
    seconds: float
    until: float


class Retries:
    """The failures of a server's models: of their loads, and of engines before they have served a request.

    Each try makes room for the model, so it may unload good ones. After a failure a model is not tried for
    `FIRST_SECONDS`, after each further one in a row for twice as long, up to `MOST_SECONDS`.
    """

    def __init__(self) -> None:
        self._failures: dict[str, _Failure] = {}
        self._serving: set[str] = set()

    def failed(self, model: str, cause: BaseException, now: float) -> float:
        """Note a failure. Return in how many seconds the model may be tried again."""
        self._serving.discard(model)
        last = self._failures.get(model)
        seconds = FIRST_SECONDS if last is None else min(2 * last.seconds, MOST_SECONDS)
        self._failures[model] = _Failure(cause, seconds, now + seconds)
        return seconds

    def served(self, model: str) -> None:
        """Note that a model has served a request. Its failures are forgotten."""
        self._serving.add(model)
        self._failures.pop(model, None)

    def serves(self, model: str) -> bool:
        """Return whether a model has served a request since it was loaded."""
        return model in self._serving

    def unloaded(self, model: str) -> None:
        """Note that a model is unloaded."""
        self._serving.discard(model)

    def refusal(self, model: str, now: float) -> tuple[BaseException, float] | None:
        """Return why a model must not be tried now, and the seconds until it may; None if it may."""
        last = self._failures.get(model)
        return None if last is None or now >= last.until else (last.cause, last.until - now)
