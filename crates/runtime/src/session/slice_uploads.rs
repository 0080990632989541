//! Slices of weights that are copied to a device while it computes: experts of a mixture that move to it.
//!
//! An upload has a queue of its own and goes to staging memory, so that neither a run nor [`Session::wait`](crate::Session::wait) waits for it.
//! Once it has arrived, the device writes it into the weight between two runs, in the order of its compute queue: no run
//! sees half of a slice. Staging memory is used again as soon as the device has taken the bytes out of it.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use quadriga_graph::Data;

use super::lane::Lane;
use crate::weights::{ResidentWeight, SessionWeights};
use crate::{Backend, BackendError, Buffer, Event, Queue, Region, RuntimeError, Usage};

/// The bytes of uploads to a device that are in flight at a time, unless [`Session::limit_uploads`](crate::Session::limit_uploads) says
/// otherwise: what a link of 16 GB/s carries in 2 ms.
pub const DEFAULT_UPLOAD_BYTES: u64 = 32 << 20;

/// Slices begin at multiples of this in staging memory.
const SLICE_ALIGNMENT: usize = 256;

/// New bytes for one slice of a weight along its first dimension.
#[derive(Clone, Debug)]
pub struct WeightSlice<'a> {
    /// The name of the weight, which has no data of its own.
    pub weight: &'a str,
    /// Which slice.
    pub index: usize,
    /// What has the new bytes, as a file would have them.
    pub data: &'a Data,
    /// Where they are in it.
    pub range: Range<usize>,
}

/// Identifies an upload of a session.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SliceUpload(u64);

/// All uploads of a session.
pub(crate) struct SliceUploads {
    /// The most bytes of staging memory on a device, unless one upload needs more.
    limit: u64,
    /// The number of uploads so far.
    count: u64,
    /// By backend: where uploads are enqueued.
    queues: HashMap<usize, Box<dyn Queue>>,
    in_flight: VecDeque<Upload>,
    /// Staging memory that is not in use.
    free: Vec<Staging>,
    /// What slices were taken from, by backend and address: locked for the device once.
    sources: HashMap<(usize, usize, usize), (Data, Region)>,
}

/// An upload that is in flight.
struct Upload {
    id: SliceUpload,
    staging: Staging,
    parts: Vec<Part>,
}

/// A slice of an upload, and where it is in staging memory.
struct Part {
    weight: Arc<ResidentWeight>,
    index: usize,
    staged: Region,
}

struct Staging {
    backend: usize,
    buffer: Arc<dyn Buffer>,
    /// The bytes of the latest upload have arrived in it.
    arrived: Arc<dyn Event>,
    /// The device has taken the bytes of the previous upload out of it.
    taken: Arc<dyn Event>,
}

impl Default for SliceUploads {
    fn default() -> SliceUploads {
        SliceUploads {
            limit: DEFAULT_UPLOAD_BYTES,
            count: 0,
            queues: HashMap::new(),
            in_flight: VecDeque::new(),
            free: Vec::new(),
            sources: HashMap::new(),
        }
    }
}

impl SliceUploads {
    pub(super) fn limit(&mut self, bytes: u64) {
        self.limit = bytes;
    }

