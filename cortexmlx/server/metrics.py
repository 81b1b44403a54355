"""The metrics of a server in the text format of Prometheus, version 0.0.4."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from cortexmlx.errors import CortexError
from cortexmlx.server.settings import LoggedRequest
from cortexmlx.stats import EngineStats, StoreStats
from cortexmlx.types.request import Completion, FinishReason

if TYPE_CHECKING:
    from cortexmlx.engine import Engine


__all__ = ["CONTENT_TYPE", "render_metrics"]

NamedEngines = Sequence[tuple[str, "Engine"]]
"""The engines that are open, each with the name of its model."""


class _Metric(NamedTuple):
    """A Prometheus metric and how to read it from the statistics of an engine, or of its disk tier."""

    name: str
    help: str
    read_value: Callable[[EngineStats | StoreStats], float]


_ENGINE_METRICS = (
    _Metric("requests_running", "Answers that have a row of the batch.", attrgetter("rows_running")),
    _Metric("requests_waiting", "Answers that wait for a row or for memory.", attrgetter("rows_waiting")),
    _Metric("rows", "Answers that can run at once.", attrgetter("max_rows")),
    _Metric("prompt_tokens_total", "Tokens of prompts.", attrgetter("prompt_tokens")),
    _Metric("prefilled_tokens_total", "Tokens of prompts that steps have computed.", attrgetter("prefilled_tokens")),
    _Metric("generated_tokens_total", "Tokens of answers.", attrgetter("generated_tokens")),
    _Metric("prefix_cache_queries_total", "Tokens looked up in the prefix cache.", attrgetter("prompt_tokens")),
    _Metric(
        "prefix_cache_hits_total",
        "Tokens found in the prefix cache, in memory or on disk.",
        attrgetter("cached_tokens"),
    ),
    _Metric("preemptions_total", "Answers that lost their row and blocks to others.", attrgetter("preemptions")),
    _Metric("restarts_total", "Answers begun again since memory was refused.", attrgetter("restarts")),
    _Metric("dropped_tokens_total", "Tokens dropped from texts longer than a row.", attrgetter("dropped_tokens")),
    _Metric("kv_block_tokens", "Tokens of a block.", attrgetter("block_size")),
    _Metric("kv_bytes", "Bytes of the arena of keys and values.", attrgetter("kv_bytes")),
    _Metric("kv_limit_bytes", "Bytes to which the arena may grow.", attrgetter("kv_bytes_limit")),
    _Metric("kv_used_bytes", "Bytes that hold tokens of running requests.", attrgetter("kv_bytes_in_use")),
    _Metric("state_bytes", "Bytes of recurrent layers' states.", attrgetter("state_bytes")),
    _Metric("memory_active_bytes", "Bytes that MLX has allocated in this process.", attrgetter("active_memory")),
    _Metric("memory_peak_bytes", "The most bytes that MLX had allocated.", attrgetter("peak_memory")),
)

_STORE_METRICS = (
    _Metric("disk_limit_bytes", "Bytes that the disk tier may have.", attrgetter("bytes_limit")),
    _Metric("disk_written_blocks_total", "Blocks written to the disk tier.", attrgetter("stored_blocks")),
    _Metric("disk_written_bytes_total", "Bytes written to the disk tier.", attrgetter("stored_bytes")),
    _Metric("disk_read_blocks_total", "Blocks read from the disk tier.", attrgetter("read_blocks")),
    _Metric("disk_read_bytes_total", "Bytes read from the disk tier.", attrgetter("read_bytes")),
    _Metric("disk_missed_blocks_total", "Blocks that could not be read.", attrgetter("missed_blocks")),
    _Metric("disk_dropped_blocks_total", "Blocks that were not written.", attrgetter("dropped_blocks")),
)


class _MetricCollector(Collector):
    """Wraps finished metric families as a Collector, which prometheus_client's text writer needs."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        """Return the metrics."""
        return self._families


def render_metrics(engines: NamedEngines, tally: ServerCounters, started: float) -> bytes:
    """Return all metrics as Prometheus text. `started`: the server's start in seconds since 1970. Engines are asked on
    their threads, one after the other; a closed one has no values, except that it is not up.
    """
    stats: dict[str, EngineStats] = {}
    for name, engine in engines:
        try:
            stats[name] = engine.stats()
        except CortexError:
            continue
    families = [*_server_metrics(tally, started), *_model_metrics(engines, stats), *_engine_metrics(stats)]
    return generate_latest(_MetricCollector(families))


