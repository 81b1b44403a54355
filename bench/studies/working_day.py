"""Measures whether memory stays flat through hours of mixed work.

`python -m cortexmlx.bench.studies.working_day [MODEL ...] [--hours H] [--seed S]`

A server in this process has several models, of which two fit into its budget, so they are loaded and unloaded all the
time. Four clients send chats that grow, streams that they cut, batches, forms, embeddings and requests for adapters.
One model has a draft model, all have a disk tier, and memory pressure is reported every minute. Without a MODEL, the
models have random weights. With MODELs, these are asked, too.

Every ten seconds the study notes the memory of the process and MLX's active and cached memory. It prints a line every
tenth of the time, and a report at the end: the slope of each after the first tenth (ten minutes at most). On a Mac it
also forwards the system's own memory pressure, and counts the sleeps of the machine; what to do meanwhile is printed.
Exit status 1 if a request fails, or if memory grows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cortexmlx.cpu import blas

blas.preload()  # before mlx is imported

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from cortexmlx.bench.measure.random_model import write_random_model  # noqa: E402
from cortexmlx.bench.studies.layer_kinds import KINDS  # noqa: E402
from cortexmlx.engine import Engine  # noqa: E402

SAMPLE_SECONDS = 10.0
SETTLED = 600.0
"""Seconds of work after which memory must not grow any more."""
MAX_GROWTH = 0.02
"""The part of a mean that may come to it in an hour."""
TRANSCRIPTS = 1 << 20
"""Bytes that each model's transcripts may take: so few that they are full, and grow no more, within `SETTLED`."""
SMALL: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 256, "head_dim": 16,
                         "sliding_window_pattern": 2}  # fmt: skip
ATTENTION = ("q_proj", "v_proj")
WORDS = [word.strip(".,`()") for word in (__doc__ or "").split()]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}


def layer_sizes(engine: Engine, targets: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return, by name, the input and output sizes of the layers whose names end with one of the `targets`."""

    def find_sizes(core: Any) -> dict[str, tuple[int, int]]:
        from cortexmlx.execution.adapters import linear_layers, linear_size

        layers = linear_layers(core.loaded.model)
        return {
            name: size
            for name, module in layers.items()
            if name.rpartition(".")[2] in targets and (size := linear_size(module)) is not None
        }

    return engine.inspect(find_sizes)


def write_adapter(folder: Path, sizes: Mapping[str, tuple[int, int]], rank: int, seed: int) -> Path:
    """Write a random adapter in PEFT's format, and return its folder."""
    from safetensors.numpy import save_file

    dice = np.random.default_rng(seed)
    tensors = {
        f"base_model.model.{name}.lora_{matrix}.weight": dice.standard_normal(shape, np.float32) * np.float32(0.02)
        for name, (ins, outs) in sizes.items()
        for matrix, shape in (("A", (rank, ins)), ("B", (outs, rank)))
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder


def process_bytes() -> int:
    """Return the memory of this process: its physical footprint on a Mac, its resident memory elsewhere."""
    if sys.platform == "darwin":
        result = subprocess.run(["footprint", "-f", "bytes", "-p", str(os.getpid())], capture_output=True, text=True)
        return int(result.stdout.split("Footprint:")[1].split()[0])
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass
class WorkingDay:
    """The record of a run of some hours: the requests so far, their faults, and samples of the memory."""

    seconds: float
    start_time: float = field(default_factory=time.monotonic)
    samples: list[tuple[float, int, int, int]] = field(default_factory=list)
    """Seconds since the beginning; bytes of the process, active in MLX, cached by MLX."""
    work_counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning, without those in which a Mac was asleep."""
        return time.monotonic() - self.start_time

    @property
    def is_over(self) -> bool:
        """Whether the day's time has passed."""
        return self.elapsed >= self.seconds

    def sample_memory(self) -> None:
        """Record how much memory is in use now."""
        self.samples.append((self.elapsed, process_bytes(), mx.get_active_memory(), mx.get_cache_memory()))

    def memory_trends(self) -> dict[str, tuple[float, float, float]]:
        """Return for each kind of memory its mean in MB, its growth in MB an hour, and that growth's standard error.

        Models come and go, so neighbouring samples are alike. The error is that of means over a twentieth of the time.
        """
        settle_seconds = min(SETTLED, self.seconds / 10)
        table = np.array([sample for sample in self.samples if sample[0] >= settle_seconds])
        trends = {}
        for kind, column in zip(("process", "active", "cached"), table.T[1:], strict=True):
            parts = (np.array_split(values, 20) for values in (table[:, 0] / 3600, column / 1e6))
            hours, megabytes = (np.array([part.mean() for part in each]) for each in parts)
            spread = hours - hours.mean()
            slope = float(spread @ megabytes / (spread @ spread))
            rest = megabytes - megabytes.mean() - slope * spread
            error = float(np.sqrt(rest @ rest / (len(hours) - 2) / (spread @ spread)))
            trends[kind] = (float(megabytes.mean()), slope, error)
        return trends

    def growing_kinds(self) -> list[str]:
        """Return the kinds of memory that grow by more than `MAX_GROWTH` an hour, and more than chance would."""
        return [
            k for k, (mean, slope, error) in self.memory_trends().items() if slope > max(MAX_GROWTH * mean, 3 * error)
        ]

    def report(self) -> str:
        """Return what was done, the memory trends and the faults, as Markdown."""
        work = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.work_counts.items()))
        lines = [f"{self.elapsed / 3600:.2f} hours: {work}; {len(self.faults)} faults.", ""]
        lines += ["| memory | mean MB | MB an hour | standard error |", "|---|---:|---:|---:|"]
        lines += [f"| {k} | {m:,.0f} | {s:+.1f} | {e:.1f} |" for k, (m, s, e) in self.memory_trends().items()]
        return "\n".join([*lines, *(f"- {fault}" for fault in self.faults[:20])])


