"""A chat in the menu bar: `pip install rumps`, then `python examples/menu_bar/app.py [MODEL]`. What it does is in
`assistant.py`; this is what it looks like, and needs a Mac.
"""

from __future__ import annotations

import sys
from typing import Any

import rumps
from assistant import Assistant

SHOWN = 60
"""Characters of an answer that fit into a line of the menu."""


class MenuBar(rumps.App):  # type: ignore[misc]
    """The menu. rumps calls everything here on the main thread."""

    def __init__(self, assistant: Assistant) -> None:
        super().__init__("cortexmlx", title="◇", quit_button=None)
        self._assistant = assistant
        self._status = rumps.MenuItem("status")
        self._answer = rumps.MenuItem("answer", callback=self.read)
        self.menu = [
            self._status,
            self._answer,
            None,
            rumps.MenuItem("Ask ...", callback=self.ask, key="a"),
            rumps.MenuItem("Stop", callback=self.stop, key="."),
            None,
            rumps.MenuItem("Quit", callback=self.quit, key="q"),
        ]
        self._timer = rumps.Timer(self.refresh, 0.1)
        self._timer.start()

    def refresh(self, _: Any) -> None:
        """Show the newest view. Called ten times per second."""
        view = self._assistant.view
        self.title = "◆" if view.busy else "◇"
        self._status.title = view.status
        line = " ".join(view.answer.split())
        self._answer.title = line if len(line) <= SHOWN else f"{line[:SHOWN]}…"

    def ask(self, _: Any) -> None:
        """Open a window for the question."""
        answered = rumps.Window(title="cortexmlx", message="Ask the model", ok="Ask", cancel=True).run()
        if answered.clicked and answered.text.strip():
            self._assistant.ask(answered.text.strip())

    def read(self, _: Any) -> None:
        """Open a window with the whole answer, to read and copy."""
        view = self._assistant.view
        rumps.Window(title=view.status, default_text=view.answer, dimensions=(480, 320)).run()

    def stop(self, _: Any) -> None:
        """Stop the answer."""
        self._assistant.stop()

    def quit(self, _: Any) -> None:
        """Close the engine and quit."""
        self._assistant.close()
        rumps.quit_application()


def main() -> None:
    """Load the model while the menu is there."""
    assistant = Assistant(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
    assistant.start()
    MenuBar(assistant).run()


if __name__ == "__main__":
    main()
