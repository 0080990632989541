"""Nearest neighbours by embeddings: `python search.py [MODEL]`. Any model embeds; those made for it do so better."""

import sys

import numpy as np
import quadriga

TEXTS = [
    "Cats purr when they are content.",
    "The train to the coast leaves at noon.",
    "A kitten drinks milk.",
    "Interest rates were raised again.",
    "Express trains do not stop here.",
]

model = quadriga.Model(sys.argv[1] if len(sys.argv) > 1 else None, n_ctx=512)
vectors = model.embed(TEXTS)  # one row for each text, of length 1
query = model.embed("When does the next train leave?")
scores = vectors @ query
for index in np.argsort(-scores):
    print(f"{scores[index]:.3f}  {TEXTS[index]}")
assert "train" in TEXTS[int(np.argmax(scores))].lower()
