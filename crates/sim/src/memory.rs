//! Device memory: the host reaches it only through the backend traits.

use std::any::Any;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use quadriga_runtime::{BackendError, Buffer, Usage, check_range};

use crate::faults::FaultPoint;
use crate::inner::DeviceInner;
use crate::order::{Moment, Shadow, Unordered, host_moment};

/// The content of fresh memory: a read before the first write yields garbage.
const FRESH: u8 = 0xa5;

/// A buffer of a simulated device.
pub(crate) struct SimBuffer {
    device: Arc<DeviceInner>,
    bytes: Mutex<Vec<u8>>,
    size: usize,
    usage: Usage,
    host: bool,
    /// Its first byte in the device's address space.
    address: u64,
    /// Who accessed which bytes last, if the device checks that.
    shadow: Option<Shadow>,
}

impl SimBuffer {
    pub(crate) fn new(
        device: &Arc<DeviceInner>,
        size: usize,
        usage: Usage,
        host: bool,
    ) -> Result<SimBuffer, BackendError> {
        let name = &device.settings.name;
        device.faults.check(name, FaultPoint::Allocation)?;
        let free = device.free();
        let refused =
            BackendError::OutOfMemory { backend: name.clone(), requested: size as u64, free: Some(free) };
        let too_large = device.settings.max_buffer.is_some_and(|max| size > max);
        if size as u64 > free || too_large {
            return Err(refused);
        }
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(size).map_err(|_| refused)?;
        bytes.resize(size, FRESH);
        device.used.fetch_add(size as u64, Ordering::Relaxed);
        let shadow = device.settings.check_order.then(Shadow::default);
        let address = device.new_address(size);
        let (device, bytes) = (Arc::clone(device), Mutex::new(bytes));
        Ok(SimBuffer { device, bytes, size, usage, host, address, shadow })
    }

    pub(crate) fn is_of(&self, device: &Arc<DeviceInner>) -> bool {
        Arc::ptr_eq(&self.device, device)
    }

    /// An error if an access is not ordered after those it conflicts with. It is not recorded; the device refuses everything from
    /// then on.
    pub(crate) fn check_access(
        &self,
        (offset, bytes): (usize, usize),
        write: bool,
        at: &Moment,
    ) -> Result<(), Unordered> {
        let Some(shadow) = &self.shadow else { return Ok(()) };
        let checked = shadow.check(offset, bytes, write, at);
        checked.inspect_err(|access| self.device.faults.note_unordered(access.to_string()))
    }

    /// Records an access that was checked.
    pub(crate) fn record_access(&self, (offset, bytes): (usize, usize), write: bool, at: &Moment) {
        if let Some(shadow) = &self.shadow {
            shadow.record(offset, bytes, write, at);
        }
    }

    /// Checks and records an access by the host, now.
    fn host_access(&self, range: (usize, usize), write: bool) -> Result<(), BackendError> {
        if self.shadow.is_none() {
            return Ok(());
        }
        let now = host_moment();
        self.check_access(range, write, &now).map_err(|access| self.device.refuse(&access))?;
        self.record_access(range, write, &now);
        Ok(())
    }

    /// Copies bytes out without counting a transfer.
    pub(crate) fn get(&self, offset: usize, into: &mut [u8]) {
        let bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(from) = bytes.get(offset..offset + into.len()) {
            into.copy_from_slice(from);
        }
    }

    /// Copies bytes in without counting a transfer.
    pub(crate) fn put(&self, offset: usize, from: &[u8]) {
        let mut bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(into) = bytes.get_mut(offset..offset + from.len()) {
            into.copy_from_slice(from);
        }
    }
}

impl Drop for SimBuffer {
    fn drop(&mut self) {
        self.device.used.fetch_sub(self.size as u64, Ordering::Relaxed);
    }
}

impl Buffer for SimBuffer {
    fn backend(&self) -> &str {
        &self.device.settings.name
    }

    fn bytes(&self) -> usize {
        self.size
    }

    fn usage(&self) -> Usage {
        self.usage
    }

    fn is_host(&self) -> bool {
        self.host
    }

    fn address(&self) -> u64 {
        self.address
    }

    fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), BackendError> {
        check_range(self, offset, into.len())?;
        self.device.faults.check(self.backend(), FaultPoint::Transfer)?;
        self.host_access((offset, into.len()), false)?;
        self.get(offset, into);
        Ok(())
    }

    fn write(&self, offset: usize, from: &[u8]) -> Result<(), BackendError> {
        check_range(self, offset, from.len())?;
        self.device.faults.check(self.backend(), FaultPoint::Transfer)?;
        self.host_access((offset, from.len()), true)?;
        self.put(offset, from);
        Ok(())
    }

    fn clear(&self, offset: usize, len: usize) -> Result<(), BackendError> {
        check_range(self, offset, len)?;
        self.device.faults.check(self.backend(), FaultPoint::Transfer)?;
        self.host_access((offset, len), true)?;
        let mut bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(range) = bytes.get_mut(offset..offset + len) {
            range.fill(0);
        }
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
