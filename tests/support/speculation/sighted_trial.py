"""Trials with images: prompts begin with the same ones, end in others, or show one twice, and texts run beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cortexmlx.types.request import Completion
from cortexmlx.vision import sight
from support.engine.core_driver import Driver
from support.models.draft_heads import write_draft_head
from support.models.sighted import add_sight, show, write_sighted
from support.models.sighted_gemma import write_sighted_gemma
from support.speculation.counts import Counts
from support.speculation.kinds import Kind
from support.speculation.mixed_trial import MAX_TURN, MixedAdaptedTrial, MixedTrial, TalkTrial
from support.speculation.trial import Trial, roomy


def sighted_kind(root: Path, name: str) -> Kind:
    """Write the model of a name like `gemma4 large 8 bits images` to a folder in `root`, if it is not there."""
    name, path = name.removesuffix(" images"), root / name.replace(" ", "-") / "model"
    model, bits = name.removesuffix(" 8 bits"), 8 if "8 bits" in name else None
    wider: dict[str, Any] = {} if bits is None else {"head_dim": 64}
    if path.exists():
        pass
    elif "gemma" in model:
        write_sighted_gemma(path, model, **wider, **({"global_head_dim": 64} if wider and "4" in model else {}))
    elif "head" in model:
        write_draft_head(path, model.removesuffix(" head"))
        add_sight(path, model.removesuffix(" head"))
    else:
        write_sighted(path, model, **wider)
    return Kind(name, path, bits)


class SightedTrial(Trial):
    """A trial whose model sees."""

    def __init__(self, seed: int, *rest: Any) -> None:
        super().__init__(seed, *rest)
        self._kept_bytes = self.dice.choice([1, 3000, sight.FEATURE_BYTES])
        self._refused_layers = 0
        if self.keep is not None:
            return
        tokens = show(self._roomy())
        for asked in self.asked:
            asked.params.pop("prompt_logprobs", None)  # they are refused with images, which a turn may go on with
            at = min(self.dice.choice([0, 0, 9, self.dice.randrange(60)]), len(asked.prompt))
            for _ in range(self.dice.choice([0, 0, 1, 1, 2, 3])):
                image = list(self.dice.choice(tokens[: self.dice.choice([3, len(tokens)])]))
                if len(asked.prompt) + len(image) <= MAX_TURN + 150 * ("gemma4" in self.kind.name):
                    asked.prompt = [*asked.prompt[:at], *image, *asked.prompt[at:]]
                    at += self.dice.choice([0, len(image)])

    def _settings(self) -> dict[str, Any]:
        budget = {"gemma3": 24, "gemma4": 80}.get(self.kind.name.split()[0])  # an image's tokens depend on it
        return super()._settings() | ({} if budget is None else {"prefill_budget": budget})

    def _roomy(self) -> Driver:
        return roomy(self.kind.folder, tuple(self._settings().items()))

    def run(self, counts: Counts) -> None:
        before, sight.FEATURE_BYTES = sight.FEATURE_BYTES, self._kept_bytes
        try:
            super().run(counts)
        finally:
            sight.FEATURE_BYTES = before
        seen = [asked for asked in self.asked if min(asked.prompt) < 0]
        counts.asked["images"] += sum(asked.answers for asked in seen)

    def _driver(self) -> Driver:
        driver = super()._driver()
        if driver.core.model.images is not None:
            show(driver)
        own = driver.core.model.sight
        if self.refuses and own is not None:
            see = own.tower.see

            def refuse(*image: Any) -> Any:
                pieces = see(*image)
                while True:
                    if self._refused_layers < 2 and self.dice.random() < 0.05:
                        self._refused_layers += 1
                        raise RuntimeError("[malloc] Unable to allocate 1048576 bytes.")
                    try:
                        yield next(pieces)
                    except StopIteration as end:
                        return end.value

            own.tower.see = refuse
        return driver

    @property
    def _refusals(self) -> int:
        return super()._refusals + self._refused_layers

    def _whole(self, text: list[int]) -> list[int]:
        """A text without what is left of images that an edit has cut."""
        spans, kept, at = {tokens[0]: tokens for tokens in show(self._roomy())}, [], 0
        while at < len(text):
            span = spans.get(text[at], text[at : at + 1])
            if tuple(text[at : at + len(span)]) == tuple(span) and (span[0] >= 0 or text[at] in spans):
                kept += span
                at += len(span)
            else:
                at += 1
        return kept


class SightedMixedTrial(SightedTrial, MixedTrial):
    """With draft heads and a store. Each answer is compared with that of an engine that has nothing else to do."""

    def _without(self) -> list[Completion]:
        driver, answers = self._roomy(), []
        for asked in self.asked:
            handle = asked.add(driver, every=True)
            driver.finish()
            answers.append(driver.result(handle))
        return answers


class SightedTalkTrial(SightedTrial, TalkTrial):
    """With conversations."""

    def _turn(self, earlier: int, answer: Completion) -> list[int]:
        text = super()._turn(earlier, answer)
        return text if self.keep is not None else self._whole(text) or [5]


class SightedAdaptedTrial(SightedTrial, MixedAdaptedTrial):
    """With adapters."""
