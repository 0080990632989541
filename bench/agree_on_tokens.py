#!/usr/bin/env python3
"""Compares the tests' tokenizations (crates/llm/tests/data) with those of llama.cpp, for every name of a pre-tokenizer.

    python bench/agree_on_tokens.py [NAME...]

The tests' are those of the published tokenizers. llama.cpp approximates some of their expressions, so that it differs in
a few texts; this prints the texts. Needs the Python of scripts/python-env.
"""
import ctypes
import json
import os
import sys
import tempfile

import gguf

import llama_peer

DATA = os.path.join(llama_peer.ROOT, "crates", "llm", "tests", "data")
# The offset of `vocab_only` in llama_model_params of llama_peer.VERSION: after six pointers and five 32-bit integers with padding.
VOCAB_ONLY = 72


def load(name):
    with open(os.path.join(DATA, name), encoding="utf-8") as file:
        return json.load(file)


def write(path, model, pre, data, **options):
    """A model file without tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(data["tokens"])
    writer.add_token_types(data.get("types") or [1] * len(data["tokens"]))
    if "scores" in data:
        writer.add_token_scores(data["scores"])
    if "merges" in data:
        writer.add_token_merges(data["merges"])
    for key, token in options.pop("tokens", {}).items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", token)
    for key, value in options.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


class Peer:
    def __init__(self):
        self.library = llama_peer.Library()
        self.folder = tempfile.TemporaryDirectory()

    def encode(self, texts, model, pre, data, **options):
        """The tokens of each text, or None if llama.cpp does not load the vocabulary."""
        lib = self.library.lib
        path = os.path.join(self.folder.name, "vocabulary.gguf")
        write(path, model, pre, data, **options)
        parameters = lib.llama_model_default_params()
        ctypes.cast(ctypes.byref(parameters), ctypes.POINTER(ctypes.c_bool))[VOCAB_ONLY] = True
        self.library.messages.clear()
        loaded = lib.llama_model_load_from_file(path.encode(), parameters)
        if not loaded:
            return None
        vocabulary = lib.llama_model_get_vocab(loaded)
        result = []
        for text in texts:
            text = text.encode()
            room = (ctypes.c_int32 * (2 * len(text) + 8))()
            count = lib.llama_tokenize(
                vocabulary, text, len(text), ctypes.cast(room, ctypes.c_void_p), len(room), False, True)
            result.append(list(room[:count]))
        lib.llama_model_free(loaded)
        return result


def report(name, texts, wanted, got, messages, tokens):
    if got is None:
        print(f"{name}: not loaded: {''.join(messages).strip()[-150:]}")
        return
    different = [(t, w, g) for t, w, g in zip(texts, wanted, got) if w != g]
    print(f"{name}: {len(texts) - len(different)} of {len(texts)} texts agree")
    for text, w, g in different if "-v" in sys.argv else []:
        print(f"   {text!r}\n      published {[tokens[i] for i in w]}\n      llama.cpp {[tokens[i] for i in g]}")


def main():
    peer = Peer()
    only = [argument for argument in sys.argv[1:] if argument != "-v"]
    data = load("byte_level.json")
    for rule, cases in data["cases"].items():
        for name in [rule] + data["names"].get(rule, []):
            if not only or name in only:
                got = peer.encode(data["texts"], "gpt2", name, data)
                report(name, data["texts"], cases, got, peer.library.messages, data["tokens"])
    data = load("characters.json")
    if not only or "gemma4" in only:
        special = {key: data["tokens"].index(f"<{key}>") for key in ("bos", "eos")}
        got = peer.encode(data["texts"], "gemma4", None, data, tokens=special)
        report("gemma4", data["texts"], data["cases"], got, peer.library.messages, data["tokens"])
    data = load("sentence_piece.json")
    for name, prefix in [("cases", True), ("without_prefix", False)]:
        if not only or "llama" in only:
            got = peer.encode(data["texts"], "llama", None, data, add_space_prefix=prefix)
            report(f"llama, {name}", data["texts"], data[name], got, peer.library.messages, data["tokens"])
    data = load("word_piece.json")
    if not only or "bert" in only:
        special = {"bos": 2, "seperator": 3, "unknown": 1, "padding": 0, "mask": 4}
        got = peer.encode(data["texts"], "bert", None, data, tokens=special)
        report("bert, uncased", data["texts"], data["cases"]["uncased"], got, peer.library.messages, data["tokens"])


if __name__ == "__main__":
    main()
