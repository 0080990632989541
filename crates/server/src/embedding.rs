//! Embeddings and rankings of an encoder, computed one after another on a thread of their own.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use quadriga_llm::Embedder;
use tokio::sync::oneshot;

use crate::error::{ApiError, ErrorKind};
use crate::operation::caller::CallerUse;

/// The most requests that wait.
const MAX_WAITING: usize = 256;

/// Makes the embedder, when the first request comes.
pub type EmbedderLoader = Box<dyn FnOnce() -> Result<Embedder, quadriga_llm::Error> + Send>;

/// What is computed of texts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EmbeddingTask {
    /// A vector for each text.
    Embed,
    /// How well a document answers a query, for each pair of them.
    Rank,
}

struct Job {
    task: EmbeddingTask,
    texts: Vec<Vec<u32>>,
    /// Whoever asked, until it is computed.
    usage: CallerUse,
    reply: oneshot::Sender<Result<Vec<Vec<f32>>, ApiError>>,
}

/// Computes embeddings for requests of any thread.
pub(crate) struct EmbeddingService {
    state: Mutex<State>,
    waiting: Arc<AtomicUsize>,
}

enum State {
    /// No request has come yet.
    Unused(EmbedderLoader),
    Running {
        jobs: Sender<Job>,
        thread: JoinHandle<()>,
    },
    Stopped,
}

impl EmbeddingService {
    pub(crate) fn new(loader: EmbedderLoader) -> EmbeddingService {
        EmbeddingService { state: Mutex::new(State::Unused(loader)), waiting: Arc::default() }
    }

    /// Computes the vectors of tokenized texts.
    pub(crate) async fn compute(
        &self,
        task: EmbeddingTask,
        texts: Vec<Vec<u32>>,
        usage: CallerUse,
    ) -> Result<Vec<Vec<f32>>, ApiError> {
        let stopped = || ApiError::new(ErrorKind::Unavailable, "embeddings cannot be computed any more");
        if self.waiting.load(Ordering::Relaxed) >= MAX_WAITING {
            let message =
                format!("{MAX_WAITING} requests for embeddings are waiting already; try again later");
            return Err(
                ApiError::new(ErrorKind::TooMany, message).retry_after(std::time::Duration::from_secs(1))
            );
        }
        let (reply, answer) = oneshot::channel();
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let sent = self.jobs().and_then(|jobs| jobs.send(Job { task, texts, usage, reply }).ok());
        if sent.is_none() {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            return Err(stopped());
        }
        answer.await.map_err(|_| stopped())?
    }

    /// Where jobs go. The first one starts the thread.
    fn jobs(&self) -> Option<Sender<Job>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *state, State::Stopped) {
            State::Unused(loader) => {
                let (jobs, inbox) = channel();
                let waiting = Arc::clone(&self.waiting);
                let run = move || run(loader, &inbox, &waiting);
                let thread = std::thread::Builder::new().name("quadriga-embed".to_owned()).spawn(run).ok()?;
                *state = State::Running { jobs: jobs.clone(), thread };
                Some(jobs)
            }
            State::Running { jobs, thread } => {
                *state = State::Running { jobs: jobs.clone(), thread };
                Some(jobs)
            }
            State::Stopped => None,
        }
    }
}

impl Drop for EmbeddingService {
    /// Waits for the thread.
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let State::Running { jobs, thread } = std::mem::replace(state, State::Stopped) {
            drop(jobs);
            let _ = thread.join();
        }
    }
}

fn run(loader: EmbedderLoader, inbox: &Receiver<Job>, waiting: &AtomicUsize) {
    let mut embedder = loader().map_err(ApiError::from);
    for job in inbox {
        waiting.fetch_sub(1, Ordering::Relaxed);
        // Its client went away.
        if job.reply.is_closed() {
            continue;
        }
        let vectors = match &mut embedder {
            Ok(embedder) => {
                // Texts that fail cost as much, and so do those for which nobody waits any more.
                job.usage.charge(job.texts.iter().map(Vec::len).sum());
                compute(embedder, job.task, &job.texts)
            }
            Err(error) => Err(error.clone()),
        };
        let _ = job.reply.send(vectors);
    }
}

fn compute(
    embedder: &mut Embedder,
    task: EmbeddingTask,
    texts: &[Vec<u32>],
) -> Result<Vec<Vec<f32>>, ApiError> {
    Ok(match task {
        EmbeddingTask::Embed => embedder.embed_batch(texts)?,
        EmbeddingTask::Rank => embedder.rank_batch(texts)?.into_iter().map(|score| vec![score]).collect(),
    })
}
