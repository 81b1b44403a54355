"""Imports mlx-lm's model classes without the rest of mlx-lm, and the rest without its side effects.

`import mlx_lm.models.llama` first runs mlx-lm's own `__init__`, which imports all of transformers (most of a second),
sets an environment variable and lowers the process's limit of open files. The model classes need none of that. So the
package is entered here without running its `__init__`. It still runs, on the same module, as soon as anybody asks the
package for something that only it provides (`mlx_lm.load`, `mlx_lm.stream_generate`, ...).
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import logging
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

_NAME = "mlx_lm"
_RUNNING = "_init_is_running"
_loading = threading.RLock()


class _LazyPackage(ModuleType):
    """A package whose `__init__` runs only when a missing attribute is read."""

    def __getattr__(self, name: str) -> Any:
        # Names that tools look for on every module they meet are no reason to load.
        if name.startswith("__") and name != "__version__":
            raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")
        with _loading:
            if type(self) is _LazyPackage and not self.__dict__.get(_RUNNING):
                self.__dict__[_RUNNING] = True
                try:
                    assert self.__spec__ is not None and self.__spec__.loader is not None
                    with without_side_effects():
                        self.__spec__.loader.exec_module(self)
                    object.__setattr__(self, "__class__", ModuleType)
                finally:
                    del self.__dict__[_RUNNING]
        if name in self.__dict__:
            return self.__dict__[name]
        raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")


@contextmanager
def without_side_effects() -> Iterator[None]:
    """Import modules in this context without lowering the process's limits (they could not be raised again), and
    without transformers' message that PyTorch is missing.
    """

    def drop_record(record: logging.LogRecord) -> bool:
        return False

    advice = logging.getLogger("transformers")
    with _loading:
        real = resource.setrlimit
        resource.setrlimit = lambda *_: None
        advice.addFilter(drop_record)
        try:
            yield
        finally:
            resource.setrlimit = real
            advice.removeFilter(drop_record)


def load_without_tokenizers() -> None:
    """Make this process load models without tokenizers, and so without transformers, whose import takes a second."""
    enter_mlx_lm()

    def raise_on_load(*arguments: object, **options: object) -> Any:
        raise RuntimeError("this process was started to load models without their tokenizers")

    absent = ModuleType(f"{_NAME}.tokenizer_utils", "Stands in for mlx-lm's, which imports transformers.")
    vars(absent).update(TokenizerWrapper=object, load=raise_on_load)
    sys.modules.setdefault(absent.__name__, absent)


def import_mlx_lm_utils() -> Any:
    """Import and return `mlx_lm.utils`, which loads model folders. The first call imports transformers. Later calls
    take no lock, so an exception that is thrown at an engine's thread while it loads leaves no lock taken.
    """
    loaded_module = sys.modules.get(f"{_NAME}.utils")
    if loaded_module is not None and not getattr(loaded_module.__spec__, "_initializing", False):
        return loaded_module
    enter_mlx_lm()
    with without_side_effects():
        if f"{_NAME}.tokenizer_utils" not in sys.modules:
            _import_transformers_models()
        return importlib.import_module(f"{_NAME}.utils")


def _import_transformers_models() -> None:
    """Import `transformers.models` without reading its 3,400 files again, which takes half a second of CPU: reuse what
    `import transformers` has found in them, since transformers' own cache is too small for that. Do nothing for a
    transformers that works in another way.
    """
    with suppress(AttributeError, TypeError):
        tools: Any = importlib.import_module("transformers.utils.import_utils")
        read, folder = tools.define_import_structure, Path(tools.__file__).parents[1] / "models"
        known = {
            needs: {module[7:]: names for module, names in found.items() if module.startswith("models.")}
            for needs, found in read(folder, prefix="models").items()
        }

        def find_structure(path: str, prefix: str | None = None) -> Any:
            return known if prefix is None and Path(path) == folder / "__init__.py" else read(path, prefix)

        tools.define_import_structure = find_structure
        try:
            importlib.import_module("transformers.models")
        finally:
            tools.define_import_structure = read


class _ThreadOutput(io.StringIO):
    """Collects what the thread that made it writes. What other threads write goes to `fallback_stream`."""

    def __init__(self, fallback_stream: TextIO) -> None:
        super().__init__()
        self._fallback_stream, self._thread = fallback_stream, threading.get_ident()

    def write(self, text: str) -> int:
        """Keep the text, or pass it on if another thread writes it."""
        return super().write(text) if threading.get_ident() == self._thread else self._fallback_stream.write(text)


def missing_package_message(model_type: str) -> str | None:
    """Return the message of an mlx-lm model module about a Python package that it needs and lacks; None if it lacks
    none. Such a module (`olmo`) would print the message and end the process; here it does neither.
    """
    name = import_mlx_lm_utils().MODEL_REMAPPING.get(model_type, model_type)
    if not name.isidentifier() or f"{_NAME}.models.{name}" in sys.modules:
        return None
    output = _ThreadOutput(sys.stdout)
    try:
        with without_side_effects(), redirect_stdout(output):
            importlib.import_module(f"{_NAME}.models.{name}")
    except ImportError:
        return None  # whoever loads the model will say that there is none
    except SystemExit:
        return " ".join(output.getvalue().split())
    return None


def enter_mlx_lm() -> None:
    """Make `mlx_lm.models.*` importable without mlx-lm's `__init__`. Does nothing if mlx-lm is imported already."""
    if _NAME in sys.modules:
        return
    with _loading:
        if _NAME in sys.modules:
            return
        spec = importlib.util.find_spec(_NAME)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {_NAME!r}", name=_NAME)
        package = importlib.util.module_from_spec(spec)
        package.__class__ = _LazyPackage
        sys.modules[_NAME] = package
