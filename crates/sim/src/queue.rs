//! Command queues: each works through its commands on a thread of its own, or at once on a synchronous device.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use quadriga_runtime::{BackendError, Event, Program, Queue, Region, check_range};

use crate::device::Shared;
use crate::event::{Shared as EventShared, SimEvent};
use crate::faults::What;
use crate::memory::SimBuffer;
use crate::program::{Scratch, SimProgram, Steps, get, put};
use crate::settings::Clock;

enum Command {
    Write(Region, Vec<u8>),
    Read(Region),
    Copy(Region, Region),
    /// What to run, and whether to take the times of its steps.
    Run(Arc<Steps>, bool),
    Record(Arc<EventShared>, u64),
    Wait(Arc<EventShared>, u64),
    Stop,
}

#[derive(Default)]
struct State {
    commands: VecDeque<Command>,
    /// Commands given and commands done.
    given: u64,
    done: u64,
    /// The first failure since the last time somebody asked.
    error: Option<BackendError>,
    /// What the latest read brought.
    read: Vec<u8>,
    /// Memory of earlier writes, to be used again.
    spare: Vec<Vec<u8>>,
}

#[derive(Default)]
struct Line {
    state: Mutex<State>,
    changed: Condvar,
}

impl Line {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Carries out commands.
struct Worker {
    device: Arc<Shared>,
    seconds: f64,
    scratch: Scratch,
    bytes: Vec<u8>,
}

impl Worker {
    /// What the queue's clock says.
    fn now(&self) -> f64 {
        match self.device.settings.clock {
            Clock::Virtual | Clock::Real => self.seconds,
            Clock::Host => self.device.made.elapsed().as_secs_f64(),
        }
    }

    fn take_time(&mut self, seconds: f64) {
        self.seconds += seconds;
        if self.device.settings.clock == Clock::Real && seconds > 0.0 {
            std::thread::sleep(Duration::from_secs_f64(seconds));
        }
        self.device.reached(self.seconds);
    }

    fn transfer(&mut self, bytes: usize) -> Result<(), BackendError> {
        let settings = &self.device.settings;
        let seconds = settings.copy_seconds + settings.byte_seconds * bytes as f64;
        self.device.faults.check(&settings.name, What::Transfer)?;
        self.take_time(seconds);
        Ok(())
    }

    /// Carries out a command that does work; the bytes of a read go to `read`.
    fn work(&mut self, command: &Command, read: &mut Vec<u8>) -> Result<(), BackendError> {
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
                self.transfer(from.bytes)?;
                get(from, &mut self.bytes)?;
                put(to, &self.bytes)
            }
            Command::Run(steps, timed) => {
                self.device.faults.check(&self.device.settings.name, What::Run)?;
                self.take_time(steps.seconds());
                steps.run(&mut self.scratch, *timed)
            }
            Command::Wait(event, recording) => {
                self.seconds = self.seconds.max(event.wait_for(*recording)?);
                Ok(())
            }
            Command::Record(..) | Command::Stop => Ok(()),
        }
    }

    fn live(mut self, line: &Line) {
        let mut read = Vec::new();
        loop {
            let (command, failed) = {
                let mut state = line.lock();
                loop {
                    match state.commands.pop_front() {
                        Some(command) => break (command, state.error.clone()),
                        None => state = line.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                    }
                }
            };
            let result = match (&command, &failed) {
                (Command::Stop, _) => return,
                (Command::Record(event, recording), _) => {
                    event.pass(*recording, self.now(), failed.clone());
                    Ok(())
                }
                // After a failure the rest is skipped until somebody has seen it.
                (_, Some(_)) => Ok(()),
                (command, None) => self.work(command, &mut read),
            };
            let is_read = matches!(command, Command::Read(_));
            // What the command holds is let go before anybody hears that it is done.
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
            let mut state = line.lock();
            state.spare.extend(spare);
            state.done += 1;
            if let Err(error) = result {
                state.error.get_or_insert(error);
            }
            if is_read {
                std::mem::swap(&mut state.read, &mut read);
            }
            drop(state);
            line.changed.notify_all();
        }
    }
}

/// A queue of a simulated device.
pub(crate) struct SimQueue {
    device: Arc<Shared>,
    kind: Kind,
}

enum Kind {
    Thread { line: Arc<Line>, thread: Option<JoinHandle<()>> },
    Inline(Box<Worker>),
}

impl SimQueue {
    pub(crate) fn new(device: &Arc<Shared>) -> Result<SimQueue, BackendError> {
        let name = &device.settings.name;
        device.faults.alive(name)?;
        let worker = Worker {
            device: Arc::clone(device),
            seconds: 0.0,
            scratch: Scratch::default(),
            bytes: Vec::new(),
        };
        let kind = if device.settings.asynchronous {
            let line = Arc::new(Line::default());
            let theirs = Arc::clone(&line);
            let thread = std::thread::Builder::new().name(name.clone()).spawn(move || worker.live(&theirs));
            let failed = |error: std::io::Error| BackendError::Failed {
                backend: name.clone(),
                what: "starting a queue's thread",
                reason: error.to_string(),
            };
            Kind::Thread { line, thread: Some(thread.map_err(failed)?) }
        } else {
            Kind::Inline(Box::new(worker))
        };
        Ok(SimQueue { device: Arc::clone(device), kind })
    }