    pub(super) fn start(
        &mut self,
        weights: &SessionWeights,
        lanes: &[Lane],
        slices: &[WeightSlice<'_>],
    ) -> Result<Option<SliceUpload>, RuntimeError> {
        if slices.is_empty() {
            return Ok(None);
        }
        let mut found: Vec<(usize, Arc<ResidentWeight>)> = Vec::with_capacity(slices.len());
        for slice in slices {
            let (backend, weight) = weights.to_upload(slice.weight)?;
            check(slice, &weight)?;
            if found.first().is_some_and(|(first, _)| *first != backend) {
                let expected = "on the backend of the other slices' weights";
                return Err(RuntimeError::WrongKind { name: slice.weight.to_owned(), expected });
            }
            found.push((backend, weight));
        }
        let number = found.first().map_or(0, |(backend, _)| *backend);
        let backend = &lanes.get(number).ok_or(RuntimeError::NoBackends)?.backend;
        let bytes = slices.iter().map(|slice| slice.range.len().next_multiple_of(SLICE_ALIGNMENT)).sum();
        let staging = self.staging(number, backend, bytes).map_err(RuntimeError::device)?;
        let Some(staging) = staging else { return Ok(None) };
        match self.enqueue(number, backend, &staging, slices, found) {
            Ok(parts) => {
                self.count += 1;
                let id = SliceUpload(self.count);
                self.in_flight.push_back(Upload { id, staging, parts });
                Ok(Some(id))
            }
            Err(error) => {
                self.reset(number);
                Err(RuntimeError::device(error))
            }
        }
    }

    /// Staging memory of at least so many bytes; `None` if that would be more than the limit. What is larger than the limit has
    /// staging memory while there is no other.
    fn staging(
        &mut self,
        number: usize,
        backend: &Arc<dyn Backend>,
        bytes: usize,
    ) -> Result<Option<Staging>, BackendError> {
        let own = self.free.iter().enumerate().filter(|(_, staging)| staging.backend == number);
        let fitting = own.filter(|(_, staging)| staging.buffer.bytes() >= bytes);
        if let Some((at, _)) = fitting.min_by_key(|(_, staging)| staging.buffer.bytes()) {
            return Ok(Some(self.free.swap_remove(at)));
        }
        if !self.has_room(number, bytes) {
            // Pieces that are too small make way, once the device has taken the bytes out of them.
            self.free
                .retain(|staging| staging.backend != number || matches!(staging.taken.is_done(), Ok(false)));
            if !self.has_room(number, bytes) {
                return Ok(None);
            }
        }
        let buffer = backend.allocate(bytes, Usage::Weights)?;
        let (arrived, taken) = (backend.event(false)?, backend.event(false)?);
        Ok(Some(Staging { backend: number, buffer, arrived, taken }))
    }

    /// Whether so many bytes of staging memory may be added on a device.
    fn has_room(&self, number: usize, bytes: usize) -> bool {
        let all = self.in_flight.iter().map(|upload| &upload.staging).chain(&self.free);
        let own = all.filter(|staging| staging.backend == number);
        let used: u64 = own.map(|staging| staging.buffer.bytes() as u64).sum();
        used == 0 || used.saturating_add(bytes as u64) <= self.limit
    }

    fn enqueue(
        &mut self,
        number: usize,
        backend: &Arc<dyn Backend>,
        staging: &Staging,
        slices: &[WeightSlice<'_>],
        weights: Vec<(usize, Arc<ResidentWeight>)>,
    ) -> Result<Vec<Part>, BackendError> {
        let queue = match self.queues.entry(number) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(backend.queue()?),
        };
        queue.wait(&*staging.taken)?;
        let mut parts = Vec::with_capacity(slices.len());
        let mut offset = 0;
        for (slice, (_, weight)) in slices.iter().zip(weights) {
            let WeightSlice { data, range, index, .. } = slice;
            let to = Region::new(Arc::clone(&staging.buffer), offset, range.len())?;
            offset += range.len().next_multiple_of(SLICE_ALIGNMENT);
            let address = data.as_slice().map_or(0, |bytes| bytes.as_ptr().addr());
            let source = match self.sources.entry((number, address, data.len())) {
                Entry::Occupied(known) => Some(known.into_mut()),
                Entry::Vacant(new) => match backend.map(data) {
                    Some(buffer) => {
                        let whole = Region::new(buffer, 0, data.len())?;
                        Some(new.insert(((*data).clone(), whole)))
                    }
                    None => None,
                },
            };
            let copied = match source {
                Some((_, whole)) => queue.copy(&whole.part(range.start, range.len())?, &to)?,
                None => false,
            };
            if !copied {
                let bytes = data.bytes();
                queue.write(&to, bytes.get(range.clone()).unwrap_or_default())?;
            }
            parts.push(Part { weight, index: *index, staged: to });
        }
        queue.record(&*staging.arrived)?;
        Ok(parts)
    }

    pub(super) fn apply(
        &mut self,
        lanes: &mut [Lane],
        all: bool,
    ) -> Vec<(SliceUpload, Result<(), RuntimeError>)> {
        let mut done = Vec::new();
        while let Some(upload) = self.in_flight.front() {
            let arrived = &upload.staging.arrived;
            let arrived = if all { arrived.wait().map(|()| true) } else { arrived.is_done() };
            if matches!(arrived, Ok(false)) {
                break;
            }
            let Some(upload) = self.in_flight.pop_front() else { break };
            let (id, backend) = (upload.id, upload.staging.backend);
            let written = arrived.and_then(|_| match lanes.get_mut(backend) {
                Some(lane) => write(lane, &upload),
                None => Ok(()),
            });
            if written.is_err() {
                self.reset(backend);
            } else {
                self.free.push(upload.staging);
            }
            done.push((id, written.map_err(RuntimeError::device)));
        }
        done
    }

    /// After an error: takes the report out of the queue. What it was copying may still be written, so staging memory that
    /// was in use is not used again.
    fn reset(&mut self, backend: usize) {
        if let Some(queue) = self.queues.get_mut(&backend) {
            let _ = queue.synchronize();
        }
    }

    /// Waits for everything that is in flight, and forgets it.
    pub(crate) fn finish(&mut self) {
        self.queues.values_mut().for_each(|queue| drop(queue.synchronize()));
        self.in_flight.clear();
    }
}

/// Lets a device write an upload into its weights, after all runs that were started.
fn write(lane: &mut Lane, upload: &Upload) -> Result<(), BackendError> {
    lane.compute.wait(&*upload.staging.arrived)?;
    for Part { weight, index, staged } in &upload.parts {
        weight.write_slice(&mut *lane.compute, *index, staged)?;
    }
    lane.compute.record(&*upload.staging.taken)
}

/// An error unless the slice exists and the bytes are as many as it has.
fn check(slice: &WeightSlice<'_>, weight: &ResidentWeight) -> Result<(), RuntimeError> {
    let name = || slice.weight.to_owned();
    let (count, expected) = weight.slices();
    if slice.index >= count {
        return Err(RuntimeError::Slice { name: name(), index: slice.index, count });
    }
    let found = if slice.range.end <= slice.data.len() { slice.range.len() } else { 0 };
    if found != expected {
        return Err(RuntimeError::WrongSize { name: name(), expected, found });
    }
    Ok(())
}
