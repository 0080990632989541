//! Matmuls with packed weights: one step prepares (quantizes) the activations, the next multiplies them with every weight
//! that shares them.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

use quadriga_graph::DType;

use super::activation_source::ActivationSource;
use super::operand::PackedWeight;
use crate::isa::Isa;
use crate::kernels::KernelError;
use crate::kernels::matmul::{self, ActivationFormat, Activations, Input, InputType, Output};
use crate::partition::Partition;
use crate::pool::Worker;
use crate::step::{Access, Kernel, StepPart, TINY, TeamError, TeamKernel, WorkMemory};
use crate::view::TensorView;

/// The most matmuls of one step.
pub(crate) const MAX_MATMULS: usize = 8;

/// Columns of several chunks whose epilogues are deferred together, at most.
const DEFERRED_COLUMNS: usize = 64;

/// Activations in memory: rows at equal distances.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct ActivationMatrix {
    pub(super) pointer: *const u8,
    pub(super) element: InputType,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) row_bytes: usize,
}

impl ActivationMatrix {
    /// All rows of a tensor, if they are at equal distances.
    pub(super) fn of(view: &TensorView) -> Option<ActivationMatrix> {
        let [d0, d1, d2, columns] = view.dims;
        let [s0, s1, s2, _] = view.strides;
        // The distance between rows is the stride of the innermost dimension with more than one.
        let (mut rows, mut row_bytes) = (1, s2);
        for (extent, stride) in [(d2, s2), (d1, s1), (d0, s0)] {
            if extent == 1 {
                continue;
            }
            if rows == 1 {
                row_bytes = stride;
            } else if stride != rows * row_bytes {
                return None;
            }
            rows *= extent;
        }
        ActivationMatrix::new(view, [0; 3], rows, row_bytes, columns)
    }

    /// Rows and columns.
    pub(super) fn extents(&self) -> (usize, usize) {
        (self.rows, self.columns)
    }

    /// The rows of one matrix of a tensor.
    pub(super) fn at(view: &TensorView, i0: usize, i1: usize) -> Option<ActivationMatrix> {
        ActivationMatrix::new(view, [i0, i1, 0], view.dims[2], view.strides[2], view.cols())
    }

    /// Rows of a tensor at equal distances, from a place on.
    pub(super) fn new(
        view: &TensorView,
        place: [usize; 3],
        rows: usize,
        row_bytes: usize,
        columns: usize,
    ) -> Option<ActivationMatrix> {
        let element = match view.dtype {
            DType::F32 => InputType::F32,
            DType::F16 => InputType::F16,
            _ => return None,
        };
        Some(ActivationMatrix { pointer: view.row_pointer(place)?, element, rows, columns, row_bytes })
    }

    /// # Safety
    /// The invariant of the tensor's [`TensorView`] holds, and no thread writes to the tensor.
    pub(super) unsafe fn input<'a>(&self) -> Input<'a> {
        // SAFETY: promised by the caller.
        unsafe { Input::from_raw(self.pointer, self.element, self.rows, self.columns, self.row_bytes) }
    }
}

/// Work memory that a matmul needs.
#[derive(Clone, Copy)]
pub(crate) struct WorkMemoryNeed {
    pub(super) isa: Isa,
    pub(super) dtype: DType,
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Whether every thread has its own copy of the activations.
    pub(super) private: bool,
}

impl WorkMemoryNeed {
    /// Bytes for a number of threads.
    pub(crate) fn bytes(&self, threads: usize) -> Result<usize, KernelError> {
        if self.private {
            let [floats, prepared] = self.private_bytes()?;
            let too_large = KernelError::TooLarge { rows: self.rows, columns: self.columns };
            return floats.checked_add(prepared).and_then(|each| each.checked_mul(threads)).ok_or(too_large);
        }
        Activations::work_bytes(self.isa, self.dtype, self.rows, self.columns, threads)
    }

    /// Bytes of one thread's activations as f32, and of the prepared activations with scratch memory.
    fn private_bytes(&self) -> Result<[usize; 2], KernelError> {
        let (rows, columns) = (self.rows, self.columns);
        let aligned = |bytes: usize| bytes.checked_next_multiple_of(64);
        let floats = rows.checked_mul(columns).and_then(|count| aligned(count.checked_mul(4)?));
        let prepared = aligned(Activations::work_bytes(self.isa, self.dtype, rows, columns, 1)?);
        floats.zip(prepared).map(<[usize; 2]>::from).ok_or(KernelError::TooLarge { rows, columns })
    }
}

