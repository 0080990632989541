#!/usr/bin/env python3
"""Writes byte_level.json, characters.json, sentence_piece.json, unigram.json and word_piece.json: tiny vocabularies, and
what the reference implementations make of nasty texts with them. Needs: pip install tokenizers sentencepiece protobuf

bench/agree_on_tokens.py compares the results with llama.cpp's.
"""
import base64
import io
import json
import random

import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as model_pb2
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

TEXTS = [
    "", " ", "  ", "\n", " \n ", "Hello world", "  leading and trailing  ", "a  b   c\t\td", "line\nline\n\nline\r\n  line",
    "don't DON'T we'll WE'LL I'm it's 'S 'tis o'clock", "1 12 123 1234 12345 1234567 3.14 1,000,000 x1y22z333",
    "x=1;y+=2;/*c*/ // end\n\tif (a<b && c>=d) { return a[0]->b; }\n", "CamelCase HTTPServer snake_case XMLHttpRequest iOS",
    "naïve café Ωmega ÀÉÎ ßẞ", "e\u0301 a\u0308 क्षि ที่นี่", "你好，世界。こんにちは カタカナ 안녕하세요 ①②½ ٣٤٥",
    "🙂👩‍👩‍👧‍👦 !!! ... ??? --- ***", "\u00a0nbsp\u2003em\u3000ideographic", "a\u200bb\ufeffc", "tab\t \t\n \n x", "/// ### $$$ <<>> ^^ ~~ ||",
    " .,!?…。，、।۔،() a.b,c!d", "https://example.com/a?b=c&d=1#frag", "UPPER lower Title ǅ ʰ ª º", "a" * 40, " " * 40 + "x", "\n" * 9 + "x",
    "it’s ‘quoted’ “text” – dash — long", "½ cup, ²nd, ⅷ, ௧", "don't\n\n\n  we'd  \n", "\x00\x01\x7f control",
    "12345abc abc12345 1234567_x 1234567 ١٢٣٤٥٦ 12.3456,78901", "Բարեւ աշխարհ Ელენე ელენე Привет МИР Ꭰꭰ 𝐀𝐛 Ɪᴀ Ꞑ", "a b c d e  f word by word",
    "مرحبا بالعالم، كيف؟ שלום", "ㄅㄆㄇ ㄱㄴㅏ 한국어 漢字かな㐀豈𠀀 ！“全角”、。《書》…", "x   y     z         w                 v", "\t\t\tx\r\n\r\n y \n\n  \n",
    "<sentinel:12> IMGIMGABCZ `code` 'S 'LL 'Ve 'x", "ภาษาไทยง่ายนิดเดียว ພາສາລາວ ភាសាខ្មែរ မြန်မာ", "áé́é́ n̈ĩ́o zalgo̸̢", "user@host:~$ ls -la | grep '^d' > /dev/null 2>&1",
]
CORPUS = [t for t in TEXTS for _ in range(3)] + [
    "the quick brown fox jumps over the lazy dog and the don't we'll you're they've she'd",
    "Hello there, hello world! return function class struct let mut if else while for in 123 456 2024 1999",
    "this is that is the other is an item of the list; the list is long, longer, longest",
]

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|"
END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
CASED_HAN = CASED.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]")
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + END
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + END
QWEN35 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + END
TEKKEN = CASED % ("", "") + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + END
GPT4O = CASED % (CONTRACTIONS + "?", CONTRACTIONS + "?") + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + END
DEEPSEEK3 = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|""" + END
SEED = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + END
YOUTU = CASED % (CONTRACTIONS + "?", CONTRACTIONS + "?") + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + END
KIMI = r"[\p{Han}]+|" + CASED_HAN % (CONTRACTIONS + "?", CONTRACTIONS + "?") + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + END
MINICPM5 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")
JAIS2 = LLAMA3.removesuffix(r"\s+(?!\S)|\s+") + "|".join(r"\s{%d}(?!\S)" % (2**k) for k in range(9, 1, -1)) + r"|\s{1,2}(?!\S)|\s{1}"
EXAONE_MOE = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
CASED_LETTERS = "[" + "".join("-".join(chr(int(end, 16)) for end in ends.split("-")) for ends in (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 "
    "1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE "
    "1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 "
    "2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 "
    "A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A "
    "10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943 "
).split()) + "]+"
ASIAN = "".join(f"{chr(a)}-{chr(b)}" for a, b in [
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0xF900, 0xFAFF), (0x3040, 0x30FF), (0xFF65, 0xFF9F), (0x2F00, 0x2FDF), (0xE40, 0xEFF),
    (0x1780, 0x17FF), (0x1000, 0x109F), (0xAA60, 0xAA7F), (0xA9E0, 0xA9FF), (0xAC00, 0xD7AF), (0x1100, 0x11FF)])
BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def split(*expressions):
    return [pre_tokenizers.Split(Regex(e), "isolated") for e in expressions]


# Per rule: other names for it, the tokenizer's stages.
DIGITS = [pre_tokenizers.Digits(individual_digits=True)]
RULES = {
    "gpt-2": ("phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en jina-v2-code roberta-bpe mpt olmo "
              "jais trillion granite-docling exaone4", [WORDS]),
    "smollm": ("starcoder refact command-r codeshell exaone minerva-7b mellum2", DIGITS + [WORDS]),
    "llama-bpe": ("llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", split(LLAMA3) + [BYTES]),
    "dbrx": ("smaug-bpe chatglm-bpe", split(LLAMA3) + [BYTES]),
    "glm4": ("", split(LLAMA3) + [BYTES]),
    "qwen2": ("deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", split(QWEN2) + [BYTES]),
    "qwen35": ("", split(QWEN35) + [BYTES]),
    "tekken": ("", split(TEKKEN) + [BYTES]),
    "gpt-4o": ("llama4 kanana2 talkie minimax-m2", split(GPT4O) + [BYTES]),
    "granite-embed-multi-97m": ("", split(GPT4O) + [BYTES]),
    "tiny_aya": ("cohere2moe", split(r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O) + [BYTES]),
    "youtu": ("", split("[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+", YOUTU) + [BYTES]),
    "kimi-k2": ("", split(KIMI) + [BYTES]),
    "falcon": ("", [pre_tokenizers.Split(Regex(r"[\p{P}$+<=>^~|`]+"), "isolated"), WORDS] + split("[0-9][0-9][0-9]")),
    "deepseek-llm": ("", split(r"[\r\n]", r"\s?" + CASED_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}+") + [BYTES]),
    "deepseek-coder": ("", split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+") + DIGITS + [BYTES]),
    "deepseek-v3": ("hunyuan-dense joyai-llm", split(r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3) + [BYTES]),
    "bloom": ("poro-chat gpt3-finnish", split(r" ?[^(\s|[.,!?…。，、।۔،])]+") + [BYTES]),
    "viking": ("", split(r" ?[^(\s|[.,!?…。，、।۔،])]+") + DIGITS + [BYTES]),
    "bailingmoe": ("bailingmoe2 llada-moe", split(BAILING) + [BYTES]),
    "seed-coder": ("", split(SEED) + [BYTES]),
    "minicpm5": ("", split(r"\p{N}{1,3}", MINICPM5) + [BYTES]),
    "laguna": ("", split(r"[^\n]+|[\n]+", QWEN2) + [BYTES]),
    "jais-2": ("", split(JAIS2) + [BYTES]),
    "exaone-moe": ("", split(EXAONE_MOE) + [BYTES]),
    "chameleon": ("", split("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )") + DIGITS
                  + [pre_tokenizers.Punctuation(behavior="isolated"), WORDS]),
    "superbpe": ("", split(r"\p{N}+", r"(?=(\d{3})+(?!\d))") + [BYTES]),
    "afmoe": ("", split(r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", f"[{ASIAN}]+", DEEPSEEK3) + [BYTES]),
}
WHOLE_WORDS = {"llama-bpe", "glm4", "tekken", "granite-embed-multi-97m", "youtu", "minicpm5"}


def byte_level():
    # Merges across words show where the rules split, and where they do not.
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = BYTES
    trainer = trainers.BpeTrainer(vocab_size=1300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, max_token_length=12)
    trained.train_from_iterator(CORPUS, trainer)
    vocabulary, merges = parts(trained)
    # A token that no merge makes: only rules that take whole words as they are can find it.
    vocabulary |= {"Ġlongest": len(vocabulary)}
    texts = TEXTS + CORPUS[-3:]
    cases = {}
    for name, (_, rules) in RULES.items():
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=name in WHOLE_WORDS))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(rules)
        cases[name] = [tokenizer.encode(t).ids for t in texts]
    tokens = sorted(vocabulary, key=vocabulary.get)
    names = {name: others.split() for name, (others, _) in RULES.items() if others}
    return {"tokens": tokens, "merges": [" ".join(m) for m in merges], "texts": texts, "names": names, "cases": cases}


def parts(tokenizer):
    """Vocabulary and merges of a BPE tokenizer."""
    model = json.loads(tokenizer.to_str())["model"]
    return dict(model["vocab"]), [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]


def characters():
    """Gemma 4: BPE over characters, with U+2581 for spaces and byte tokens for all others."""
    lines = normalizers.Replace(" ", "\u2581"), pre_tokenizers.Split(Regex(r"[^\n]+|[\n]+"), "isolated")
    trained = Tokenizer(models.BPE())
    trained.normalizer, trained.pre_tokenizer = lines
    trainer = trainers.BpeTrainer(vocab_size=420, show_progress=False, limit_alphabet=90, max_token_length=8)
    trained.train_from_iterator(CORPUS, trainer)
    vocabulary, merges = parts(trained)
    merges = [m for m in merges if "\n" not in "".join(m)]
    for text in ["<pad>", "<eos>", "<bos>", "<unk>"] + [f"<0x{byte:02X}>" for byte in range(256)] + ["\n", "\n\n"]:
        vocabulary.setdefault(text, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True, ignore_merges=False))
    tokenizer.normalizer = lines[0]
    # Only lines of line ends are taken as they are.
    newlines = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>", ignore_merges=True))
    texts = TEXTS + CORPUS[-3:]

    def encode(text):
        words = lines[1].pre_tokenize_str(text)
        return [i for word, _ in words for i in (newlines if word.strip("\n") == "" else tokenizer).encode(word).ids]

    tokens = sorted(vocabulary, key=vocabulary.get)
    kinds = [6 if t.startswith("<0x") else 3 if t in ("<pad>", "<eos>", "<bos>") else 2 if t == "<unk>" else 1 for t in tokens]
    return {"tokens": tokens, "types": kinds, "merges": [" ".join(m) for m in merges], "texts": texts, "cases": [encode(t) for t in texts]}


def word_piece():
    """BERT: WordPiece after its normalizer and pre-tokenizer, uncased and cased."""
    trained = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.normalizer, trained.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=480, special_tokens=special, show_progress=False, limit_alphabet=300)
    trained.train_from_iterator(CORPUS, trainer)
    vocabulary = json.loads(trained.to_str())["model"]["vocab"]
    texts = TEXTS + CORPUS[-3:] + ["x" * 100, "x" * 101, "İSTANBUL ÇŞĞ ﬁ Å 각"]
    cases = {}
    for name, lowercase in [("uncased", True), ("cased", False)]:
        tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        cases[name] = [tokenizer.encode(t).ids for t in texts]
    # As GGUF files spell them.
    spell = lambda t: t if t in special else t[2:] if t.startswith("##") else "\u2581" + t
    tokens = [spell(t) for t in sorted(vocabulary, key=vocabulary.get)]
    return {"tokens": tokens, "types": [3, 2, 3, 3, 3] + [1] * (len(tokens) - 5), "texts": texts, "cases": cases}


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
    if options["model_type"] == "bpe":
        # Gemma: the same without a space before the text.
        proto.normalizer_spec.add_dummy_prefix = False
        processor = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
        result["without_prefix"] = [processor.encode(t) for t in texts]
    if proto.normalizer_spec.precompiled_charsmap:
        result["replacements"] = base64.b64encode(proto.normalizer_spec.precompiled_charsmap).decode()
    return result


def write(name, value):
    with open(name, "w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=True, separators=(",", ":"))
        file.write("\n")


if __name__ == "__main__":
    write("byte_level.json", byte_level())
    write("characters.json", characters())
    write("word_piece.json", word_piece())
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
