//! An engine that computes step by step.

use std::sync::mpsc::{Receiver, Sender, channel};

use quadriga_llm::sampling::SamplingOptions;
use quadriga_llm::serving::{Event, Request};
use quadriga_server::ServedModel;

/// Holds an engine after each of its steps, with a request of its own. When it is dropped, the engine goes on.
pub struct Gate {
    go_on: Sender<()>,
    held: Receiver<()>,
}

impl Gate {
    /// Holds the engine after the next step.
    pub fn new(served: &ServedModel) -> Gate {
        let (go_on, gate) = channel();
        let (entered, held) = channel();
        let listener = Box::new(move |event| {
            if matches!(event, Event::Token { .. }) {
                let _ = entered.send(());
                return gate.recv().is_ok();
            }
            true
        });
        let request = Request {
            sampling: SamplingOptions { ignore_eos: true, ..SamplingOptions::default() },
            ..Request::new(vec![1, 2, 3])
        };
        served.service().unwrap().submit_to(vec![(request, listener)], |ids| ids.is_ok()).unwrap();
        let gate = Gate { go_on, held };
        gate.held.recv().unwrap();
        gate
    }

    /// Has the engine's thread end as after a panic, at once after the step that is held.
    pub fn end_thread(self, served: &ServedModel) {
        let service = served.service().unwrap();
        let end = |_| -> bool { std::panic::resume_unwind(Box::new("the test ends the engine")) };
        service.submit_to(Vec::new(), end).unwrap();
    }

    /// Lets the engine hear what it was told meanwhile, and compute one step.
    pub fn step(&self) {
        self.go_on.send(()).unwrap();
        self.held.recv().unwrap();
    }
}
