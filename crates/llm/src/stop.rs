//! Stop strings in streamed text.
//!
//! ```
//! use quadriga_llm::stop::StopMatcher;
//!
//! let mut matcher = StopMatcher::new(["\nUser:"]);
//! assert_eq!(matcher.push("Yes.\nUs").text, "Yes."); // "\nUs" may be the start of the stop string
//! let step = matcher.push("er: and");
//! assert_eq!((step.text.as_str(), step.stopped_by), ("", Some(0)));
//! ```

/// Finds stop strings in streamed text. Text that may be the start of a stop string is held back until it is certain.
#[derive(Clone, Debug, Default)]
pub struct StopMatcher {
    stops: Vec<String>,
    held: String,
}

/// The result of adding a part of the text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopStep {
    /// Text that is certainly not part of a stop string.
    pub text: String,
    /// The number of the stop string that was found; the text ends before it, and generation should too.
    pub stopped_by: Option<usize>,
}

impl StopMatcher {
    /// A matcher for these strings; empty ones never match.
    pub fn new<S: Into<String>>(stops: impl IntoIterator<Item = S>) -> StopMatcher {
        StopMatcher { stops: stops.into_iter().map(Into::into).collect(), held: String::new() }
    }

    /// Adds a part of the text. If it completes several stop strings, the one that starts first is taken, then the
    /// longest.
    pub fn push(&mut self, part: &str) -> StopStep {
        self.held.push_str(part);
        let stops = || self.stops.iter().enumerate().filter(|(_, stop)| !stop.is_empty());
        let found = stops()
            .filter_map(|(number, stop)| self.held.find(stop.as_str()).map(|at| (at, stop.len(), number)))
            .min_by_key(|&(at, length, number)| (at, std::cmp::Reverse(length), number));
        if let Some((at, _, number)) = found {
            let mut text = std::mem::take(&mut self.held);
            text.truncate(at);
            return StopStep { text, stopped_by: Some(number) };
        }
        let longest = stops().map(|(_, stop)| stop.len()).max().unwrap_or(0);
        // The first position from which the held text could still become a stop string.
        let hold = self.held.char_indices().map(|(at, _)| at).find(|&at| {
            self.held.len() - at < longest
                && stops().any(|(_, stop)| self.held.get(at..).is_some_and(|start| stop.starts_with(start)))
        });
        let rest = self.held.split_off(hold.unwrap_or(self.held.len()));
        StopStep { text: std::mem::replace(&mut self.held, rest), stopped_by: None }
    }

    /// The text that was held back, at the end of the stream.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}
