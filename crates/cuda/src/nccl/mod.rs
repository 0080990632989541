//! NCCL: collectives of several GPUs in their own memory, on the streams of their backends.
//!
//! The library is loaded at run time. Ranks meet over the communicator that they have already: the first makes NCCL's identifier and
//! broadcasts it. Communicators do not block, so that every wait has an end: a deadline, or the failure of a rank, which the other
//! communicator notices by heartbeats. NCCL's kernels on the device end when the communicator is aborted.

mod calls;
mod library;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUstream};
use quadriga_graph::{CollectiveKind, DType};
use quadriga_runtime::{BackendError, Event, ExchangeCall, RankGroup};

pub(crate) use self::calls::{DeviceExchange, ExchangePlaces, scratch_bytes};
use self::calls::{NcclCall, RowCopy};
use self::library::{
    Comm, Config, FLOAT32, IN_PROGRESS, INT8, NcclLibrary, NcclResult, SUCCESS, SUM, UNIQUE_ID_BYTES,
    UniqueId, VARIABLE,
};
use crate::context::Context;
use crate::event::CudaEvent;

/// How often a connection looks for failures while nothing is issued.
const WATCH: Duration = Duration::from_millis(50);
/// How long the end of a connection may take before it is aborted.
const FINALIZE: Duration = Duration::from_secs(5);
/// How long a state is polled before the thread sleeps between polls.
const SPIN: Duration = Duration::from_millis(1);

/// Why ranks do not exchange data through NCCL.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum NcclError {
    /// The library is not on this machine.
    #[error(
        "NCCL is not installed: it comes in the PyPI packages nvidia-nccl-cu12 and nvidia-nccl-cu13, or as libnccl2; QUADRIGA_NCCL may be the path of libnccl.so.2. Tried: {tried}"
    )]
    NoLibrary {
        /// The names that were tried, with the loader's errors.
        tried: String,
    },
    /// The library lacks a function.
    #[error("{library} has no {function}: NCCL 2.14 or newer is needed")]
    MissingFunction {
        /// The library's path or name.
        library: String,
        /// The function.
        function: String,
    },
    /// The library is too old.
    #[error("{library} is version {version}: NCCL 2.14 or newer is needed")]
    Old {
        /// The library's path or name.
        library: String,
        /// Its version, as 10,000 · major + 100 · minor + patch.
        version: i32,
    },
    /// Another rank cannot use NCCL.
    #[error("{0} of {1} ranks cannot use NCCL; their own messages say why")]
    OtherRanks(usize, usize),
    /// The backend has a context of its own.
    #[error("NCCL needs the primary context of a device, and this backend has one of its own")]
    OwnContext,
    /// A call failed.
    #[error("{function} failed: {text}")]
    Call {
        /// The function.
        function: &'static str,
        /// The library's text.
        text: String,
    },
    /// Kernels of collectives did not end, although all ranks show that they are alive.
    #[error("a collective did not end within {seconds} s: a rank does not take part, though it is alive")]
    Hangs {
        /// The limit.
        seconds: u64,
    },
    /// A call was not complete in time.
    #[error("{function} did not end within {seconds} s")]
    Deadline {
        /// The function.
        function: &'static str,
        /// The limit.
        seconds: u64,
    },
    /// The ranks cannot reach each other any more.
    #[error("{0}")]
    Ranks(String),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] BackendError),
}

/// Whether the variable `QUADRIGA_NCCL` asks for NCCL.
pub fn nccl_is_enabled() -> bool {
    std::env::var(VARIABLE).is_ok_and(|value| !value.is_empty() && value != "0")
}

/// Ranks that each have a GPU: collectives on it go through NCCL, others through the communicator over which the ranks met.
pub struct NcclRanks {
    connection: Arc<Connection>,
}

/// A communicator, until it has failed.
pub(crate) struct Connection {
    library: Arc<NcclLibrary>,
    /// `None` in tests without a device.
    context: Option<Arc<Context>>,
    /// The communicator over which the ranks met, and by which a lost rank is noticed.
    over: Arc<dyn RankGroup>,
    limit: Duration,
    state: Mutex<ConnectionState>,
}

