"""The cost of the decode kernels: `python -m cortexmlx.metal.lab.cost [--record FILE]`."""

import argparse
from importlib.resources import as_file, files
from pathlib import Path

from cortexmlx.metal.lab.cost import choice
from cortexmlx.metal.lab.cost.compiled import write_record


def main() -> None:
    """Print the choice of kernels and its figures, or record what a compiler made of the kernels."""
    parser = argparse.ArgumentParser(prog="python -m cortexmlx.metal.lab.cost", description=__doc__)
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="a result of python -m cortexmlx.metal.lab.agx --json"
    )
    options = parser.parse_args()
    if options.record is not None:
        with as_file(files("cortexmlx.metal.lab.cost") / "compiled.json") as target:
            record = write_record(options.record, target)
        print(f"{len(record.kernels)} kernels compiled by {record.compiler}")
        return
    for line in choice.table():
        print(line, flush=True)


if __name__ == "__main__":
    main()
