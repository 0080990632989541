//! A queue: a stream, and a ring of pinned memory that host bytes pass through.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys;
use quadriga_runtime::{BackendError, Buffer, Event, Program, Queue, Region, check_range};

use crate::backend::Shared;
use crate::buffer::{DeviceBuffer, HostPages, PinnedBuffer};
use crate::event::CudaEvent;
use crate::kernels::File;
use crate::launch::Launch;
use crate::program::{CudaProgram, Stream};
use crate::small::{SMALL, SmallMoves};

/// Bytes of the ring: larger transfers go in pieces of half of it.
const RING: usize = 8 << 20;

pub(crate) struct CudaQueue {
    shared: Arc<Shared>,
    stream: Stream,
    /// Two halves, each with the event of its last use.
    ring: [(PinnedBuffer, CudaEvent); 2],
    /// Marks in a transfer to the host, between its pieces.
    marks: [CudaEvent; PIECES],
    /// The half in use, and how much of it is taken.
    turn: usize,
    taken: usize,
    /// The recording of an event that was waited for last: what comes later is behind it already.
    waited: Option<(usize, u64)>,
    small: SmallMoves,
}

/// Pieces of a transfer to the host, each taken while the next one travels; and the least bytes of one.
const PIECES: usize = 4;
const LEAST_PIECE: usize = 16 << 10;

/// Room in the ring.
struct Room {
    half: usize,
    at: usize,
}

