//! Command queues: each executes its commands on its own thread, or immediately on a synchronous device.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use quadriga_graph::Tensor;
use quadriga_runtime::{
    BackendError, Event, Layout, Program, Queue, Region, SliceSelection, check_range, copy_plain_slice,
};

use crate::event::{EventInner, SimEvent};
use crate::faults::FaultPoint;
use crate::inner::DeviceInner;
use crate::memory::SimBuffer;
use crate::order::{QueueClock, host_joins};
use crate::program::{NodeBuffers, PACKED, ProgramSteps, SimProgram, get, put};
use crate::settings::Clock;
use crate::slices::{self, SliceCopy};

/// A command of a queue.
enum Command {
    Write(Region, Vec<u8>),
    Read(Region),
    Copy(Region, Region),
    /// Packs the bytes of one region into another of this device.
    Pack(Region, Region),
    /// Copies selected slices, or those that were selected last.
    CopySlices(SliceCopy),
    /// Runs a program, optionally timing its steps.
    Run(Arc<ProgramSteps>, bool),
    Record(Arc<EventInner>, u64),
    Wait(Arc<EventInner>, u64),
    Stop,
}

/// The commands of a queue and what its thread reports back.
#[derive(Default)]
struct QueueState {
    /// Each with the time of the host when it was enqueued.
    commands: VecDeque<(Command, f64)>,
    /// How many commands were enqueued, and how many are done.
    enqueued: u64,
    done: u64,
    /// The queue's time after what is done.
    seconds: f64,
    /// The first error since the last synchronization.
    error: Option<BackendError>,
    /// The result of the latest read.
    read: Vec<u8>,
    /// Buffers of completed writes, for reuse.
    spare: Vec<Vec<u8>>,
}

/// The state of a queue, shared with its thread.
#[derive(Default)]
struct CommandQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

impl CommandQueue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Executes commands and keeps the queue's clock.
struct QueueWorker {
    device: Arc<DeviceInner>,
    seconds: f64,
    buffers: NodeBuffers,
    bytes: Vec<u8>,
}

impl QueueWorker {
    /// The queue's time in seconds.
    fn now(&self) -> f64 {
        match self.device.settings.clock {
            Clock::Virtual | Clock::Real => self.seconds,
            Clock::Host => self.device.created.elapsed().as_secs_f64(),
        }
    }

    /// Advances the queue's clock; with a real clock, sleeps.
    fn spend(&mut self, seconds: f64) {
        self.seconds += seconds;
        if self.device.settings.clock == Clock::Real && seconds > 0.0 {
            std::thread::sleep(Duration::from_secs_f64(seconds));
        }
        self.device.advance_clock(self.seconds);
    }

    /// Accounts for a transfer, which may fail.
    fn transfer(&mut self, bytes: usize) -> Result<(), BackendError> {
        let settings = &self.device.settings;
        let seconds = settings.copy_seconds + settings.byte_seconds * bytes as f64;
        self.device.faults.check(&settings.name, FaultPoint::Transfer)?;
        self.spend(seconds);
        Ok(())
    }

    /// Executes a command; the result of a read goes to `read`.
    fn execute(&mut self, command: &Command, read: &mut Vec<u8>) -> Result<(), BackendError> {
        match command {
            Command::Write(to, bytes) => {
                self.transfer(bytes.len())?;
                put(to, bytes)
            }
            Command::Read(from) => {
                self.transfer(from.bytes)?;
                get(from, read)
            }
            Command::Copy(from, to) => {
                // Within the device's memory nothing goes over a link.
                let own = |region: &Region| {
                    !region.buffer.is_host()
                        && sim_buffer(region).is_some_and(|buffer| buffer.is_of(&self.device))
                };
                let over_link = if own(from) && own(to) { 0 } else { from.bytes };
                self.transfer(over_link)?;
                get(from, &mut self.bytes)?;
                put(to, &self.bytes)
            }
            Command::Pack(from, to) => {
                self.transfer(0)?;
                get(from, &mut self.bytes)?;
                self.bytes.iter_mut().for_each(|byte| *byte = !*byte);
                put(to, &self.bytes)
            }
            Command::CopySlices(slices) => {
                let bytes = slices.run(&mut self.bytes)?;
                self.transfer(bytes)
            }
            Command::Run(steps, timed) => {
                self.device.faults.check(&self.device.settings.name, FaultPoint::Run)?;
                self.spend(steps.seconds());
                steps.run(&mut self.buffers, *timed)
            }
            Command::Wait(event, recording) => {
                self.seconds = self.seconds.max(event.wait_for(*recording)?);
                Ok(())
            }
            Command::Record(..) | Command::Stop => Ok(()),
        }
    }

