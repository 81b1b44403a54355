"""A worker that hangs in its next step once `hang` was asked for its rank, while its heartbeats go on."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cortexmlx.distributed import rank_server, worker
from cortexmlx.distributed.launch.assignment import read_rank

FOLDER = "CORTEXMLX_TESTS_HANG"
"""The variable of the environment with the folder of the files that ask for it."""

COMMAND = (sys.executable, "-P", __file__, "-m cortexmlx.distributed.worker")
"""Its command line, by which it is found as the real worker is."""


def flag(folder: Path, of_rank: int) -> Path:
    """The file that has a rank hang. It is gone when the rank does."""
    return folder / f"hang-{of_rank}"


def main() -> int:
    """Be a worker."""
    own: Callable[..., Any] = rank_server._CallHandler._start_step_part
    ask = flag(Path(os.environ[FOLDER]), read_rank())

    def start(self: Any, asks: Any) -> Any:
        if ask.exists():
            ask.unlink()
            threading.Event().wait()
        return own(self, asks)

    rank_server._CallHandler._start_step_part = start  # type: ignore[method-assign]
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