class RandomClient:
    """A client of the server that sends random kinds of requests."""

    def __init__(self, day: WorkingDay, url: str, models: list[str], embedder: str, seed: int) -> None:
        import httpx2

        self._day, self._models, self._embedder = day, models, embedder
        self._dice = random.Random(seed)
        self._http = httpx2.Client(base_url=url, timeout=600, trust_env=False)
        self._chats: dict[str, list[dict[str, str]]] = {}

    def run(self) -> None:
        """Send requests until the day is over."""
        acts: list[tuple[int, Callable[[str], None]]] = [
            (8, self.continue_chat), (3, self.abandon_stream), (3, self.ask_several_answers), (3, self.ask_for_json),
            (3, self.ask_for_embeddings), (1, self.send_overlong_prompt)
        ]  # fmt: skip
        weights, functions = zip(*acts, strict=True)
        with self._http:
            while not self._day.is_over:
                act = self._dice.choices(functions, weights)[0]
                model = self._dice.choice(self._models)
                for _ in range(self._dice.randrange(2, 9)):  # of one model, or there would be nothing but loads
                    self._run_act(act, model)

    def _run_act(self, act: Callable[[str], None], model: str) -> None:
        """Call `act`, one of the kinds of requests, and count it, or record its fault."""
        try:
            act(model)
            self._day.work_counts[act.__name__] += 1
        except Exception as error:
            self._day.faults.append(f"{self._day.elapsed:.0f} s, {act.__name__} of {model}: {error!r:.300}")
            self._chats.pop(model, None)

    def _random_text(self, word_count: int) -> str:
        return " ".join(self._dice.choice(WORDS) for _ in range(word_count))

    def _post(self, path: str, expected: int = 200, **body: Any) -> Any:
        """Send a request and return the JSON of its answer. Raises RuntimeError if the status is not as expected."""
        reply = self._http.post(path, json=body)
        if reply.status_code != expected:
            raise RuntimeError(f"{path}: {reply.status_code} {reply.text[:200]}")
        return reply.json()

    def continue_chat(self, model: str) -> None:
        """Take the next turn of a chat, which begins anew when it is long."""
        turns = self._chats.setdefault(model, [{"role": "system", "content": self._random_text(60)}])
        turns.append({"role": "user", "content": self._random_text(self._dice.randrange(3, 40))})
        response = self._post("/v1/chat/completions", model=model, messages=turns, max_tokens=32, temperature=0.7)
        turns.append({"role": "assistant", "content": response["choices"][0]["message"]["content"] or "-"})
        if sum(len(turn["content"].encode()) for turn in turns) > 5_000:  # a byte is a token of the random models
            del self._chats[model]

    def abandon_stream(self, model: str) -> None:
        """Disconnect in the middle of a stream."""
        messages = [{"role": "user", "content": self._random_text(20)}]
        body = {"model": model, "messages": messages, "max_tokens": 200, "stream": True}
        with self._http.stream("POST", "/v1/chat/completions", json=body) as reply:
            for _, _line in zip(range(self._dice.randrange(1, 30)), reply.iter_lines(), strict=False):
                pass

    def ask_several_answers(self, model: str) -> None:
        """Ask for several answers, with the log-probabilities of their tokens."""
        self._post(
            "/v1/completions",
            model=model,
            prompt=[self._random_text(9), self._random_text(30)],
            n=3,
            logprobs=2,
            max_tokens=16,
        )

    def ask_for_json(self, model: str) -> None:
        """Ask for JSON that follows a schema."""
        form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
        messages = [{"role": "user", "content": self._random_text(9)}]
        response = self._post(
            "/v1/chat/completions", model=model, messages=messages, response_format=form, max_tokens=120
        )
        choice = response["choices"][0]
        if choice["finish_reason"] == "stop" and set(json.loads(choice["message"]["content"])) != {"name", "kind"}:
            raise RuntimeError(f"not of the schema: {choice['message']['content']!r}")

    def ask_for_embeddings(self, model: str) -> None:
        """Ask for embeddings of some texts."""
        texts = [self._random_text(self._dice.randrange(1, 60)) for _ in range(8)]
        if len(self._post("/v1/embeddings", model=self._embedder, input=texts)["data"]) != len(texts):
            raise RuntimeError("a vector is missing")

    def send_overlong_prompt(self, model: str) -> None:
        """Send a prompt that is longer than any context, and expect a refusal."""
        self._post("/v1/completions", 400, model=model, prompt="a" * 200_000, max_tokens=9)


