"""The options that several commands share: where they go, and what is wrong usage."""

from __future__ import annotations

import pytest

from cortexmlx.cli.start import run
from support.cli.cli_fakes import Fakes


def test_options_reach_the_engine_under_their_usual_names(fakes: Fakes) -> None:
    line = (
        "generate -m fake -p hi --max-tokens 7 --temp 0.5 --top-p 0.9 --top-k 40 --min-p 0.1 --seed 3 --stop a --stop b"
    )
    more = "--repetition-penalty 1.1 --presence-penalty 0.2 --frequency-penalty 0.3 --kv-memory 1GiB --block-size 16"
    more += " --kv-bits 8 --kv-group-size 32 --keep-first 9 --keep-last 500"
    assert run([*line.split(), *more.split(), "--attention", "reference"]) == 0
    (_, params), options = fakes.engine.seen[0], fakes.engine.options
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (7, 0.5, 0.9, 40, 0.1)
    assert (params.seed, params.stop, params.repetition_penalty) == (3, ("a", "b"), 1.1)
    assert (params.presence_penalty, params.frequency_penalty) == (0.2, 0.3)
    assert (options.model, options.kv_memory, options.block_size, options.attention) == ("fake", 2**30, 16, "reference")
    assert (options.kv_bits, options.kv_group_size) == (8, 32)
    assert (options.keep_first, options.keep_last) == (9, 500)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("generate fake", "no prompt"),
        ("generate fake -m other -p hi", "two models: 'fake' and --model 'other'"),
        ("generate fake -p hi --temp -1", "temperature is -1.0, but must be a number in [0, 100]"),
        ("generate fake -p hi --temp nan", "temperature is nan"),
        ("generate fake -p hi --top-p 0", "top_p is 0.0, but must be a number in (0, 1]"),
        ("generate fake -p hi --max-tokens 0", "max_tokens is 0"),
        ("generate fake -p hi --max-tokens many", "Invalid value for '--max-tokens'"),
        ("generate fake -p hi --kv-memory lots", "'lots' is not a size: write 4GB"),
        ("generate fake -p hi --raw --system x", "--system needs the chat template"),
        ("generate fake -p hi --no-such-option", "--no-such-option"),
        ("generat", "No such command 'generat'"),
    ],
)
def test_wrong_usage_exits_2_and_names_the_option(
    line: str, says: str, fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in " ".join(err.split()) and "Traceback" not in err
