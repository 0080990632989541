//! Connections over a library that records its calls: what happens without a device.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{c_char, c_int};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use quadriga_cluster::{Collectives, Communicator, InProcess, Limits, in_process};

use super::library::Functions;
use super::*;

/// What the library does in a test, and what it was called for.
#[derive(Default)]
struct FakeWorld {
    calls: Mutex<Vec<String>>,
    /// How often a state is asked for until a call is complete; negative: for ever.
    polls: AtomicI32,
    /// The state of the communicators once calls are complete.
    state: AtomicI32,
}

struct FakeComm {
    world: Arc<FakeWorld>,
    rank: c_int,
    left: AtomicI32,
}

static WORLDS: Mutex<Option<HashMap<u64, Arc<FakeWorld>>>> = Mutex::new(None);
static NEXT: AtomicU64 = AtomicU64::new(1);

thread_local! {
    /// The world whose identifier this thread makes; 0: that fails.
    static MAKES: Cell<u64> = const { Cell::new(0) };
    /// The communicator that this thread's group is of.
    static GROUP: Cell<usize> = const { Cell::new(0) };
}

impl FakeComm {
    fn of<'a>(comm: Comm) -> &'a FakeComm {
        // SAFETY: the tests' communicators are those of `init`, which are never freed.
        unsafe { &*comm.cast::<FakeComm>() }
    }

    fn note(&self, call: impl Into<String>) -> NcclResult {
        self.world.calls.lock().unwrap().push(format!("{}: {}", self.rank, call.into()));
        self.left.store(self.world.polls.load(Ordering::Relaxed), Ordering::Relaxed);
        IN_PROGRESS
    }
}

unsafe extern "C" fn get_version(_: *mut c_int) -> NcclResult {
    SUCCESS
}
unsafe extern "C" fn get_unique_id(id: *mut UniqueId) -> NcclResult {
    let world = MAKES.get();
    // SAFETY: the caller's identifier.
    unsafe { (&mut (*id).0)[..8].copy_from_slice(&world.to_le_bytes()) };
    if world == 0 { 2 } else { SUCCESS }
}
unsafe extern "C" fn init(
    comm: *mut Comm,
    _: c_int,
    id: UniqueId,
    rank: c_int,
    _: *mut Config,
) -> NcclResult {
    let number = u64::from_le_bytes(id.0[..8].try_into().unwrap());
    let world = Arc::clone(&WORLDS.lock().unwrap().as_ref().unwrap()[&number]);
    let made = Box::leak(Box::new(FakeComm { world, rank, left: AtomicI32::new(0) }));
    // SAFETY: the caller's variable.
    unsafe { *comm = std::ptr::from_mut(made).cast() };
    made.note("init")
}
unsafe extern "C" fn finalize(comm: Comm) -> NcclResult {
    FakeComm::of(comm).note("finalize")
}
unsafe extern "C" fn destroy(comm: Comm) -> NcclResult {
    FakeComm::of(comm).note("destroy")
}
unsafe extern "C" fn abort(comm: Comm) -> NcclResult {
    FakeComm::of(comm).note("abort")
}
unsafe extern "C" fn async_error(comm: Comm, state: *mut NcclResult) -> NcclResult {
    let fake = FakeComm::of(comm);
    let left = fake.left.load(Ordering::Relaxed);
    if left > 0 {
        fake.left.store(left - 1, Ordering::Relaxed);
    }
    let now = if left == 0 { fake.world.state.load(Ordering::Relaxed) } else { IN_PROGRESS };
    // SAFETY: the caller's variable.
    unsafe { *state = now };
    SUCCESS
}
unsafe extern "C" fn error_string(result: NcclResult) -> *const c_char {
    if result == 6 { c"remote process exited".as_ptr() } else { c"error".as_ptr() }
}
unsafe extern "C" fn last_error(_: Comm) -> *const c_char {
    std::ptr::null()
}
unsafe extern "C" fn group_start() -> NcclResult {
    GROUP.set(0);
    SUCCESS
}
unsafe extern "C" fn group_end() -> NcclResult {
    let comm = std::ptr::with_exposed_provenance_mut::<FakeComm>(GROUP.get());
    FakeComm::of(comm.cast()).note("group_end")
}
fn called(comm: Comm, call: String) -> NcclResult {
    GROUP.set(comm.expose_provenance());
    FakeComm::of(comm).note(call)
}
unsafe extern "C" fn sums(
    from: u64,
    to: u64,
    count: usize,
    t: c_int,
    op: c_int,
    c: Comm,
    _: CUstream,
) -> NcclResult {
    called(c, format!("sum {from} {to} {count} {t} {op}"))
}
unsafe extern "C" fn gather(from: u64, to: u64, bytes: usize, t: c_int, c: Comm, _: CUstream) -> NcclResult {
    called(c, format!("gather {from} {to} {bytes} {t}"))
}
unsafe extern "C" fn reduce(
    from: u64,
    to: u64,
    count: usize,
    t: c_int,
    op: c_int,
    root: c_int,
    c: Comm,
    _: CUstream,
) -> NcclResult {
    called(c, format!("reduce {from} {to} {count} {t} {op} {root}"))
}
unsafe extern "C" fn cast(
    from: u64,
    to: u64,
    bytes: usize,
    t: c_int,
    root: c_int,
    c: Comm,
    _: CUstream,
) -> NcclResult {
    called(c, format!("broadcast {from} {to} {bytes} {t} {root}"))
}
unsafe extern "C" fn message(
    at: u64,
    bytes: usize,
    t: c_int,
    peer: c_int,
    c: Comm,
    _: CUstream,
) -> NcclResult {
    called(c, format!("message {at} {bytes} {t} {peer}"))
}