    /// The queue's thread: executes commands until it is stopped.
    fn run_commands(mut self, commands: &CommandQueue) {
        let mut read = Vec::new();
        loop {
            let ((command, enqueued), failed) = {
                let mut state = commands.lock();
                loop {
                    match state.commands.pop_front() {
                        Some(command) => break (command, state.error.clone()),
                        None => state = commands.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                    }
                }
            };
            if self.device.settings.timed_polls {
                self.seconds = self.seconds.max(enqueued);
            }
            let result = match (&command, &failed) {
                (Command::Stop, _) => return,
                (Command::Record(event, recording), _) => {
                    event.pass(*recording, self.now(), failed.clone());
                    Ok(())
                }
                // After an error commands are skipped until the error was reported.
                (_, Some(_)) => Ok(()),
                (command, None) => self.execute(command, &mut read),
            };
            let is_read = matches!(command, Command::Read(_));
            // The command's regions are released before it counts as done.
            let spare = match command {
                Command::Write(region, bytes) => {
                    drop(region);
                    Some(bytes)
                }
                other => {
                    drop(other);
                    None
                }
            };
            let mut state = commands.lock();
            state.spare.extend(spare);
            state.done += 1;
            state.seconds = self.seconds;
            if let Err(error) = result {
                state.error.get_or_insert(error);
            }
            if is_read {
                std::mem::swap(&mut state.read, &mut read);
            }
            drop(state);
            commands.changed.notify_all();
        }
    }
}

/// The buffer of a region, if it is a simulated device's: other memory is not known here.
fn sim_buffer(region: &Region) -> Option<&SimBuffer> {
    region.buffer.as_any().downcast_ref()
}

/// The memory that a command accesses; `true` for writes.
fn accesses(command: &Command) -> impl Iterator<Item = (&Region, bool)> {
    let (some, steps) = match command {
        Command::Write(to, _) => ([None, None, Some((to, true))], None),
        Command::Read(from) => ([None, Some((from, false)), None], None),
        Command::Copy(from, to) | Command::Pack(from, to) => {
            ([None, Some((from, false)), Some((to, true))], None)
        }
        Command::CopySlices(slices) => (slices.accesses(), None),
        Command::Run(steps, _) => ([None; 3], Some(steps)),
        Command::Record(..) | Command::Wait(..) | Command::Stop => ([None; 3], None),
    };
    some.into_iter().flatten().chain(steps.into_iter().flat_map(|steps| steps.accesses()))
}

/// A queue of a simulated device.
pub(crate) struct SimQueue {
    device: Arc<DeviceInner>,
    kind: QueueKind,
    clock: QueueClock,
}

/// Where a queue executes its commands.
enum QueueKind {
    Thread { commands: Arc<CommandQueue>, thread: Option<JoinHandle<()>> },
    Inline(Box<QueueWorker>),
}

impl SimQueue {
    pub(crate) fn new(device: &Arc<DeviceInner>) -> Result<SimQueue, BackendError> {
        let name = &device.settings.name;
        device.faults.alive(name)?;
        let worker = QueueWorker {
            device: Arc::clone(device),
            seconds: 0.0,
            buffers: NodeBuffers::default(),
            bytes: Vec::new(),
        };
        let kind = if device.settings.asynchronous {
            let commands = Arc::new(CommandQueue::default());
            let shared = Arc::clone(&commands);
            let thread =
                std::thread::Builder::new().name(name.clone()).spawn(move || worker.run_commands(&shared));
            let failed = |error: std::io::Error| BackendError::Failed {
                backend: name.clone(),
                what: "starting a queue thread",
                reason: error.to_string(),
            };
            QueueKind::Thread { commands, thread: Some(thread.map_err(failed)?) }
        } else {
            QueueKind::Inline(Box::new(worker))
        };
        Ok(SimQueue { device: Arc::clone(device), kind, clock: QueueClock::new() })
    }

