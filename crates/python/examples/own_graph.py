"""A graph of one's own with a state and an operation in Python: `python own_graph.py`."""

import numpy as np
import numpy.typing as npt
from quadriga import graph


@graph.operation()
def rounded(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Operations in Python are for prototypes: they get and return numpy arrays."""
    return np.round(x, 1)


random = np.random.default_rng(1)
up = random.standard_normal((256, 64)).astype(np.float32) / 16
down = random.standard_normal((64, 256)).astype(np.float32) / 16

g = graph.Graph()
x = g.input("x", (4, 64))
hidden = g.weight("up", up).mul_mat(x).silu().named("hidden")
y = x + g.weight("down", down).mul_mat(hidden)
total = g.state("total", (4, 64))
g.output("y", rounded(y))
g.output("total_now", (total + y).copy_into(total))

plan = g.plan(["cpu"])
print(plan)  # splits, copies and bytes are known before anything is allocated

session = plan.session()
values = random.standard_normal((4, 64)).astype(np.float32)
outputs = session.run(x=values)
print(f"y[0, 0] = {outputs['y'][0, 0]:.1f}, total[0, 0] = {outputs['total_now'][0, 0]:.3f}")
for _ in range(2):
    outputs = session.run(x=values)
print(f"after three runs: total[0, 0] = {outputs['total_now'][0, 0]:.3f}")

h = values @ up.T
wanted = values + (h / (1 + np.exp(-h))) @ down.T
np.testing.assert_allclose(outputs["total_now"], 3 * wanted, rtol=1e-3, atol=1e-3)

# Intermediate results, for debugging.
session.observe(lambda seen: print(f"{seen.name} on {seen.device}: {seen.array.shape}"), ["hidden"], {"x": values})
