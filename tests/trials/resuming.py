"""Have a conversation of an agent with each kind of model and each template, and count what is computed again.

    python -m tests.trials.resuming [--turns N] [--loop N] [--foreign N] [--system N] [--kind NAME] [--template NAME]

A line for each kind and template: requests, new tokens, tokens after something that the template changed, the most
tokens that a request computed though they were cached before, and how many requests computed more than two blocks of
such tokens. Exit status 1 if one did.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as pytest does


def main() -> int:
    from cortexmlx.cpu import blas

    blas.preload()
    from support.agents.agent import BLOCK, KINDS, agent_of, driver_of, model_of, recorded
    from support.agents.templates import TEMPLATES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, number in (("turns", 20), ("loop", 60), ("foreign", 3000), ("system", 2500)):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--template", choices=[template.name for template in TEMPLATES])
    options = parser.parse_args()
    failed = 0
    print(f"{'kind':12} {'template':8} requests    new changed  most again  above {2 * BLOCK}  seconds")
    with tempfile.TemporaryDirectory() as root:
        for kind in [options.kind] if options.kind else KINDS:
            for template in TEMPLATES:
                if options.template in (None, template.name):
                    began, driver = time.perf_counter(), driver_of(model_of(kind, Path(root)))
                    agent = agent_of(driver, template, options.system)
                    counts = list(recorded(agent, options.turns, options.loop, options.foreign))
                    new, changed = sum(c.new for c in counts), sum(c.changed for c in counts)
                    most = max(c.again for c in counts)
                    above = [c.again for c in counts if c.again > 2 * BLOCK]
                    failed += len(above)
                    print(
                        f"{kind:12} {template.name:8} {len(counts):8} {new:6} {changed:7} {most:11} "
                        f"{len(above):9} {time.perf_counter() - began:8.0f}  {above[:12]}",
                        flush=True,
                    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
