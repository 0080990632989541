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

/// The most requests that have not ended.
const MAX_JOBS: usize = 256;

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

/// One of the jobs that have not ended, until it is dropped.
struct JobPlace(Arc<AtomicUsize>);

impl JobPlace {
    /// `None` if there are too many.
    fn take(jobs: &Arc<AtomicUsize>) -> Option<JobPlace> {
        let more = |count: usize| (count < MAX_JOBS).then_some(count + 1);
        jobs.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).ok()?;
        Some(JobPlace(Arc::clone(jobs)))
    }
}

impl Drop for JobPlace {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

struct Job {
    place: JobPlace,
    task: EmbeddingTask,
    texts: Vec<Vec<u32>>,
    /// Whoever asked, until it is computed.
    usage: CallerUse,
    reply: oneshot::Sender<Embedded>,
}

impl Job {
    fn reply_with(self, embedded: Embedded) {
        let Job { place, reply, .. } = self;
        // Whoever hears of it may come with the next one.
        drop(place);
        let _ = reply.send(embedded);
    }
}

/// Computes embeddings for requests of any thread.
pub(crate) struct EmbeddingService {
    state: Mutex<State>,
    /// Jobs that have not ended.
    count: Arc<AtomicUsize>,
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
        EmbeddingService { state: Mutex::new(State::Unused(loader)), count: Arc::default() }
    }

    /// Computes the vectors of tokenized texts.
    pub(crate) async fn compute(
        &self,
        task: EmbeddingTask,
        texts: Vec<Vec<u32>>,
        usage: CallerUse,
    ) -> Embedded {
        let stopped = || ApiError::new(ErrorKind::Unavailable, "embeddings cannot be computed any more");
        let too_many = || {
            let message = format!("{MAX_JOBS} requests for embeddings are waiting already; try again later");
            ApiError::new(ErrorKind::TooMany, message).retry_after(std::time::Duration::from_secs(1))
        };
        let place = JobPlace::take(&self.count).ok_or_else(too_many)?;
        let (reply, answer) = oneshot::channel();
        let job = Job { place, task, texts, usage, reply };
        self.jobs().and_then(|jobs| jobs.send(job).ok()).ok_or_else(stopped)?;
        answer.await.map_err(|_| stopped())?
    }

    /// Where jobs go. The first one starts the thread.
    fn jobs(&self) -> Option<Sender<Job>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *state, State::Stopped) {
            State::Unused(loader) => {
                let (jobs, inbox) = channel();
                let run = move || run(loader, &inbox);
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

impl EmbeddingService {
    /// Refuses further jobs, and waits until the thread has ended.
    pub(crate) fn end(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let State::Running { jobs, thread } = std::mem::replace(&mut *state, State::Stopped) {
            drop((state, jobs));
            let _ = thread.join();
        }
    }
}

impl Drop for EmbeddingService {
    fn drop(&mut self) {
        self.end();
    }
}

fn run(loader: EmbedderLoader, inbox: &Receiver<Job>) {
    let mut embedder = loader().map_err(ApiError::from);
    serve(inbox, &mut |job, texts| match &mut embedder {
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
fn serve(inbox: &Receiver<Job>, compute: &mut dyn FnMut(&Job, &[Vec<u32>]) -> Embedded) {
    // Jobs with the vectors that are there.
    let mut begun: VecDeque<(Job, Vec<Vec<f32>>)> = VecDeque::new();
    loop {
        let next = begun.pop_front().or_else(|| Some((inbox.recv().ok()?, Vec::new())));
        // Without any, all senders are gone.
        let Some((job, mut vectors)) = next else { return };
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
                job.reply_with(Ok(vectors));
            }
            Err(error) => job.reply_with(Err(error)),
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
        let place = JobPlace::take(&Arc::default()).unwrap();
        (Job { place, task: EmbeddingTask::Embed, texts, usage, reply }, answer)
    }

    /// Computes one text at a time. `meanwhile` is called with the number of texts before.
    fn computed(first: Job, mut meanwhile: impl FnMut(usize, &Sender<Job>)) -> Vec<u32> {
        let (jobs, inbox) = channel();
        jobs.send(first).unwrap();
        let (mut order, mut jobs) = (Vec::new(), Some(jobs));
        serve(&inbox, &mut |_, texts| {
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

    /// Also those that were begun: each has vectors.
    #[test]
    fn jobs_that_were_begun_are_counted() {
        let count = Arc::new(AtomicUsize::new(0));
        let ((mut long, mut answer), (mut other, _nobody)) = (job(&[1, 2]), job(&[3]));
        (long.place, other.place) = (JobPlace::take(&count).unwrap(), JobPlace::take(&count).unwrap());
        let mut other = Some(other);
        let mut counts = Vec::new();
        computed(long, |before, jobs| {
            counts.push(count.load(Ordering::Acquire));
            if before == 0 {
                jobs.send(other.take().unwrap()).unwrap();
            }
        });
        assert_eq!(counts, [2, 2]);
        assert!(answer.try_recv().unwrap().is_ok());
        assert_eq!(count.load(Ordering::Acquire), 0);
        let all: Vec<JobPlace> = std::iter::from_fn(|| JobPlace::take(&count)).collect();
        assert_eq!(all.len(), MAX_JOBS);
    }
}
