//! The tokens that end the generation.

use rustc_hash::FxHashSet;

use super::vocabulary::{TokenType, Vocabulary};

/// Texts of end-of-generation tokens, whatever type the file gives them.
const ENDINGS: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
];

/// Texts that only look like endings in a vocabulary with certain other tokens: those of OpenAI's harmony format and of
/// Solar, in which `<|end|>` ends a message and not the turn, and of Gemma 4.
const EXCEPTIONS: &[(&str, &[&str])] = &[
    ("<|end|>", &["<|return|>", "<|call|>"]),
    ("<|end|>", &["<|flush|>", "<|calls|>"]),
    ("</s>", &["<|tool_response>"]),
];

/// Whether a token with this text ends generation in most vocabularies, whatever its file says.
pub fn is_known_ending(text: &str) -> bool {
    ENDINGS.contains(&text)
}

/// Finds the end-of-generation tokens, and turns those with a well-known text into control tokens.
pub(super) fn mark_endings(vocabulary: &mut Vocabulary) -> FxHashSet<u32> {
    let texts: FxHashSet<&str> =
        vocabulary.tokens.iter().map(String::as_str).filter(|text| ENDINGS.contains(text)).collect();
    let is_exception = |text: &str| {
        let with = |others: &[&str]| others.iter().all(|other| texts.contains(other));
        EXCEPTIONS.iter().any(|(exception, others)| *exception == text && with(others))
    };
    let named = [vocabulary.eos, vocabulary.eot, vocabulary.eom];
    let mut endings: FxHashSet<u32> = named.into_iter().flatten().collect();
    vocabulary.types.resize(vocabulary.tokens.len(), TokenType::Normal);
    for ((token, text), token_type) in (0u32..).zip(&vocabulary.tokens).zip(&mut vocabulary.types) {
        if is_exception(text) {
            endings.remove(&token);
        } else if texts.contains(text.as_str()) {
            endings.insert(token);
            *token_type = TokenType::Control;
        }
    }
    endings
}

#[cfg(test)]
mod tests {
    use super::mark_endings;
    use crate::tokenizer::{TokenType, Vocabulary};

    #[test]
    fn the_end_of_a_message_is_an_ending_only_where_no_other_token_ends_the_turn() {
        let endings = |tokens: &[&str]| {
            let tokens: Vec<String> = tokens.iter().map(|&text| text.to_owned()).collect();
            let mut vocabulary = Vocabulary { tokens, eot: Some(0), ..Vocabulary::default() };
            let mut found: Vec<u32> = mark_endings(&mut vocabulary).into_iter().collect();
            found.sort_unstable();
            (found, vocabulary.types.first().copied())
        };
        // Phi, gpt-oss, Solar, Gemma 4.
        assert_eq!(endings(&["<|end|>", "a"]), (vec![0], Some(TokenType::Control)));
        assert_eq!(endings(&["<|end|>", "<|return|>", "<|call|>"]), (vec![1, 2], Some(TokenType::Normal)));
        assert_eq!(endings(&["<|end|>", "<|calls|>", "<|flush|>"]), (vec![1, 2], Some(TokenType::Normal)));
        assert_eq!(endings(&["</s>", "<|tool_response>"]), (vec![1], Some(TokenType::Normal)));
    }
}