    /// Enqueues a command; a synchronous queue executes it.
    fn enqueue(&mut self, command: Command) -> Result<(), BackendError> {
        self.check_order(&command)?;
        match &mut self.kind {
            QueueKind::Thread { commands, .. } => {
                let mut state = commands.lock();
                state.commands.push_back((command, self.device.host_seconds()));
                state.enqueued += 1;
                drop(state);
                commands.changed.notify_all();
                Ok(())
            }
            QueueKind::Inline(worker) => match command {
                Command::Record(event, recording) => {
                    event.pass(recording, worker.now(), None);
                    Ok(())
                }
                command => worker.execute(&command, &mut Vec::new()),
            },
        }
    }

    /// An error if the command accesses memory without being ordered after a conflicting access.
    fn check_order(&mut self, command: &Command) -> Result<(), BackendError> {
        if !self.device.settings.check_order {
            return Ok(());
        }
        let at = self.clock.submit();
        // All are checked before any is recorded: a refused command has accessed nothing.
        for (region, write) in accesses(command) {
            if let Some(buffer) = sim_buffer(region) {
                let checked = buffer.check_access((region.offset, region.bytes), write, &at);
                checked.map_err(|access| self.device.refuse(&access))?;
            }
        }
        for (region, write) in accesses(command) {
            if let Some(buffer) = sim_buffer(region) {
                buffer.record_access((region.offset, region.bytes), write, &at);
            }
        }
        if matches!(self.kind, QueueKind::Inline(_)) {
            // The command is done when the call returns.
            host_joins(self.clock.now());
        }
        Ok(())
    }

    fn enqueue_program(&mut self, program: &mut dyn Program, timed: bool) -> Result<(), BackendError> {
        let Some(program) = program.as_any().downcast_ref::<SimProgram>() else {
            return Err(BackendError::Foreign {
                backend: self.device.settings.name.clone(),
                what: "program",
            });
        };
        self.enqueue(Command::Run(Arc::clone(&program.steps), timed))
    }

    /// Waits until all commands are done; the first error, or the result of `after`.
    fn finish<T>(&mut self, after: impl FnOnce(&mut QueueState) -> T) -> Result<Option<T>, BackendError> {
        let QueueKind::Thread { commands, .. } = &self.kind else { return Ok(None) };
        let mut state = commands.lock();
        while state.done < state.enqueued {
            state = commands.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        host_joins(self.clock.now());
        self.device.host_reaches(state.seconds);
        match state.error.take() {
            Some(error) => Err(error),
            None => Ok(Some(after(&mut state))),
        }
    }

    /// Whether the device can access a region.
    fn reaches(&self, region: &Region) -> bool {
        let settings = &self.device.settings;
        match region.buffer.as_any().downcast_ref::<SimBuffer>() {
            Some(buffer) if buffer.is_of(&self.device) => true,
            Some(_) if settings.peers => true,
            _ => region.buffer.is_host() && !settings.isolated,
        }
    }

    /// An error unless the region is in this device's memory.
    fn own(&self, region: &Region) -> Result<(), BackendError> {
        let buffer = region.buffer.as_any().downcast_ref::<SimBuffer>();
        match buffer.filter(|buffer| buffer.is_of(&self.device)) {
            Some(buffer) => check_range(buffer, region.offset, region.bytes),
            None => Err(BackendError::Foreign { backend: self.device.settings.name.clone(), what: "buffer" }),
        }
    }

    fn same_size(&self, from: usize, to: usize) -> Result<(), BackendError> {
        if from == to {
            return Ok(());
        }
        Err(BackendError::SizeMismatch { backend: self.device.settings.name.clone(), from, to })
    }
}

impl Queue for SimQueue {
    fn write(&mut self, to: &Region, bytes: &[u8]) -> Result<(), BackendError> {
        self.own(to)?;
        self.same_size(bytes.len(), to.bytes)?;
        let QueueKind::Thread { commands, .. } = &mut self.kind else {
            // The bytes of the command do not matter to the check.
            self.check_order(&Command::Write(to.clone(), Vec::new()))?;
            let QueueKind::Inline(worker) = &mut self.kind else { return Ok(()) };
            worker.transfer(bytes.len())?;
            return put(to, bytes);
        };
        let mut owned = commands.lock().spare.pop().unwrap_or_default();
        owned.clear();
        owned.extend_from_slice(bytes);
        self.enqueue(Command::Write(to.clone(), owned))
    }

