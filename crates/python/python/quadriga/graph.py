"""Tensor graphs of one's own: built, planned for any devices, run and inspected.

>>> import numpy as np
>>> from quadriga import graph
>>> g = graph.Graph()
>>> x = g.input("x", (2, 3))
>>> w = g.weight("w", np.eye(4, 3, dtype=np.float32))
>>> g.output("y", w.mul_mat(x).relu())
>>> session = g.plan(["cpu"]).session()
>>> session.run(x=np.ones((2, 3), dtype=np.float32))["y"].shape
(2, 4)

Shapes are written outermost dimension first, as numpy does. Inputs are numpy arrays, or anything with DLPack's interface.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ._arrays import as_bound, as_converted, as_count, as_dims, as_number, as_parameter
from ._quadriga import CustomOperation, GraphCore
from ._session import Observed, Plan, Session, TensorInfo
from .errors import GraphError

__all__ = ["Graph", "Observed", "Operation", "Plan", "Scope", "Session", "TensorInfo", "Value", "operation"]


class Value:
    """A tensor of a graph that is being built."""

    __slots__ = ("_graph", "_number", "dtype", "shape")

    #: numpy leaves arithmetic with a value to the value, instead of applying it to each of its own elements.
    __array_ufunc__ = None

    def __init__(self, graph: Graph, number: int, dtype: str, shape: Sequence[int]) -> None:
        self._graph = graph
        self._number = number
        #: The element type, such as `f32`.
        self.dtype = dtype
        #: The shape.
        self.shape = tuple(shape)

    def __repr__(self) -> str:
        return f"<Value {self.dtype} {list(self.shape)}>"

    def _apply(self, name: str, *others: Value, **parameters: Any) -> Value:
        return self._graph.apply(name, self, *others, **parameters)

    def named(self, label: str) -> Value:
        """Labels the value: its name in plans, in messages and for observers."""
        self._graph.core.label(self._number, label)
        return self

    # Arithmetic. The second operand is repeated to the shape of the first.

    def __add__(self, other: Value | float) -> Value:
        return self._apply("add", other) if isinstance(other, Value) else self.scale(1.0, as_number(other))

    def __radd__(self, other: float) -> Value:
        return self.scale(1.0, as_number(other))

    def __sub__(self, other: Value | float) -> Value:
        return self._apply("sub", other) if isinstance(other, Value) else self.scale(1.0, -as_number(other))

    def __rsub__(self, other: float) -> Value:
        return self.scale(-1.0, as_number(other))

    def __mul__(self, other: Value | float) -> Value:
        return self._apply("mul", other) if isinstance(other, Value) else self.scale(as_number(other))

    def __rmul__(self, other: float) -> Value:
        return self.scale(as_number(other))

    def __truediv__(self, other: Value | float) -> Value:
        return self._apply("div", other) if isinstance(other, Value) else self.scale(1.0 / as_number(other))

    def __rtruediv__(self, other: float) -> Value:
        number = as_number(other)
        # Limited to a range of one number, every element is that number.
        return self.clamp(number, number)._apply("div", self)

    def __pow__(self, exponent: float) -> Value:
        power = as_number(exponent)
        if power == 0.5:
            return self.sqrt()
        if not power.is_integer():
            # Negative elements have no such power: as in numpy, it is NaN.
            return (self.log() * power).exp()
        if power <= 0:
            return self.clamp(1.0, 1.0) if power == 0 else 1.0 / self**-power
        return self._whole_power(int(power))

    def _whole_power(self, power: int) -> Value:
        """A power from 1 on, by repeated squaring."""
        if power == 1:
            return self
        squared = self._whole_power(power // 2).sqr()
        return squared * self if power % 2 else squared

    def __matmul__(self, other: Value) -> Value:
        """The product `[…, m, k] @ […, k, n]`, with vectors as in numpy. Weights that are stored as `[n, k]` need no
        transposed copy with `mul_mat`."""
        if not isinstance(other, Value):  # pyright: ignore[reportUnnecessaryIsInstance]
            return NotImplemented
        if not self.shape or not other.shape:
            raise GraphError("@ needs operands with at least one dimension")
        left = self if len(self.shape) > 1 else self.reshape((1, *self.shape))
        right = other.transpose().cont() if len(other.shape) > 1 else other.reshape((1, *other.shape))
        product = right.mul_mat(left)
        shape = list(product.shape)
        if len(other.shape) == 1:
            shape.pop()
        if len(self.shape) == 1:
            del shape[-1 if len(other.shape) == 1 else -2]
        return product if len(shape) == len(product.shape) else product.reshape(shape)

    def __neg__(self) -> Value:
        return self._apply("neg")

    def scale(self, scale: float, bias: float = 0.0) -> Value:
        """`scale · self + bias`."""
        return self._apply("scale", scale=scale, bias=bias)

    def clamp(self, min: float, max: float) -> Value:
        """Each element limited to a range, whose ends may be infinite."""
        return self._apply("clamp", min=as_bound("clamp: min", min), max=as_bound("clamp: max", max))

    def sqr(self) -> Value:
        """Squares."""
        return self._apply("sqr")

    def sqrt(self) -> Value:
        """Square roots."""
        return self._apply("sqrt")

    def log(self) -> Value:
        """Natural logarithms."""
        return self._apply("log")

    def exp(self) -> Value:
        """Exponentials."""
        return self._apply("exp")

    def sin(self) -> Value:
        """Sines."""
        return self._apply("sin")

    def cos(self) -> Value:
        """Cosines."""
        return self._apply("cos")

    def abs(self) -> Value:
        """Absolute values."""
        return self._apply("abs")

    def relu(self) -> Value:
        """`max(x, 0)`."""
        return self._apply("relu")

    def gelu(self) -> Value:
        """GELU by the tanh approximation."""
        return self._apply("gelu")

    def gelu_erf(self) -> Value:
        """GELU by the error function."""
        return self._apply("gelu_erf")

    def silu(self) -> Value:
        """`x · sigmoid(x)`."""
        return self._apply("silu")

    def sigmoid(self) -> Value:
        """`1 / (1 + exp(-x))`."""
        return self._apply("sigmoid")

    def tanh(self) -> Value:
        """Hyperbolic tangents."""
        return self._apply("tanh")

    def softplus(self) -> Value:
        """`ln(1 + exp(x))`."""
        return self._apply("softplus")

    def swiglu(self, up: Value) -> Value:
        """`silu(self) · up`."""
        return self._apply("swiglu", up)

    # Rows.

    def norm(self, eps: float = 1e-5) -> Value:
        """Layer norm without weights."""
        return self._apply("norm", eps=eps)

    def rms_norm(self, eps: float = 1e-5) -> Value:
        """Rows divided by their root mean square."""
        return self._apply("rms_norm", eps=eps)

    def l2_norm(self, eps: float = 1e-5) -> Value:
        """Rows divided by their Euclidean length."""
        return self._apply("l2_norm", eps=eps)

    def group_norm(self, groups: int, eps: float = 1e-5) -> Value:
        """Groups of channels normalized to mean 0 and variance 1."""
        return self._apply("group_norm", groups=groups, eps=eps)

    def soft_max(self, scale: float = 1.0, mask: Value | None = None, sinks: Value | None = None) -> Value:
        """Softmax along rows of `scale · self + mask`."""
        others = [value for value in (mask, sinks) if value is not None]
        return self._apply("soft_max", *others, scale=scale, mask=mask is not None, sinks=sinks is not None)

    def sum(self) -> Value:
        """The sum of all elements."""
        return self._apply("sum")

    def sum_rows(self) -> Value:
        """The sum of each row."""
        return self._apply("sum_rows")

    def mean(self) -> Value:
        """The mean of each row."""
        return self._apply("mean")

    def argmax(self) -> Value:
        """The index of each row's largest element."""
        return self._apply("argmax")

    def argsort(self, descending: bool = False) -> Value:
        """The indices that sort each row."""
        return self._apply("argsort", descending=descending)

    def top_k(self, k: int) -> Value:
        """The indices of each row's `k` largest elements."""
        return self._apply("top_k", k=k)

    # Matrices and attention.

    def mul_mat(self, x: Value) -> Value:
        """Matrix multiplication with these weights: `[n, k]` and `x […, m, k]` give `x · selfᵀ […, m, n]`."""
        return self._apply("mul_mat", x)

    def mul_mat_id(self, x: Value, ids: Value) -> Value:
        """Matrix multiplication with the selected experts of `[e, n, k]`."""
        return self._apply("mul_mat_id", x, ids)

    def out_prod(self, other: Value) -> Value:
        """The sum of outer products: `[…, k, p]` and `[…, k, q]` give `[…, q, p]`."""
        return self._apply("out_prod", other)

    def rope(
        self, positions: Value, dims: int, *, base: float = 10000.0, half: bool = False, scale: float = 1.0
    ) -> Value:
        """Rotary position embedding of `[…, tokens, heads, d]`; `half` pairs elements as GPT-NeoX does."""
        return self._apply("rope", positions, dims=dims, base=base, half=half, scale=scale)

    def attention(
        self,
        keys: Value,
        values: Value,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        mask: Value | None = None,
        spans: Value | None = None,
        sinks: Value | None = None,
    ) -> Value:
        """Attention of queries `[b, h, t, d]` over keys and values; `spans` has the first visible key and one past the last."""
        optional = {"mask": mask, "spans": spans, "sinks": sinks}
        others = [value for value in optional.values() if value is not None]
        flags = {name: value is not None for name, value in optional.items()}
        return self._apply("attention", keys, values, *others, scale=scale, soft_cap=soft_cap, **flags)

    def diag_mask_inf(self, past: int = 0) -> Value:
        """`-inf` where `column > past + row`."""
        return self._apply("diag_mask_inf", past=past)

    def get_rows(self, ids: Value) -> Value:
        """Gathers the rows with these indices."""
        return self._apply("get_rows", ids)

    def set_rows(self, rows: Value, ids: Value) -> Value:
        """Overwrites the rows with these indices; returns the tensor after the write."""
        return self._apply("set_rows", rows, ids)

    # Types, shapes and views.

    def cast(self, dtype: str) -> Value:
        """A contiguous copy in another type."""
        return self._apply("cast", dtype=dtype)

    def cont(self) -> Value:
        """A contiguous copy."""
        return self._apply("cont")

    def copy_into(self, target: Value) -> Value:
        """Copies these elements to a state or result; returns the target after the write."""
        return self._apply("copy_into", target)

    def concat(self, axis: int, *others: Value) -> Value:
        """Concatenates tensors along a dimension."""
        return self._apply("concat", *others, axis=axis)

    def repeat(self, shape: Sequence[int]) -> Value:
        """Repeats the tensor to fill a shape."""
        return self._apply("repeat", shape=as_dims("repeat", shape))

    def pad(self, after: Sequence[int]) -> Value:
        """Appends zeros along the innermost dimensions."""
        return self._apply("pad", after=as_dims("pad", after))

    def reshape(self, shape: Sequence[int]) -> Value:
        """The same elements under another shape."""
        return self._apply("reshape", shape=as_dims("reshape", shape))

    def slice(self, axis: int, start: int, length: int) -> Value:
        """Elements along a dimension, as a view."""
        return self._apply("slice", axis=axis, start=start, length=length)

    def permute(self, axes: Sequence[int]) -> Value:
        """Reorders the dimensions, as a view."""
        return self._apply("permute", axes=as_dims("permute", axes))

    def transpose(self) -> Value:
        """Swaps the two innermost dimensions, as a view."""
        return self._apply("transpose")


