//! Conversations that outgrow the context.

use crate::prompt_format::is_system;
use crate::template::Message;
use crate::{Error, Generator, Result};

/// A conversation that fits the context: its oldest turns may be missing.
#[derive(Clone, PartialEq, Debug)]
pub struct FittedConversation {
    /// The messages that are left: system messages at the beginning, and the latest turns.
    pub messages: Vec<Message>,
    /// Their tokens, as [`Generator::tokenize`] gives them.
    pub tokens: Vec<u32>,
    /// The number of turns that were dropped: each a user message with everything up to the next one.
    pub dropped_turns: usize,
    /// The number of messages in them.
    pub dropped_messages: usize,
}

impl Generator {
    /// Drops as few of the oldest turns as needed, so that the conversation fits the context and leaves room for an
    /// answer of `room` tokens. System messages at the beginning and the last turn are kept; if those leave less room
    /// than wanted, but some, they are the result.
    ///
    /// ```no_run
    /// # fn example(
    /// #     generator: &mut quadriga_llm::Generator,
    /// #     mut conversation: Vec<quadriga_llm::template::Message>,
    /// # ) -> Result<(), quadriga_llm::Error> {
    /// let fitted = generator.fit(&conversation, 256)?;
    /// if fitted.dropped_turns > 0 {
    ///     println!("({} earlier turns no longer fit)", fitted.dropped_turns);
    /// }
    /// conversation = fitted.messages;
    /// let answer = generator.chat(&conversation)?.complete()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::ContextFull`] if not even the last turn fits, and errors of the chat template.
    pub fn fit(&self, messages: &[Message], room: usize) -> Result<FittedConversation> {
        let context = self.engine().options().context;
        let system = messages.iter().take_while(|message| is_system(message)).count();
        // Where each turn starts; what precedes the first user message belongs to the first turn.
        let is_start = |(at, message): &(usize, &Message)| *at > system && message.role == "user";
        let starts: Vec<usize> = std::iter::once(system)
            .chain(messages.iter().enumerate().filter(is_start).map(|(at, _)| at))
            .collect();
        let without = |dropped: usize| -> Result<FittedConversation> {
            let start = starts.get(dropped).copied().unwrap_or(system);
            let kept = messages.iter().take(system).chain(messages.iter().skip(start));
            let messages: Vec<Message> = kept.cloned().collect();
            let tokens = self.tokenize(&messages)?;
            Ok(FittedConversation {
                messages,
                tokens,
                dropped_turns: dropped,
                dropped_messages: start - system,
            })
        };
        let fits = |fitted: &FittedConversation, room: usize| {
            fitted.tokens.len().saturating_add(room.max(1)) <= context
        };
        let whole = without(0)?;
        if fits(&whole, room) {
            return Ok(whole);
        }
        // The fewer turns, the fewer tokens: find the smallest number of dropped turns that is enough.
        let (mut too_few, mut enough) = (0, starts.len() - 1);
        let mut best = without(enough)?;
        if !fits(&best, room) {
            let wanted = best.tokens.len() + 1;
            return if fits(&best, 1) {
                Ok(best)
            } else {
                Err(Error::ContextFull { wanted, used: 0, context })
            };
        }
        while enough - too_few > 1 {
            let middle = too_few.midpoint(enough);
            let fitted = without(middle)?;
            if fits(&fitted, room) {
                (enough, best) = (middle, fitted);
            } else {
                too_few = middle;
            }
        }
        Ok(best)
    }
}
