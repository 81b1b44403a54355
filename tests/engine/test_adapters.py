"""Several adapters in one batch: each row gets the tokens of its own, as mlx-lm computes them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cortexmlx import Engine, SamplingParams
from cortexmlx.core.core import EngineCore
from cortexmlx.errors import AdapterRefused, InvalidRequest, NoTokenToChoose, UnknownAdapter
from support.adapters.kinds import content
from support.engine.core_driver import Driver
from support.engine.half import log_softmax, write_rounded
from support.models.adapters import write_adapter, write_peft_adapter
from support.models.tiny import tokens_of
from support.patience import PATIENCE, soon
from support.speculation.kinds import alone, judge
from support.store.stored import Stored, reading_pays

TOKENS = 24
PROMPT = tokens_of(40, seed=4)
KEYS = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")


@pytest.fixture
def folders(tiny: Any, tmp_path: Path) -> dict[str, Path]:
    """Three adapters of the tiny llama, two of which change the same layers."""
    llama = tiny("llama")
    return {
        "sql": write_adapter(tmp_path / "sql", llama, keys=KEYS, num_layers=2, seed=1),
        "chat": write_adapter(tmp_path / "chat", llama, keys=KEYS, num_layers=2, seed=2, rank=7),
        "poem": write_adapter(tmp_path / "poem", llama, keys=("mlp.up_proj",), num_layers=2, seed=3, rank=20),
    }


# -- the same tokens --------------------------------------------------------------------------------------------------


def test_an_adapter_of_peft(tiny: Any, tmp_path: Path) -> None:
    shapes = {f"model.layers.{layer}.self_attn.v_proj": (16, 32) for layer in (0, 1)}
    write_peft_adapter(tmp_path / "p", shapes, lora_alpha=40)
    with Engine(tiny("llama"), kv_memory="256KB", adapters={"p": tmp_path / "p"}) as engine:
        mine = engine.generate(PROMPT, max_tokens=TOKENS, temperature=0, adapter="p").token_ids
        plain = engine.generate(PROMPT, max_tokens=TOKENS, temperature=0).token_ids
    with Engine(tiny("llama"), kv_memory="256KB", adapter=tmp_path / "p") as engine:
        assert engine.generate(PROMPT, max_tokens=TOKENS, temperature=0).token_ids == mine != plain


def test_on_top_of_whole_layers(tiny: Any, tmp_path: Path, folders: dict[str, Path]) -> None:
    full = write_adapter(tmp_path / "full", tiny("llama"), "full")
    with Engine(tiny("llama"), kv_memory="256KB", adapter=full, adapters={"sql": folders["sql"]}) as engine:
        plain = engine.generate(PROMPT, max_tokens=8, temperature=0).token_ids
        assert engine.generate(PROMPT, max_tokens=8, temperature=0, adapter="sql").token_ids != plain


def test_on_a_layer_that_has_one_already_it_is_refused(tiny: Any, folders: dict[str, Path]) -> None:
    with (
        Engine(tiny("llama"), kv_memory="256KB", adapter=folders["sql"]) as engine,
        pytest.raises(AdapterRefused, match="no linear layer"),
    ):
        engine.load_adapter("chat", folders["chat"])


def test_all_answers_of_a_request_have_its_adapter(tiny: Any, folders: dict[str, Path]) -> None:
    asked: dict[str, Any] = {"max_tokens": 16, "temperature": 1.0, "n": 3, "seed": 7}
    with Engine(tiny("llama"), kv_memory="256KB", adapter=folders["sql"]) as engine:
        wanted = engine.generate(PROMPT, **asked)
    with Engine(tiny("llama"), kv_memory="256KB", adapters=folders) as engine:
        busy = engine.submit(tokens_of(9, seed=5), max_tokens=60, ignore_eos=True, adapter="chat")
        got = engine.generate(PROMPT, adapter="sql", **asked)
        busy.result(PATIENCE)
    assert [a.token_ids for a in (got, *got.others)] == [a.token_ids for a in (wanted, *wanted.others)]


def test_a_draft_model_guesses_for_rows_with_adapters(tiny: Any, folders: dict[str, Path]) -> None:
    with Engine(tiny("llama"), kv_memory="1MB", block_size=8, adapters=folders, draft=tiny("one layer")) as engine:
        handles = [
            (name, engine.submit(PROMPT, max_tokens=TOKENS, temperature=0, adapter=name)) for name in (*folders, None)
        ]
        for name, handle in handles:
            got = list(handle.result(PATIENCE).token_ids)
            assert got == alone(tiny("llama"), folders.get(name or ""), PROMPT, TOKENS)
        assert engine.inspect(lambda core: core.draft.engine_model.reserved_bytes) < engine.stats().adapter_bytes_limit  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_rounds_no_more_than_mlx_lm_does(
    dtype: str, tmp_path: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of one adapter beside decoding rows of the others: long runs, and gathered tokens."""
    monkeypatch.setattr("cortexmlx.models.load._is_float32_faster", lambda: False)
    half, judged = write_rounded(tmp_path / "half", "llama", dtype)
    with Engine(half, kv_memory="256KB", adapters=folders) as engine:
        assert engine.info.dtype == dtype
        busy = [engine.submit(PROMPT, max_tokens=80, ignore_eos=True, adapter=name) for name in folders]
        for name, folder in folders.items():
            scored = engine.generate(PROMPT, max_tokens=0, prompt_logprobs=0, adapter=name, cache=False)
            assert scored.prompt_logprobs is not None
            right, theirs = (log_softmax(judge(model, folder)(mx.array([PROMPT]))[0]) for model in (judged, half))
            places = range(39), PROMPT[1:]
            mine = np.abs(np.array(scored.prompt_logprobs.logprobs[1:]) - right[places]).mean()
            assert mine < 1.3 * np.abs(theirs[places] - right[places]).mean() + 1e-3, "mlx-lm's own rounding is smaller"
        for handle in busy:
            handle.cancel()


