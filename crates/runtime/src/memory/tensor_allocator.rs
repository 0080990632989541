//! An allocator for single tensors in one buffer, when there is no graph to plan: best fit over a free list.
//!
//! It makes its decisions one tensor at a time, as ggml's tensor allocator does. For a whole graph a
//! [`Planner`](super::Planner) knows all lifetimes beforehand and needs less memory.
//!
//! ```
//! use quadriga_graph::{DType, GraphBuilder};
//! use quadriga_runtime::memory::TensorAllocator;
//! use quadriga_runtime::{Backend, Usage};
//! use std::sync::Arc;
//!
//! let g = GraphBuilder::new();
//! let x = g.input("x", DType::F32, [100]);
//! g.output("y", x.sqr());
//! let graph = g.finish()?;
//! let (x, y) = (&graph[graph.leaf("x").unwrap()], &graph[graph.output("y").unwrap()]);
//!
//! // Without memory: how large must the buffer be?
//! let cpu: Arc<dyn Backend> = Arc::new(quadriga_cpu::Backend::new()?);
//! let mut measuring = TensorAllocator::measuring_for(&cpu)?;
//! measuring.allocate("x", x)?;
//! measuring.allocate("y", y)?;
//!
//! // The same decisions in a buffer of that size.
//! let mut allocator = TensorAllocator::on(&cpu, measuring.high_water(), Usage::Compute)?;
//! let x_memory = allocator.allocate("x", x)?;
//! let y_memory = allocator.allocate("y", y)?;
//! assert!(y_memory.region().is_some_and(|region| region.offset >= 400));
//! allocator.free(&x_memory)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use quadriga_graph::Tensor;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::free_list::{FreeBlock, FreeList};
use super::placed_tensor::PlacedTensor;
use crate::byte_text::byte_text;
use crate::{Backend, BackendError, Buffer, Region, Usage};

/// Tells allocators apart.
static NEXT_ALLOCATOR: AtomicU64 = AtomicU64::new(0);

/// The memory of one tensor in a [`TensorAllocator`]. Dropping it frees nothing; see [`TensorAllocator::free`].
#[derive(Clone, Debug)]
pub struct TensorAllocation {
    /// Bytes from the start of the buffer.
    pub offset: u64,
    /// Bytes taken: the backend's [`storage_bytes`](Backend::storage_bytes), rounded up to the alignment.
    pub bytes: u64,
    region: Option<Region>,
    allocator: u64,
    /// Counted up by the allocator, also across resets.
    serial: u64,
}

impl TensorAllocation {
    /// The tensor's bytes in the allocator's buffer; `None` if the allocator only measures.
    pub fn region(&self) -> Option<&Region> {
        self.region.as_ref()
    }
}

/// A tensor that was live at the high-water mark.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveTensor {
    /// Its name, of any length.
    pub name: String,
    /// Bytes from the start of the buffer.
    pub offset: u64,
    /// Bytes taken, padding included.
    pub bytes: u64,
}

/// Why a tensor could not be allocated or freed. The allocator is as it was before the call.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AllocatorError {
    /// An alignment of 0, or not a power of two.
    #[error("alignment {0} is not a power of two")]
    Alignment(usize),
    /// The buffer belongs to another backend than the one whose hooks are to be called.
    #[error("the buffer belongs to {owner}, not to {backend}")]
    ForeignBuffer {
        /// The backend that owns the buffer.
        owner: String,
        /// The backend that was given.
        backend: String,
    },
    /// No free block is large enough.
    #[error(
        "{name} needs {}, but the largest free block has {} ({} of {} are free): enlarge the buffer",
        byte_text(*.wanted), byte_text(*.largest), byte_text(*.free), byte_text(*.capacity)
    )]
    OutOfMemory {
        /// The tensor.
        name: String,
        /// Bytes needed, padding included.
        wanted: u64,
        /// Bytes of the largest free block.
        largest: u64,
        /// Bytes of all free blocks.
        free: u64,
        /// Bytes of the buffer from its first aligned address on.
        capacity: u64,
    },
    /// A size that cannot be rounded up to the alignment.
    #[error("{name} has {bytes} bytes, which cannot be rounded up to a multiple of {alignment}")]
    TooLarge {
        /// The tensor.
        name: String,
        /// Its bytes.
        bytes: u64,
        /// The alignment.
        alignment: u64,
    },
    /// The allocation was freed before, by itself or by a reset.
    #[error("the {bytes} bytes at offset {offset} have been freed already")]
    NotAllocated {
        /// Offset of the allocation.
        offset: u64,
        /// Bytes of the allocation.
        bytes: u64,
    },
    /// The backend refused the buffer or the tensor.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

