//! Chat templates: the model's format for conversations.
//!
//! Templates are Jinja programs from the model file, which is not trusted: instructions, memory and output are limited.
//! Contents of messages are not trusted either: [`ChatTemplate::tokenize`] encodes control tokens of the template as
//! such, and control tokens that are spelled out in a content as text.
//!
//! ```
//! use quadriga_llm::template::{ChatTemplate, Message};
//!
//! let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}";
//! let template = ChatTemplate::new(source, "<s>", "</s>")?;
//! let prompt = template.render(&[Message::new("user", "Hi!")], true)?;
//! assert_eq!(prompt, "<user>Hi!</user>");
//! # Ok::<(), quadriga_llm::Error>(())
//! ```

mod date;
mod json;
mod limits;
mod message;
mod provenance;
mod rewrite;
mod roles;

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::time::Duration;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value, ValueKind};
use minijinja::{AutoEscape, Environment, ErrorKind};
use regex::Regex;

pub use self::message::{Message, TemplateArguments, ToolCall};

use self::limits::{LimitedWriter, MAX_INSTRUCTIONS, MESSAGE_BYTES, MILLISECONDS, TIME_LIMIT};
use self::provenance::{Marker, Prompt, broken, has_marks, replaced_marks};
use self::rewrite::MarkText;
use self::roles::RoleOrder;
use crate::reasoning::ReasoningFormat;
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// Bytes that a template may print in addition to twice the size of the messages.
const MAX_OUTPUT: usize = 4 << 20;
/// The largest source of a template in bytes; real ones have up to 20 KB.
const MAX_SOURCE: usize = 1 << 20;
/// The longest line of a template in bytes: the template engine counts columns in 16 bits.
const MAX_LINE: usize = 65_535;

/// A parsed chat template.
///
/// ```no_run
/// use quadriga_llm::Model;
/// use quadriga_llm::template::Message;
///
/// let model = Model::open("model.gguf")?;
/// if let Some(template) = model.template() {
///     let messages = [Message::new("user", "What does <|im_end|> mean?")];
///     let tokens = template.tokenize(model.tokenizer()?, &messages, true)?;
/// }
/// # Ok::<(), quadriga_llm::Error>(())
/// ```
#[derive(Debug)]
pub struct ChatTemplate {
    source: String,
    environment: Environment<'static>,
    bos: String,
    eos: String,
    /// Texts of the same tokens in the template with marks, if there is one.
    marked: Option<(String, String)>,
    /// How the model tells its reasoning from its answer, if the template says.
    reasoning: Option<ReasoningFormat>,
    /// Which roles may follow each other, once somebody asked.
    roles: OnceLock<RoleOrder>,
    /// The time that a rendering may take.
    time_limit: Duration,
    /// Why the template of a model file cannot be parsed.
    defect: Option<String>,
}

/// A letter that is not part of a control token.
const HARMLESS: char = '\u{e000}';

/// The names of the templates in the environment.
const PLAIN: &str = "chat";
const MARKED: &str = "marked chat";

impl ChatTemplate {
    /// Parses a template. `bos` and `eos` are the texts of the vocabulary's beginning- and end-of-text tokens.
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<ChatTemplate> {
        ChatTemplate::parse(source, bos, eos, None)
    }

    /// Parses a template for a tokenizer, whose control tokens it may use.
    pub fn for_tokenizer(source: &str, tokenizer: &Tokenizer) -> Result<ChatTemplate> {
        let vocabulary = tokenizer.vocabulary();
        let text = |token: Option<u32>| {
            token.and_then(|token| vocabulary.tokens.get(token as usize)).map_or("", String::as_str)
        };
        ChatTemplate::parse(source, text(vocabulary.bos), text(vocabulary.eos), Some(tokenizer))
    }