/// A matmul of activations with one packed matrix.
pub(crate) struct PackedMatMul {
    x: ActivationMatrix,
    x_view: TensorView,
    packed: PackedWeight,
    out: *mut f32,
    isa: Isa,
    format: ActivationFormat,
    /// Whether every thread prepares its own copy of the activations.
    private: bool,
    /// The fused prologue that computes the activations, if they are not `x` in memory.
    source: Option<Arc<ActivationSource>>,
    accesses: Vec<Access>,
    name: usize,
}

// SAFETY: addresses and numbers; the invariant of `TensorView` says when they may be used.
unsafe impl Send for PackedMatMul {}
// SAFETY: as above.
unsafe impl Sync for PackedMatMul {}

/// Whether activations are so few that every thread prepares its own copy.
pub(crate) fn is_small(rows: usize, columns: usize) -> bool {
    rows <= 1 || rows.saturating_mul(columns) <= TINY
}

impl PackedMatMul {
    /// A matmul that writes its result at `out`.
    #[expect(clippy::too_many_arguments, reason = "all that a matmul consists of")]
    pub(super) fn new(
        x: ActivationMatrix,
        x_view: TensorView,
        packed: PackedWeight,
        out: *mut f32,
        isa: Isa,
        format: ActivationFormat,
        private: bool,
        source: Option<Arc<ActivationSource>>,
        accesses: Vec<Access>,
    ) -> PackedMatMul {
        PackedMatMul { x, x_view, packed, out, isa, format, private, source, accesses, name: 0 }
    }

    pub(crate) fn set_name(&mut self, name: usize) {
        self.name = name;
    }

    /// Indices of the names of its nodes.
    pub(crate) fn names(&self) -> impl Iterator<Item = usize> {
        let fused = self.source.iter().flat_map(|source| source.names.iter().copied());
        fused.chain(std::iter::once(self.name))
    }

    /// Whether every thread prepares its own copy of the activations.
    pub(crate) fn is_private(&self) -> bool {
        self.private
    }

    /// Work memory that it needs.
    pub(crate) fn work_need(&self) -> WorkMemoryNeed {
        let dtype = self.packed.layout.dtype();
        let private = self.private;
        WorkMemoryNeed { isa: self.isa, dtype, rows: self.x.rows, columns: self.x.columns, private }
    }

    fn activations(&self, work: WorkMemory) -> Result<Activations<'static>, KernelError> {
        self.check_work(work)?;
        // SAFETY: the work memory is long enough, zeroed when allocated, and used for these activations alone in the
        // step that prepares them and in the next, which multiplies them.
        unsafe {
            Activations::from_raw(
                self.isa,
                self.packed.layout.dtype(),
                self.x.rows,
                self.x.columns,
                work.threads,
                work.pointer,
            )
        }
    }

    fn check_work(&self, work: WorkMemory) -> Result<(), KernelError> {
        let needs = self.work_need().bytes(work.threads)?;
        if work.bytes < needs {
            return Err(KernelError::Short { what: "work memory", has: work.bytes, needs });
        }
        Ok(())
    }

    /// This thread's own copy of the activations.
    fn own_activations(
        &self,
        worker: &Worker<'_>,
        work: WorkMemory,
    ) -> Result<Activations<'static>, KernelError> {
        self.check_work(work)?;
        if worker.index() >= work.threads {
            let (has, needs) = (work.threads, worker.index() + 1);
            return Err(KernelError::Short { what: "threads that the work memory is for", has, needs });
        }
        let need = self.work_need();
        let [floats_bytes, prepared_bytes] = need.private_bytes()?;
        let ActivationMatrix { rows, columns, .. } = self.x;
        let floats = work.pointer.wrapping_add(worker.index() * (floats_bytes + prepared_bytes));
        // SAFETY: the work memory is long enough, and each thread has an equal part of it for itself; the inputs were
        // written before the last barrier, and fusion has checked that this step does not write them.
        unsafe {
            let prepared = floats.wrapping_add(floats_bytes);
            let own = Activations::private(self.isa, need.dtype, rows, columns, prepared)?;
            let input = match &self.source {
                None => self.x.input(),
                Some(source) => {
                    source.fill(self.isa, rows, columns, floats.cast());
                    Input::from_raw(floats, InputType::F32, rows, columns, columns * 4)
                }
            };
            own.prepare_rows(0..rows, &input);
            Ok(own)
        }
    }

    /// The part that prepares the activations.
    pub(crate) fn preparation(&self) -> StepPart {
        let units = self.x.rows;
        let mut accesses = vec![Access::reads_own(&self.x_view, Partition::equal(units))];
        if self.x_view.rows() != units {
            accesses = vec![Access::reads(&self.x_view)];
        }
        let kernel = PrepareKernel(PackedMatMul { accesses: Vec::new(), source: None, ..*self });
        let mut part = StepPart::new(kernel, units, units * self.x.columns, accesses);
        part.grain = self.format.row_granularity();
        part.name = self.name;
        part.label = "prepare";
        part
    }
}

