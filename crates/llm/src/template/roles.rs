//! Conversations as a template can write them: many want the system message at the beginning, and users and assistants by turns.

use super::{ChatTemplate, Message, TemplateArguments};

/// Texts that no template has by itself.
const FIRST: &str = "zqfirst";
const SECOND: &str = "zqsecond";
const OTHER: &str = "zqother";

/// Which roles may follow each other, found by rendering conversations in which they do.
#[derive(Clone, Copy, Debug)]
pub(super) struct RoleOrder {
    /// Whether system messages may come behind others.
    later_system: bool,
    /// Whether two messages of the user may.
    users: bool,
    /// Whether two of the assistant may.
    assistants: bool,
}

impl RoleOrder {
    /// A template that refuses an order, or leaves out one of the messages, lacks it.
    fn of(template: &ChatTemplate) -> RoleOrder {
        let writes = |order: &[(&str, &str)]| {
            let messages: Vec<Message> =
                order.iter().map(|(role, content)| Message::new(*role, *content)).collect();
            let text = template.render_with(&messages, &TemplateArguments::default());
            text.is_ok_and(|text| order.iter().all(|(_, content)| text.contains(content)))
        };
        RoleOrder {
            later_system: writes(&[
                ("user", FIRST),
                ("assistant", OTHER),
                ("system", "zqsystem"),
                ("user", SECOND),
            ]),
            users: writes(&[("user", FIRST), ("user", SECOND)]),
            assistants: writes(&[
                ("user", "zquser"),
                ("assistant", FIRST),
                ("assistant", SECOND),
                ("user", OTHER),
            ]),
        }
    }
}

impl ChatTemplate {
    /// The messages as the template takes them. System messages at the beginning are one, with a blank line between their texts. If
    /// the template refuses later ones, the user says them; if it refuses messages of one role behind each other, they are joined.
    ///
    /// ```
    /// use quadriga_llm::template::{ChatTemplate, Message};
    ///
    /// let source = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}\
    ///     {% endif %}{{ m.role }}: {{ m.content }};{% endfor %}";
    /// let template = ChatTemplate::new(source, "", "")?;
    /// let messages = ["system", "system", "user", "system"].map(|role| Message::new(role, role.len().to_string()));
    /// assert_eq!(template.render(&template.fitted(&messages), false)?, "system: 6\n\n6;user: 4;user: 6;");
    /// # Ok::<(), quadriga_llm::Error>(())
    /// ```
    pub fn fitted(&self, messages: &[Message]) -> Vec<Message> {
        let order = || *self.roles.get_or_init(|| RoleOrder::of(self));
        let leading = messages.iter().take_while(|message| message.role == "system").count();
        let mut all: Vec<Message> = Vec::with_capacity(messages.len());
        for (number, message) in messages.iter().enumerate() {
            let mut message = message.clone();
            let is_leading = number < leading;
            if message.role == "system" && !is_leading && !order().later_system {
                "user".clone_into(&mut message.role);
            }
            match all.last_mut().filter(|last| last.role == message.role) {
                Some(last) if is_leading || joins(&message.role, order) => join(last, message),
                _ => all.push(message),
            }
        }
        all
    }
}

/// Whether messages of this role that follow each other are joined. Results of calls have a message each.
fn joins(role: &str, order: impl Fn() -> RoleOrder) -> bool {
    match role {
        "user" => !order().users,
        "assistant" => !order().assistants,
        _ => false,
    }
}

fn join(first: &mut Message, second: Message) {
    append(&mut first.content, &second.content);
    if let Some(reasoning) = second.reasoning_content {
        append(first.reasoning_content.get_or_insert_default(), &reasoning);
    }
    first.tool_calls.extend(second.tool_calls);
    first.tools = first.tools.take().or(second.tools);
    first.trusted &= second.trusted;
}

fn append(text: &mut String, more: &str) {
    if !text.is_empty() && !more.is_empty() {
        text.push_str("\n\n");
    }
    text.push_str(more);
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::template::ToolCall;

    const STRICT: &str = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}\
        {{ raise_exception('System message must be at the beginning') }}{% endif %}\
        {% if not loop.first and m.role != 'tool' and m.role == messages[loop.index0 - 1].role %}\
        {{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}|{{ m.content }}]{% endfor %}";
    const OPEN: &str = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}";

    fn fitted(source: &str, messages: &[Message]) -> String {
        let template = ChatTemplate::new(source, "", "").unwrap();
        template.render(&template.fitted(messages), false).unwrap()
    }

    fn messages(order: &[(&str, &str)]) -> Vec<Message> {
        order.iter().map(|(role, content)| Message::new(*role, *content)).collect()
    }

    #[test]
    fn strict_templates_get_turns_and_others_what_was_said() {
        let order = [
            ("system", "a"),
            ("system", "b"),
            ("user", "c"),
            ("user", ""),
            ("user", "d"),
            ("assistant", "e"),
            ("assistant", "f"),
            ("system", "g"),
            ("user", "h"),
        ];
        let all = messages(&order);
        assert_eq!(fitted(STRICT, &all), "[system|a\n\nb][user|c\n\nd][assistant|e\n\nf][user|g\n\nh]");
        assert_eq!(
            fitted(OPEN, &all),
            "[system|a\n\nb][user|c][user|][user|d][assistant|e][assistant|f][system|g][user|h]"
        );
        // A template that leaves them out takes them no more than one that refuses them.
        let silent = "{% for m in messages %}{% if m.role != 'system' or loop.first %}[{{ m.role }}|{{ m.content }}]\
            {% endif %}{% endfor %}";
        assert_eq!(fitted(silent, &messages(&[("user", "a"), ("system", "b")])), "[user|a][user|b]");
    }

    #[test]
    fn calls_and_reasoning_of_joined_messages_are_kept() {
        let template = ChatTemplate::new(STRICT, "", "").unwrap();
        let call = |name: &str| ToolCall::new(name, serde_json::json!({}));
        let first = Message {
            reasoning_content: Some("r".to_owned()),
            tool_calls: vec![call("f")],
            trusted: true,
            ..Message::new("assistant", "")
        };
        let second = Message {
            reasoning_content: Some("s".to_owned()),
            tool_calls: vec![call("g")],
            ..Message::new("assistant", "text")
        };
        let results = [Message::new("tool", "1"), Message::new("tool", "2")];
        let all = [&[Message::new("user", "u"), first, second][..], &results].concat();
        let fitted = template.fitted(&all);
        assert_eq!(fitted.len(), 4);
        let joined = fitted.get(1).unwrap();
        assert_eq!((joined.content.as_str(), joined.reasoning_content.as_deref()), ("text", Some("r\n\ns")));
        let names: Vec<&str> = joined.tool_calls.iter().map(|call| call.name.as_str()).collect();
        assert_eq!(names, ["f", "g"]);
        // Text that nobody vouched for stays so.
        assert!(!joined.trusted);
    }
}
