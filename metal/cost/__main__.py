"""`python -m cortexmlx.metal.cost`: the cost sheet; with `--all`, of every variant that `cortexmlx doctor` checks."""

import sys

from cortexmlx.metal.cost.sheet import SHAPES, sheet
from cortexmlx.metal.rules import VARIANTS

if __name__ == "__main__":
    for line in sheet(VARIANTS if "--all" in sys.argv[1:] else SHAPES):
        print(line, flush=True)
