"""What runs where, as a picture: `python plan_picture.py [FOLDER]`. In a notebook, a plan shows itself."""

import sys
from pathlib import Path

import numpy as np
from quadriga import graph

folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
g = graph.Graph()
x = g.input("x", (1, 64))
for layer in range(4):
    with g.scope(f"layer{layer}"):
        w = g.weight(f"layer{layer}.weight", np.eye(64, dtype=np.float32))
        x = (x + w.mul_mat(x.rms_norm()).gelu()).named("out")
g.output("y", x)

# A simulated device stands for a GPU; weights of every second layer are there.
pins = {f"layer{layer}.weight": "sim:0" for layer in (1, 3)}
plan = g.plan(["cpu", "sim:0"], pins=pins)
(folder / "plan.html").write_text(plan.html("four layers"), encoding="utf-8")
(folder / "plan.svg").write_text(plan.svg("four layers"), encoding="utf-8")
print(plan)
assert plan._repr_html_().lstrip().startswith("<svg")  # what a notebook shows
