"""Arguments as programs write them: numpy's numbers, single names instead of lists, and mistakes, which are named."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quadriga
from quadriga import graph


def test_numpy_numbers_are_options_of_requests(tiny: quadriga.Model) -> None:
    options: dict[str, Any] = {"max_tokens": np.int64(3), "temperature": np.float32(0.5), "seed": np.uint32(7)}
    first = tiny.generate([1, 2, 3], ignore_eos=True, **options)
    assert len(first.tokens) == 3
    assert tiny.generate([1, 2, 3], ignore_eos=True, max_tokens=3, temperature=0.5, seed=7).tokens == first.tokens
    with pytest.raises(TypeError, match="object"):
        tiny.generate([1], max_tokens=1, temperature=object())  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_scalars_are_inputs_without_dimensions() -> None:
    g = graph.Graph()
    g.output("y", g.input("x", ()) * 2)
    session = g.plan().session()
    for three in (np.float32(3), np.array(3, dtype=np.float32), 3.0, 3):
        result = session.run(x=three)["y"]
        assert result.shape == () and result == 6
    with pytest.raises(quadriga.GraphError, match="shape"):
        session.run(x=np.array([3, 4], dtype=np.float32))


def test_numpy_arrays_do_not_take_values_apart() -> None:
    g = graph.Graph()
    x = g.input("x", (2,))
    array: Any = np.ones(2)
    for use in (lambda: array * x, lambda: array + x, lambda: array - x):
        with pytest.raises(TypeError):
            use()
    g.output("y", np.float32(2) * x)
    assert g.plan().session().run(x=[1.0, 2.0])["y"].tolist() == [2, 4]


def test_values_of_other_graphs_are_no_outputs() -> None:
    one, other = graph.Graph(), graph.Graph()
    value = one.input("x", (2,)).relu()
    other.input("x", (3,)).relu()
    with pytest.raises(quadriga.GraphError, match="output y.*another graph"):
        other.output("y", value)


def test_a_single_name_need_not_be_in_a_list(tiny_path: Path) -> None:
    g = graph.Graph()
    g.output("y", g.input("x", (2,)).relu())
    assert g.plan("cpu").session().run(x=[1.0, -1.0])["y"].tolist() == [1, 0]
    with quadriga.Model(os.fsencode(tiny_path), devices="cpu", n_ctx=256) as model:
        assert model.devices == ["cpu"]
    with pytest.raises(quadriga.InvalidRequest, match="npu"):
        quadriga.Model(tiny_path, devices="npu")


def test_missing_adapters_and_drafts_are_named(tiny_path: Path) -> None:
    absent: Any
    for absent in ("x.gguf", ("x.gguf", 0.5), ["x.gguf"], [("x.gguf", 0.5)]):
        with pytest.raises(quadriga.ModelNotFound, match="x.gguf.*lora"):
            quadriga.Model(tiny_path, lora=absent)
    with pytest.raises(quadriga.ModelNotFound, match="small.gguf.*draft"):
        quadriga.Model(tiny_path, draft="small.gguf")


def test_numbers_that_no_model_has_are_named(tiny_path: Path) -> None:
    for name, value in (("vram_budget", -1), ("n_ctx", 2**70), ("kv_tokens", 2**70), ("cache_ram", -1)):
        options: dict[str, Any] = {name: value}
        with pytest.raises(quadriga.InvalidRequest, match=name):
            quadriga.Model(tiny_path, **options)
    g = graph.Graph()
    g.output("y", g.input("x", (2,)).relu())
    with pytest.raises(quadriga.GraphError, match="budgets: cpu.*-1"):
        g.plan(budgets={"cpu": -1})


def test_options_of_the_wrong_type_are_named(tiny_path: Path) -> None:
    wrong: Any
    for name, wrong, error in (
        ("chat_template", 3, TypeError),
        ("use_mmap", "x", TypeError),
        ("offline", None, TypeError),
        ("cache_type", None, TypeError),
        ("cache_type_v", 8, TypeError),
        ("devices", [1], TypeError),
        ("hub_file", b"x", TypeError),
        ("hub_file", "x\udcff", quadriga.InvalidRequest),
        ("lora", (tiny_path, float("nan")), quadriga.InvalidRequest),
        ("lora", [(tiny_path, "much")], TypeError),
    ):
        options: dict[str, Any] = {name: wrong}
        with pytest.raises(error, match=name):
            quadriga.Model(tiny_path, **options)


def test_paths_need_not_be_unicode(tiny_path: Path, tmp_path: Path) -> None:
    path = os.path.join(os.fsencode(tmp_path), b"m\xff.gguf")
    with pytest.raises(quadriga.ModelNotFound, match="no such file"):
        quadriga.Model(path)
    with open(path, "wb") as file:
        file.write(tiny_path.read_bytes())
    cache = os.path.join(os.fsencode(tmp_path), b"cache\xff")
    for name in (path, os.fsdecode(path), Path(os.fsdecode(path))):
        with quadriga.Model(name, n_ctx=256, cache_file=cache, draft=path) as model:
            assert model.generate([1, 2, 3], max_tokens=1, ignore_eos=True).usage.completion_tokens == 1


def test_an_infinite_bias_bans_a_token(tiny: quadriga.Model) -> None:
    ask: dict[str, Any] = {"temperature": 0, "max_tokens": 1, "ignore_eos": True}
    first = tiny.generate([1, 2, 3], **ask).tokens[0]
    for bias in ({first: float("-inf")}, {str(first): -np.inf}):
        assert tiny.generate([1, 2, 3], logit_bias=bias, **ask).tokens[0] != first
    with pytest.raises(quadriga.InvalidRequest, match="finite"):
        tiny.generate([1], logit_bias={first: float("nan")}, **ask)


def test_wrong_messages_and_options_are_named(tiny: quadriga.Model) -> None:
    texts: Any = ["hi"]
    with pytest.raises(quadriga.InvalidRequest, match="message 0 is a str"):
        tiny.chat(texts)
    with pytest.raises(TypeError, match="nonsense"):
        tiny.chat_tokens("hi", nonsense=3)
    assert tiny.chat_tokens("hi", chat_template_kwargs={"a": 1})


def test_pins_name_what_the_graph_has() -> None:
    g = graph.Graph()
    g.output("y", g.input("x", (2,)).relu().named("r"))
    g.plan(pins={"x": "cpu", "r": "cpu"})
    with pytest.raises(quadriga.GraphError, match="nonsense"):
        g.plan(pins={"nonsense": "cpu"})


def test_observers_name_nodes_of_the_plan() -> None:
    g = graph.Graph()
    g.output("y", (g.input("x", (2,)).relu().named("r") * 2).named("twice"))
    session = g.plan().session()
    seen: list[tuple[str, str]] = []

    def note(observed: graph.Observed) -> None:
        seen.append((observed.name, observed.dtype))

    with pytest.raises(quadriga.GraphError, match="nope"):
        session.observe(note, names=["r", "nope"], inputs={"x": [1.0, 2.0]})
    assert not seen
    assert session.observe(note, names="twice", inputs={"x": [1.0, 2.0]})
    assert seen == [("twice", "f32")] and session.outputs["y"].dtype == "f32"


def test_messages_name_the_argument_that_is_wrong(tiny: quadriga.Model, tiny_path: Path) -> None:
    with pytest.raises(quadriga.InvalidRequest, match="n_parallel is 4611686018427387904"):
        quadriga.Model(tiny_path, n_parallel=2**62)
    wrong: Any
    for wrong in ("abc", {"type": "function"}):
        with pytest.raises(TypeError, match="tools is a"):
            tiny.chat("hi", tools=wrong)
    wrong = ["abc"]
    with pytest.raises(quadriga.InvalidRequest, match="tool 0 is a str"):
        tiny.chat("hi", tools=wrong)
    with pytest.raises(TypeError, match="async for.*generate"):
        asyncio.run(tiny.generate_async([1], stream=True))
    with pytest.raises(TypeError, match="async for.*chat"):
        asyncio.run(tiny.chat_async("hi", stream=True))
    assert asyncio.run(tiny.generate_async([1], stream=False, max_tokens=1, ignore_eos=True)).usage.completion_tokens == 1
    with pytest.raises(TypeError, match="echo"):
        tiny.chat("hi", echo=True)
