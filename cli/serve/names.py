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
        for name, model_source in self.models.items():
            if model in (name, model_source):
                return name
        if model in self.aliases:
            return self.aliases[model]
        raise InvalidRequest(f"{option}: {model!r} is not among the models: {', '.join(map(repr, self.models))}")

    def group_adapters(self, adapters: Mapping[str, str | Path] | None) -> dict[str, dict[str, str | Path]]:
        """Return adapters by main model name; with several models, given as MODEL:NAME. Raises InvalidRequest."""
        adapters_by_model: dict[str, dict[str, str | Path]] = {}
        for name, folder in (adapters or {}).items():
            model, colon, adapter = name.rpartition(":")
            if not colon and len(self.models) > 1:
                raise InvalidRequest(
                    f"--adapters {name}={folder} does not say of which model: write MODEL:{name}=FOLDER"
                )
            main_name = self.resolve(model, "--adapters") if colon else next(iter(self.models))
            adapters_by_model.setdefault(main_name, {})[adapter] = folder
        return adapters_by_model


def make_names(models: Sequence[str], aliases: Sequence[str]) -> ServedNames:
    """Return the names of models. An alias is NAME=MODEL, or NAME if there is one model. Two models of one name need
    aliases, which are then their names. Raises InvalidRequest.
    """
    unique_models = list(dict.fromkeys(models))
    alias_models = dict(_parse_alias(alias, unique_models) for alias in aliases)
    if len(alias_models) < len(set(aliases)):
        raise InvalidRequest("--alias gives one name to two models")
    count = Counter(client_model_name(model) for model in unique_models)
    models_by_name: dict[str, str] = {}
    for model in unique_models:
        name = client_model_name(model)
        if count[name] > 1:
            name = next((alias for alias, aliased_model in alias_models.items() if aliased_model == model), name)
        if name in models_by_name:
            raise InvalidRequest(
                f"{models_by_name[name]!r} and {model!r} are both called {name!r}: give one another name with --alias "
                f"NAME={model}"
            )
        models_by_name[name] = model
    by_model = {model: name for name, model in models_by_name.items()}
    extra_aliases = {alias: by_model[model] for alias, model in alias_models.items() if by_model[model] != alias}
    if taken_name := next((alias for alias in extra_aliases if alias in models_by_name), None):
        raise InvalidRequest(
            f"--alias {taken_name}={models_by_name[extra_aliases[taken_name]]}: {models_by_name[taken_name]!r} is "
            f"called {taken_name!r}"
        )
    return ServedNames(models_by_name, extra_aliases)


def _parse_alias(alias: str, models: Sequence[str]) -> tuple[str, str]:
    """Return the name and the model of an --alias."""
    name, equals, model = alias.partition("=")
    if not equals and len(models) == 1:
        model = models[0]
    elif not equals:
        raise InvalidRequest(f"--alias {alias} does not say of which model: write {alias}=MODEL")
    if not name:
        raise InvalidRequest(f"--alias {alias} has no name: write NAME=MODEL")
    matches = [each for each in models if model == each] or [
        each for each in models if model == client_model_name(each)
    ]
    if len(matches) != 1:
        reason = "is not among the models" if not matches else "is the name of two models: give the path"
        raise InvalidRequest(f"--alias {alias}: {model!r} {reason}")
    return name, matches[0]
