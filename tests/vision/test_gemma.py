"""Gemma 4 and Gemma 3 see what transformers' own torch models see (`record_gemma.py`), whatever else runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx import Engine
from cortexmlx.core.prompt import tokenize
from cortexmlx.errors import KVCacheFull, ModelUnsupported
from cortexmlx.kv.arena import KVArena
from cortexmlx.scheduling.scheduler import Scheduler
from cortexmlx.types.images import BidirectionalLayers, ImageLayout, PlacedImage, PreparedImage
from cortexmlx.vision import gemma, towers
from cortexmlx.vision.images import ImageProcessor, open_image
from support.drafting.draft_models import ask_head
from support.effort import examples
from support.engine.core_driver import Driver
from support.models.assistants import write_pair
from support.models.draft_heads import pack, rounded
from support.models.sighted import picture, prompts, show, shown
from support.models.sighted_gemma import CONFIGS, add_gemma_tower, write_sighted_gemma

pytest.importorskip("PIL")
RECORDED = np.load(Path(__file__).parent / "recorded" / "gemma.npz")
ASKED: dict[str, Any] = {"max_tokens": examples(32, few=12), "temperature": 0, "ignore_eos": True}
SMALL, LARGE, UNIFIED, OLD = CONFIGS


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("gemma")
    return {name: write_sighted_gemma(root / name, name) for name in CONFIGS}


def assert_recorded(name: str, results: list[Any]) -> None:
    for number, result in enumerate(results):
        wanted = RECORDED[f"{name} {number} answer"][: ASKED["max_tokens"]]
        assert list(result.token_ids) == wanted[:, 0].astype(int).tolist()
        if result.logprobs:
            pairs = zip(result.logprobs[:12], wanted[:12], strict=True)  # float32 of two makers drifts apart
            off = max(abs(each.logprob - logprob) for each, (_, logprob) in pairs)
            assert off < (2e-5 if name == OLD else 4e-4)  # Gemma 4 scales no scores, so roundings count for more


def features(folder: Path) -> list[np.ndarray]:
    config = json.loads((folder / "config.json").read_text())
    tower, found = gemma.read_tower(folder, config, mx.float32), []
    assert tower is not None
    for image in (picture(24, 32, 0), picture(64, 16, 1), picture(32, 32, 2)):
        made = ImageProcessor(folder, 512).make_patches(open_image(image))
        seen, _ = towers.run_pieces(tower.see(mx.array(made.patches), made.grid))
        found.append(np.array(seen * 8))  # the language model's factor
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_features_are_those_of_transformers_from_every_layout(
    folders: dict[str, Path], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def difference(folder: Path) -> float:
        pairs = [(each, RECORDED[f"{name} features {index}"]) for index, each in enumerate(features(folder))]
        return max(float(np.abs(one - other).max()) for one, other in pairs)

    assert difference(folders[name]) < 1e-4
    made = write_sighted_gemma(tmp_path, name)
    stored = mx.load(str(made / "model.safetensors"))
    for old, new in (("vision_tower.", "model.vision_tower."), ("vision_tower.", "vision_tower.vision_model.")):
        renamed = {path.replace(old, new): value for path, value in stored.items()}
        renamed = {path: mx.contiguous(v.moveaxis(-1, 1)) if v.ndim == 4 else v for path, v in renamed.items()}
        mx.save_safetensors(str(made / "model.safetensors"), renamed)
        assert difference(made) < 1e-4
        monkeypatch.setattr(towers, "MAX_PRODUCTS", 50_000)  # the last in pieces


def ask_all(engine: Engine, name: str) -> None:
    handles = [engine.submit(prompt, logprobs=1, n=1 + index % 2, **ASKED) for index, prompt in enumerate(prompts())]
    results = [handle.result() for handle in handles]
    assert_recorded(name, results)
    assert all(other.token_ids == result.token_ids for result in results for other in result.others)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_packed_tower_computes_what_its_rounded_weights_compute(tmp_path: Path, name: str) -> None:
    made = write_sighted_gemma(tmp_path, name)
    stored = mx.load(str(made / "model.safetensors"))
    matrices = {
        path: v for path, v in stored.items() if path.startswith(("vision", "embed")) and path[-7:] == ".weight"
    }
    found = []
    for change in (pack, rounded):
        mx.save_safetensors(str(made / "packed.safetensors"), stored | change(matrices, lambda path: 4))
        (made / "packed.safetensors").replace(made / "model.safetensors")
        found.append(features(made))
    assert max(float(np.abs(one - other).max()) for one, other in zip(*found, strict=True)) < 1e-4
    assert max(float(np.abs(each - RECORDED[f"{name} features {i}"]).max()) for i, each in enumerate(found[0])) > 1e-2


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (SMALL, {"prefill_budget": 8}),
        (LARGE, {"prefill_budget": 70, "max_rows": 3, "speculate": True}),
        (UNIFIED, {"prefill_budget": 70}),
        (OLD, {"prefill_budget": 16, "block_size": 8}),
        (OLD, {"prefix_cache": False, "pipeline": False}),
        pytest.param(LARGE, {}, marks=pytest.mark.slow),
        pytest.param(LARGE, {"attention": "sim"}, marks=pytest.mark.slow),
        pytest.param(OLD, {"attention": "sim", "prefill_budget": 16}, marks=pytest.mark.slow),
    ],
)
def test_answers_are_those_of_transformers_in_any_company(
    folders: dict[str, Path], name: str, options: dict[str, Any]
) -> None:
    with Engine(folders[name], **{"speculate": False} | options) as engine:
        assert engine.sees_images, engine.info.notes
        for _ in range(2):  # the second time much of it is cached
            ask_all(engine, name)


@pytest.mark.parametrize("name", [pytest.param(SMALL, marks=pytest.mark.slow), LARGE, OLD])
def test_rows_that_are_preempted_see_the_same(
    folders: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Scheduler._plan_mixed

    def plan(scheduler: Scheduler, flush: Any) -> Any:
        if scheduler.preemptions < 12 and scheduler._builder.count % 2 and scheduler.rows_running > 1:
            scheduler._preempt(scheduler._running_set.victim)
        made = own(scheduler, flush)
        sizes = [segment.count for segment in made.segments] if made is not None else []
        assert sum(size for size in sizes if size > 1) <= 70
        return made

    monkeypatch.setattr(Scheduler, "_plan_mixed", plan)
    with Engine(folders[name], speculate=False, block_size=8, prefill_budget=70) as engine:
        ask_all(engine, name)
        assert engine.stats().preemptions >= 3


@pytest.mark.parametrize("name", [LARGE, OLD])
def test_a_prompt_goes_on_from_every_place_in_an_image(folders: dict[str, Path], name: str) -> None:
    """What is cached of an image was computed with all of it, so its rest may be computed alone."""
    prompt, block, asked = prompts()[2], 8, ASKED | {"max_tokens": 8}
    with Engine(folders[name], speculate=False, block_size=block) as engine:
        wanted = engine.generate(prompt, **asked).token_ids
        cache, places = engine._worker.core.cache, set()
        own = cache.match
        for keep in range(0, 80, block):  # the first image ends there
            cache.match = lambda tokens, keys, most, salt=None, keep=keep: own(tokens, keys, min(most, keep), salt)
            result = engine.generate(prompt, **asked)
            assert result.token_ids == wanted
            places.add(result.usage.cached_tokens)
        assert len(places) > 8


def test_no_step_cuts_an_image_whose_attention_is_bidirectional() -> None:
    images = [PreparedImage(bytes([i]) * 32, np.zeros((1, 1), np.float32), (1, 1, 5), (1, 1, 5)) for i in range(2)]
    spans, positions = (
        (PlacedImage(3, images[0]), PlacedImage(9, images[1])),
        np.tile(np.arange(20, dtype=np.int32), (3, 1)),
    )
    for kind in BidirectionalLayers:
        layout = ImageLayout(spans, positions, 0, kind)
        for first in range(20):
            for count in range(1, 21 - first):
                whole = layout.fit_to_whole_images(first, count)
                assert whole >= 1
                if kind is BidirectionalLayers.NONE or not any(span.start < first + count < span.end for span in spans):
                    assert whole == count
                assert kind is BidirectionalLayers.NONE or not any(
                    span.start < first + whole < span.end for span in spans
                )
                for has_window in (False, True):
                    pieces = list(layout.attention_pieces(first, whole, has_window))
                    assert [p for b, e, _ in pieces for p in range(b, e)] == list(range(first, first + whole))
                    seen = {
                        token for begin, end, bidirectional in pieces if bidirectional for token in range(begin, end)
                    }
                    of_images = {t for span in spans for t in range(span.start, span.end)} & set(
                        range(first, first + whole)
                    )
                    here = kind is BidirectionalLayers.ALL or (kind is BidirectionalLayers.WINDOWED and has_window)
                    assert seen == (of_images if here else set())
                    assert sum(bidirectional for *_, bidirectional in pieces) <= 2


@pytest.mark.parametrize("name", [pytest.param(SMALL, marks=pytest.mark.slow), LARGE, OLD])
def test_an_image_is_computed_once_also_with_packed_keys(tmp_path: Path, name: str) -> None:
    photo, other, block = picture(64, 64, 3), picture(64, 64, 4), 8
    options: dict[str, Any] = {"block_size": block, "speculate": False, "kv_bits": 8}
    folder = write_sighted_gemma(tmp_path / "model", name, head_dim=32, global_head_dim=32)

    def ask(engine: Engine, image: Any, *more: Any) -> Any:
        return engine.generate([shown("s" * 20, image), *more], **ASKED)

    with Engine(folder, **options, prefix_cache=False) as engine:
        wanted = [ask(engine, image).token_ids for image in (photo, other)]
    with Engine(folder, **options) as engine:
        assert [ask(engine, image).token_ids for image in (photo, other)] == wanted
        again, third = ask(engine, photo), ask(engine, picture(64, 64, 5))
        before_image = next(i for i, t in enumerate(tokenize(engine._tokenizer, [shown("s", photo)])) if t < 0)
        assert again.token_ids == wanted[0] and third.usage.cached_tokens <= before_image
        assert again.usage.prompt_tokens - again.usage.cached_tokens <= 2 * block
        turn = ask(engine, photo, {"role": "assistant", "content": "it is"}, {"role": "user", "content": "and now?"})
        assert turn.usage.cached_tokens >= again.usage.prompt_tokens - 3 * block


@pytest.mark.parametrize("name", [LARGE, OLD])
def test_drafts_change_no_token(folders: dict[str, Path], name: str) -> None:
    with Engine(folders[name], speculate=False) as engine:
        core, right = engine._worker.core, {}
        for prompt in prompts():
            result = engine.generate(prompt, **ASKED)
            right[result.usage.prompt_tokens] = list(result.token_ids)

        def draft() -> None:  # right ones, and one that is wrong
            for job in [] if core._in_flight else core.scheduler.draftable_jobs:
                answer, done = right[job.prompt_length], job.num_generated
                core.scheduler.set_drafts(job.id, [*answer[done : done + 2], 7] if done % 2 else [7, 8])

    with Engine(folders[name]) as engine:
        core = engine._worker.core
        core.speculation.draft = draft  # type: ignore[method-assign]
        ask_all(engine, name)
        assert engine.stats().speculation.accepted > 5


def test_an_assistant_guesses_after_images(tmp_path: Path) -> None:
    model, assistant, _ = write_pair(tmp_path)
    text = json.loads((model / "config.json").read_text()) | {"use_bidirectional_attention": "vision"}
    config = CONFIGS[LARGE] | {"text_config": text, "eos_token_id": 257}
    stored = mx.load(str(model / "model.safetensors"))
    mx.save_safetensors(str(model / "moved.safetensors"), {f"language_model.{path}": v for path, v in stored.items()})
    (model / "moved.safetensors").replace(model / "model.safetensors")
    add_gemma_tower(model, config)
    answers = []
    for options in ({"speculate": False}, {"draft": assistant}):
        with Engine(model, **options) as engine:
            assert engine.sees_images
            if "draft" in options:
                ask_head(engine._worker.core)
            handles = [engine.submit(prompt, **ASKED | {"max_tokens": 40}) for prompt in prompts()]
            answers.append([handle.result().token_ids for handle in handles])
            assert "draft" not in options or engine.stats().speculation.drafted > 20
    assert answers[0] == answers[1]


def test_an_image_needs_a_step_of_its_size_and_a_template_trims_around_it(folders: dict[str, Path]) -> None:
    for name, budget in ((LARGE, 32), (OLD, 8)):
        with Engine(folders[name], prefill_budget=budget) as engine:
            assert not engine.sees_images and any("prefill_budget" in note for note in engine.info.notes)
    with Engine(folders[OLD]) as engine:
        image = {"type": "image", "image": picture(8, 8)}
        tokens = tokenize(engine._tokenizer, [{"role": "user", "content": [" a ", image, "b"]}])
        text = engine._tokenizer.decode([max(token, 0) for token in tokens], special_tokens=True)
        begin, _, end = text.partition("!" * 16)
        assert begin.endswith("a\n\n<start_of_image>") and end.startswith("<end_of_image>\n\nb"), text


@pytest.mark.parametrize("blocks", [8, 10])
def test_an_image_for_which_memory_is_refused_fails_alone(
    folders: dict[str, Path], blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(folders[LARGE], tokens=600, prefill_budget=80)
    image, core = show(driver)[-1], driver.core
    core._release_arena()
    core.cache.pools.grow((blocks, 60))  # in windows, those of the image alone would fit, not those before it
    most, prompt = [blocks], [9] * 23 + [*image, 5]
    monkeypatch.setattr(KVArena, "can_resize", lambda arena, wanted: wanted[0] <= most[-1])
    early, late = driver.add([7, 8], 20), driver.add(prompt, 8)
    others = driver.add(image, 8, n=2), driver.add([4] * 20, 8)
    driver.finish()
    assert [len(driver.result(each).token_ids) for each in (early, *others)] == [20, 8, 8]
    with pytest.raises(KVCacheFull, match="an image is computed in one step"):
        driver.result(late)
    most.append(75)
    assert len(driver.result_of(prompt, 8).token_ids) == 8, "memory is there again"


def test_other_towers_are_refused(folders: dict[str, Path]) -> None:
    for name, change, says in (
        (SMALL, {"num_key_value_heads": 1}, "num_key_value_heads 1"),
        (SMALL, {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters"),
        (OLD, {"image_size": 36}, "mm_tokens_per_image 16"),
        (OLD, {"patch_size": "4"}, "patch_size '4'"),
    ):
        config = CONFIGS[name] | {"vision_config": CONFIGS[name]["vision_config"] | change}
        with pytest.raises(ModelUnsupported, match=says):
            gemma.read_tower(folders[name], config, mx.float32)
    for name, grid in ((SMALL, (1, 3, 4)), (SMALL, (2, 3, 3)), (OLD, (1, 2, 8))):
        tower = gemma.read_tower(folders[name], CONFIGS[name], mx.float32)
        assert tower is not None
        with pytest.raises(ValueError, match=r"rows and columns are multiples|it must be"):
            next(tower.see(mx.zeros((grid[1] * grid[2], 48)), grid))
    assert gemma.read_tower(folders[SMALL], {"model_type": "gemma4"}, mx.float32) is None
