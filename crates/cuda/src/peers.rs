//! Direct copies between devices, where the driver allows them.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys::{self, CUresult};

/// The devices whose memory a context can copy from and to, by their contexts' addresses.
#[derive(Default)]
pub(crate) struct Peers {
    known: Mutex<HashMap<usize, bool>>,
}

impl Peers {
    /// Whether a peer can be reached; asks the driver the first time.
    pub(crate) fn reaches(&self, peer: usize, ask: impl FnOnce() -> bool) -> bool {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        *known.entry(peer).or_insert_with(ask)
    }
}

/// Lets a context, which is current, access the memory of another device; whether it can.
pub(crate) fn enable(device: sys::CUdevice, peer: (sys::CUdevice, sys::CUcontext)) -> bool {
    let (peer_device, peer_context) = peer;
    let mut can = 0;
    // SAFETY: writes one integer; both devices were opened.
    let asked = unsafe { sys::cuDeviceCanAccessPeer(&mut can, device, peer_device) };
    is_enabled(asked, can, || {
        // SAFETY: both contexts are retained by their owners; the calling one is current.
        unsafe { sys::cuCtxEnablePeerAccess(peer_context, 0) }
    })
}

/// Access is possible and enabled, by this call or an earlier one. Otherwise data goes through the host.
fn is_enabled(asked: CUresult, can: i32, enable: impl FnOnce() -> CUresult) -> bool {
    let can = asked == CUresult::CUDA_SUCCESS && can != 0;
    can && matches!(enable(), CUresult::CUDA_SUCCESS | CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)
}

#[cfg(test)]
mod tests {
    use super::*;
    use CUresult::*;

    #[test]
    fn access_is_enabled_where_the_driver_allows_it() {
        assert!(is_enabled(CUDA_SUCCESS, 1, || CUDA_SUCCESS));
        assert!(is_enabled(CUDA_SUCCESS, 1, || CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED));
        assert!(!is_enabled(CUDA_SUCCESS, 1, || CUDA_ERROR_TOO_MANY_PEERS));
        let mut asked = false;
        for (code, can) in [(CUDA_SUCCESS, 0), (CUDA_ERROR_INVALID_DEVICE, 1)] {
            assert!(!is_enabled(code, can, || {
                asked = true;
                CUDA_SUCCESS
            }));
        }
        assert!(!asked, "nothing is enabled where it is not possible");
    }

    #[test]
    fn the_driver_is_asked_once_for_each_peer() {
        let peers = Peers::default();
        assert!(peers.reaches(1, || true) && !peers.reaches(2, || false));
        assert!(peers.reaches(1, || false) && !peers.reaches(2, || true), "the first answer counts");
    }
}