#[derive(Default)]
struct ConnectionState {
    comm: Option<CommHandle>,
    /// Why there is no communicator any more.
    failure: Option<String>,
    /// When the latest collective was issued, unless the device is known to have passed it.
    issued: Option<Instant>,
    /// Recorded behind that one, once there was one.
    behind: Option<CudaEvent>,
}

struct CommHandle(Comm);

// SAFETY: NCCL allows calls for a communicator from any thread, one at a time: it is used under the lock of its connection.
unsafe impl Send for CommHandle {}

impl NcclRanks {
    pub(crate) fn connect(
        context: &Arc<Context>,
        over: &Arc<dyn RankGroup>,
        limit: Duration,
    ) -> Result<NcclRanks, NcclError> {
        // The library goes by the device, whose primary context it takes. Other ranks hear of an error here, too.
        let library = if context.is_primary() { NcclLibrary::load() } else { Err(NcclError::OwnContext) };
        let connection = Connection::new(library, Some(Arc::clone(context)), over, limit)?;
        Ok(NcclRanks { connection })
    }
}

impl Connection {
    /// Connects with the other ranks, all of which call this.
    fn new(
        library: Result<Arc<NcclLibrary>, NcclError>,
        context: Option<Arc<Context>>,
        over: &Arc<dyn RankGroup>,
        limit: Duration,
    ) -> Result<Arc<Connection>, NcclError> {
        let library = agree(&**over, library)?;
        let mut id = UniqueId([0; UNIQUE_ID_BYTES]);
        let mut result = SUCCESS;
        if over.rank() == 0 {
            // SAFETY: writes the identifier that it is given.
            result = unsafe { (library.functions.get_unique_id)(&mut id) };
        }
        // A rank that fails here ends the others with the broadcast of its result.
        let mut message = [&id.0[..], &result.to_le_bytes()].concat();
        share(&**over, &CollectiveKind::Broadcast { root: 0 }, DType::I32, &mut message)?;
        let (bytes, sent) = message.split_at(UNIQUE_ID_BYTES);
        let (bytes, sent) = (bytes.try_into().unwrap_or(id.0), sent.try_into().unwrap_or_default());
        let result = NcclResult::from_le_bytes(sent);
        if result != SUCCESS {
            let text = library.text(result, std::ptr::null_mut());
            return Err(NcclError::Call { function: "ncclGetUniqueId", text });
        }
        let state = Mutex::default();
        let connection = Connection { library, context, over: Arc::clone(over), limit, state };
        connection.init(UniqueId(bytes))?;
        let connection = Arc::new(connection);
        connection.watch();
        Ok(connection)
    }

    /// The connection of ranks, if they have one.
    pub(crate) fn of(ranks: &dyn RankGroup) -> Option<Arc<Connection>> {
        ranks.device_code(crate::FAMILY)?.downcast::<Connection>().ok()
    }

    /// Whether it is on a device.
    pub(crate) fn is_of(&self, context: &Arc<Context>) -> bool {
        self.context.as_ref().is_some_and(|own| Arc::ptr_eq(own, context))
    }

    fn bind(&self) -> Result<(), BackendError> {
        self.context.as_ref().map_or(Ok(()), |context| context.bind())
    }

