#!/usr/bin/env python3
"""Compares converted models with Hugging Face's transformers and with llama.cpp.

usage: agree_on_conversion.py FOLDER --quadriga PROGRAM --logits PROGRAM [--llama-cpp] [--only TEXT]

FOLDER is one that hugging_face_models.py has written. Each model is converted by `quadriga convert` to F32, and the logits of
crates/llm/examples/logits.rs, and with --llama-cpp those of llama.cpp, are compared with those of transformers: root mean
square difference in standard deviations of the logits. Exits with 1 if one is past its limit.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile

import numpy as np

# Experts are selected by nearly equal scores now and then; llama.cpp's KV cache is f16.
LIMIT, PEER_LIMIT = 2e-4, 2e-2
# Gemma 3n cuts gates by their standard deviation: llama.cpp divides by one less than the width, transformers and Quadriga by the width.
LIMITS = {"Gemma3nForCausalLM": (LIMIT, 5e-2)}
# Models that llama.cpp does not compute: it does not know OPT, of architecture llama it ignores the sliding window, and scores of
# groups of experts are always the sums of two.
NOT_OF_PEER = {"OPTForCausalLM", "MistralForCausalLM", "DeepseekV2ForCausalLM-groups"}


def difference(found, expected):
    return float(np.sqrt(np.mean((found - expected) ** 2)) / expected.std())


def peer_rows(library, path, tokens, encoder):
    """llama.cpp's rows after each token; None if it does not load the model."""
    model = library.open(path, 256, 256, 1)
    if model is None:
        return None
    if encoder:
        model.embed(tokens)
        rows = [np.ctypeslib.as_array(model.vector(row), (model.width,)).copy() for row in range(len(tokens))]
    else:
        rows = []
        for token in tokens:
            model.decode([token])
            rows.append(np.ctypeslib.as_array(model.logits(), (model.vocabulary,)).copy())
    model.close()
    return np.array(rows, dtype=np.float64)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--quadriga", required=True)
    parser.add_argument("--logits", required=True)
    parser.add_argument("--llama-cpp", action="store_true")
    parser.add_argument("--only", default="")
    a = parser.parse_args()
    library = None
    if a.llama_cpp:
        import llama_peer
        library = llama_peer.Library()
    failed = 0
    with tempfile.TemporaryDirectory() as work:
        for name in sorted(os.listdir(a.folder)):
            source = os.path.join(a.folder, name)
            if a.only not in name or not os.path.exists(os.path.join(source, "logits.json")):
                continue
            with open(os.path.join(source, "logits.json")) as file:
                expected = json.load(file)
            tokens, rows = expected["tokens"], np.array(expected["rows"])
            path = os.path.join(work, name + ".gguf")
            command = [a.quadriga, "convert", source, "-o", path, "--type", "f32", "--no-vocab", "-q"]
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode:
                print(f"{name:32} {run.stderr.strip()}", flush=True)
                failed += 1
                continue
            run = subprocess.run([a.logits, path, "4", ",".join(map(str, tokens))], capture_output=True, text=True)
            if run.returncode:
                print(f"{name:32} logits: {run.stderr.strip()}", flush=True)
                failed += 1
                continue
            found = np.array([[float(x) for x in line.split()] for line in run.stdout.splitlines()])
            wanted = rows if len(found) == len(rows) else rows[3:]
            own = difference(found, wanted)
            limit, peer_limit = LIMITS.get(name, (LIMIT, PEER_LIMIT))
            text, bad = f"{own:.2e}", not own < limit
            if library and name not in NOT_OF_PEER:
                peer = peer_rows(library, path, tokens, name == "BertModel")
                other = difference(peer, rows) if peer is not None else float("nan")
                text += f"  llama.cpp {other:.2e}" if peer is not None else "  llama.cpp does not load it"
                bad |= not other < peer_limit
            print(f"{name:32} {text}{'  PAST ITS LIMIT' if bad else ''}", flush=True)
            failed += bad
            os.remove(path)
    sys.exit(1 if failed else 0)


main()
