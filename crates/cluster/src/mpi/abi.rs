//! The binary interfaces of MPI libraries: what handles and constants are.
//!
//! The standard ABI of MPI 5 has pointers with small constants, Open MPI pointers to its objects, MPICH integers.

use std::ffi::{c_int, c_void};

use libloading::os::unix::Library;

use crate::error::ClusterError;

/// A handle of a communicator, type, request or other object.
pub(super) trait Handle: Copy + Send + 'static {}

impl Handle for Pointer {}
impl Handle for c_int {}

/// A handle that is a pointer, or a small constant in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct Pointer(usize);

/// The constants of a library.
#[derive(Clone, Copy, Debug)]
pub(super) struct Constants<H> {
    pub(super) world: H,
    pub(super) float: H,
    pub(super) byte: H,
    pub(super) sum: H,
    pub(super) max: H,
    pub(super) info_null: H,
    pub(super) errors_return: H,
    /// Where a status would be written.
    pub(super) status_ignore: usize,
    /// A send buffer that says that values are in the receive buffer.
    pub(super) in_place: usize,
    pub(super) shared_type: c_int,
    pub(super) funneled: c_int,
}

/// The standard ABI (MPI 5.0, chapter 20).
pub(super) const STANDARD: Constants<Pointer> = Constants {
    world: Pointer(0x101),
    float: Pointer(0x210),
    byte: Pointer(0x247),
    sum: Pointer(0x21),
    max: Pointer(0x23),
    info_null: Pointer(0x130),
    errors_return: Pointer(0x143),
    status_ignore: 0,
    in_place: 1,
    shared_type: 221,
    funneled: 1024,
};

/// MPICH and the libraries that keep its ABI.
pub(super) const MPICH: Constants<c_int> = Constants {
    world: 0x4400_0000,
    float: 0x4c00_040a,
    byte: 0x4c00_010d,
    sum: 0x5800_0003,
    max: 0x5800_0001,
    info_null: 0x1c00_0000,
    errors_return: 0x5400_0001,
    status_ignore: 1,
    in_place: usize::MAX,
    shared_type: 1,
    funneled: 1,
};

/// Open MPI, whose handles are the addresses of its objects.
pub(super) fn open_mpi(library: &Library, path: &str) -> Result<Constants<Pointer>, ClusterError> {
    let object = |name: &str| {
        // SAFETY: only the symbol's address is taken.
        let symbol = unsafe { library.get::<*const c_void>(name.as_bytes()) };
        symbol.map(|symbol| Pointer(symbol.as_raw_ptr() as usize)).map_err(|_| {
            ClusterError::MissingFunction { library: path.to_owned(), function: name.to_owned() }
        })
    };
    Ok(Constants {
        world: object("ompi_mpi_comm_world")?,
        float: object("ompi_mpi_float")?,
        byte: object("ompi_mpi_byte")?,
        sum: object("ompi_mpi_op_sum")?,
        max: object("ompi_mpi_op_max")?,
        info_null: object("ompi_mpi_info_null")?,
        errors_return: object("ompi_mpi_errors_return")?,
        status_ignore: 0,
        in_place: 1,
        shared_type: 0,
        funneled: 1,
    })
}
