"""A person who looks for the tests of a module finds them by its name, in a folder like the module's."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"cortexmlx": "tests", "cli": "tests/cli", "bench": "tests/bench", "metal": "tests/metal"}
"""Where the tests of a folder lie; those of a folder inside it lie in a folder of that name inside."""

ELSEWHERE = {
    "cortexmlx": "tests/engine",
    "metal/sim": "tests/sim",
    "metal/sim/dispatch": "tests/sim",
    "metal/sim/judge": "tests/sim",
    "metal/sim/judge/mlx": "tests/sim",
    "metal/sim/translation": "tests/sim",
}
"""The folders whose tests lie elsewhere. The modules at the top of the package are what an app sees: the engine's."""

TESTED_WITH = {
    "bench/studies/embeddings/__main__.py": "tests/bench/studies/embeddings/test_throughput.py",
    "bench/studies/embeddings/model_folder.py": "tests/bench/studies/embeddings/test_throughput.py",
    "bench/studies/hosts/mute_worker.py": "tests/bench/studies/hosts/test_parts_of_a_step.py",
    "cli/__init__.py": "tests/cli/test_cli_model.py",
    "cli/chat/slash/command.py": "tests/cli/chat/slash/test_commands.py",
    "cli/embed/files.py": "tests/cli/embed/test_command.py",
    "cli/embed/jsonl.py": "tests/cli/embed/test_command.py",
    "cli/embed/npy.py": "tests/cli/embed/test_command.py",
    "cli/embed/parquet.py": "tests/cli/embed/test_command.py",
    "cli/embed/rows.py": "tests/cli/embed/test_command.py",
    "cli/embed/texts.py": "tests/cli/embed/test_command.py",
    "cli/files/lines.py": "tests/cli/batch/test_input.py",
    "cli/files/run_file.py": "tests/cli/batch/test_resume.py",
    "cli/files/schema_file.py": "tests/cli/test_options.py",
    "cli/files/status_line.py": "tests/cli/batch/test_progress.py",
    "cli/files/stream.py": "tests/cli/batch/test_output.py",
    "cortexmlx/__main__.py": "tests/cli/test_app.py",
    "cortexmlx/arrays.py": "tests/kv/blocks/test_table.py",
    "cortexmlx/attention/patches/__init__.py": "tests/attention/patches/test_patches.py",
    "cortexmlx/attention/patches/baichuan_m1.py": "tests/attention/patches/test_patches.py",
    "cortexmlx/attention/patches/dynamic_rope.py": "tests/attention/patches/test_patches.py",
    "cortexmlx/attention/patches/gemma2.py": "tests/attention/patches/test_patches.py",
    "cortexmlx/attention/patches/gpt_bigcode.py": "tests/attention/patches/test_patches.py",
    "cortexmlx/attention/patches/plamo.py": "tests/attention/patches/test_patches.py",
    "cortexmlx/attention/patches/plamo2.py": "tests/attention/patches/test_patches.py",
    "cortexmlx/calls/harmony.py": "tests/calls/test_formats.py",
    "cortexmlx/calls/hermes.py": "tests/calls/test_formats.py",
    "cortexmlx/calls/json_sections.py": "tests/calls/test_hostile.py",
    "cortexmlx/calls/literals.py": "tests/calls/test_hostile.py",
    "cortexmlx/calls/llama.py": "tests/calls/test_formats.py",
    "cortexmlx/calls/mistral.py": "tests/calls/test_formats.py",
    "cortexmlx/embedding/pooled.py": "tests/serving/embedding/test_texts.py",
    "cortexmlx/embedding/results.py": "tests/serving/embedding/test_calls.py",
    "cortexmlx/execution/memory/paged.py": "tests/execution/test_runner.py",
    "cortexmlx/hosts/channel.py": "tests/hosts/links/test_link.py",
    "cortexmlx/hosts/links/frames.py": "tests/hosts/links/test_link.py",
    "cortexmlx/hosts/links/heartbeat.py": "tests/hosts/links/test_link.py",
    "cortexmlx/hosts/options.py": "tests/hosts/test_rank_server.py",
    "cortexmlx/kv/sequences.py": "tests/kv/test_cache.py",
    "cortexmlx/models/loaded.py": "tests/models/test_folder.py",
    "cortexmlx/protocols/earlier.py": "tests/server/test_stored.py",
    "cortexmlx/protocols/history.py": "tests/server/test_histories.py",
    "cortexmlx/protocols/notes.py": "tests/protocols/test_fields.py",
    "cortexmlx/protocols/openai/responses/details.py": "tests/protocols/openai/responses/test_reader.py",
    "cortexmlx/protocols/peers.py": "tests/protocols/test_fields.py",
    "cortexmlx/protocols/reply.py": "tests/protocols/openai/test_choices.py",
    "cortexmlx/sampling_params.py": "tests/engine/test_request.py",
    "cortexmlx/scheduling/config.py": "tests/scheduling/test_scheduler.py",
    "cortexmlx/server/__init__.py": "tests/server/test_application.py",
    "cortexmlx/server/asking.py": "tests/server/test_application.py",
    "cortexmlx/server/loading/cannot_load.py": "tests/server/loading/test_pool.py",
    "cortexmlx/server/loading/lease.py": "tests/server/loading/test_pool.py",
    "cortexmlx/server/loading/open_engines.py": "tests/server/test_models.py",
    "cortexmlx/server/protocols.py": "tests/server/test_application.py",
    "cortexmlx/server/settings.py": "tests/server/web/test_access.py",
    "cortexmlx/server/transcripts/answered.py": "tests/server/transcripts/test_reading.py",
    "cortexmlx/server/web/http.py": "tests/server/test_application.py",
    "cortexmlx/server/web/logged.py": "tests/server/web/test_request_log.py",
    "cortexmlx/serving/app/submitter.py": "tests/engine/test_asyncio.py",
    "cortexmlx/serving/loading/open_model.py": "tests/serving/hosted/test_recovery.py",
    "cortexmlx/serving/loading/served_model.py": "tests/serving/test_core.py",
    "cortexmlx/serving/open_requests.py": "tests/serving/test_core.py",
    "cortexmlx/serving/opened_model.py": "tests/serving/test_core.py",
    "cortexmlx/sessions/host.py": "tests/sessions/test_conversation.py",
    "cortexmlx/speculation/drafter.py": "tests/speculation/test_speculation.py",
    "cortexmlx/structured/texts.py": "tests/tools/test_tool.py",
    "cortexmlx/structured/thoughts.py": "tests/serving/text/test_thoughts.py",
    "metal/agx/__main__.py": "tests/metal/agx/test_command.py",
    "metal/cost/__main__.py": "tests/metal/cost/test_sheet.py",
    "metal/legal/__main__.py": "tests/metal/legal/test_judge.py",
    "metal/sim/dispatch/abi.py": "tests/sim/test_launch.py",
    "metal/sim/dispatch/messages.py": "tests/sim/test_faults.py",
    "metal/sim/judge/__main__.py": "tests/sim/test_judges.py",
    "metal/sim/judge/cases.py": "tests/sim/test_judges.py",
    "metal/sim/judge/mlx/attention.py": "tests/sim/test_judges.py",
    "metal/sim/judge/mlx/calls.py": "tests/sim/test_judges.py",
    "metal/sim/judge/mlx/elementwise.py": "tests/sim/test_judges.py",
    "metal/sim/judge/mlx/gemv.py": "tests/sim/test_judges.py",
    "metal/sim/judge/mlx/others.py": "tests/sim/test_judges.py",
    "metal/sim/judge/mlx/quantized.py": "tests/sim/test_judges.py",
    "metal/sim/judge/mlx/reduce.py": "tests/sim/test_judges.py",
    "metal/sim/judge/mlx/rows.py": "tests/sim/test_judges.py",
    "metal/sim/judge/mlx/scan.py": "tests/sim/test_judges.py",
    "metal/sim/judge/mlx/sort.py": "tests/sim/test_judges.py",
    "metal/sim/judge/mlx_lm_kernels.py": "tests/sim/test_judges.py",
    "metal/sim/judge/mlx_vlm_kernels.py": "tests/sim/test_judges.py",
    "metal/sim/judge/reference.py": "tests/sim/test_judges.py",
    "metal/sim/judge/sdpa.py": "tests/sim/test_judges.py",
    "metal/sim/judge/steel.py": "tests/sim/test_judges.py",
    "metal/sim/judge/table.py": "tests/sim/test_judges.py",
}
"""Modules that have no test file of their own, each with the file that judges it: plain data, what only puts others
together, and what shows only in the work of its neighbours.
"""


