//! A queue: a CUDA stream, and a ring of pinned memory that stages transfers of pageable host memory.

use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys;
use quadriga_graph::Tensor;
use quadriga_runtime::{
    BackendError, Buffer, Event, Layout, Program, Queue, Region, SliceSelection, check_range,
    copy_plain_slice,
};

use crate::buffer::{DeviceBuffer, HostPages, PinnedBuffer, device_address};
use crate::context::Context;
use crate::event::{CudaEvent, Recording};
use crate::faults::QueueFaults;
use crate::inner::BackendInner;
use crate::kernels::KernelFile;
use crate::launch::Launch;
use crate::lower::formats::pack_slice;
use crate::program::CudaProgram;
use crate::slices::{self, PinnedSource, SliceCopy, SliceMemory};
use crate::small_copies::{MAX_COPY_BYTES, SmallCopyBatch};
use crate::stream::CudaStream;

/// Bytes of the ring: a larger transfer is cut into parts of half of it.
const RING_BYTES: usize = 8 << 20;

pub(crate) struct CudaQueue {
    inner: Arc<BackendInner>,
    stream: CudaStream,
    /// The two halves of the ring, each with the event of its last use.
    ring: [(PinnedBuffer, CudaEvent); 2],
    /// Events between the parts of a transfer to the host.
    part_events: [CudaEvent; TRANSFER_PARTS],
    /// The half in use, and how many of its bytes are taken.
    half: usize,
    taken: usize,
    /// The recording that the stream waited for last: later work of the stream is ordered after it already.
    waited: Option<Recording>,
    small: SmallCopyBatch,
    faults: Arc<QueueFaults>,
}

/// Parts of a transfer to the host: the host takes one while the next is copied.
const TRANSFER_PARTS: usize = 4;
/// The fewest bytes of a part.
const MIN_PART_BYTES: usize = 16 << 10;

/// Bytes of the ring that one transfer has.
struct RingSlot {
    half: usize,
    offset: usize,
}

