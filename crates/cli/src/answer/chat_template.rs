//! The chat template and its variables, as the options say.

use quadriga_llm::Model;
use quadriga_llm::reasoning::ReasoningFormat;

use super::{AnswerOptions, read_text};
use crate::answer_printer::ReasoningOutput;
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
    pub(crate) fn template_variables(&self, model: &Model) -> serde_json::Map<String, serde_json::Value> {
        let mut variables = serde_json::Map::new();
        let wants_none = self.reasoning == ReasoningOutput::Off;
        let Some(template) = model.template().filter(|_| !self.raw) else {
            let reason = if self.raw { "--raw uses no chat template" } else { "there is no chat template" };
            for (option, is_given) in [
                ("--reasoning off", wants_none),
                ("--chat-template-kwargs", !self.chat_template_kwargs.0.is_empty()),
            ] {
                if is_given {
                    note!("quadriga: {option} has no effect: {reason}");
                }
            }
            return variables;
        };
        if wants_none {
            variables = template.without_reasoning();
            match template.reasoning() {
                None => {
                    note!("quadriga: --reasoning off has no effect: the chat template knows no reasoning")
                }
                Some(_) if variables.is_empty() => note!(
                    "quadriga: --reasoning off has no effect: this chat template cannot turn reasoning off; --reasoning hide does not print it"
                ),
                Some(ReasoningFormat::Harmony) => {
                    note!(
                        "quadriga: this model always reasons; --reasoning off asks for as little as possible"
                    );
                }
                Some(_) => {}
            }
        }
        for name in self.chat_template_kwargs.0.keys().filter(|name| !template.reads(name)) {
            note!(
                "quadriga: --chat-template-kwargs: {name:?} has no effect: the chat template does not read it"
            );
        }
        variables.extend(self.chat_template_kwargs.0.clone());
        variables
    }
}
