"""Which settings of a saved conversation apply to the model that continues it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from cortexmlx.errors import ConversationFileError, InvalidRequest
from cortexmlx.models.tokenizers.templates import accepted_variables
from cortexmlx.sessions.saved import SavedConversation
from cortexmlx.stats import ModelInfo
from cortexmlx.types.messages import TemplateVars
from cortexmlx.types.sampling_params import SamplingParams

_OF_TOKENS = ("logit_bias", "stop_token_ids")
"""Sampling parameters that contain token ids, which are other tokens in another model."""


@dataclass(frozen=True)
class Settings:
    """The settings that apply, and `notes` on those that are left out. With these every turn would be refused, or mean
    something else.
    """

    params: SamplingParams
    template_vars: dict[str, object]
    notes: tuple[str, ...]


def of_file(path: Path, saved: SavedConversation, info: ModelInfo) -> Settings:
    """Return the settings of a saved conversation that apply to this model. Raises ConversationFileError if it has
    token ids that its own model does not have.
    """
    if saved.model.identity == info.identity:
        try:
            saved.params.validate(info.vocab_size)
        except InvalidRequest as error:
            raise ConversationFileError(f"{path} is not a conversation with {info.name}: its {error}") from error
        return _held(info, saved.params, saved.template_vars, ())
    return _of_another(info, saved.params, saved.template_vars, saved.model.continued_with(info, path))


def moved(before: ModelInfo, info: ModelInfo, params: SamplingParams, variables: TemplateVars) -> Settings:
    """Return the settings that apply when a conversation with the model of `before` continues with this one."""
    same = before.identity == info.identity
    return _held(info, params, variables, ()) if same else _of_another(info, params, variables)


def _of_another(info: ModelInfo, params: SamplingParams, variables: TemplateVars, *notes: str) -> Settings:
    gone = [name for name in _OF_TOKENS if getattr(params, name)]
    if gone:
        params = replace(params, logit_bias={}, stop_token_ids=())
        notes += (f"{' and '.join(gone)} named tokens of another model than {info.name}: not set any more",)
    return _held(info, params, variables, notes)


def _held(info: ModelInfo, params: SamplingParams, variables: TemplateVars, notes: tuple[str, ...]) -> Settings:
    """Return the settings with those variables that the model's chat template reads."""
    known, read = frozenset(info.template_vars), dict(variables)
    for name, value in variables.items():
        try:
            accepted_variables({name: value}, known)
        except InvalidRequest:
            del read[name]
    if unread := [name for name in variables if name not in read]:
        notes += (f"the chat template of {info.name} does not read {', '.join(unread)}: not set any more",)
    return Settings(params, read, notes)