/// The memory of an allocator.
#[derive(Debug)]
enum AllocatorMemory {
    Buffer {
        backend: Arc<dyn Backend>,
        buffer: Arc<dyn Buffer>,
    },
    /// Nothing; the backend, if there is one, decides how many bytes a tensor takes.
    Measuring(Option<Arc<dyn Backend>>),
}

/// A tensor that is allocated now.
#[derive(Debug)]
struct LiveAllocation {
    name: String,
    range: FreeBlock,
    /// Absent while measuring.
    placed: Option<PlacedTensor>,
}

/// Allocates tensors one at a time in one buffer.
///
/// A tensor takes the backend's [`storage_bytes`](Backend::storage_bytes), rounded up to the alignment. The smallest
/// free block that is large enough is taken from, the last one only if no other fits; a freed block merges with its
/// neighbours. Neither the number of free blocks nor the length of names is limited. Views need no allocation: they lie
/// in their source's.
///
/// [`Backend::placed`] is called for every tensor that gets memory, [`Backend::released`] when it is freed, at a reset,
/// and when the allocator is dropped; neither while measuring.
///
/// Sessions plan whole graphs instead; this is for callers that place tensors themselves:
///
/// ```
/// use quadriga_graph::{DType, GraphBuilder};
/// use quadriga_runtime::memory::TensorAllocator;
/// use quadriga_runtime::{Backend, Usage};
///
/// let g = GraphBuilder::new();
/// let x = g.input("x", DType::F32, [4]);
/// g.output("y", x.sqr());
/// let graph = g.finish()?;
///
/// // Measure first: the same decisions without memory.
/// let cpu: std::sync::Arc<dyn Backend> = std::sync::Arc::new(quadriga_cpu::Backend::new()?);
/// let mut measured = TensorAllocator::measuring_for(&cpu)?;
/// for id in graph.tensor_ids() {
///     measured.allocate(&graph.name(id), &graph[id])?;
/// }
///
/// // Then a buffer of exactly that size.
/// let mut allocator = TensorAllocator::on(&cpu, measured.high_water(), Usage::Compute)?;
/// let x = allocator.allocate("x", &graph[graph.leaf("x").unwrap()])?;
/// let region = x.region().unwrap();
/// region.buffer.write(region.offset, &[1; 16])?;
/// assert_eq!(region.buffer.backend(), "cpu");
/// assert!(allocator.free(&x)?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct TensorAllocator {
    id: u64,
    next_serial: u64,
    alignment: u64,
    /// The address space from the first aligned address on.
    whole: FreeBlock,
    free_list: FreeList,
    /// By serial number.
    live: BTreeMap<u64, LiveAllocation>,
    used: u64,
    high_water: u64,
    listing: Option<Vec<LiveTensor>>,
    memory: AllocatorMemory,
}

