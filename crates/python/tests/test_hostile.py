"""What careless programs do: wrong arrays, calls from callbacks, models that nobody keeps. All of it is an error that says so."""

from __future__ import annotations

import gc
import itertools
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import quadriga
from hub_server import hub
from quadriga import graph

Array = npt.NDArray[np.float32]


def doubled() -> graph.Session:
    g = graph.Graph()
    g.output("y", g.input("x", (2, 3)) * 2)
    return g.plan().session()


def test_arrays_of_any_layout_go_in() -> None:
    session = doubled()
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for same in (x[:, ::-1], x[::-1], np.asfortranarray(x), np.broadcast_to(np.float32(3), (2, 3)), x.view(Liar)):
        np.testing.assert_array_equal(session.run(x=same)["y"], 2 * np.array(same))
    x.flags.writeable = False
    np.testing.assert_array_equal(session.run(x=x)["y"], 2 * x)


class Liar(np.ndarray[Any, np.dtype[np.float32]]):
    """An array that says that it has a billion elements at the address 1."""

    @property
    def __array_interface__(self) -> dict[str, Any]:  # type: ignore[override]
        return {"version": 3, "typestr": "<f4", "shape": (10**9,), "data": (1, False)}


@pytest.mark.parametrize(
    "values",
    [
        np.float32(3),
        np.zeros((0, 3), dtype=np.float32),
        np.zeros((3, 2), dtype=np.float32),
        np.zeros((2, 3), dtype=">f4"),
        np.zeros((2, 3), dtype=bool),
        np.zeros(23, dtype=np.uint8),
        np.array([[object()] * 3] * 2),
        None,
        "text",
        [[1.0], [2.0, 3.0]],
    ],
)
def test_other_arrays_are_refused(values: Any) -> None:
    session = doubled()
    with pytest.raises(ValueError):
        session.run(x=values)
    assert (session.run(x=np.ones((2, 3), dtype=np.float32))["y"] == 2).all()


def test_outputs_are_not_read_as_something_else() -> None:
    session = doubled()
    session.start(x=np.ones((2, 3), dtype=np.float32))
    out: Any
    for out in (
        np.zeros((2, 3), dtype=np.int32),
        np.zeros((3, 2), dtype=np.float32),
        np.zeros((2, 6), dtype=np.float32)[:, ::2],
        np.zeros((2, 3), dtype=np.float64),
        np.broadcast_to(np.float32(1), (2, 3)),
        [1.0],
    ):
        with pytest.raises(quadriga.GraphError):
            session.read("y", out)
    assert session.read("y", np.zeros(24, dtype=np.uint8)).view(np.float32)[5] == 2


def test_mistakes_in_the_first_tensor_are_raised_there() -> None:
    for make in (
        lambda g: g.input("x", (2**62, 2**62)),
        lambda g: g.input("x", (-1, 2)),
        lambda g: g.input("x", (2**70,)),
        lambda g: g.weight("w", np.zeros(5, dtype=np.uint8), dtype="q4_0", shape=(1, 32)),
        lambda g: g.weight("w", np.zeros(4, dtype=np.float32), dtype="f16"),
        lambda g: g.constant("c", np.zeros(4, dtype=np.float32), shape=(5,)),
        lambda g: g.arange(0, 10, 0),
    ):
        with pytest.raises(quadriga.GraphError):
            make(graph.Graph())


def test_numbers_of_numpy_and_others() -> None:
    g = graph.Graph()
    x = g.input("x", (2,))
    g.output("y", np.float32(2) * x + np.int64(1))
    np.testing.assert_array_equal(g.plan().session().run(x=[1.0, 2.0])["y"], [3, 5])
    g = graph.Graph()
    x = g.input("x", (2,))
    with pytest.raises(quadriga.GraphError, match="scale.*nan"):
        x.scale(float("nan"))
    other: Any
    for other in ("a", None, np.zeros(2)):
        with pytest.raises(TypeError):
            _ = x + other


def test_callbacks_cannot_wait_for_what_waits_for_them() -> None:
    session = doubled()
    refused: list[str] = []

    def look(seen: graph.Observed) -> None:
        for use in (lambda: session.run(x=np.ones((2, 3), dtype=np.float32)), lambda: session.read("y"), session.close):
            with pytest.raises(quadriga.GraphError, match="in use"):
                use()
            refused.append(seen.name)

    assert session.observe(look, inputs={"x": np.ones((2, 3), dtype=np.float32)})
    assert len(refused) == 3

    g = graph.Graph()

    def rule(x: Any) -> tuple[str, list[int]]:
        with pytest.raises(quadriga.GraphError, match="in use"):
            g.input("more", (2,))
        return x

    @graph.operation(shape=rule)
    def runs_itself(x: Array) -> Array:
        own.run(x=x)
        return x

    g.output("y", runs_itself(g.input("x", (2,))))
    own = g.plan().session()
    with pytest.raises(quadriga.GraphError, match="in use"):
        own.run(x=[1.0, 2.0])


def test_a_logits_processor_cannot_wait_for_its_model(tiny_path: Path) -> None:
    model = quadriga.Model(tiny_path, n_ctx=256)
    done: list[str] = []

    def process(tokens: object, logits: object) -> None:
        for use in (lambda: model.generate([1, 2], max_tokens=1), model.clear_cache, lambda: model.save_state([1]), model.close):
            with pytest.raises(quadriga.InvalidRequest, match="logits processor"):
                use()
        done.append(model.detokenize(model.tokenize("abc")))

    assert model.generate([1, 2], max_tokens=2, ignore_eos=True, logits_processors=[process]).usage.completion_tokens == 2
    assert done == ["abc", "abc"]
    with quadriga.Model(tiny_path, n_ctx=256) as other:
        wanted = other.generate([1, 2, 3], max_tokens=2, temperature=0, ignore_eos=True).tokens
        found: list[list[int]] = []

        def ask(tokens: object, logits: object) -> None:
            found.append(other.generate([1, 2, 3], max_tokens=2, temperature=0, ignore_eos=True).tokens)

        model.generate([1], max_tokens=1, logits_processors=[ask])
        assert found == [wanted]
    model.close()


