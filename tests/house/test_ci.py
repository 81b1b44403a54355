"""What continuous integration runs on a Mac, executed here: its scripts with Apple's tools pretended, and the workflow
as far as it can be read.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
KERNELS = [f"kernel_{n}.metal" for n in range(6)]

PYTHON = f"""#!/bin/bash
# Python, as far as the script knows: it writes a few kernels where the module would write all of them.
[ "$1 $2" = "-m cortexmlx.metal.lab.kernel_files" ] || exit 9
mkdir -p "$3" && cd "$3" && for name in {" ".join(KERNELS)}; do echo "[[kernel]] void k() {{}}" > "$name"; done
"""

XCRUN = """#!/bin/bash
# Understands what the script asks of `xcrun metal`, and writes down every call.
echo "$*" >> "$CALLS"
if [ ! -e "$TOOLCHAIN" ]; then
  echo "error: cannot execute tool 'metal' due to missing Metal Toolchain" >&2
  exit 1
fi
for word in "$@"; do
  case "$word" in
    --version) echo "Apple metal version 32023.883 (metalfe-32023.883)"; exit 0 ;;
    -std=*) level=${word#-std=} ;;
    *.metal) text=$word ;;
    *.air) air=$word ;;
  esac
done
case " $KNOWN " in
  *" $level "*) ;;
  *)
    echo "error: invalid value '$level' in '-std=$level'" >&2
    echo "note: use 'metal3.1' for 'Metal 3.1' standard" >&2
    exit 1
    ;;
esac
[[ $(<"$text") == *kernel* ]] || exit 3
case "${text##*/}" in
  $REFUSED)
    echo "$text:412:14: error: no matching function for call to simd_sum" >&2
    printf '  float x = simd_sum(y);\\n            ^~~~~~~~\\n' >&2
    echo "$text:7:3: note: candidate template ignored" >&2
    exit 1
    ;;
