"""The names of models, and those that --alias gives."""

from __future__ import annotations

import pytest

from cortexmlx.cli.serve.command import make_names
from cortexmlx.errors import InvalidRequest


def test_models_have_the_names_of_their_folders() -> None:
    names = make_names(["/models/one", "org/two", "/models/three.gguf", "/models/one"], ["small=one", "large=org/two"])
    assert names.models == {"one": "/models/one", "org/two": "org/two", "three": "/models/three.gguf"}
    assert names.aliases == {"small": "one", "large": "org/two"}
    assert names.resolve("/models/three.gguf", "--x") == names.resolve("three", "--x") == "three"
    assert names.resolve("large", "--x") == "org/two"


def test_one_model_needs_no_word_of_which() -> None:
    names = make_names(["/models/one"], ["small", "one", "a=one"])
    assert names.models == {"one": "/models/one"} and names.aliases == {"small": "one", "a": "one"}


def test_two_models_of_one_name_have_their_aliases() -> None:
    both = make_names(["/a/one", "/b/one"], ["first=/a/one", "second=/b/one", "other=/b/one"])
    assert both.models == {"first": "/a/one", "second": "/b/one"} and both.aliases == {"other": "second"}
    assert make_names(["/a/one", "/b/one"], ["second=/b/one"]).models == {"one": "/a/one", "second": "/b/one"}


@pytest.mark.parametrize(
    ("models", "aliases", "says"),
    [
        (["/a/one", "/b/one"], [], "are both called 'one': give one another name with --alias NAME=/b/one"),
        (["/a/one", "/b/one"], ["x=one"], "'one' is the name of two models: give the path"),
        (["/a/one", "/b/two"], ["x"], "does not say of which model: write x=MODEL"),
        (["/a/one"], ["x=three"], "--alias x=three: 'three' is not among the models"),
        (["/a/one"], ["=one"], "--alias =one has no name"),
        (["/a/one", "/b/two"], ["x=one", "x=two"], "--alias gives one name to two models"),
        (["/a/one", "/b/two"], ["two=one"], "--alias two=/a/one: '/b/two' is called 'two'"),
    ],
)
def test_what_is_not_clear_is_refused(models: list[str], aliases: list[str], says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        make_names(models, aliases)
    assert says in str(refused.value)


def test_an_option_names_a_model_that_is_there() -> None:
    with pytest.raises(InvalidRequest, match="--keep-loaded: 'x' is not among the models: 'one'"):
        make_names(["/a/one"], []).resolve("x", "--keep-loaded")


def test_adapters_belong_to_the_model_that_is_said() -> None:
    one = make_names(["org/base"], ["small"])
    both = {"sql": "a", "org/base:poems": "b", "small:more": "c"}
    assert one.group_adapters(both) == {"org/base": {"sql": "a", "poems": "b", "more": "c"}}
    two = make_names(["org/base", "org/other"], [])
    assert two.group_adapters({"org/other:sql": "a"}) == {"org/other": {"sql": "a"}} and two.group_adapters(None) == {}
    with pytest.raises(InvalidRequest, match="does not say of which model: write MODEL:sql="):
        two.group_adapters({"sql": "a"})
    with pytest.raises(InvalidRequest, match="'nosuch' is not among the models"):
        two.group_adapters({"nosuch:sql": "a"})
