"""The metrics say in Prometheus's format what the engines and the server count."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from cortexmlx import Engine, EngineClosed
from cortexmlx.server.metrics import MAX_MODELS, OTHER, AnswerCounts, Histogram, ServerCounters, render_metrics
from cortexmlx.server.settings import LoggedRequest
from cortexmlx.stats import DraftStats, SpeculationStats
from cortexmlx.types.request import Completion, FinishReason, Timings, Usage

UGLY = 'a"b\\c\nd\\n</script>{}=,é\udc80'


class Closed:
    """An engine that was closed."""

    def __init__(self, engine: Engine) -> None:
        self.info = engine.info

    def stats(self) -> None:
        raise EngineClosed("closed")


def read(text: bytes) -> dict[str, Metric]:
    """All families by name; the parser joins samples to them."""
    families = list(text_string_to_metric_families(text.decode()))
    names = [family.name for family in families]
    assert len(set(names)) == len(names), "each name once"
    return dict(zip(names, families, strict=True))


def values(family: Metric, suffix: str = "") -> dict[Any, float]:
    return {tuple(sorted(s.labels.items())): s.value for s in family.samples if s.name == family.name + suffix}


@pytest.fixture
def tally(engine: Engine) -> ServerCounters:
    tally = ServerCounters(("/metrics",))
    done = engine.generate_batch(["one", "one two three", "a b c"], max_tokens=5)
    for completion in done:
        tally.count_answers("tiny", [completion], 0, 0)
    tally.count_reply(LoggedRequest("GET", "/metrics", 200, 0.1, None), "/metrics")
    return tally


def test_every_family_has_help_a_type_and_a_unit_by_the_rules(engine: Engine, tally: ServerCounters) -> None:
    text = render_metrics([("tiny", engine)], tally, 1e9)
    families = read(text)
    assert text.endswith(b"\n") and len(families) > 30
    for family in families.values():
        assert family.name.startswith("cortexmlx_") and family.documentation and family.type != "unknown", family.name
        assert not re.search(r"_(ms|milliseconds|kb|mb|gb|percent)\b", family.name)
        for sample in family.samples:
            assert family.type != "counter" or sample.name == f"{family.name}_total"
            assert family.type != "gauge" or not sample.name.endswith("_total")
            assert sample.value >= 0
    assert values(families["cortexmlx_start_time_seconds"]) == {(): 1e9}


def test_the_values_are_the_engines(engine: Engine, tally: ServerCounters) -> None:
    families, stats = read(render_metrics([("tiny", engine)], tally, 0.0)), engine.stats()
    model = (("model", "tiny"),)
    for name, value in (
        ("cortexmlx_requests_running", stats.rows_running),
        ("cortexmlx_rows", stats.max_rows),
        ("cortexmlx_kv_blocks_allocated", stats.total_blocks),
        ("cortexmlx_kv_limit_bytes", stats.kv_bytes_limit),
        ("cortexmlx_weight_bytes", engine.info.weight_bytes),
        ("cortexmlx_up", 1),
    ):
        assert values(families[name])[model] == value, name
    for name, value in (
        ("cortexmlx_prompt_tokens", stats.prompt_tokens),
        ("cortexmlx_generated_tokens", stats.generated_tokens),
        ("cortexmlx_prefix_cache_queries", stats.prompt_tokens),
        ("cortexmlx_prefix_cache_hits", stats.cached_tokens),
        ("cortexmlx_preemptions", stats.preemptions),
    ):
        assert values(families[name], "_total")[model] == value, name
    uses = {dict(labels)["use"]: value for labels, value in values(families["cortexmlx_kv_blocks"]).items()}
    assert uses["used"] + uses["free"] == stats.total_blocks and uses["cached"] == stats.cached_blocks
    steps = values(families["cortexmlx_steps"], "_total")
    assert sum(steps.values()) == stats.steps == sum(stats.steps_by_reason.values())


def test_drafts_are_counted_by_their_source(engine: Engine, tally: ServerCounters) -> None:
    drafts = SpeculationStats(9, 7, 3, {"suffix": DraftStats(7, 6), "forced": DraftStats(2, 1)})
    said: Any = Closed(engine)
    said.stats = lambda: replace(engine.stats(), speculation=drafts)
    families = read(render_metrics([("tiny", said)], tally, 0.0))
    for name, counts in (("drafted_tokens", (7, 2)), ("accepted_tokens", (6, 1))):
        found = values(families[f"cortexmlx_{name}"], "_total")
        assert tuple(found[("model", "tiny"), ("source", source)] for source in ("suffix", "forced")) == counts
    assert values(families["cortexmlx_verified_drafts"], "_total") == {(("model", "tiny"),): 3}


def buckets(family: Metric) -> list[tuple[float, float]]:
    return [(float(s.labels["le"]), s.value) for s in family.samples if s.name.endswith("_bucket")]


@pytest.mark.parametrize(
    "name", ["queue_seconds", "time_to_first_token_seconds", "time_per_output_token_seconds", "request_seconds"]
)
def test_a_histogram_is_cumulative_and_ends_with_all(engine: Engine, tally: ServerCounters, name: str) -> None:
    family = read(render_metrics([("tiny", engine)], tally, 0.0))[f"cortexmlx_{name}"]
    assert family.type == "histogram"
    found = buckets(family)
    assert found == sorted(found) and found[-1][0] == float("inf")
    [count], [total] = (values(family, suffix).values() for suffix in ("_count", "_sum"))
    assert count == found[-1][1] == 3 and total >= 0


@pytest.mark.parametrize("name", [UGLY, "", "</script><script>", "ü", "a" * 5000])
def test_any_name_of_a_model_is_read_as_it_is(engine: Engine, tally: ServerCounters, name: str) -> None:
    tally.count_answers(name, (), 0, 1)
    text = render_metrics([(name, engine)], tally, 0.0)
    families = read(text)
    said = name.replace("\udc80", "?")
    assert values(families["cortexmlx_up"]) == {(("model", said),): 1.0}
    assert values(families["cortexmlx_requests"], "_total")[("finish_reason", "cancelled"), ("model", said)] == 1
    assert all(line.startswith((b"#", b"cortexmlx_")) for line in text.splitlines()), "no name breaks a line"


def test_a_closed_engine_is_not_up_and_spoils_no_other(engine: Engine, tally: ServerCounters) -> None:
    engines: Any = [("gone", Closed(engine)), ("tiny", engine)]
    families = read(render_metrics(engines, tally, 0.0))
    assert values(families["cortexmlx_up"]) == {(("model", "gone"),): 0.0, (("model", "tiny"),): 1.0}
    assert list(values(families["cortexmlx_rows"])) == [(("model", "tiny"),)]
    assert values(families["cortexmlx_http_requests"], "_total") == {(("path", "/metrics"), ("status", "200")): 1.0}


def test_without_engines_there_is_still_the_server() -> None:
    families: Iterable[str] = read(render_metrics([], ServerCounters(()), 5.0))
    assert "cortexmlx_start_time_seconds" in families


def test_a_disk_tier_has_its_own(engine: Engine, tally: ServerCounters, tmp_path: Any, folder: Any) -> None:
    assert not any("disk" in name for name in read(render_metrics([("tiny", engine)], tally, 0.0)))
    with Engine(str(folder), kv_memory="8MB", kv_store=str(tmp_path)) as stored:
        families = read(render_metrics([("a", engine), ("b", stored)], tally, 0.0))
        limit = stored.stats().kv_store
    assert limit is not None
    assert values(families["cortexmlx_disk_limit_bytes"]) == {(("model", "b"),): limit.bytes_limit}
    assert families["cortexmlx_disk_read_bytes"].type == "counter"


# Requests are counted once, under names that the server knows.


def answer(tokens: int, ttft: float, total: float, reason: FinishReason = FinishReason.STOP) -> Completion:
    timings = Timings(queued=ttft / 2, ttft=ttft, total=total, prefill_tokens_per_second=1, decode_tokens_per_second=1)
    return Completion("x", tuple(range(tokens)), reason, Usage(3, tokens), timings)


@given(st.lists(st.floats(0, 10)))
def test_a_histogram_has_every_duration_at_most_its_bound(durations: list[float]) -> None:
    histogram = Histogram((0.1, 1.0, 5.0))
    for seconds in durations:
        histogram.add(seconds)
    below = [0, *(sum(seconds <= bound for seconds in durations) for bound in histogram.bounds), len(durations)]
    assert histogram.counts == [after - before for before, after in pairwise(below)]
    assert histogram.sum == pytest.approx(sum(durations))


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("/v1/completions", "/v1/completions"),
        ("/v1/models", "/v1/models"),
        ("/v1/models/anything", "/v1/models"),
        ("/v1/models/org/name", "/v1/models"),
        ("/", "/"),
        ("/v1/completions/", "/v1/completions"),
        ("/nothing", OTHER),
        ("/nothing/v1/models", OTHER),
        ("", OTHER),
        ('/"}\n', OTHER),
    ],
)
def test_paths_of_clients_are_no_labels(path: str, known: str) -> None:
    tally = ServerCounters(("/v1/completions", "/v1/models", "/"))
    tally.count_reply(LoggedRequest("GET", path, 404, 0.1, None), path)
    assert tally.snapshot()[0] == {(known, 404): 1}


def test_answers_are_counted_by_model_and_reason() -> None:
    tally = ServerCounters(())
    two = answer(5, 0.2, 1.0)
    object.__setattr__(two, "others", (answer(1, 0.3, 0.3, FinishReason.LENGTH),))
    tally.count_answers("a", [two, answer(3, 0.1, 0.5)], 0, 0)
    tally.count_answers("a", (), 1, 2)
    tally.count_answers("b", [answer(0, 0.0, 0.0, FinishReason.CANCELLED)], 0, 0)
    models = tally.snapshot()[1]
    assert +models["a"].reasons == {"stop": 2, "length": 1, "error": 1, "cancelled": 2}
    assert (sum(models["a"].first_token.counts), sum(models["a"].each_token.counts)) == (3, 2)
    assert models["a"].each_token.sum == pytest.approx(0.8 / 4 + 0.4 / 2) and models["a"].whole.sum == 1.8
    assert +models["b"].reasons == {"cancelled": 1} and sum(models["b"].whole.counts) == 0, "no token, no time"


def test_what_was_taken_stays_as_it_was() -> None:
    tally = ServerCounters(())
    tally.count_answers("a", [answer(2, 0.1, 0.2)], 0, 0)
    before: dict[str, AnswerCounts] = tally.snapshot()[1]
    tally.count_answers("a", [answer(2, 0.1, 0.2)], 0, 0)
    assert sum(before["a"].whole.counts) == 1 and before["a"].reasons["stop"] == 1
    assert sum(tally.snapshot()[1]["a"].whole.counts) == 2


def test_there_are_not_more_models_than_a_scraper_can_hold() -> None:
    tally = ServerCounters(())
    for number in range(MAX_MODELS + 50):
        tally.count_answers(f"model {number}", [answer(1, 0.1, 0.1)], 0, 0)
    models = tally.snapshot()[1]
    assert len(models) == MAX_MODELS + 1 and models[OTHER].reasons["stop"] == 50