/// One side of a copy.
enum Side<'a> {
    Device(u64),
    Pinned(*mut u8),
    Pages(&'a HostPages),
    Host(&'a dyn Buffer),
}

impl CudaQueue {
    pub(crate) fn new(shared: &Arc<Shared>) -> Result<CudaQueue, BackendError> {
        let half = || -> Result<_, BackendError> {
            Ok((
                PinnedBuffer::new(&shared.context, RING / 2)?,
                CudaEvent::new(&shared.context, &shared.faults, false)?,
            ))
        };
        let mark = || CudaEvent::new(&shared.context, &shared.faults, false);
        Ok(CudaQueue {
            shared: Arc::clone(shared),
            stream: Stream::new(shared)?,
            ring: [half()?, half()?],
            marks: [mark()?, mark()?, mark()?, mark()?],
            turn: 0,
            taken: 0,
            waited: None,
            small: SmallMoves::new(),
        })
    }

    fn side<'a>(&self, region: &'a Region) -> Option<Side<'a>> {
        let any = region.buffer.as_any();
        if let Some(device) = any.downcast_ref::<DeviceBuffer>() {
            return device
                .is_of(&self.shared.context)
                .then(|| Side::Device(device.address() + region.offset as u64));
        }
        if let Some(pinned) = any.downcast_ref::<PinnedBuffer>() {
            // SAFETY: the region was checked to lie inside the buffer.
            return Some(Side::Pinned(unsafe { pinned.address().add(region.offset) }));
        }
        if let Some(pages) = any.downcast_ref::<HostPages>() {
            return Some(Side::Pages(pages));
        }
        if let Some(address) = self.shared.locked(&*region.buffer) {
            // SAFETY: the region was checked to lie inside the buffer.
            return Some(Side::Pinned(unsafe { address.add(region.offset) }));
        }
        region.buffer.is_host().then_some(Side::Host(&*region.buffer))
    }

    fn to_device(&self, to: u64, from: *const u8, bytes: usize) -> Result<(), BackendError> {
        // SAFETY: the target was checked to be inside a buffer; the source is pinned memory that stays until the
        // stream has passed: the ring's halves wait for their events, staging buffers and locked pages are held by the
        // session.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast::<c_void>(), bytes, self.stream.handle) };
        self.shared.context.check("cuMemcpyHtoDAsync", code)
    }

    fn to_host(&self, to: *mut u8, from: u64, bytes: usize) -> Result<(), BackendError> {
        // SAFETY: as in `to_device`, the other way round.
        let code = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast::<c_void>(), from, bytes, self.stream.handle) };
        self.shared.context.check("cuMemcpyDtoHAsync", code)
    }

    /// Makes the small moves that are waiting.
    fn flush(&mut self) -> Result<(), BackendError> {
        let Some((moves, count)) = self.small.take() else { return Ok(()) };
        let function = self.shared.kernels.function(File::Elementwise, c"k_move")?;
        let launch = Launch::new(function, [count, 1, 1], SMALL as u32).arg(*moves);
        launch.issue(&self.shared.context, self.stream.handle, false)
    }

    /// Keeps a small copy for later, from the device to itself or to memory that the driver pinned; `false` if it is
    /// none.
    fn postpone(&mut self, from: &Region, to: &Region) -> Result<bool, BackendError> {
        let pinned = to.buffer.as_any().is::<PinnedBuffer>();
        let (source, target) = match (self.side(from), self.side(to)) {
            _ if from.bytes == 0 || from.bytes > SMALL => return Ok(false),
            (Some(Side::Device(source)), Some(Side::Device(target))) => (source, target),
            // The device addresses such memory as the host does.
            (Some(Side::Device(source)), Some(Side::Pinned(target))) if pinned => (source, target as u64),
            _ => return Ok(false),
        };
        if self.small.copy(target, source, from.bytes) {
            return Ok(true);
        }
        self.flush()?;
        Ok(self.small.copy(target, source, from.bytes))
    }

    /// Room for at most half the ring. Small pieces lie side by side; the host waits for earlier use only when a half
    /// is full.
    fn room(&mut self, bytes: usize) -> Result<Room, BackendError> {
        if self.taken + bytes > RING / 2 {
            if let Some((_, event)) = self.ring.get(self.turn) {
                // SAFETY: event and stream are live.
                let code = unsafe { sys::cuEventRecord(event.handle(), self.stream.handle) };
                self.shared.context.check("cuEventRecord", code)?;
            }
            self.turn ^= 1;
            self.taken = 0;
            if let Some((_, event)) = self.ring.get(self.turn) {
                event.wait()?;
            }
        }
        let at = self.taken;
        self.taken += bytes.next_multiple_of(256);
        Ok(Room { half: self.turn, at })
    }

    /// Sends host bytes through the ring, piece by piece; `fill` puts the bytes at an offset into a piece.
    fn send(
        &mut self,
        to: u64,
        bytes: usize,
        mut fill: impl FnMut(usize, &mut [u8]) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        let mut done = 0;
        while done < bytes {
            let len = (bytes - done).min(RING / 2);
            let room = self.room(len)?;
            if let Some((buffer, _)) = self.ring.get(room.half) {
                // SAFETY: the room lies inside the half, nobody else has it, and its last use is over.
                let piece = unsafe { std::slice::from_raw_parts_mut(buffer.address().add(room.at), len) };
                fill(done, piece)?;
                self.to_device(to + done as u64, piece.as_ptr(), len)?;
            }
            done += len;
        }
        Ok(())
    }

    /// Fetches device bytes through the ring; `drain` takes a piece for an offset, while those behind it are on their
    /// way.
    fn fetch(
        &mut self,
        from: u64,
        bytes: usize,
        mut drain: impl FnMut(usize, &[u8]) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        let mut done = 0;
        while done < bytes {
            let len = (bytes - done).min(RING / 2);
            let room = self.room(len)?;
            let Some((buffer, _)) = self.ring.get(room.half) else { return Ok(()) };
            // SAFETY: the room lies inside the half.
            let address = unsafe { buffer.address().add(room.at) };
            let piece = len.div_ceil(PIECES).next_multiple_of(LEAST_PIECE);
            for (mark, at) in self.marks.iter().zip((0..len).step_by(piece)) {
                let bytes = piece.min(len - at);
                // SAFETY: the piece lies inside the room.
                self.to_host(unsafe { address.add(at) }, from + (done + at) as u64, bytes)?;
                // SAFETY: event and stream are live.
                let code = unsafe { sys::cuEventRecord(mark.handle(), self.stream.handle) };
                self.shared.context.check("cuEventRecord", code)?;
            }
            for (mark, at) in self.marks.iter().zip((0..len).step_by(piece)) {
                let bytes = piece.min(len - at);
                mark.wait()?;
                // SAFETY: the copy into this piece of the room is over, and nobody else has it.
                drain(done + at, unsafe { std::slice::from_raw_parts(address.add(at), bytes) })?;
            }
            done += len;
        }
        Ok(())
    }

    /// Fetches locked host memory, or sends it through the ring where it could not be locked.
    fn fetch_pages(
        &mut self,
        pages: &HostPages,
        offset: usize,
        bytes: usize,
        to: u64,
    ) -> Result<(), BackendError> {
        let pinned = pages.pinned(offset..offset + bytes);
        if pinned.is_empty() {
            return self.send(to, bytes, |at, piece| pages.read(offset + at, piece));
        }
        for (part, from) in pinned {
            self.to_device(to + (part.start - offset) as u64, from, part.len())?;
        }
        Ok(())
    }

    /// Waits for everything in the stream.
    fn settle(&self) -> Result<(), BackendError> {
        // SAFETY: the stream is live.
        let code = unsafe { sys::cuStreamSynchronize(self.stream.handle) };
        self.shared.context.check("cuStreamSynchronize", code)?;
        self.shared.faults.take(&self.shared.context.name)
    }

    fn foreign(&self, what: &'static str) -> BackendError {
        BackendError::Foreign { backend: self.shared.context.name.clone(), what }
    }
}

