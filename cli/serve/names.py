"""The names of a server's models: of their folders, and those that --alias gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cortexmlx.errors import InvalidRequest
from cortexmlx.server.model_pool import public_name


@dataclass(frozen=True)
class Names:
    """What clients call the models."""

    models: Mapping[str, str]
    """The models as they were given, by their own names, in order."""
    aliases: Mapping[str, str]
    """Other names, each with the own name of its model."""

    def of(self, model: str, option: str) -> str:
        """Return the own name of a model that an option names in either way. Raises InvalidRequest."""
        for name, given in self.models.items():
            if model in (name, given):
                return name
        if model in self.aliases:
            return self.aliases[model]
        raise InvalidRequest(f"{option}: {model!r} is not among the models: {', '.join(map(repr, self.models))}")

    def adapters(self, given: Mapping[str, str | Path] | None) -> dict[str, dict[str, str | Path]]:
        """Return the adapters of each model that has some, by the model's own name. With several models, an adapter is
        given as MODEL:NAME. Raises InvalidRequest.
        """
        found: dict[str, dict[str, str | Path]] = {}
        for name, folder in (given or {}).items():
            model, colon, adapter = name.rpartition(":")
            if not colon and len(self.models) > 1:
                raise InvalidRequest(
                    f"--adapters {name}={folder} does not say of which model: write MODEL:{name}=FOLDER"
                )
            own = self.of(model, "--adapters") if colon else next(iter(self.models))
            found.setdefault(own, {})[adapter] = folder
        return found


def names_of(models: Sequence[str], aliases: Sequence[str]) -> Names:
    """Return the names of models. An alias is NAME=MODEL, or NAME if there is one model. Two models of one name need
    aliases, which are then their names. Raises InvalidRequest.
    """
    given = list(dict.fromkeys(models))
    asked = dict(_read(alias, given) for alias in aliases)
    if len(asked) < len(set(aliases)):
        raise InvalidRequest("--alias gives one name to two models")
    count = Counter(public_name(model) for model in given)
    own: dict[str, str] = {}
    for model in given:
        name = public_name(model)
        if count[name] > 1:
            name = next((alias for alias, meant in asked.items() if meant == model), name)
        if name in own:
            raise InvalidRequest(
                f"{own[name]!r} and {model!r} are both called {name!r}: give one another name with --alias NAME={model}"
            )
        own[name] = model
    by_model = {model: name for name, model in own.items()}
    others = {alias: by_model[model] for alias, model in asked.items() if by_model[model] != alias}
    if taken := next((alias for alias in others if alias in own), None):
        raise InvalidRequest(f"--alias {taken}={own[others[taken]]}: {own[taken]!r} is called {taken!r}")
    return Names(own, others)


def _read(alias: str, models: Sequence[str]) -> tuple[str, str]:
    """Return the name and the model of an alias."""
    name, equals, model = alias.partition("=")
    if not equals and len(models) == 1:
        model = models[0]
    elif not equals:
        raise InvalidRequest(f"--alias {alias} does not say of which model: write {alias}=MODEL")
    if not name:
        raise InvalidRequest(f"--alias {alias} has no name: write NAME=MODEL")
    meant = [each for each in models if model == each] or [each for each in models if model == public_name(each)]
    if len(meant) != 1:
        why = "is not among the models" if not meant else "is the name of two models: give the path"
        raise InvalidRequest(f"--alias {alias}: {model!r} {why}")
    return name, meant[0]
