//! Products with packed weights: the activations are prepared in one step and multiplied in the next, together with
//! every other product of the same activations.

use std::ops::Range;
use std::sync::Arc;

use quadriga_graph::DType;

use super::source::Source;
use super::{Context, Operand, Packed};
use crate::fuse::Item;
use crate::isa::Isa;
use crate::kernels::KernelError;
use crate::kernels::matmul::{self, ActivationFormat, Activations, Input, InputType, Output};
use crate::partition::Partition;
use crate::pool::Worker;
use crate::step::{Access, Kernel, Part, TINY, Team, TeamError, Work};
use crate::view::View;

/// The most products that share one step.
pub(crate) const MOST: usize = 8;

/// Rows of activations in memory.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Matrix {
    pub(super) pointer: *const u8,
    pub(super) element: InputType,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) row_bytes: usize,
}

impl Matrix {
    /// All rows of a tensor, if they are equally far apart.
    pub(super) fn of(view: &View) -> Option<Matrix> {
        let [d0, d1, d2, columns] = view.dims;
        let [s0, s1, s2, _] = view.strides;
        // The distance between rows is that of the innermost dimension that has more than one.
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
        Matrix::new(view, [0; 3], rows, row_bytes, columns)
    }

    /// The rows of one matrix of a tensor.
    fn at(view: &View, i0: usize, i1: usize) -> Option<Matrix> {
        Matrix::new(view, [i0, i1, 0], view.dims[2], view.strides[2], view.cols())
    }

    /// Rows of a tensor, equally far apart, from a place on.
    pub(super) fn new(
        view: &View,
        place: [usize; 3],
        rows: usize,
        row_bytes: usize,
        columns: usize,
    ) -> Option<Matrix> {
        let element = match view.dtype {
            DType::F32 => InputType::F32,
            DType::F16 => InputType::F16,
            _ => return None,
        };
        Some(Matrix { pointer: view.row_pointer(place)?, element, rows, columns, row_bytes })
    }

    /// # Safety
    /// The invariant of the [`View`] that the matrix is of holds, and nobody writes to it.
    pub(super) unsafe fn input<'a>(&self) -> Input<'a> {
        // SAFETY: promised by the caller.
        unsafe { Input::from_raw(self.pointer, self.element, self.rows, self.columns, self.row_bytes) }
    }
}

/// Work memory of a product.
#[derive(Clone, Copy)]
pub(crate) struct WorkNeed {
    pub(super) isa: Isa,
    pub(super) dtype: DType,
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Whether every thread has activations of its own.
    pub(super) private: bool,
}

impl WorkNeed {
    /// Bytes for a number of threads.
    pub(crate) fn bytes(&self, threads: usize) -> Result<usize, KernelError> {
        if self.private {
            let [floats, prepared] = self.private_bytes()?;
            let too_large = KernelError::TooLarge { rows: self.rows, columns: self.columns };
            return floats.checked_add(prepared).and_then(|each| each.checked_mul(threads)).ok_or(too_large);
        }
        Activations::work_bytes(self.isa, self.dtype, self.rows, self.columns, threads)
    }

    /// Bytes of one thread's activations as floats, and as prepared, with scratch memory.
    fn private_bytes(&self) -> Result<[usize; 2], KernelError> {
        let (rows, columns) = (self.rows, self.columns);
        let aligned = |bytes: usize| bytes.checked_next_multiple_of(64);
        let floats = rows.checked_mul(columns).and_then(|count| aligned(count.checked_mul(4)?));
        let prepared = aligned(Activations::work_bytes(self.isa, self.dtype, rows, columns, 1)?);
        floats.zip(prepared).map(<[usize; 2]>::from).ok_or(KernelError::TooLarge { rows, columns })
    }
}

/// A product of activations with one packed matrix.
pub(crate) struct Product {
    x: Matrix,
    x_view: View,
    packed: Packed,
    out: *mut f32,
    isa: Isa,
    form: ActivationFormat,
    /// Whether every thread prepares the activations for itself.
    private: bool,
    /// How they come about, where they are not `x` in memory.
    source: Option<Arc<Source>>,
    accesses: Vec<Access>,
    name: usize,
}

// SAFETY: addresses and numbers; the invariant of `View` says when they may be used.
unsafe impl Send for Product {}
// SAFETY: as above.
unsafe impl Sync for Product {}

