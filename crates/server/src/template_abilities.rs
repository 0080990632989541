//! What a chat template can write, found by rendering it with conversations that need it.

use quadriga_llm::template::{ChatTemplate, Message, TemplateArguments, ToolCall};
use serde_json::{Value, json};

/// Texts that no template has by itself.
const SYSTEM: &str = "zqsystem";
const USER: &str = "zquser";
const ANSWER: &str = "zqanswer";
const REASONING: &str = "zqreasoning";
const TOOLS: [&str; 2] = ["zqfirst", "zqsecond"];
const ARGUMENT: &str = "zqargument";
const RESULT: &str = "zqresult";

/// What a chat template can write.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct TemplateAbilities {
    /// Messages whose content is a text.
    pub(crate) string_content: bool,
    /// A system prompt.
    pub(crate) system_role: bool,
    /// Definitions of tools.
    pub(crate) tools: bool,
    /// Calls of tools, and their results.
    pub(crate) tool_calls: bool,
    /// Several calls in one message.
    pub(crate) parallel_tool_calls: bool,
    /// Arguments of calls that are an object.
    pub(crate) object_arguments: bool,
    /// The reasoning of earlier answers.
    pub(crate) preserve_reasoning: bool,
}

impl TemplateAbilities {
    /// Renders the template with a conversation for each ability; a template that refuses one, or leaves it out, lacks it.
    pub(crate) fn of(template: &ChatTemplate) -> TemplateAbilities {
        let writes = |messages: &[Message], tools: &[Value], wanted: &[&str]| {
            let mut arguments = TemplateArguments::default();
            if !tools.is_empty() {
                arguments.variables.insert("tools".to_owned(), tools.into());
            }
            let text = template.render_with(messages, &arguments);
            text.is_ok_and(|text| wanted.iter().all(|wanted| text.contains(wanted)))
        };
        let user = || Message::new("user", USER);
        let tools = TOOLS.map(definition);
        let calls = |count: usize| {
            let calls: Vec<ToolCall> =
                (0..).zip(TOOLS).take(count).map(|(number, name)| call(number, name)).collect();
            let results = calls.iter().map(result).collect::<Vec<_>>();
            let message = Message { tool_calls: calls, ..Message::new("assistant", "") };
            [user(), message].into_iter().chain(results).collect::<Vec<_>>()
        };
        let reasoned =
            Message { reasoning_content: Some(REASONING.to_owned()), ..Message::new("assistant", ANSWER) };
        let [first, second] = TOOLS;
        TemplateAbilities {
            string_content: writes(&[user()], &[], &[USER]),
            system_role: writes(&[Message::new("system", SYSTEM), user()], &[], &[SYSTEM, USER]),
            tools: writes(&[user()], &tools, &[first, second]),
            tool_calls: writes(&calls(1), &tools, &[first, RESULT])
                && writes_calls(template, &calls(1), first),
            parallel_tool_calls: writes_calls(template, &calls(2), second),
            object_arguments: writes(&calls(1), &tools, &[ARGUMENT]),
            preserve_reasoning: writes(&[user(), reasoned, user()], &[], &[ANSWER, REASONING]),
        }
    }
}

/// Whether a call is written where the tools are not, which have the same names.
fn writes_calls(template: &ChatTemplate, messages: &[Message], name: &str) -> bool {
    template.render_with(messages, &TemplateArguments::default()).is_ok_and(|text| text.contains(name))
}

fn definition(name: &str) -> Value {
    let parameters =
        json!({ "type": "object", "properties": { "x": { "type": "string" } }, "required": ["x"] });
    json!({ "type": "function", "function": { "name": name, "description": "x", "parameters": parameters } })
}

/// A call, with an identifier of the nine characters that some templates insist on.
fn call(number: usize, name: &str) -> ToolCall {
    let id = Some(format!("zqcall{number:03}"));
    ToolCall { id, ..ToolCall::new(name, json!({ "x": ARGUMENT })) }
}

fn result(call: &ToolCall) -> Message {
    let (tool_call_id, name) = (call.id.clone(), Some(call.name.clone()));
    Message { tool_call_id, name, ..Message::new("tool", RESULT) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn abilities(source: &str) -> TemplateAbilities {
        TemplateAbilities::of(&ChatTemplate::new(source, "", "").unwrap())
    }

    /// Words of a template say nothing of what it writes.
    #[test]
    fn abilities_are_what_is_written() {
        let words = "{# system tools tool_calls reasoning_content #}{% for m in messages %}{{ m.content }}{% endfor %}";
        let plain = TemplateAbilities { string_content: true, system_role: true, ..Default::default() };
        assert_eq!(abilities(words), plain);
        let refuses = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}\
            {{ m.content }}{% endfor %}";
        assert_eq!(abilities(refuses), TemplateAbilities { system_role: false, ..plain });
        let one = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.content }}\
            {% if m.tool_calls %}{% set c = m.tool_calls[0] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endif %}\
            {% if m.reasoning_content %}{{ m.reasoning_content }}{% endif %}{% endfor %}";
        let all = TemplateAbilities {
            string_content: true,
            system_role: true,
            tools: true,
            tool_calls: true,
            parallel_tool_calls: true,
            object_arguments: true,
            preserve_reasoning: true,
        };
        assert_eq!(abilities(one), TemplateAbilities { parallel_tool_calls: false, ..all });
        let several = one
            .replace("{% set c = m.tool_calls[0] %}", "{% for c in m.tool_calls %}")
            .replace("tojson }}{% endif %}", "tojson }}{% endfor %}{% endif %}");
        assert_eq!(abilities(&several), all);
    }
}
