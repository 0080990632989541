//! A compiled split and how it runs: one wake-up of the pool, a barrier between steps.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use quadriga_graph::NodeId;
use quadriga_runtime::{BackendError, Buffer, Program, StepTime};

use crate::NAME;
use crate::buffer::HostBuffer;
use crate::memory::HostBlock;
use crate::ops::{DetachedExchange, WorkBytes};
use crate::pool::{Stopped, is_inside_job};
use crate::profile::StepTimer;
use crate::state::BackendInner;
use crate::step::{KernelStep, StepFailure, WorkMemory};

/// A buffer that a program uses.
pub(crate) struct BufferUse {
    pub(crate) buffer: Arc<dyn Buffer>,
    pub(crate) write: bool,
}

impl BufferUse {
    fn host(&self) -> Option<&HostBuffer> {
        self.buffer.as_any().downcast_ref()
    }
}

/// Prepared steps, and the buffers they use.
pub(crate) struct CpuProgram {
    /// The collective before all steps, if the split starts with one.
    pub(crate) detached: Option<DetachedExchange>,
    pub(crate) steps: Vec<KernelStep>,
    /// In the order of addresses, each once: the order in which they are locked.
    pub(crate) uses: Vec<BufferUse>,
    /// Names of the nodes, for messages.
    pub(crate) names: Vec<String>,
    /// The nodes, in the order of `names`.
    pub(crate) nodes: Vec<NodeId>,
    /// The label of each step, if profiling is on.
    pub(crate) labels: Vec<String>,
    /// Bytes of work memory for a number of threads.
    pub(crate) work_bytes: WorkBytes,
    /// Bytes of memory that the program owns and its steps point to.
    pub(crate) own_bytes: usize,
    /// Of the latest timed run: when each step began, and when the last one ended.
    pub(crate) marks: Vec<Instant>,
}

/// Holds the locks of a program's buffers.
struct BufferGuards<'a>(&'a [BufferUse]);

impl<'a> BufferGuards<'a> {
    fn new(uses: &'a [BufferUse]) -> BufferGuards<'a> {
        for used in uses {
            if let Some(buffer) = used.host() {
                buffer.begin(used.write);
            }
        }
        BufferGuards(uses)
    }
}

impl Drop for BufferGuards<'_> {
    fn drop(&mut self) {
        for used in self.0 {
            if let Some(buffer) = used.host() {
                buffer.end(used.write);
            }
        }
    }
}

impl CpuProgram {
    fn needs(&self, threads: usize) -> Result<usize, BackendError> {
        (self.work_bytes)(threads).map_err(|error| BackendError::Failed {
            backend: NAME.into(),
            what: "laying out work memory",
            reason: error.to_string(),
        })
    }

    /// Makes the work memory large enough, so that a run allocates nothing. Inside a job of a pool, the first run does it.
    pub(crate) fn reserve(&mut self, inner: &BackendInner) -> Result<(), BackendError> {
        let needed = self.needs(inner.pool.threads())?;
        if is_inside_job() {
            return Ok(());
        }
        inner.grow(&mut inner.work_memory(), needed)
    }

    /// Runs all steps; records their times if `timed`.
    pub(crate) fn run(&mut self, inner: &BackendInner, timed: bool) -> Result<(), BackendError> {
        // Only the first thread locks it.
        let mut marks = std::mem::take(&mut self.marks);
        marks.clear();
        if timed && self.detached.is_some() {
            marks.push(Instant::now());
        }
        let exchanged = self.run_detached();
        let marks = timed.then(|| Mutex::new(marks));
        let ran = exchanged.and_then(|()| match self.steps.is_empty() {
            true => Ok(()),
            false => self.run_steps(inner, marks.as_ref()),
        });
        if let Some(marks) = marks {
            self.marks = marks.into_inner().unwrap_or_else(PoisonError::into_inner);
            self.marks.push(Instant::now());
        }
        ran
    }

    /// Runs the collective before all steps. No buffer is held while it waits for other ranks.
    fn run_detached(&mut self) -> Result<(), BackendError> {
        let CpuProgram { detached: Some(exchange), uses, names, .. } = self else { return Ok(()) };
        {
            let _held = BufferGuards::new(uses);
            exchange.take();
        }
        let done = exchange.run().and_then(|()| {
            let _held = BufferGuards::new(uses);
            exchange.put()
        });
        let name = exchange.name;
        done.map_err(|reason| BackendError::Node {
            backend: NAME.into(),
            node: names.get(name).cloned().unwrap_or_default(),
            reason,
        })
    }

