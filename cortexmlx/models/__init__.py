"""Models: resolve a name, load a model, list the models on this machine.

Importing this package imports neither mlx nor mlx-lm. `load_model` imports them, after it has preloaded the fast BLAS.
"""

from cortexmlx.models.inventory import LocalModel, list_models
from cortexmlx.models.load import load_model
from cortexmlx.models.loaded import LoadedModel
from cortexmlx.models.resolve import ResolvedModel, SourceKind, resolve_model

__all__ = ["LoadedModel", "LocalModel", "ResolvedModel", "SourceKind", "list_models", "load_model", "resolve_model"]
