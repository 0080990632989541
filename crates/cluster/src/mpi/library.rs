//! Finding and loading an MPI library.

use std::env;
use std::ffi::{c_char, c_int, c_void};
use std::path::PathBuf;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use super::abi::{Constants, Handle};
use crate::error::ClusterError;
use crate::launcher::Launch;

/// The binary interface of a library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Interface {
    Standard,
    OpenMpi,
    Mpich,
}

/// A loaded library, which is never unloaded: MPI cannot be.
pub(super) struct Loaded {
    pub(super) library: Library,
    pub(super) path: String,
    pub(super) interface: Interface,
}

const STANDARD: &[&str] = &["libmpi_abi.so.1", "libmpi_abi.so"];
const OPEN_MPI: &[&str] = &["libmpi.so.40", "libmpi.so.80"];
const MPICH: &[&str] = &["libmpi.so.12", "libmpich.so.12"];

/// Loads the library that a path names, or the one that belongs to the launcher.
pub(super) fn load(path: Option<&str>, launch: Option<Launch>) -> Result<Loaded, ClusterError> {
    let mut tried = Vec::new();
    for name in candidates(path, launch) {
        // SAFETY: the constructors of an MPI library define its variables; it is opened like the linker would.
        match unsafe { Library::open(Some(&name), RTLD_NOW | RTLD_GLOBAL) } {
            Ok(library) => return identify(library, name),
            Err(error) => {
                let error =
                    std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
                tried.push(if error.contains(&name) { error } else { format!("{name}: {error}") });
            }
        }
    }
    Err(ClusterError::NoLibrary { tried: tried.join("; ") })
}

/// The names to try, those of the launcher's family first; each in the folder beside the launcher's, then where the
/// dynamic linker looks.
fn candidates(path: Option<&str>, launch: Option<Launch>) -> Vec<String> {
    if let Some(path) = path {
        return vec![path.to_owned()];
    }
    let names: Vec<&str> = match launch {
        Some(Launch::OpenMpi) => [OPEN_MPI, STANDARD].concat(),
        Some(Launch::Mpich) => [STANDARD, MPICH].concat(),
        Some(Launch::Pmix) | None => [STANDARD, OPEN_MPI, MPICH].concat(),
    };
    let folders = folders_of_launchers();
    let beside = folders.iter().flat_map(|folder| names.iter().map(move |name| folder.join(name)));
    let beside = beside.filter(|path| path.exists()).map(|path| path.to_string_lossy().into_owned());
    beside.chain(names.iter().map(|name| (*name).to_owned())).collect()
}

/// The folders `lib` beside the folders of `PATH` that have an `mpirun`.
fn folders_of_launchers() -> Vec<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .filter(|folder| folder.join("mpirun").exists())
        .filter_map(|folder| Some(folder.parent()?.join("lib")))
        .collect()
}

fn identify(library: Library, path: String) -> Result<Loaded, ClusterError> {
    let version = version(&library).unwrap_or_default();
    // SAFETY: only whether the symbol exists is asked.
    let open_mpi = unsafe { library.get::<*const c_void>(b"ompi_mpi_comm_world") }.is_ok();
    let interface = if path.rsplit('/').next().is_some_and(|name| name.starts_with("libmpi_abi.")) {
        Interface::Standard
    } else if open_mpi {
        Interface::OpenMpi
    } else if ["MPICH", "Intel(R) MPI", "MVAPICH", "CRAY MPICH"].iter().any(|name| version.contains(name)) {
        Interface::Mpich
    } else {
        return Err(ClusterError::UnknownLibrary { path, version });
    };
    Ok(Loaded { library, path, interface })
}

/// The library's name and version, which it may be asked for before its start.
fn version(library: &Library) -> Option<String> {
    type Version = unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int;
    // SAFETY: the function has this signature since MPI 3.0, in every ABI.
    let function = unsafe { library.get::<Version>(b"MPI_Get_library_version") }.ok()?;
    // The longest text that an implementation may write is 8192 bytes.
    let (mut text, mut length) = (vec![0u8; 16384], 0);
    // SAFETY: the buffer is longer than MPI_MAX_LIBRARY_VERSION_STRING of every ABI.
    let code = unsafe { function(text.as_mut_ptr().cast(), &mut length) };
    let text = text.get(..usize::try_from(length).ok()?)?;
    let text = text.split(|byte| [0, b'\n'].contains(byte)).next().unwrap_or_default();
    (code == 0).then(|| String::from_utf8_lossy(text).trim().to_owned())
}