def _write_models(folder: Path) -> dict[str, dict[str, Any]]:
    """Write the random models, and return the engine options for each."""
    options: dict[str, dict[str, Any]] = {}
    for kind in ("full", "windows", "hybrid"):
        path = write_random_model(folder / kind, {**SMALL, **KINDS[kind], "max_position_embeddings": 8_192})
        options[kind] = {"model": str(path), "kv_memory": "48MB", "kv_store": str(folder / f"disk-{kind}")}
    full = Path(options["full"]["model"])
    with Engine(str(full), kv_memory="8MB") as engine:
        sizes = layer_sizes(engine, ATTENTION)
    adapter_paths = {name: str(write_adapter(folder / name, sizes, 4, seed)) for seed, name in enumerate("ab")}
    options["full"] |= {"adapters": adapter_paths}
    options["drafted"] = {"model": str(full), "kv_memory": "48MB", "draft": str(full)}
    pooling_config = {"word_embedding_dimension": SMALL["hidden_size"], "pooling_mode_lasttoken": True}
    embedder = write_random_model(folder / "embedder", SMALL)
    modules = [{"idx": i, "path": p, "type": f"sentence_transformers.models.{k}"} for i, (p, k) in
               enumerate([("", "Transformer"), ("1_Pooling", "Pooling")])]  # fmt: skip
    (embedder / "1_Pooling").mkdir()
    (embedder / "1_Pooling" / "config.json").write_text(json.dumps(pooling_config))
    (embedder / "modules.json").write_text(json.dumps(modules))
    options["embedder"] = {"model": str(embedder), "kv_memory": "16MB"}
    return options


