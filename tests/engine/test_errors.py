"""Every error that a program can meet."""

from __future__ import annotations

import pytest

from cortexmlx import errors

ERRORS = [value for value in vars(errors).values() if isinstance(value, type)]


@pytest.mark.parametrize("error", ERRORS)
def test_whoever_catches_the_base_catches_all_and_each_says_what_it_means(error: type[Exception]) -> None:
    assert issubclass(error, errors.CortexError) and "__doc__" in vars(error) and error.__doc__
    assert str(error("12 blocks are needed: raise --kv-memory")) == "12 blocks are needed: raise --kv-memory"


def test_wrong_values_are_value_errors_and_special_cases_are_caught_with_the_general_one() -> None:
    values = {error for error in ERRORS if issubclass(error, ValueError)}
    assert values == {errors.InvalidRequest, errors.KVBlockError}
    assert issubclass(errors.MemoryRefused, errors.KVCacheFull)
    assert issubclass(errors.ForkedProcess, errors.EngineClosed)


def test_an_error_and_all_that_led_to_it_is_found_once_each_even_in_a_circle() -> None:
    first, second, third = ValueError("1"), KeyError("2"), OSError("3")
    first.__cause__, first.__context__, second.__context__ = second, third, first
    found = list(errors.with_causes(first))
    assert found[0] is first and sorted(map(id, found)) == sorted(map(id, (first, second, third)))