macro_rules! functions {
    ($($(#[$doc:meta])* $field:ident = $symbol:literal ($($argument:ty),*);)*) => {
        /// The functions of a library whose handles are `H`.
        pub(super) struct Functions<H: Handle> {
            $($(#[$doc])* pub(super) $field: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl<H: Handle> Functions<H> {
            /// # Safety
            /// The library's handles are `H`.
            pub(super) unsafe fn load(library: &Library, path: &str) -> Result<Functions<H>, ClusterError> {
                Ok(Functions {
                    $($field: {
                        // SAFETY: the signature is that of the standard, with the library's type of handles.
                        let symbol = unsafe { library.get(concat!($symbol, "\0").as_bytes()) };
                        *symbol.map_err(|_| ClusterError::MissingFunction {
                            library: path.to_owned(),
                            function: $symbol.to_owned(),
                        })?
                    },)*
                })
            }
        }
    };
}

functions! {
    initialized = "MPI_Initialized" (*mut c_int);
    init_thread = "MPI_Init_thread" (*mut c_int, *mut *mut *mut c_char, c_int, *mut c_int);
    finalize = "MPI_Finalize" ();
    abort = "MPI_Abort" (H, c_int);
    error_string = "MPI_Error_string" (c_int, *mut c_char, *mut c_int);
    processor_name = "MPI_Get_processor_name" (*mut c_char, *mut c_int);
    comm_rank = "MPI_Comm_rank" (H, *mut c_int);
    comm_size = "MPI_Comm_size" (H, *mut c_int);
    comm_dup = "MPI_Comm_dup" (H, *mut H);
    comm_split = "MPI_Comm_split" (H, c_int, c_int, *mut H);
    comm_split_type = "MPI_Comm_split_type" (H, c_int, c_int, H, *mut H);
    comm_free = "MPI_Comm_free" (*mut H);
    comm_set_errhandler = "MPI_Comm_set_errhandler" (H, H);
    allgather = "MPI_Allgather" (*const c_void, c_int, H, *mut c_void, c_int, H, H);
    ibarrier = "MPI_Ibarrier" (H, *mut H);
    iallreduce = "MPI_Iallreduce" (*const c_void, *mut c_void, c_int, H, H, H, *mut H);
    iallgatherv = "MPI_Iallgatherv" (*const c_void, c_int, H, *mut c_void, *const c_int, *const c_int, H, H, *mut H);
    ireduce_scatter = "MPI_Ireduce_scatter" (*const c_void, *mut c_void, *const c_int, H, H, H, *mut H);
    ibcast = "MPI_Ibcast" (*mut c_void, c_int, H, c_int, H, *mut H);
    isend = "MPI_Isend" (*const c_void, c_int, H, c_int, c_int, H, *mut H);
    irecv = "MPI_Irecv" (*mut c_void, c_int, H, c_int, c_int, H, *mut H);
    send_init = "MPI_Send_init" (*const c_void, c_int, H, c_int, c_int, H, *mut H);
    recv_init = "MPI_Recv_init" (*mut c_void, c_int, H, c_int, c_int, H, *mut H);
    start = "MPI_Start" (*mut H);
    test = "MPI_Test" (*mut H, *mut c_int, *mut c_void);
    cancel = "MPI_Cancel" (*mut H);
    request_free = "MPI_Request_free" (*mut H);
}

/// A library's functions and constants.
pub(super) struct Api<H: Handle> {
    pub(super) functions: Functions<H>,
    pub(super) constants: Constants<H>,
}

impl<H: Handle> Api<H> {
    /// An error with the library's text, if a call returned one.
    pub(super) fn check(&self, function: &'static str, code: c_int) -> Result<(), ClusterError> {
        if code == 0 {
            return Ok(());
        }
        let (mut text, mut length) = (vec![0u8; 1024], 0);
        // SAFETY: the buffer is longer than MPI_MAX_ERROR_STRING of every ABI.
        let told = unsafe { (self.functions.error_string)(code, text.as_mut_ptr().cast(), &mut length) };
        let text = match (told, usize::try_from(length)) {
            (0, Ok(length)) => String::from_utf8_lossy(text.get(..length).unwrap_or_default()).into_owned(),
            _ => format!("error code {code}"),
        };
        Err(ClusterError::Mpi { function, text })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_launchers_family_comes_first() {
        let first = |launch| candidates(None, launch).into_iter().find(|name| !name.contains('/')).unwrap();
        assert_eq!(first(Some(Launch::OpenMpi)), "libmpi.so.40");
        assert_eq!(first(Some(Launch::Mpich)), "libmpi_abi.so.1");
        assert_eq!(candidates(Some("/a/libmpi.so"), Some(Launch::Mpich)), ["/a/libmpi.so"]);
    }

    #[test]
    fn a_missing_library_is_an_error_that_says_what_to_install() {
        let Err(error) = load(Some("/nonexistent/libmpi.so"), None) else { panic!("it was loaded") };
        let text = error.to_string();
        assert!(
            text.contains("apt install openmpi-bin") && text.contains("/nonexistent/libmpi.so"),
            "{text}"
        );
    }

    #[test]
    fn a_library_that_is_not_mpi_is_refused_by_name() {
        let Err(error) = load(Some("libc.so.6"), None) else { panic!("it was loaded") };
        assert!(matches!(error, ClusterError::UnknownLibrary { .. }), "{error}");
    }
}
