//! How a model writes calls of tools.

use crate::tokenizer::{TokenType, Tokenizer};

/// How a model writes calls of tools: a section with calls, each with text around it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolFormat {
    /// Before the first call of an answer.
    pub section_open: String,
    /// After the last one.
    pub section_close: String,
    /// Before each call.
    pub call_open: String,
    /// After each call.
    pub call_close: String,
    /// Between two calls; `None` if an answer has only one.
    pub separator: Option<String>,
    /// The call itself.
    pub syntax: CallSyntax,
    /// What of all this the template does by itself.
    pub template: TemplateSupport,
    /// Whether calls are messages of OpenAI's harmony format.
    pub harmony: bool,
    /// Another text with which a call may begin, in place of that before the first call.
    pub alternative_open: Option<String>,
}

/// What a template does with tools, calls and their results, and how it wants them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct TemplateSupport {
    /// It shows the tools to the model. If not, they are described in the system message.
    pub tools: bool,
    /// It writes earlier calls. If not, they are added to the text of their message.
    pub calls: bool,
    /// It writes results of calls. If not, they become messages of the user.
    pub results: bool,
    /// It wants the arguments of earlier calls as JSON text in place of an object.
    pub text_arguments: bool,
    /// It wants identifiers of nine letters and digits.
    pub short_ids: bool,
    /// It reads the tools in the system message, as JSON text.
    pub tools_in_system: bool,
    /// It writes identifiers in place of names, which the model's own calls are made of.
    pub identifiers: bool,
}

/// How a call is written between the texts around it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallSyntax {
    /// A JSON object with the name and the arguments.
    Object {
        /// The field with the name.
        name: String,
        /// The field with the arguments.
        arguments: String,
        /// A field before the name that counts the calls.
        counter: Option<String>,
    },
    /// The name, a text, and the arguments as JSON.
    Named {
        /// The text between them.
        between: String,
    },
    /// An identifier made of a prefix, the name and the number of the call; a text, and the arguments as JSON.
    Identified {
        /// Before the name.
        prefix: String,
        /// Between the name and the number.
        mark: String,
        /// Between the identifier and the arguments.
        between: String,
    },
    /// The name, and keyword arguments in brackets, as Python writes them.
    Pythonic,
    /// The name, and each argument between tags.
    Tagged {
        /// After the name.
        head: String,
        /// Before the name of an argument.
        open: String,
        /// Between the name and the value.
        between: String,
        /// Between the name and a value in JSON, where a text that is written as it is has another one.
        json_between: Option<String>,
        /// After the value.
        close: String,
    },
}

impl ToolFormat {
    /// A call as a JSON object between two texts.
    pub(super) fn object(open: &str, close: &str) -> ToolFormat {
        ToolFormat {
            section_open: String::new(),
            section_close: String::new(),
            call_open: open.to_owned(),
            call_close: close.to_owned(),
            separator: Some("\n".to_owned()),
            syntax: CallSyntax::Object {
                name: "name".to_owned(),
                arguments: "arguments".to_owned(),
                counter: None,
            },
            template: TemplateSupport { tools: true, ..TemplateSupport::default() },
            harmony: false,
            alternative_open: None,
        }
    }

    /// A list of JSON objects between two texts.
    pub(super) fn list(open: &str, close: &str) -> ToolFormat {
        ToolFormat {
            section_open: format!("{open}["),
            section_close: format!("]{close}"),
            separator: Some(", ".to_owned()),
            ..ToolFormat::object("", "")
        }
    }

    /// The text with which a section of calls begins, without white space at its ends.
    pub(super) fn opening(&self) -> String {
        format!("{}{}", self.section_open, self.call_open)
    }

    /// What tells that a call has begun: the first tag of the opening text, or all of it if that is text. `None` if calls have no
    /// text before them, so that they are recognised only at the beginning of an answer.
    pub(super) fn trigger(&self) -> Option<String> {
        let opening = self.opening();
        let opening = opening.trim();
        let first = super::atoms::atoms(opening).first().copied().unwrap_or_default();
        match first.len() {
            0 => None,
            1 if opening.len() < 3 => None,
            1 => Some(opening.to_owned()),
            _ => Some(first.to_owned()),
        }
    }

    /// Whether a token is a control token that is a part of calls.
    pub(crate) fn is_marker(&self, tokenizer: &Tokenizer, token: u32) -> bool {
        let vocabulary = tokenizer.vocabulary();
        if vocabulary.token_type(token) != TokenType::Control {
            return false;
        }
        let Some(text) = vocabulary.tokens.get(token as usize).filter(|text| !text.is_empty()) else {
            return false;
        };
        self.texts().any(|part| part.contains(text.as_str()))
    }

    /// All fixed texts.
    fn texts(&self) -> impl Iterator<Item = &str> {
        let own = [&self.section_open, &self.section_close, &self.call_open, &self.call_close];
        let inner: Vec<&String> = match &self.syntax {
            CallSyntax::Object { .. } | CallSyntax::Pythonic => Vec::new(),
            CallSyntax::Named { between } => vec![between],
            CallSyntax::Identified { prefix, mark, between } => vec![prefix, mark, between],
            CallSyntax::Tagged { head, open, between, json_between, close } => {
                [head, open, between, close].into_iter().chain(json_between).collect()
            }
        };
        let all = own.into_iter().chain(inner).chain(&self.separator).chain(&self.alternative_open);
        all.map(String::as_str)
    }
}