/// One end of a copy, by the kind of its memory.
enum Endpoint<'a> {
    Device(u64),
    /// Memory of another device that this one reaches.
    Peer(u64, &'a Context),
    Pinned(*mut u8),
    Pages(&'a HostPages),
    /// Pageable.
    Host(&'a dyn Buffer),
}

impl CudaQueue {
    pub(crate) fn new(inner: &Arc<BackendInner>) -> Result<CudaQueue, BackendError> {
        let half = || -> Result<_, BackendError> {
            Ok((PinnedBuffer::new(&inner.context, RING_BYTES / 2)?, CudaEvent::new(&inner.context, false)?))
        };
        let event = || CudaEvent::new(&inner.context, false);
        Ok(CudaQueue {
            inner: Arc::clone(inner),
            stream: CudaStream::new(&inner.context)?,
            ring: [half()?, half()?],
            part_events: [event()?, event()?, event()?, event()?],
            half: 0,
            taken: 0,
            waited: None,
            small: SmallCopyBatch::new(),
            faults: Arc::default(),
        })
    }

    fn endpoint<'a>(&self, region: &'a Region) -> Option<Endpoint<'a>> {
        let any = region.buffer.as_any();
        if let Some(device) = any.downcast_ref::<DeviceBuffer>() {
            let (own, address) = (&self.inner.context, device.address() + region.offset as u64);
            return match device.is_of(own) {
                true => Some(Endpoint::Device(address)),
                false => own.reaches(device.context()).then(|| Endpoint::Peer(address, device.context())),
            };
        }
        if let Some(pinned) = any.downcast_ref::<PinnedBuffer>() {
            // SAFETY: the region was checked to lie inside the buffer.
            return Some(Endpoint::Pinned(unsafe { pinned.address().add(region.offset) }));
        }
        if let Some(pages) = any.downcast_ref::<HostPages>() {
            return Some(Endpoint::Pages(pages));
        }
        if let Some(address) = self.inner.registered_address(region) {
            return Some(Endpoint::Pinned(address));
        }
        region.buffer.is_host().then_some(Endpoint::Host(&*region.buffer))
    }

    fn to_device(&self, to: u64, from: *const u8, bytes: usize) -> Result<(), BackendError> {
        // SAFETY: the target was checked to be inside a buffer; the source is pinned memory that stays until the
        // stream has passed this point: a half of the ring is reused only after its event, and the session holds
        // staging buffers and locked pages.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast::<c_void>(), bytes, self.stream.handle) };
        self.inner.context.check("cuMemcpyHtoDAsync", code)
    }

    fn to_host(&self, to: *mut u8, from: u64, bytes: usize) -> Result<(), BackendError> {
        // SAFETY: as in `to_device`, the other way round.
        let code = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast::<c_void>(), from, bytes, self.stream.handle) };
        self.inner.context.check("cuMemcpyDtoHAsync", code)
    }

    /// Launches the batched small copies.
    fn flush(&mut self) -> Result<(), BackendError> {
        let Some((copies, count)) = self.small.take() else { return Ok(()) };
        let function = self.inner.kernels.function(KernelFile::Elementwise, c"k_small_copies")?;
        let launch = Launch::new(function, [count, 1, 1], MAX_COPY_BYTES as u32).arg(*copies);
        let issued = launch.issue(&self.inner.context, self.stream.handle, false);
        self.small.release();
        issued
    }

    /// Batches a small copy from device memory to device memory or to memory that the driver allocated pinned; `false`
    /// if the copy is of another kind.
    fn batch(&mut self, from: &Region, to: &Region) -> Result<bool, BackendError> {
        let pinned = to.buffer.as_any().is::<PinnedBuffer>();
        let (source, target) = match (self.endpoint(from), self.endpoint(to)) {
            _ if from.bytes == 0 || from.bytes > MAX_COPY_BYTES => return Ok(false),
            (Some(Endpoint::Device(source)), Some(Endpoint::Device(target))) => (source, target),
            // With unified addressing, the device's address of this memory is the host's.
            (Some(Endpoint::Device(source)), Some(Endpoint::Pinned(target))) if pinned => {
                (source, target as u64)
            }
            _ => return Ok(false),
        };
        if !self.small.copy(target, source, from.bytes) {
            self.flush()?;
            if !self.small.copy(target, source, from.bytes) {
                return Ok(false);
            }
        }
        self.small.keep(&from.buffer);
        self.small.keep(&to.buffer);
        Ok(true)
    }

    /// A slot of at most half the ring. Small transfers share a half; only when it is full does the host wait for
    /// earlier use of the other.
    fn ring_slot(&mut self, bytes: usize) -> Result<RingSlot, BackendError> {
        if self.taken + bytes > RING_BYTES / 2 {
            if let Some((_, event)) = self.ring.get(self.half) {
                // SAFETY: event and stream are live.
                let code = unsafe { sys::cuEventRecord(event.handle(), self.stream.handle) };
                self.inner.context.check("cuEventRecord", code)?;
            }
            self.half ^= 1;
            self.taken = 0;
            if let Some((_, event)) = self.ring.get(self.half) {
                event.wait()?;
            }
        }
        let offset = self.taken;
        self.taken += bytes.next_multiple_of(256);
        Ok(RingSlot { half: self.half, offset })
    }

    /// Copies host bytes to the device through the ring, part by part; `fill` writes the bytes at an offset into a
    /// part.
    fn send(
        &mut self,
        to: u64,
        bytes: usize,
        mut fill: impl FnMut(usize, &mut [u8]) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        let mut done = 0;
        while done < bytes {
            let len = (bytes - done).min(RING_BYTES / 2);
            let slot = self.ring_slot(len)?;
            if let Some((buffer, _)) = self.ring.get(slot.half) {
                // SAFETY: the slot lies inside the half, no other transfer has it, and its last use is complete.
                let part = unsafe { std::slice::from_raw_parts_mut(buffer.address().add(slot.offset), len) };
                fill(done, part)?;
                self.to_device(to + done as u64, part.as_ptr(), len)?;
            }
            done += len;
        }
        Ok(())
    }

    /// Copies device bytes to the host through the ring; `drain` takes the part at an offset while later ones are in
    /// flight.
    fn fetch(
        &mut self,
        from: u64,
        bytes: usize,
        mut drain: impl FnMut(usize, &[u8]) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        let mut done = 0;
        while done < bytes {
            let len = (bytes - done).min(RING_BYTES / 2);
            let slot = self.ring_slot(len)?;
            let Some((buffer, _)) = self.ring.get(slot.half) else { return Ok(()) };
            // SAFETY: the slot lies inside the half.
            let address = unsafe { buffer.address().add(slot.offset) };
            let part = len.div_ceil(TRANSFER_PARTS).next_multiple_of(MIN_PART_BYTES);
            for (event, at) in self.part_events.iter().zip((0..len).step_by(part)) {
                let bytes = part.min(len - at);
                // SAFETY: the part lies inside the slot.
                self.to_host(unsafe { address.add(at) }, from + (done + at) as u64, bytes)?;
                // SAFETY: event and stream are live.
                let code = unsafe { sys::cuEventRecord(event.handle(), self.stream.handle) };
                self.inner.context.check("cuEventRecord", code)?;
            }
            for (event, at) in self.part_events.iter().zip((0..len).step_by(part)) {
                let bytes = part.min(len - at);
                event.wait()?;
                // SAFETY: the copy into this part of the slot is complete, and no other transfer has it.
                drain(done + at, unsafe { std::slice::from_raw_parts(address.add(at), bytes) })?;
            }
            done += len;
        }
        Ok(())
    }

    /// Copies page-locked host bytes to the device; through the ring where they could not be locked.
    fn send_pages(
        &mut self,
        pages: &HostPages,
        offset: usize,
        bytes: usize,
        to: u64,
    ) -> Result<(), BackendError> {
        let pinned = pages.pinned(offset..offset + bytes);
        if pinned.is_empty() {
            return self.send(to, bytes, |at, part| pages.read(offset + at, part));
        }
        for (part, from) in pinned {
            self.to_device(to + (part.start - offset) as u64, from, part.len())?;
        }
        Ok(())
    }

    /// Where a weight is in pinned memory that kernels can read.
    fn pinned_source(&self, from: &Region) -> Option<PinnedSource> {
        match self.endpoint(from)? {
            Endpoint::Pinned(address) => {
                Some(PinnedSource::whole(slices::device_pointer(address)?, from.bytes))
            }
            Endpoint::Pages(pages) if from.offset == 0 => {
                let (border, [before, locked, after]) = pages.pinned_spans()?;
                let [first, last] = border;
                // The driver maps addresses that are inside of the memory.
                let edges = slices::device_pointer(before)?;
                let locked = slices::device_pointer(locked.wrapping_add(first))?.wrapping_sub(first as u64);
                let after = edges.wrapping_sub((before.addr().wrapping_sub(after.addr())) as u64);
                Some(PinnedSource { border: [first as u64, last as u64], address: [edges, locked, after] })
            }
            _ => None,
        }
    }

    /// What the queue remembers of a copy of slices, made at first use, and whether slices are prefetched. `None` if the
    /// kernel cannot copy them.
    fn slice_memory<'s>(
        &self,
        from: &Region,
        places: (u64, u64),
        selection: &'s mut SliceSelection,
    ) -> Result<Option<(&'s SliceMemory, bool)>, BackendError> {
        let Some(source) = self.pinned_source(from) else { return Ok(None) };
        let Some(copy) = SliceCopy::new(selection, source, places) else { return Ok(None) };
        let known = selection.memory.as_ref().and_then(|memory| memory.downcast_ref::<SliceMemory>());
        if !known.is_some_and(|memory| memory.is_of(&copy)) {
            selection.prefetched = false;
            selection.memory = None;
            let memory = SliceMemory::new(&self.inner.context, copy)?;
            selection.memory = Some(Box::new(memory) as Box<dyn Any + Send>);
        }
        let memory = selection.memory.as_ref().and_then(|memory| memory.downcast_ref());
        Ok(memory.map(|memory| (memory, selection.prefetched)))
    }

    /// Checks both ends and the indices of a copy of slices; the addresses of the indices and of the copy.
    fn slice_places(
        &self,
        from: &Region,
        to: &Region,
        selection: &SliceSelection,
    ) -> Result<(u64, u64), BackendError> {
        let context = &self.inner.context;
        check_range(&*from.buffer, from.offset, from.bytes)?;
        slices::check_sizes(&context.name, selection, (from.bytes, to.bytes))?;
        Ok((device_address(context, &selection.ids)?, device_address(context, to)?))
    }

    /// Waits for all work in the stream, and takes its faults.
    fn settle(&self) -> Result<(), BackendError> {
        self.stream.synchronize()?;
        self.faults.take(self.faults.runs())
    }

    fn foreign(&self, what: &'static str) -> BackendError {
        BackendError::Foreign { backend: self.inner.context.name.clone(), what }
    }
}

