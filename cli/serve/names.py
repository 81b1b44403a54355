"""The names of a server's models: from their folders, and from --alias."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cortexmlx.errors import InvalidRequest
from cortexmlx.server.model_pool import client_model_name


@dataclass(frozen=True)
class ServedNames:
    """The names by which clients call the server's models."""

    models: Mapping[str, str]
    """The models as they were given, by their own names, in order."""
    aliases: Mapping[str, str]
    """Other names, each with the own name of its model."""

    def resolve(self, model: str, option: str) -> str:
        """Return the main name of a model that an option names by path, name or alias. Raises InvalidRequest."""
        for name, given in self.models.items():
            if model in (name, given):
                return name
        if model in self.aliases:
            return self.aliases[model]
        raise InvalidRequest(f"{option}: {model!r} is not among the models: {', '.join(map(repr, self.models))}")

    def group_adapters(self, given: Mapping[str, str | Path] | None) -> dict[str, dict[str, str | Path]]:
        """Return the adapters of each model that has some, by the model's main name. With several models, an adapter
        is given as MODEL:NAME. Raises InvalidRequest.
        """
        found: dict[str, dict[str, str | Path]] = {}
        for name, folder in (given or {}).items():
            model, colon, adapter = name.rpartition(":")
            if not colon and len(self.models) > 1:
                raise InvalidRequest(
                    f"--adapters {name}={folder} does not say of which model: write MODEL:{name}=FOLDER"
                )
            own = self.resolve(model, "--adapters") if colon else next(iter(self.models))
            found.setdefault(own, {})[adapter] = folder
        return found


def make_names(models: Sequence[str], aliases: Sequence[str]) -> ServedNames:
    """Return the names of models. An alias is NAME=MODEL, or NAME if there is one model. Two models of one name need
    aliases, which are then their names. Raises InvalidRequest.
    """
    given = list(dict.fromkeys(models))
    asked = dict(_parse_alias(alias, given) for alias in aliases)
    if len(asked) < len(set(aliases)):
        raise InvalidRequest("--alias gives one name to two models")
    count = Counter(client_model_name(model) for model in given)
    own: dict[str, str] = {}
    for model in given:
        name = client_model_name(model)
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
    return ServedNames(own, others)


def _parse_alias(alias: str, models: Sequence[str]) -> tuple[str, str]:
    """Return the name and the model of an --alias."""
    name, equals, model = alias.partition("=")
    if not equals and len(models) == 1:
        model = models[0]
    elif not equals:
        raise InvalidRequest(f"--alias {alias} does not say of which model: write {alias}=MODEL")
    if not name:
        raise InvalidRequest(f"--alias {alias} has no name: write NAME=MODEL")
    meant = [each for each in models if model == each] or [each for each in models if model == client_model_name(each)]
    if len(meant) != 1:
        why = "is not among the models" if not meant else "is the name of two models: give the path"
        raise InvalidRequest(f"--alias {alias}: {model!r} {why}")
    return name, meant[0]