fn library() -> Arc<NcclLibrary> {
    NcclLibrary::of(Functions {
        get_version,
        get_unique_id,
        init,
        finalize,
        destroy,
        abort,
        async_error,
        error_string,
        last_error,
        group_start,
        group_end,
        all_reduce: sums,
        all_gather: gather,
        reduce_scatter: sums,
        reduce,
        broadcast: cast,
        send: message,
        receive: message,
    })
}

/// A world of which calls are complete after so many polls.
fn world(polls: i32) -> (u64, Arc<FakeWorld>) {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let world = Arc::new(FakeWorld { polls: AtomicI32::new(polls), ..FakeWorld::default() });
    WORLDS.lock().unwrap().get_or_insert_default().insert(number, Arc::clone(&world));
    (number, world)
}

fn group(rank: InProcess) -> (Arc<dyn Communicator>, Arc<dyn RankGroup>) {
    let communicator: Arc<dyn Communicator> = Arc::new(rank);
    (Arc::clone(&communicator), Arc::new(Collectives::new(communicator)))
}

fn connect(world: u64, over: &Arc<dyn RankGroup>, limit: Duration) -> Result<Arc<Connection>, NcclError> {
    MAKES.set(world);
    Connection::new(Ok(library()), None, over, limit)
}

const LONG: Duration = Duration::from_secs(60);

fn sum_of(at: u64) -> DeviceExchange {
    DeviceExchange { calls: vec![NcclCall::AllReduce { at, count: 7 }], ..DeviceExchange::default() }
}

/// The calls of one rank, without those of the watching thread, which makes none that are noted.
fn calls_of(world: &FakeWorld, rank: usize) -> Vec<String> {
    let prefix = format!("{rank}: ");
    let calls = world.calls.lock().unwrap();
    calls.iter().filter_map(|call| call.strip_prefix(&prefix).map(str::to_owned)).collect()
}

#[test]
fn ranks_meet_issue_groups_and_end() {
    let (number, world) = world(3);
    thread::scope(|scope| {
        for (rank, communicator) in in_process(2, Limits::default()).into_iter().enumerate() {
            scope.spawn(move || {
                let (_kept, over) = group(communicator);
                let connection = connect(number, &over, LONG).unwrap();
                connection.issue(&sum_of(64), std::ptr::null_mut()).unwrap();
                let two = vec![
                    NcclCall::Broadcast { from: 1, to: 2, bytes: 3, root: 0 },
                    NcclCall::Send { from: 4, bytes: 5, to: 1 - rank },
                ];
                let exchange = DeviceExchange { calls: two, ..DeviceExchange::default() };
                connection.issue(&exchange, std::ptr::null_mut()).unwrap();
                connection.issue(&DeviceExchange::default(), std::ptr::null_mut()).unwrap();
                assert_eq!(connection.failure(), None);
            });
        }
    });
    for rank in 0..2 {
        // The watching thread may be the last that has the connection.
        let started = Instant::now();
        while calls_of(&world, rank).last().is_none_or(|call| call != "destroy") && started.elapsed() < LONG {
            thread::yield_now();
        }
        let send = format!("message 4 5 0 {}", 1 - rank);
        let expected = [
            "init",
            "sum 64 64 7 7 0",
            "group_end",
            "broadcast 1 2 3 0 0",
            &send,
            "group_end",
            "finalize",
            "destroy",
        ];
        assert_eq!(calls_of(&world, rank), expected);
    }
}

