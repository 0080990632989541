"""A planned graph, and a session that runs it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ._arrays import as_array, as_converted
from ._quadriga import PlanCore, SessionCore
from .errors import GraphError

__all__ = ["Observed", "Plan", "Session", "TensorInfo"]


class Plan:
    """A planned graph. A notebook shows its picture."""

    def __init__(self, core: PlanCore) -> None:
        self.core = core

    def __str__(self) -> str:
        return str(self.core)

    def details(self) -> str:
        """Splits, copies and bytes, and a line for each node."""
        return self.core.details()

    def explain(self) -> dict[str, Any]:
        """The plan as data; docs/plan-schema.md describes it."""
        return json.loads(self.core.json())

    def memory(self) -> list[dict[str, Any]]:
        """The bytes of each device, by what they are for."""
        return json.loads(self.core.memory())

    def dot(self) -> str:
        """The plan in Graphviz's language."""
        return self.core.dot()

    def html(self, title: str = "plan") -> str:
        """The plan as an interactive page, complete in itself."""
        return self.core.picture(title, False)

    def svg(self, title: str = "plan") -> str:
        """The plan as a drawing."""
        return self.core.picture(title, True)

    def _repr_html_(self) -> str:
        return self.svg()

    def session(self) -> Session:
        """Allocates memory, loads weights and compiles: ready to run."""
        return Session(self.core.session(), self)


@dataclass(frozen=True)
class TensorInfo:
    """An input, an output or a state."""

    name: str
    #: numpy's type; bytes for types that numpy does not have.
    numpy_dtype: str
    #: The type in the graph.
    dtype: str
    shape: tuple[int, ...]
    #: Its size in bytes.
    bytes: int

    def empty(self) -> npt.NDArray[Any]:
        """An array for its elements, or for its bytes."""
        shape = (self.bytes,) if self.numpy_dtype == "|u1" else self.shape
        return np.empty(shape, dtype=self.numpy_dtype)


@dataclass(frozen=True)
class Observed:
    """The result of a node, right after it was computed."""

    name: str
    #: The type in the graph.
    dtype: str
    #: The device that computed it.
    device: str | None
    #: The elements, read-only; the bytes of types that numpy does not have.
    array: npt.NDArray[Any]


class Session:
    """Memory, weights and compiled code of a plan; runs it any number of times."""

    def __init__(self, core: SessionCore, plan: Plan) -> None:
        self.core = core
        self._plan = plan
        self.inputs = _infos(core.inputs())
        self.outputs = _infos(core.outputs())
        self.states = _infos(core.states())

    def close(self) -> None:
        """Frees the memory."""
        self.core.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def set(self, name: str, values: Any) -> None:
        """Sets an input: an array of its type, which is copied once, or a list of numbers."""
        self.core.set(name, self._given(name, values))

    def _given(self, name: str, values: Any) -> npt.NDArray[Any]:
        info = self.inputs.get(name)
        return as_array(values) if info is None else self._checked(info, values)

    def _checked(self, info: TensorInfo, values: Any) -> npt.NDArray[Any]:
        array = as_converted(values, info.dtype)
        is_bytes = array.dtype == np.uint8
        if not is_bytes and array.shape != info.shape and array.size > 0:
            raise GraphError(f"{info.name} has the shape {list(info.shape)}, the array {list(array.shape)}")
        return array

    def run(self, inputs: Mapping[str, Any] | None = None, /, **named: Any) -> dict[str, npt.NDArray[Any]]:
        """Sets inputs, runs the plan, and returns all outputs: as one, also if several threads run the session.

        Ctrl-C, or another exception of a signal handler, ends the wait at once. The run goes on to its end in the background,
        and the next call of the session waits for it. An exception of an operation in Python is raised here.
        """
        outputs = {name: info.empty() for name, info in self.outputs.items()}
        self._run({**(inputs or {}), **named}, outputs)
        return outputs

    def start(self, inputs: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Sets inputs and runs the plan, without reading outputs."""
        self._run({**(inputs or {}), **named}, {})

    def _run(self, inputs: Mapping[str, Any], outputs: Mapping[str, npt.NDArray[Any]]) -> None:
        given = [(name, self._given(name, values)) for name, values in inputs.items()]
        self.core.run(given, list(outputs.items()))

    def read(self, name: str, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """An output of the latest run, copied once: to a new array or to `out`."""
        info = self.outputs.get(name)
        if info is None:
            raise GraphError(f"there is no output {name!r}; there are {', '.join(self.outputs)}")
        if out is None:
            out = info.empty()
        elif not isinstance(out, np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GraphError(f"out is a {type(out).__name__}; a numpy array is needed")
        elif out.dtype != np.uint8 and (out.dtype != info.numpy_dtype or out.shape != info.shape):
            raise GraphError(f"{name} is {info.dtype} {list(info.shape)}, out {out.dtype} {list(out.shape)}")
        self.core.read(name, out)
        return out

    def set_weight(self, name: str, values: Any) -> None:
        """Sets the data of a weight that was declared without: an array of its type and shape, bytes as an array of uint8, or a list
        of numbers."""
        dtype = self.core.weight_type(name)
        self.core.set_weight(name, as_array(values) if dtype is None else as_converted(values, dtype.lower()))

    def observe(
        self,
        function: Callable[[Observed], bool | None],
        names: str | Sequence[str] | None = None,
        inputs: Mapping[str, Any] | None = None,
    ) -> bool:
        """Runs the plan and calls a function with each result, or with those of some names.

        The function ends the run by returning False. Returns whether all nodes were computed. A name that no node of the plan
        has is an error; inputs, weights and views are not computed, and thus not observed.
        """
        wanted = None if names is None else self._node_names([names] if isinstance(names, str) else list(names))

        def call(
            name: str, data: bytes, of: str, dtype: str, dims: list[int], strides: list[int], device: str | None
        ) -> bool:
            array: npt.NDArray[Any] = np.frombuffer(data, dtype=of)
            if of != "|u1":
                array = np.lib.stride_tricks.as_strided(array, dims, strides, writeable=False)
            return function(Observed(name, dtype.lower(), device, array)) is not False

        given = [(name, self._given(name, values)) for name, values in (inputs or {}).items()]
        return self.core.observe(call, wanted, given)

    def _node_names(self, names: list[str]) -> list[str]:
        """Names of nodes, checked."""
        known = {node["name"] for node in self._plan.explain()["nodes"]}
        unknown = [name for name in names if name not in known]
        if unknown:
            raise GraphError(f"names: no node of the plan is called {', '.join(map(repr, unknown))}")
        return names

    def read_state(self, name: str) -> npt.NDArray[Any]:
        """The content of a state."""
        info = self.states.get(name)
        if info is None:
            raise GraphError(f"there is no state {name!r}; there are {', '.join(self.states)}")
        out = info.empty()
        self.core.read_state(name, out)
        return out

    def write_state(self, name: str, values: Any) -> None:
        """Sets the content of a state."""
        info = self.states.get(name)
        self.core.write_state(name, as_array(values) if info is None else self._checked(info, values))

    def clear_state(self) -> None:
        """Sets all states to zero."""
        self.core.clear_state()

    def save_state(self) -> bytes:
        """All states as bytes."""
        return self.core.save_state()

    def restore_state(self, saved: bytes) -> None:
        """Restores what `save_state` has returned."""
        self.core.restore_state(saved)


def _infos(facts: Sequence[tuple[str, str, str, list[int], int]]) -> dict[str, TensorInfo]:
    infos = [TensorInfo(name, of, dtype.lower(), tuple(dims), size) for name, of, dtype, dims, size in facts]
    return {info.name: info for info in infos}
