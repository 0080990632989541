//! Pre-tokenizers: rules, named by the vocabulary, that split text into words before BPE merges them.
//!
//! A pre-tokenizer has one or more stages; each stage splits every word of the previous stage into the matches of a
//! regular expression and the text between them. The published expressions end in `\s+(?!\S)|\s+`: the last character
//! of a run of white space belongs to the next word. That look-ahead and the one that groups digits from the right are
//! implemented in code, and the rest with regular expressions that run in linear time.

mod families;

use regex::Regex;

use self::families::Family;
use crate::{Error, Result};

/// How a match becomes words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MatchRule {
    /// It is a word.
    Word,
    /// The same, but the last character of a run of white space belongs to the next word, if there is one.
    LeaveLastSpace,
    /// The same, unless the run ends with a line end.
    LeaveLastSpaceUnlessLineEnd,
    /// The same, and a run is a word for each power of two, up to 512 characters.
    SpacesByPowersOfTwo,
    /// Groups of three characters, counted from the right: digits.
    GroupsOfThree,
}

#[derive(Clone, Debug)]
struct Stage {
    expression: Regex,
    rule: MatchRule,
}

/// A pre-tokenizer, and the tokenizer defaults that its name implies.
#[derive(Clone, Debug)]
pub(super) struct PreTokenizer {
    stages: Vec<Stage>,
    /// Whether a word that is in the vocabulary becomes that token without merging.
    pub(super) ignore_merges: bool,
    /// Whether the same holds for words of line ends alone.
    pub(super) ignore_merges_of_line_ends: bool,
    /// Whether text starts with the beginning-of-text token: when the file does not say, or in any case.
    pub(super) add_bos: DefaultBos,
    /// Whether the vocabulary consists of characters with U+2581 for spaces, and not of bytes.
    pub(super) characters: bool,
}

/// Whether prompts begin with the beginning-of-text token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DefaultBos {
    /// If the file says so.
    No,
    /// Unless the file says that they do not.
    Yes,
    /// Whatever the file says: published files of the family say the opposite of what the model wants.
    Always,
}

impl PreTokenizer {
    /// The pre-tokenizer with this name; `None`, for files without a name, is the default one.
    pub(super) fn named(name: Option<&str>) -> Result<PreTokenizer> {
        let name = name.unwrap_or("default");
        let Some(family) = Family::named(name) else {
            let known = families::known().join(", ");
            return Err(Error::UnknownPreTokenizer { name: name.to_owned(), known });
        };
        let stages = family.stages().into_iter().map(|(expression, rule)| {
            let expression = Regex::new(&expression)
                .map_err(|error| Error::Vocabulary { reason: format!("the rules of '{name}': {error}") })?;
            Ok(Stage { expression, rule })
        });
        Ok(PreTokenizer {
            stages: stages.collect::<Result<_>>()?,
            ignore_merges: family.ignores_merges(),
            ignore_merges_of_line_ends: matches!(family, Family::Gemma4),
            add_bos: family.default_bos(),
            characters: matches!(family, Family::Gemma4 | Family::Sarvam),
        })
    }

    /// Calls `word` for every word of the text, in order. Their concatenation is the text.
    pub(super) fn split<'t>(&self, text: &'t str, word: &mut impl FnMut(&'t str)) {
        split_by(&self.stages, text, word);
    }
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
        let keep = word_length(stage.rule, matched, after);
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

/// The number of bytes at the start of a match that are a word.
fn word_length(rule: MatchRule, matched: &str, after: &str) -> usize {
    match rule {
        MatchRule::Word => matched.len(),
        MatchRule::LeaveLastSpace => matched.len() - left_over(matched, after),
        MatchRule::LeaveLastSpaceUnlessLineEnd if matched.ends_with(['\r', '\n']) => matched.len(),
        MatchRule::LeaveLastSpaceUnlessLineEnd => matched.len() - left_over(matched, after),
        MatchRule::SpacesByPowersOfTwo if matched.ends_with(['\r', '\n']) => matched.len(),
        MatchRule::SpacesByPowersOfTwo => match matched.len() - left_over(matched, after) {
            whole if !is_white_space(matched) => whole,
            run => {
                let count = matched.get(..run).unwrap_or_default().chars().take(512).count();
                first_characters(matched, 1 << count.checked_ilog2().unwrap_or(0))
            }
        },
        MatchRule::GroupsOfThree => match matched.chars().count() % 3 {
            0 => first_characters(matched, 3),
            rest => first_characters(matched, rest),
        },
    }
}

/// The number of bytes of the first characters of a text.
fn first_characters(text: &str, count: usize) -> usize {
    text.char_indices().nth(count).map_or(text.len(), |(at, _)| at)
}

fn is_white_space(text: &str) -> bool {
    text.chars().all(char::is_whitespace)
}

/// The number of bytes at the end of a run of white space that belong to the next word.
fn left_over(matched: &str, after: &str) -> usize {
    let mut characters = matched.chars();
    let (Some(last), Some(_), false) = (characters.next_back(), characters.next_back(), after.is_empty())
    else {
        return 0;
    };
    // Checking the last character first is fast for words that are not white space.
    let is_run = last.is_whitespace() && is_white_space(matched);
    // If the match ended before the end of the run, white space follows, and not a word.
    let run_goes_on = after.chars().next().is_some_and(char::is_whitespace);
    if !is_run || run_goes_on { 0 } else { last.len_utf8() }
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
        let error = PreTokenizer::named(Some("deepseek-x")).map(drop).map_err(|error| error.to_string());
        assert!(error.is_err_and(|text| text.contains("\"deepseek-x\"") && text.contains("deepseek-coder")));
    }
}