impl Queue for CudaQueue {
    fn write(&mut self, to: &Region, bytes: &[u8]) -> Result<(), BackendError> {
        check_range(&*to.buffer, to.offset, bytes.len())?;
        self.shared.context.bind()?;
        match self.side(to) {
            Some(Side::Device(address)) => {
                if self.small.write(address, bytes) {
                    return Ok(());
                }
                self.flush()?;
                if self.small.write(address, bytes) {
                    return Ok(());
                }
                self.send(address, bytes.len(), |at, piece| {
                    piece.copy_from_slice(bytes.get(at..at + piece.len()).unwrap_or_default());
                    Ok(())
                })
            }
            Some(_) => to.buffer.write(to.offset, bytes),
            None => Err(self.foreign("buffer")),
        }
    }

    fn read(&mut self, from: &Region, into: &mut [u8]) -> Result<(), BackendError> {
        check_range(&*from.buffer, from.offset, into.len())?;
        self.shared.context.bind()?;
        self.flush()?;
        match self.side(from) {
            Some(Side::Device(address)) => self.fetch(address, into.len(), |at, piece| {
                into.get_mut(at..at + piece.len()).unwrap_or_default().copy_from_slice(piece);
                Ok(())
            }),
            Some(_) => {
                self.synchronize()?;
                from.buffer.read(from.offset, into)
            }
            None => Err(self.foreign("buffer")),
        }
    }

    fn copy(&mut self, from: &Region, to: &Region) -> Result<bool, BackendError> {
        if from.bytes != to.bytes {
            return Err(BackendError::SizeMismatch {
                backend: self.shared.context.name.clone(),
                from: from.bytes,
                to: to.bytes,
            });
        }
        check_range(&*from.buffer, from.offset, from.bytes)?;
        check_range(&*to.buffer, to.offset, to.bytes)?;
        self.shared.context.bind()?;
        if self.postpone(from, to)? {
            return Ok(true);
        }
        self.flush()?;
        let (Some(source), Some(target)) = (self.side(from), self.side(to)) else { return Ok(false) };
        let bytes = from.bytes;
        if bytes == 0 {
            return Ok(true);
        }
        match (source, target) {
            (Side::Device(source), Side::Device(target)) => {
                // SAFETY: both ranges were checked to lie inside their buffers.
                let code = unsafe { sys::cuMemcpyDtoDAsync_v2(target, source, bytes, self.stream.handle) };
                self.shared.context.check("cuMemcpyDtoDAsync", code)?;
            }
            (Side::Pinned(source), Side::Device(target)) => self.to_device(target, source, bytes)?,
            (Side::Device(source), Side::Pinned(target)) => self.to_host(target, source, bytes)?,
            (Side::Pages(source), Side::Device(target)) => {
                self.fetch_pages(source, from.offset, bytes, target)?;
            }
            (Side::Host(source), Side::Device(target)) => {
                self.send(target, bytes, |at, piece| source.read(from.offset + at, piece))?;
            }
            (Side::Device(source), Side::Host(target)) => {
                self.fetch(source, bytes, |at, piece| target.write(to.offset + at, piece))?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn run(&mut self, program: &mut dyn Program) -> Result<(), BackendError> {
        self.shared.context.bind()?;
        self.flush()?;
        match program.as_any().downcast_mut::<CudaProgram>() {
            Some(program) if program.is_of(&self.shared) => program.launch(self.stream.handle),
            _ => Err(self.foreign("program")),
        }
    }

    fn record(&mut self, event: &dyn Event) -> Result<(), BackendError> {
        self.shared.context.bind()?;
        self.flush()?;
        match event.as_any().downcast_ref::<CudaEvent>() {
            Some(event) if event.is_of(&self.shared.context) => {
                event.count();
                // SAFETY: event and stream are live.
                let code = unsafe { sys::cuEventRecord(event.handle(), self.stream.handle) };
                self.shared.context.check("cuEventRecord", code)
            }
            _ => Err(self.foreign("event")),
        }
    }

    fn wait(&mut self, event: &dyn Event) -> Result<(), BackendError> {
        self.shared.context.bind()?;
        match event.as_any().downcast_ref::<CudaEvent>() {
            Some(event) if self.waited == Some(event.recording()) => Ok(()),
            Some(event) => {
                self.waited = Some(event.recording());
                // SAFETY: event and stream are live; events of another context of this driver may be waited for.
                let code = unsafe { sys::cuStreamWaitEvent(self.stream.handle, event.handle(), 0) };
                self.shared.context.check("cuStreamWaitEvent", code)
            }
            None => event.wait(),
        }
    }

    fn synchronize(&mut self) -> Result<(), BackendError> {
        self.shared.context.bind()?;
        self.flush()?;
        self.settle()
    }
}