    fn lock(&self) -> MutexGuard<'_, ConnectionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn init(&self, id: UniqueId) -> Result<(), NcclError> {
        self.bind()?;
        let (size, rank) = (self.over.size(), self.over.rank());
        let (mut comm, mut config): (Comm, Config) = (std::ptr::null_mut(), Config::NON_BLOCKING);
        // SAFETY: comm and config are locals; the library has read the configuration when it returns.
        let result =
            unsafe { (self.library.functions.init)(&mut comm, size as i32, id, rank as i32, &mut config) };
        let mut state = self.lock();
        state.comm = (!comm.is_null()).then_some(CommHandle(comm));
        let ready = self.ready("ncclCommInitRankConfig", result, comm);
        ready.inspect_err(|error| self.fail(&mut state, error))
    }

    /// Waits until a call is complete: on the host, not on the device.
    fn ready(&self, function: &'static str, result: NcclResult, comm: Comm) -> Result<(), NcclError> {
        let failed = |result| NcclError::Call { function, text: self.library.text(result, comm) };
        let started = Instant::now();
        let mut state = result;
        while state == IN_PROGRESS && !comm.is_null() {
            let waited = started.elapsed();
            if let Some(failure) = self.over.failure() {
                return Err(NcclError::Ranks(failure));
            }
            if waited > self.limit {
                return Err(NcclError::Deadline { function, seconds: self.limit.as_secs() });
            }
            if waited < SPIN {
                thread::yield_now()
            } else {
                thread::sleep(SPIN / 20)
            }
            // SAFETY: the communicator is live: it is aborted under the lock that the caller holds.
            let asked = unsafe { (self.library.functions.async_error)(comm, &mut state) };
            if asked != SUCCESS {
                return Err(failed(asked));
            }
        }
        if state == SUCCESS { Ok(()) } else { Err(failed(state)) }
    }

    /// Gives the communicator up: its kernels end, and every later use fails with this error.
    fn fail(&self, state: &mut ConnectionState, error: &NcclError) {
        state.failure.get_or_insert(error.to_string());
        if let Some(CommHandle(comm)) = state.comm.take()
            && self.bind().is_ok()
        {
            // SAFETY: the communicator is live and, taken out of the state, used by nobody afterwards.
            let _ = unsafe { (self.library.functions.abort)(comm) };
        }
    }

    /// Looks for errors of the communicator and of ranks from time to time, as long as the connection exists.
    fn watch(self: &Arc<Connection>) {
        let watched = Arc::downgrade(self);
        let look = move || {
            while let Some(connection) = watched.upgrade() {
                connection.look();
                drop(connection);
                thread::sleep(WATCH);
            }
        };
        // Without the thread a lost rank is noticed by the next call only.
        let _ = thread::Builder::new().name("nccl".to_owned()).spawn(look);
    }

    /// Gives the communicator up if it or a rank has failed. Whoever holds the lock looks itself.
    fn look(&self) {
        match self.state.try_lock() {
            Ok(mut state) => self.look_at(&mut state),
            Err(TryLockError::Poisoned(poisoned)) => self.look_at(&mut poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => {}
        }
    }

    fn look_at(&self, state: &mut ConnectionState) {
        let Some(CommHandle(comm)) = state.comm else { return };
        let mut found = SUCCESS;
        // SAFETY: the communicator is live as long as the lock is held.
        let asked = unsafe { (self.library.functions.async_error)(comm, &mut found) };
        let error = match (self.over.failure(), asked, found) {
            (Some(failure), ..) => NcclError::Ranks(failure),
            (None, SUCCESS, SUCCESS | IN_PROGRESS) => match self.hangs(state) {
                Some(hangs) => hangs,
                None => return,
            },
            (None, SUCCESS, result) | (None, result, _) => {
                NcclError::Call { function: "a collective", text: self.library.text(result, comm) }
            }
        };
        self.fail(state, &error);
    }

    /// An error if the device has not passed the latest collective for longer than a rank may take part in one: the host waits for the
    /// device then, without a limit of its own.
    fn hangs(&self, state: &mut ConnectionState) -> Option<NcclError> {
        let limit = self.over.step_limit()?;
        state.issued.filter(|issued| issued.elapsed() >= limit)?;
        // Other errors of the device are found by whoever waits for it.
        let passed = state.behind.as_ref().is_some_and(|event| !matches!(event.is_done(), Ok(false)));
        if passed {
            state.issued = None;
            return None;
        }
        Some(NcclError::Hangs { seconds: limit.as_secs() })
    }

    /// Notes that a collective was issued to a stream.
    fn note_issued(&self, state: &mut ConnectionState, stream: CUstream) -> Result<(), NcclError> {
        if let Some(context) = &self.context {
            let event = match state.behind.take() {
                Some(event) => event,
                None => CudaEvent::new(context, false)?,
            };
            // SAFETY: the event is live and, as the stream is, of this context, which the caller has made current.
            let recorded = unsafe { sys::cuEventRecord(event.handle(), stream) };
            state.behind = Some(event);
            context.check("cuEventRecord", recorded)?;
        }
        state.issued = Some(Instant::now());
        Ok(())
    }

    /// Why the connection has ended, if it has.
    pub(crate) fn failure(&self) -> Option<String> {
        self.lock().failure.clone()
    }

    /// Issues a collective to a stream.
    pub(crate) fn issue(&self, exchange: &DeviceExchange, stream: CUstream) -> Result<(), NcclError> {
        let mut state = self.lock();
        let Some(CommHandle(comm)) = state.comm else {
            let ended = || "the communicator has ended".to_owned();
            return Err(NcclError::Ranks(state.failure.clone().unwrap_or_else(ended)));
        };
        let issued = self.issue_all(exchange, comm, stream);
        let issued = issued.and_then(|()| self.note_issued(&mut state, stream));
        issued.inspect_err(|error| self.fail(&mut state, error))
    }

    fn issue_all(&self, exchange: &DeviceExchange, comm: Comm, stream: CUstream) -> Result<(), NcclError> {
        exchange.before.iter().try_for_each(|copy| self.copy(copy, stream))?;
        if !exchange.calls.is_empty() {
            let functions = &self.library.functions;
            // SAFETY: takes nothing; every group is ended below.
            let started = unsafe { (functions.group_start)() };
            self.ready("ncclGroupStart", started, std::ptr::null_mut())?;
            let mut called = Ok(());
            for call in &exchange.calls {
                called = called.and_then(|()| self.call(call, comm, stream));
            }
            // SAFETY: ends the group of this thread.
            let ended = unsafe { (functions.group_end)() };
            called?;
            self.ready("ncclGroupEnd", ended, comm)?;
        }
        exchange.after.iter().try_for_each(|copy| self.copy(copy, stream))
    }

    fn call(&self, call: &NcclCall, comm: Comm, stream: CUstream) -> Result<(), NcclError> {
        let functions = &self.library.functions;
        // SAFETY: the addresses are those of the program's tensors and scratch memory, which its buffers keep alive, and hold as
        // many bytes as are named; communicator and stream are live.
        let (function, result) = unsafe {
            match *call {
                NcclCall::AllReduce { at, count } => {
                    ("ncclAllReduce", (functions.all_reduce)(at, at, count, FLOAT32, SUM, comm, stream))
                }
                NcclCall::AllGather { from, to, bytes } => {
                    ("ncclAllGather", (functions.all_gather)(from, to, bytes, INT8, comm, stream))
                }
                NcclCall::ReduceScatter { from, to, count } => (
                    "ncclReduceScatter",
                    (functions.reduce_scatter)(from, to, count, FLOAT32, SUM, comm, stream),
                ),
                NcclCall::Broadcast { from, to, bytes, root } => {
                    ("ncclBroadcast", (functions.broadcast)(from, to, bytes, INT8, root as i32, comm, stream))
                }
                NcclCall::Reduce { from, to, count, root } => (
                    "ncclReduce",
                    (functions.reduce)(from, to, count, FLOAT32, SUM, root as i32, comm, stream),
                ),
                NcclCall::Send { from, bytes, to } => {
                    ("ncclSend", (functions.send)(from, bytes, INT8, to as i32, comm, stream))
                }
                NcclCall::Receive { to, bytes, from } => {
                    ("ncclRecv", (functions.receive)(to, bytes, INT8, from as i32, comm, stream))
                }
            }
        };
        // In a group, the state is that of its end.
        match result {
            SUCCESS | IN_PROGRESS => Ok(()),
            result => Err(NcclError::Call { function, text: self.library.text(result, comm) }),
        }
    }

    fn copy(&self, copy: &RowCopy, stream: CUstream) -> Result<(), NcclError> {
        let Some(context) = &self.context else { return Ok(()) };
        let parameters = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            srcHost: std::ptr::null(),
            srcDevice: copy.from,
            srcArray: std::ptr::null_mut(),
            srcPitch: copy.from_pitch,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstHost: std::ptr::null_mut(),
            dstDevice: copy.to,
            dstArray: std::ptr::null_mut(),
            dstPitch: copy.to_pitch,
            WidthInBytes: copy.row_bytes,
            Height: copy.rows,
        };
        // SAFETY: both ranges are inside the program's tensors and scratch memory; the parameters are read before the call returns.
        let code = unsafe { sys::cuMemcpy2DAsync_v2(&parameters, stream) };
        Ok(context.check("cuMemcpy2DAsync", code)?)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let mut state = self.lock();
        let Some(CommHandle(comm)) = state.comm.take() else { return };
        if self.bind().is_err() {
            return;
        }
        drop(state);
        // SAFETY: the communicator is live, and nobody else has it: programs that use it are gone.
        unsafe {
            let mut result = (self.library.functions.finalize)(comm);
            let started = Instant::now();
            while result == IN_PROGRESS && started.elapsed() < FINALIZE && self.over.failure().is_none() {
                thread::yield_now();
                let asked = (self.library.functions.async_error)(comm, &mut result);
                if asked != SUCCESS {
                    result = asked;
                }
            }
            let end =
                if result == SUCCESS { self.library.functions.destroy } else { self.library.functions.abort };
            let _ = end(comm);
        }
    }
}