impl StepMatMul for PackedMatMul {
    const SMALL_EPILOGUES: bool = true;

    fn accesses(&self) -> &[Access] {
        &self.accesses
    }

    fn extent(&self) -> [usize; 2] {
        [self.x.rows, self.packed.layout.rows()]
    }

    fn shares_activations(&self, other: &PackedMatMul) -> bool {
        let tensor = |product: &PackedMatMul| product.source.as_ref().map(|source| source.tensor);
        self.x == other.x && self.format == other.format && tensor(self) == tensor(other)
    }

    fn own_bytes(&self) -> usize {
        let source = self.source.as_ref().map_or(0, |source| size_of_val(&**source));
        source + self.accesses.capacity() * size_of::<Access>()
    }
}

struct PrepareKernel(PackedMatMul);

impl Kernel for PrepareKernel {
    fn run(&self, units: Range<usize>, work: WorkMemory) -> Result<(), String> {
        let activations = self.0.activations(work).map_err(|error| error.to_string())?;
        // SAFETY: the program holds the buffer, and no part that runs at the same time uses these rows, of either matrix;
        // parts are cut at multiples of the row granularity.
        unsafe { activations.prepare_rows(units, &self.0.x.input()) };
        Ok(())
    }
}

/// A matmul that can be one of several in a step.
pub(crate) trait StepMatMul {
    /// Whether only small operations may be epilogues. Where a thread runs an epilogue on few rows at a time, any may.
    const SMALL_EPILOGUES: bool;

    /// The memory that it reads and writes.
    fn accesses(&self) -> &[Access];

    /// Rows and columns of the result.
    fn extent(&self) -> [usize; 2];

    /// Whether two matmuls can use the same prepared activations.
    fn shares_activations(&self, other: &Self) -> bool;

    /// Bytes of host memory that it points to.
    fn own_bytes(&self) -> usize;
}

/// Matmuls of the same activations, with their fused epilogues.
pub(crate) struct MatMulStep<M> {
    /// At most [`MAX_MATMULS`].
    pub(crate) matmuls: Vec<M>,
    /// Elementwise parts that run on the columns of a matmul (by index) as soon as they are computed, in this order.
    pub(crate) epilogues: Vec<(usize, StepPart)>,
    /// Whether a thread computes the same columns of all matmuls, which have equally many.
    pub(crate) together: bool,
}

impl<M: StepMatMul> MatMulStep<M> {
    /// A step of one matmul.
    pub(crate) fn new(matmul: M) -> MatMulStep<M> {
        MatMulStep { matmuls: vec![matmul], epilogues: Vec::new(), together: false }
    }

    /// The memory that the matmuls and their epilogues read and write.
    pub(crate) fn accesses(&self) -> impl Iterator<Item = &Access> {
        let matmuls = self.matmuls.iter().flat_map(StepMatMul::accesses);
        matmuls.chain(self.epilogues.iter().flat_map(|(_, part)| &part.accesses))
    }

    /// The epilogues that run as soon as their columns are computed, and those that run later: a deferrable one and all after
    /// it. They are epilogues of one matmul.
    fn split_epilogues(&self) -> [&[(usize, StepPart)]; 2] {
        let first = self.epilogues.iter().position(|(_, part)| part.deferrable);
        let (prompt, deferred) = self.epilogues.split_at(first.unwrap_or(self.epilogues.len()));
        match deferred {
            [(matmul, _), rest @ ..] if rest.iter().any(|(other, _)| other != matmul) => {
                [&self.epilogues, &[]]
            }
            _ => [prompt, deferred],
        }
    }

    /// Bytes of host memory that it points to.
    pub(super) fn fused_bytes(&self) -> usize {
        self.matmuls.capacity() * size_of::<M>()
            + self.matmuls.iter().map(StepMatMul::own_bytes).sum::<usize>()
            + self.epilogues.capacity() * size_of::<(usize, StepPart)>()
            + self.epilogues.iter().map(|(_, part)| part.own_bytes()).sum::<usize>()
    }
}

