//! llama.cpp's options that commands accept for scripts written for it: some mean something here, the others are said to
//! have no effect.

use std::borrow::Cow;

use crate::values;

/// Options of llama.cpp without a place in the help text.
#[derive(Clone, Default, clap::Args)]
pub(crate) struct LlamaOptions {
    /// Tokens that are computed at once, also -ub; what -b is here
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = values::at_least_one, hide = true)]
    pub(crate) ubatch_size: Option<usize>,
    /// Replace \n, \t and the like in the prompt and the system prompt
    #[arg(short, long, hide = true)]
    escape: bool,
    /// No effect; also -tb
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = values::threads, hide = true)]
    threads_batch: Option<usize>,
    /// No effect; also -cnv
    #[arg(long, hide = true)]
    conversation: bool,
    /// No effect
    #[arg(long, hide = true)]
    no_display_prompt: bool,
    /// No effect
    #[arg(long, hide = true)]
    mlock: bool,
    /// No effect
    #[arg(long, hide = true)]
    jinja: bool,
    /// No effect
    #[arg(long, value_name = "MODE", num_args = 0..=1, require_equals = true, default_missing_value = "on", hide = true)]
    color: Option<String>,
    /// No effect but on bench
    #[arg(long, hide = true)]
    pub(crate) no_warmup: bool,
    /// No effect
    #[arg(long, hide = true)]
    no_context_shift: bool,
    /// No effect
    #[arg(short, long, hide = true)]
    pub(crate) verbose: bool,
    /// No effect but on serve; also -lv
    #[arg(long, alias = "log-verbosity", value_name = "N", hide = true)]
    pub(crate) verbosity: Option<u8>,
}

impl LlamaOptions {
    /// For each option that was given and has no effect, the reason.
    pub(crate) fn without_effect(&self) -> impl Iterator<Item = &'static str> {
        [
            (self.threads_batch.is_some(), "-tb has no effect: prefill and decode use the threads of -t"),
            (self.conversation, "-cnv has no effect: the chat template is used unless --raw is given"),
            (self.no_display_prompt, "--no-display-prompt has no effect: the prompt is never printed"),
            (self.mlock, "--mlock has no effect: the system decides which pages stay in memory"),
            (self.jinja, "--jinja has no effect: chat templates are always those of the model"),
            (self.color.is_some(), "--color has no effect: reasoning is dimmed on a terminal, nothing else has a colour"),
            (self.no_warmup, "--no-warmup has no effect: only bench warms up"),
            (
                self.no_context_shift,
                "--no-context-shift has no effect: an answer ends where the context is full, and chat drops the oldest turns",
            ),
            (self.verbose, "-v has no effect: --stats and --trace show what a run does"),
            (self.verbosity.is_some(), "-lv has no effect: --stats and --trace show what a run does"),
        ]
        .into_iter()
        .filter_map(|(is_given, reason)| is_given.then_some(reason))
    }

    /// A prompt with its escape sequences replaced, where `-e` asks for it.
    pub(crate) fn unescaped<'t>(&self, text: &'t str) -> Cow<'t, str> {
        if self.escape { Cow::Owned(unescape(text)) } else { Cow::Borrowed(text) }
    }
}

/// Replaces \n, \r, \t, \', \", \\ and \xNN (a byte below 80); other backslashes stay.
fn unescape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('\\') {
        out.push_str(before);
        let letter = after.chars().next();
        let replaced = match letter {
            Some('n') => Some(('\n', 1)),
            Some('r') => Some(('\r', 1)),
            Some('t') => Some(('\t', 1)),
            Some(quoted @ ('\'' | '"' | '\\')) => Some((quoted, 1)),
            Some('x') => {
                let digits = after.get(1..3).filter(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()));
                let byte = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
                byte.filter(u8::is_ascii).map(|byte| (char::from(byte), 3))
            }
            _ => None,
        };
        let (letter, len) = replaced.unwrap_or(('\\', 0));
        out.push(letter);
        rest = after.get(len..).unwrap_or_default();
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escape_sequences_are_replaced_and_other_backslashes_stay() {
        for (text, expected) in [
            ("", ""),
            ("plain", "plain"),
            (r"a\nb\tc\r", "a\nb\tc\r"),
            (r#"\'\"\\n"#, "'\"\\n"),
            (r"\x41\x0a\x7F", "A\n\u{7f}"),
            (r"\x4\xzz\xff\q\", r"\x4\xzz\xff\q\"),
            (r"\x4é \é", r"\x4é \é"),
        ] {
            assert_eq!(unescape(text), expected, "{text}");
        }
    }
}