@contextlib.contextmanager
def _serve_models(day: WorkingDay, options: dict[str, dict[str, Any]]) -> Iterator[tuple[str, dict[str, Engine]]]:
    """Serve the models, of which two are in memory at a time. Yield the address, and the engines that are open."""
    from cortexmlx.server import ModelPool, ServedModel, app
    from cortexmlx.server.listening import HttpServer, open_listener

    engines: dict[str, Engine] = {}

    def make_opener(name: str) -> Callable[[Any], Engine]:
        def open_engine(on_progress: Any) -> Engine:
            engine_options = dict(options[name])
            day.work_counts["loads"] += 1
            engines[name] = Engine(engine_options.pop("model"), on_progress=on_progress, **engine_options)
            return engines[name]

        return open_engine

    models = [
        ServedModel(name, make_opener(name), memory=1, adapters=tuple(model_options.get("adapters", ())))
        for name, model_options in options.items()
    ]
    with ModelPool(models, memory=2, idle=30) as pool:
        listening = HttpServer(
            app(pool, stored_count=64, transcripts=TRANSCRIPTS), open_listener("127.0.0.1", 0), grace=1
        )
        thread = threading.Thread(target=listening.run)
        thread.start()
        try:
            yield listening.url, engines
        finally:
            listening.stop()
            thread.join()


def _apply_pressure(day: WorkingDay, engines: dict[str, Engine], dice: random.Random, last: int) -> int:
    """Tell engines of a Mac's memory pressure if it has changed, or of a simulated one. Return the Mac's level."""
    from cortexmlx.errors import EngineClosed

    level = last
    if sys.platform == "darwin":
        result = subprocess.run(["sysctl", "-n", "kern.memorystatus_vm_pressure_level"], capture_output=True, text=True)
        level = int(result.stdout or 1)
    is_simulated = dice.random() < SAMPLE_SECONDS / 60
    for engine in list(engines.values()):
        with contextlib.suppress(EngineClosed):
            if level > 1 and level != last:
                engine.on_memory_pressure("warning" if level == 2 else "critical")
            elif is_simulated:
                engine.on_memory_pressure(dice.choice(["warning", "critical"]))
    day.work_counts["pressures"] += is_simulated
    day.work_counts["pressures of the system"] += level != last
    return level


def run_day(hours: float, seed: int, model_names: list[str], folder: Path) -> WorkingDay:
    """Serve models to four random clients for some hours, and return the record of the day."""
    options = _write_models(folder)
    options |= {name: {"model": name, "kv_store": str(folder / "disk-given")} for name in model_names}
    client_models = [*(name for name in options if name != "embedder"), "full:a", "full:b"]
    day = WorkingDay(hours * 3600)
    dice = random.Random(seed)
    with _serve_models(day, options) as (url, engines):
        clients = [
            threading.Thread(target=RandomClient(day, url, client_models, "embedder", seed + i).run) for i in range(4)
        ]
        for client in clients:
            client.start()
        level, wall, steady, tenths = 1, time.time(), time.monotonic(), 0
        while not day.is_over:
            time.sleep(min(SAMPLE_SECONDS, max(day.seconds / 100, 0.05)))
            day.sample_memory()
            level = _apply_pressure(day, engines, dice, level)
            day.work_counts["sleeps"] += (
                time.time() - wall > time.monotonic() - steady + 60
            )  # the other clock stood still
            wall, steady = time.time(), time.monotonic()
            if (elapsed_tenths := int(day.elapsed / day.seconds * 10)) > tenths:
                tenths = elapsed_tenths
                now = " / ".join(f"{size / 1e6:,.0f}" for size in day.samples[-1][1:])
                print(f"{day.elapsed / 60:.0f} min: {now} MB process / active / cached", flush=True)
        for client in clients:
            client.join()
    return day


def main() -> int:
    """Run the day, and print its report."""
    parser = argparse.ArgumentParser(prog="python -m cortexmlx.bench.studies.working_day",
                                     description=(__doc__ or "").split("\n")[0])  # fmt: skip
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not options.hours > 0:
        parser.error("--hours must be above 0")
    if sys.platform == "darwin":
        print("Meanwhile let the Mac sleep and wake, open large apps, and run: sudo memory_pressure -S -l critical")
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s")  # clients do not learn why a load failed
    with tempfile.TemporaryDirectory(prefix="cortexmlx-day-") as folder:
        day = run_day(options.hours, options.seed, options.models, Path(folder))
    print(day.report())
    if grows := day.growing_kinds():
        print(f"Memory grows: {', '.join(grows)}.")
    return int(bool(day.faults or grows))


if __name__ == "__main__":
    sys.exit(main())