impl TensorAllocator {
    /// An allocator in a buffer of `backend`, be it allocated or wrapped around existing memory.
    ///
    /// Allocation starts at the first aligned address of the buffer; a buffer that ends before it has no room.
    pub fn over(
        backend: &Arc<dyn Backend>,
        buffer: Arc<dyn Buffer>,
    ) -> Result<TensorAllocator, AllocatorError> {
        if buffer.backend() != backend.name() {
            let (owner, backend) = (buffer.backend().to_owned(), backend.name().to_owned());
            return Err(AllocatorError::ForeignBuffer { owner, backend });
        }
        let base = buffer.address();
        let (size, alignment) = (buffer.bytes() as u64, backend.memory().alignment);
        TensorAllocator::new(
            base,
            size,
            alignment,
            AllocatorMemory::Buffer { backend: Arc::clone(backend), buffer },
        )
    }

    /// An allocator in a new buffer of `bytes` bytes.
    pub fn on(
        backend: &Arc<dyn Backend>,
        bytes: u64,
        usage: Usage,
    ) -> Result<TensorAllocator, AllocatorError> {
        let buffer = backend.allocate(usize::try_from(bytes).unwrap_or(usize::MAX), usage)?;
        TensorAllocator::over(backend, buffer)
    }

    /// An allocator without memory, for tensors that take their own bytes: it makes the same decisions as one with
    /// memory, and its [high-water mark](TensorAllocator::high_water) is the size of the buffer to allocate.
    pub fn measuring(alignment: usize) -> Result<TensorAllocator, AllocatorError> {
        TensorAllocator::new(0, u64::MAX, alignment, AllocatorMemory::Measuring(None))
    }

    /// As [`TensorAllocator::measuring`], with the alignment and the padding of a backend.
    pub fn measuring_for(backend: &Arc<dyn Backend>) -> Result<TensorAllocator, AllocatorError> {
        let alignment = backend.memory().alignment;
        TensorAllocator::new(0, u64::MAX, alignment, AllocatorMemory::Measuring(Some(Arc::clone(backend))))
    }

    fn new(
        base: u64,
        size: u64,
        alignment: usize,
        memory: AllocatorMemory,
    ) -> Result<TensorAllocator, AllocatorError> {
        if !alignment.is_power_of_two() {
            return Err(AllocatorError::Alignment(alignment));
        }
        let alignment = alignment as u64;
        let gap = base.wrapping_neg() & (alignment - 1);
        let mut allocator = TensorAllocator {
            id: NEXT_ALLOCATOR.fetch_add(1, Ordering::Relaxed),
            next_serial: 0,
            alignment,
            whole: FreeBlock { offset: gap.min(size), size: size.saturating_sub(gap) },
            free_list: FreeList::default(),
            live: BTreeMap::new(),
            used: 0,
            high_water: 0,
            listing: None,
            memory,
        };
        allocator.reset();
        Ok(allocator)
    }

    /// Lists, from now on, the live tensors at each new high-water mark.
    pub fn with_listing(mut self) -> TensorAllocator {
        self.listing = Some(Vec::new());
        self
    }

    /// The buffer; `None` while measuring.
    pub fn buffer(&self) -> Option<&Arc<dyn Buffer>> {
        match &self.memory {
            AllocatorMemory::Buffer { buffer, .. } => Some(buffer),
            AllocatorMemory::Measuring(_) => None,
        }
    }

    /// The alignment of all allocations.
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// The highest end of an allocation since the last reset, in bytes from the start of the buffer.
    pub fn high_water(&self) -> u64 {
        self.high_water
    }

    /// The tensors that were live at the high-water mark, by address; empty without
    /// [`with_listing`](TensorAllocator::with_listing).
    pub fn live_at_high_water(&self) -> &[LiveTensor] {
        self.listing.as_deref().unwrap_or_default()
    }

    /// Bytes that are allocated now.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// The free blocks by address, as (offset, bytes).
    pub fn free_blocks(&self) -> Vec<(u64, u64)> {
        let mut blocks = Vec::new();
        self.free_list.for_each(|block| blocks.push((block.offset, block.size)));
        blocks
    }

