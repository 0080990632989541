//! An answer while it is generated.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::{PyException, PyStopIteration};
use pyo3::prelude::*;
use quadriga_llm::Finish;
use quadriga_llm::serving::{Event, Finished, TokenLogprobs};

use crate::callback::check_model;
use crate::detached::{detached, signal_interval};
use crate::failure::{Failure, Outcome};
use crate::process::ProcessMark;
use crate::queue::EventQueue;

/// The log-probability of a token, and the most probable tokens with theirs.
type LogprobsAt = (f64, Vec<(u32, f64)>);

/// A token of an answer and the text that it completes.
#[pyclass(frozen, get_all, module = "quadriga._quadriga")]
pub(crate) struct Piece {
    /// The token.
    token: u32,
    /// Text of the answer; empty while a character, a possible stop string or the reasoning is incomplete.
    text: String,
    /// Text of the reasoning before the answer.
    reasoning: String,
    /// Parts of calls of tools: the number of the call, the function's name in its first part, and a part of its arguments.
    tool_calls: Vec<(usize, Option<String>, String)>,
    /// The token's log-probability, if it was asked for.
    logprob: Option<f64>,
    /// The most probable tokens with their log-probabilities, if they were asked for.
    top_logprobs: Vec<(u32, f64)>,
}

#[pymethods]
impl Piece {
    fn __str__(&self) -> &str {
        &self.text
    }

    fn __repr__(&self) -> String {
        format!("Piece(token={}, text={:?})", self.token, self.text)
    }
}

/// An answer while it is generated: an iterator over its pieces. Dropping or closing it ends the generation.
#[pyclass(frozen, module = "quadriga._quadriga")]
pub(crate) struct StreamCore {
    process: ProcessMark,
    /// The number of the model.
    model: u64,
    queue: Arc<EventQueue>,
    prompt: Vec<u32>,
    stops: Vec<String>,
    state: Mutex<StreamState>,
}

#[derive(Default)]
struct StreamState {
    finished: Option<Finished>,
    prompt_logprobs: Option<Vec<TokenLogprobs>>,
    calls_tools: bool,
    ended: bool,
}

