//! The start of MPI: threads, communicators, names of machines and shared memory.

use std::ffi::c_int;
use std::ptr::{null_mut, without_provenance_mut};
use std::sync::Arc;

use libloading::os::unix::Library;

use super::abi::{Constants, Handle};
use super::library::{Api, Functions, Interface, Loaded};
use crate::error::ClusterError;
use crate::memory_file::MemoryFile;
use crate::shared_memory::{MAX_RANKS, Segment};

/// What is known of the ranks.
#[derive(Clone)]
pub(super) struct Facts {
    pub(super) library: String,
    pub(super) interface: &'static str,
    pub(super) rank: usize,
    pub(super) hosts: Vec<String>,
    /// Whether all ranks that were started want to exchange data through shared memory, where they can.
    pub(super) shares: bool,
    pub(super) segment: Option<Arc<Segment>>,
    /// Which of [`Started::operations`] it is.
    pub(super) communicator: usize,
}

/// MPI after its start.
pub(super) struct Started<H: Handle> {
    pub(super) api: Api<H>,
    /// The communicators of operations: of all ranks, then of groups that this rank belongs to.
    pub(super) operations: Vec<H>,
    /// The communicator of heartbeats.
    pub(super) beats: H,
}

/// What comes before the name of a rank's machine: whether it wants shared memory.
const SHARES: char = '+';
const SHARES_NOT: char = '-';

/// Bytes of a text that ranks exchange at the start.
const TEXT: usize = 512;

/// Starts MPI on this thread.
///
/// # Safety
/// The library's handles are `H`, and its constants those that `constants` returns.
pub(super) unsafe fn set_up<H: Handle>(
    loaded: &Loaded,
    constants: impl FnOnce(&Library, &str) -> Result<Constants<H>, ClusterError>,
    shared_memory: bool,
) -> Result<(Started<H>, Facts), ClusterError> {
    let constants = constants(&loaded.library, &loaded.path)?;
    // SAFETY: the caller's promise.
    let functions = unsafe { Functions::<H>::load(&loaded.library, &loaded.path)? };
    let api = Api { functions, constants };
    let (f, c) = (&api.functions, &api.constants);
    let mut initialized = 0;
    // SAFETY: MPI_Initialized may be called at any time.
    api.check("MPI_Initialized", unsafe { (f.initialized)(&mut initialized) })?;
    if initialized != 0 {
        return Err(ClusterError::AlreadyInitialized);
    }
    let mut level = 0;
    // SAFETY: null arguments are allowed since MPI 2; this thread makes all calls from here on.
    let code = unsafe { (f.init_thread)(null_mut(), null_mut(), c.funneled, &mut level) };
    api.check("MPI_Init_thread", code)?;
    if level < c.funneled {
        return Err(ClusterError::Threads { level });
    }
    // SAFETY: MPI has started, handles are the library's own, and all pointers are to local variables.
    unsafe {
        api.check("MPI_Comm_set_errhandler", (f.comm_set_errhandler)(c.world, c.errors_return))?;
        let (mut operations, mut beats) = (c.world, c.world);
        api.check("MPI_Comm_dup", (f.comm_dup)(c.world, &mut operations))?;
        api.check("MPI_Comm_dup", (f.comm_dup)(c.world, &mut beats))?;
        for communicator in [operations, beats] {
            api.check("MPI_Comm_set_errhandler", (f.comm_set_errhandler)(communicator, c.errors_return))?;
        }
        let (mut rank, mut size) = (0, 0);
        api.check("MPI_Comm_rank", (f.comm_rank)(c.world, &mut rank))?;
        api.check("MPI_Comm_size", (f.comm_size)(c.world, &mut size))?;
        let (rank, size) = (rank.unsigned_abs() as usize, size.unsigned_abs() as usize);
        let (hosts, shares) = hosts(&api, operations, size, shared_memory)?;
        let segment = match shares && (2..=MAX_RANKS).contains(&size) {
            true => share(&api, operations, rank, size)?,
            false => None,
        };
        let interface = match loaded.interface {
            Interface::Standard => "standard",
            Interface::OpenMpi => "Open MPI",
            Interface::Mpich => "MPICH",
        };
        let library = loaded.path.clone();
        let facts = Facts { library, interface, rank, hosts, shares, segment, communicator: 0 };
        Ok((Started { api, operations: vec![operations], beats }, facts))
    }
}

/// The machine of each rank, and whether all of them want shared memory: to find out whether they have some is a collective, so that none
/// may begin it alone. Variables of the environment do not reach all machines.
unsafe fn hosts<H: Handle>(
    api: &Api<H>,
    all: H,
    size: usize,
    shared_memory: bool,
) -> Result<(Vec<String>, bool), ClusterError> {
    let (mut own, mut length) = (vec![0u8; TEXT], 0);
    // SAFETY: the buffer is longer than MPI_MAX_PROCESSOR_NAME of every ABI, which is 256 at most.
    let texts = unsafe {
        let code = (api.functions.processor_name)(own.as_mut_ptr().cast(), &mut length);
        api.check("MPI_Get_processor_name", code)?;
        let wish = if shared_memory { SHARES } else { SHARES_NOT };
        own.insert(0, wish as u8);
        gather(api, all, size, &own)?
    };
    let shares = texts.iter().all(|text| text.starts_with(SHARES));
    let host = |text: String| text.strip_prefix([SHARES, SHARES_NOT]).map(str::to_owned).unwrap_or(text);
    Ok((texts.into_iter().map(host).collect(), shares))
}

