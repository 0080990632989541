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
    /// Bytes of the held text that were added with [`pass`](StopMatcher::pass).
    passed: usize,
    /// Whether the text has the stop string that was found.
    keeps_stop: bool,
}

/// The result of adding a part of the text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopStep {
    /// Text that is certainly not part of a stop string.
    pub text: String,
    /// The number of the stop string that was found; the text ends before it, or with it if it is kept, and generation should
    /// too.
    pub stopped_by: Option<usize>,
}

impl StopMatcher {
    /// A matcher for these strings; empty ones never match.
    pub fn new<S: Into<String>>(stops: impl IntoIterator<Item = S>) -> StopMatcher {
        let stops = stops.into_iter().map(Into::into).collect();
        StopMatcher { stops, held: String::new(), passed: 0, keeps_stop: false }
    }

    /// With a text that ends with the stop string that was found, not before it.
    #[must_use]
    pub fn keeping_stop(self, keeps_stop: bool) -> StopMatcher {
        StopMatcher { keeps_stop, ..self }
    }

    /// Adds a part of the text. If it completes several stop strings, the one that starts first is taken, then the
    /// longest.
    pub fn push(&mut self, part: &str) -> StopStep {
        self.held.push_str(part);
        let found = self
            .possible()
            .filter_map(|(number, stop)| self.find(stop).map(|at| (at, stop.len(), number)))
            .min_by_key(|&(at, length, number)| (at, std::cmp::Reverse(length), number));
        if let Some((at, length, number)) = found {
            let mut text = std::mem::take(&mut self.held);
            text.truncate(if self.keeps_stop { at + length } else { at });
            self.passed = 0;
            return StopStep { text, stopped_by: Some(number) };
        }
        StopStep { text: self.release(), stopped_by: None }
    }

    /// Adds a part of the text that ends no stop string: one that is found later may begin in it.
    pub fn pass(&mut self, part: &str) -> String {
        self.held.push_str(part);
        self.passed = self.held.len();
        self.release()
    }

    /// The stop strings that can match, with their numbers.
    fn possible(&self) -> impl Iterator<Item = (usize, &str)> {
        self.stops.iter().map(String::as_str).enumerate().filter(|(_, stop)| !stop.is_empty())
    }

    /// Where a stop string begins that does not end in text that was passed.
    fn find(&self, stop: &str) -> Option<usize> {
        let mut from = (self.passed + 1).saturating_sub(stop.len());
        loop {
            from = (from..=self.held.len()).find(|at| self.held.is_char_boundary(*at))?;
            let at = from + self.held.get(from..)?.find(stop)?;
            if at + stop.len() > self.passed {
                return Some(at);
            }
            from = at + 1;
        }
    }

    /// The held text up to the first position from which it could still become a stop string.
    fn release(&mut self) -> String {
        let longest = self.possible().map(|(_, stop)| stop.len()).max().unwrap_or(0);
        let hold = self.held.char_indices().map(|(at, _)| at).find(|&at| {
            self.held.len() - at < longest
                && self
                    .possible()
                    .any(|(_, stop)| self.held.get(at..).is_some_and(|start| stop.starts_with(start)))
        });
        let rest = self.held.split_off(hold.unwrap_or(self.held.len()));
        let text = std::mem::replace(&mut self.held, rest);
        self.passed = self.passed.saturating_sub(text.len());
        text
    }

    /// The text that was held back, at the end of the stream.
    pub fn finish(&mut self) -> String {
        self.passed = 0;
        std::mem::take(&mut self.held)
    }
}
