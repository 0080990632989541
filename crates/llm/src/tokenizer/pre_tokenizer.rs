//! Pre-tokenizers: rules, named by the vocabulary, that split text into words before BPE merges them.
//!
//! A pre-tokenizer has one or more stages; each stage splits every word of the previous stage into the matches of a
//! regular expression and the text between them. The published expressions end in `\s+(?!\S)|\s+`: the last character
//! of a run of white space belongs to the next word. That is their only look-ahead, so it is implemented in code, and
//! the rest with regular expressions that run in linear time.

use regex::Regex;

use crate::{Error, Result};

/// The treatment of a match that is a run of white space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spaces {
    /// The match is a word.
    Plain,
    /// The last character belongs to the next word, if there is one.
    LeaveLast,
    /// The same, unless the run ends with a line end.
    LeaveLastUnlessLineEnd,
}

#[derive(Clone, Debug)]
struct Stage {
    expression: Regex,
    spaces: Spaces,
}

/// A pre-tokenizer, and the tokenizer defaults that its name implies.
#[derive(Clone, Debug)]
pub(super) struct PreTokenizer {
    stages: Vec<Stage>,
    /// Whether a word that is in the vocabulary becomes that token without merging.
    pub(super) ignore_merges: bool,
    /// Whether text starts with the beginning-of-text token when the file does not say.
    pub(super) add_bos: bool,
}

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
/// BLOOM's words: anything but white space, brackets, bars and the marks that end clauses, Latin, Chinese, Hindi, Urdu
/// and Arabic; a space before belongs to them.
const BLOOM: &str = r" ?[^\s()|.,!?…。，、।۔،]+";

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
    (Family::Gpt4o, &["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"]),
    (Family::Falcon, &["falcon"]),
    (Family::DeepseekCoder, &["deepseek-coder"]),
    (Family::DeepseekV3, &["deepseek-v3", "hunyuan-dense", "joyai-llm"]),
    (Family::Bloom { single_digits: false }, &["bloom", "poro-chat", "gpt3-finnish"]),
    (Family::Bloom { single_digits: true }, &["viking"]),
    (Family::Bailing, &["bailingmoe", "bailingmoe2", "llada-moe"]),
    (Family::SeedCoder, &["seed-coder"]),
];

#[derive(Clone, Copy)]
enum Family {
    Default,
    Gpt2,
    SingleDigits,
    Llama3 { whole_words: bool, bos: bool },
    Qwen2,
    Qwen35,
    Tekken,
    Gpt4o,
    Falcon,
    DeepseekCoder,
    DeepseekV3,
    Bloom { single_digits: bool },
    Bailing,
    SeedCoder,
}

impl Family {
    /// The stages, in order.
    fn stages(self) -> Vec<(String, Spaces)> {
        use Spaces::{LeaveLast, LeaveLastUnlessLineEnd, Plain};
        let plain = |expression: &str| (expression.to_owned(), Plain);
        let gpt2 = || (GPT2.to_owned(), LeaveLast);
        // Most pre-tokenizers since GPT-4 differ only in words, groups of digits and line ends after punctuation.
        let modern = |word: &str, digits: &str, after_marks: &str| {
            let marks = format!(r" ?[^\s\p{{L}}\p{{N}}]+{after_marks}");
            (format!(r"{word}|{digits}|{marks}|\s*[\r\n]+|\s+"), LeaveLastUnlessLineEnd)
        };
        let words = format!(r"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+");
        // Words that begin with capitals, with an optional contraction.
        let cased = |ending: &str| {
            let upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]";
            let lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]";
            let start = r"[^\r\n\p{L}\p{N}]?";
            format!("{start}{upper}*{lower}+{ending}|{start}{upper}+{lower}*{ending}")
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
                LeaveLastUnlessLineEnd,
            )],
            Family::Tekken => vec![modern(&cased(""), r"\p{N}", r"[\r\n/]*")],
            Family::Gpt4o => vec![modern(&cased(&format!("(?:{CONTRACTIONS})?")), r"\p{N}{1,3}", r"[\r\n/]*")],
            Family::Falcon => vec![plain(r"[\p{P}$+<=>^~|`]+"), gpt2(), plain("[0-9][0-9][0-9]")],
            Family::DeepseekCoder => vec![
                plain(r"[\r\n]"),
                plain(r"\s?\p{L}+"),
                plain(r"\s?\p{P}+"),
                plain(EAST_ASIAN),
                plain(r"\p{N}"),
            ],
            Family::DeepseekV3 => vec![
                plain(r"\p{N}{1,3}"),
                plain(HAN_AND_KANA),
                (
                    // ASCII punctuation and the ASCII letters after it are one word.
                    r"[[:punct:]][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+"
                        .to_owned(),
                    LeaveLastUnlessLineEnd,
                ),
            ],
            Family::Bloom { single_digits: false } => vec![plain(BLOOM)],
            Family::Bloom { single_digits: true } => vec![plain(BLOOM), plain(r"\p{N}")],
            Family::Bailing => vec![(
                r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+"
                    .to_owned(),
                LeaveLastUnlessLineEnd,
            )],
            Family::SeedCoder => vec![modern(&words, r"\p{N}", "")],
        }
    }
}

impl PreTokenizer {
    /// The pre-tokenizer with this name; `None`, for files without a name, is the default one.
    pub(super) fn named(name: Option<&str>) -> Result<PreTokenizer> {
        let name = name.unwrap_or("default");
        let family = FAMILIES.iter().find(|(_, names)| names.contains(&name)).map(|(family, _)| *family);
        let Some(family) = family else {
            return Err(Error::UnknownPreTokenizer { name: name.to_owned(), known: known().join(", ") });
        };
        let stages = family.stages().into_iter().map(|(expression, spaces)| {
            let expression = Regex::new(&expression)
                .map_err(|error| Error::Vocabulary { reason: format!("the rules of '{name}': {error}") })?;
            Ok(Stage { expression, spaces })
        });
        Ok(PreTokenizer {
            stages: stages.collect::<Result<_>>()?,
            ignore_merges: matches!(family, Family::Llama3 { whole_words: true, .. } | Family::Tekken),
            add_bos: matches!(family, Family::Llama3 { bos: true, .. } | Family::Tekken),
        })
    }

