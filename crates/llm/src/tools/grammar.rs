//! The grammar of the calls that a request allows, in the Lark syntax of `llguidance`.

use std::fmt::Write;

use llguidance::regex_to_lark;
use serde_json::{Value, json};

use super::format::{CallSyntax, ToolFormat};
use super::tagged::{self, TextRules, ValueForm};
use super::tool::{Tool, ToolChoice};
use super::writable::{MAX_TRIALS, containing, drop_unwritable, unwritable_name};
use crate::constraint::{check_source, json_rule};
use crate::tokenizer::{TokenType, Tokenizer};

/// The most calls that an answer may have. A model that repeats itself would otherwise call until its context is full.
pub const MAX_CALLS: usize = 16;

/// What an answer with tools may be.
#[derive(Clone, Debug, Default)]
pub struct ToolRules<'a> {
    /// The tools that may be called.
    pub tools: &'a [Tool],
    /// Whether one of them must be.
    pub choice: ToolChoice,
    /// Whether an answer may have several calls, of which there are at most [`MAX_CALLS`]. A named tool is called once all the same.
    pub parallel: bool,
    /// The schema of an answer without calls.
    pub answer: Option<&'a Value>,
}

impl ToolFormat {
    /// The grammar of an answer, in Lark; `None` if calls cannot be told from text before they are complete.
    ///
    /// # Errors
    /// The reason why a schema cannot be compiled.
    pub fn grammar(&self, rules: &ToolRules<'_>, tokenizer: &Tokenizer) -> Result<Option<String>, String> {
        self.grammar_after(rules, tokenizer, None)
    }

    /// The same for an answer after reasoning: text that begins with the reasoning's marker is none of the answer.
    pub(crate) fn grammar_after(
        &self,
        rules: &ToolRules<'_>,
        tokenizer: &Tokenizer,
        marker: Option<&str>,
    ) -> Result<Option<String>, String> {
        let names = |tool: &&Tool| match &rules.choice {
            ToolChoice::Named(name) => tool.name == *name,
            _ => true,
        };
        let tools: Vec<&Tool> = rules.tools.iter().filter(names).collect();
        let writer =
            GrammarWriter { format: self, tokenizer, rules, marker, lark: String::new(), trials: MAX_TRIALS };
        match self.harmony {
            true => writer.harmony(&tools).map(Some),
            false => writer.sections(&tools),
        }
    }
}

struct GrammarWriter<'a> {
    format: &'a ToolFormat,
    tokenizer: &'a Tokenizer,
    rules: &'a ToolRules<'a>,
    /// The text with which reasoning begins before the answer.
    marker: Option<&'a str>,
    lark: String,
    /// How often it may still be tried whether a text can be written.
    trials: usize,
}