def test_an_answer_keeps_its_model(tiny_path: Path) -> None:
    stream = quadriga.Model(tiny_path, n_ctx=256).generate([1, 2, 3], stream=True, max_tokens=5, ignore_eos=True)
    gc.collect()
    assert len(list(stream)) == 5


def test_exceptions_of_signal_handlers_end_a_wait(tiny: quadriga.Model) -> None:
    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    def interrupt(tokens: object, logits: object) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    previous = signal.signal(signal.SIGUSR1, stop)
    try:
        with pytest.raises(Stop):
            # Without the exception it would wait for a thousand tokens.
            tiny.generate([1, 2], ignore_eos=True, logits_processors=[interrupt])
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        while tiny.facts["running"] > 0:
            pass
        signal.signal(signal.SIGUSR1, previous)


def test_wrong_logits_processors(tiny: quadriga.Model) -> None:
    def shorter(tokens: object, logits: Array) -> Array:
        return logits[:-1]

    def nan(tokens: object, logits: Array) -> None:
        logits[:] = np.nan

    processors: Any
    for processors, error in (([shorter], ValueError), ([nan], quadriga.Error), ([3], TypeError)):
        with pytest.raises(error):
            tiny.generate([1, 2], max_tokens=2, logits_processors=processors)
    kept: list[Array] = []
    tiny.generate([1, 2], max_tokens=2, ignore_eos=True, logits_processors=[lambda t, l: kept.append(l)])
    # The arrays belong to those who keep them.
    assert len(kept) == 2 and not any(np.isnan(logits).any() for logits in kept)


def test_wrong_arguments_are_named(tiny: quadriga.Model) -> None:
    wrong: Any
    for wrong in (b"abc", None, 3, [1.5]):
        with pytest.raises(TypeError):
            tiny.generate(wrong, max_tokens=1)
    with pytest.raises(TypeError, match="list"):
        wrong = {"role": "user", "content": "Hi"}
        tiny.chat(wrong)
    with pytest.raises(TypeError):
        wrong = None
        tiny.embed(wrong)
    for use in (tiny.generate, tiny.detokenize, tiny.logits, tiny.save_state):
        with pytest.raises(quadriga.InvalidRequest, match="-1"):
            use([-1])
    with pytest.raises(quadriga.InvalidRequest, match="finite"):
        tiny.generate([1], temperature=float("nan"), max_tokens=1)
    with pytest.raises(ValueError, match="surrogate"):
        tiny.generate("\ud800", max_tokens=1)
    # More texts than one call of the native part takes.
    assert tiny.embed(["a"] * 130).shape == (130, tiny.n_embd)
    assert tiny.generate(np.array([1, 2, 3]).tolist(), max_tokens=1, ignore_eos=True).usage.completion_tokens == 1


def test_a_hub_is_asked_for_what_was_named(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tmp_path / "files"
    files.mkdir()
    (files / "tiny-Q4_0.gguf").write_bytes(tiny_path.read_bytes())
    with hub(files) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        # A type that the repository lacks means the best that fits, as for the command.
        with pytest.warns(UserWarning, match="has no Q8_0, only Q4_0: Q4_0 is taken"):
            quadriga.Model("tests/tiny:Q8_0", cache_dir=tmp_path / "cache", n_ctx=256).close()
        with pytest.raises(quadriga.HubError):
            quadriga.Model("tests/other", cache_dir=tmp_path / "cache")
        with quadriga.Model("tests/tiny", cache_dir=tmp_path / "cache", n_ctx=256) as model:
            assert model.generate([1, 2], max_tokens=1, ignore_eos=True).usage.completion_tokens == 1
        server.shutdown()
    with quadriga.Model("tests/tiny:Q4_0", cache_dir=tmp_path / "cache", n_ctx=256) as model:
        assert model.n_vocab == 512


def test_threads_use_a_model_a_session_and_a_stream_together(tmp_path: Path) -> None:
    path = tmp_path / "exact.gguf"
    # In float32 an answer does not depend on what is computed beside it.
    command = [sys.executable, "-m", "quadriga", "synth", "-o", str(path), "--type", "f32"]
    subprocess.run(command, check=True, capture_output=True)
    session = doubled()
    with quadriga.Model(path, n_ctx=256, cache_type="f32") as model:

        def answer(number: int) -> list[int]:
            return model.generate([number + 3, 5, 6], temperature=0, max_tokens=6, ignore_eos=True).tokens

        wanted = [answer(number) for number in range(8)]
        shared = model.generate([1, 2, 3], stream=True, ignore_eos=True, max_tokens=60)

        def work(seed: int) -> int:
            choose, pieces = random.Random(seed), 0
            for _ in range(30):
                number = choose.randrange(8)
                match number % 4:
                    case 0:
                        assert answer(number) == wanted[number]
                    case 1:
                        assert set(session.run(x=np.full((2, 3), seed, dtype=np.float32))["y"].flat) <= set(range(0, 16, 2))
                    case 2:
                        pieces += len(list(itertools.islice(shared, 2)))
                    case _:
                        with model.generate([number, 2], stream=True, ignore_eos=True, logits_processors=[lambda t, l: l]) as own:
                            next(own)
            return pieces

        with ThreadPoolExecutor(8) as pool:
            taken = sum(pool.map(work, range(8)))
        # Every piece went to one thread.
        assert taken + len(list(shared)) == 60