#[test]
fn ranks_that_never_meet_are_given_up_after_the_deadline() {
    let (number, world) = world(-1);
    let (_kept, over) = group(in_process(1, Limits::default()).remove(0));
    let error = connect(number, &over, Duration::from_millis(20)).err().unwrap();
    assert_eq!(error, NcclError::Deadline { function: "ncclCommInitRankConfig", seconds: 0 });
    assert_eq!(calls_of(&world, 0), ["init", "abort"]);
}

#[test]
fn an_error_of_the_communicator_ends_it_for_good() {
    let (number, world) = world(0);
    let (_kept, over) = group(in_process(1, Limits::default()).remove(0));
    let connection = connect(number, &over, LONG).unwrap();
    world.state.store(6, Ordering::Relaxed);
    connection.look_at(&mut connection.lock());
    assert!(connection.failure().unwrap().contains("remote process exited"));
    let error = connection.issue(&sum_of(64), std::ptr::null_mut()).unwrap_err().to_string();
    assert!(error.contains("remote process exited"), "{error}");
    assert_eq!(calls_of(&world, 0), ["init", "abort"]);
}

#[test]
fn a_call_that_fails_ends_the_communicator_with_its_text() {
    let (number, world) = world(0);
    let (_kept, over) = group(in_process(1, Limits::default()).remove(0));
    let connection = connect(number, &over, LONG).unwrap();
    // The group is complete only after polls, in which the communicator fails.
    world.polls.store(2, Ordering::Relaxed);
    world.state.store(6, Ordering::Relaxed);
    let error = connection.issue(&sum_of(64), std::ptr::null_mut()).unwrap_err();
    assert!(error.to_string().contains("remote process exited"), "{error}");
    assert!(calls_of(&world, 0).contains(&"abort".to_owned()));
}

#[test]
fn a_rank_that_is_lost_aborts_the_communicator_of_the_others() {
    let (number, world) = world(0);
    let (communicator, over) = group(in_process(1, Limits::default()).remove(0));
    let connection = connect(number, &over, LONG).unwrap();
    communicator.fail("its power is off");
    connection.look_at(&mut connection.lock());
    assert!(connection.failure().unwrap().contains("its power is off"));
    assert_eq!(calls_of(&world, 0), ["init", "abort"]);
}

/// The host waits for the stream, and the other communicator has nothing to do: nobody else could notice.
#[test]
fn a_rank_that_hangs_with_heartbeats_ends_the_communicator_after_the_limit_of_a_step() {
    let (number, world) = world(0);
    let limits = Limits { operation: Some(Duration::ZERO), ..Limits::default() };
    let (_kept, over) = group(in_process(1, limits).remove(0));
    let connection = connect(number, &over, LONG).unwrap();
    connection.look_at(&mut connection.lock());
    assert_eq!(connection.failure(), None, "nothing was issued");
    // Without a device, no collective ends. The watching thread may be the first to notice.
    drop(connection.issue(&sum_of(64), std::ptr::null_mut()));
    connection.look_at(&mut connection.lock());
    let failure = connection.failure().unwrap();
    assert!(failure.contains("a collective did not end within 0 s"), "{failure}");
    assert_eq!(calls_of(&world, 0).last().unwrap(), "abort");
    // For ever, where there is no limit.
    let limits = Limits { operation: None, ..limits };
    let (_kept, over) = group(in_process(1, limits).remove(0));
    let connection = connect(number, &over, LONG).unwrap();
    connection.issue(&sum_of(64), std::ptr::null_mut()).unwrap();
    connection.look_at(&mut connection.lock());
    assert_eq!(connection.failure(), None);
}

#[test]
fn no_rank_waits_for_one_without_the_library_or_an_identifier() {
    let connect_both = |first: fn() -> Result<Arc<NcclLibrary>, NcclError>| {
        thread::scope(|scope| {
            let start = |(rank, communicator): (usize, InProcess)| {
                scope.spawn(move || {
                    let (_kept, over) = group(communicator);
                    let library = if rank == 0 { first() } else { Ok(library()) };
                    MAKES.set(0);
                    Connection::new(library, None, &over, LONG).err().unwrap()
                })
            };
            let threads: Vec<_> =
                in_process(2, Limits::default()).into_iter().enumerate().map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<NcclError>>()
        })
    };
    let missing = NcclError::NoLibrary { tried: "nothing".to_owned() };
    let errors = connect_both(|| Err(NcclError::NoLibrary { tried: "nothing".to_owned() }));
    assert_eq!(errors, [missing, NcclError::OtherRanks(1, 2)]);
    for error in connect_both(|| Ok(library())) {
        assert!(error.to_string().contains("ncclGetUniqueId"), "{error}");
    }
}