# -- what is cached ---------------------------------------------------------------------------------------------------


def cached(engine: Engine, adapter: str | None, client: str | None = None) -> int:
    handle = engine.submit(PROMPT, max_tokens=2, adapter=adapter, client=client)
    return handle.result(PATIENCE).usage.cached_tokens


def test_a_beginning_is_shared_within_an_adapter_and_never_between_two(tiny: Any, folders: dict[str, Path]) -> None:
    with Engine(tiny("llama"), kv_memory="1MB", block_size=8, adapters=folders) as engine:
        assert [cached(engine, name) for name in (None, "sql", "chat", "poem")] == [0] * 4
        assert [cached(engine, name) for name in (None, "sql", "chat", "poem")] == [39] * 4
        assert cached(engine, "sql", client="one") == 0, "a client's beginnings are its own with an adapter, too"
        assert cached(engine, "sql", client="one") == 39


def test_rows_that_lose_their_blocks_keep_their_adapters_keys(tiny: Any, folders: dict[str, Path]) -> None:
    """They begin again with what they stored, under no other row's keys."""
    driver = Driver(tiny("llama"), tokens=104, max_rows=3)
    core = driver.core
    for name, folder in folders.items():
        core.adapters.load(name, content(folder), core.scheduler.jobs)
    handles = {name: driver.add(PROMPT[:20], 50, adapter=name, ignore_eos=False) for name in folders}
    while not core.idle:
        core.step()
        core.check_invariants()
        for job in core.scheduler.jobs:
            right = core.cache.prefix.keys(job.tokens, job.block_salt)
            known = min(len(right), len(job.keys))
            assert job.keys[:known] == right[:known] and known
    assert core.scheduler.preemptions
    for name, handle in handles.items():
        assert list(driver.result(handle).token_ids) == alone(tiny("llama"), folders[name], PROMPT[:20], 50)
    core.release()


def test_other_content_under_the_same_name_is_another_adapter(tiny: Any, folders: dict[str, Path]) -> None:
    with Engine(tiny("llama"), kv_memory="1MB", block_size=8, adapters={"sql": folders["sql"]}) as engine:
        first = engine.generate(PROMPT, max_tokens=TOKENS, temperature=0, adapter="sql")
        engine.load_adapter("sql", folders["chat"])
        second = engine.generate(PROMPT, max_tokens=TOKENS, temperature=0, adapter="sql")
        assert second.usage.cached_tokens == 0
        assert list(second.token_ids) == alone(tiny("llama"), folders["chat"], PROMPT, TOKENS)
        engine.unload_adapter("sql")
        engine.load_adapter("again", folders["sql"])
        third = engine.generate(PROMPT, max_tokens=TOKENS, temperature=0, adapter="again")
        assert third.token_ids == first.token_ids and third.usage.cached_tokens == 39, "the same content, other name"


