"""Graphs of one's own: results against numpy, on one device and on two, inspected and drawn."""

from __future__ import annotations

import doctest
import math
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import quadriga
from quadriga import graph

Array = npt.NDArray[np.float32]


def random(*shape: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def feed_forward(up: Array, down: Array, rows: int) -> graph.Graph:
    g = graph.Graph()
    x = g.input("x", (rows, up.shape[1]))
    hidden = g.weight("up", up).mul_mat(x).silu().named("hidden")
    g.output("y", x + g.weight("down", down).mul_mat(hidden))
    return g


def expected(x: Array, up: Array, down: Array) -> Array:
    hidden = x @ up.T
    hidden = hidden / (1 + np.exp(-hidden))
    return x + hidden @ down.T


def test_a_graph_computes_what_numpy_does() -> None:
    up, down, x = random(96, 32, seed=1), random(32, 96, seed=2), random(5, 32, seed=3)
    plan = feed_forward(up, down, 5).plan(["cpu"], threads=2)
    session = plan.session()
    for scale in (1.0, 0.5):
        values = (x * scale).astype(np.float32)
        np.testing.assert_allclose(session.run(x=values)["y"], expected(values, up, down), rtol=1e-3, atol=1e-3)


def test_two_devices_compute_the_same() -> None:
    up, down, x = random(96, 32, seed=1), random(32, 96, seed=2), random(5, 32, seed=3)
    plan = feed_forward(up, down, 5).plan(["cpu", "sim:0"], pins={"up": "cpu", "down": "sim:0"})
    devices = {line["backend"] for line in plan.explain()["splits"]}
    assert len(devices) == 2, plan.details()
    np.testing.assert_allclose(plan.session().run(x=x)["y"], expected(x, up, down), rtol=1e-3, atol=1e-3)


def test_operators_and_shapes() -> None:
    g = graph.Graph()
    a, b = g.input("a", (2, 3)), g.input("b", (2, 3))
    assert (a.shape, a.dtype) == ((2, 3), "f32")
    g.output("sum", 2 * a + b / 4 - 1)
    g.output("max", a.concat(1, b).argmax())
    g.output("part", a.transpose().cont().slice(0, 1, 2).cont())
    g.output("softmax", a.soft_max(0.5))
    x, y = random(2, 3, seed=4), random(2, 3, seed=5)
    result = g.plan().session().run({"a": x, "b": y})
    np.testing.assert_allclose(result["sum"], 2 * x + y / 4 - 1, rtol=1e-5)
    assert result["max"].dtype == np.int32
    np.testing.assert_array_equal(result["max"].reshape(-1), np.concatenate([x, y], axis=1).argmax(axis=1))
    np.testing.assert_array_equal(result["part"], x.T[1:3])
    exp = np.exp(0.5 * x)
    np.testing.assert_allclose(result["softmax"], exp / exp.sum(axis=1, keepdims=True), rtol=1e-4)


def test_states_last_and_can_be_saved() -> None:
    g = graph.Graph()
    x, total = g.input("x", (4,)), g.state("total", (4,))
    g.output("total_now", (total + x).copy_into(total))
    plan = g.plan()
    session = plan.session()
    for _ in range(3):
        session.start(x=[1.0, 2.0, 3.0, 4.0])
    np.testing.assert_array_equal(session.read_state("total"), [3, 6, 9, 12])
    saved = session.save_state()
    session.clear_state()
    np.testing.assert_array_equal(session.read_state("total"), [0] * 4)
    other = plan.session()
    other.restore_state(saved)
    np.testing.assert_array_equal(other.run(x=[1.0] * 4)["total_now"], [4, 7, 10, 13])
    other.write_state("total", np.zeros(4, dtype=np.float32))
    np.testing.assert_array_equal(other.run(x=[1.0] * 4)["total_now"], [1] * 4)
    with pytest.raises(quadriga.StateError):
        other.restore_state(b"nothing")


def test_outputs_go_to_memory_of_the_caller() -> None:
    g = graph.Graph()
    g.output("y", g.input("x", (1000,)) * 3)
    session = g.plan().session()
    out = np.empty(1000, dtype=np.float32)
    session.start(x=np.ones(1000, dtype=np.float32))
    assert session.read("y", out) is out
    assert (out == 3).all()
    with pytest.raises(quadriga.GraphError, match="read-only"):
        out.flags.writeable = False
        session.read("y", out)


def test_dlpack_goes_in_and_out() -> None:
    class Foreign:
        """An array of another library: all that is known of it is DLPack's interface."""

        def __init__(self, array: Array) -> None:
            self.array = array

        def __dlpack__(self, **options: Any) -> Any:
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

    g = graph.Graph()
    g.output("y", g.input("x", (8,)).sqr())
    y = g.plan().session().run(x=Foreign(np.arange(8, dtype=np.float32)))["y"]
    np.testing.assert_array_equal(np.from_dlpack(y), np.arange(8, dtype=np.float32) ** 2)


def test_operations_in_python() -> None:
    @graph.operation(shape=lambda x, y: ("f32", [x[1][0], y[1][0]]))
    def distances(x: Array, y: Array) -> Array:
        return np.sqrt(((x[:, None] - y[None]) ** 2).sum(-1))

    @graph.operation()
    def reverse(x: Array) -> Array:
        return x[:, ::-1]

    g = graph.Graph()
    a, b = g.input("a", (3, 2)), g.input("b", (4, 2))
    g.output("d", reverse(distances(a * 2, b)) * 10)
    x, y = random(3, 2, seed=6), random(4, 2, seed=7)
    plan = g.plan()
    assert "distances" in plan.details()
    result = plan.session().run(a=x, b=y)["d"]
    wanted = 10 * np.sqrt(((2 * x[:, None] - y[None]) ** 2).sum(-1))[:, ::-1]
    np.testing.assert_allclose(result, wanted, rtol=1e-4)


def test_an_operation_that_fails_is_an_error_of_the_run() -> None:
    @graph.operation()
    def fails(x: Array) -> Array:
        raise ZeroDivisionError("my own operation") from KeyError("why")

    g = graph.Graph()
    g.output("y", fails(g.input("x", (4,))))
    session = g.plan().session()
    with pytest.raises(ZeroDivisionError, match="my own operation") as caught:
        session.run(x=[1.0] * 4)
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(ZeroDivisionError, match="my own operation"):
        session.observe(lambda seen: None, inputs={"x": [1.0] * 4})


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_an_exception_of_a_rule_is_raised_as_it_is(kind: type[BaseException]) -> None:
    def rule(x: Any) -> Any:
        raise kind("my own rule") from KeyError("why")

    @graph.operation(shape=rule)
    def fails(x: Array) -> Array:
        return x

    g = graph.Graph()
    with pytest.raises(kind, match="my own rule") as caught:
        fails(g.input("x", (4,)))
    assert isinstance(caught.value.__cause__, KeyError)


def test_observers_see_results_and_end_the_run() -> None:
    g = graph.Graph()
    x = g.input("x", (4,))
    root = (x - 1).named("shifted").sqrt().named("root")
    g.output("y", (root * 2).named("doubled"))
    session = g.plan().session()
    seen: dict[str, Any] = {}

    def look(observed: graph.Observed) -> bool:
        seen[observed.name] = observed.array
        return bool(np.isfinite(observed.array).all())

    with np.errstate(all="ignore"):
        assert session.observe(look, inputs={"x": [0.0, 1.0, 2.0, 5.0]}) is False
    assert list(seen) == ["shifted", "root"]
    assert session.observe(lambda observed: None, ["doubled"], {"x": [1.0] * 4}) is True

    def fail(observed: graph.Observed) -> None:
        raise KeyError("my observer")

    with pytest.raises(KeyError, match="my observer"):
        session.observe(fail, inputs={"x": [1.0] * 4})


def test_mistakes_are_raised_where_they_are_made() -> None:
    g = graph.Graph()
    a, b = g.input("a", (2, 3)), g.input("b", (4, 5))
    with pytest.raises(quadriga.GraphError, match="mul_mat"):
        a.mul_mat(b)
    with pytest.raises(quadriga.GraphError, match="has an error"):
        g.plan()
    other = graph.Graph()
    with pytest.raises(quadriga.GraphError, match="another graph"):
        _ = other.input("x", (2, 3)) + graph.Graph().input("a", (2, 3))
    with pytest.raises(quadriga.GraphError, match="f31"):
        other.input("y", (2,), "f31")
    other.output("y", other.input("z", (4,)).relu())
    session = other.plan().session()
    with pytest.raises(quadriga.GraphError, match="shape"):
        session.run(z=np.zeros(5, dtype=np.float32))
    with pytest.raises(quadriga.GraphError, match="F32"):
        session.run(z=np.zeros(4, dtype=np.int32))
    with pytest.raises(quadriga.GraphError, match="complex|c8"):
        session.run(z=np.zeros(4, dtype=np.complex64))
    with pytest.raises(quadriga.InvalidRequest, match="npu"):
        graph.Graph().plan(["npu"])


def test_quantized_weights() -> None:
    # Blocks of 32 elements: a scale in float16, and 4 bits for each element.
    rows, columns = 4, 64
    blocks = np.zeros((rows, columns // 32, 18), dtype=np.uint8)
    blocks[..., :2] = np.frombuffer(np.float16(0.5).tobytes(), dtype=np.uint8)
    blocks[..., 2:] = 0x9A
    g = graph.Graph()
    w = g.weight("w", blocks.reshape(-1), dtype="q4_0", shape=(rows, columns))
    g.output("y", w.mul_mat(g.input("x", (1, columns))))
    y = g.plan().session().run(x=np.ones((1, columns), dtype=np.float32))["y"]
    # The lower half of a byte, 10, is an element of the first half of the block; 8 is subtracted from each.
    np.testing.assert_allclose(y, [[64 / 2 * (2 + 1) * 0.5] * rows], rtol=1e-3)


def test_pictures_and_data_of_a_plan() -> None:
    plan = feed_forward(random(96, 32), random(32, 96), 5).plan()
    assert plan._repr_html_().lstrip().startswith("<svg")
    assert "<html" in plan.html("my plan") and "my plan" in plan.html("my plan")
    assert plan.dot().startswith("digraph")
    assert sum(device["weights"] for device in plan.memory()) >= 2 * 96 * 32 * 4
    assert "cpu" in str(plan)
    assert {"splits", "nodes"} <= plan.explain().keys()


def test_threads_wait_for_each_other_in_a_session() -> None:
    g = graph.Graph()
    g.output("y", g.input("x", (64, 64)).sqr().sum_rows())
    session = g.plan(threads=2).session()
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            x = random(64, 64, seed=seed)
            wanted = (x**2).sum(axis=1)
            for _ in range(50):
                # The thread's own result, not that of another.
                np.testing.assert_allclose(session.run(x=x)["y"].ravel(), wanted, rtol=1e-4)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_large_arrays_are_copied_once() -> None:
    # Another copy on the way would be another 100 MB at the peak.
    script = """
import numpy as np
from quadriga import graph

def kib(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name))

def growth(work):
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # the peak is what is used now
    before = kib("VmRSS")
    work()
    return (kib("VmHWM") - before) // 1024

count = 25_000_000
values = np.ones(count, dtype=np.float32)
out = np.ones(count, dtype=np.float32)
g = graph.Graph()
g.output("y", g.input("x", (count,)) * 2)
session = g.plan(["cpu"]).session()
session.run(x=values)
print(growth(lambda: session.set("x", values)) < 20)
session.start()
print(growth(lambda: session.read("y", out)) < 20)
# The new array, and nothing else.
print(growth(lambda: session.run(x=values)) < 120)
assert out[0] == out[-1] == 2
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.stdout == "True\nTrue\nTrue\n", ended.stderr


def test_powers_quotients_and_products_are_those_of_numpy() -> None:
    values = np.array([[0.5, -2.0, 3.0], [np.inf, 1e30, -1e-30]], dtype=np.float32)
    other = np.arange(12, dtype=np.float32).reshape(3, 4)
    g = graph.Graph()
    x, y, v = g.input("x", (2, 3)), g.input("y", (3, 4)), g.input("v", (3,))
    expected: dict[str, Any] = {}
    with np.errstate(all="ignore"):
        for power in (1, 2, 3, 7, -1, -2, 0.5):
            g.output(f"power {power}", x**power)
            expected[f"power {power}"] = values.astype(np.float32) ** np.float32(power)
        g.output("root", x.abs() ** 0.25)
        expected["root"] = np.abs(values) ** 0.25
        for number in (1, -2.5):
            g.output(f"{number} / x", number / x)
            expected[f"{number} / x"] = np.float32(number) / values
        g.output("x @ y", x @ y)
        expected["x @ y"] = values @ other
        g.output("x @ v", x @ v)
        expected["x @ v"] = values @ other[:, 1]
        g.output("v @ y", v @ y)
        expected["v @ y"] = other[:, 1] @ other
        g.output("v @ v", v @ v)
        expected["v @ v"] = other[:, 1] @ other[:, 1]
        g.output("least", x.clamp(0.0, math.inf))
        expected["least"] = np.maximum(values, 0)
        g.output("most", x.clamp(-math.inf, 1))
        expected["most"] = np.minimum(values, 1)
    found = g.plan().session().run(x=values, y=other, v=other[:, 1].copy())
    for name, array in expected.items():
        assert found[name].shape == np.shape(array), name
        np.testing.assert_allclose(found[name], array, rtol=1e-5, err_msg=name)
    with pytest.raises(quadriga.GraphError, match="clamp: max"):
        x.clamp(0, math.nan)
    anything: Any = "text"
    with pytest.raises(TypeError):
        _ = x @ anything


def test_examples_of_the_documentation_run() -> None:
    assert doctest.testmod(quadriga).failed == 0
    found = doctest.testmod(graph)
    assert found.attempted > 5 and found.failed == 0


def test_outputs_that_are_views_have_their_elements_in_order() -> None:
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for devices in (["cpu"], ["sim:0", "cpu"]):
        g = graph.Graph()
        value = g.input("x", (2, 3, 4))
        g.output("transposed", value.transpose())
        g.output("permuted", value.permute((2, 0, 1)))
        g.output("part", value.slice(2, 1, 2))
        session = g.plan(devices).session()
        found = session.run(x=x)
        assert np.array_equal(found["transposed"], x.transpose(0, 2, 1))
        assert np.array_equal(found["permuted"], x.transpose(2, 0, 1))
        assert np.array_equal(found["part"], x[:, :, 1:3])
        assert np.array_equal(session.read("part"), x[:, :, 1:3])


def test_weights_are_not_taken_for_another_type_or_shape() -> None:
    def session_of(weight: Callable[[graph.Graph], graph.Value]) -> graph.Session:
        g = graph.Graph()
        g.output("y", weight(g) * 2)
        return g.plan(["cpu"]).session()

    integers = np.array([1, 2, 3, 4], np.int32)
    with pytest.raises(quadriga.GraphError, match="w has type F32, the array I32"):
        graph.Graph().weight("w", integers, dtype="f32")
    with pytest.raises(quadriga.GraphError, match="c has type F32, the array F64"):
        graph.Graph().constant("c", np.ones(2), dtype="f32", shape=(4,))
    with session_of(lambda g: g.weight("w", dtype="f32", shape=(4,))) as session:
        for wrong in (integers, np.ones(2), np.ones(4)):
            with pytest.raises(quadriga.GraphError, match="w has type F32"):
                session.set_weight("w", wrong)
        with pytest.raises(quadriga.GraphError, match="w has the shape"):
            session.set_weight("w", np.ones((2, 2), np.float32))
        session.set_weight("w", [1, 2, 3, 4])
        assert session.run()["y"].tolist() == [2, 4, 6, 8]
        session.set_weight("w", np.array([4, 3, 2, 1], np.float32).view(np.uint8))
        assert session.run()["y"].tolist() == [8, 6, 4, 2]
    with session_of(lambda g: g.weight("w", [0.5, 1.5])) as session:
        assert session.run()["y"].tolist() == [1, 3]
