"""What has been said in a chat, and what goes to the model for the next turn."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from cortexmlx.errors import InvalidRequest
from cortexmlx.request import Message

Turn = dict[str, str]


@dataclass
class Conversation:
    """System prompt and turns, always question and answer in pairs; every turn is rendered from the beginning."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)

    def messages(self, question: str | None = None) -> list[Message]:
        """Everything so far, and the new question."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        asked = [{"role": "user", "content": question}] if question is not None else []
        return [*system, *self.turns, *asked]

    def add(self, question: str, answer: str) -> None:
        """A turn that has ended."""
        asked, answered = {"role": "user", "content": question}, {"role": "assistant", "content": answer}
        self.turns = [*self.turns, asked, answered]

    def undo(self) -> str | None:
        """Take the last turn back and return its question; None if there is none."""
        if not self.turns:
            return None
        question = self.turns[-2]["content"]
        del self.turns[-2:]
        return question

    def save(self, path: Path) -> None:
        """Write everything as JSON, readable for this user only."""
        path.touch(mode=0o600)
        saved = {"system": self.system, "messages": self.turns}
        path.write_text(json.dumps(saved, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Conversation:
        """Read what `save` wrote. Raises InvalidRequest if it is something else."""
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            system, turns = saved["system"], saved["messages"]
        except (ValueError, KeyError, TypeError):
            raise InvalidRequest(f"{path} is not a saved conversation") from None
        pairs = isinstance(turns, list) and len(turns) % 2 == 0
        if not pairs or not all(_is_turn(t, ("user", "assistant")[n % 2]) for n, t in enumerate(turns)):
            raise InvalidRequest(f"{path} is not a saved conversation: question and answer must take turns")
        if system is not None and not isinstance(system, str):
            raise InvalidRequest(f"{path} is not a saved conversation: its system prompt is no text")
        return cls(system, [{"role": t["role"], "content": t["content"]} for t in turns])


def _is_turn(turn: object, role: str) -> bool:
    return isinstance(turn, dict) and turn.get("role") == role and isinstance(turn.get("content"), str)