esac
echo "$text:9:3: warning: unused variable 'n' [-Wunused-variable]" >&2
echo compiled > "$air"
"""


def script(folder: Path, name: str, text: str) -> None:
    """An executable in `folder`, which is the first on the PATH of what the tests run."""
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


class Runner:
    """A Mac with an Xcode that knows some language levels."""

    def __init__(self, tools: Path, out: Path) -> None:
        self.tools, self.out = tools, out
        script(tools, "xcrun", XCRUN)
        (tools / "toolchain").touch()
        self.environment = {
            "CALLS": str(tools / "calls"),
            "TOOLCHAIN": str(tools / "toolchain"),
            "KNOWN": "metal3.1 metal3.2",
            "REFUSED": "nothing at all",
            "GITHUB_ACTIONS": "true",
            "PYTHON": str(tools / "python-few"),
        }
        script(tools, "python-few", PYTHON)

    def run(self, *command: str, **changes: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.tools}:{os.environ['PATH']}"
        environment = {**os.environ, **self.environment, **changes, "PATH": path}
        return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=False)

    def compile(self, *levels: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return self.run(str(ROOT / ".ci" / "compile-metal"), str(self.out), *levels, **changes)

    @property
    def log(self) -> str:
        return (self.out / "log.txt").read_text()

    def compiled(self, level: str) -> list[str]:
        calls = (self.tools / "calls").read_text().splitlines()
        at = [c for c in calls if f"-std=metal{level} " in c and "/texts/" in c]
        assert all(c.startswith("-sdk macosx metal -x metal -fno-fast-math ") and " -c " in c for c in at)
        return sorted(Path(word).name for c in at for word in c.split() if word.endswith(".metal"))


@pytest.fixture
def mac(tmp_path: Path) -> Runner:
    (tmp_path / "tools").mkdir()
    return Runner(tmp_path / "tools", tmp_path / "out")


def test_the_script_asks_for_the_kernels_as_the_module_is_called(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cortexmlx.metal.lab.kernel_files", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and any(tmp_path.iterdir()), done.stderr


def test_every_kernel_is_compiled_at_every_level_that_xcode_knows(mac: Runner) -> None:
    done = mac.compile()
    assert done.returncode == 0, done.stdout + done.stderr
    assert mac.compiled("3.1") == mac.compiled("3.2") == KERNELS
    for level in ("4.0", "4.1"):
        assert mac.compiled(level) == []
        assert f"::warning title=Metal::Metal {level} was not tried: this Xcode does not know it." in done.stdout
    assert f"{2 * len(KERNELS)} compilations, 0 failed; not tried: Metal 4.0 4.1." in mac.log
    assert mac.log.count("unused variable 'n'") == 2 * len(KERNELS), "what the compiler says is kept, errors or not"
    assert "Apple metal version 32023.883" in mac.log
    assert sorted(p.name for p in mac.out.iterdir()) == ["log.txt", "texts", "version.txt"]
    done = mac.compile(KNOWN="metal3.1 metal3.2 metal4.0 metal4.1")
    assert done.returncode == 0 and "was not tried" not in done.stdout
    assert mac.compiled("4.1") == mac.compiled("4.0") == KERNELS


def test_what_does_not_compile_fails_after_everything_was_tried_and_is_in_the_log_whole(mac: Runner) -> None:
    refused = KERNELS[3]
    done = mac.compile("3.1", KNOWN="metal3.1", REFUSED=refused)
    assert done.returncode == 1 and mac.compiled("3.1") == KERNELS
    whole = (
        f"-- Metal 3.1: {refused}\n"
        f"{mac.out}/texts/{refused}:412:14: error: no matching function for call to simd_sum\n"
        "  float x = simd_sum(y);\n"
        "            ^~~~~~~~\n"
        f"{mac.out}/texts/{refused}:7:3: note: candidate template ignored\n"
    )
    assert whole in mac.log and whole in done.stdout
    assert (
        f"::error title=Metal::{refused} does not compile at Metal 3.1: {mac.out}/texts/{refused}:412:14" in done.stdout
    )
    assert f"{len(KERNELS)} compilations, 1 failed." in done.stdout


def test_a_compiler_that_is_not_installed_yet_is_fetched(mac: Runner) -> None:
    (mac.tools / "toolchain").unlink()
    script(mac.tools, "xcodebuild", '#!/bin/bash\necho "fetched $*"\ntouch "$TOOLCHAIN"\n')
    done = mac.compile("3.1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fetched -downloadComponent MetalToolchain" in mac.log and mac.compiled("3.1") == KERNELS


def test_a_compiler_that_does_not_work_at_all_is_no_success(mac: Runner) -> None:
    (mac.tools / "toolchain").unlink()
    script(mac.tools, "xcodebuild", "#!/bin/bash\nexit 0\n")
    done = mac.compile("3.1")
    assert done.returncode == 1 and "missing Metal Toolchain" in done.stdout
    assert "does not compile an empty kernel at Metal 3.1" in done.stdout and mac.compiled("3.1") == []


def test_an_xcode_that_knows_no_level_is_no_success(mac: Runner) -> None:
    done = mac.compile("4.0", "4.1")
    assert done.returncode == 1 and "not tried: Metal 4.0 4.1" in mac.log and "Nothing was compiled." in done.stdout


@pytest.mark.parametrize(
    ("gpu", "virtual", "trusted"),
    [
        ("Apple M4 Max", "0", "true"),
        ("Apple Paravirtual device", "1", "false"),
        ("Apple M2", "1", "false"),
        ("none", "0", "false"),
    ],
)
def test_the_gpu_of_a_virtual_machine_decides_nothing(mac: Runner, gpu: str, virtual: str, trusted: str) -> None:
    script(mac.tools, "python", f'#!/bin/bash\necho "{gpu}"\n')
    script(mac.tools, "sysctl", f'#!/bin/bash\n[ "$*" = "-n kern.hv_vmm_present" ] && echo {virtual}\n')
    output = mac.tools / "output"
    done = mac.run(str(ROOT / ".ci" / "gpu"), PYTHON="python", GITHUB_OUTPUT=str(output))
    assert done.returncode == 0 and output.read_text() == f"trusted={trusted}\n"
    assert gpu in done.stdout and ("::warning" in done.stdout) == (trusted == "false")


def test_which_gpu_it_is_is_asked_of_this_package(mac: Runner) -> None:
    done = mac.run(str(ROOT / ".ci" / "gpu"), PYTHON=sys.executable, GITHUB_OUTPUT=str(mac.tools / "output"))
    assert done.returncode == 0 and re.match(r"GPU: (none|Apple .*); in a virtual machine: ", done.stdout)


def test_a_step_that_failed_and_decides_nothing_is_still_seen(mac: Runner) -> None:
    summary = mac.tools / "summary"
    given = ["kernels=failure", "reference=success", "everything=skipped"]
    done = mac.run(str(ROOT / ".ci" / "outcomes"), *given, GITHUB_STEP_SUMMARY=str(summary))
    assert done.returncode == 0 and done.stdout.count("::warning") == 1 and "::kernels failed" in done.stdout
    assert summary.read_text() == "kernels: failure\nreference: success\neverything: skipped\n"


WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}


def commands(workflow: str) -> list[str]:
    jobs: dict[str, Any] = WORKFLOWS[workflow]["jobs"]
    return [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("workflow", sorted(WORKFLOWS))
def test_a_workflow_names_targets_scripts_and_steps_that_exist(workflow: str) -> None:
    targets = set(re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), re.M))
    for command in commands(workflow):
        assert set(re.findall(r"\bmake ([\w-]+)", command)) <= targets
        for name in re.findall(r"(?<!\w)\.ci/[\w-]+", command):
            assert os.access(ROOT / name, os.X_OK), name
        assert subprocess.run(["bash", "-n", "-c", re.sub(r"\$\{\{.*?\}\}", "x", command)], check=False).returncode == 0
    for job in WORKFLOWS[workflow]["jobs"].values():
        ids = {step["id"] for step in job["steps"] if "id" in step}
        assert set(re.findall(r"\bsteps\.(\w+)", str(job))) <= ids


def test_on_a_mac_the_compiler_comes_before_any_test_and_only_the_gpu_is_advisory() -> None:
    steps = WORKFLOWS["ci"]["jobs"]["macos"]["steps"]
    runs = [step.get("run", "") for step in steps]
    tests = [i for i, run in enumerate(runs) if re.search(r"make test|doctor", run)]
    gpu, compiler = runs.index(".ci/gpu"), runs.index("make compile-metal")
    assert len(tests) == 4 and compiler < gpu < min(tests)
    advisory = [i for i, step in enumerate(steps) if "continue-on-error" in step]
    assert advisory == tests
    assert {steps[i]["continue-on-error"] for i in advisory} == {"${{ steps.gpu.outputs.trusted != 'true' }}"}
    kept = {step["with"]["path"]: i for i, step in enumerate(steps) if "upload-artifact" in step.get("uses", "")}
    assert all(steps[i]["if"] == "always()" for i in kept.values())
    report = next(i for i, run in enumerate(runs) if re.search(r"doctor --report build/report.json$", run))
    assert kept["build/metal"] > compiler and kept["build/report.json"] > report
    assert len({steps[i]["with"]["name"] for i in kept.values()}) == len(kept) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="MLX has another BLAS elsewhere")
def test_a_core_type_that_the_machine_cannot_do_is_named_and_running_none_is_a_failure() -> None:
    environment = os.environ | {"CORES": "Eniac", "THREADS": "1"}
    command = [str(ROOT / ".ci" / "test-blas"), "tests/house/test_ci.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ran (core type/threads): none\nnot on this machine: Eniac (computes as " in done.stdout
