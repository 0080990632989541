//! Where reasoning is in an answer: beside the text, within it, or in both places.

use quadriga_llm::reasoning::ReasoningFormat;

/// Where the reasoning of an answer is, by llama-server's names.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ReasoningOutput {
    /// Beside the text (`auto` and `deepseek`).
    #[default]
    Apart,
    /// Within the text, between the markers that the model writes around it (`none`).
    Inline,
    /// In both places (`deepseek-legacy`).
    Both,
}

impl ReasoningOutput {
    /// The names that requests and flags have for them.
    pub const NAMES: [&'static str; 4] = ["none", "auto", "deepseek", "deepseek-legacy"];

    /// The one of a name.
    pub fn named(name: &str) -> Option<ReasoningOutput> {
        match name {
            "none" => Some(ReasoningOutput::Inline),
            "auto" | "deepseek" => Some(ReasoningOutput::Apart),
            "deepseek-legacy" => Some(ReasoningOutput::Both),
            _ => None,
        }
    }
}

/// Puts the reasoning of an answer where it belongs, while it is generated.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReasoningPlace {
    output: ReasoningOutput,
    /// The markers around reasoning within a text.
    open: String,
    close: String,
    /// Whether reasoning within the text was begun and not closed.
    within: bool,
}

impl ReasoningPlace {
    /// For an answer whose reasoning has this format.
    pub(crate) fn new(output: ReasoningOutput, format: Option<&ReasoningFormat>) -> ReasoningPlace {
        let (open, close) = match format {
            Some(ReasoningFormat::Markers { open, close }) => (open.to_string(), close.to_string()),
            Some(ReasoningFormat::Harmony) => {
                ("<|channel|>analysis<|message|>".to_owned(), "<|end|>".to_owned())
            }
            None => (String::new(), String::new()),
        };
        ReasoningPlace { output, open, close, within: false }
    }

    /// The reasoning and the text of the next part of an answer, which calls tools or not.
    pub(crate) fn put(&mut self, reasoning: String, text: String, calls: bool) -> (String, String) {
        if self.output == ReasoningOutput::Apart {
            return (reasoning, text);
        }
        let mut all = String::new();
        if !reasoning.is_empty() {
            if !self.within {
                all.push_str(&self.open);
                all.push('\n');
            }
            self.within = true;
            all.push_str(&reasoning);
        }
        if self.within && (calls || !text.is_empty()) {
            self.within = false;
            all.push('\n');
            all.push_str(&self.close);
            all.push_str("\n\n");
        }
        all.push_str(&text);
        match self.output {
            ReasoningOutput::Both => (reasoning, all),
            ReasoningOutput::Apart | ReasoningOutput::Inline => (String::new(), all),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasoning_within_a_text_has_its_markers() {
        let put = |name: &str| {
            let output = ReasoningOutput::named(name).unwrap();
            let mut place = ReasoningPlace::new(output, Some(&ReasoningFormat::think()));
            let parts = [("Let me", ""), (" see.", ""), ("", "Four"), ("", ".")];
            let parts =
                parts.map(|(reasoning, text)| place.put(reasoning.to_owned(), text.to_owned(), false));
            parts
                .into_iter()
                .fold((String::new(), String::new()), |all, part| (all.0 + &part.0, all.1 + &part.1))
        };
        let inline = "<think>\nLet me see.\n</think>\n\nFour.".to_owned();
        assert_eq!(put("none"), (String::new(), inline.clone()));
        assert_eq!(put("deepseek-legacy"), ("Let me see.".to_owned(), inline));
        assert_eq!(put("auto"), ("Let me see.".to_owned(), "Four.".to_owned()));
        assert!(ReasoningOutput::NAMES.iter().all(|name| ReasoningOutput::named(name).is_some()));
        assert_eq!(ReasoningOutput::named("other"), None);
    }
}