def test_a_disk_keeps_the_blocks_of_each_adapter_apart(
    tiny: Any, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading_pays(monkeypatch)
    for name, wanted in ((None, 0), ("sql", 0), ("chat", 0), ("sql", 32), (None, 32)):
        with Stored(tiny("llama"), tmp_path / "kv") as driver:
            if name is not None:  # another name each time: it is the content that counts
                driver.core.adapters.load(f"{name} {wanted}", content(folders[name]), driver.core.scheduler.jobs)
            answer, found = driver.ask(
                PROMPT, TOKENS, adapter=None if name is None else f"{name} {wanted}", ignore_eos=False
            )
            assert found == wanted, f"{name}: {found} tokens were found"
            assert answer == alone(tiny("llama"), folders.get(name or ""), PROMPT, TOKENS)


def test_a_pin_is_that_of_its_adapter(tiny: Any, folders: dict[str, Path]) -> None:
    with (
        Engine(tiny("llama"), kv_memory="1MB", block_size=8, adapters=folders) as engine,
        engine.pin(PROMPT, adapter="sql") as pin,
    ):
        assert pin.tokens == 40 and engine.stats().pinned_blocks == 5
        assert [cached(engine, name) for name in (None, "chat", "sql")] == [0, 0, 39]


# -- while it runs ----------------------------------------------------------------------------------------------------


def test_one_in_use_goes_with_its_last_request(tiny: Any, folders: dict[str, Path]) -> None:
    wanted = alone(tiny("llama"), folders["sql"], PROMPT, 60)
    driver = Driver(tiny("llama"), max_rows=2)
    driver.core.adapters.load("sql", content(folders["sql"]), driver.core.scheduler.jobs)
    running = [driver.add(PROMPT, 60, adapter="sql", ignore_eos=False) for _ in range(3)]  # one of them waits
    driver.step(5)
    driver.core.adapters.unload("sql", driver.core.scheduler.jobs)
    assert driver.core.stats().adapters == 1 and driver.core.adapters.unloading_count == 1
    late = driver.add(PROMPT, 5, adapter="sql")
    with pytest.raises(UnknownAdapter, match="'sql'"):
        late.result(0)
    driver.finish()
    assert [list(driver.result(handle).token_ids) for handle in running] == [wanted] * 3
    stats = driver.core.stats()
    assert (stats.adapters, stats.adapter_bytes) == (0, 0)
    driver.core.release()


def test_a_row_that_ended_leaves_no_adapter_in_its_window(tiny: Any, folders: dict[str, Path]) -> None:
    """Its lane is computed until the window ends, when the adapter may be gone."""
    driver = Driver(tiny("llama"), max_rows=8, tokens=2048)
    core = driver.core
    for name, folder in folders.items():
        core.adapters.load(name, content(folder), core.scheduler.jobs)
    short = driver.add(PROMPT, 13, adapter="sql")
    long = [driver.add(PROMPT, 40, adapter="chat", ignore_eos=False) for _ in range(7)]
    while not short.ended:
        driver.step()
    window = core.scheduler._window
    assert not all(lane.is_live for lane in window.lanes) and window.column and not window.needs_flush
    core.adapters.unload("sql", core.scheduler.jobs)
    assert core.stats().adapters == 2
    driver.finish()
    wanted = alone(tiny("llama"), folders["chat"], PROMPT, 40)
    assert [list(driver.result(handle).token_ids) for handle in long] == [wanted] * 7
    core.release()


def test_adapters_come_and_go_in_the_middle_of_answers(tiny: Any, folders: dict[str, Path]) -> None:
    wanted = {name: alone(tiny("llama"), folder, PROMPT, 60) for name, folder in folders.items()}
    driver = Driver(tiny("llama"), max_rows=4)
    driver.core.adapters.load("sql", content(folders["sql"]), driver.core.scheduler.jobs)
    handles = [("sql", driver.add(PROMPT, 60, adapter="sql", ignore_eos=False))]
    for name in ("chat", "poem"):
        driver.step(4)
        driver.core.adapters.load("other", content(folders[name]), driver.core.scheduler.jobs)
        handles.append((name, driver.add(PROMPT, 60, adapter="other", ignore_eos=False)))
        driver.step(4)
    driver.core.adapters.unload("sql", driver.core.scheduler.jobs)
    driver.finish()
    for name, handle in handles:
        assert list(driver.result(handle).token_ids) == wanted[name]
    driver.core.release()


def test_cancelled_and_failed_requests_hold_no_adapter(tiny: Any, folders: dict[str, Path]) -> None:
    driver = Driver(tiny("llama"), max_rows=2)
    driver.core.adapters.load("sql", content(folders["sql"]), driver.core.scheduler.jobs)
    handles = [driver.add(PROMPT, 60, adapter="sql") for _ in range(4)]
    driver.step(3)
    driver.core.adapters.unload("sql", driver.core.scheduler.jobs)
    for handle in handles[:2]:
        driver.core.cancel(handle.id)
    assert driver.core.stats().adapters == 1
    driver.core.fail_all(UnknownAdapter("a test"))
    driver.core.adapters.free_unused(driver.core.scheduler.jobs)
    assert driver.core.stats().adapters == 0
    driver.core.release()


def test_an_engine_that_begins_anew_still_has_them(tiny: Any, folders: dict[str, Path]) -> None:
    driver = Driver(tiny("llama"))
    driver.core.adapters.load("sql", content(folders["sql"]), driver.core.scheduler.jobs)
    first = driver.answers([PROMPT], TOKENS, adapter="sql")
    driver.core.reset()
    assert driver.answers([PROMPT], TOKENS, adapter="sql") == first
    driver.core.release()


def test_other_threads_load_while_requests_run(tiny: Any, folders: dict[str, Path]) -> None:
    with Engine(tiny("llama"), kv_memory="1MB", max_adapters=4) as engine:
        running = engine.submit(PROMPT, max_tokens=300, ignore_eos=True)
        for name, folder in folders.items():
            engine.load_adapter(name, folder)
            got = list(engine.generate(PROMPT, max_tokens=TOKENS, temperature=0, adapter=name).token_ids)
            assert got == alone(tiny("llama"), folder, PROMPT, TOKENS)
            engine.unload_adapter(name)
        running.cancel()
        soon(lambda: engine.stats().adapters == 0)
        engine.check_invariants()


def test_a_listener_cannot_load_and_is_told_so(tiny: Any, folders: dict[str, Path]) -> None:
    said: list[str] = []
    with Engine(tiny("llama"), kv_memory="256KB") as engine:

        def listen(event: Any) -> None:
            try:
                engine.load_adapter("sql", folders["sql"])
            except Exception as error:
                said.append(str(error))

        engine.submit(PROMPT, max_tokens=1, listener=listen).result(PATIENCE)
    assert said and "engine's own thread" in said[0]


# -- the other ways to ask --------------------------------------------------------------------------------------------


def test_every_way_to_ask_takes_an_adapter(tiny: Any, folders: dict[str, Path]) -> None:
    wanted = alone(tiny("llama"), folders["sql"], PROMPT, TOKENS)
    asked: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0, "adapter": "sql"}
    with Engine(tiny("llama"), kv_memory="1MB", adapters=folders) as engine:
        assert list(engine.generate(PROMPT, **asked).token_ids) == wanted
        assert [event.token_id for event in engine.stream(PROMPT, **asked) if event.token_id is not None] == wanted

        answers = engine.generate_batch([PROMPT] * 2, max_tokens=TOKENS, temperature=0, adapter=["sql", None])
        assert [list(answer.token_ids) for answer in answers] == [wanted, alone(tiny("llama"), None, PROMPT, TOKENS)]
        few = dict(engine.as_completed([PROMPT] * 2, max_tokens=2, adapter=iter(["sql"])))
        assert isinstance(few[1], InvalidRequest) and "fewer adapters" in str(few[1]) and few[0].token_ids

        async def both() -> None:
            assert list((await engine.agenerate(PROMPT, **asked)).token_ids) == wanted
            async with engine.astream(PROMPT, **asked) as events:
                assert [event.token_id async for event in events if event.token_id is not None] == wanted

        asyncio.run(both())
        talk = engine.conversation(adapter="sql")
        said = talk.ask("Hello?", SamplingParams(max_tokens=8, temperature=0))
        prompt = engine.encode([{"role": "user", "content": "Hello?"}])
        assert list(said.token_ids) == alone(tiny("llama"), folders["sql"], prompt, 8)
        other = talk.fork()
        other.adapter = "chat"
        assert (talk.adapter, other.fork().adapter) == ("sql", "chat")