impl GrammarWriter<'_> {
    /// A rule.
    fn rule(&mut self, name: &str, body: &str) {
        // Writing to a string does not fail.
        let _ = writeln!(self.lark, "{name}: {body}");
    }

    /// A rule for JSON of a schema. Each has the definitions of its tool, so that many are too long together.
    fn json(&mut self, name: &str, schema: &Value) -> Result<(), String> {
        self.rule(name, &json_rule(schema)?);
        check_source(&self.lark)
    }

    /// A fixed text: control tokens, and literals between them. An empty literal if it is empty.
    fn literal(&self, text: &str) -> String {
        let mut parts = Vec::new();
        let mut from = 0;
        let vocabulary = self.tokenizer.vocabulary();
        for (at, length, token) in self.tokenizer.control_tokens(text) {
            if vocabulary.token_type(token) != TokenType::Control {
                continue;
            }
            parts.extend(text.get(from..at).filter(|before| !before.is_empty()).map(quoted));
            parts.push(format!("<[{token}]>"));
            from = at + length;
        }
        let rest = text.get(from..).unwrap_or_default();
        if !rest.is_empty() || parts.is_empty() {
            parts.push(quoted(rest));
        }
        parts.join(" ")
    }

    fn is_required(&self) -> bool {
        matches!(self.rules.choice, ToolChoice::Required | ToolChoice::Named(_))
    }

    /// The rule of an answer without calls.
    fn answer(&mut self) -> Result<(), String> {
        match self.rules.answer {
            Some(schema) => {
                let body = json_rule(schema)?;
                self.rule("answer", &body);
            }
            None => self.rule("answer", "FIRST?"),
        }
        self.rule("TEXT", r"/(?s:.+)/");
        // Text at the beginning of the answer; that of reasoning would have no end but the first call in it.
        let not_reasoning = self.marker.map(|marker| {
            let marker = regex_to_lark(&regex::escape(marker), "");
            format!(r" & ~/[ \t\r\n]*{marker}(?s:.*)/")
        });
        let not_reasoning = not_reasoning.unwrap_or_default();
        self.rule("FIRST", &format!(r"/(?s:.+)/{not_reasoning}"));
        self.rule("BEFORE", &format!(r"/(?s:.*)/{not_reasoning}"));
        Ok(())
    }

    fn sections(mut self, tools: &[&Tool]) -> Result<Option<String>, String> {
        let opening = self.format.opening();
        let (lead, head) = self.head();
        if self.is_required() {
            let opening = self.literal(&format!("{opening}{lead}"));
            self.rule("start", &format!("{opening} calls"));
        } else if let Some(trigger) = self.trigger() {
            let whole = format!("{}{lead}", opening.trim_start());
            let Some(after) = whole.strip_prefix(trigger.as_str()) else { return Ok(None) };
            let (first, after) = (self.literal(&trigger), self.literal(after));
            // With a schema there is no text around calls.
            let space = if self.rules.answer.is_some() { r"/[ \t\r\n]{0,8}/" } else { "BEFORE" };
            if first.starts_with("<[") {
                let before = if self.rules.answer.is_some() { "" } else { "FIRST? " };
                self.rule("start", &format!("{before}{first} {after} calls | answer"));
            } else {
                self.rule("start", &format!("before_call {after} calls | answer"));
                self.rule(&format!("before_call[suffix={first}]"), space);
            }
        } else {
            return Ok(None);
        }
        self.answer()?;
        let (close, end) = (self.literal(&self.format.call_close), self.literal(&self.format.section_close));
        let may_repeat = self.rules.parallel && !matches!(self.rules.choice, ToolChoice::Named(_));
        let more = match self.format.separator.as_ref().filter(|_| may_repeat) {
            Some(separator) => {
                let between = self.literal(&format!("{separator}{}{lead}", self.format.call_open));
                format!("({between} call {close}){{0,{}}} ", MAX_CALLS - 1)
            }
            None => String::new(),
        };
        self.rule("calls", &format!("call {close} {more}{end}"));
        self.calls(&head, tools)?;
        Ok(Some(self.lark))
    }

    /// The text with which a call has certainly begun.
    fn trigger(&self) -> Option<String> {
        self.format.trigger().or_else(|| match &self.format.syntax {
            CallSyntax::Object { name, counter: None, .. } => {
                Some(format!("{}{{{}", self.format.opening(), quoted(name)))
            }
            _ => None,
        })
    }

    /// The beginning of every call: fixed text, and what follows it in Lark.
    fn head(&self) -> (String, String) {
        let CallSyntax::Object { name, counter, .. } = &self.format.syntax else {
            return (String::new(), String::new());
        };
        let name = format!("{}: ", quoted(name));
        match counter {
            None => (format!("{{{name}"), String::new()),
            Some(counter) => {
                let after = quoted(&format!("\", {name}"));
                (format!("{{{}: \"", quoted(counter)), format!("/[0-9]{{1,3}}/ {after} "))
            }
        }
    }

    fn calls(&mut self, head: &str, tools: &[&Tool]) -> Result<(), String> {
        let names: Vec<String> = (0..tools.len()).map(|number| format!("call_{number}")).collect();
        self.rule("call", &format!("{head}({})", names.join(" | ")));
        for (number, tool) in tools.iter().enumerate() {
            let (call, arguments) = (format!("call_{number}"), format!("arguments_{number}"));
            let body = match &self.format.syntax {
                CallSyntax::Object { arguments: field, .. } => {
                    let before = quoted(&format!("{}, {}: ", quoted(&tool.name), quoted(field)));
                    format!("{before} {arguments} \"}}\"")
                }
                CallSyntax::Named { between } => {
                    format!("{} {arguments}", self.literal(&format!("{}{between}", tool.name)))
                }
                CallSyntax::Identified { prefix, mark, between } => {
                    let before = self.literal(&format!("{prefix}{}{mark}", tool.name));
                    format!("{before} /[0-9]{{1,4}}/ {} {arguments}", self.literal(between))
                }
                CallSyntax::Pythonic => {
                    format!("{} {arguments} \")\"", quoted(&format!("{}(", tool.name)))
                }
                CallSyntax::Tagged { head, .. } => {
                    format!("{} {arguments}", self.literal(&format!("{}{head}", tool.name)))
                }
            };
            self.rule(&call, &body);
            match &self.format.syntax {
                CallSyntax::Tagged { open, between, json_between, close, .. } => {
                    let json_between = json_between.as_ref().unwrap_or(between);
                    self.tagged(number, tool, (open, between, json_between, close))?;
                }
                CallSyntax::Pythonic => self.keywords(number, tool)?,
                _ => self.json(&arguments, &tool.parameters)?,
            }
        }
        Ok(())
    }

    /// Arguments between tags, in the order of the schema.
    fn tagged(&mut self, number: usize, tool: &Tool, tags: (&str, &str, &str, &str)) -> Result<(), String> {
        let (open, between, json_between, close) = tags;
        let properties = tool.parameters.get("properties").and_then(Value::as_object);
        let required = tool.parameters.get("required").and_then(Value::as_array);
        let is_required = |name: &str| required.is_some_and(|all| all.iter().any(|other| other == name));
        let arguments = format!("arguments_{number}");
        let Some(properties) = properties.filter(|properties| !properties.is_empty()) else {
            if takes_none(&tool.parameters) {
                self.rule(&arguments, "\"\"");
                return Ok(());
            }
            let any = self.literal(open);
            let (between, value) = (self.literal(between), format!("value_{number}"));
            self.rule(&arguments, &format!("({any} /[A-Za-z0-9_.-]{{1,64}}/ {between} {value})*"));
            self.text_value(&value, close);
            return Ok(());
        };
        let mut all = Vec::new();
        for (place, (name, schema)) in properties.iter().enumerate() {
            let value = format!("value_{number}_{place}");
            let before =
                [between, json_between].map(|between| self.literal(&format!("{open}{name}{between}")));
            let mut forms = tagged::forms(schema, tool);
            if let Some(reason) = unenforced(&forms).filter(|_| tool.strict) {
                return Err(format!("{} of {}: {reason}", name, tool.name));
            }
            let name_reason = unwritable_name(name, self.format, self.tokenizer);
            let has_name = name_reason.is_none();
            if let Some(reason) = name_reason.or_else(|| drop_unwritable(&mut forms, close, &mut self.trials))
            {
                let is_left = has_name && !forms.is_empty();
                if tool.strict || !is_left && is_required(name) {
                    return Err(format!("{name:?} of {}: {reason}", tool.name));
                }
                if !is_left {
                    continue;
                }
            }
            let ways = self.values(&value, &forms, close, between == json_between)?;
            let ways: Vec<String> = match &before {
                [text, json] if text == json => {
                    let ways: Vec<String> = ways.into_iter().map(|(_, way)| way).collect();
                    vec![format!("{text} ({})", ways.join(" | "))]
                }
                [text, json] => {
                    let before = |is_json: bool| if is_json { json } else { text };
                    ways.into_iter().map(|(is_json, way)| format!("{} {way}", before(is_json))).collect()
                }
            };
            let optional = if is_required(name) { "" } else { "?" };
            all.push(format!("({}){optional}", ways.join(" | ")));
        }
        let body = if all.is_empty() { "\"\"".to_owned() } else { all.join(" ") };
        self.rule(&arguments, &body);
        Ok(())
    }

    /// Rules for the ways to write a value, each with the tag after it, and whether they are JSON. If `mixed`, nothing before
    /// the value says which way is taken.
    fn values(
        &mut self,
        name: &str,
        forms: &[ValueForm],
        close: &str,
        mixed: bool,
    ) -> Result<Vec<(bool, String)>, String> {
        let mut all = Vec::new();
        let end = self.literal(close);
        let (mut texts, mut rules) = (Vec::new(), Vec::new());
        for form in forms {
            match form {
                ValueForm::Exact(text) => texts.push(text.as_str()),
                ValueForm::Text(own) => rules.push(own),
                ValueForm::Json(_) => {}
            }
        }
        // Any text may be a number, too.
        let has_any = mixed && rules.iter().any(|rules| rules.is_free());
        let is_json =
            |form: &&ValueForm| matches!(form, ValueForm::Json(_)) && !(has_any && form.is_scalar());
        let json: Vec<&ValueForm> = forms.iter().filter(is_json).collect();
        if !rules.is_empty() {
            let beside_json = mixed && json.iter().any(|form| !form.is_scalar());
            self.bounded_text(name, close, &rules, &texts, beside_json);
            all.push((false, name.to_owned()));
        } else if !texts.is_empty() {
            let texts: Vec<String> = texts.into_iter().map(quoted).collect();
            self.rule(name, &format!("({}) {end}", texts.join(" | ")));
            all.push((false, name.to_owned()));
        }
        for (place, form) in json.into_iter().enumerate() {
            let ValueForm::Json(schema) = form else { continue };
            let rule = format!("{name}_json_{place}");
            self.json(&rule, schema)?;
            all.push((true, format!("{rule} {end}")));
        }
        Ok(all)
    }

    /// Keyword arguments in the order of the schema, with commas between those that are there.
    fn keywords(&mut self, number: usize, tool: &Tool) -> Result<(), String> {
        let required = tool.parameters.get("required").and_then(Value::as_array);
        let is_required = |name: &str| required.is_some_and(|all| all.iter().any(|other| other == name));
        let arguments = format!("arguments_{number}");
        let empty = serde_json::Map::new();
        let properties = tool.parameters.get("properties").and_then(Value::as_object).unwrap_or(&empty);
        if properties.is_empty() {
            if takes_none(&tool.parameters) {
                self.rule(&arguments, "\"\"");
                return Ok(());
            }
            let (any, value) = (format!("any_{number}"), json_rule(&json!({}))?);
            self.rule(&arguments, &format!("({any} (\", \" {any})*)?"));
            self.rule(&any, &format!("/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ \"=\" {any}_value"));
            self.rule(&format!("{any}_value"), &value);
            return Ok(());
        }
        let rest = |place: usize| match place == properties.len() {
            true => "\"\"".to_owned(),
            false => format!("rest_{number}_{place}"),
        };
        // The arguments from a place on, if none is written before it.
        let mut first = Vec::new();
        let mut may_be_first = true;
        for (place, (name, schema)) in properties.iter().enumerate() {
            let (item, after) = (format!("keyword_{number}_{place}"), rest(place + 1));
            let optional = if is_required(name) { "" } else { "?" };
            self.rule(&rest(place), &format!("(\", \" {item}){optional} {after}"));
            if may_be_first {
                first.push(format!("{item} {after}"));
            }
            may_be_first &= !is_required(name);
            self.rule(&item, &format!("{} {item}_value", quoted(&format!("{name}="))));
            let is_flag = schema.get("type").and_then(Value::as_str) == Some("boolean");
            let value = format!("{item}_value");
            match is_flag && schema.get("enum").is_none() && schema.get("const").is_none() {
                true => self.rule(&value, "\"True\" | \"False\""),
                false => self.json(&value, &tool.with_definitions(schema))?,
            }
        }
        if may_be_first {
            first.push("\"\"".to_owned());
        }
        self.rule(&arguments, &first.join(" | "));
        Ok(())
    }

    /// Any text up to a tag.
    fn text_value(&mut self, name: &str, close: &str) {
        self.bounded_text(name, close, &[&TextRules::default()], &[], false);
    }

    /// Text by one of some rules, or one of some texts, up to a tag. If objects and lists may be in its place, it does not begin as
    /// they do.
    fn bounded_text(
        &mut self,
        name: &str,
        close: &str,
        rules: &[&TextRules],
        texts: &[&str],
        beside_json: bool,
    ) {
        let tag = self.literal(close.trim());
        let [before, after] = [close.len() - close.trim_start().len(), close.trim_end().len()];
        let after = self.literal(close.get(after..).unwrap_or_default());
        let is_token = tag.starts_with("<[");
        let is_bounded = !rules.iter().any(|rules| rules.is_free());
        // White space before the tag is a part of the text, unless it is known where the text ends: the parser takes the tag alone
        // for the end.
        let space = close.get(..before).filter(|_| is_bounded).unwrap_or_default();
        let space = regex_to_lark(&regex::escape(space), "");
        let unlike_json = if beside_json { r" & ~/[ \t\r\n]*[\[{](?s:.*)/" } else { "" };
        // A tag that is a token can be spelled in a text, and a text by a rule could go on after a tag: the parser takes the first one.
        let without_tag = match is_token || is_bounded {
            true => format!(" & ~/{}/", containing(close.trim())),
            false => String::new(),
        };
        let terminal = name.to_uppercase();
        let free = TextRules::default();
        let (rules, texts) = if is_bounded { (rules, texts) } else { (&[&free][..], &[][..]) };
        let mut terminals = Vec::new();
        for (place, rules) in rules.iter().enumerate() {
            // A terminal before a token is not empty.
            let least = if is_token { rules.least.max(1) } else { rules.least };
            let most = rules.most.map_or(String::new(), |most| most.to_string());
            let mut body = format!("/(?s:.{{{least},{most}}}){space}/{unlike_json}{without_tag}");
            for expression in &rules.expressions {
                let _ = write!(body, " & /(?:{}){space}/", regex_to_lark(expression, "dw"));
            }
            terminals.push(format!("{terminal}_RULES_{place}"));
            self.rule(&format!("{terminal}_RULES_{place}"), &body);
        }
        let exact = texts.iter().filter(|text| !(is_token && text.is_empty()));
        terminals.extend(exact.map(|text| format!("/{}{space}/", regex_to_lark(&regex::escape(text), ""))));
        self.rule(&terminal, &terminals.join(" | "));
        if is_token {
            let may_be_empty = texts.contains(&"") || rules.iter().any(|rules| takes_empty(rules));
            let optional = if may_be_empty { "?" } else { "" };
            self.rule(name, &format!("{terminal}{optional} {tag} {after}"));
        } else {
            self.rule(name, &format!("{name}_text {after}"));
            self.rule(&format!("{name}_text[suffix={tag}]"), &terminal);
        }
    }

    /// Messages in channels: reasoning and remarks, then an answer or a call.
    fn harmony(mut self, tools: &[&Tool]) -> Result<String, String> {
        let [channel, message, start, end, constrain] =
            ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>"]
                .map(|text| self.literal(text));
        let end_of_start = match self.is_required() {
            true => "header_call",
            false => "(header_call | final)",
        };
        self.rule("start", &format!("aside* {end_of_start}"));
        self.rule("aside", &format!("{channel} ASIDE {message} TEXT? {end} {start} \"assistant\""));
        self.rule("ASIDE", "\"analysis\" | \"commentary\"");
        if !self.is_required() {
            self.rule("final", &format!("{channel} /final ?/ ({constrain} \"json\")? {message} answer"));
        }
        self.answer()?;
        let names: Vec<String> = (0..tools.len()).map(|number| format!("call_{number}")).collect();
        self.rule("header_call", &names.join(" | "));
        for (number, tool) in tools.iter().enumerate() {
            let name = &tool.name;
            let in_channel = quoted(&format!("commentary to=functions.{name} "));
            let in_role = quoted(&format!(" to=functions.{name}"));
            self.rule(
                &format!("call_{number}"),
                &format!(
                    "({channel} {in_channel} {constrain}? \"json\" | {in_role} {channel} \"commentary \" \
                     {constrain}? \"json\") {message} arguments_{number}"
                ),
            );
            self.json(&format!("arguments_{number}"), &tool.parameters)?;
        }
        Ok(self.lark)
    }
}

/// A literal of Lark, which is one of JSON.
fn quoted(text: &str) -> String {
    json!(text).to_string()
}

/// Whether the schema of a tool without listed properties says that there are none.
fn takes_none(parameters: &Value) -> bool {
    match parameters.get("additionalProperties") {
        Some(more) => *more == Value::Bool(false),
        None => parameters.get("properties").is_some(),
    }
}

/// Why something that a schema says of a text is not enforced, if that is so.
fn unenforced(forms: &[ValueForm]) -> Option<&str> {
    forms.iter().find_map(|form| match form {
        ValueForm::Text(rules) => rules.unenforced.as_deref(),
        ValueForm::Exact(_) | ValueForm::Json(_) => None,
    })
}

/// Whether rules allow a text without characters.
fn takes_empty(rules: &TextRules) -> bool {
    let is_empty = |expression: &String| {
        regex::Regex::new(&format!("^(?:{expression})$")).is_ok_and(|whole| whole.is_match(""))
    };
    rules.least == 0 && rules.expressions.iter().all(is_empty)
}
