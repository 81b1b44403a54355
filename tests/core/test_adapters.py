"""What an app says about adapters, and what it is told."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from cortexmlx import AdapterInfo, Engine
from cortexmlx.errors import AdapterRefused, CortexError, EngineClosed, InvalidRequest, ModelNotFound, UnknownAdapter
from support.models.adapters import write_adapter


@pytest.fixture
def folder(tiny: Any, tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "sql", tiny("one layer"))


def test_an_app_sees_what_is_loaded(engine: Engine, folder: Path) -> None:
    assert dict(engine.adapters) == {}
    info = engine.load_adapter("sql", folder)
    assert isinstance(info, AdapterInfo) and dict(engine.adapters) == {"sql": info}
    assert (info.rank, info.path, info.base) == (4, str(folder), "org/base")
    stats = engine.stats()
    assert (stats.adapters, stats.adapter_bytes_limit) == (1, 10**9)
    assert stats.adapter_bytes == 2 * info.bytes > 0, "a table begins with a slot of zeros"
    engine.unload_adapter("sql")
    assert not engine.adapters and engine.stats().adapter_bytes == 0


def test_the_mapping_is_a_moment_and_read_only(engine: Engine, folder: Path) -> None:
    before = engine.adapters
    engine.load_adapter("sql", folder)
    assert "sql" not in before
    with pytest.raises(TypeError):
        engine.adapters["other"] = engine.adapters["sql"]  # type: ignore[index]


@pytest.mark.parametrize("name", ["", 5, None, "x" * 1025])
def test_a_name_is_a_text(engine: Engine, folder: Path, name: Any) -> None:
    with pytest.raises(InvalidRequest, match="name"):
        engine.load_adapter(name, folder)


def test_a_name_may_be_a_member_of_an_enum(engine: Engine, folder: Path) -> None:
    class Name(str, Enum):
        SQL = "sql"

    assert engine.load_adapter(Name.SQL, folder).name == "sql"
    assert engine.generate([1], max_tokens=1, adapter=Name.SQL) and list(engine.adapters) == ["sql"]
    engine.unload_adapter(Name.SQL)
    assert not engine.adapters


@pytest.mark.parametrize("adapters", [["sql"], ["sql", None, "sql"], ()])
def test_adapters_are_as_many_as_the_prompts(engine: Engine, folder: Path, adapters: Any) -> None:
    engine.load_adapter("sql", folder)
    with pytest.raises(InvalidRequest, match=f"2 prompts need 2 adapters, not {len(adapters)}"):
        engine.generate_batch([[1], [2]], adapter=adapters, max_tokens=1)


def test_wrong_folders_and_names(engine: Engine, folder: Path) -> None:
    wrong: list[tuple[Any, type[CortexError]]] = [
        (lambda: engine.load_adapter("sql", 5), InvalidRequest),  # type: ignore[arg-type]
        (lambda: engine.load_adapter("sql", folder / "none"), ModelNotFound),
        (lambda: engine.unload_adapter("sql"), UnknownAdapter),
        (lambda: engine.generate([1], adapter="sql"), UnknownAdapter),
        (lambda: engine.generate([1], adapter=5), InvalidRequest),  # type: ignore[arg-type]
        (lambda: engine.stream([1], adapter="sql"), UnknownAdapter),
        (lambda: engine.pin([1] * 16, adapter="sql"), UnknownAdapter),
        (lambda: engine.conversation(adapter=5), InvalidRequest),  # type: ignore[arg-type]
        (lambda: engine.conversation(adapter="sql").ask("Hello?"), UnknownAdapter),
    ]
    for ask, error in wrong:
        with pytest.raises(error):
            ask()
    engine.check_invariants()


def test_the_limits_of_an_engine(tiny: Any, folder: Path, tmp_path: Path) -> None:
    other = write_adapter(tmp_path / "other", tiny("one layer"), seed=5)
    with Engine(tiny("one layer"), kv_memory="128KB", adapters={"sql": folder}, max_adapters=1) as engine:
        with pytest.raises(AdapterRefused, match="max_adapters"):
            engine.load_adapter("other", other)
        engine.load_adapter("too", folder)
        with pytest.raises(AdapterRefused, match="max_adapters"):
            engine.load_adapter("sql", other)
        engine.unload_adapter("too")
        assert engine.load_adapter("sql", other).path == str(other), "in the place of the only one"
        assert engine.stats().adapters == 1 and engine.generate([1], max_tokens=1, adapter="sql")
        engine.check_invariants()
    for limits, word in (({"max_adapter_rank": 3}, "max_adapter_rank"), ({"adapter_memory": 1000}, "adapter_memory")):
        with pytest.raises(AdapterRefused, match=word):
            Engine(tiny("one layer"), kv_memory="128KB", adapters={"sql": folder}, **limits)


@pytest.mark.parametrize(
    "options",
    [
        {"adapters": ["sql"]},
        {"adapters": {"": "folder"}},
        {"adapters": {"sql": 5}},
        {"max_adapters": 0},
        {"max_adapter_rank": 0},
        {"adapter_memory": "much"},
        {"adapters": {}, "hosts": 2},
    ],
)
def test_options_that_are_wrong(tiny: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        Engine(tiny("one layer"), **options)


def test_an_engine_that_cannot_load_an_adapter_does_not_open(tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        Engine(tiny("one layer"), kv_memory="128KB", adapters={"sql": tmp_path / "none"})


def test_a_model_that_runs_one_request_at_a_time_refuses_them_by_name(tiny: Any, folder: Path, unpaged: None) -> None:
    with Engine(tiny("one layer"), kv_memory="128KB") as engine:
        with pytest.raises(AdapterRefused, match="one request at a time"):
            engine.load_adapter("sql", folder)
        assert engine.generate([1, 2, 3], max_tokens=2).token_ids


def test_a_closed_engine(tiny: Any, folder: Path) -> None:
    with Engine(tiny("one layer"), kv_memory="128KB", adapters={"sql": folder}) as engine:
        pass
    for ask in (lambda: engine.load_adapter("sql", folder), lambda: engine.unload_adapter("sql")):
        with pytest.raises(EngineClosed):
            ask()
