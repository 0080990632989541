//! The messages of a conversation, and its file.

use std::path::Path;

use quadriga_llm::template::Message;
use serde::{Deserialize, Serialize};

use crate::atomic_file::AtomicFile;
use crate::failure::{Failure, Outcome};

/// A conversation: an optional system prompt, then messages of user and assistant in turn.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Conversation {
    pub(super) system: Option<String>,
    messages: Vec<Message>,
}

/// The file's content.
#[derive(Serialize, Deserialize)]
struct StoredConversation {
    messages: Vec<Message>,
}

impl Conversation {
    /// The messages without the system prompt.
    pub(super) fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// The system prompt as a message, and all messages.
    pub(super) fn with_system(&self) -> Vec<Message> {
        let system = self.system.iter().map(|text| Message::new("system", text.clone()));
        system.chain(self.messages.iter().cloned()).collect()
    }

    pub(super) fn push(&mut self, role: &str, text: &str) {
        self.add(Message::new(role, text));
    }

    pub(super) fn add(&mut self, message: Message) {
        self.messages.push(message);
    }

    pub(super) fn clear(&mut self) {
        self.messages.clear();
    }

    /// Removes the last message if it has this role, and returns it.
    pub(super) fn pop(&mut self, role: &str) -> Option<Message> {
        self.messages.pop_if(|message| message.role == role)
    }

    /// Removes the oldest message and the answers to it. False if only the last message is left.
    pub(super) fn drop_oldest_turn(&mut self) -> bool {
        let is_user = |message: &Message| message.role == "user";
        match self.messages.iter().skip(1).position(is_user) {
            Some(answers) => {
                self.messages.drain(..=answers);
                true
            }
            None => false,
        }
    }

    /// Writes the conversation as JSON.
    pub(super) fn save(&self, path: &Path) -> Outcome {
        let stored = StoredConversation { messages: self.with_system() };
        AtomicFile::write_text(path, &format!("{}\n", serde_json::to_string_pretty(&stored)?))
    }

    /// Reads a conversation from a file.
    pub(super) fn read(path: &Path) -> Outcome<Conversation> {
        let text = std::fs::read_to_string(path).map_err(|error| Failure::file("read", path, &error))?;
        let wrong =
            |reason: String| Failure::Message(format!("{} is no conversation: {reason}", path.display()));
        let stored: StoredConversation =
            serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
        let mut conversation = Conversation::default();
        for (number, message) in stored.messages.into_iter().enumerate() {
            let expected = conversation.next_role();
            match message.role.as_str() {
                "system" if number == 0 => conversation.system = Some(message.content),
                role if role == expected => conversation.add(message),
                role => {
                    let number = number + 1;
                    return Err(wrong(format!("message {number} has role {role:?} instead of {expected:?}")));
                }
            }
        }
        match conversation.next_role() {
            "user" => Ok(conversation),
            _ => Err(wrong("the last message has no answer".to_owned())),
        }
    }

    /// The role of the next message: user and assistant take turns.
    fn next_role(&self) -> &'static str {
        match self.messages.last() {
            Some(last) if last.role == "user" => "assistant",
            _ => "user",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conversation(roles: &[&str]) -> Conversation {
        let mut conversation = Conversation { system: Some("s".to_owned()), ..Conversation::default() };
        for (number, role) in roles.iter().enumerate() {
            conversation.push(role, &number.to_string());
        }
        conversation
    }

    fn contents(conversation: &Conversation) -> Vec<String> {
        conversation.with_system().into_iter().map(|message| message.content).collect()
    }

    #[test]
    fn the_oldest_turn_goes_with_its_answer_and_the_system_prompt_stays() {
        let mut three = conversation(&["user", "assistant", "user", "assistant", "user"]);
        assert!(three.drop_oldest_turn());
        assert_eq!(contents(&three), ["s", "2", "3", "4"]);
        assert!(three.drop_oldest_turn());
        assert_eq!(contents(&three), ["s", "4"]);
        assert!(!three.drop_oldest_turn());
        assert_eq!(contents(&three), ["s", "4"]);
    }

    #[test]
    fn only_the_last_message_of_a_role_is_popped() {
        let mut one = conversation(&["user", "assistant"]);
        assert_eq!(one.pop("user"), None);
        assert_eq!(one.pop("assistant"), Some(Message::new("assistant", "1")));
        assert_eq!(one.pop("user"), Some(Message::new("user", "0")));
        assert_eq!(one.pop("user"), None);
    }

    #[test]
    fn a_file_gives_the_same_conversation() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("chat.json");
        let mut kept = conversation(&["user", "assistant"]);
        kept.push("user", "why?");
        let reasoning_content = Some("because".to_owned());
        kept.add(Message { reasoning_content, ..Message::new("assistant", "x") });
        kept.save(&path).unwrap();
        assert_eq!(Conversation::read(&path).unwrap(), kept);
        for wrong in ["", "{}", r#"{"messages": [{"role": "tool", "content": "x"}]}"#] {
            std::fs::write(&path, wrong).unwrap();
            assert!(
                matches!(Conversation::read(&path), Err(Failure::Message(text)) if text.contains("chat.json"))
            );
        }
    }

    #[test]
    fn roles_in_a_file_take_turns() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("chat.json");
        let read = |roles: &[&str]| {
            let message = |role: &&str| serde_json::json!({ "role": role, "content": "x" });
            let messages: Vec<_> = roles.iter().map(message).collect();
            std::fs::write(&path, serde_json::json!({ "messages": messages }).to_string()).unwrap();
            Conversation::read(&path).map_err(|failure| format!("{failure:?}"))
        };
        for right in [&[][..], &["system"], &["user", "assistant"], &["system", "user", "assistant"]] {
            read(right).unwrap();
        }
        for (roles, part) in [
            (&["assistant"][..], "message 1 has role \"assistant\" instead of \"user\""),
            (&["user", "user"], "message 2 has role \"user\" instead of \"assistant\""),
            (&["system", "system"], "message 2 has role \"system\""),
            (&["user", "assistant", "system"], "message 3 has role \"system\""),
            (&["user"], "the last message has no answer"),
        ] {
            let error = read(roles).unwrap_err().replace('\\', "");
            assert!(error.contains(part), "{roles:?}: {error}");
        }
    }
}
