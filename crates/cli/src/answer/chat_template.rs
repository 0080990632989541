//! The chat template and its variables, as the options say.

use quadriga_llm::Model;
use quadriga_llm::reasoning::ReasoningFormat;
use quadriga_llm::template::ChatTemplate;
use serde_json::{Map, Value};

use super::{AnswerOptions, read_text};
use crate::failure::{Failure, Outcome};
use crate::prepared_model::Prepared;

impl AnswerOptions {
    /// Replaces the model's chat template where the options say so. One that cannot be parsed is an error, unless it is not used.
    pub(crate) fn set_template(&self, prepared: &mut Prepared) -> Outcome {
        let source = match (&self.chat_template, &self.chat_template_file) {
            (Some(name), _) if !name.contains('{') => {
                return Err(Failure::Usage(format!(
                    "--chat-template {name}: there are no built-in templates; --chat-template-file FILE reads one, and without it the model's is used"
                )));
            }
            (Some(source), _) => Some(source.clone()),
            (None, Some(path)) => Some(read_text(path)?),
            (None, None) => None,
        };
        if let Some(source) = source {
            prepared.model = prepared.model.clone().with_template(&source)?;
        }
        match prepared.model.template().filter(|_| !self.raw) {
            Some(template) => Ok(template.check()?),
            None => Ok(()),
        }
    }

    /// Says so if the model has no chat template that could be used.
    pub(crate) fn explain_missing_template(&self, model: &Model) {
        if model.template().is_none() && !self.raw {
            note!("quadriga: the model has no chat template: it continues the plain text, as with --raw");
        }
    }

    /// The variables of the chat template. Says so if options for it have no effect.
    pub(crate) fn template_variables(&self, model: &Model) -> Map<String, Value> {
        let mut variables = match self.turns_reasoning_off() {
            true => self.without_reasoning(model),
            false => Map::new(),
        };
        variables.extend(self.keyword_arguments(model));
        variables
    }

    /// The template of prompts, or why there is none.
    fn used_template<'m>(&self, model: &'m Model) -> Result<&'m ChatTemplate, &'static str> {
        match model.template() {
            _ if self.raw => Err("--raw uses no chat template"),
            Some(template) => Ok(template),
            None => Err("there is no chat template"),
        }
    }

    /// The variables that ask for no reasoning.
    fn without_reasoning(&self, model: &Model) -> Map<String, Value> {
        let template = self.used_template(model).ok();
        let variables = template.map(ChatTemplate::without_reasoning).unwrap_or_default();
        match template.and_then(ChatTemplate::reasoning) {
            Some(_) if variables.is_empty() => note!(
                "quadriga: --reasoning off has no effect: this chat template cannot turn reasoning off; --reasoning hide does not print it"
            ),
            _ => self.explain_no_reasoning(model),
        }
        variables
    }

    /// Says what cannot be if there is to be no reasoning.
    pub(crate) fn explain_no_reasoning(&self, model: &Model) {
        match self.used_template(model).map(ChatTemplate::reasoning) {
            Err(reason) => note!("quadriga: --reasoning off has no effect: {reason}"),
            Ok(None) => {
                note!("quadriga: --reasoning off has no effect: the chat template knows no reasoning")
            }
            Ok(Some(ReasoningFormat::Harmony)) => {
                note!("quadriga: this model always reasons; --reasoning off asks for as little as possible");
            }
            Ok(Some(_)) => {}
        }
    }

    /// The keyword arguments of the chat template.
    pub(crate) fn keyword_arguments(&self, model: &Model) -> Map<String, Value> {
        let given = &self.chat_template_kwargs.0;
        let template = match self.used_template(model) {
            Ok(template) => template,
            Err(reason) => {
                if !given.is_empty() {
                    note!("quadriga: --chat-template-kwargs has no effect: {reason}");
                }
                return Map::new();
            }
        };
        for name in given.keys().filter(|name| !template.reads(name)) {
            note!(
                "quadriga: --chat-template-kwargs: {name:?} has no effect: the chat template does not read it"
            );
        }
        given.clone()
    }
}
