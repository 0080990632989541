//! Collectives: one thread exchanges data with other ranks while the others wait at the barrier.

use std::ops::Range;
use std::sync::Arc;

use quadriga_graph::CollectiveKind;
use quadriga_runtime::{ExchangeCall, RankGroup};

use crate::partition::Partition;
use crate::step::{Access, Kernel, StepPart, WorkMemory};
use crate::view::TensorView;

struct Exchange {
    ranks: Arc<dyn RankGroup>,
    kind: CollectiveKind,
    input: TensorView,
    out: TensorView,
}

/// Lowers a collective with its first input; others are only waited for.
pub(crate) fn collective(
    ranks: &Arc<dyn RankGroup>,
    kind: &CollectiveKind,
    input: &TensorView,
    out: &TensorView,
) -> StepPart {
    let mut accesses = vec![Access::writes_own(out, Partition::equal(1))];
    if !matches!(kind, CollectiveKind::Receive { .. }) {
        accesses.push(Access::reads_own(input, Partition::equal(1)));
    }
    let cost = out.elements().max(input.elements());
    let exchange = Exchange { ranks: Arc::clone(ranks), kind: kind.clone(), input: *input, out: *out };
    StepPart::new(exchange, 1, cost, accesses)
}

/// A collective that starts a split of a plan with several: it is executed in memory of its own, so that the buffers of its program can
/// be copied to other backends while it waits for other ranks.
pub(crate) struct DetachedExchange {
    exchange: Exchange,
    /// Index of the node's name in the program.
    pub(crate) name: usize,
    input: Vec<u8>,
    output: Vec<u8>,
}

impl DetachedExchange {
    /// A collective with its first input.
    pub(crate) fn new(
        ranks: &Arc<dyn RankGroup>,
        kind: &CollectiveKind,
        input: &TensorView,
        out: &TensorView,
    ) -> DetachedExchange {
        let exchange = Exchange { ranks: Arc::clone(ranks), kind: kind.clone(), input: *input, out: *out };
        DetachedExchange { exchange, name: 0, input: Vec::new(), output: Vec::new() }
    }

    /// Takes the elements of the input. The program holds its buffers.
    pub(crate) fn take(&mut self) {
        let Exchange { kind, input, out, .. } = &self.exchange;
        self.input.clear();
        self.output.clear();
        if input.elements() > 0 && !matches!(kind, CollectiveKind::Receive { .. }) {
            // SAFETY: the program holds the buffer, and nothing of it runs.
            let bytes = unsafe { input.bytes() };
            let memory = if kind.is_in_place() { &mut self.output } else { &mut self.input };
            memory.extend_from_slice(bytes);
        }
        self.output.resize(out.elements() * out.dtype.block_bytes(), 0);
    }

    /// Exchanges data with other ranks, without any buffer.
    pub(crate) fn run(&mut self) -> Result<(), String> {
        let Exchange { ranks, kind, input, out } = &self.exchange;
        let (dtype, rows) = (out.dtype, input.dims[2]);
        ranks.exchange(ExchangeCall { kind, dtype, rows, input: &self.input, output: &mut self.output })
    }

    /// Writes the result. The program holds its buffers.
    pub(crate) fn put(&self) -> Result<(), String> {
        let out = &self.exchange.out;
        if out.elements() == 0 {
            return Ok(());
        }
        // SAFETY: the program holds the buffer for writing, and nothing of it runs.
        let bytes = unsafe { out.elements_mut(0..out.elements()) }.ok_or("its result has gaps")?;
        bytes.copy_from_slice(&self.output);
        Ok(())
    }
}

impl Kernel for Exchange {
    fn run(&self, _units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let Exchange { kind, input, out, .. } = self;
        let in_place = kind.is_in_place();
        if in_place && input.range() != out.range() {
            for row in 0..out.rows() {
                let place = out.place(row);
                out.copy_from(place, 0, input, place, 0, out.cols());
            }
        }
        let reads = !in_place && !matches!(kind, CollectiveKind::Receive { .. });
        let bytes: &[u8] = match reads && input.elements() > 0 {
            // SAFETY: the program holds the buffer, nothing writes to an input while a step reads it, and compilation has refused
            // a result that overlaps an input which is not replaced.
            true => unsafe { input.bytes() },
            false => &[],
        };
        let output: &mut [u8] = match out.elements() {
            0 => &mut [],
            // SAFETY: the program holds the buffer for writing, one thread runs the one unit, and no slice of the same memory
            // exists: that of an input which the result replaces is not made.
            elements => unsafe { out.elements_mut(0..elements) }.ok_or("its result has gaps")?,
        };
        // A matrix without columns has rows, too, which its elements do not tell.
        let rows = input.dims[2];
        self.ranks.exchange(ExchangeCall { kind, dtype: out.dtype, rows, input: bytes, output })
    }
}
