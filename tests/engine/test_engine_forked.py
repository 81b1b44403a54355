"""An engine does not survive a fork, and says so: the child's calls raise at once, and the parent notices nothing."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from support.programs import outcome

FORK = """
import faulthandler, os, time
from cortexmlx.errors import EngineClosed, ForkedProcess
P = SamplingParams(max_tokens=480, ignore_eos=True)
FEW = SamplingParams(max_tokens=8, ignore_eos=True)

def raises(call):
    try:
        call()
    except ForkedProcess as error:
        assert "spawn" in str(error)
    else:
        raise AssertionError("no error")

def begun(child, end=os._exit):
    "The process of a child that carries out `child`; one that hangs is ended. To end as programs do takes a while."
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    child()
    end(3)

def code_of(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def forked(child, end=os._exit):
    return code_of(begun(child, end))
"""

CHILDREN = {
    "answers as they complete": """
completed = e.as_completed([[1, 2, 3]] * 2, [FEW, P])
assert next(completed)[0] == 0
def child():
    raises(lambda: next(completed))
    completed.close()
""",
    "what was in flight": """
def child():
    raises(handle.result)
    raises(lambda: list(handle))
    raises(lambda: list(stream))
    handle.cancel()
    stream.close()
""",
    "every call": """
def child():
    raises(lambda: e.submit([1], P))
    raises(lambda: e.generate([1]))
    raises(lambda: e.generate_batch([[1], [2]]))
    raises(lambda: e.stream([1]))
    raises(lambda: e.encode("text"))
    raises(e.stats)
    raises(e.check_invariants)
    raises(lambda: e.on_memory_pressure("critical"))
    raises(lambda: e.submit([1], on_event=print))
    raises(lambda: e.decode([1]))
    raises(lambda: e.count_tokens("text"))
    raises(lambda: e.pin([1] * 16))
    raises(lambda: e.perplexity("a text that is scored"))
    raises(lambda: e.inspect(print))
    raises(lambda: next(e.as_completed([[1]])))
    raises(lambda: e.conversation().ask("a question"))
""",
    "closing": """
def child():
    with e:
        pass
    e.close()
""",
    "collecting": """
def child():
    global e, handle, stream
    del e, handle, stream
    import gc; gc.collect()
""",
    "exit": "def child(): pass",
    "another engine": "def child(): raises(engine)",
    "asyncio": """
def child():
    import asyncio
    async def read():
        await anext(e.astream([1]))
    raises(lambda: asyncio.run(read()))
    raises(lambda: asyncio.run(e.agenerate([1])))
    async def another():
        async with Engine.open(sys.argv[1]):
            pass
    raises(lambda: asyncio.run(another()))
    asyncio.run(e.aclose())
""",
    "a child of the child": """
def child():
    faulthandler.cancel_dump_traceback_later()  # its thread would not be in a child of this one
    def grandchild():
        raises(engine)
        raises(e.stats)
    assert forked(grandchild) == 3
""",
}


def test_in_a_forked_child_nothing_hangs_and_the_parent_goes_on(tiny: Any) -> None:
    """All children are there at once, while the parent answers; those that ask for what is in flight come first."""
    program = f"""{FORK}
e = engine()
wanted = e.generate([1, 2, 3], P).token_ids
children = {{}}
handle = e.submit([1, 2, 3], P)
stream = e.stream([1, 2, 3], P)
next(stream), next(iter(handle))
for name, text in {CHILDREN!r}.items():
    exec(text)
    children[name] = begun(child, sys.exit if name in ("exit", "collecting") else os._exit)
assert handle.result().token_ids == wanted
*_, last = stream
assert last.completion.token_ids == wanted
[(index, whole)] = completed
assert index == 1 and whole.token_ids == wanted
print({{name: code_of(pid) for name, pid in children.items()}})
"""
    code, output, errors = outcome(program, tiny("one layer"))
    assert (code, errors) == (0, "")
    assert output.strip() == str(dict.fromkeys(CHILDREN, 3))


def test_a_fork_while_other_threads_hold_every_lock(tiny: Any) -> None:
    """Threads that submit, read and ask without a pause; a dozen children close and ask."""
    program = f"""{FORK}
import threading
e = engine()
stop = threading.Event()
handles = []

def work():
    while not stop.is_set():
        handles.append(e.submit([1, 2, 3], FEW))
        handles[-1].result()
        e.stats(), e.encode("text")

threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads: thread.start()

def child():
    raises(e.stats)
    raises(lambda: e.encode("text"))
    for handle in list(handles):
        try: handle.result()
        except ForkedProcess: pass
    e.close()

codes = [forked(child) for _ in range(12)]
stop.set()
for thread in threads: thread.join()
print(codes == [3] * 12, codes)
"""
    code, output, errors = outcome(program, tiny("one layer"))
    assert (code, output[:4], errors) == (0, "True", ""), output


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "on_exit"), reason="only glibc can end a process so")
def test_a_child_runs_no_destructor_that_the_parent_registered(tiny: Any) -> None:
    """`abort` stands for a destructor of mlx that meets what another thread was changing. What C has buffered comes."""
    program = f"""{FORK}
import ctypes
libc = ctypes.CDLL(None)
libc["__cxa_atexit"](libc.abort, None, None)
e = engine()
def child():
    print("of Python")
    libc.printf(b"of C,")
print(forked(child, sys.exit), flush=True)
os._exit(0)
"""
    code, output, errors = outcome(program, tiny("one layer"))
    assert (code, errors) == (0, "")
    assert output in ("of Python\nof C,3\n", "of C,of Python\n3\n"), "PYTHONUNBUFFERED makes Python the first"


def test_a_child_makes_an_engine_only_where_its_parent_never_made_one(tiny: Any) -> None:
    """One that was closed before the fork stays so, and the parent makes another."""
    program = f"""{FORK}
def first():
    assert len(engine().generate([1, 2, 3], FEW).token_ids) == 8
print(forked(first, sys.exit))
e = engine()
e.close()
def child():
    e.close()
    raises(e.stats)
    raises(engine)
print(forked(child), len(engine().generate([1], FEW).token_ids))
"""
    assert outcome(program, tiny("one layer")) == (0, "3\n3 8\n", "")
