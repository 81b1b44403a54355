"""A chat from its greeting to its end, and what is on the screen meanwhile."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from support.cli.terminal import STOP, Terminal, pieces

SIZES = ((80, 24), (40, 10), (200, 50))

ANSWER = """\
# Why the sky is blue

Sunlight has **all colours**, and air *scatters* the short waves more than the long ones: by the fourth power, as \
`scattered` says. 天空是蓝色的。 🎉

1. Violet is scattered most
   - but the sun sends little of it
2. Blue is next

```python
def scattered(wavelength: float) -> float:
    return 1 / wavelength**4  # in nanometres
```

| colour | nm  | scattered |
|:-------|----:|:---------:|
| blue   | 450 | **4.4 times** |
| red    | 650 | once |

> See also: why sunsets are red, and what is left of
the light that comes from there.
"""
HALF = ANSWER.index("times**")


def seen(columns: int, lines: int) -> str:
    """The screen in the middle of the answer, and everything from the greeting on when it is there."""
    constant = {"FAKE_MACHINE": "1"}
    with Terminal("--no-save", columns=columns, lines=lines, environment=constant) as terminal:
        terminal.wait_for_prompt()
        terminal.ask([*pieces(ANSWER[:HALF]), STOP, *pieces(ANSWER[HALF:])])
        terminal.wait_for_stop()
        terminal.shows("4.4")
        terminal.shows("tok/s · TTFT")
        meanwhile = unchanging(terminal.screen.rows())
        terminal.go_on()
        terminal.wait_for_prompt()
        terminal.type("/bye\r")
        assert terminal.exit_code() == 0
        return "\n".join([*framed("while it is written", meanwhile, columns), *framed("all", said(terminal), columns)])


def said(terminal: Terminal) -> list[str]:
    """The rows of scrollback and screen, as far as there is something."""
    rows = terminal.screen.all_rows()
    while not rows[-1]:
        rows.pop()
    return rows


def unchanging(rows: Sequence[str]) -> list[str]:
    """Without what is another each time: the spinner, and what depends on the clock."""
    spun = [re.sub(r"^[⠀-⣿] ", "* ", row) for row in rows]
    return [re.sub(r"\d+ tok/s · TTFT [\d.]+ s", "N tok/s · TTFT N s", row) for row in spun]


def framed(title: str, rows: Sequence[str], columns: int) -> list[str]:
    """Rows below a line with their title."""
    return [f"-- {title} ".ljust(columns, "-"), *rows, ""]


def file_for(columns: int, lines: int) -> Path:
    """Where the screens of a size are kept."""
    return Path(__file__).with_name(f"{columns}x{lines}.txt")
