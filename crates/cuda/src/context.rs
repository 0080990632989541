//! One device: its context, its properties, and the meaning of the driver's error codes.

use std::ffi::CStr;
use std::panic::catch_unwind;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use cudarc::driver::sys::{self, CUresult};
use quadriga_runtime::BackendError;

use crate::error::Error;
use crate::peers::{self, Peers};

/// Which context of a device a backend uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum ContextOwner {
    /// The primary context, which all users of the process share.
    #[default]
    Process,
    /// One that is made for the backend.
    Backend,
}

impl ContextOwner {
    /// The name of a backend with such a context: no two of a process have the same where each has a context of its own.
    fn name(self, ordinal: u32) -> String {
        static OWN: AtomicU32 = AtomicU32::new(0);
        match self {
            ContextOwner::Process => format!("cuda:{ordinal}"),
            ContextOwner::Backend => {
                let number = OWN.fetch_add(1, Ordering::Relaxed) + 1;
                format!("cuda:{ordinal}, context {number}")
            }
        }
    }
}

/// A device with a context.
pub(crate) struct Context {
    pub(crate) name: String,
    pub(crate) description: String,
    /// By which every process knows the device; `None` where the driver does not tell.
    pub(crate) uuid: Option<String>,
    pub(crate) compute_capability: (i32, i32),
    pub(crate) multiprocessors: u32,
    /// Shared memory that a block can have at most.
    pub(crate) shared_bytes_per_block: u32,
    pub(crate) total_bytes: u64,
    /// Bytes per second by clock and width of its memory; 0 if it is not known.
    pub(crate) memory_bandwidth: f64,
    device: sys::CUdevice,
    context: sys::CUcontext,
    owner: ContextOwner,
    lost: AtomicBool,
    peers: Peers,
}

// SAFETY: a driver context may be used from any thread once it is made current there, which `bind` does first.
unsafe impl Send for Context {}
// SAFETY: as above; the driver serialises what needs it.
unsafe impl Sync for Context {}

/// The oldest driver, by the CUDA version that it brings: that of CUDA 12.0, 525.
const OLDEST_DRIVER: i32 = 12000;

/// How many devices the driver reports.
pub(crate) fn count() -> Result<u32, Error> {
    // SAFETY: looks for the library and calls nothing in it.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::NoDriver);
    }
    // cudarc panics where libcuda lacks a symbol: the driver is too old.
    let counted = catch_unwind(|| {
        let mut count = 0;
        // SAFETY: cuInit takes no pointer; cuDeviceGetCount writes the one it is given.
        unsafe {
            let started = sys::cuInit(0);
            if started != CUresult::CUDA_SUCCESS {
                return Err(started);
            }
            let mut version = 0;
            if sys::cuDriverGetVersion(&mut version) == CUresult::CUDA_SUCCESS && version < OLDEST_DRIVER {
                return Ok(None);
            }
            match sys::cuDeviceGetCount(&mut count) {
                CUresult::CUDA_SUCCESS => Ok(Some(count)),
                code => Err(code),
            }
        }
    });
    match counted {
        Ok(Ok(Some(count))) => Ok(count.try_into().unwrap_or(0)),
        Ok(Err(CUresult::CUDA_ERROR_NO_DEVICE)) => Ok(0),
        Ok(Err(code)) => Err(Error::Driver { reason: text(code) }),
        Ok(Ok(None)) | Err(_) => Err(Error::OldDriver),
    }
}

/// The driver's message for an error code.
fn text(code: CUresult) -> String {
    let mut name = std::ptr::null();
    let mut message = std::ptr::null();
    // SAFETY: both calls write a pointer to a static string, or leave null.
    unsafe {
        let _ = sys::cuGetErrorName(code, &mut name);
        let _ = sys::cuGetErrorString(code, &mut message);
        let read = |p: *const std::ffi::c_char| {
            if p.is_null() { String::new() } else { CStr::from_ptr(p).to_string_lossy().into_owned() }
        };
        format!("{} ({})", read(message), read(name))
    }
}

