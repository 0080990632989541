#!/usr/bin/env python3
"""Writes byte_level.json, sentence_piece.json and unigram.json: tiny vocabularies, and what the reference
implementations make of nasty texts with them. Needs: pip install tokenizers sentencepiece protobuf
"""
import base64
import io
import json
import random

import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as model_pb2
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

TEXTS = [
    "", " ", "  ", "\n", " \n ", "Hello world", "  leading and trailing  ", "a  b   c\t\td", "line\nline\n\nline\r\n  line",
    "don't DON'T we'll WE'LL I'm it's 'S 'tis o'clock", "1 12 123 1234 12345 1234567 3.14 1,000,000 x1y22z333",
    "x=1;y+=2;/*c*/ // end\n\tif (a<b && c>=d) { return a[0]->b; }\n", "CamelCase HTTPServer snake_case XMLHttpRequest iOS",
    "naïve café Ωmega ÀÉÎ ßẞ", "e\u0301 a\u0308 क्षि ที่นี่", "你好，世界。こんにちは カタカナ 안녕하세요 ①②½ ٣٤٥",
    "🙂👩‍👩‍👧‍👦 !!! ... ??? --- ***", "\u00a0nbsp\u2003em\u3000ideographic", "a\u200bb\ufeffc", "tab\t \t\n \n x", "/// ### $$$ <<>> ^^ ~~ ||",
    " .,!?…。，、।۔،() a.b,c!d", "https://example.com/a?b=c&d=1#frag", "UPPER lower Title ǅ ʰ ª º", "a" * 40, " " * 40 + "x", "\n" * 9 + "x",
    "it’s ‘quoted’ “text” – dash — long", "½ cup, ²nd, ⅷ, ௧", "don't\n\n\n  we'd  \n", "\x00\x01\x7f control",
]
CORPUS = [t for t in TEXTS for _ in range(3)] + [
    "the quick brown fox jumps over the lazy dog and the don't we'll you're they've she'd",
    "Hello there, hello world! return function class struct let mut if else while for in 123 456 2024 1999",
    "this is that is the other is an item of the list; the list is long, longer, longest",
]

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|"
END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + END
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + END
QWEN35 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + END
TEKKEN = CASED % ("", "") + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + END
GPT4O = CASED % (CONTRACTIONS + "?", CONTRACTIONS + "?") + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + END
DEEPSEEK3 = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|""" + END
SEED = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + END
BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def split(*expressions):
    return [pre_tokenizers.Split(Regex(e), "isolated") for e in expressions]


RULES = {
    "gpt-2": [WORDS],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), WORDS],
    "command-r": [pre_tokenizers.Digits(individual_digits=True), WORDS],
    "llama-bpe": split(LLAMA3) + [BYTES],
    "dbrx": split(LLAMA3) + [BYTES],
    "qwen2": split(QWEN2) + [BYTES],
    "qwen35": split(QWEN35) + [BYTES],
    "tekken": split(TEKKEN) + [BYTES],
    "gpt-4o": split(GPT4O) + [BYTES],
    "deepseek-v3": split(r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3) + [BYTES],
    "deepseek-coder": split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+") + [pre_tokenizers.Digits(individual_digits=True), BYTES],
    "bloom": split(r" ?[^(\s|[.,!?…。，、।۔،])]+") + [BYTES],
    "seed-coder": split(SEED) + [BYTES],
    "bailingmoe": split(BAILING) + [BYTES],
}
WHOLE_WORDS = {"llama-bpe", "tekken"}


def byte_level():
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(split(LLAMA3) + [BYTES])
    trainer = trainers.BpeTrainer(vocab_size=520, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]
    # A token that no merge makes: only rules that take whole words as they are can find it.
    vocabulary = dict(model["vocab"]) | {"Ġlongest": len(model["vocab"])}
    cases = {}
    for name, rules in RULES.items():
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=name in WHOLE_WORDS))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(rules)
        cases[name] = [tokenizer.encode(t).ids for t in TEXTS + CORPUS[-3:]]
    tokens = sorted(vocabulary, key=vocabulary.get)
    return {"tokens": tokens, "merges": [" ".join(m) for m in merges], "texts": TEXTS + CORPUS[-3:], "cases": cases}


def train(**options):
    model = io.BytesIO()
    sentences = [t for t in CORPUS if t.strip() and "\n" not in t and "\x00" not in t]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, minloglevel=2, num_threads=1, **options)
    return model.getvalue()


def sentence_piece(**options):
    data = train(**options)
    proto = model_pb2.ModelProto.FromString(data)
    processor = sentencepiece.SentencePieceProcessor(model_proto=data)
    random.seed(1)
    letters = sorted({c for t in CORPUS for c in t if c != "\x00"})
    texts = [t for t in TEXTS + CORPUS[-3:] if "\x00" not in t]
    texts += ["".join(random.choice(letters) for _ in range(60)) for _ in range(10)]
    texts += [" ".join(random.choice("the is long hello of list 123 x".split()) for _ in range(20)) for _ in range(5)]
    result = {
        "tokens": [p.piece for p in proto.pieces],
        "scores": [p.score for p in proto.pieces],
        "types": [p.type for p in proto.pieces],
        "texts": texts,
        "cases": [processor.encode(t) for t in texts],
        "decoded": [processor.decode(processor.encode(t)) for t in texts],
    }
    if proto.normalizer_spec.precompiled_charsmap:
        result["replacements"] = base64.b64encode(proto.normalizer_spec.precompiled_charsmap).decode()
    return result


def write(name, value):
    with open(name, "w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=True, separators=(",", ":"))
        file.write("\n")


if __name__ == "__main__":
    write("byte_level.json", byte_level())
    write("sentence_piece.json", sentence_piece(
        model_type="bpe", vocab_size=600, byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, add_dummy_prefix=True, character_coverage=0.98))
    with open("rules.tsv", "w", encoding="utf-8") as rules:
        for letter in range(26):  # Full-width letters, two ligatures, spaces of other kinds.
            rules.write(f"{0xFF21 + letter:X}\t{0x41 + letter:X}\n{0xFF41 + letter:X}\t{0x61 + letter:X}\n")
        rules.write("FB01\t66 69\nFB02\t66 6C\n3000\t20\n9\t20\nA\t20\nD\t20\n2460\t31\nBD\t31 2044 32\n65 301\tE9\n")
    write("unigram.json", sentence_piece(
        model_type="unigram", vocab_size=260, normalization_rule_tsv="rules.tsv", remove_extra_whitespaces=True,
        add_dummy_prefix=True, character_coverage=0.98))
    import os
    os.remove("rules.tsv")