    /// Calls `word` for every word of the text, in order. Their concatenation is the text.
    pub(super) fn split<'t>(&self, text: &'t str, word: &mut impl FnMut(&'t str)) {
        split_by(&self.stages, text, word);
    }
}

/// Every name that [`PreTokenizer::named`] knows.
pub(super) fn known() -> Vec<&'static str> {
    FAMILIES.iter().flat_map(|(_, names)| names.iter().copied()).collect()
}

fn split_by<'t>(stages: &[Stage], text: &'t str, word: &mut impl FnMut(&'t str)) {
    let Some((stage, later)) = stages.split_first() else {
        if !text.is_empty() {
            word(text);
        }
        return;
    };
    let mut rest = text;
    // The search restarts after a shortened match, so that the next word can begin with the character left over.
    while let Some(found) = stage.expression.find(rest) {
        let (before, from) = rest.split_at(found.start());
        let (matched, after) = from.split_at(found.len());
        let keep = matched.len() - left_over(stage.spaces, matched, after);
        if keep == 0 {
            break; // No expression matches the empty text; this guarantees that the loop ends.
        }
        split_by(later, before, word);
        let (matched, after) = from.split_at(keep);
        split_by(later, matched, word);
        rest = after;
    }
    split_by(later, rest, word);
}

/// The number of bytes at the end of a run of white space that belong to the next word.
fn left_over(spaces: Spaces, matched: &str, after: &str) -> usize {
    let mut characters = matched.chars();
    let (Some(last), Some(_), false) = (characters.next_back(), characters.next_back(), after.is_empty())
    else {
        return 0;
    };
    let stays = match spaces {
        Spaces::Plain => true,
        Spaces::LeaveLast => false,
        Spaces::LeaveLastUnlessLineEnd => matches!(last, '\r' | '\n'),
    };
    // Checking the last character first is fast for words that are not white space.
    let is_run = last.is_whitespace() && matched.chars().all(char::is_whitespace);
    // If the match ended before the end of the run, white space follows, and not a word.
    let run_goes_on = after.chars().next().is_some_and(char::is_whitespace);
    if stays || !is_run || run_goes_on { 0 } else { last.len_utf8() }
}

#[cfg(test)]
mod tests {
    use super::PreTokenizer;

    /// Expected words by the published expressions, split by hand.
    #[test]
    fn words_are_split_as_published() {
        let cases: &[(&str, &str, &[&str])] = &[
            (
                "gpt-2",
                "It's  a test 123!!\n\nx",
                &["It", "'s", " ", " a", " test", " 123", "!!", "\n", "\n", "x"],
            ),
            ("smollm", "a12 b\n", &["a", "1", "2", " b", "\n"]),
            (
                "llama-bpe",
                "It'S 12345 a.b\n\n  x",
                &["It", "'S", " ", "123", "45", " a", ".b", "\n\n", " ", " x"],
            ),
            ("qwen2", "x=12;\n", &["x", "=", "1", "2", ";\n"]),
            ("tekken", "CamelCase don't", &["Camel", "Case", " don", "'t"]),
            ("gpt-4o", "CamelCase don't 1234", &["Camel", "Case", " don't", " ", "123", "4"]),
            ("deepseek-v3", "日本語テスト 12345 a_x", &["日本語テスト", " ", "123", "45", " a", "_x"]),
            ("deepseek-coder", "한국어 abc, 42\n", &["한국어", " abc", ",", " ", "4", "2", "\n"]),
            ("bloom", "Hi, you (there)", &["Hi", ",", " you", " (", "there", ")"]),
            ("viking", "a 12", &["a", " ", "1", "2"]),
            ("falcon", "a+b 1234", &["a", "+", "b", " ", "123", "4"]),
        ];
        for (name, text, words) in cases {
            let mut got = Vec::new();
            match PreTokenizer::named(Some(name)) {
                Ok(pre_tokenizer) => pre_tokenizer.split(text, &mut |word| got.push(word)),
                Err(error) => got.push(Box::leak(error.to_string().into_boxed_str())),
            }
            assert_eq!(got, *words, "{name}: {text:?}");
        }
    }

    /// The boundaries of character classes that are code point ranges.
    #[test]
    fn ranges_begin_and_end_where_the_scripts_do() {
        let words = |name: &str, text: &'static str| {
            let mut got = Vec::new();
            if let Ok(pre_tokenizer) = PreTokenizer::named(Some(name)) {
                pre_tokenizer.split(text, &mut |word| got.push(word));
            }
            got.len()
        };
        // For DeepSeek V3, hiragana, katakana and ideographs are one word; Hangul is another one.
        assert_eq!(words("deepseek-v3", "あゟアヿ一龥"), 1);
        assert_eq!(words("deepseek-v3", "一한"), 2);
        assert_eq!(words("deepseek-v3", "一\u{9FA6}"), 2);
        assert_eq!(words("deepseek-coder", "一한"), 1);
    }

    #[test]
    fn unknown_names_are_an_error() {
        let error = PreTokenizer::named(Some("deepseek-llm")).map(drop).map_err(|error| error.to_string());
        assert!(
            error.is_err_and(|text| text.contains("\"deepseek-llm\"") && text.contains("deepseek-coder"))
        );
    }
}
