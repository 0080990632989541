//! A batcher on a thread of its own: requests come from any thread, and each gets its answer as a stream.

use std::collections::{HashMap, HashSet};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::batcher::{Batcher, BatcherState};
use super::refill::Refill;
use super::request::{Event, Request, RequestId};
use crate::{Error, Model, Result};

/// Answers requests of any thread with one [`Batcher`].
///
/// ```no_run
/// use quadriga_llm::serving::{Event, Request, Service};
/// # fn example(batcher: quadriga_llm::serving::Batcher) -> Result<(), quadriga_llm::Error> {
/// let service = Service::start(batcher)?;
/// let prompt = service.model().tokenizer()?.encode_prompt("The capital of France is", true);
/// for event in service.submit(Request { max_tokens: Some(8), ..Request::new(prompt) })? {
///     if let Event::Token { piece, .. } = event {
///         print!("{}", piece.text);
///     }
/// }
/// # Ok(())
/// # }
/// ```
pub struct Service {
    model: Model,
    commands: Sender<Command>,
    state: Arc<Mutex<BatcherState>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Takes the events of a request as they happen, on the service's thread: it must neither wait nor panic. It returns whether
/// somebody still wants them; if not, the request is cancelled.
pub type EventSink = Box<dyn FnMut(Event) -> bool + Send>;

/// What the thread is told.
enum Command {
    Submit {
        /// The answers to each prompt.
        prompts: Vec<Vec<(Request, EventSink)>>,
        accepted: Box<dyn FnOnce(Result<Vec<RequestId>>) -> bool + Send>,
    },
    Cancel(RequestId),
    /// Ends all requests with an error.
    FailAll,
    /// Runs a function between two steps.
    With(Box<dyn FnOnce(&mut Batcher) + Send>),
    /// Ends what is left to do, and the thread.
    Stop,
}

/// The answer to a request: its events as they happen. Dropping it cancels the request.
pub struct Response {
    id: RequestId,
    events: Receiver<Event>,
    commands: Sender<Command>,
    ended: bool,
}

impl Service {
    /// Starts the thread.
    pub fn start(batcher: Batcher) -> Result<Service> {
        let model = batcher.model().clone();
        let (commands, inbox) = channel();
        let state = Arc::new(Mutex::new(batcher.state()));
        let shared = Arc::clone(&state);
        let run = move || {
            let refill = Refill::default();
            Worker { batcher, streams: HashMap::new(), state: shared, refill, next_sign: None }.run(&inbox);
        };
        let thread = std::thread::Builder::new().name("quadriga-steps".to_owned()).spawn(run);
        let thread = thread.map_err(|error| Error::Thread { reason: error.to_string() })?;
        Ok(Service { model, commands, state, thread: Mutex::new(Some(thread)) })
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// What it was doing after the latest step, submission or end of a request.
    pub fn state(&self) -> BatcherState {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Submits a request. See [`Batcher::submit`].
    pub fn submit(&self, request: Request) -> Result<Response> {
        let (events, stream) = channel();
        let (reply, answer) = channel();
        let sink: EventSink = Box::new(move |event| events.send(event).is_ok());
        self.submit_to(vec![(request, sink)], move |accepted| reply.send(accepted).is_ok())?;
        let ids = answer.recv().map_err(|_| Error::ServiceStopped)??;
        let id = *ids.first().ok_or(Error::ServiceStopped)?;
        Ok(Response { id, events: stream, commands: self.commands.clone(), ended: false })
    }

    /// Submits requests whose events go to functions, and does not wait: for callers that must not block. Several requests are
    /// answers to one prompt, as of [`Batcher::submit_choices`]. `accepted` gets their numbers before the first event, or the
    /// reason why they were refused; it returns whether somebody wants the answers. Both run on the service's thread: they must
    /// neither wait nor panic.
    ///
    /// # Errors
    /// The service has stopped.
    pub fn submit_to(
        &self,
        requests: Vec<(Request, EventSink)>,
        accepted: impl FnOnce(Result<Vec<RequestId>>) -> bool + Send + 'static,
    ) -> Result<()> {
        self.submit_prompts_to(vec![requests], accepted)
    }

    /// The same for several prompts, each with its answers: all of them are accepted between the same two steps, or none is.
    /// `accepted` gets the numbers in the order of prompts and their answers.
    ///
    /// # Errors
    /// The service has stopped.
    pub fn submit_prompts_to(
        &self,
        prompts: Vec<Vec<(Request, EventSink)>>,
        accepted: impl FnOnce(Result<Vec<RequestId>>) -> bool + Send + 'static,
    ) -> Result<()> {
        let command = Command::Submit { prompts, accepted: Box::new(accepted) };
        self.commands.send(command).map_err(|_| Error::ServiceStopped)
    }

    /// Saves the KV cache of a prefix, as [`Batcher::save_prefix`] does.
    pub fn save_prefix(&self, tokens: Vec<u32>) -> Result<Vec<u8>> {
        self.with(move |batcher| batcher.save_prefix(&tokens))?
    }

    /// Brings back a saved prefix, as [`Batcher::restore_prefix`] does.
    pub fn restore_prefix(&self, saved: Vec<u8>) -> Result<usize> {
        self.with(move |batcher| batcher.restore_prefix(&saved))?
    }

    /// Forgets all prefixes that no running request uses, as [`Batcher::clear_prefixes`] does.
    pub fn clear_prefixes(&self) -> Result<()> {
        self.with(Batcher::clear_prefixes)
    }

    /// Gives memory back that many requests at once needed, as [`Batcher::release_memory`] does; `false` if requests are being
    /// answered.
    pub fn release_memory(&self) -> Result<bool> {
        self.with(Batcher::release_memory)?
    }

    /// Runs a function between two steps, and waits for it.
    fn with<T: Send + 'static>(&self, work: impl FnOnce(&mut Batcher) -> T + Send + 'static) -> Result<T> {
        let (reply, result) = channel();
        let work = move |batcher: &mut Batcher| {
            // Nobody waits any more if this fails.
            let _ = reply.send(work(batcher));
        };
        self.commands.send(Command::With(Box::new(work))).map_err(|_| Error::ServiceStopped)?;
        result.recv().map_err(|_| Error::ServiceStopped)
    }

    /// Ends all requests: each gets [`Event::Failed`] with [`Error::ServiceStopped`]. Those that come later are answered.
    pub fn fail_all(&self) {
        // If the thread has ended, so have they.
        let _ = self.commands.send(Command::FailAll);
    }

    /// Ends a request, as [`Batcher::cancel`] does. No event follows, except those of the step that is being computed.
    pub fn cancel(&self, id: RequestId) {
        // If the thread has ended, so has the request.
        let _ = self.commands.send(Command::Cancel(id));
    }
}

impl Service {
    /// Ends the service as dropping it does, while there may be references to it: its memory is free then, and requests that come later
    /// are refused.
    pub fn end(&self) {
        // If the thread has ended, there is nothing to tell it.
        let _ = self.commands.send(Command::Stop);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

impl Drop for Service {
    /// Cancels what is left, writes prefixes to the [cache file](super::BatcherOptions::cache_file), and waits for the thread.
    fn drop(&mut self) {
        self.end();
    }
}

impl Response {
    /// The number of the request.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// The next event, if there is one already.
    pub fn try_next(&mut self) -> Option<Event> {
        if self.ended {
            return None;
        }
        match self.events.try_recv() {
            Ok(event) => Some(self.noted(event)),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => self.stopped(),
        }
    }

    fn noted(&mut self, event: Event) -> Event {
        self.ended = matches!(event, Event::Finished(_) | Event::Failed(_));
        event
    }

    fn stopped(&mut self) -> Option<Event> {
        self.ended = true;
        Some(Event::Failed(Arc::new(Error::ServiceStopped)))
    }
}

impl Iterator for Response {
    type Item = Event;

    /// Waits for the next event; `None` after [`Event::Finished`] or [`Event::Failed`].
    fn next(&mut self) -> Option<Event> {
        if self.ended {
            return None;
        }
        match self.events.recv() {
            Ok(event) => Some(self.noted(event)),
            Err(_) => self.stopped(),
        }
    }
}

impl Drop for Response {
    fn drop(&mut self) {
        if !self.ended {
            // If the thread has ended, so has the request.
            let _ = self.commands.send(Command::Cancel(self.id));
        }
    }
}

/// The thread's own part.
struct Worker {
    batcher: Batcher,
    streams: HashMap<RequestId, EventSink>,
    state: Arc<Mutex<BatcherState>>,
    refill: Refill,
    /// When other ranks are told again that this thread goes on.
    next_sign: Option<Instant>,
}

/// The most commands between two steps: a flood of requests does not stop those that are being answered.
const COMMANDS_OF_STEP: usize = 64;

/// Whether an event is the last one of its request.
fn is_last(event: &Event) -> bool {
    matches!(event, Event::Finished(_) | Event::Failed(_))
}

/// Puts the events of requests that ended before those of the others: a client that asks again as soon as it has its answer should not
/// have to wait until the others have taken their tokens, while the next step waits for it. Returns how many ended.
fn put_ended_first(events: &mut [(RequestId, Event)]) -> usize {
    let ended = events.iter().filter(|(_, event)| is_last(event)).map(|(id, _)| *id);
    let ended: HashSet<RequestId> = ended.collect();
    if !ended.is_empty() {
        // Events of one request keep their order.
        events.sort_by_key(|(id, _)| !ended.contains(id));
    }
    ended.len()
}

impl Worker {
    fn run(mut self, inbox: &Receiver<Command>) {
        let mut handled = 0;
        loop {
            let sign = self.give_sign();
            // Waits when there is nothing to compute, and a little for requests that follow others.
            let command = match self.batcher.is_busy() {
                true if handled < COMMANDS_OF_STEP => self.next_command(inbox),
                true => Err(TryRecvError::Empty),
                false => match sign.map(|wait| inbox.recv_timeout(wait)) {
                    None => inbox.recv().map_err(|_| TryRecvError::Disconnected),
                    Some(Err(RecvTimeoutError::Timeout)) => continue,
                    Some(command) => command.map_err(|_| TryRecvError::Disconnected),
                },
            };
            match command {
                Ok(Command::Stop) | Err(TryRecvError::Disconnected) => return self.stop(),
                Ok(command) => {
                    self.handle(command);
                    handled += 1;
                    continue;
                }
                Err(TryRecvError::Empty) => {}
            }
            handled = 0;
            let started = Instant::now();
            let mut events = self.batcher.step();
            let ended = put_ended_first(&mut events);
            // Where others wait already, they take the places.
            let free = ended.saturating_sub(self.note_state());
            let took = started.elapsed();
            for (id, event) in events {
                self.report(id, event);
            }
            self.refill.note_step(free, took, Instant::now());
        }
    }

    /// Tells other ranks now and then that this thread goes on, also where it has nothing to compute; the time until it does so again.
    fn give_sign(&mut self) -> Option<Duration> {
        let interval = self.batcher.command_interval()?;
        let now = Instant::now();
        let next = match self.next_sign {
            Some(next) if next > now => next,
            _ => {
                // Ranks that cannot be told fail the next step, too.
                drop(self.batcher.tell_regular(true));
                now + interval
            }
        };
        self.next_sign = Some(next);
        Some(next - now)
    }

    /// Ends what is left to do, and writes prefixes to the cache file, if there is one.
    fn stop(mut self) {
        if self.next_sign.is_some() {
            // The file may take any time.
            drop(self.batcher.tell_regular(false));
        }
        self.batcher.cancel_all();
        self.batcher.save_prefixes();
        self.note_state();
    }

    /// The next command before a step, if there is one or comes soon.
    fn next_command(&mut self, inbox: &Receiver<Command>) -> std::result::Result<Command, TryRecvError> {
        match inbox.try_recv() {
            Err(TryRecvError::Empty) => {}
            command => return command,
        }
        let Some(wait) = self.refill.wait(Instant::now()) else { return Err(TryRecvError::Empty) };
        inbox.recv_timeout(wait).map_err(|error| match error {
            RecvTimeoutError::Timeout => TryRecvError::Empty,
            RecvTimeoutError::Disconnected => TryRecvError::Disconnected,
        })
    }

    fn handle(&mut self, command: Command) {
        match command {
            Command::Submit { prompts, accepted } => {
                self.refill.note_submitted(prompts.iter().map(Vec::len).sum());
                // Sinks of refused requests live until that was said.
                let mut unused = Vec::new();
                let submitted = self.submit(prompts, &mut unused);
                let ids = submitted.as_ref().map_or_else(|_| Vec::new(), Clone::clone);
                if !accepted(submitted) {
                    ids.into_iter().for_each(|id| self.cancel(id));
                }
            }
            Command::Cancel(id) => self.cancel(id),
            Command::FailAll => {
                let error = Arc::new(Error::ServiceStopped);
                for (id, mut sink) in std::mem::take(&mut self.streams) {
                    self.batcher.cancel(id);
                    sink(Event::Failed(Arc::clone(&error)));
                }
            }
            Command::With(work) => work(&mut self.batcher),
            Command::Stop => {}
        }
        self.note_state();
    }

    /// Submits the answers of all prompts, or of none; `unused` gets the sinks of those that were refused.
    fn submit(
        &mut self,
        prompts: Vec<Vec<(Request, EventSink)>>,
        unused: &mut Vec<EventSink>,
    ) -> Result<Vec<RequestId>> {
        let mut submitted = Ok(Vec::new());
        for prompt in prompts {
            let (requests, sinks): (Vec<Request>, Vec<EventSink>) = prompt.into_iter().unzip();
            let Ok(ids) = &mut submitted else {
                unused.extend(sinks);
                continue;
            };
            match self.batcher.submit_choices(requests) {
                Ok(new) => {
                    self.streams.extend(new.iter().copied().zip(sinks));
                    ids.extend(new);
                }
                Err(error) => {
                    for id in std::mem::take(ids) {
                        self.batcher.cancel(id);
                        unused.extend(self.streams.remove(&id));
                    }
                    unused.extend(sinks);
                    submitted = Err(error);
                }
            }
        }
        submitted
    }

    /// Ends a request. Its sink is dropped last: whoever notices that finds a state without the request.
    fn cancel(&mut self, id: RequestId) {
        self.batcher.cancel(id);
        self.note_state();
        self.streams.remove(&id);
    }

    fn report(&mut self, id: RequestId, event: Event) {
        let ended = is_last(&event);
        let gone = self.streams.get_mut(&id).is_none_or(|sink| !sink(event));
        if ended {
            self.streams.remove(&id);
        } else if gone {
            // Nobody listens any more.
            self.cancel(id);
        }
    }

    /// Publishes the batcher's state; the number of requests that wait.
    fn note_state(&self) -> usize {
        let state = self.batcher.state();
        let waiting = state.waiting;
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
        waiting
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_that_ended_come_first_and_keep_their_order() {
        let event = |cached| Event::Progress { cached, computed: 9, prefill: Duration::ZERO };
        let progress = |of: u64, cached| (RequestId::after(of - 1), event(cached));
        let failed = |of: u64| (RequestId::after(of - 1), Event::Failed(Arc::new(Error::ServiceStopped)));
        let name = |(id, event): &(RequestId, Event)| match event {
            Event::Progress { cached, .. } => format!("{}.{cached}", id.0),
            _ => format!("{} ended", id.0),
        };
        let mut events = vec![
            progress(1, 0),
            progress(2, 0),
            progress(3, 0),
            progress(2, 1),
            failed(2),
            failed(4),
            progress(1, 1),
        ];
        assert_eq!(put_ended_first(&mut events), 2);
        let names: Vec<String> = events.iter().map(name).collect();
        assert_eq!(names, ["2.0", "2.1", "2 ended", "4 ended", "1.0", "3.0", "1.1"]);
        assert_eq!(put_ended_first(&mut []), 0);
    }
}