/// Makes a context. Every driver has this function, which cudarc has no more for CUDA 13; its newer form would need a newer driver.
///
/// # Safety
/// The driver is initialised, and the device is one of it.
unsafe fn create(context: &mut sys::CUcontext, device: sys::CUdevice) -> CUresult {
    type CreateContext = unsafe extern "C" fn(*mut sys::CUcontext, u32, sys::CUdevice) -> CUresult;
    // SAFETY: the function of this name has this signature in every driver, and writes the address of one context.
    unsafe {
        match sys::culib().get::<CreateContext>(b"cuCtxCreate_v2") {
            Ok(create) => create(context, 0, device),
            Err(_) => CUresult::CUDA_ERROR_NOT_SUPPORTED,
        }
    }
}

impl Context {
    pub(crate) fn open(ordinal: u32, owner: ContextOwner) -> Result<Context, Error> {
        let count = count()?;
        if ordinal >= count {
            return Err(Error::NoDevice { ordinal, count });
        }
        let fail = |code: CUresult| Error::Driver { reason: text(code) };
        let mut device = 0;
        let mut context = std::ptr::null_mut();
        let mut name = [0 as std::ffi::c_char; 256];
        let mut total = 0usize;
        // SAFETY: every pointer is to a local of the type that the call writes; the name's length is given.
        unsafe {
            for code in [
                sys::cuDeviceGet(&mut device, ordinal as i32),
                sys::cuDeviceGetName(name.as_mut_ptr(), 255, device),
                sys::cuDeviceTotalMem_v2(&mut total, device),
            ] {
                if code != CUresult::CUDA_SUCCESS {
                    return Err(fail(code));
                }
            }
        }
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: writes one integer.
            match unsafe { sys::cuDeviceGetAttribute(&mut value, which, device) } {
                CUresult::CUDA_SUCCESS => Ok(value),
                code => Err(fail(code)),
            }
        };
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: writes the sixteen bytes of the local.
        let code = unsafe { sys::cuDeviceGetUuid_v2(&mut uuid, device) };
        let uuid = (code == CUresult::CUDA_SUCCESS)
            .then(|| uuid.bytes.iter().map(|byte| format!("{:02x}", *byte as u8)).collect());
        use sys::CUdevice_attribute as A;
        let compute_capability = (
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let multiprocessors = attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let shared_bytes = attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        // Last, since nothing may fail between this and what releases it.
        // SAFETY: the pointer is to a local of the type that the call writes; the device is one of the driver's.
        let code = unsafe {
            match owner {
                ContextOwner::Process => sys::cuDevicePrimaryCtxRetain(&mut context, device),
                ContextOwner::Backend => create(&mut context, device),
            }
        };
        if code != CUresult::CUDA_SUCCESS {
            return Err(fail(code));
        }
        let description = name.iter().take_while(|c| **c != 0).map(|c| char::from(*c as u8)).collect();
        Ok(Context {
            name: owner.name(ordinal),
            uuid,
            description,
            compute_capability,
            multiprocessors: multiprocessors.try_into().unwrap_or(1),
            shared_bytes_per_block: shared_bytes.try_into().unwrap_or(0),
            total_bytes: total as u64,
            // Twice a cycle; both are 0 where the driver does not tell.
            memory_bandwidth: 2.0
                * 1e3
                * f64::from(attribute(A::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE).unwrap_or(0))
                * f64::from(attribute(A::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH).unwrap_or(0))
                / 8.0,
            device,
            context,
            owner,
            lost: AtomicBool::new(false),
            peers: Peers::default(),
        })
    }

    /// Whether this is the device's primary context.
    pub(crate) fn is_primary(&self) -> bool {
        self.owner == ContextOwner::Process
    }

