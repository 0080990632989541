//! NCCL's library, loaded at run time: the functions that are used, and the values of its header.

use std::env;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;

use cudarc::driver::sys::CUstream;
use libloading::Library;

use super::NcclError;

/// `QUADRIGA_NCCL`: the path of the library, or `1` for the one that the dynamic linker finds.
pub(super) const VARIABLE: &str = "QUADRIGA_NCCL";

/// The names under which NCCL is installed.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// The oldest version, which has communicators that do not block: 2.14.
const OLDEST: c_int = 21400;

/// A communicator of the library.
pub(super) type Comm = *mut c_void;
/// `ncclResult_t`.
pub(super) type NcclResult = c_int;

pub(super) const SUCCESS: NcclResult = 0;
pub(super) const IN_PROGRESS: NcclResult = 7;
/// `ncclInt8`: bytes that are only moved.
pub(super) const INT8: c_int = 0;
/// `ncclFloat32`.
pub(super) const FLOAT32: c_int = 7;
/// `ncclSum`.
pub(super) const SUM: c_int = 0;

/// Bytes of an [`UniqueId`].
pub(super) const UNIQUE_ID_BYTES: usize = 128;

/// `ncclUniqueId`: the address of the first rank, which it makes and the others need.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId(pub(super) [u8; UNIQUE_ID_BYTES]);

/// `ncclConfig_t` as of 2.14, which every later version accepts: it goes by size and version.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    /// Not part of 2.14's, whose size is rounded up to this.
    undefined: c_int,
}

impl Config {
    /// Calls return at once, and are complete when the communicator's state says so.
    pub(super) const NON_BLOCKING: Config = Config {
        size: size_of::<Config>(),
        magic: 0xcafe_beef,
        version: OLDEST as u32,
        blocking: 0,
        undefined: c_int::MIN,
    };
}

macro_rules! functions {
    ($($field:ident: $name:literal, fn($($argument:ty),*) -> $result:ty;)*) => {
        /// The functions of the library.
        #[derive(Clone)]
        pub(super) struct Functions {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Functions {
            fn load(library: &Library, path: &str) -> Result<Functions, NcclError> {
                let missing = |function: &'static str| NcclError::MissingFunction {
                    library: path.to_owned(),
                    function: function.to_owned(),
                };
                Ok(Functions {
                    $($field: {
                        // SAFETY: the function of this name has this signature in every version of NCCL 2 that has it.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn($($argument),*) -> $result>(
                                concat!($name, "\0").as_bytes(),
                            )
                        };
                        *found.map_err(|_| missing($name))?
                    },)*
                })
            }
        }
    };
}

functions! {
    get_version: "ncclGetVersion", fn(*mut c_int) -> NcclResult;
    get_unique_id: "ncclGetUniqueId", fn(*mut UniqueId) -> NcclResult;
    init: "ncclCommInitRankConfig", fn(*mut Comm, c_int, UniqueId, c_int, *mut Config) -> NcclResult;
    finalize: "ncclCommFinalize", fn(Comm) -> NcclResult;
    destroy: "ncclCommDestroy", fn(Comm) -> NcclResult;
    abort: "ncclCommAbort", fn(Comm) -> NcclResult;
    async_error: "ncclCommGetAsyncError", fn(Comm, *mut NcclResult) -> NcclResult;
    error_string: "ncclGetErrorString", fn(NcclResult) -> *const c_char;
    last_error: "ncclGetLastError", fn(Comm) -> *const c_char;
    group_start: "ncclGroupStart", fn() -> NcclResult;
    group_end: "ncclGroupEnd", fn() -> NcclResult;
    all_reduce: "ncclAllReduce", fn(u64, u64, usize, c_int, c_int, Comm, CUstream) -> NcclResult;
    all_gather: "ncclAllGather", fn(u64, u64, usize, c_int, Comm, CUstream) -> NcclResult;
    reduce_scatter: "ncclReduceScatter", fn(u64, u64, usize, c_int, c_int, Comm, CUstream) -> NcclResult;
    reduce: "ncclReduce", fn(u64, u64, usize, c_int, c_int, c_int, Comm, CUstream) -> NcclResult;
    broadcast: "ncclBroadcast", fn(u64, u64, usize, c_int, c_int, Comm, CUstream) -> NcclResult;
    send: "ncclSend", fn(u64, usize, c_int, c_int, Comm, CUstream) -> NcclResult;
    receive: "ncclRecv", fn(u64, usize, c_int, c_int, Comm, CUstream) -> NcclResult;
}