def test_a_saved_conversation_goes_on_with_its_adapter(tiny: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    with Engine(tiny("llama"), kv_memory="1MB", adapters=folders) as engine:
        engine.conversation(adapter="sql").save(tmp_path / "talk.json")
        engine.conversation().save(tmp_path / "plain.json")
        talk = engine.conversation()
        talk.load(tmp_path / "talk.json")
        assert talk.adapter == "sql"
        talk.load(tmp_path / "plain.json")
        assert talk.adapter == "sql", "the file names none"
        engine.unload_adapter("sql")
        with pytest.raises(UnknownAdapter, match="'sql'"):
            talk.ask("Hello?")


def test_an_adapter_whose_numbers_are_too_large_fails_its_own_rows_and_is_named(
    tiny: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    folders["huge"] = write_adapter(tmp_path / "huge", tiny("llama"), keys=KEYS, num_layers=2, seed=1, scale=3e37)
    wanted = alone(tiny("llama"), folders["sql"], PROMPT, TOKENS)
    with Engine(tiny("llama"), kv_memory="256KB", block_size=8, adapters=folders) as engine:
        handles = [engine.submit(PROMPT, max_tokens=TOKENS, temperature=0, adapter=name) for name in ("sql", "huge")]
        with pytest.raises(NoTokenToChoose, match="with the adapter 'huge'"):
            handles[1].result(PATIENCE)
        assert list(handles[0].result(PATIENCE).token_ids) == wanted
        assert list(engine.generate(PROMPT, max_tokens=TOKENS, temperature=0, adapter="sql").token_ids) == wanted


def test_rows_of_one_adapter_are_together_in_a_step(tiny: Any, folders: dict[str, Path]) -> None:
    """Whatever the order in which they came: single tokens first, then pieces of prompts."""
    driver = Driver(tiny("llama"), tokens=2048, max_rows=9)
    for name, folder in folders.items():
        driver.core.adapters.load(name, content(folder), driver.core.scheduler.jobs)
    plans: list[Any] = []
    plan = driver.core.scheduler.plan
    driver.core.scheduler.plan = lambda in_flight: (plans.append(plan(in_flight)), plans[-1])[1]  # type: ignore[method-assign]
    names = [None, "poem", "sql", "chat", "sql", None, "chat", "poem", "sql"]
    handles = [driver.add(tokens_of(9, seed=place), 30, adapter=name) for place, name in enumerate(names)]
    driver.step(6)
    late = driver.add(PROMPT, 4, adapter="chat")
    driver.finish()
    assert all(driver.result(handle).token_ids for handle in (*handles, late))
    seen = 0
    for step in plans:
        if step is not None and step.adapters is not None:
            kinds = [segment.count > 1 for segment in step.segments]
            live = [(k, a) for k, a, s in zip(kinds, step.adapters, step.segments, strict=True) if s.live]
            assert live == sorted(live)
            seen += len(set(step.adapters)) == 4
    assert seen > 10
    driver.core.release()


def test_base_rows_run_the_models_own_modules(tiny: Any, folders: dict[str, Path]) -> None:
    """Adapters that nobody asks for change no module: their step is not even begun."""

    def watched(core: EngineCore) -> list[Any]:
        plans: list[Any] = []
        step = core.runner.adapters.apply_to_step  # type: ignore[attr-defined]
        core.runner.adapters.apply_to_step = lambda plan, states: (plans.append(plan.adapters), step(plan, states))[1]  # type: ignore[attr-defined]
        return plans

    with Engine(tiny("llama"), kv_memory="256KB", adapters=folders) as engine:
        plans = engine.inspect(watched)
        engine.generate(PROMPT, max_tokens=20, ignore_eos=True)
        assert not plans
        engine.generate(PROMPT, max_tokens=20, ignore_eos=True, adapter="sql")
        assert len(plans) > 15 and None not in plans
