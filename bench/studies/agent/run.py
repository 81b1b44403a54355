"""An agent's conversation, with kills of its engine.

`python -m cortexmlx.bench.studies.agent [MODEL] [--kv-store DIR]`.

The engine answers outputs of tools, turn after turn. There are forks, edits of earlier messages, cancelled answers, and
two kill -9 of the engine's process. Without --kv-store nothing survives a kill, so there are no kills.

The study compares the prompt tokens that were computed with those that were new. A token is new if it is not in a
beginning that was computed before. Every answer is compared with one that is computed without any cache.

The first token after a kill is timed. It is compared with computing the whole prompt, and with mlx-lm. mlx-lm loads the
file in which it saved its prompt cache after the turn before.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cortexmlx.bench.studies.agent.script import (
    ANSWER,
    OUTPUT,
    SAMPLE,
    TURNS,
    Act,
    Kind,
    make_script,
    text,
    tokens_per_word,
)
from cortexmlx.cpu import blas

SETTLE_SECONDS = 2.0
"""The time between an answer and a kill, in which the disk is written. A tool takes at least this long."""

_PIECE = 512


class Took(NamedTuple):
    """Seconds of wall time, and of CPU time of this process. On a busy machine, only CPU time is reliable."""

    wall: float
    cpu: float


class Clock:
    """A clock that begins when it is created."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def took(self) -> Took:
        """Return the time since the clock was created."""
        return Took(time.perf_counter() - self._wall, time.process_time() - self._cpu)


@dataclass(frozen=True)
class ActResult:
    """The result of an act."""

    kind: Kind
    prompt: tuple[int, ...]
    """The tokens of the prompt."""
    cached: int
    """How many of them were found in the cache."""
    answer: tuple[int, ...]
    """The tokens of the answer."""
    first: Took
    """The time to the answer's first token. It includes reading the conversation's file, rendering and tokenizing."""
    killed: bool = False
    """Whether the engine was killed just before the act."""


class Agent:
    """Performs acts on an engine, with a conversation that is saved to `file` after each act."""

    def __init__(self, engine: Any, file: Path) -> None:
        self._engine = engine
        self._file = file
        self._talk: Any = None
        self._per_word = tokens_per_word(len(engine.encode(SAMPLE)))

    def do(self, act: Act) -> ActResult | None:
        """Perform an act. Return None if there was no answer."""
        from cortexmlx.sampling_params import SamplingParams

        clock, killed = Clock(), False
        if self._talk is None:
            params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
            self._talk = self._engine.conversation(system="You are an agent.", params=params)
            if self._file.exists():
                self._talk.load(self._file)
                killed = True
        said = text(act, self._per_word)
        if act.kind is Kind.EDIT:
            self._talk.edit(act.place, said)
            self._talk.save(self._file)
            return None
        talk = self._talk.fork() if act.kind is Kind.FORK else self._talk
        stop = act.answer // 2 if act.kind is Kind.CANCEL else act.answer + 1
        reply = talk.stream(said, SamplingParams(max_tokens=act.answer, ignore_eos=True))
        first: Took | None = None
        for count, _ in enumerate(reply, 1):
            first = first or clock.took()
            if count == stop:
                reply.cancel()
        done = reply.result()
        self._talk.save(self._file)
        assert first is not None  # every answer has at least one event
        return ActResult(act.kind, tuple(reply.prompt), done.usage.cached_tokens, done.token_ids, first, killed)


def serve(settings: dict[str, Any]) -> None:
    """Run the process that is killed: acts are lines on stdin, records are lines on stdout."""
    from cortexmlx.engine import Engine

    with Engine(settings["model"], **settings["engine"]) as engine:
        agent = Agent(engine, Path(settings["file"]))
        for line in sys.stdin:
            given = json.loads(line)
            record = agent.do(Act(**{**given, "kind": Kind(given["kind"])}))
            print(json.dumps(None if record is None else asdict(record)), flush=True)


