//! Embeddings and rankings of an encoder, computed batch by batch on a thread of their own.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use quadriga_llm::Embedder;
use tokio::sync::oneshot;

use crate::error::{ApiError, ErrorKind};
use crate::operation::caller::CallerUse;

/// The embeddings of texts, or why there are none.
type Embedded = Result<Vec<Vec<f32>>, ApiError>;

/// The most requests that wait.
const MAX_WAITING: usize = 256;

/// Makes the embedder, when the first request comes.
pub type EmbedderLoader = Box<dyn FnOnce() -> Result<Embedder, quadriga_llm::Error> + Send>;

/// What is computed of texts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EmbeddingTask {
    /// A vector for each text, of length 1.
    Embed,
    /// A vector for each text, as long as it is.
    EmbedUnscaled,
    /// How well a document answers a query, for each pair of them.
    Rank,
}

struct Job {
    task: EmbeddingTask,
    texts: Vec<Vec<u32>>,
    /// Whoever asked, until it is computed.
    usage: CallerUse,
    reply: oneshot::Sender<Embedded>,
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
    ) -> Embedded {
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
    serve(inbox, waiting, &mut |job, texts| match &mut embedder {
        Ok(embedder) => {
            let batch = texts.get(..embedder.first_batch(texts)).unwrap_or(texts);
            // Texts that fail cost as much, and so do those for which nobody waits any more.
            job.usage.charge(batch.iter().map(Vec::len).sum());
            compute(embedder, job.task, batch)
        }
        Err(error) => Err(error.clone()),
    });
}

/// Computes jobs in turn, a batch of one after a batch of another, so that a short job waits for one batch of a long one.
/// `compute` gives the vectors of the first of the texts that it is given, of as many as it computes together.
fn serve(
    inbox: &Receiver<Job>,
    waiting: &AtomicUsize,
    compute: &mut dyn FnMut(&Job, &[Vec<u32>]) -> Embedded,
) {
    // Jobs with the vectors that are there.
    let mut begun: VecDeque<(Job, Vec<Vec<f32>>)> = VecDeque::new();
    loop {
        let next = begun.pop_front().or_else(|| Some((inbox.recv().ok()?, Vec::new())));
        // Without any, all senders are gone.
        let Some((job, mut vectors)) = next else { return };
        if vectors.is_empty() {
            waiting.fetch_sub(1, Ordering::Relaxed);
        }
        // Its client went away.
        if job.reply.is_closed() {
            continue;
        }
        let rest = job.texts.get(vectors.len()..).unwrap_or_default();
        let computed = compute(&job, rest);
        // Those that came meanwhile are before what is left of this one.
        begun.extend(inbox.try_iter().map(|job| (job, Vec::new())));
        match computed {
            Ok(part) if !part.is_empty() && vectors.len() + part.len() < job.texts.len() => {
                vectors.extend(part);
                begun.push_back((job, vectors));
            }
            Ok(part) => {
                vectors.extend(part);
                let _ = job.reply.send(Ok(vectors));
            }
            Err(error) => drop(job.reply.send(Err(error))),
        }
    }
}

fn compute(embedder: &mut Embedder, task: EmbeddingTask, texts: &[Vec<u32>]) -> Embedded {
    Ok(match task {
        EmbeddingTask::Embed => embedder.embed_batch(texts)?,
        EmbeddingTask::EmbedUnscaled => embedder.embed_batch_with(texts, false)?,
        EmbeddingTask::Rank => embedder.rank_batch(texts)?.into_iter().map(|score| vec![score]).collect(),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use super::*;
    use crate::operation::caller::Caller;

    fn job(texts: &[u32]) -> (Job, oneshot::Receiver<Embedded>) {
        let (reply, answer) = oneshot::channel();
        let texts = texts.iter().map(|token| vec![*token]).collect();
        let usage = Caller::default().enter().unwrap();
        (Job { task: EmbeddingTask::Embed, texts, usage, reply }, answer)
    }

    /// Computes one text at a time. `meanwhile` is called with the number of texts before.
    fn computed(first: Job, mut meanwhile: impl FnMut(usize, &Sender<Job>)) -> Vec<u32> {
        let (jobs, inbox) = channel();
        jobs.send(first).unwrap();
        let (mut order, mut jobs) = (Vec::new(), Some(jobs));
        serve(&inbox, &AtomicUsize::new(9), &mut |_, texts| {
            if let Some(jobs) = &jobs {
                meanwhile(order.len(), jobs);
            }
            if order.len() == 1 {
                jobs = None;
            }
            order.push(texts[0][0]);
            Ok(vec![vec![texts[0][0] as f32]])
        });
        order
    }

    #[test]
    fn a_short_job_waits_for_one_batch_of_a_long_one() {
        let ((long, mut answer), (short, mut other)) = (job(&[1, 2, 3, 4]), job(&[9]));
        let mut short = Some(short);
        let order = computed(long, |before, jobs| {
            if before == 0 {
                jobs.send(short.take().unwrap()).unwrap();
            }
        });
        assert_eq!(order, [1, 9, 2, 3, 4]);
        assert_eq!(other.try_recv().unwrap().unwrap(), [[9.0]]);
        assert_eq!(answer.try_recv().unwrap().unwrap(), [[1.0], [2.0], [3.0], [4.0]]);
    }

    #[test]
    fn what_nobody_waits_for_is_not_computed_to_its_end() {
        let (long, answer) = job(&[1, 2, 3, 4]);
        let mut answer = Some(answer);
        let order = computed(long, |before, _| {
            if before == 1 {
                drop(answer.take());
            }
        });
        assert_eq!(order, [1, 2]);
    }
}
