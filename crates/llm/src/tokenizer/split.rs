//! Pre-tokenizers: the rules, named by the vocabulary, that cut text into words before any merging.
//!
//! Each rule is one or more stages; a stage cuts every piece that the stage before left, into matches and what lies
//! between them. The published rules end in `\s+(?!\S)|\s+`: a run of white space gives its last character to the word
//! after it. That is the only look-ahead among them, so it is done here by hand, and the rest is left to regular
//! expressions that run in linear time whatever the text.

use regex::Regex;

use crate::{Error, Result};

/// How a run of white space at the end of a match is treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spaces {
    /// As the expression says.
    Plain,
    /// The last character is left to the word that follows, if there is one.
    LeaveLast,
    /// The same, except that a run that ends a line stays whole.
    LeaveLastUnlessLineEnd,
}

#[derive(Clone, Debug)]
struct Stage {
    expression: Regex,
    spaces: Spaces,
}

/// The rules of one pre-tokenizer, and the habits that come with its name.
#[derive(Clone, Debug)]
pub(super) struct Splitter {
    stages: Vec<Stage>,
    /// A word that is a token is that token, whatever the merges say.
    pub(super) ignore_merges: bool,
    /// Whether text starts with the beginning-of-text token when the file does not say.
    pub(super) add_bos: bool,
}

/// The words that GPT-2 cuts; later rules differ in digits, punctuation and line ends.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+";
/// English contractions in either case.
const CONTRACTIONS: &str = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]";
/// Han, and the other scripts that DeepSeek's first vocabularies keep in one piece.
const DEEPSEEK_EAST_ASIAN: &str = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+";
/// A word for the vocabularies that keep punctuation marks as separators.
const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";
/// Letters of scripts with case, as DeepSeek's first vocabulary lists them.
const DEEPSEEK_LETTERS: &str = concat!(
    r"\s?[A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}",
    r"\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}",
    r"\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}",
    r"\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}",
    r"\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}",
    r"\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}",
    r"\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}",
    r"\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}",
    r"\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}",
    r"\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}",
    r"\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}",
    r"\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}",
    r"\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}",
    r"\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}]+",
);

/// Every family of rules, with the names that vocabularies give it.
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
    (Family::DeepseekLlm, &["deepseek-llm"]),
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
    DeepseekLlm,
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
        // The shape that most vocabularies since GPT-4 share: what a word is, and how digits are grouped.
        let modern = |word: &str, digits: &str, after_marks: &str| {
            let marks = format!(r" ?[^\s\p{{L}}\p{{N}}]+{after_marks}");
            (format!(r"{word}|{digits}|{marks}|\s*[\r\n]+|\s+"), LeaveLastUnlessLineEnd)
        };
        let words = format!(r"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+");
        // Words whose capitals come first, optionally with a contraction that belongs to them.
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
            Family::DeepseekLlm => vec![
                plain(r"[\r\n]"),
                plain(DEEPSEEK_LETTERS),
                plain(r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+"),
                plain(r"\s+$"),
                plain(DEEPSEEK_EAST_ASIAN),
                plain(r"\p{N}+"),
            ],
            Family::DeepseekCoder => vec![
                plain(r"[\r\n]"),
                plain(r"\s?\p{L}+"),
                plain(r"\s?\p{P}+"),
                plain(DEEPSEEK_EAST_ASIAN),
                plain(r"\p{N}"),
            ],
            Family::DeepseekV3 => vec![
                plain(r"\p{N}{1,3}"),
                plain("[一-龥\u{3040}-ゟ゠-ヿ]+"),
                (
                    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+"##
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

impl Splitter {
    /// The rules with this name; `None` is a file that names none, for which the oldest rules stand.
    pub(super) fn named(name: Option<&str>) -> Result<Splitter> {
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
        Ok(Splitter {
            stages: stages.collect::<Result<_>>()?,
            ignore_merges: matches!(family, Family::Llama3 { whole_words: true, .. } | Family::Tekken),
            add_bos: matches!(family, Family::Llama3 { bos: true, .. } | Family::Tekken),
        })
    }

    /// Calls `word` for every word of the text, in order; together they are the text.
    pub(super) fn split<'t>(&self, text: &'t str, word: &mut impl FnMut(&'t str)) {
        split_by(&self.stages, text, word);
    }
}

/// Every name that [`Splitter::named`] knows.
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
    // A search starts anew after a shortened match, so that the character left over can begin the next word.
    while let Some(found) = stage.expression.find(rest) {
        let (before, from) = rest.split_at(found.start());
        let (matched, after) = from.split_at(found.len());
        let keep = matched.len() - left_over(stage.spaces, matched, after);
        if keep == 0 {
            break; // No expression above matches the empty text; this only makes the loop's end plain.
        }
        split_by(later, before, word);
        let (matched, after) = from.split_at(keep);
        split_by(later, matched, word);
        rest = after;
    }
    split_by(later, rest, word);
}

/// How many bytes at the end of a run of white space belong to what follows it.
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
    // A run is looked at from its end: words that are not white space are told apart at once.
    let is_run = last.is_whitespace() && matched.chars().all(char::is_whitespace);
    // When the expression stopped before the end of the run, the rest of it is not a word that could take the space.
    let run_goes_on = after.chars().next().is_some_and(char::is_whitespace);
    if stays || !is_run || run_goes_on { 0 } else { last.len_utf8() }
}