    /// Gives a command, or carries it out.
    fn give(&mut self, command: Command) -> Result<(), BackendError> {
        match &mut self.kind {
            Kind::Thread { line, .. } => {
                let mut state = line.lock();
                state.commands.push_back(command);
                state.given += 1;
                drop(state);
                line.changed.notify_all();
                Ok(())
            }
            Kind::Inline(worker) => match command {
                Command::Record(event, recording) => {
                    event.pass(recording, worker.now(), None);
                    Ok(())
                }
                command => worker.work(&command, &mut Vec::new()),
            },
        }
    }

    fn give_program(&mut self, program: &mut dyn Program, timed: bool) -> Result<(), BackendError> {
        let Some(program) = program.as_any().downcast_ref::<SimProgram>() else {
            return Err(BackendError::Foreign {
                backend: self.device.settings.name.clone(),
                what: "program",
            });
        };
        self.give(Command::Run(Arc::clone(&program.steps), timed))
    }

    /// Waits until all is done, and hands over the first failure.
    fn finish<T>(&mut self, after: impl FnOnce(&mut State) -> T) -> Result<Option<T>, BackendError> {
        let Kind::Thread { line, .. } = &self.kind else { return Ok(None) };
        let mut state = line.lock();
        while state.done < state.given {
            state = line.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        match state.error.take() {
            Some(error) => Err(error),
            None => Ok(Some(after(&mut state))),
        }
    }

    /// Whether this device can get at a region.
    fn reaches(&self, region: &Region) -> bool {
        let settings = &self.device.settings;
        match region.buffer.as_any().downcast_ref::<SimBuffer>() {
            Some(buffer) if buffer.is_of(&self.device) => true,
            Some(_) if settings.peers => true,
            _ => region.buffer.is_host() && !settings.isolated,
        }
    }

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
        let mut owned = match &mut self.kind {
            Kind::Thread { line, .. } => line.lock().spare.pop().unwrap_or_default(),
            Kind::Inline(worker) => {
                worker.transfer(bytes.len())?;
                return put(to, bytes);
            }
        };
        owned.clear();
        owned.extend_from_slice(bytes);
        self.give(Command::Write(to.clone(), owned))
    }

    fn read(&mut self, from: &Region, into: &mut [u8]) -> Result<(), BackendError> {
        self.own(from)?;
        self.same_size(from.bytes, into.len())?;
        if let Kind::Inline(worker) = &mut self.kind {
            let mut bytes = Vec::new();
            worker.work(&Command::Read(from.clone()), &mut bytes)?;
            into.copy_from_slice(&bytes);
            return Ok(());
        }
        self.give(Command::Read(from.clone()))?;
        self.finish(|state| into.copy_from_slice(&state.read)).map(|_| ())
    }

    fn copy(&mut self, from: &Region, to: &Region) -> Result<bool, BackendError> {
        self.same_size(from.bytes, to.bytes)?;
        check_range(&*from.buffer, from.offset, from.bytes)?;
        check_range(&*to.buffer, to.offset, to.bytes)?;
        if !self.reaches(from) || !self.reaches(to) {
            return Ok(false);
        }
        self.give(Command::Copy(from.clone(), to.clone()))?;
        Ok(true)
    }

    fn run(&mut self, program: &mut dyn Program) -> Result<(), BackendError> {
        self.give_program(program, false)
    }

    fn run_timed(&mut self, program: &mut dyn Program) -> Result<(), BackendError> {
        self.give_program(program, true)
    }

    fn record(&mut self, event: &dyn Event) -> Result<(), BackendError> {
        let own = event.as_any().downcast_ref::<SimEvent>().filter(|e| Arc::ptr_eq(&e.device, &self.device));
        let Some(event) = own else {
            return Err(BackendError::Foreign { backend: self.device.settings.name.clone(), what: "event" });
        };
        let recording = event.shared.record();
        self.give(Command::Record(Arc::clone(&event.shared), recording))
    }

    fn wait(&mut self, event: &dyn Event) -> Result<(), BackendError> {
        match event.as_any().downcast_ref::<SimEvent>() {
            Some(event) => {
                let recording = event.shared.latest();
                self.give(Command::Wait(Arc::clone(&event.shared), recording))
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
        let _ = self.give(Command::Stop);
        if let Kind::Thread { thread, .. } = &mut self.kind
            && let Some(thread) = thread.take()
        {
            let _ = thread.join();
        }
    }
}
