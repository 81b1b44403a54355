"""The terminal as prompt_toolkit writes to it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from cortexmlx.cli.terminal.harmless.characters import TABLE
from cortexmlx.cli.terminal.harmless.streams import unguarded

if TYPE_CHECKING:
    from prompt_toolkit.output import Output

_WITHOUT_WIDTH = {code: None if to == 0xFFFD else to for code, to in TABLE.items()} | {0x0D: 0x0D}
"""prompt_toolkit counts no cell for what turns or hides text, so nothing may stand for it. It ends rows with CR LF."""


def prompt_output() -> Output:
    """Return the terminal of stdout for an input line: what is typed, pasted or offered for completion is harmless."""
    from prompt_toolkit.output.vt100 import Vt100_Output

    class Harmless(Vt100_Output):
        def write(self, data: str) -> None:
            super().write(data.translate(_WITHOUT_WIDTH))

        def cursor_backward(self, amount: int) -> None:
            if amount:
                self.write_raw(f"\x1b[{amount}D")

    return Harmless.from_pty(unguarded(sys.stdout), term=os.environ.get("TERM"))
