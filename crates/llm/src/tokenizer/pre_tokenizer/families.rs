//! The families of pre-tokenizers, with the names that vocabularies use and the published expressions.

use super::{DefaultBos, MatchRule};

/// The words of GPT-2; later pre-tokenizers differ in digits, punctuation and line ends.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+";
/// English contractions in either case.
const CONTRACTIONS: &str = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]";
/// East Asian text, which DeepSeek Coder does not split: from U+0800, where the Basic Multilingual Plane's rarer
/// scripts begin, to U+9FA5, the last ideograph of Unicode 1.1; and from U+AC00, the first Hangul syllable, to U+D7FF,
/// the end of the Hangul blocks.
const EAST_ASIAN: &str = r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}]+";
/// The same for DeepSeek V3: the blocks Hiragana and Katakana, and the ideographs of Unicode 1.1.
const HAN_AND_KANA: &str = r"[\x{3040}-\x{30FF}\x{4E00}-\x{9FA5}]+";
/// DeepSeek LLM's letters: those with case of Unicode 11, but for small letters of Armenian, Georgian without
/// Asomtavruli and Mtavruli, later Latin and Cyrillic blocks, mathematical letters and rare scripts.
const CASED_LETTERS: &str = r"[[\p{Lu}\p{Ll}\p{Lt}]--[\x{560}-\x{58F}\x{10C6}-\x{10FF}\x{1C80}-\x{1C8F}\x{2D00}-\x{2D2F}\x{A790}-\x{A7FF}\x{AB30}-\x{AB6F}\x{10570}-\x{105BF}\x{10D50}-\x{10D8F}\x{16E40}-\x{16EDF}\x{1D400}-\x{1DFFF}]]";
/// The scripts that AFMoE keeps apart from others: Han, kana, Thai, Lao, Khmer, Burmese and Hangul. (llama.cpp's range
/// of compatibility ideographs begins at U+8C48, which is U+F900 after normalization.)
const ASIAN_SCRIPTS: &str = r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{F900}-\x{FAFF}\x{3040}-\x{30FF}\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}\x{E40}-\x{EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+";
/// Youtu's words of Hangul, of Chinese punctuation, of Bopomofo, and of Han and kana.
const YOUTU: &str = r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+|[！…“”‘’—：；，\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+|[\x{3105}-\x{312F}]+|[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+";
/// BLOOM's words: anything but white space, brackets, bars and the marks that end clauses, Latin, Chinese, Hindi, Urdu
/// and Arabic; a space before belongs to them.
const BLOOM: &str = r" ?[^\s()|.,!?…。，、।۔،]+";
/// Lines and runs of line ends.
const LINES: &str = r"[^\n]+|\n+";

/// Every family of pre-tokenizers, with the names that vocabularies use.
const FAMILIES: &[(Family, &[&str])] = &[
    (Family::Default, &["default"]),
    (
        Family::Gpt2,
        &[
            "gpt-2",
            "phi-2",
            "jina-es",
            "jina-de",
            "gigachat",
            "jina-v2-es",
            "jina-v2-de",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "jina-v1-en",
            "jina-v2-code",
            "roberta-bpe",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
        ],
    ),
    (
        Family::SingleDigits,
        &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"],
    ),
    (
        Family::Llama3 { whole_words: true, bos: true },
        &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
        ],
    ),
    (Family::Llama3 { whole_words: false, bos: false }, &["dbrx", "smaug-bpe", "chatglm-bpe"]),
    (Family::Llama3 { whole_words: true, bos: false }, &["glm4", "glm5"]),
    (
        Family::Qwen2,
        &[
            "qwen2",
            "deepseek-r1-qwen",
            "kormo",
            "f2llmv2",
            "megrez",
            "stablelm2",
            "hunyuan",
            "solar-open",
            "grok-2",
        ],
    ),
    (Family::Qwen35, &["qwen35"]),
    (Family::Tekken, &["tekken"]),
    (Family::Gpt4o { whole_words: false }, &["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"]),
    (Family::Gpt4o { whole_words: true }, &["granite-embed-multi-97m"]),
    (Family::Aya, &["tiny_aya", "cohere2moe"]),
    (Family::Youtu, &["youtu"]),
    (Family::KimiK2, &["kimi-k2"]),
    (Family::Falcon, &["falcon"]),
    (Family::DeepseekLlm, &["deepseek-llm"]),
    (Family::DeepseekCoder, &["deepseek-coder"]),
    (Family::DeepseekV3, &["deepseek-v3", "hunyuan-dense", "joyai-llm"]),
    (Family::Bloom { single_digits: false }, &["bloom", "poro-chat", "gpt3-finnish"]),
    (Family::Bloom { single_digits: true }, &["viking"]),
    (Family::Bailing, &["bailingmoe", "bailingmoe2", "llada-moe"]),
    (Family::SeedCoder, &["seed-coder"]),
    (Family::MiniCpm5, &["minicpm5"]),
    (Family::Laguna, &["laguna"]),
    (Family::Jais2, &["jais-2"]),
    (Family::ExaoneMoe, &["exaone-moe"]),
    (Family::Chameleon, &["chameleon"]),
    (Family::SuperBpe, &["superbpe"]),
    (Family::Afmoe, &["afmoe"]),
    (Family::Gemma4, &["gemma4", "granite-embed-multi-311m"]),
    (Family::Sarvam, &["sarvam-moe"]),
];

/// A set of rules.
#[derive(Clone, Copy)]
pub(super) enum Family {
    Default,
    Gpt2,
    SingleDigits,
    Llama3 { whole_words: bool, bos: bool },
    Qwen2,
    Qwen35,
    Tekken,
    Gpt4o { whole_words: bool },
    Aya,
    Youtu,
    KimiK2,
    Falcon,
    DeepseekLlm,
    DeepseekCoder,
    DeepseekV3,
    Bloom { single_digits: bool },
    Bailing,
    SeedCoder,
    MiniCpm5,
    Laguna,
    Jais2,
    ExaoneMoe,
    Chameleon,
    SuperBpe,
    Afmoe,
    Gemma4,
    Sarvam,
}

/// Every name of a family.
pub(super) fn known() -> Vec<&'static str> {
    FAMILIES.iter().flat_map(|(_, names)| names.iter().copied()).collect()
}

impl Family {
    /// The family of a name.
    pub(super) fn named(name: &str) -> Option<Family> {
        FAMILIES.iter().find(|(_, names)| names.contains(&name)).map(|(family, _)| *family)
    }

    /// Whether a word that is in the vocabulary becomes that token without merging.
    pub(super) fn ignores_merges(self) -> bool {
        matches!(
            self,
            Family::Llama3 { whole_words: true, .. }
                | Family::Tekken
                | Family::Gpt4o { whole_words: true }
                | Family::Youtu
                | Family::MiniCpm5
        )
    }

    /// Whether prompts begin with the beginning-of-text token.
    pub(super) fn default_bos(self) -> DefaultBos {
        match self {
            Family::Llama3 { bos: true, .. } | Family::Tekken | Family::Chameleon => DefaultBos::Yes,
            Family::Gemma4 => DefaultBos::Always,
            _ => DefaultBos::No,
        }
    }

    /// The stages, in order.
    pub(super) fn stages(self) -> Vec<(String, MatchRule)> {
        use MatchRule::{
            GroupsOfThree, LeaveLastSpace, LeaveLastSpaceUnlessLineEnd, SpacesByPowersOfTwo, Word,
        };
        let plain = |expression: &str| (expression.to_owned(), Word);
        let digits = |expression: &str| (expression.to_owned(), GroupsOfThree);
        let gpt2 = || (GPT2.to_owned(), LeaveLastSpace);
        // Most pre-tokenizers since GPT-4 differ only in words, groups of digits and line ends after punctuation.
        let modern = |word: &str, digits: &str, after_marks: &str| {
            let marks = format!(r" ?[^\s\p{{L}}\p{{N}}]+{after_marks}");
            (format!(r"{word}|{digits}|{marks}|\s*[\r\n]+|\s+"), LeaveLastSpaceUnlessLineEnd)
        };
        let words = format!(r"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+");
        // Words that begin with capitals, of some letters only, with an optional contraction.
        let cased = |only: &str, ending: &str| {
            let upper = format!(r"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{only}]");
            let lower = format!(r"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{only}]");
            let start = r"[^\r\n\p{L}\p{N}]?";
            format!("{start}{upper}*{lower}+{ending}|{start}{upper}+{lower}*{ending}")
        };
        let contraction = format!("(?:{CONTRACTIONS})?");
        let gpt4o = |digits: &str| modern(&cased("", &contraction), digits, r"[\r\n/]*");
        let deepseek_words = || {
            // ASCII punctuation and the ASCII letters after it are one word.
            let words = r"[[:punct:]][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+";
            let marks = r" ?[\p{P}\p{S}]+[\r\n]*";
            (format!(r"{words}|{marks}|\s*[\r\n]+|\s+"), LeaveLastSpaceUnlessLineEnd)
        };
        match self {
            Family::Default => {
                vec![plain(r"[\p{P}$+<=>^~|]+"), gpt2(), plain(r"\p{N}+"), plain("[0-9][0-9][0-9]")]
            }
            Family::Gpt2 => vec![gpt2()],
            Family::SingleDigits => vec![plain(r"\p{N}"), gpt2()],
            Family::Llama3 { .. } => vec![modern(&words, r"\p{N}{1,3}", r"[\r\n]*")],
            Family::Qwen2 => vec![modern(&words, r"\p{N}", r"[\r\n]*")],
            Family::Qwen35 => vec![(
                format!(
                    r"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+"
                ),
                LeaveLastSpaceUnlessLineEnd,
            )],
            Family::Tekken => vec![modern(&cased("", ""), r"\p{N}", r"[\r\n/]*")],
            Family::Gpt4o { .. } => vec![gpt4o(r"\p{N}{1,3}")],
            // Digits at the end of a word are grouped from the right.
            Family::Aya => vec![digits(r"\d+\b"), gpt4o(r"\p{N}{1,3}")],
            Family::Youtu => vec![plain(YOUTU), gpt4o(r"\p{N}")],
            Family::KimiK2 => {
                let words = cased(r"&&[^\p{Han}]", &contraction);
                vec![modern(&format!(r"\p{{Han}}+|{words}"), r"\p{N}{1,3}", r"[\r\n]*")]
            }
            Family::Falcon => vec![plain(r"[\p{P}$+<=>^~|`]+"), gpt2(), plain("[0-9][0-9][0-9]")],
            Family::DeepseekLlm => vec![
                plain(r"[\r\n]"),
                plain(&format!(r"\s?{CASED_LETTERS}+")),
                // ASCII without digits, its full-width forms, quotation marks and ideographic punctuation.
                plain(r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+"),
                plain(r"\s+$"),
                plain(EAST_ASIAN),
                plain(r"\p{N}+"),
            ],
            Family::DeepseekCoder => vec![
                plain(r"[\r\n]"),
                plain(r"\s?\p{L}+"),
                plain(r"\s?\p{P}+"),
                plain(EAST_ASIAN),
                plain(r"\p{N}"),
            ],
            Family::DeepseekV3 => vec![plain(r"\p{N}{1,3}"), plain(HAN_AND_KANA), deepseek_words()],
            Family::Bloom { single_digits: false } => vec![plain(BLOOM)],
            Family::Bloom { single_digits: true } => vec![plain(BLOOM), plain(r"\p{N}")],
            Family::Bailing => vec![(
                r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+"
                    .to_owned(),
                LeaveLastSpaceUnlessLineEnd,
            )],
            Family::SeedCoder => vec![modern(&words, r"\p{N}", "")],
            Family::MiniCpm5 => vec![plain(r"\p{N}{1,3}"), modern(&words, r"\p{N}+", r"[\r\n]*")],
            Family::Laguna => vec![plain(LINES), modern(&words, r"\p{N}", r"[\r\n]*")],
            Family::Jais2 => {
                let (expression, _) = modern(&words, r"\p{N}{1,3}", r"[\r\n]*");
                vec![(expression, SpacesByPowersOfTwo)]
            }
            Family::ExaoneMoe => vec![(
                // Letters that are separated by single spaces are one word.
                format!(
                    r"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|\s+"
                ),
                LeaveLastSpaceUnlessLineEnd,
            )],
            Family::Chameleon => vec![
                plain("<sentinel:[0-9]+>"),
                plain("IMGIMG[A-I]{1,4}Z"),
                plain(r"[\t\n]|    |  "),
                plain(r"\p{N}"),
                plain(r"[\p{P}[:punct:]]"),
                gpt2(),
            ],
            Family::SuperBpe => vec![plain(r"\p{N}+"), digits(r"\d+")],
            Family::Afmoe => vec![digits(r"\p{N}+"), plain(ASIAN_SCRIPTS), deepseek_words()],
            Family::Gemma4 | Family::Sarvam => vec![plain(LINES)],
        }
    }
}
