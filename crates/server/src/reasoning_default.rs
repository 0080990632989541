//! How much a model reasons where a request does not say: as the server was started.

use crate::generation::{ChatPrompt, Generation, NO_BUDGET, Prompt, ReasoningEffort};
use crate::model::ServedModel;

/// Fills in what a request leaves open.
pub(crate) fn fill_in(served: &ServedModel, generation: &mut Generation) {
    let own = generation.reasoning_budget;
    let budget = own.or(served.defaults.reasoning_budget);
    generation.reasoning_budget = budget.filter(|budget| *budget != NO_BUDGET);
    let Prompt::Chat(chat) = &mut generation.prompt else { return };
    if own.is_some() || sets_a_switch(served, chat) {
        return;
    }
    chat.reasoning = match (&chat.reasoning, &served.reasoning) {
        (ReasoningEffort::Default, default) => default.clone(),
        // Whoever is not asked for reasoning is not asked for less than none.
        (ReasoningEffort::Unasked(_), ReasoningEffort::Off) => ReasoningEffort::Off,
        (own, _) => own.clone(),
    };
}

/// Whether a variable of the template says how much the model is to reason.
fn sets_a_switch(served: &ServedModel, chat: &ChatPrompt) -> bool {
    let switches = served.model.template().map(|template| template.without_reasoning()).unwrap_or_default();
    let variables = [&chat.variables, &served.defaults.template_variables];
    switches.keys().any(|name| variables.iter().any(|variables| variables.contains_key(name)))
}