    fn run_steps(
        &self,
        inner: &BackendInner,
        marks: Option<&Mutex<Vec<Instant>>>,
    ) -> Result<(), BackendError> {
        let _held = BufferGuards::new(&self.uses);
        if is_inside_job() {
            // A custom operation of another run started this one, which has one thread and work memory of its own.
            let memory = HostBlock::zeroed(self.needs(1)?)?;
            return self.run_with(inner, marks, WorkMemory::new(&memory, 1));
        }
        // Locked to the end: no other program uses the work memory, and the number of threads stays the same.
        let mut memory = inner.work_memory();
        let threads = inner.pool.threads();
        inner.grow(&mut memory, self.needs(threads)?)?;
        self.run_with(inner, marks, WorkMemory::new(&memory, threads))
    }

    /// Runs all steps with this work memory, which no other run uses.
    fn run_with(
        &self,
        inner: &BackendInner,
        marks: Option<&Mutex<Vec<Instant>>>,
        work: WorkMemory,
    ) -> Result<(), BackendError> {
        let (steps, labels) = (&self.steps, &self.labels);
        let result = inner.pool.run::<StepFailure>(&|worker| {
            let recorder = inner.recorder.as_ref().filter(|_| worker.index() == 0);
            let mut clock = recorder.map(|recorder| StepTimer::new(recorder, labels));
            for (i, step) in steps.iter().enumerate() {
                if i > 0 {
                    worker.barrier()?;
                }
                if let Some(clock) = &mut clock {
                    clock.begin(i);
                }
                if let Some(marks) = marks.filter(|_| worker.index() == 0) {
                    marks.lock().unwrap_or_else(PoisonError::into_inner).push(Instant::now());
                }
                step.run(worker, work)?;
                if let Some(next) = steps.get(i + 1) {
                    next.prefetch(worker);
                }
            }
            if inner.recorder.is_some() {
                worker.barrier()?;
            }
            Ok(())
        });
        if result.is_err() {
            steps.iter().for_each(KernelStep::reset);
        }
        result.map_err(|failure| match failure {
            StepFailure::Data { name, reason } => BackendError::Node {
                backend: NAME.into(),
                node: self.names.get(name).cloned().unwrap_or_default(),
                reason,
            },
            StepFailure::Stopped(stopped) => BackendError::Failed {
                backend: NAME.into(),
                what: "a run",
                reason: match stopped {
                    Stopped::Panicked(text) => text,
                    other => other.to_string(),
                },
            },
        })
    }
}

impl Program for CpuProgram {
    fn scratch_bytes(&self) -> usize {
        let steps: usize = self.steps.iter().map(KernelStep::bytes).sum();
        let names: usize = self.names.iter().map(|name| size_of::<String>() + name.len()).sum();
        // A step that needs work memory has a function for its size.
        let needs = self.steps.len() * size_of::<[usize; 8]>();
        self.own_bytes + steps + names + needs + size_of_val(&*self.uses) + size_of_val(&*self.nodes)
    }

    fn step_times(&self) -> Vec<StepTime> {
        let Some(first) = self.marks.first() else { return Vec::new() };
        // A matmul's activations may be prepared in an earlier step: the node belongs to the step that completes it.
        let mut last = vec![0; self.nodes.len()];
        for (number, step) in self.steps.iter().enumerate() {
            for name in step.names() {
                last.iter_mut().skip(name).take(1).for_each(|last| *last = number);
            }
        }
        let detached = usize::from(self.detached.is_some());
        let spans = self.marks.iter().zip(self.marks.iter().skip(1));
        let exchange = spans.clone().take(detached).map(|(begin, end)| StepTime {
            nodes: self.nodes.iter().take(1).copied().collect(),
            start: 0.0,
            seconds: end.saturating_duration_since(*begin).as_secs_f64(),
        });
        let time = |((number, step), (begin, end)): ((usize, &KernelStep), (&Instant, &Instant))| {
            let ended = step.names().into_iter().filter(|name| last.get(*name) == Some(&number));
            StepTime {
                nodes: ended.filter_map(|name| self.nodes.get(name).copied()).collect(),
                start: begin.saturating_duration_since(*first).as_secs_f64(),
                seconds: end.saturating_duration_since(*begin).as_secs_f64(),
            }
        };
        exchange.chain(self.steps.iter().enumerate().zip(spans.skip(detached)).map(time)).collect()
    }

    fn as_any(&mut self) -> &mut dyn Any {
        self
    }
}