impl RankGroup for NcclRanks {
    fn rank(&self) -> usize {
        self.connection.over.rank()
    }

    fn size(&self) -> usize {
        self.connection.over.size()
    }

    /// Collectives of tensors in host memory do not go through NCCL.
    fn exchange(&self, call: ExchangeCall<'_>) -> Result<(), String> {
        self.connection.over.exchange(call)
    }

    fn step_limit(&self) -> Option<Duration> {
        self.connection.over.step_limit()
    }

    fn failure(&self) -> Option<String> {
        self.connection.failure().or_else(|| self.connection.over.failure())
    }

    fn device_code(&self, family: &str) -> Option<Arc<dyn std::any::Any + Send + Sync>> {
        let connection = Arc::clone(&self.connection);
        (family == crate::FAMILY).then_some(connection as Arc<dyn std::any::Any + Send + Sync>)
    }
}

impl std::fmt::Debug for NcclRanks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let version = self.connection.library.version;
        write!(f, "NcclRanks(rank {} of {}, NCCL {version})", self.rank(), self.size())
    }
}

/// Exchanges host bytes over the communicator that the ranks have.
fn share(
    over: &dyn RankGroup,
    kind: &CollectiveKind,
    dtype: DType,
    bytes: &mut [u8],
) -> Result<(), NcclError> {
    let call = ExchangeCall { kind, dtype, rows: 1, input: &[], output: bytes };
    over.exchange(call).map_err(NcclError::Ranks)
}

/// The library, if all ranks have loaded theirs: none waits for one that cannot take part.
fn agree(
    over: &dyn RankGroup,
    library: Result<Arc<NcclLibrary>, NcclError>,
) -> Result<Arc<NcclLibrary>, NcclError> {
    let failed = if library.is_err() { 1.0f32 } else { 0.0 };
    let mut all = failed.to_ne_bytes();
    share(over, &CollectiveKind::AllReduce, DType::F32, &mut all)?;
    let without = f32::from_ne_bytes(all);
    match library {
        Ok(library) if without == 0.0 => Ok(library),
        Ok(_) => Err(NcclError::OtherRanks(without as usize, over.size())),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests;