impl StreamCore {
    /// The answer whose events come through a queue.
    pub(crate) fn new(
        model: u64,
        queue: Arc<EventQueue>,
        prompt: Vec<u32>,
        stops: Vec<String>,
    ) -> StreamCore {
        StreamCore { process: ProcessMark::new(), model, queue, prompt, stops, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, StreamState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// No event follows, and neither a thread nor an event loop waits for one.
    fn end(&self, py: Python<'_>) -> PyResult<()> {
        self.state().ended = true;
        let mut outcome = Ok(());
        for waker in self.queue.close() {
            // An event loop that is closed needs no call; but a handler of a signal may raise meanwhile.
            if let Err(raised) = waker.call0(py)
                && !raised.is_instance_of::<PyException>(py)
            {
                outcome = Err(raised);
            }
        }
        outcome
    }

    /// The piece of an event, if it has one.
    fn take(&self, py: Python<'_>, event: Event) -> Outcome<Option<Piece>> {
        match event {
            Event::Token { piece, logprobs } => {
                let calls = piece.tool_calls.into_iter();
                let tool_calls: Vec<_> = calls.map(|call| (call.index, call.name, call.arguments)).collect();
                if !tool_calls.is_empty() {
                    self.state().calls_tools = true;
                }
                let (logprob, top_logprobs) = match logprobs {
                    Some(found) => (Some(found.logprob), found.top),
                    None => (None, Vec::new()),
                };
                let (token, text, reasoning) = (piece.token, piece.text, piece.reasoning);
                Ok(Some(Piece { token, text, reasoning, tool_calls, logprob, top_logprobs }))
            }
            Event::Prompt { logprobs } => {
                self.state().prompt_logprobs = Some(logprobs);
                Ok(None)
            }
            Event::Finished(finished) => {
                self.state().finished = Some(finished);
                self.end(py)?;
                Ok(None)
            }
            Event::Failed(error) => {
                self.end(py)?;
                Err(Failure::of_llm(&error))
            }
            Event::Progress { .. } | Event::Embedding { .. } => Ok(None),
        }
    }
}

#[pymethods]
impl StreamCore {
    fn __iter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    /// Waits for the next piece.
    fn __next__(&self, py: Python<'_>) -> PyResult<Piece> {
        loop {
            if self.state().ended {
                return Err(PyStopIteration::new_err(()));
            }
            self.process.check("stream")?;
            check_model(self.model)?;
            // What is there is taken without giving up the GIL, which other threads would have to give back.
            let event = match self.queue.try_next() {
                Some(event) => Some(event),
                None => {
                    let interval = signal_interval(py)?;
                    let (event, turn) = detached(py, || Ok(self.queue.next(interval)))?;
                    // This thread has the GIL again: now the next one may want it.
                    drop(turn);
                    event
                }
            };
            match event {
                Some(event) => {
                    if let Some(piece) = self.take(py, event)? {
                        return Ok(piece);
                    }
                }
                None => py.check_signals()?,
            }
        }
    }

    /// The next piece if it is there already; `None` if it is not, or if the answer has ended.
    fn poll(&self, py: Python<'_>) -> PyResult<Option<Piece>> {
        while !self.state().ended {
            self.process.check("stream")?;
            let Some(event) = self.queue.try_next() else { break };
            if let Some(piece) = self.take(py, event)? {
                return Ok(Some(piece));
            }
        }
        Ok(None)
    }

    /// Has a function called when the next event comes, or the stream is closed. Returns false if there is an event already, or
    /// none will come.
    fn wake(&self, waker: Py<PyAny>) -> PyResult<bool> {
        self.process.check("stream")?;
        Ok(self.queue.wake(waker))
    }

    /// Whether the answer is complete, failed or closed.
    #[getter]
    fn ended(&self) -> bool {
        self.state().ended
    }

    /// Ends the generation. In a fork there is none to end, and the queue may be locked for ever: by a thread of the engine, which
    /// does not exist there.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if self.process.is_here() { self.end(py) } else { Ok(()) }
    }

    /// The tokens of the prompt.
    #[getter]
    fn prompt_tokens(&self) -> Vec<u32> {
        self.prompt.clone()
    }

    /// Log-probabilities of the prompt's tokens but the first, with the most probable ones, if they were asked for.
    #[getter]
    fn prompt_logprobs(&self) -> Option<Vec<LogprobsAt>> {
        let state = self.state();
        let logprobs = state.prompt_logprobs.as_ref()?;
        Some(logprobs.iter().map(|at| (at.logprob, at.top.clone())).collect())
    }

    /// How the answer ended: the reason, the stop string, tokens of prompt, of those the cached ones, tokens of the answer, of
    /// those the ones of reasoning, and the seconds to the first token and from there to the last.
    #[getter]
    #[allow(clippy::type_complexity, reason = "it becomes one Python tuple")]
    fn outcome(&self) -> Option<(&'static str, Option<String>, usize, usize, usize, usize, f64, f64)> {
        let state = self.state();
        let finished = state.finished?;
        let (reason, stop) = match finished.finish {
            Finish::Length | Finish::Context => ("length", None),
            Finish::Stop(number) => ("stop", self.stops.get(number).cloned()),
            Finish::StopToken(_) => ("stop", None),
            Finish::End | Finish::Cancelled if state.calls_tools => ("tool_calls", None),
            Finish::End | Finish::Cancelled => ("stop", None),
        };
        let counts = finished.counts;
        let (first, decode) = (finished.first_token.as_secs_f64(), finished.decode.as_secs_f64());
        Some((reason, stop, counts.prompt, counts.cached, counts.answer, counts.reasoning, first, decode))
    }
}

impl Drop for StreamCore {
    /// Ends the generation, but not in a fork, as for `close`. No event loop waits: one that did would have kept the stream.
    fn drop(&mut self) {
        if self.process.is_here() {
            drop(self.queue.close());
        }
    }
}
