"""llama.cpp's prebuilt CPU libraries, called through their C interface.

The libraries come from the npm package @node-llama-cpp/linux-x64, installed on first use into the folder $QUADRIGA_PEER
(target/peer by default).
"""
import ctypes
import glob
import os
import subprocess
import sys

PACKAGE = "@node-llama-cpp/linux-x64"
VERSION = "3.22.1"
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Params(ctypes.Structure):
    """Any of the library's parameter structs, passed by value: larger than each of them, filled in by the library."""

    _fields_ = [("u32", ctypes.c_uint32 * 256)]


class Batch(ctypes.Structure):
    """llama_batch."""

    _fields_ = [("n_tokens", ctypes.c_int32)] + [
        (name, ctypes.c_void_p) for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")
    ]


POINTER, NUMBER, TEXT, FLAG = ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p, ctypes.c_bool
FUNCTIONS = {
    "llama_model_default_params": (Params, []),
    "llama_context_default_params": (Params, []),
    "llama_model_load_from_file": (POINTER, [TEXT, Params]),
    "llama_model_free": (None, [POINTER]),
    "llama_model_get_vocab": (POINTER, [POINTER]),
    "llama_vocab_n_tokens": (NUMBER, [POINTER]),
    "llama_vocab_is_eog": (FLAG, [POINTER, NUMBER]),
    "llama_tokenize": (NUMBER, [POINTER, TEXT, NUMBER, POINTER, NUMBER, FLAG, FLAG]),
    "llama_init_from_model": (POINTER, [POINTER, Params]),
    "llama_free": (None, [POINTER]),
    "llama_set_n_threads": (None, [POINTER, NUMBER, NUMBER]),
    "llama_batch_get_one": (Batch, [POINTER, NUMBER]),
    "llama_decode": (NUMBER, [POINTER, Batch]),
    "llama_synchronize": (None, [POINTER]),
    "llama_get_memory": (POINTER, [POINTER]),
    "llama_memory_clear": (None, [POINTER, FLAG]),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), [POINTER, NUMBER]),
    "llama_model_n_embd": (NUMBER, [POINTER]),
    "llama_set_embeddings": (None, [POINTER, FLAG]),
    "llama_get_embeddings_ith": (ctypes.POINTER(ctypes.c_float), [POINTER, NUMBER]),
    "llama_get_embeddings_seq": (ctypes.POINTER(ctypes.c_float), [POINTER, NUMBER]),
    "llama_log_set": (None, [POINTER, POINTER]),
}


def install():
    """The folder of the libraries."""
    home = os.environ.get("QUADRIGA_PEER") or os.path.join(ROOT, "target", "peer")
    folder = os.path.join(home, "node_modules", "@node-llama-cpp", "linux-x64", "bins", "linux-x64")
    if not os.path.isdir(folder):
        os.makedirs(home, exist_ok=True)
        command = ["npm", "install", "--silent", "--prefix", home, "--ignore-scripts", f"{PACKAGE}@{VERSION}"]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return folder


class Library:
    """The loaded libraries. Warnings and errors of the latest call are in `messages`."""

    def __init__(self):
        folder = install()
        for stem in ("libggml-base", "libggml", "libllama"):
            found = sorted(glob.glob(f"{folder}/{stem}.so*") + glob.glob(f"{folder}/{stem}.*so"))
            library = ctypes.CDLL(found[0], mode=ctypes.RTLD_GLOBAL)
            if stem == "libggml":
                library.ggml_backend_load_all_from_path(ctypes.c_char_p(folder.encode()))
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self.messages = []
        self.listener = ctypes.CFUNCTYPE(None, ctypes.c_int, TEXT, POINTER)(
            lambda level, text, _: self.messages.append(text.decode(errors="replace")) if level >= 3 else None
        )
        library.llama_log_set(ctypes.cast(self.listener, POINTER), None)
        self.lib = library

    def open(self, path, context, batch, threads, sequences=1):
        """A model with a context of its own, or None if llama.cpp does not load the file."""
        self.messages.clear()
        model = self.lib.llama_model_load_from_file(path.encode(), self.lib.llama_model_default_params())
        return Model(self.lib, model, context, batch, threads, sequences) if model else None


class Model:
    def __init__(self, lib, model, context, batch, threads, sequences):
        self.lib, self.model, self.batch = lib, model, batch
        parameters = lib.llama_context_default_params()
        parameters.u32[0], parameters.u32[1] = context, batch
        if sequences > 1:
            parameters.u32[3] = sequences
        self.context = lib.llama_init_from_model(model, parameters)
        lib.llama_set_n_threads(self.context, threads, threads)
        self.vocab = lib.llama_model_get_vocab(model)
        self.vocabulary = lib.llama_vocab_n_tokens(self.vocab)
        self.width = lib.llama_model_n_embd(model)

    def decode(self, tokens, all_logits=False):
        """Appends tokens; afterwards the logits of the last one, or of all, can be read."""
        values = (ctypes.c_int32 * len(tokens))(*tokens)
        batch = self.lib.llama_batch_get_one(ctypes.cast(values, POINTER), len(tokens))
        flags = (ctypes.c_int8 * len(tokens))(*([1] * len(tokens)))
        if all_logits:
            batch.logits = ctypes.cast(flags, POINTER)
        if self.lib.llama_decode(self.context, batch) != 0:
            sys.exit("llama_decode failed")
        self.lib.llama_synchronize(self.context)

    def decode_many(self, rows):
        """Computes tokens of several sequences at once: each a token, its position, its sequence, and whether it is an output."""
        count = len(rows)
        numbers = [(ctypes.c_int32 * 1)(row[2]) for row in rows]
        arrays = (
            (ctypes.c_int32 * count)(*(row[0] for row in rows)),
            None,
            (ctypes.c_int32 * count)(*(row[1] for row in rows)),
            (ctypes.c_int32 * count)(*([1] * count)),
            (ctypes.c_void_p * count)(*(ctypes.addressof(number) for number in numbers)),
            (ctypes.c_int8 * count)(*(int(row[3]) for row in rows)),
        )
        batch = Batch(count, *(array and ctypes.cast(array, POINTER) for array in arrays))
        if self.lib.llama_decode(self.context, batch) != 0:
            sys.exit("llama_decode failed")
        self.lib.llama_synchronize(self.context)

    def embed(self, tokens):
        """Computes a text; afterwards the vectors of its tokens can be read."""
        self.lib.llama_set_embeddings(self.context, True)
        self.decode(tokens, all_logits=True)

    def vector(self, row):
        """A pointer to the vector of one token of the latest text, which has `width` elements."""
        return self.lib.llama_get_embeddings_ith(self.context, row)

    def pooled(self):
        """A pointer to the embedding of the latest text, which has `width` elements, or to its scores: where the file names a
        pooling."""
        return self.lib.llama_get_embeddings_seq(self.context, 0)

    def logits(self, row=-1):
        """A pointer to the logits of one row of the latest batch."""
        return self.lib.llama_get_logits_ith(self.context, row)

    def clear(self):
        """Empties the KV cache."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)

    def tokenize(self, text, special):
        """Token ids, without a beginning-of-text token."""
        data = text.encode()
        room = (ctypes.c_int32 * (len(data) + 8))()
        count = self.lib.llama_tokenize(self.vocab, data, len(data), ctypes.cast(room, POINTER), len(room), False, special)
        return list(room[:count])

    def ends(self, token):
        """Whether a token ends the generation."""
        return self.lib.llama_vocab_is_eog(self.vocab, token)

    def close(self):
        self.lib.llama_free(self.context)
        self.lib.llama_model_free(self.model)