class Process:
    """`serve` in its own process, which can be killed and started again."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._command = [sys.executable, "-m", "cortexmlx.bench.studies.agent", "--serve", json.dumps(settings)]
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def do(self, act: Act) -> ActResult | None:
        """Perform an act in the process, or kill it and start another."""
        if act.kind is Kind.KILL:
            time.sleep(SETTLE_SECONDS)
            os.kill(self._process.pid, signal.SIGKILL)
            self.close()
            self._process = self._start()
            return None
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(act)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine's process ended with {self._process.wait()}")
        said = json.loads(line)
        if said is None:
            return None
        tokens = {name: tuple(said[name]) for name in ("prompt", "answer")}
        return ActResult(**{**said, **tokens, "kind": Kind(said["kind"]), "first": Took(*said["first"])})

    def close(self) -> None:
        """End the process."""
        with self._process as process:
            process.kill()


def new_tokens(records: Sequence[ActResult]) -> list[int]:
    """Return, for each prompt, how many tokens follow the longest beginning that was computed before. This is at least
    one. An answer's last token is never computed.
    """
    import numpy as np

    computed: list[Any] = []
    new = []
    for record in records:
        prompt = np.array(record.prompt)
        common = 0
        for known in computed:
            length = min(len(known), len(prompt))
            differ = np.flatnonzero(known[:length] != prompt[:length])
            common = max(common, int(differ[0]) if len(differ) else length)
        new.append(max(1, len(prompt) - common))
        computed.append(np.array([*record.prompt, *record.answer[:-1]]))
    return new


def ratio_of(records: Sequence[ActResult]) -> float:
    """Return computed prompt tokens over new ones."""
    return sum(len(r.prompt) - r.cached for r in records) / sum(new_tokens(records))


def first_tokens_anew(engine: Any, records: Sequence[ActResult]) -> list[tuple[bool, Took]]:
    """Compute every answer again without any cache. Return for each whether it is the same, and the time to its first
    token.
    """
    from cortexmlx.sampling_params import SamplingParams

    anew = []
    for record in records:
        params = SamplingParams(max_tokens=len(record.answer), ignore_eos=True)
        clock = Clock()
        events = engine.stream(list(record.prompt), params, cache=False)
        next(events)
        first = clock.took()
        done = list(events)[-1].completion
        anew.append((done.token_ids == record.answer, first))
    return anew


def first_token_of_mlx_lm(loaded: Any, before: Sequence[int], prompt: Sequence[int], folder: Path) -> Took:
    """Return the time to mlx-lm's first token of a prompt, with the cache of the text `before` in a file.

    The cache is loaded and cut back to the beginning that both texts share. Then the rest is computed.
    """
    import mlx.core as mx
    from mlx_lm.generate import generate_step, generation_stream
    from mlx_lm.models import cache as caches

    for _ in generate_step(mx.array(tuple(prompt[:8])), loaded.model, max_tokens=2):
        pass  # a warm-up, because the first run is slow without any cause in the cache
    cache, file = caches.make_prompt_cache(loaded.model), str(folder / "mlx-lm.safetensors")
    for start in range(0, len(before), _PIECE):
        loaded.model(mx.array(tuple(before[start : start + _PIECE]))[None], cache=cache)
        mx.eval([each.state for each in cache])
    caches.save_prompt_cache(file, cache)
    both = zip(before, prompt[:-1], strict=False)
    common = next((place for place, (a, b) in enumerate(both) if a != b), min(len(before), len(prompt) - 1))
    clock = Clock()
    cache = caches.load_prompt_cache(file)
    if caches.can_trim_prompt_cache(cache):
        caches.trim_prompt_cache(cache, len(before) - common)
    elif common < len(before):
        cache, common = caches.make_prompt_cache(loaded.model), 0
    for token, _ in generate_step(mx.array(tuple(prompt[common:])), loaded.model, max_tokens=1, prompt_cache=cache):
        int(token)
        break
    first = clock.took()
    mx.synchronize(generation_stream)
    return first


def run(acts: Sequence[Act], actor: Any) -> Iterator[ActResult]:
    """Yield the records of all answers."""
    for act in acts:
        record = actor.do(act)
        if record is not None:
            yield record


def _model(name: str | None, folder: Path) -> str:
    """Return the requested model, or one with random weights in which every token has a text."""
    from cortexmlx.bench.measure.random_model import write_random_model

    return name or str(write_random_model(folder, {"vocab_size": 257}))


def main() -> None:
    """Run the study and print its figures."""
    parser = argparse.ArgumentParser(
        prog="python -m cortexmlx.bench.studies.agent", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("model", nargs="?", help="a model; none: a small one with random weights")
    parser.add_argument("--kv-store", metavar="DIR", help="a folder for the disk tier; without it nothing is killed")
    parser.add_argument("--kv-memory", metavar="SIZE")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--longest", type=int, default=OUTPUT[1], help="tokens of a tool's longest output")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--few", action="store_true", help="compare only the answers behind a kill")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    blas.preload()  # before mlx is imported
    if asked.serve:
        serve(json.loads(asked.serve))
        return
    with tempfile.TemporaryDirectory(prefix="cortexmlx-bench-") as name:
        model = _model(asked.model, Path(name))
        engine = {"block_size": asked.block_size, "kv_memory": asked.kv_memory}
        stored = {} if asked.kv_store is None else {"kv_store": asked.kv_store}
        settings = {"model": model, "file": str(Path(name) / "talk.json"), "engine": {**engine, **stored}}
        acts = make_script(asked.seed, asked.turns, (OUTPUT[0], asked.longest), kills=asked.kv_store is not None)
        process = Process(settings)
        try:
            records = list(run(acts, process))
        finally:
            process.close()
        report(records, model, engine, Path(name), asked.few)


def report(records: Sequence[ActResult], model: str, options: dict[str, Any], folder: Path, few: bool) -> None:
    """Compare with computing everything and with mlx-lm, and print the figures."""
    from cortexmlx.engine import Engine
    from cortexmlx.models import load_model

    new, prompts = sum(new_tokens(records)), sum(len(r.prompt) for r in records)
    computed = sum(len(r.prompt) - r.cached for r in records)
    print(f"{len(records)} answers to {prompts:,} prompt tokens, {new:,} of them new, {computed:,} computed")
    print(f"computed over new: {ratio_of(records):.3f} (blocks of {options['block_size']} tokens)")
    chosen = [place for place, record in enumerate(records) if record.killed or not few]
    with Engine(model, **options) as engine:
        anew = dict(zip(chosen, first_tokens_anew(engine, [records[p] for p in chosen]), strict=True))
    print(f"the same tokens as without any cache: {sum(same for same, _ in anew.values())} of {len(anew)}")
    loaded = load_model(model) if any(record.killed for record in records) else None
    for place, record in enumerate(records):
        if not record.killed:
            continue
        line = next(r for r in reversed(records[:place]) if r.kind is not Kind.FORK)
        before = (*line.prompt, *line.answer[:-1])
        theirs, alone = first_token_of_mlx_lm(loaded, before, record.prompt, folder), anew[place][1]
        print(f"after a kill, {len(record.prompt):,} tokens, {record.cached:,} of them found:")
        print(f"  first token         {record.first.wall:6.2f} s, {record.first.cpu:6.2f} s of CPUs")
        for name, other in (("computing all", alone), ("mlx-lm and its file", theirs)):
            ratios = f"{record.first.wall / other.wall:.2f}x, {record.first.cpu / other.cpu:.2f}x"
            print(f"  {name:<20}{other.wall:6.2f} s, {other.cpu:6.2f} s of CPUs: {ratios}")