    fn parse(source: &str, bos: &str, eos: &str, tokenizer: Option<&Tokenizer>) -> Result<ChatTemplate> {
        let failed = |error: minijinja::Error| Error::Template { reason: describe(&error) };
        if source.len() > MAX_SOURCE {
            let reason = format!("its source has {} bytes, more than {MAX_SOURCE}", source.len());
            return Err(Error::Template { reason });
        }
        if let Some(line) = source.lines().position(|line| line.len() > MAX_LINE) {
            let reason = format!("line {} has more than {MAX_LINE} bytes", line + 1);
            return Err(Error::Template { reason });
        }
        let given = source;
        let source = without_generation_tags(source);
        let mut syntax = SyntaxConfig::builder();
        let syntax = syntax.trim_blocks(true).lstrip_blocks(true).build().map_err(failed)?;
        let mut environment = Environment::new();
        limits::install(&mut environment);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.add_function("raise_exception", |message: String| -> std::result::Result<Value, _> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", |format: String| date::date(&format, date::now()));
        environment.add_filter("tojson", json::to_json);
        // In Python, `none` is not iterable, and texts and dictionaries are sequences, too.
        environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
        environment.add_test("sequence", |value: &Value| {
            matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Undefined)
        });
        rewrite::check_nesting(&source, &syntax).map_err(failed)?;
        let rewritten = |mark: Option<MarkText<'_>>| rewrite::rewrite(&source, syntax.clone(), mark);
        environment.add_template_owned(PLAIN, rewritten(None).map_err(failed)?).map_err(failed)?;
        // Marks are an addition: without them, control tokens in contents are broken up before rendering.
        let marker = tokenizer.filter(|_| !has_marks(&source)).map(Marker::new);
        let marked = marker.and_then(|marker| {
            let source = rewritten(Some(&|text| marker.mark(text))).ok()?;
            environment.add_template_owned(MARKED, source).ok()?;
            Some((marker.mark(bos), marker.mark(eos)))
        });
        Ok(ChatTemplate {
            source: given.to_owned(),
            environment,
            bos: bos.to_owned(),
            eos: eos.to_owned(),
            marked,
            reasoning: ReasoningFormat::of_template(&source),
            roles: OnceLock::new(),
            time_limit: TIME_LIMIT,
            defect: None,
        })
    }

    /// The template of a model file, if it has one. One that cannot be parsed is an error of each rendering
    /// ([`check`](Self::check)) and not of the file: most uses of a model render nothing.
    pub fn from_file(file: &quadriga_gguf::File, tokenizer: &Tokenizer) -> Result<Option<ChatTemplate>> {
        let Some(source) = file.find::<&str>("tokenizer.chat_template")? else { return Ok(None) };
        match ChatTemplate::for_tokenizer(source, tokenizer) {
            Err(Error::Template { reason }) => Ok(Some(ChatTemplate {
                source: source.to_owned(),
                environment: Environment::new(),
                bos: String::new(),
                eos: String::new(),
                marked: None,
                reasoning: None,
                roles: OnceLock::new(),
                time_limit: TIME_LIMIT,
                defect: Some(reason),
            })),
            parsed => parsed.map(Some),
        }
    }

    /// An error if the template cannot be parsed, which every rendering would return.
    pub fn check(&self) -> Result<()> {
        match &self.defect {
            Some(reason) => Err(Error::Template { reason: reason.clone() }),
            None => Ok(()),
        }
    }

    /// The template as it was given, in Jinja.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// How the model tells its reasoning from its answer, if the template knows.
    pub fn reasoning(&self) -> Option<&ReasoningFormat> {
        self.reasoning.as_ref()
    }

    /// The variables that ask this template for an answer without reasoning, or with as little as possible; empty if it
    /// knows none.
    ///
    /// ```
    /// # use quadriga_llm::template::ChatTemplate;
    /// let template = ChatTemplate::new("{% if enable_thinking %}<think>{% endif %}</think>", "", "")?;
    /// assert_eq!(template.without_reasoning()["enable_thinking"], false);
    /// # Ok::<(), quadriga_llm::Error>(())
    /// ```
    pub fn without_reasoning(&self) -> serde_json::Map<String, serde_json::Value> {
        // Harmony has no answers without reasoning.
        let effort = if self.reasoning == Some(ReasoningFormat::Harmony) { "low" } else { "none" };
        let known = [
            ("enable_thinking", false.into()),
            ("thinking", false.into()),
            ("enable_reasoning", false.into()),
            ("thinking_budget", 0.into()),
            ("reasoning_effort", effort.into()),
        ];
        known
            .into_iter()
            .filter(|(name, _)| self.reads(name))
            .map(|(name, value)| (name.to_owned(), value))
            .collect()
    }

    /// Whether the template reads a variable of this name: others have no effect.
    pub fn reads(&self, name: &str) -> bool {
        let template = self.environment.get_template(PLAIN);
        template.is_ok_and(|template| template.undeclared_variables(false).contains(name))
    }

    /// Whether a text is in the template's source, in a constant or beside its tags.
    pub fn mentions(&self, text: &str) -> bool {
        self.environment.get_template(PLAIN).is_ok_and(|template| template.source().contains(text))
    }

