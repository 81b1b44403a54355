"""Text typed or pasted while an answer streams waits for the next prompt."""

from __future__ import annotations

import os
import select
import termios
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prompt_toolkit.input import Input
    from prompt_toolkit.key_binding.key_processor import KeyPress
    from prompt_toolkit.output import Output

AtOnce = Mapping[str, Callable[[], None]]
"""Keys, by their names in prompt_toolkit, and what they do while an answer is written."""

NO_KEYS: AtOnce = MappingProxyType({})


class Typeahead:
    """The keyboard between two prompts.

    The terminal neither shows typed text nor collects it into lines, and still marks pasted text. Ctrl-C remains a
    signal and discards nothing. A thread reads the keys: the kernel keeps 4 KiB of them, and a paste may be longer.
    """

    def __init__(self, keys: Input, output: Output) -> None:
        self._keys = keys
        self._output = output
        self._terminal = keys.fileno()
        self._before = termios.tcgetattr(self._terminal)

    def silence(self) -> None:
        """Stop the terminal from showing what is typed, except in a prompt."""
        quiet = termios.tcgetattr(self._terminal)
        quiet[0] &= ~termios.ICRNL  # Enter stays Enter, as in a prompt
        quiet[3] = quiet[3] & ~(termios.ECHO | termios.ICANON | termios.IEXTEN) | termios.NOFLSH
        quiet[6][termios.VMIN], quiet[6][termios.VTIME] = 1, 0
        termios.tcsetattr(self._terminal, termios.TCSADRAIN, quiet)

    def restore(self) -> None:
        """Restore the terminal."""
        self._output.disable_bracketed_paste()
        self._output.flush()
        termios.tcsetattr(self._terminal, termios.TCSADRAIN, self._before)

    @contextmanager
    def collecting(self, at_once: AtOnce = NO_KEYS) -> Iterator[None]:
        """Collect what is typed in this context for the next prompt. The keys in `at_once` act at once instead."""
        from prompt_toolkit.input.typeahead import store_typeahead

        self._output.enable_bracketed_paste()  # a prompt switches it off at its end
        self._output.flush()
        pressed: list[KeyPress] = []
        stop, stopper = os.pipe()
        reader = threading.Thread(target=self._read, args=(stop, pressed, at_once), name="cortexmlx-keys", daemon=True)
        reader.start()
        try:
            yield
        finally:
            os.close(stopper)
            reader.join()
            os.close(stop)
            store_typeahead(self._keys, pressed)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Keep what was typed so far for the next message, so that it answers no question of this context."""
        from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead

        kept = get_typeahead(self._keys)
        while select.select([self._terminal], [], [], 0)[0] and (pressed := self._keys.read_keys()):
            kept += pressed
        try:
            yield
        finally:
            store_typeahead(self._keys, kept + get_typeahead(self._keys))

    def _read(self, stop: int, pressed: list[KeyPress], at_once: AtOnce) -> None:
        while not self._keys.closed:
            ready, _, _ = select.select([self._terminal, stop], [], [])
            if stop in ready:
                return
            for press in self._keys.read_keys():
                act = at_once.get(press.key.value if isinstance(press.key, Enum) else press.key)
                if act is None:
                    pressed.append(press)
                else:
                    act()