/// Adds the products of a `mul_mat` with packed weights.
pub(super) fn mul_mat(
    w: &Operand,
    packed: Packed,
    x: &View,
    out: &View,
    context: &Context<'_>,
    items: &mut Vec<Item>,
) -> Result<(), String> {
    let mut add = |matrix: Option<Matrix>, packed: Packed, place: [usize; 3]| {
        let (Some(matrix), Some(target)) = (matrix, out.row_pointer(place)) else {
            return Err("its activations cannot be read as a matrix".to_owned());
        };
        let form = ActivationFormat::choose(context.isa, w.view.dtype, matrix.rows)
            .map_err(|error| error.to_string())?;
        let source = context.source.clone();
        let mut accesses = vec![Access::writes(out), Access::range(packed.range(), false)];
        match &source {
            None => accesses.push(Access::reads(x)),
            Some(source) => accesses.extend(source.recipe.inputs().map(Access::reads)),
        }
        items.push(Item::Product(Product {
            private: context.fuse && is_small(matrix.rows, matrix.columns),
            x: matrix,
            x_view: *x,
            packed,
            out: target.cast(),
            isa: context.isa,
            form,
            source,
            accesses,
            name: 0,
        }));
        Ok(())
    };
    let [wb, wh, ..] = w.view.dims;
    let [b, h, ..] = x.dims;
    if let (1, 1, Some(matrix)) = (wb, wh, Matrix::of(x)) {
        return add(Some(matrix), packed, [0; 3]);
    }
    for i0 in 0..b {
        for i1 in 0..h {
            let (w0, w1) = (i0 / (b / wb.max(1)).max(1), i1 / (h / wh.max(1)).max(1));
            add(Matrix::at(x, i0, i1), packed.matrix(w0 * wh + w1)?, [i0, i1, 0])?;
        }
    }
    Ok(())
}

/// Whether activations are so few that threads had better not share the work of preparing them.
pub(crate) fn is_small(rows: usize, columns: usize) -> bool {
    rows <= 1 || rows.saturating_mul(columns) <= TINY
}

impl Product {
    pub(crate) fn set_name(&mut self, name: usize) {
        self.name = name;
    }

    /// Indices of the names of the nodes that are computed.
    pub(crate) fn names(&self) -> impl Iterator<Item = usize> {
        let fused = self.source.iter().flat_map(|source| source.names.iter().copied());
        fused.chain(std::iter::once(self.name))
    }

    /// Whether every thread prepares the activations for itself.
    pub(crate) fn is_private(&self) -> bool {
        self.private
    }

    /// Rows and columns of the result.
    pub(crate) fn extent(&self) -> [usize; 2] {
        [self.x.rows, self.packed.layout.rows()]
    }

    pub(crate) fn accesses(&self) -> &[Access] {
        &self.accesses
    }

    /// Whether two products can use the same prepared activations.
    pub(crate) fn shares_activations(&self, other: &Product) -> bool {
        let tensor = |product: &Product| product.source.as_ref().map(|source| source.tensor);
        self.x == other.x && self.form == other.form && tensor(self) == tensor(other)
    }

    /// Work memory that it needs.
    pub(crate) fn work_need(&self) -> WorkNeed {
        let dtype = self.packed.layout.dtype();
        let private = self.private;
        WorkNeed { isa: self.isa, dtype, rows: self.x.rows, columns: self.x.columns, private }
    }

    fn activations(&self, work: Work) -> Result<Activations<'static>, KernelError> {
        self.check_work(work)?;
        // SAFETY: the work memory is long enough, zeroed when made, and used for these activations alone from the
        // step that prepares them to the one that multiplies them, which are neighbours.
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

    fn check_work(&self, work: Work) -> Result<(), KernelError> {
        let needs = self.work_need().bytes(work.threads)?;
        if work.bytes < needs {
            return Err(KernelError::Short { what: "work memory", has: work.bytes, needs });
        }
        Ok(())
    }

