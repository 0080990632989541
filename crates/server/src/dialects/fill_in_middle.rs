//! Prompts for text between a prefix and a suffix, for models that were trained to write it.

use quadriga_llm::Model;

use crate::error::{ApiError, ErrorKind};
use crate::generation::PromptPart;
use crate::model::ServedModel;

/// The tokens that mark the parts of a text with a gap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FillTokens {
    prefix: u32,
    suffix: u32,
    middle: u32,
    repository: Option<u32>,
    file: Option<u32>,
}

/// A file beside the text, by name.
pub(crate) struct ExtraFile {
    pub(crate) name: String,
    pub(crate) text: String,
}

/// Keys of the file, and names of tokens in vocabularies whose files lack them.
const PREFIX: (&str, &[&str]) = (
    "tokenizer.ggml.fim_pre_token_id",
    &[
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<｜fim▁begin｜>",
        "<PRE>",
        "▁<PRE>",
        "<|code_prefix|>",
    ],
);
const SUFFIX: (&str, &[&str]) = (
    "tokenizer.ggml.fim_suf_token_id",
    &[
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<｜fim▁hole｜>",
        "<SUF>",
        "▁<SUF>",
        "<|code_suffix|>",
    ],
);
const MIDDLE: (&str, &[&str]) = (
    "tokenizer.ggml.fim_mid_token_id",
    &[
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<｜fim▁end｜>",
        "<MID>",
        "▁<MID>",
        "<|code_middle|>",
    ],
);
const REPOSITORY: (&str, &[&str]) = (
    "tokenizer.ggml.fim_rep_token_id",
    &["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<reponame>", "<repo_name>"],
);
const FILE: (&str, &[&str]) = ("tokenizer.ggml.fim_sep_token_id", &["<|file_sep|>", "<file_sep>"]);

impl FillTokens {
    /// The tokens of a model, if it has those that are needed.
    pub(crate) fn of(model: &Model) -> Option<FillTokens> {
        let tokens = &model.tokenizer().ok()?.vocabulary().tokens;
        let find = |(key, names): (&str, &[&str])| {
            let of_file = model.file().find::<u32>(key).ok().flatten();
            let valid = of_file.filter(|token| (*token as usize) < tokens.len());
            let named = || tokens.iter().position(|token| names.contains(&token.as_str()));
            valid.or_else(|| named().and_then(|token| u32::try_from(token).ok()))
        };
        Some(FillTokens {
            prefix: find(PREFIX)?,
            suffix: find(SUFFIX)?,
            middle: find(MIDDLE)?,
            repository: find(REPOSITORY),
            file: find(FILE),
        })
    }

    /// The error of a model that has none.
    pub(crate) fn missing(served: &ServedModel) -> ApiError {
        let message =
            format!("{} was not trained to fill a gap in a text: it has no tokens for that", served.name);
        ApiError::new(ErrorKind::Unsupported, message)
    }

    /// The prompt. Other files come first, then what is before the gap, then what is behind it.
    pub(crate) fn prompt(
        &self,
        before: &str,
        behind: &str,
        extra: &[ExtraFile],
        bos: Option<u32>,
    ) -> Vec<PromptPart> {
        let mut parts: Vec<PromptPart> = bos.map(PromptPart::Token).into_iter().collect();
        let plain = |text: String| PromptPart::Plain(text);
        if let (Some(repository), Some(_), false) = (self.repository, self.file, extra.is_empty()) {
            parts.extend([PromptPart::Token(repository), plain("project\n".to_owned())]);
        }
        for ExtraFile { name, text } in extra {
            match self.file {
                Some(file) => parts.extend([PromptPart::Token(file), plain(format!("{name}\n{text}"))]),
                None => parts.push(plain(format!("--- {name} ---\n\n{text}\n\n"))),
            }
        }
        if let (Some(file), false) = (self.file, extra.is_empty()) {
            parts.extend([PromptPart::Token(file), plain("current\n".to_owned())]);
        }
        parts.extend([
            PromptPart::Token(self.prefix),
            plain(before.to_owned()),
            PromptPart::Token(self.suffix),
            plain(behind.to_owned()),
            PromptPart::Token(self.middle),
        ]);
        parts
    }

    /// The beginning-of-text token, where prompts begin with one.
    pub(crate) fn bos(served: &ServedModel) -> Option<u32> {
        let tokenizer = served.model.tokenizer().ok()?;
        tokenizer.vocabulary().bos.filter(|_| tokenizer.adds_bos())
    }
}
