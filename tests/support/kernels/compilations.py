"""A kernel factory that takes its time for what MLX would compile, and notes what and where."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from cortexmlx.metal.lab import sim


class Compilations:
    """What MLX would have compiled. The key is MLX's own: the whole generated text, with a name that has the template's
    arguments, and the address space and the dtype of each input.

    `seconds` is what each compilation takes. As in MLX, one is made at a time.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.threads: list[int] = []
        """The thread of each compilation."""
        self.begun = threading.Event()
        self.dry = False
        """Whether launches give zeros from now on, because only what they compile matters."""
        self._texts: set[str] = set()
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """How many there were."""
        return len(self._texts)

    def factory(self, **options: Any) -> Callable[..., list[mx.array]]:
        """Takes the arguments of `mx.fast.metal_kernel`."""
        kernel = sim.metal_kernel(**options)

        def call(**given: Any) -> list[mx.array]:
            text = kernel.text(given["inputs"], given["output_dtypes"], given["template"]).text
            with self._lock:
                if text not in self._texts:
                    self.begun.set()
                    time.sleep(self.seconds)
                    self.threads.append(threading.get_ident())
                    self._texts.add(text)
            if self.dry:
                return [mx.zeros(s, d) for s, d in zip(given["output_shapes"], given["output_dtypes"], strict=True)]
            return list(kernel(**given))

        return call