    /// Allocates a tensor; `name` is for messages and the listing.
    ///
    /// A tensor without bytes takes none: it gets an offset inside the buffer, or at its end.
    pub fn allocate(&mut self, name: &str, tensor: &Tensor) -> Result<TensorAllocation, AllocatorError> {
        let needed = self.storage_bytes(tensor);
        let bytes = needed.checked_next_multiple_of(self.alignment).ok_or_else(|| {
            AllocatorError::TooLarge { name: name.to_owned(), bytes: needed, alignment: self.alignment }
        })?;
        let offset = match bytes {
            0 => self.free_list.best_fit(0).map(|block| block.offset).or(Some(self.whole.offset)),
            bytes => self.free_list.allocate(bytes),
        };
        let offset = offset.ok_or_else(|| self.out_of_memory(name, bytes))?;
        let range = FreeBlock { offset, size: bytes };
        let placed = match self.place(tensor, offset) {
            Ok(placed) => placed,
            Err(error) => {
                self.give_back(range);
                return Err(error.into());
            }
        };
        let serial = self.next_serial;
        self.next_serial += 1;
        self.used += bytes;
        let region = placed.as_ref().map(|placed| placed.region().clone());
        self.live.insert(serial, LiveAllocation { name: name.to_owned(), range, placed });
        if range.end() > self.high_water {
            self.high_water = range.end();
            self.list_live();
        }
        Ok(TensorAllocation { offset, bytes, region, allocator: self.id, serial })
    }

    /// Frees a tensor's memory. The allocation of another allocator is ignored, and the answer is false.
    pub fn free(&mut self, allocation: &TensorAllocation) -> Result<bool, AllocatorError> {
        if allocation.allocator != self.id {
            return Ok(false);
        }
        let Some(live) = self.live.remove(&allocation.serial) else {
            let (offset, bytes) = (allocation.offset, allocation.bytes);
            return Err(AllocatorError::NotAllocated { offset, bytes });
        };
        drop(live.placed);
        self.used -= live.range.size;
        self.give_back(live.range);
        Ok(true)
    }

    /// Frees all tensors and forgets the high-water mark.
    pub fn reset(&mut self) {
        self.live.clear();
        self.free_list.reset(self.whole);
        self.used = 0;
        self.high_water = 0;
        if let Some(listing) = &mut self.listing {
            listing.clear();
        }
    }

    /// Bytes of a tensor's storage, padded by the backend.
    fn storage_bytes(&self, tensor: &Tensor) -> u64 {
        let padded = match &self.memory {
            AllocatorMemory::Buffer { backend, .. } | AllocatorMemory::Measuring(Some(backend)) => {
                backend.storage_bytes(tensor)
            }
            AllocatorMemory::Measuring(None) => 0,
        };
        padded.max(tensor.bytes()) as u64
    }

    /// Tells the backend where a tensor is; `None` while measuring.
    fn place(&self, tensor: &Tensor, offset: u64) -> Result<Option<PlacedTensor>, BackendError> {
        let AllocatorMemory::Buffer { backend, buffer } = &self.memory else { return Ok(None) };
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        let region = Region::new(Arc::clone(buffer), offset, tensor.bytes())?;
        PlacedTensor::new(backend, tensor, region).map(Some)
    }

    fn give_back(&mut self, range: FreeBlock) {
        if range.size > 0 {
            self.free_list.free(range);
        }
    }

    fn list_live(&mut self) {
        let Some(listing) = &mut self.listing else { return };
        listing.clear();
        listing.extend(self.live.values().map(|live| LiveTensor {
            name: live.name.clone(),
            offset: live.range.offset,
            bytes: live.range.size,
        }));
        listing.sort_by_key(|tensor| tensor.offset);
    }

    fn out_of_memory(&self, name: &str, wanted: u64) -> AllocatorError {
        let (mut largest, mut free) = (0, 0);
        self.free_list.for_each(|block| {
            largest = block.size.max(largest);
            free += block.size;
        });
        let capacity = self.whole.size;
        AllocatorError::OutOfMemory { name: name.to_owned(), wanted, largest, free, capacity }
    }
}