def _server_metrics(tally: ServerCounters, started: float) -> Iterator[Metric]:
    """Yield the metrics of the server: its start, HTTP replies, answers, and durations."""
    replies, models = tally.snapshot()
    since = GaugeMetricFamily("cortexmlx_start_time_seconds", "When the server began, in seconds since 1970.")
    since.add_metric([], started)
    yield since
    http = _make_family("http_requests_total", "HTTP requests. Status 499: the client went away.", "path", "status")
    for (path, status), count in sorted(replies.items()):
        http.add_metric([path, str(status)], count)
    yield http
    answer_counter = _make_family(
        "requests_total", "Answers that have ended. A cancelled or failed prompt counts once.", "model", "finish_reason"
    )
    for model, each in models.items():
        for reason, count in sorted(each.reasons.items()):
            answer_counter.add_metric([_label_value(model), reason], count)
    yield answer_counter
    for name, help_text, read_histogram in (
        ("queue_seconds", "From the submission to the start of the prefill.", attrgetter("queued")),
        ("time_to_first_token_seconds", "From the submission to the first token.", attrgetter("first_token")),
        ("time_per_output_token_seconds", "Mean time between an answer's tokens.", attrgetter("each_token")),
        ("request_seconds", "From the submission to the last token.", attrgetter("whole")),
    ):
        family = HistogramMetricFamily(f"cortexmlx_{name}", help_text, labels=["model"])
        for model, each in models.items():
            histogram: Histogram = read_histogram(each)
            bounds = map(floatToGoString, (*histogram.bounds, math.inf))
            counts = accumulate(histogram.counts)
            family.add_metric([_label_value(model)], list(zip(bounds, counts, strict=True)), histogram.sum)
        yield family


def _model_metrics(engines: NamedEngines, stats: dict[str, EngineStats]) -> Iterator[Metric]:
    """Yield the metrics that describe each model, and whether its engine runs."""
    up = _make_family("up", "Whether a model's engine runs.", "model")
    about = _make_family("model_info", "The model.", "model", "architecture", "dtype")
    weights = _make_family("weight_bytes", "Bytes of a model's weights.", "model")
    for name, engine in engines:
        info, model = engine.info, _label_value(name)
        up.add_metric([model], float(name in stats))
        about.add_metric([model, _label_value(info.architecture), _label_value(info.dtype)], 1)
        weights.add_metric([model], info.weight_bytes)
    yield from (up, about, weights)


def _engine_metrics(stats: dict[str, EngineStats]) -> Iterator[Metric]:
    """Yield the metrics in the engines' statistics, with a label for each model."""
    for engine_metric in _ENGINE_METRICS:
        family = _make_family(engine_metric.name, engine_metric.help, "model")
        for model, each in stats.items():
            family.add_metric([_label_value(model)], engine_metric.read_value(each))
        yield family
    blocks = _make_family("kv_blocks", "Blocks by use; shared are used, too, and cached free.", "model", "use")
    drafts = {
        outcome: _make_family(
            f"{outcome}_tokens_total", f"Tokens that were {outcome}, by where drafts come from.", "model", "source"
        )
        for outcome in ("drafted", "accepted")
    }
    verified_counter = _make_family("verified_drafts_total", "How often drafts of an answer were verified.", "model")
    steps = _make_family("steps_total", "Steps, and why they could not be planned ahead.", "model", "reason")
    recomputed = _make_family(
        "recomputed_tokens_total", "Prompt tokens computed again though they were known, by why.", "model", "reason"
    )
    times = _make_family("step_seconds_total", "Where the time of steps went.", "model", "part")
    total = _make_family("kv_blocks_allocated", "All blocks of the arena.", "model")
    for model, each in stats.items():
        name = _label_value(model)
        total.add_metric([name], each.total_blocks)
        for use in ("used", "shared", "free", "cached"):
            blocks.add_metric([name, use], getattr(each, f"{use}_blocks"))
        verified_counter.add_metric([name], each.speculation.verified)
        for source, draft_stats in each.speculation.sources.items():
            drafts["drafted"].add_metric([name, source], draft_stats.drafted)
            drafts["accepted"].add_metric([name, source], draft_stats.accepted)
        for reason, count in each.steps_by_reason.items():
            steps.add_metric([name, reason], count)
        for reason, count in sorted(each.recomputed_tokens.items()):
            recomputed.add_metric([name, reason], count)
        for part in ("plan", "build", "wait", "commit", "mask"):
            times.add_metric([name, part], getattr(each, f"{part}_seconds"))
    yield from (total, blocks, *drafts.values(), verified_counter, steps, recomputed, times)
    stores = {model: each.kv_store for model, each in stats.items() if each.kv_store is not None}
    for store_metric in _STORE_METRICS if stores else ():
        family = _make_family(store_metric.name, store_metric.help, "model")
        for model, store in stores.items():
            family.add_metric([_label_value(model)], store_metric.read_value(store))
        yield family


