"""Python packages ask a server: the lines of docs/clients.md, and then streams, calls and forms."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from support.clients.home import Home
from support.clients.installed import OLLAMA_NPM, node, node_modules, python
from support.clients.page import configuration
from support.clients.scripted import Turn, call
from support.clients.served import Served
from support.pages import ROOT

pytestmark = pytest.mark.slow

HELLO = "Hello! How are you?"
PERSON = {"name": "Ada", "age": 36}
PROGRAMS = ROOT / "tests/support/clients/programs"


def answer(turns: Sequence[Turn]) -> str:
    """What the model writes: a form if it is told of a person, a call if it is asked for the weather."""
    tools, last = turns[0].text if turns[0].role == "tools" else "", turns[-1]
    if last.role == "tool":
        return f"There is {last.text}."
    if "Ada" in last.text:
        forms = [json.loads(line)["function"]["name"] for line in tools.splitlines()]
        return call(forms[0], **PERSON) if forms else json.dumps(PERSON)
    return call("weather", city="Oslo") if "weather" in tools else HELLO


def ran(server: Served, home: Home, section: str, *program: str, environment: str = "packages") -> dict[str, Any]:
    """Return what the lines of the page printed, and then the results of a program, if one is named."""
    page = home.project / "shown.py"
    page.write_text(configuration(section, server.url))
    done = home.run([python(environment), PROGRAMS / "__main__.py", page, *program])
    assert server.refused == []
    assert done.returncode == 0, done.stderr[-4000:]
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


RAIN = 'There is rain: {"city": "Oslo"}.'
RAIN_IN = "There is rain in Oslo."
TOOL = 'def weather(city: str) -> str:\n    "The weather of a city."\n    return f"rain in {city}"'


@pytest.mark.parametrize("section", ["openai", "anthropic"])
def test_the_lines_of_the_page_are_answered(section: str, serving: Any, home: Home) -> None:
    """`tests/server/test_application.py` and `test_anthropic.py` have the rest of these two packages."""
    assert ran(serving(answer), home, section) == {"shown": HELLO + "\n"}


FORMS = {"form": PERSON, "form_of_a_call": PERSON}


@pytest.mark.parametrize(
    ("section", "program", "results"),
    [
        ("LangChain", "langchain", {"calls": RAIN_IN, **FORMS, "responses": HELLO}),
        ("anthropic", "langchain_anthropic_package", {"calls": RAIN_IN}),
        ("litellm", "litellm_package", {"calls": RAIN, "form": PERSON}),
        ("pydantic-ai", "pydantic_ai_package", {"calls": RAIN_IN, **FORMS}),
    ],
)
def test_packages_ask(section: str, program: str, results: dict[str, Any], serving: Any, home: Home) -> None:
    assert ran(serving(answer), home, section, program) == {"shown": HELLO + "\n", "stream": HELLO, **results}


def test_instructor_asks(serving: Any, home: Home) -> None:
    results = ran(serving(answer), home, "instructor", "instructor_package", environment="instructor")
    assert results == {"shown": "name='Ada' age=36\n", "modes": [PERSON] * 3, "pieces": PERSON}


def test_programs_that_speak_ollamas_api_ask(serving: Any, home: Home) -> None:
    server = serving(answer)
    results = ran(server, home, "ollama", "ollama_programs")
    assert results == {"shown": HELLO + "\n", "stream": HELLO, "calls": RAIN_IN, "form": PERSON}
    place = {"OLLAMA_HOST": server.url}
    command = [python("packages").with_name("llm"), "-m", "ollama/local"]
    for words, want in (
        (["Say hello."], HELLO),
        (["--no-stream", "Say hello."], HELLO),
        (["--functions", TOOL, "And?"], RAIN_IN),
    ):
        done = home.run([*command, *words], place)
        assert done.returncode == 0 and done.stdout.strip() == want, done.stderr
    done = home.run([*command, "--schema", "name, age int", "Ada is 36 years old."], place)
    assert json.loads(done.stdout) == PERSON and server.refused == []
    modules = node_modules("ollama", OLLAMA_NPM)
    script = modules.with_name("ollama.mjs")
    script.write_text((PROGRAMS / "ollama.mjs").read_text())
    done = home.run([node() / "node", script], place)
    assert json.loads(done.stdout) == {"stream": HELLO, "calls": RAIN_IN, "form": PERSON, "refused": 403}, done.stderr


def test_llm_asks(serving: Any, home: Home) -> None:
    server = serving(answer)
    command = [python("packages").with_name("llm")]
    folder = home.folder / ".config" / "io.datasette.llm"
    folder.mkdir(parents=True)
    (folder / "extra-openai-models.yaml").write_text(configuration("llm", server.url))
    asked = ["-m", "local", "--key", "none"]

    def said(*words: str) -> str:
        done = home.run([*command, *asked, *words])
        assert server.refused == [] and done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert home.run([*command, "logs", "path"]).stdout.startswith(str(folder))
    assert said("Say hello.") == said("--no-stream", "Say hello.") == HELLO
    assert json.loads(said("--schema", "name, age int", "Ada is 36 years old.")) == PERSON
    assert said("--functions", TOOL, "What is the weather in Oslo?") == RAIN_IN