    /// Renders a conversation as a prompt. With `add_generation_prompt`, it ends with the header of the assistant's
    /// answer. The text does not tell control tokens of the template from those in a content: use
    /// [`tokenize`](Self::tokenize) for messages that are not trusted. The noncharacters U+FDD0 to U+FDD3, which mark
    /// control tokens here, become U+FFFD in messages.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        let arguments = TemplateArguments { add_generation_prompt, ..TemplateArguments::default() };
        self.render_with(messages, &arguments)
    }

    /// As [`render`](Self::render), with tools and other variables.
    pub fn render_with(&self, messages: &[Message], arguments: &TemplateArguments) -> Result<String> {
        self.render_plain(&without_marks(messages), &arguments.map_texts(&replaced_marks))
    }

    /// The tokens of a conversation. Control tokens that are spelled out in the content of a message become those
    /// tokens only if the message is [trusted](Message::trusted); otherwise they are text. If the template puts
    /// contents together so that its own control tokens cannot be told from theirs, those are text, too.
    pub fn tokenize(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<Vec<u32>> {
        let arguments = TemplateArguments { add_generation_prompt, ..TemplateArguments::default() };
        self.tokenize_with(tokenizer, messages, &arguments)
    }

    /// As [`tokenize`](Self::tokenize), with tools and other variables, whose control tokens are text.
    pub fn tokenize_with(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        arguments: &TemplateArguments,
    ) -> Result<Vec<u32>> {
        let messages = &without_marks(messages);
        let arguments = &arguments.map_texts(&replaced_marks);
        let plain = self.render_plain(messages, arguments)?;
        let parsed = tokenizer.encode_prompt(&plain, true);
        let text_only = |text: &str| tokenizer.control_starts(text).is_empty();
        if messages.iter().all(|message| message.trusted) && arguments.size() == 0 {
            return Ok(parsed);
        }
        // What the template writes whatever the contents are. Variables choose what it writes, so that only those with
        // control tokens are replaced.
        let replaced = |text: &str| if text_only(text) { text.to_owned() } else { harmless(text) };
        let harmless_arguments = &arguments.map_texts(&replaced);
        let harmless: Vec<Message> = messages
            .iter()
            .map(|message| Message {
                role: if text_only(&message.role) { message.role.clone() } else { "user".to_owned() },
                ..if message.trusted { message.clone() } else { message.map_texts(&harmless) }
            })
            .collect();
        let marked = self.render_marked(tokenizer, messages, arguments);
        let marked = marked.filter(|prompt| prompt.text == plain);
        let harmless_marked =
            marked.as_ref().and_then(|_| self.render_marked(tokenizer, &harmless, harmless_arguments));
        let completed =
            harmless_marked.as_ref().map(|prompt| prompt.completed(tokenizer)).unwrap_or_default();
        let tokens = marked.map(|prompt| prompt.encode_marked(tokenizer, &completed));
        if tokens.as_ref() == Some(&parsed) {
            return Ok(parsed);
        }
        // Control tokens are not marked: either they are spelled out in contents, or the template composes them in
        // an unusual way. Contents without control tokens tell which.
        let harmless_plain = self.render_plain(&harmless, harmless_arguments).unwrap_or_default();
        let wanted = tokenizer.encode_prompt(&harmless_plain, true);
        let complete = harmless_marked.is_some_and(|prompt| {
            prompt.text == harmless_plain && prompt.encode_marked(tokenizer, &completed) == wanted
        });
        if let Some(tokens) = tokens.as_ref().filter(|_| complete) {
            return Ok(tokens.clone());
        }
        let plain_text =
            |message: &Message| text_only(&message.role) && (message.trusted || message.all_texts(text_only));
        let unmarked = if harmless_arguments == arguments && messages.iter().all(plain_text) {
            parsed
        } else {
            let text = |text: &str| broken(tokenizer, text);
            let messages: Vec<Message> = messages
                .iter()
                .map(|message| Message {
                    role: text(&message.role),
                    ..if message.trusted { message.clone() } else { message.map_texts(&text) }
                })
                .collect();
            let rendered = self.render_plain(&messages, &arguments.map_texts(&text))?;
            Prompt::new(&rendered).encode_unbroken(tokenizer)
        };
        // The template can still have put a control token together from parts of contents.
        if is_subsequence(&tokenizer.control_among(&unmarked), &tokenizer.control_among(&wanted)) {
            return Ok(unmarked);
        }
        Ok(tokens.unwrap_or_else(|| tokenizer.encode_prompt(&plain, false)))
    }

    fn render_plain(&self, messages: &[Message], arguments: &TemplateArguments) -> Result<String> {
        self.render_as(PLAIN, (&self.bos, &self.eos), messages, arguments)
    }

    /// Renders the template with marks; `None` if there is none or it fails, as it can when it compares a marked text.
    fn render_marked(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        arguments: &TemplateArguments,
    ) -> Option<Prompt> {
        let (bos, eos) = self.marked.as_ref()?;
        let messages: Vec<Message> =
            messages.iter().map(|message| marked_message(tokenizer, message)).collect();
        let text = self.render_as(MARKED, (bos, eos), &messages, arguments).ok()?;
        Some(Prompt::new(&text))
    }

    fn render_as(
        &self,
        name: &str,
        (bos_token, eos_token): (&str, &str),
        messages: &[Message],
        arguments: &TemplateArguments,
    ) -> Result<String> {
        let failed = |error: minijinja::Error| Error::Template { reason: describe(&error) };
        self.check()?;
        let template = self.environment.get_template(name).map_err(failed)?;
        let message_bytes = messages.iter().map(Message::size).sum::<usize>() + arguments.size();
        let milliseconds = usize::try_from(self.time_limit.as_millis()).unwrap_or(usize::MAX);
        let variables = arguments.variables.iter();
        // The later ones replace those before.
        let context: BTreeMap<&str, Value> = [("tools", ()), ("documents", ())]
            .map(|(name, none)| (name, Value::from(none)))
            .into_iter()
            .chain([("add_generation_prompt", Value::from(arguments.add_generation_prompt))])
            .chain(variables.map(|(name, value)| (name.as_str(), Value::from(Serde(value)))))
            .chain([
                ("messages", Value::from(Serde(messages))),
                ("bos_token", Value::from(bos_token)),
                ("eos_token", Value::from(eos_token)),
                (MESSAGE_BYTES, Value::from(message_bytes)),
                (MILLISECONDS, Value::from(milliseconds)),
            ])
            .collect();
        let mut output = LimitedWriter {
            bytes: Vec::new(),
            left: message_bytes.saturating_mul(2).saturating_add(MAX_OUTPUT),
        };
        template.render_captured_to(Value::from(context), &mut output).map_err(failed)?;
        String::from_utf8(output.bytes).map_err(|error| Error::Template { reason: error.to_string() })
    }
}