/// A loaded library.
pub(super) struct NcclLibrary {
    pub(super) functions: Functions,
    /// Its version, as 10,000 · major + 100 · minor + patch.
    pub(super) version: c_int,
    /// Kept loaded as long as functions may be called; `None` in tests, whose functions are their own.
    _library: Option<Library>,
}

impl NcclLibrary {
    /// Loads the library that [`VARIABLE`] names, or else the one that the dynamic linker finds.
    pub(super) fn load() -> Result<Arc<NcclLibrary>, NcclError> {
        let named = env::var(VARIABLE).ok().filter(|path| !path.is_empty() && path != "1");
        let mut tried = Vec::new();
        let names = named.as_deref().map_or_else(|| NAMES.to_vec(), |path| vec![path]);
        for path in names {
            match NcclLibrary::open(path) {
                Err(NcclError::NoLibrary { tried: why }) => tried.push(why),
                loaded => return loaded,
            }
        }
        Err(NcclError::NoLibrary { tried: tried.join("; ") })
    }

    /// Loads a library by path or name.
    pub(super) fn open(path: &str) -> Result<Arc<NcclLibrary>, NcclError> {
        // SAFETY: the initializers of NCCL's library only set up its own state.
        let library = unsafe { Library::new(path) };
        let library = library.map_err(|error| NcclError::NoLibrary { tried: format!("{path} ({error})") })?;
        let functions = Functions::load(&library, path)?;
        let mut version = 0;
        // SAFETY: writes the one integer that it is given.
        unsafe { (functions.get_version)(&mut version) };
        if version < OLDEST {
            return Err(NcclError::Old { library: path.to_owned(), version });
        }
        Ok(Arc::new(NcclLibrary { functions, version, _library: Some(library) }))
    }

    #[cfg(test)]
    pub(super) fn of(functions: Functions) -> Arc<NcclLibrary> {
        Arc::new(NcclLibrary { functions, version: OLDEST, _library: None })
    }

    /// The library's text about a result, with what it says about the last error.
    pub(super) fn text(&self, result: NcclResult, comm: Comm) -> String {
        // SAFETY: both return static strings or null, also for a null communicator.
        let [text, last] = unsafe {
            [(self.functions.error_string)(result), (self.functions.last_error)(comm)].map(|text| {
                if text.is_null() {
                    String::new()
                } else {
                    CStr::from_ptr(text).to_string_lossy().into_owned()
                }
            })
        };
        match last.trim() {
            "" => format!("{text} ({result})"),
            last => format!("{text} ({result}): {last}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_has_the_layout_of_the_header() {
        assert_eq!(size_of::<Config>(), 24);
        assert_eq!(std::mem::offset_of!(Config, blocking), 16);
        assert_eq!(size_of::<UniqueId>(), UNIQUE_ID_BYTES);
    }

    #[test]
    fn a_missing_library_is_an_error_that_says_where_to_get_it() {
        let text = NcclLibrary::open("libnccl-that-does-not-exist.so").err().unwrap().to_string();
        assert!(text.contains("nvidia-nccl") && text.contains("libnccl-that-does-not-exist.so"), "{text}");
    }

    /// Where NCCL is installed, it has every function; elsewhere the test says so and passes.
    #[test]
    fn an_installed_library_has_every_function() {
        match NcclLibrary::load() {
            Ok(library) => {
                assert!(library.version >= OLDEST);
                let text = library.text(4, std::ptr::null_mut());
                assert!(text.contains("invalid argument"), "{text}");
                println!("NCCL {}", library.version);
            }
            Err(NcclError::NoLibrary { tried }) => println!("skipped, NCCL is not installed: {tried}"),
            Err(error) => panic!("{error}"),
        }
    }
}