    fn read(&mut self, from: &Region, into: &mut [u8]) -> Result<(), BackendError> {
        self.own(from)?;
        self.same_size(from.bytes, into.len())?;
        let command = Command::Read(from.clone());
        if let QueueKind::Inline(worker) = &mut self.kind {
            let mut bytes = Vec::new();
            worker.execute(&command, &mut bytes)?;
            into.copy_from_slice(&bytes);
            return self.check_order(&command);
        }
        self.enqueue(command)?;
        self.finish(|state| into.copy_from_slice(&state.read)).map(|_| ())
    }

    fn copy(&mut self, from: &Region, to: &Region) -> Result<bool, BackendError> {
        self.same_size(from.bytes, to.bytes)?;
        check_range(&*from.buffer, from.offset, from.bytes)?;
        check_range(&*to.buffer, to.offset, to.bytes)?;
        if !self.reaches(from) || !self.reaches(to) {
            return Ok(false);
        }
        self.enqueue(Command::Copy(from.clone(), to.clone()))?;
        Ok(true)
    }

    fn load_slice(
        &mut self,
        _: &Tensor,
        layout: Layout,
        index: usize,
        from: &Region,
        to: &Region,
    ) -> Result<(), BackendError> {
        if layout != PACKED {
            return copy_plain_slice(self, index, from, to);
        }
        let slice = to.part(index.saturating_mul(from.bytes), from.bytes)?;
        self.own(from)?;
        self.own(&slice)?;
        self.enqueue(Command::Pack(from.clone(), slice))
    }

    fn copy_slices(
        &mut self,
        from: &Region,
        to: &Region,
        selection: &mut SliceSelection,
    ) -> Result<bool, BackendError> {
        if !self.reaches(from) {
            return Ok(false);
        }
        self.own(to)?;
        self.own(&selection.ids)?;
        self.enqueue(Command::CopySlices(SliceCopy::selected(from, to, selection)))?;
        Ok(true)
    }

    fn prefetch_slices(
        &mut self,
        from: &Region,
        to: &Region,
        selection: &mut SliceSelection,
    ) -> Result<bool, BackendError> {
        self.own(to)?;
        let Some(copy) = SliceCopy::likely(from, to, selection) else { return Ok(false) };
        self.enqueue(Command::CopySlices(copy))?;
        Ok(true)
    }

    fn selected_slices(&mut self, selection: &SliceSelection) -> Result<Option<Vec<bool>>, BackendError> {
        Ok(slices::selected(selection))
    }

    fn run(&mut self, program: &mut dyn Program) -> Result<(), BackendError> {
        self.enqueue_program(program, false)
    }

    fn run_timed(&mut self, program: &mut dyn Program) -> Result<(), BackendError> {
        self.enqueue_program(program, true)
    }

    fn record(&mut self, event: &dyn Event) -> Result<(), BackendError> {
        let own = event.as_any().downcast_ref::<SimEvent>().filter(|e| Arc::ptr_eq(&e.device, &self.device));
        let Some(event) = own else {
            return Err(BackendError::Foreign { backend: self.device.settings.name.clone(), what: "event" });
        };
        let recording = event.inner.record(self.clock.now());
        self.enqueue(Command::Record(Arc::clone(&event.inner), recording))
    }

    fn wait(&mut self, event: &dyn Event) -> Result<(), BackendError> {
        match event.as_any().downcast_ref::<SimEvent>() {
            Some(event) => {
                let (recording, clock) = event.inner.latest();
                self.clock.join(&clock);
                self.enqueue(Command::Wait(Arc::clone(&event.inner), recording))
            }
            None => event.wait(),
        }
    }

    fn synchronize(&mut self) -> Result<(), BackendError> {
        self.finish(|_| ()).map(|_| ())?;
        self.device.faults.alive(&self.device.settings.name)
    }
}

impl Drop for SimQueue {
    fn drop(&mut self) {
        let _ = self.enqueue(Command::Stop);
        if let QueueKind::Thread { thread, .. } = &mut self.kind
            && let Some(thread) = thread.take()
        {
            let _ = thread.join();
        }
    }
}