class Operation:
    """An operation in Python, for prototypes: a function of numpy arrays.

    It runs on the CPU, on any thread, holds the GIL, and gets copies of its inputs. What it raises, the run raises. `shape` infers the type and shape of the result from
    those of the inputs; by default they are those of the first.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        shape: Callable[..., tuple[str, Sequence[int]]] | None = None,
        name: str | None = None,
    ) -> None:
        def infer(inputs: list[tuple[str, list[int]]]) -> tuple[str, list[int]]:
            if shape is None:
                return inputs[0]
            dtype, dims = shape(*inputs)
            return dtype, list(dims)

        def compute(inputs: list[tuple[bytes, str, list[int]]], dtype: str, dims: list[int]) -> bytes:
            arrays: list[npt.NDArray[Any]] = []
            for data, of, of_dims in inputs:
                flat: npt.NDArray[Any] = np.frombuffer(data, dtype=of)
                arrays.append(np.reshape(flat, of_dims))
            result = np.asarray(function(*arrays), dtype=dtype)
            if list(result.shape) != dims:
                raise ValueError(f"the operation returned the shape {list(result.shape)}; its rule says {dims}")
            return result.tobytes()

        self.name = name or getattr(function, "__name__", "operation")
        self.core = CustomOperation(self.name, infer, compute)

    def __call__(self, first: Value, *others: Value) -> Value:
        """Applies the operation to values of a graph."""
        return first._graph.apply("custom", first, *others, operation=self)  # pyright: ignore[reportPrivateUsage]


def operation(
    shape: Callable[..., tuple[str, Sequence[int]]] | None = None,
) -> Callable[[Callable[..., Any]], Operation]:
    """Makes an `Operation` of a function: a decorator."""

    def decorate(function: Callable[..., Any]) -> Operation:
        return Operation(function, shape)

    return decorate


class Scope:
    """A scope of names, for a `with` statement.

    It is no generator: one that is still open would close its scope when the interpreter ends, and the graph is gone then.
    """

    def __init__(self, graph: Graph, name: str) -> None:
        self._graph, self._name = graph, name

    def __enter__(self) -> Graph:
        self._graph.core.open_scope(self._name)
        return self._graph

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._graph.core.close_scope()


class Graph:
    """A graph that is being built. Planning finishes it."""

    def __init__(self) -> None:
        self.core = GraphCore()

    def _value(self, built: tuple[int, str, list[int]]) -> Value:
        return Value(self, *built)

    def input(self, name: str, shape: Sequence[int], dtype: str = "f32") -> Value:
        """Declares a tensor that is set before each run."""
        return self._value(self.core.input(name, dtype, as_dims(name, shape)))

    def weight(
        self, name: str, array: Any = None, *, dtype: str | None = None, shape: Sequence[int] | None = None
    ) -> Value:
        """Declares a parameter, set once for all runs.

        Args:
            array: The data, which is copied. Bytes, as an array of uint8, of a quantized type need `dtype` and `shape`. A list of
                numbers becomes an array of `dtype`, of f32 without it. Without data it is set with `Session.set_weight`.
            dtype: The type; of an array that is not bytes it is known, and must be the same.
        """
        if array is None:
            if dtype is None or shape is None:
                raise GraphError(f"weight {name}: without data, dtype and shape are needed")
            return self._value(self.core.empty_weight(name, dtype, as_dims(name, shape)))
        dims = None if shape is None else as_dims(name, shape)
        return self._value(self.core.data(name, as_converted(array, dtype or "f32"), False, dtype, dims))

    def constant(
        self, name: str, array: Any, *, dtype: str | None = None, shape: Sequence[int] | None = None
    ) -> Value:
        """Declares a constant, whose data belongs to the graph."""
        dims = None if shape is None else as_dims(name, shape)
        return self._value(self.core.data(name, as_converted(array, dtype or "f32"), True, dtype, dims))

    def state(self, name: str, shape: Sequence[int], dtype: str = "f32") -> Value:
        """Declares a tensor that keeps its content between runs; zero at first."""
        return self._value(self.core.state_tensor(name, dtype, as_dims(name, shape)))

    def arange(self, start: float, stop: float, step: float = 1.0) -> Value:
        """The values `start, start + step, …` below `stop`."""
        return self.apply("arange", start=start, stop=stop, step=step)

    def apply(self, name: str, *inputs: Value, operation: Operation | None = None, **parameters: Any) -> Value:
        """Applies an operation by name; the methods of `Value` are shorthands for this."""
        for value in inputs:
            if value._graph is not self:  # pyright: ignore[reportPrivateUsage]
                raise GraphError(f"{name}: a value belongs to another graph")
        numbers = [value._number for value in inputs]  # pyright: ignore[reportPrivateUsage]
        custom = None if operation is None else operation.core
        checked = {key: as_parameter(f"{name}: {key}", value) for key, value in parameters.items()}
        return self._value(self.core.apply(name, numbers, json.dumps(checked), custom))

    def output(self, name: str, value: Value) -> None:
        """Makes a value an output, which can be read after a run."""
        if value._graph is not self:  # pyright: ignore[reportPrivateUsage]
            raise GraphError(f"output {name}: the value belongs to another graph")
        self.core.output(name, value._number)  # pyright: ignore[reportPrivateUsage]

    def scope(self, name: str) -> Scope:
        """Names of results begin with this while the `with` statement lasts."""
        return Scope(self, name)

    def barrier(self) -> None:
        """Everything built before is executed before everything built after."""
        self.core.barrier()

    def plan(
        self,
        devices: str | Sequence[str] = ("cpu",),
        *,
        threads: int | None = None,
        pins: Mapping[str, str] | None = None,
        budgets: Mapping[str, int] | None = None,
    ) -> Plan:
        """Plans the graph: assigns nodes to devices, finds copies between them, and an offset for every tensor.

        Args:
            devices: Devices in order of preference, such as `["cuda:0", "cpu"]`, or a single one.
            threads: CPU threads.
            pins: Devices of nodes, weights and states, by name; a name that the graph does not have is an error.
            budgets: Bytes that may be used of devices.
        """
        options = {
            "devices": [devices] if isinstance(devices, str) else list(devices),
            "threads": None if threads is None else as_count("threads", threads),
            "pins": dict(pins or {}),
            "budgets": {device: as_count(f"budgets: {device}", size) for device, size in (budgets or {}).items()},
        }
        return Plan(self.core.plan(json.dumps(options)))

    def __str__(self) -> str:
        return self.core.text() or "a graph that is being built"