def _make_family(name: str, help_text: str, *labels: str) -> CounterMetricFamily | GaugeMetricFamily:
    """Return a metric family without samples: a counter if its name ends in "_total", or else a gauge."""
    family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    return family(f"cortexmlx_{name}", help_text, labels=labels)


def _label_value(text: str) -> str:
    """Return a text as a label's value. Lone surrogates, as in some folders' names, are replaced: UTF-8 has none."""
    return text.encode("utf-8", "replace").decode()


# ServerCounters: how many requests a server has answered and how long they took. No text, no key, no address.


OTHER = "other"
"""The path of requests for which there is none, and the name of a model when there are too many."""

MAX_MODELS = 100
"""Names of models that are counted apart. A label that grows without end would fill the memory of whoever scrapes."""

_FIRST_TOKEN_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0)
_TOKEN_BOUNDS = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_TOTAL_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class Histogram:
    """A histogram of durations in seconds. `bounds` are the upper bounds of its buckets, sorted."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """How many durations are at most each bound and above the one before; the last count is for those above all."""
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def copy(self) -> Histogram:
        """Return a copy that later durations do not change."""
        new_histogram = Histogram(self.bounds)
        new_histogram.counts, new_histogram.sum = list(self.counts), self.sum
        return new_histogram


@dataclass
class AnswerCounts:
    """Statistics of one model's ended answers: counts by finish reason, and histograms of their times."""

    reasons: Counter[str] = field(default_factory=Counter)
    """Answers by finish reason."""
    queued: Histogram = field(default_factory=lambda: Histogram(_FIRST_TOKEN_BOUNDS))
    first_token: Histogram = field(default_factory=lambda: Histogram(_FIRST_TOKEN_BOUNDS))
    """From the submission."""
    each_token: Histogram = field(default_factory=lambda: Histogram(_TOKEN_BOUNDS))
    """The mean time between an answer's tokens after the first one."""
    whole: Histogram = field(default_factory=lambda: Histogram(_TOTAL_BOUNDS))
    """From the submission to the last token."""

    def add(self, completion: Completion) -> None:
        """Count a completed answer."""
        self.reasons[completion.finish_reason.value] += 1
        tokens, times = completion.usage.completion_tokens, completion.timings
        if tokens:
            self.queued.add(times.queued)
            self.first_token.add(times.ttft)
            self.whole.add(times.total)
        if tokens > 1:
            self.each_token.add((times.total - times.ttft) / (tokens - 1))

    def copy(self) -> AnswerCounts:
        """Return a copy that later answers do not change."""
        histograms = (each.copy() for each in (self.queued, self.first_token, self.each_token, self.whole))
        return AnswerCounts(self.reasons.copy(), *histograms)


class ServerCounters:
    """Counts replies and answers for `/metrics`, from any thread. Replies are counted by path if it is in `paths`."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = frozenset(paths)
        self._lock = threading.Lock()
        self._replies: Counter[tuple[str, int]] = Counter()
        self._models: dict[str, AnswerCounts] = {}

    def count_reply(self, log_entry: LoggedRequest, path: str) -> None:
        """Count an HTTP reply, or a client that went away (status 499). `path` is the path inside the application."""
        path_label = max((each for each in self._paths if f"{path}/".startswith(f"{each}/")), key=len, default=OTHER)
        with self._lock:
            self._replies[path_label, log_entry.status] += 1

    def count_answers(
        self, model: str, completions: Iterable[Completion], failed_count: int, cancelled_count: int
    ) -> None:
        """Count the answers of an ended request: its completions, and how many prompts failed or were cancelled."""
        with self._lock:
            if model not in self._models and len(self._models) >= MAX_MODELS:
                model = OTHER
            counts = self._models.setdefault(model, AnswerCounts())
            for first in completions:
                for completion in (first, *first.others):
                    counts.add(completion)
            counts.reasons[FinishReason.ERROR.value] += failed_count
            counts.reasons[FinishReason.CANCELLED.value] += cancelled_count

    def snapshot(self) -> tuple[Counter[tuple[str, int]], dict[str, AnswerCounts]]:
        """Return copies of the replies by path and status, and of the answers by model."""
        with self._lock:
            return self._replies.copy(), {name: each.copy() for name, each in self._models.items()}