/// A short text of each rank of a communicator.
///
/// # Safety
/// MPI has started, and all its ranks call this.
unsafe fn gather<H: Handle>(
    api: &Api<H>,
    ranks: H,
    size: usize,
    own: &[u8],
) -> Result<Vec<String>, ClusterError> {
    let (f, c) = (&api.functions, &api.constants);
    let (mut text, mut all) = ([0u8; TEXT], vec![0u8; TEXT * size]);
    // The last byte stays zero.
    text.iter_mut().zip(own).take(TEXT - 1).for_each(|(to, from)| *to = *from);
    let (from, to, count) = (text.as_ptr().cast(), all.as_mut_ptr().cast(), TEXT as c_int);
    // SAFETY: buffers are as long as the counts say.
    let code = unsafe { (f.allgather)(from, count, c.byte, to, count, c.byte, ranks) };
    api.check("MPI_Allgather", code)?;
    let name = |bytes: &[u8]| {
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        String::from_utf8_lossy(bytes.get(..end).unwrap_or_default()).into_owned()
    };
    Ok(all.chunks(TEXT).map(name).collect())
}

/// Memory that all ranks share, if they are on one machine and it can be had.
unsafe fn share<H: Handle>(
    api: &Api<H>,
    all: H,
    rank: usize,
    size: usize,
) -> Result<Option<Arc<Segment>>, ClusterError> {
    let (f, c) = (&api.functions, &api.constants);
    let (mut node, mut on_node) = (all, 0);
    // SAFETY: handles are the library's own, and pointers are to local variables.
    unsafe {
        let code = (f.comm_split_type)(all, c.shared_type, rank as c_int, c.info_null, &mut node);
        api.check("MPI_Comm_split_type", code)?;
        api.check("MPI_Comm_size", (f.comm_size)(node, &mut on_node))?;
        api.check("MPI_Comm_free", (f.comm_free)(&mut node))?;
    }
    // Where one rank sees fewer, all do.
    if on_node.unsigned_abs() as usize != size {
        return Ok(None);
    }
    // Rank 0 makes a file in memory, the others open it by its name, and nobody needs the name any more.
    let file = if rank == 0 { MemoryFile::create(Segment::bytes(size)).ok() } else { None };
    let own = file.as_ref().map(|file| file.path.to_string_lossy().into_owned()).unwrap_or_default();
    // SAFETY: as in `gather`.
    let names = unsafe { gather(api, all, size, own.as_bytes())? };
    let file = match (file, names.first()) {
        (Some(file), _) => Some(file),
        (None, Some(name)) if rank > 0 && !name.is_empty() => MemoryFile::open(name).ok(),
        _ => None,
    };
    let map = file.as_ref().and_then(|file| file.map(Segment::bytes(size)).ok());
    // SAFETY: as in `gather`. It also keeps rank 0 from removing the name before the others have opened it.
    let mapped = unsafe { gather(api, all, size, if map.is_some() { b"mapped" } else { b"" })? };
    let all_mapped = mapped.iter().all(|mapped| mapped == "mapped");
    Ok(map.filter(|_| all_mapped).map(|map| Arc::new(Segment::new(map, size, rank))))
}

impl<H: Handle> Started<H> {
    /// The communicator of the ranks of `parent` that give the same number. All of them call this, and it waits for them.
    pub(super) fn split(&mut self, parent: &Facts, group: c_int) -> Result<Facts, ClusterError> {
        let Some(all) = self.operations.get(parent.communicator).copied() else {
            return Err(ClusterError::Ended);
        };
        let (f, c) = (&self.api.functions, &self.api.constants);
        let (mut communicator, mut rank, mut size) = (all, 0, 0);
        // SAFETY: handles are the library's own, all pointers are to local variables, and all ranks of a communicator call this.
        unsafe {
            let code = (f.comm_split)(all, group, parent.rank as c_int, &mut communicator);
            self.api.check("MPI_Comm_split", code)?;
            let code = (f.comm_set_errhandler)(communicator, c.errors_return);
            self.api.check("MPI_Comm_set_errhandler", code)?;
            self.api.check("MPI_Comm_rank", (f.comm_rank)(communicator, &mut rank))?;
            self.api.check("MPI_Comm_size", (f.comm_size)(communicator, &mut size))?;
            let (rank, size) = (rank.unsigned_abs() as usize, size.unsigned_abs() as usize);
            let (hosts, shares) = hosts(&self.api, communicator, size, parent.shares)?;
            let segment = match shares && (2..=MAX_RANKS).contains(&size) {
                true => share(&self.api, communicator, rank, size)?,
                false => None,
            };
            self.operations.push(communicator);
            let (library, interface) = (parent.library.clone(), parent.interface);
            let communicator = self.operations.len() - 1;
            Ok(Facts { library, interface, rank, hosts, shares, segment, communicator })
        }
    }
}

/// A constant in the place of a pointer.
pub(super) fn constant<T>(value: usize) -> *mut T {
    without_provenance_mut(value)
}
