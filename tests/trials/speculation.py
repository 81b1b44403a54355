"""Random requests to engines that speculate on recurrent layers, beside engines that do not.

    python -m tests.trials.speculation [--minutes N] [--seed N] [--trials N] [--requests N] [--only KIND]...

For each kind in turn, and with adapters every third time, an engine with random options gets random requests: ragged,
forked, cancelled, with images, forms and stop strings, as turns of edited conversations, in a tight arena, with few
snapshots, with a disk tier. Drafts, and what draft heads say, are right, wrong, half right and too long. Each answer
must be that without drafts, up to proven ties, and the engine's invariants hold after each step. A seed and a kind say
everything.

Prints each trial that fails, and what was compared. Exit status 1 if one has failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import logging
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as pytest does

SIGHTED = ("qwen3_5", "qwen3_5 head", "qwen3_vl", "qwen3_vl 8 bits", "qwen3_5_moe head", "mistral3")
SIGHTED += ("gemma3", "gemma4 small", "gemma4 large", "gemma4 unified", "gemma4 large 8 bits", "mistral3 8 bits")
HEADS = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "glm4_moe", "glm4_moe_lite")


def main() -> int:
    from cortexmlx.cpu import blas

    blas.preload()
    from cortexmlx.disk import connector, tier
    from support.adapters.kinds import Adapted, adapters_of
    from support.models.draft_heads import LAST_LAYERS, write_draft_head, write_last_layer
    from support.models.quantized_models import wide
    from support.models.recurrent import RECURRENT
    from support.models.tiny import write_tiny
    from support.patience import PATIENCE
    from support.speculation.counts import Counts
    from support.speculation.kinds import Kind, judge
    from support.speculation.mixed_trial import MixedAdaptedTrial, MixedTrial, TalkTrial
    from support.speculation.sighted_trial import SightedAdaptedTrial, SightedMixedTrial, SightedTalkTrial, sighted_kind
    from support.speculation.trial import roomy

    sighted = [f"{name} images" for name in SIGHTED]
    names = [*RECURRENT, *(f"{name} head" for name in HEADS), "qwen3_next 8 bits", "falcon_h1 8 bits", *sighted]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--trials", type=int, default=10_000, help="of each kind, at most")
    parser.add_argument("--requests", type=int, default=24, help="of each trial")
    parser.add_argument("--only", action="append", choices=names, metavar="KIND", help=f"of {', '.join(names)}")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    tier._READING_SECONDS, connector.MIN_DISK_WAIT_SECONDS = -1e9, PATIENCE  # type: ignore[attr-defined]
    counts, failed, end = Counts(), 0, time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)

        def written(name: str) -> Kind:
            model, _, extra = name.partition(" ")
            path = root / name.replace(" ", "-") / "model"
            if extra.endswith("images"):
                return sighted_kind(root, name)
            if extra == "8 bits":
                return Kind(name, wide(root / "wide", model), 8)
            if not path.exists() and extra and model in LAST_LAYERS:
                write_last_layer(path, model)
            elif not path.exists():
                write_draft_head(path, model, raw=model == "qwen3_next") if extra else write_tiny(path, model)
            return Kind(name, path)

        def trial(seed: int, name: str) -> MixedTrial:
            kind, store, own_seed = written(name), root / "store", 10_000 * seed + names.index(name)
            sees = name.endswith("images")
            if seed % 3 or kind.kv_bits or name == "recurrent_gemma":  # MLX cannot freeze this one, to train adapters
                talks, mixes = (SightedTalkTrial, SightedMixedTrial) if sees else (TalkTrial, MixedTrial)
                return (talks if seed % 3 == 1 else mixes)(own_seed, kind, options.requests, store)
            adapters = adapted.get(name) or adapted.setdefault(name, adapters_of(root / f"of {name}", kind.folder))
            return (SightedAdaptedTrial if sees else MixedAdaptedTrial)(
                own_seed, Adapted(kind, adapters), options.requests, store
            )

        adapted: dict[str, tuple[Path, ...]] = {}
        for seed, name in itertools.product(range(options.seed, options.seed + options.trials), options.only or names):
            if time.monotonic() > end:
                break
            faulthandler.dump_traceback_later(PATIENCE, exit=True)
            try:
                trial(seed, name).run(counts)
            except Exception:
                failed += 1
                again = f"--only '{name}' --seed {seed} --requests {options.requests} --trials 1"
                print(f"FAILED: {again}\n{traceback.format_exc()}", flush=True)
            shutil.rmtree(root / "store", ignore_errors=True)
            roomy.cache_clear()
            judge.cache_clear()
            if counts.trials % 25 == 0:
                print(f"{counts}\n{failed} failed\n", flush=True)
    faulthandler.cancel_dump_traceback_later()
    print(f"{counts}\n{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
