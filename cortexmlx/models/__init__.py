"""Models: resolve a name, load it, say what is on this machine. Importing this package imports neither mlx nor mlx-lm."""

from cortexmlx.models.load import load_model
from cortexmlx.models.loaded import LoadedModel
from cortexmlx.models.resolve import ModelSource, SourceKind, resolve

__all__ = ["LoadedModel", "ModelSource", "SourceKind", "load_model", "resolve"]
