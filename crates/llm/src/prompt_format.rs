//! From a conversation to the tokens of a prompt, and to what tells reasoning in its answer from the rest.

use serde_json::Value;

use crate::reasoning::{ReasoningFormat, ReasoningSplitter};
use crate::template::{self, ChatTemplate, Message, TemplateArguments};
use crate::tools::{Tool, ToolCallParser};
use crate::{Model, Result};

/// Tokens at the end of a prompt in which a marker of reasoning is searched: one per byte, and white space.
const MARKER_TOKENS: usize = 40;

/// A model's way to write prompts.
pub(crate) struct PromptFormat<'a> {
    pub(crate) model: &'a Model,
    /// Whether prompts are used as they are, without the chat template.
    pub(crate) raw: bool,
    /// Whether control tokens that are spelled out in messages become those tokens.
    pub(crate) special: bool,
    /// The system prompt of conversations that have none.
    pub(crate) system: Option<&'a str>,
    /// Keyword arguments of the chat template.
    pub(crate) template_variables: &'a serde_json::Map<String, Value>,
}

impl PromptFormat<'_> {
    fn template(&self) -> Option<&ChatTemplate> {
        self.model.template().filter(|_| !self.raw)
    }

    /// The tokens of a conversation, rendered with the chat template; without one, of the messages' plain text.
    pub(crate) fn tokenize(&self, messages: &[Message], add_generation_prompt: bool) -> Result<Vec<u32>> {
        let tokenizer = self.model.tokenizer()?;
        let all = self.all_messages(messages);
        match self.template() {
            Some(template) => {
                template.tokenize_with(tokenizer, &all, &self.template_arguments(add_generation_prompt))
            }
            None => Ok(template::tokenize_contents(tokenizer, &all)),
        }
    }

    /// The definitions of tools, in OpenAI's format.
    fn tools(&self) -> &[Value] {
        let tools = self.template_variables.get("tools").filter(|_| self.template().is_some());
        tools.and_then(Value::as_array).map_or(&[], Vec::as_slice)
    }

    /// The messages in an order that the template takes.
    fn fitted(&self, messages: &[Message]) -> Vec<Message> {
        self.template().map_or_else(|| messages.to_vec(), |template| template.fitted(messages))
    }

    /// The messages as the template can write them: in an order that it takes, and with tools if it or they have some.
    pub(crate) fn with_tools(&self, messages: &[Message]) -> Result<Vec<Message>> {
        let messages = self.fitted(messages);
        let is_call = |message: &Message| message.role == "tool" || !message.tool_calls.is_empty();
        let has_tools = self.template().is_some() && messages.iter().any(is_call) || !self.tools().is_empty();
        if !has_tools {
            return Ok(messages);
        }
        // Tools may be described in the system message.
        let own = self.system.filter(|_| !messages.first().is_some_and(is_system));
        let system = own.map(|text| Message::new("system", text));
        let all: Vec<Message> = system.into_iter().chain(messages).collect();
        // What is written as text of the user may follow or precede other text of the user.
        Ok(self.fitted(&self.model.tool_format()?.conversation(&all, self.tools())))
    }

    /// Tells calls of tools in the answer from the rest, if there are tools.
    pub(crate) fn tool_call_parser(&self) -> Result<Option<ToolCallParser>> {
        if self.tools().is_empty() {
            return Ok(None);
        }
        let tools: Vec<Tool> = self.tools().iter().filter_map(Tool::from_json).collect();
        self.model.tool_call_parser(tools.into()).map(Some)
    }

    /// The messages with the options' system message, if they have none and there is a template.
    fn all_messages(&self, messages: &[Message]) -> Vec<Message> {
        let own = self.template().is_some() && !messages.first().is_some_and(is_system);
        let system = self.system.filter(|_| own);
        let system = system.map(|text| Message::new("system", text));
        let mut all: Vec<Message> = system.into_iter().chain(messages.iter().cloned()).collect();
        all.iter_mut().for_each(|message| message.trusted |= self.special);
        all
    }

    fn template_arguments(&self, add_generation_prompt: bool) -> TemplateArguments {
        let variables = self.template_variables.clone();
        TemplateArguments { variables, add_generation_prompt }
    }

    /// Tells the reasoning in the answer to a prompt from the rest, as the chat template's format says.
    pub(crate) fn splitter(&self, prompt: &[u32], opens: bool) -> Result<ReasoningSplitter> {
        let Some(format) = self.template().and_then(ChatTemplate::reasoning) else {
            return Ok(ReasoningSplitter::new(None, false));
        };
        let tokenizer = self.model.tokenizer()?;
        let end = prompt.get(prompt.len().saturating_sub(MARKER_TOKENS)..).unwrap_or_default();
        let mut bytes = Vec::new();
        for token in end {
            let control = tokenizer.control_text(*token).map(str::as_bytes);
            bytes.extend_from_slice(control.map_or_else(|| tokenizer.piece(*token), Ok)?);
        }
        let end = String::from_utf8_lossy(&bytes);
        // The template has written that there is none: a marker in the answer is text.
        if format.is_closed(&end) {
            return Ok(ReasoningSplitter::new(None, false));
        }
        let splitter = ReasoningSplitter::new(Some(format.clone()), opens && format.is_open(&end));
        Ok(if format.uses_tokens(tokenizer) { splitter.with_marked_markers() } else { splitter })
    }

    /// Whether a marker of reasoning at the end of the prompt is a message's and not the template's.
    pub(crate) fn is_forged(&self, messages: &[Message]) -> Result<bool> {
        let Some((template, format)) =
            self.template().and_then(|template| Some((template, template.reasoning()?)))
        else {
            return Ok(false);
        };
        let ReasoningFormat::Markers { open, .. } = format else { return Ok(false) };
        let all = self.all_messages(messages);
        if !all.iter().any(|message| message.content.contains(open.as_ref())) {
            return Ok(false);
        }
        let harmless = |message: &Message| Message {
            content: message.content.replace(open.as_ref(), "?"),
            ..message.clone()
        };
        let all: Vec<Message> = all.iter().map(harmless).collect();
        let text = template.render_with(&all, &self.template_arguments(true))?;
        Ok(!format.is_open(&text))
    }
}

pub(crate) fn is_system(message: &Message) -> bool {
    message.role == "system"
}