/// The tokens of the contents of messages, one after another without a template. Control tokens are parsed in trusted
/// messages only.
pub(crate) fn tokenize_contents(tokenizer: &Tokenizer, messages: &[Message]) -> Vec<u32> {
    let messages = without_marks(messages);
    let text: String = messages.iter().map(|message| marked_message(tokenizer, message).content).collect();
    Prompt::new(&text).encode_marked(tokenizer, &[])
}

/// A message whose control tokens are marked if it is trusted.
fn marked_message(tokenizer: &Tokenizer, message: &Message) -> Message {
    if !message.trusted {
        return message.clone();
    }
    let marker = Marker::new(tokenizer);
    message.map_texts(&|text| marker.mark(text))
}

/// The messages with U+FFFD for noncharacters that are marks. Other escapes could have another length, which templates
/// can see.
fn without_marks(messages: &[Message]) -> Vec<Message> {
    let of = |message: &Message| Message {
        role: replaced_marks(&message.role),
        ..message.map_texts(&replaced_marks)
    };
    messages.iter().map(of).collect()
}

/// A content of the same length and with the same spaces that has no part of a control token.
fn harmless(content: &str) -> String {
    content.chars().map(|letter| if letter.is_whitespace() { letter } else { HARMLESS }).collect()
}

/// Whether a list has the elements of another one in their order.
fn is_subsequence(part: &[u32], whole: &[u32]) -> bool {
    let mut whole = whole.iter();
    part.iter().all(|element| whole.any(|other| other == element))
}

/// Replaces the `generation` tags, which mark answers for training, by comments.
fn without_generation_tags(source: &str) -> String {
    // Few templates have them, and to compile the expression takes longer than to parse most templates.
    if !source.contains("generation") {
        return source.to_owned();
    }
    let tag = Regex::new(r"\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}");
    tag.map_or_else(|_| source.to_owned(), |tag| tag.replace_all(source, "{#$1 $2#}").into_owned())
}

/// An error with its causes in one line.
fn describe(error: &minijinja::Error) -> String {
    let mut text = match error.kind() {
        ErrorKind::OutOfFuel => format!("it did not end within {MAX_INSTRUCTIONS} instructions"),
        _ => error.to_string(),
    };
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text.replace('\n', " ")
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::time::Duration;

    use super::{ChatTemplate, Message};

    #[test]
    fn a_rendering_ends_when_its_time_is_up() {
        let mut template = ChatTemplate::new("{{ messages[0].content ~ '!' }}", "", "").unwrap();
        let messages = [Message::new("user", "hi")];
        assert_eq!(template.render(&messages, true).unwrap(), "hi!");
        template.time_limit = Duration::ZERO;
        let error = template.render(&messages, true).unwrap_err().to_string();
        assert!(error.contains("its time is up"), "{error}");
    }
}