impl Queue for CudaQueue {
    fn write(&mut self, to: &Region, bytes: &[u8]) -> Result<(), BackendError> {
        check_range(&*to.buffer, to.offset, bytes.len())?;
        self.inner.context.bind()?;
        match self.endpoint(to) {
            Some(Endpoint::Device(address)) => {
                let mut batched = self.small.write(address, bytes);
                if !batched {
                    self.flush()?;
                    batched = self.small.write(address, bytes);
                }
                if batched {
                    self.small.keep(&to.buffer);
                    return Ok(());
                }
                self.send(address, bytes.len(), |at, part| {
                    part.copy_from_slice(bytes.get(at..at + part.len()).unwrap_or_default());
                    Ok(())
                })
            }
            None | Some(Endpoint::Peer(..)) => Err(self.foreign("buffer")),
            Some(_) => to.buffer.write(to.offset, bytes),
        }
    }

    fn read(&mut self, from: &Region, into: &mut [u8]) -> Result<(), BackendError> {
        check_range(&*from.buffer, from.offset, into.len())?;
        self.inner.context.bind()?;
        self.flush()?;
        match self.endpoint(from) {
            Some(Endpoint::Device(address)) => self.fetch(address, into.len(), |at, part| {
                into.get_mut(at..at + part.len()).unwrap_or_default().copy_from_slice(part);
                Ok(())
            }),
            None | Some(Endpoint::Peer(..)) => Err(self.foreign("buffer")),
            Some(_) => {
                self.synchronize()?;
                from.buffer.read(from.offset, into)
            }
        }
    }