    /// Makes the context current on this thread, which every call to the driver needs.
    pub(crate) fn bind(&self) -> Result<(), BackendError> {
        if self.lost.load(Ordering::Acquire) {
            return Err(BackendError::Lost {
                backend: self.name.clone(),
                reason: "an earlier error ended its context; restart the program".into(),
            });
        }
        // SAFETY: the context was made or retained by `open` and is released only when this is dropped.
        self.check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    /// Whether this context, which is current, can copy directly from and to the memory of another device, or of another
    /// context of the same device.
    pub(crate) fn reaches(&self, other: &Context) -> bool {
        let ask = || peers::enable(self.device, (other.device, other.context));
        self.device == other.device || self.peers.reaches(other.context.addr(), ask)
    }

    /// Issues a direct copy between two devices that [reach](Context::reaches) each other, on a stream of this context.
    ///
    /// # Safety
    /// Both ranges are in memory of these contexts, which stays until the stream has passed this point.
    pub(crate) unsafe fn copy_between(
        &self,
        (to, to_context): (sys::CUdeviceptr, &Context),
        (from, from_context): (sys::CUdeviceptr, &Context),
        bytes: usize,
        stream: sys::CUstream,
    ) -> Result<(), BackendError> {
        // SAFETY: the caller's promise.
        let code = unsafe {
            sys::cuMemcpyPeerAsync(to, to_context.context, from, from_context.context, bytes, stream)
        };
        self.check("cuMemcpyPeerAsync", code)
    }

    /// Maps a result code of the driver call `what` to an error; codes after which the context is unusable mark it
    /// lost.
    pub(crate) fn check(&self, what: &'static str, code: CUresult) -> Result<(), BackendError> {
        use CUresult::*;
        let backend = || self.name.clone();
        match code {
            CUDA_SUCCESS => Ok(()),
            CUDA_ERROR_OUT_OF_MEMORY => {
                Err(BackendError::OutOfMemory { backend: backend(), requested: 0, free: self.free_bytes() })
            }
            CUDA_ERROR_ILLEGAL_ADDRESS
            | CUDA_ERROR_LAUNCH_FAILED
            | CUDA_ERROR_LAUNCH_TIMEOUT
            | CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUDA_ERROR_MISALIGNED_ADDRESS
            | CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUDA_ERROR_INVALID_PC
            | CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUDA_ERROR_ASSERT
            | CUDA_ERROR_ECC_UNCORRECTABLE
            | CUDA_ERROR_DEVICE_UNAVAILABLE
            | CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUDA_ERROR_SYSTEM_NOT_READY
            | CUDA_ERROR_UNKNOWN => {
                self.lost.store(true, Ordering::Release);
                Err(BackendError::Lost { backend: backend(), reason: format!("{what}: {}", text(code)) })
            }
            _ => Err(BackendError::Failed { backend: backend(), what, reason: text(code) }),
        }
    }

    /// Whether the device has bulk copies to shared memory (cp.async.bulk) and programmatic dependent launch: Hopper
    /// and newer.
    pub(crate) fn has_bulk_copies(&self) -> bool {
        self.compute_capability.0 >= 9
    }

    /// The number of the highest priority of a launch; the context is current.
    pub(crate) fn highest_priority(&self) -> i32 {
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: both pointers are to locals.
        let code = unsafe { sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest) };
        if code == CUresult::CUDA_SUCCESS { greatest } else { 0 }
    }

    /// Bytes free on the device now.
    pub(crate) fn free_bytes(&self) -> Option<u64> {
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: the context is current on this thread or made so; both pointers are to locals.
        unsafe {
            if sys::cuCtxSetCurrent(self.context) != CUresult::CUDA_SUCCESS {
                return None;
            }
            (sys::cuMemGetInfo_v2(&mut free, &mut total) == CUresult::CUDA_SUCCESS).then_some(free as u64)
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: made or retained once by `open`; everything made in the context holds an `Arc` of this.
        unsafe {
            let _ = match self.owner {
                ContextOwner::Process => sys::cuDevicePrimaryCtxRelease_v2(self.device),
                ContextOwner::Backend => sys::cuCtxDestroy_v2(self.context),
            };
        }
    }
}