def modules() -> Iterator[str]:
    """Every module by its path; an `__init__.py` counts if it does something."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name != "__init__.py" or defines(path):
                yield path.relative_to(ROOT).as_posix()


def defines(path: Path) -> bool:
    """Whether a module has functions or classes."""
    return any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in ast.parse(path.read_text()).body)


MODULES = sorted(modules())


def folder_of(module: str) -> Path:
    """Where the tests of a module lie."""
    folder = Path(module).parent
    if folder.as_posix() in ELSEWHERE:
        return ROOT / ELSEWHERE[folder.as_posix()]
    top, *inside = folder.parts
    return ROOT.joinpath(FOLDERS[top], *inside)


@cache
def names_in(folder: Path) -> set[str]:
    """The modules whose tests lie in a folder."""
    return {Path(m).stem for m in MODULES if folder_of(m) == folder}


def own_tests(module: str) -> list[Path]:
    """`test_<module>.py` and `test_<module>_<aspect>.py`: the test files whose name begins with the module's, and with
    no longer name of a neighbour.
    """
    folder = folder_of(module)
    names = names_in(folder)

    def owner(test: Path) -> str:
        return max((name for name in names if f"{test.stem}_".startswith(f"test_{name}_")), key=len, default="")

    return [test for test in folder.glob("test_*.py") if owner(test) == Path(module).stem]


def test_every_module_has_tests_of_its_name_or_says_where_they_are() -> None:
    assert len(MODULES) > 150
    assert [m for m in MODULES if not own_tests(m) and m not in TESTED_WITH] == []


def test_the_list_names_modules_and_tests_that_exist() -> None:
    assert list(TESTED_WITH) == sorted(TESTED_WITH)
    assert set(TESTED_WITH) <= set(MODULES)
    tests = set(TESTED_WITH.values())
    assert [t for t in tests if not (ROOT / t).is_file() or "def test_" not in (ROOT / t).read_text()] == []


def test_who_has_tests_of_its_name_is_not_in_the_list() -> None:
    assert [m for m in TESTED_WITH if own_tests(m)] == []


def test_a_longer_name_that_is_another_modules_is_not_an_aspect() -> None:
    """`tests/execution/test_logit_rows.py` judges `logit_rows.py`, not `logits.py`."""
    assert ROOT / "tests/kv/test_prefix_machine.py" in own_tests("cortexmlx/kv/prefix.py")
