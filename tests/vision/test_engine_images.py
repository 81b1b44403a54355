"""Images in an engine: answers are those that transformers' own models give (`record_answers.py`), whatever else runs.

The same image in the same place is the same text: it is found in the cache, in memory and on disk.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from cortexmlx import Engine, SamplingParams
from cortexmlx.core.prompt import tokenize
from cortexmlx.errors import InvalidRequest, OutOfMemory, PromptTooLong
from cortexmlx.types.request import Completion, FinishReason
from cortexmlx.vision import reader, sight, towers
from cortexmlx.vision.pixtral import PixtralTower
from cortexmlx.vision.qwen import VisionTower
from cortexmlx.vision.sight import Sight
from support.drafting.draft_models import ask_head
from support.effort import examples
from support.models.draft_heads import write_draft_head
from support.models.sighted import add_sight, picture, prompts, shown, write_sighted
from support.models.tiny import write_tiny

pytest.importorskip("PIL")
ANSWERS = json.loads((Path(__file__).parent / "recorded" / "answers.json").read_text())
ASKED: dict[str, Any] = {"max_tokens": examples(32, few=12), "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sighted")
    return {name: write_sighted(root / name, name) for name in ANSWERS}


def part(image: Any) -> dict[str, Any]:
    return {"type": "image", "image": image}


def assert_recorded(name: str, results: list[Any], tokens: int = ASKED["max_tokens"]) -> None:
    for result, wanted in zip(results, ANSWERS[name], strict=True):
        assert list(result.token_ids) == [token for token, _ in wanted[:tokens]]
        if result.logprobs:
            given = [each.logprob for each in result.logprobs[:12]]  # float32 of two makers drifts apart
            assert given == pytest.approx([logprob for _, logprob in wanted[:12]], abs=1e-4)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3_vl", {}),
        ("qwen3_5", {"prefill_budget": 8}),
        ("qwen3_5", {"speculate": True, "max_rows": 2}),
        pytest.param("qwen3_vl", {"attention": "sim", "prefill_budget": 16}, marks=pytest.mark.slow),
        ("qwen3_vl", {"kv_memory": 70_000, "block_size": 8, "prefill_budget": 8}),
        ("qwen3_vl", {"prefix_cache": False, "pipeline": False}),
        ("mistral3", {"kv_memory": 50_000, "block_size": 8, "prefill_budget": 5}),
        ("mistral3", {"attention": "sim", "speculate": True}),
        ("llava", {"prefill_budget": 16, "max_rows": 2}),
        ("qwen3_vl_moe", {"prefill_budget": 8}),
        ("qwen3_5_moe", {}),
    ],
)
def test_answers_are_those_of_transformers_in_any_company(
    folders: dict[str, Path], name: str, options: dict[str, Any]
) -> None:
    asked = {"logprobs": 1, **ASKED}
    if "kv_memory" in options:
        asked["max_tokens"] = 32  # so many preempt
    with Engine(folders[name], **{"speculate": False} | options) as engine:
        for _ in range(1 if {"attention", "kv_memory"} & {*options} else 2):  # the second time much of it is cached
            handles = [engine.submit(prompt, n=1 + index % 2, **asked) for index, prompt in enumerate(prompts())]
            results = [handle.result() for handle in handles]
            assert_recorded(name, results, asked["max_tokens"])
            assert all(other.token_ids == result.token_ids for result in results for other in result.others)
        assert options.get("kv_memory") is None or engine.stats().preemptions > 0


def test_sections_of_positions_are_transformers_own_where_none_are_stated(tmp_path: Path) -> None:
    rope, answers = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0}, []
    for stated in ({}, {"mrope_section": [11, 11, 10]}):
        folder = write_sighted(tmp_path / str(len(stated)), head_dim=96, rope_parameters=rope | stated)
        with Engine(folder) as engine:
            answers.append(engine.generate([shown("what?", picture(64, 16))], logprobs=1, **ASKED).logprobs)
    assert answers[0] == answers[1]


def test_drafts_and_the_models_head_change_no_token(folders: dict[str, Path], tmp_path: Path) -> None:
    write_draft_head(tmp_path / "head", "qwen3_5")
    model = add_sight(tmp_path / "head", "qwen3_5")
    with Engine(model, speculate=False) as engine:
        plain = [engine.generate(prompt, **ASKED) for prompt in prompts()]
    with Engine(model) as engine:
        ask_head(engine._worker.core)
        handles = [engine.submit(prompt, **ASKED) for prompt in prompts()]
        results = [handle.result() for handle in handles]
        assert [each.token_ids for each in results] == [each.token_ids for each in plain]
        assert engine.stats().speculation.drafted > 20


def test_an_images_rows_may_be_cut_anywhere_and_no_draft_changes_a_token(folders: dict[str, Path]) -> None:
    """A span begins at each place of a block, where a text before it is cached to each place, too."""
    photo, other = picture(24, 24, 6), picture(24, 24, 7)
    asked = [
        [{"role": "user", "content": [{"type": "text", "text": "s" * length}, part(image), part(photo)]}]
        for length in range(8)
        for image in (photo, other)
    ]
    with Engine(folders["mistral3"], block_size=8, speculate=False, prefix_cache=False, prefill_budget=512) as engine:
        plain = [engine.generate(prompt, **ASKED).token_ids for prompt in asked]
    assert len(set(plain)) == len(plain)
    with Engine(folders["mistral3"], block_size=8, prefill_budget=5) as engine:
        ask_head(engine._worker.core)  # there is none
        for _ in range(2):
            handles = [engine.submit(prompt, **ASKED) for prompt in asked]
            results = [handle.result() for handle in handles]
            assert [each.token_ids for each in results] == plain
        assert all(each.usage.prompt_tokens - each.usage.cached_tokens <= 16 for each in results)
        assert engine.stats().speculation.drafted > 20


def test_one_text_and_one_image_are_written_as_mistrals_templates_do(folders: dict[str, Path]) -> None:
    """Two parts in alphabetical order of their types, more in their own (mistral-common's `force_img_first`)."""
    text, photo = {"type": "text", "text": "x"}, part(picture(24, 24, 6))
    with Engine(folders["mistral3"]) as engine:
        first, *others = (
            engine.encode([{"role": "user", "content": content}])
            for content in ([photo, text], [text, photo], [text, photo, text], [text, text])
        )
        assert first == others[0] != others[1]
        span = [token for token in first if token < 0 or token in (301, 302)]
        assert [span[3::4], len(span)] == [[301, 301, 302], 12]


@pytest.mark.parametrize(("name", "open_mark"), [("qwen3_vl", "<|vision_start|>"), ("mistral3", "")])
def test_the_same_image_is_computed_once_and_another_of_its_size_never_hits(
    folders: dict[str, Path], name: str, open_mark: str
) -> None:
    def cached(engine: Engine, *prompt: Any) -> tuple[int, int]:
        usage = engine.generate(list(prompt), **ASKED).usage
        return usage.cached_tokens, usage.prompt_tokens

    photo, other, block = picture(64, 64, 3), picture(64, 64, 4), 8
    text = "s" * 20
    with Engine(folders[name], block_size=block, speculate=False) as engine:
        assert cached(engine, shown(text, photo))[0] == 0
        found, tokens = cached(engine, shown(text, photo))
        assert tokens - found <= 2 * block
        begin = len(tokenize(engine._tokenizer, [{"role": "user", "content": ""}])) + len(open_mark)
        assert cached(engine, shown(text, other))[0] <= begin
        question = {"role": "user", "content": "and now?"}
        before = cached(engine, shown(text, photo))[1]
        found, _ = cached(engine, shown(text, photo), {"role": "assistant", "content": "it is"}, question)
        assert found >= before - 3 * block


def test_others_get_tokens_between_the_pieces_of_a_block(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(folders["qwen3_5"], speculate=False) as engine:
        others = engine.submit("a text", max_tokens=400, ignore_eos=True)
        seen: list[int] = []
        rows = set[tuple[int, int]]()
        own = Sight.advance

        def advance(sight: Sight, seconds: float | None) -> None:
            core = engine._worker.core
            seen.append(core.measurements.generated_tokens)
            rows.add((core.scheduler.rows_running, len(core._in_flight)))
            assert seconds == 0.25 / 2
            own(sight, 0.0)

        monkeypatch.setattr(Sight, "advance", advance)
        monkeypatch.setattr(towers, "MAX_PRODUCTS", 100_000)
        assert_recorded("qwen3_5", [engine.generate(prompt, **ASKED) for prompt in prompts()])
        others.cancel()
        assert rows == {(1, 0)}, "who waits for an image has no row, and no token waits for a piece of it"
        assert len(seen) > 20 and len(set(seen)) > 15 and others.result().finish_reason is FinishReason.CANCELLED


def test_a_request_ends_while_its_image_is_looked_at(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(folders["qwen3_5"], speculate=False) as engine:
        monkeypatch.setattr(Sight, "advance", lambda *_: time.sleep(0.01))
        cancelled = engine.submit(prompts()[1], **ASKED)
        late = engine.submit(prompts()[1], timeout=0.05, **ASKED)
        cancelled.cancel()
        assert cancelled.result(timeout=60).finish_reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
        with pytest.raises(Exception, match="time"):
            late.result(timeout=60)

        def refuse(tower: VisionTower, number: int) -> Any:
            if next(refused):
                raise RuntimeError("[malloc] Unable to allocate")
            return block(tower, number)

        monkeypatch.undo()
        block, refused = VisionTower.block, iter([1, 0, 0, 1, 1, 1] + [0] * 99)
        monkeypatch.setattr(VisionTower, "block", refuse)
        for seed, is_refused in enumerate([False, True, False]):  # once, and more seldom, is no reason to fail
            look = [shown("x", picture(40, 40, seed + 9))]
            with pytest.raises(OutOfMemory, match="could not be looked at") if is_refused else nullcontext():
                engine.generate(look, **ASKED)
        monkeypatch.undo()
        assert_recorded("qwen3_5", [engine.generate(prompt, **ASKED) for prompt in prompts()])


def test_what_cannot_be_shown_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with Engine(folders["qwen3_vl"]) as engine:
        for prompt, says, options in (
            ([shown("x", b"no image")], "image", {}),
            ([shown("x", tmp_path / "none.png")], "none.png", {}),
            (
                [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]}],
                "fetched",
                {},
            ),
            (
                [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:;base64,!"}}]}],
                "base64",
                {},
            ),
            ([shown("x", *[picture(8, 8)] * 101)], "images|tokens", {}),
            (prompts()[1], "prompt_logprobs", {"prompt_logprobs": 1}),
            ([5, -7, 5], "outside the vocabulary", {}),
        ):
            with pytest.raises((InvalidRequest, PromptTooLong), match=says):
                engine.generate(prompt, max_tokens=2, **options)
        with pytest.raises(InvalidRequest, match="pinned"):
            engine.pin(prompts()[1])
        assert_recorded("qwen3_vl", [engine.generate(prompt, **ASKED) for prompt in prompts()])
    with Engine(write_tiny(tmp_path / "blind")) as engine, pytest.raises(InvalidRequest, match="only text is read"):
        engine.generate(prompts()[1])


def test_texts_are_answered_when_images_would_not_fit_the_tower(tmp_path: Path) -> None:
    folder = write_sighted(tmp_path / "tiny")  # its tower has patches of 4 pixels, and the processor's have 14
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')
    with Engine(folder) as engine:
        assert engine.generate("x", max_tokens=2).token_ids and not engine.sees_images
        assert "images are not seen" in str(engine.info.notes)


def test_a_conversation_has_its_images_also_when_their_files_are_gone(folders: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    picture(40, 40).save(path)
    with Engine(folders["qwen3_vl"], kv_memory="4MB") as engine:
        talk = engine.conversation(params=SamplingParams(max_tokens=4, ignore_eos=True))
        with pytest.raises(InvalidRequest, match="there is no file no such file"):
            talk.ask(shown("what?", "no such file"))
        first = talk.ask(shown("what?", str(path)))
        picture(40, 40, seed=1).save(path)
        assert talk.ask("sure?").usage.cached_tokens >= first.usage.prompt_tokens // 32 * 32, "the image that was shown"
        path.unlink()
        assert talk.ask("and now?").usage.cached_tokens > first.usage.prompt_tokens and talk.fork().tokens


def test_small_files_with_large_images_take_bounded_memory(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "PROMPT_BYTES", 100_000)
    monkeypatch.setattr(reader, "REMEMBERED_BYTES", 100_000)
    with Engine(folders["qwen3_vl"], speculate=False) as engine:
        images = [picture(64, 64, seed) for seed in range(9)]
        with pytest.raises(InvalidRequest, match="too large together: the first 2 take more than"):
            engine.generate([shown("x", *images)], **ASKED)
        for image in images:
            engine.generate([shown("x", image)], **ASKED)
        assert sum(each.patches.nbytes for each in engine._tokenizer.images._by_key.values()) <= 200_000
        assert_recorded("qwen3_vl", [engine.generate(prompt, **ASKED) for prompt in prompts()])


@pytest.mark.parametrize("name", ["qwen3_5", "mistral3"])
def test_a_tower_runs_once_for_an_image_and_not_for_what_is_cached(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    runs: list[Any] = []
    for kind in (VisionTower, PixtralTower):
        own = kind.begin
        monkeypatch.setattr(kind, "begin", lambda tower, *given, own=own: runs.append(1) or own(tower, *given))

    def count(engine: Engine, prompt: list[dict[str, Any]], *clients: str) -> int:
        runs.clear()
        handles = [engine.submit(prompt, client=client, **ASKED) for client in clients or ("a", "b")]
        assert len({handle.result(timeout=60).token_ids for handle in handles}) == 1
        return len(runs)

    options: dict[str, Any] = {"speculate": False, "block_size": 8, "prefill_budget": 16}
    first = [shown("x " * 30, *[picture(32, 32, seed) for seed in range(3)])]
    with Engine(folders[name], **options) as engine:
        assert count(engine, first) == 3
        text = engine.generate(first, **ASKED).text
        second = [*first, {"role": "assistant", "content": text}, {"role": "user", "content": "and now?"}]
        assert count(engine, second) == 0
        engine._worker.core.model.sight._features.clear()
        assert count(engine, second) == 0
    monkeypatch.setattr(sight, "FEATURE_BYTES", 1)
    with Engine(folders[name], max_rows=1, **options) as engine:
        assert count(engine, first, "a") == 3, "what is dropped before the step that needs it is not computed before"
    with Engine(folders[name], **options | {"prefill_budget": 4}) as engine:
        runs.clear()
        handles = [engine.submit([shown("x", picture(64, 32, seed))], **ASKED) for seed in (7, 8)]
        assert all(handle.result(timeout=60) for handle in handles) and len(runs) == 2, "a row's own is not dropped"


def test_images_whose_features_are_not_all_kept_are_answered_about(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the first image are dropped before those of the last are there, and computed again, also in pieces."""
    monkeypatch.setattr(sight, "FEATURE_BYTES", 1)
    monkeypatch.setattr(towers, "MAX_PRODUCTS", 50_000)
    own, pieces = sight.run_pieces, list[Any]()
    monkeypatch.setattr(sight, "run_pieces", lambda *given: pieces.append(given[1]) or own(given[0], 0.0))
    with Engine(folders["qwen3_vl"], speculate=False) as engine:
        for rounds in (2, 1):  # the second time much of it is cached
            handles = [engine.submit(prompt, **ASKED) for prompt in prompts() * rounds]
            results = [handle.result(timeout=60) for handle in handles]
            for first in range(0, len(results), 5):
                assert_recorded("qwen3_vl", results[first : first + 5])
        assert len(pieces) > 100 and None not in pieces
        cancelled = engine.submit(prompts()[4], **ASKED)
        cancelled.cancel()
        assert cancelled.result(timeout=60).finish_reason in (FinishReason.CANCELLED, FinishReason.LENGTH)


def test_the_images_of_all_open_prompts_take_bounded_memory(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "OPEN_BYTES", 300_000)
    monkeypatch.setattr(Sight, "advance", lambda *_: time.sleep(0.01))  # they stay open
    with Engine(folders["qwen3_vl"], speculate=False) as engine:
        handles, threads = [], []
        with pytest.raises(OutOfMemory, match="images of all open prompts take more than"):
            for seed in range(99):
                handles.append(engine.submit([shown("x", picture(64, 64, seed))], **ASKED))
        assert 2 < len(handles) < 9
        assert engine.check_image(picture(64, 64, 99)) == engine.check_image(picture(64, 64, 0)), "it can be shown"
        monkeypatch.undo()
        assert all(handle.result(timeout=60).token_ids for handle in handles)
        monkeypatch.setattr(reader, "OPEN_BYTES", 300_000)
        asked = [[shown("x", picture(64, 64, seed))] for seed in range(12)]
        results = engine.as_completed(asked, max_tokens=2, adapter=iter([None] * 12))
        assert all(isinstance(result, Completion) for _, result in results), "they wait for room"
        for seed in range(12):
            thread = ThreadPoolExecutor(1)  # which lives on
            threads.append(thread)
            assert thread.submit(engine.generate, asked[seed], max_tokens=2).result(60).token_ids
        monkeypatch.setattr(reader, "REMEMBERED_BYTES", 100_000)
        assert engine.generate([shown("x", *(picture(64, 64, n) for n in range(99, 102)))], timeout=60).token_ids
        monkeypatch.undo()
        assert_recorded("qwen3_vl", [engine.generate(prompt, **ASKED) for prompt in prompts()])