    fn copy(&mut self, from: &Region, to: &Region) -> Result<bool, BackendError> {
        if from.bytes != to.bytes {
            return Err(BackendError::SizeMismatch {
                backend: self.inner.context.name.clone(),
                from: from.bytes,
                to: to.bytes,
            });
        }
        check_range(&*from.buffer, from.offset, from.bytes)?;
        check_range(&*to.buffer, to.offset, to.bytes)?;
        self.inner.context.bind()?;
        if self.batch(from, to)? {
            return Ok(true);
        }
        self.flush()?;
        let (Some(source), Some(target)) = (self.endpoint(from), self.endpoint(to)) else { return Ok(false) };
        let bytes = from.bytes;
        if bytes == 0 {
            return Ok(true);
        }
        match (source, target) {
            (Endpoint::Device(source), Endpoint::Device(target)) => {
                // SAFETY: both ranges were checked to lie inside their buffers.
                let code = unsafe { sys::cuMemcpyDtoDAsync_v2(target, source, bytes, self.stream.handle) };
                self.inner.context.check("cuMemcpyDtoDAsync", code)?;
            }
            (Endpoint::Peer(source, peer), Endpoint::Device(target)) => {
                let own = &self.inner.context;
                // SAFETY: both ranges were checked to lie inside their buffers, which the session holds.
                unsafe { own.copy_between((target, own), (source, peer), bytes, self.stream.handle)? };
            }
            (Endpoint::Device(source), Endpoint::Peer(target, peer)) => {
                let own = &self.inner.context;
                // SAFETY: as above.
                unsafe { own.copy_between((target, peer), (source, own), bytes, self.stream.handle)? };
            }
            (Endpoint::Pinned(source), Endpoint::Device(target)) => self.to_device(target, source, bytes)?,
            (Endpoint::Device(source), Endpoint::Pinned(target)) => self.to_host(target, source, bytes)?,
            (Endpoint::Pages(source), Endpoint::Device(target)) => {
                self.send_pages(source, from.offset, bytes, target)?;
            }
            (Endpoint::Host(source), Endpoint::Device(target)) => {
                self.send(target, bytes, |at, part| source.read(from.offset + at, part))?;
            }
            (Endpoint::Device(source), Endpoint::Host(target)) => {
                self.fetch(source, bytes, |at, part| target.write(to.offset + at, part))?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn copy_slices(
        &mut self,
        from: &Region,
        to: &Region,
        selection: &mut SliceSelection,
    ) -> Result<bool, BackendError> {
        let places = self.slice_places(from, to, selection)?;
        self.inner.context.bind()?;
        self.flush()?;
        if let Some((memory, prefetched)) = self.slice_memory(from, places, selection)? {
            memory.issue(&self.inner, self.stream.handle, (false, prefetched))?;
            return Ok(true);
        }
        if selection.layout == Layout::Plain {
            return self.copy(from, to);
        }
        let (inner, stream) = (Arc::clone(&self.inner), self.stream.handle);
        let (_, target) = places;
        slices::pack_by_slabs(&inner, stream, &selection.weight, target, |offset, slab| {
            match self.copy(&from.part(offset, slab.bytes)?, slab)? {
                true => Ok(()),
                false => Err(self.foreign("buffer")),
            }
        })?;
        Ok(true)
    }

    fn prefetch_slices(
        &mut self,
        from: &Region,
        to: &Region,
        selection: &mut SliceSelection,
    ) -> Result<bool, BackendError> {
        let places = self.slice_places(from, to, selection)?;
        self.inner.context.bind()?;
        self.flush()?;
        let Some((memory, _)) = self.slice_memory(from, places, selection)? else { return Ok(false) };
        memory.issue(&self.inner, self.stream.handle, (true, false)).map(|()| true)
    }

    fn selected_slices(&mut self, selection: &SliceSelection) -> Result<Option<Vec<bool>>, BackendError> {
        let memory = selection.memory.as_ref().and_then(|memory| memory.downcast_ref::<SliceMemory>());
        memory.map(SliceMemory::selected).transpose()
    }

    fn load_slice(
        &mut self,
        weight: &Tensor,
        layout: Layout,
        index: usize,
        from: &Region,
        to: &Region,
    ) -> Result<(), BackendError> {
        if layout == Layout::Plain {
            return copy_plain_slice(self, index, from, to);
        }
        self.inner.context.bind()?;
        self.flush()?;
        let launch = pack_slice(&self.inner, weight, index, from, to)?;
        launch.issue(&self.inner.context, self.stream.handle, false)
    }

    fn run(&mut self, program: &mut dyn Program) -> Result<(), BackendError> {
        self.inner.context.bind()?;
        self.flush()?;
        match program.as_any().downcast_mut::<CudaProgram>() {
            Some(program) if program.is_of(&self.inner) => {
                self.faults.add_run(program.faults());
                program.launch(self.stream.handle)
            }
            _ => Err(self.foreign("program")),
        }
    }

    fn record(&mut self, event: &dyn Event) -> Result<(), BackendError> {
        self.inner.context.bind()?;
        self.flush()?;
        match event.as_any().downcast_ref::<CudaEvent>() {
            Some(event) if event.is_of(&self.inner.context) => {
                // SAFETY: event and stream are live.
                let code = unsafe { sys::cuEventRecord(event.handle(), self.stream.handle) };
                self.inner.context.check("cuEventRecord", code)?;
                event.set_recorded(&self.faults);
                Ok(())
            }
            _ => Err(self.foreign("event")),
        }
    }

    fn wait(&mut self, event: &dyn Event) -> Result<(), BackendError> {
        self.inner.context.bind()?;
        match event.as_any().downcast_ref::<CudaEvent>() {
            Some(event) if self.waited == Some(event.recording()) => Ok(()),
            Some(event) => {
                let recording = event.recording();
                if let Some(other) = event.queue_faults() {
                    self.faults.add_wait(&other);
                }
                // SAFETY: event and stream are live; events of another context of this driver may be waited for.
                let code = unsafe { sys::cuStreamWaitEvent(self.stream.handle, event.handle(), 0) };
                self.inner.context.check("cuStreamWaitEvent", code)?;
                self.waited = Some(recording);
                Ok(())
            }
            None => event.wait(),
        }
    }

    fn synchronize(&mut self) -> Result<(), BackendError> {
        self.inner.context.bind()?;
        self.flush()?;
        self.settle()
    }
}