    /// The activations, made by this thread for itself.
    fn own_activations(&self, worker: &Worker<'_>, work: Work) -> Result<Activations<'static>, KernelError> {
        self.check_work(work)?;
        if worker.index() >= work.threads {
            let (has, needs) = (work.threads, worker.index() + 1);
            return Err(KernelError::Short { what: "threads the work memory was made for", has, needs });
        }
        let need = self.work_need();
        let [floats_bytes, prepared_bytes] = need.private_bytes()?;
        let Matrix { rows, columns, .. } = self.x;
        let floats = work.pointer.wrapping_add(worker.index() * (floats_bytes + prepared_bytes));
        // SAFETY: each thread has as much of the work memory, which is long enough, for itself; what it reads was written
        // before the last barrier, and joining has checked that this step does not write it.
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
    pub(crate) fn preparation(&self) -> Part {
        let units = self.x.rows;
        let mut accesses = vec![Access::reads_own(&self.x_view, Partition::equal(units))];
        if self.x_view.rows() != units {
            accesses = vec![Access::reads(&self.x_view)];
        }
        let kernel = Preparation(Product { accesses: Vec::new(), source: None, ..*self });
        let mut part = Part::new(kernel, units, units * self.x.columns, accesses);
        part.grain = self.form.row_granularity();
        part.name = self.name;
        part.label = "prepare";
        part
    }
}

struct Preparation(Product);

impl Kernel for Preparation {
    fn run(&self, units: Range<usize>, work: Work) -> Result<(), String> {
        let activations = self.0.activations(work).map_err(|error| error.to_string())?;
        // SAFETY: the program holds the buffer, and no part that runs at the same time uses these rows, of either matrix;
        // parts are cut at multiples of the row granularity.
        unsafe { activations.prepare_rows(units, &self.0.x.input()) };
        Ok(())
    }
}

/// Products of the same activations.
pub(crate) struct Multiplication {
    /// At most [`MOST`].
    pub(crate) products: Vec<Product>,
    /// What is done to the columns of a product (by number) as soon as they are there, in this order.
    pub(crate) then: Vec<(usize, Part)>,
    /// Whether a thread computes the same columns of all products, which have equally many.
    pub(crate) together: bool,
}

impl Multiplication {
    /// One product.
    pub(crate) fn new(product: Product) -> Multiplication {
        Multiplication { products: vec![product], then: Vec::new(), together: false }
    }
}

impl Team for Multiplication {
    fn ask_ahead(&self, worker: &Worker<'_>) {
        let Some(first) = self.products.first().filter(|first| first.x.rows == 1) else { return };
        let matrices = self.products.iter().map(|product| {
            // SAFETY: the program holds the buffer of the weights, which nobody writes.
            (&product.packed.layout, unsafe { product.packed.bytes() })
        });
        matmul::prefetch_first(worker, first.form, matrices, self.together);
    }

    fn run(&self, worker: &Worker<'_>, work: Work) -> Result<(), TeamError> {
        let (Some(first), Some(last)) = (self.products.first(), self.products.last()) else { return Ok(()) };
        let activations =
            if first.private { first.own_activations(worker, work)? } else { first.activations(work)? };
        let outputs: [Output<'_>; MOST] = std::array::from_fn(|i| {
            let product = self.products.get(i).unwrap_or(last);
            let columns = product.packed.layout.rows();
            // SAFETY: the result is a contiguous tensor of these rows and columns in a buffer that the program
            // holds for writing, and no other product or step writes it before the next barrier.
            unsafe { Output::from_raw(product.out, product.x.rows, columns, columns) }
        });
        let products: [matmul::Matmul<'_>; MOST] = std::array::from_fn(|i| {
            let product = self.products.get(i).unwrap_or(last);
            matmul::Matmul {
                layout: &product.packed.layout,
                // SAFETY: the program holds the buffer of the weights, which nobody writes.
                packed: unsafe { product.packed.bytes() },
                output: outputs.get(i).unwrap_or(&outputs[0]),
                first_row: 0,
            }
        });
        let products = products.get(..self.products.len()).unwrap_or(&products);
        let epilogue = |product: usize, columns: Range<usize>| {
            for (_, part) in self.then.iter().filter(|(number, _)| *number == product) {
                part.kernel.run_columns(columns.clone());
            }
        };
        // SAFETY: all threads of the run execute this step, with a barrier before and after it; the step before has
        // filled the activations, or this thread has filled its own.
        unsafe { matmul::multiply_fused(worker, &activations, products, self.together, epilogue)? };
        Ok(())
    }
}
