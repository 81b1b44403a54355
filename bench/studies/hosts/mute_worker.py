"""A distributed worker that exchanges nothing: each of its sums is its own number. Its tokens mean nothing, and its
steps take what computing takes. For `parts_of_a_step`.
"""

from __future__ import annotations

import sys
from typing import Any

from cortexmlx.cpu import blas
from cortexmlx.distributed import worker


def main() -> int:
    """Run a worker whose all-reduces return their own input."""
    blas.preload()
    import mlx.core as mx

    def alone(x: Any, **options: Any) -> Any:
        return x

    mx.distributed.all_sum = alone
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