/// Columns of a matmul whose deferred epilogues have not run yet, each range from its start to its end.
#[derive(Clone, Copy, Default)]
struct DeferredColumns {
    /// Those of earlier chunks: what epilogues read for them is prefetched.
    prefetched: (usize, usize),
    /// Those of the latest chunk, which are about to be stored.
    computed: (usize, usize),
}

impl DeferredColumns {
    /// Whether the columns of the latest chunk can run together with those of earlier ones.
    fn is_one_range(&self) -> bool {
        let ((start, end), (first, last)) = (self.prefetched, self.computed);
        end == first && last - start <= DEFERRED_COLUMNS
    }

    /// The columns when those that cannot wait have run, and another chunk is computed.
    fn after(&self, next: &Range<usize>) -> DeferredColumns {
        let start = if self.is_one_range() { self.prefetched.0 } else { self.computed.0 };
        DeferredColumns { prefetched: (start, self.computed.1), computed: (next.start, next.end) }
    }
}

impl TeamKernel for MatMulStep<PackedMatMul> {
    fn own_bytes(&self) -> usize {
        self.fused_bytes()
    }

    fn prefetch(&self, worker: &Worker<'_>) {
        let Some(first) = self.matmuls.first().filter(|first| first.x.rows == 1) else { return };
        let matrices = self.matmuls.iter().map(|product| {
            // SAFETY: the program holds the buffer of the weights, which are never written.
            (&product.packed.layout, unsafe { product.packed.bytes() })
        });
        matmul::prefetch_first(worker, first.format, matrices, self.together);
    }

    fn run(&self, worker: &Worker<'_>, work: WorkMemory) -> Result<(), TeamError> {
        let (Some(first), Some(last)) = (self.matmuls.first(), self.matmuls.last()) else { return Ok(()) };
        let activations =
            if first.private { first.own_activations(worker, work)? } else { first.activations(work)? };
        let outputs: [Output<'_>; MAX_MATMULS] = std::array::from_fn(|i| {
            let product = self.matmuls.get(i).unwrap_or(last);
            let columns = product.packed.layout.rows();
            // SAFETY: the result is a contiguous tensor of these rows and columns in a buffer that the program
            // holds for writing, and no other matmul or step writes it before the next barrier.
            unsafe { Output::from_raw(product.out, product.x.rows, columns, columns) }
        });
        let products: [matmul::Matmul<'_>; MAX_MATMULS] = std::array::from_fn(|i| {
            let product = self.matmuls.get(i).unwrap_or(last);
            matmul::Matmul {
                layout: &product.packed.layout,
                // SAFETY: the program holds the buffer of the weights, which are never written.
                packed: unsafe { product.packed.bytes() },
                output: outputs.get(i).unwrap_or(&outputs[0]),
                first_row: 0,
            }
        });
        let products = products.get(..self.matmuls.len()).unwrap_or(&products);
        let failure = Cell::new(Ok(()));
        let run_block = |part: &StepPart, columns: Range<usize>| {
            if let Err(reason) = part.kernel.run_block(0..first.x.rows, columns) {
                failure.set(Err(TeamError::Data(reason)));
            }
        };
        let [prompt, late] = self.split_epilogues();
        let late_matmul = late.first().map(|(number, _)| *number);
        let deferred = Cell::new(DeferredColumns::default());
        let run_late = |(start, end): (usize, usize)| {
            late.iter().filter(|_| start < end).for_each(|(_, part)| run_block(part, start..end));
        };
        let prefetch_late = |(start, end): (usize, usize)| {
            for (_, part) in late.iter().filter(|_| start < end) {
                part.kernel.prefetch_block(0..first.x.rows, start..end);
            }
        };
        let epilogue = |product: usize, columns: Range<usize>| {
            for (_, part) in prompt.iter().filter(|(number, _)| *number == product) {
                run_block(part, columns.clone());
            }
            if late_matmul == Some(product) {
                let earlier = deferred.get();
                prefetch_late(earlier.computed);
                if !earlier.is_one_range() {
                    run_late(earlier.prefetched);
                }
                deferred.set(earlier.after(&columns));
            }
        };
        // SAFETY: all threads of the run execute this step, with a barrier before and after it; the previous step has
        // prepared the activations, or this thread has prepared its own.
        unsafe { matmul::multiply_fused(worker, &activations, products, self.together, epilogue)? };
        let DeferredColumns { prefetched, computed } = deferred.get();
        prefetch_late(computed);
        run_late(prefetched);
        run_late(computed);
        failure.into_inner()
    }
}
