//! Rotary position embedding (RoPE). The sines and cosines of a run's positions are computed once and shared by all RoPE
//! nodes with the same positions and parameters.

use std::ops::Range;
use std::sync::Arc;

use quadriga_graph::{Pairing, Rope, TensorId};
use quadriga_runtime::BackendError;

use super::lowered::LoweredOp;
use super::operand::LoweringContext;
use super::scratch::with_floats;
use crate::isa::Isa;
use crate::kernels::vec;
use crate::memory::HostBlock;
use crate::partition::Partition;
use crate::step::{Access, Kernel, StepPart, WorkMemory};
use crate::view::TensorView;

/// The inputs that determine a table.
#[derive(Clone, Copy, PartialEq)]
struct RopeTableKey {
    positions: TensorId,
    factors: Option<TensorId>,
    rope: Rope,
}

/// Cosine and sine (each times the magnitude) for every token and pair: `[tokens][2][pairs]`.
struct RopeTable {
    block: HostBlock,
    pairs: usize,
}

impl RopeTable {
    fn row_bytes(&self) -> usize {
        self.pairs * 2 * size_of::<f32>()
    }

    fn row_pointer(&self, token: usize) -> Option<*mut f32> {
        ((token + 1) * self.row_bytes() <= self.block.bytes())
            .then(|| self.block.pointer().wrapping_add(token * self.row_bytes()).cast())
    }
}

/// The sine and cosine tables of one program.
#[derive(Default)]
pub(crate) struct RopeTables {
    made: Vec<(RopeTableKey, Arc<RopeTable>)>,
}

impl RopeTables {
    /// Bytes of all tables.
    pub(crate) fn bytes(&self) -> usize {
        self.made.iter().map(|(_, table)| table.block.bytes()).sum()
    }
}

struct TableKernel {
    rope: Rope,
    /// Angle per position of each pair, without factors, and the magnitude.
    rates: Vec<f64>,
    magnitude: f64,
    positions: TensorView,
    factors: Option<TensorView>,
    table: Arc<RopeTable>,
}

impl Kernel for TableKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        for token in units {
            let position = f64::from(self.positions.index([0, 0, 0], token));
            let Some(row) = self.table.row_pointer(token) else { continue };
            for (pair, rate) in self.rates.iter().enumerate() {
                let mut factor = [1.0];
                if let Some(factors) = &self.factors {
                    factors.load_at([0, 0, 0], pair, &mut factor);
                }
                let (sin, cos) = (position * rate / f64::from(factor[0])).sin_cos();
                // SAFETY: the row has room for all pairs twice, and only this unit writes it.
                unsafe {
                    *row.add(pair) = (cos * self.magnitude) as f32;
                    *row.add(self.rates.len() + pair) = (sin * self.magnitude) as f32;
                }
            }
        }
        debug_assert_eq!(self.rates.len(), self.rope.dims / 2);
        Ok(())
    }
}

struct RopeKernel {
    isa: Isa,
    dims: usize,
    pairing: Pairing,
    table: Arc<RopeTable>,
    x: TensorView,
    out: TensorView,
}

#[expect(clippy::too_many_arguments, reason = "the operation has these inputs")]
pub(super) fn rope(
    rope: &Rope,
    x: &TensorView,
    positions: &TensorView,
    factors: Option<&TensorView>,
    out: &TensorView,
    context: &LoweringContext<'_>,
    tables: &mut RopeTables,
    lowered: &mut Vec<LoweredOp>,
) -> Result<StepPart, String> {
    let [Some(id), factors_id] = [1, 2].map(|i| context.input_ids.get(i).copied()) else {
        return Err("an input is missing".into());
    };
    let key = RopeTableKey { positions: id, factors: factors_id, rope: *rope };
    let tokens = x.dims[1];
    let pairs = rope.dims / 2;
    let table = match tables.made.iter().find(|(k, _)| *k == key) {
        Some((_, table)) => Arc::clone(table),
        None => {
            let bytes = tokens.checked_mul(pairs * 8).ok_or("the RoPE table is too large")?;
            let block = HostBlock::zeroed(bytes).map_err(|error: BackendError| error.to_string())?;
            let table = Arc::new(RopeTable { block, pairs });
            tables.made.push((key, Arc::clone(&table)));
            // Angles are proportional to the position and to 1 / factor.
            let rates = (0..pairs).map(|pair| rope.angle(1, pair, 1.0).0).collect();
            let magnitude = rope.angle(1, 0, 1.0).1;
            let kernel = TableKernel {
                rope: *rope,
                rates,
                magnitude,
                positions: *positions,
                factors: factors.copied(),
                table: Arc::clone(&table),
            };
            let mut accesses = vec![Access::reads(positions), table_access(&table, true)];
            accesses.extend(factors.map(Access::reads));
            lowered.push(LoweredOp::Part(StepPart::new(kernel, tokens, tokens * pairs * 16, accesses)));
            table
        }
    };
    // A unit is a token with all its heads, so that queries and keys have equally many.
    let units = out.dims[0] * out.dims[1];
    let accesses = vec![
        Access::reads_own(x, Partition::equal(units)),
        Access::writes_own(out, Partition::equal(units)),
        table_access(&table, false),
    ];
    let kernel =
        RopeKernel { isa: context.isa, dims: rope.dims, pairing: rope.pairing, table, x: *x, out: *out };
    Ok(StepPart::new(kernel, units, 2 * out.elements(), accesses))
}

fn table_access(table: &RopeTable, write: bool) -> Access {
    let start = table.block.pointer().addr();
    Access::range(start..start + table.block.bytes(), write)
}

impl RopeKernel {
    fn row(&self, place: [usize; 3], values: &mut [f32]) {
        let pairs = self.dims / 2;
        let Some(angles) = self.table.row_pointer(place[1]) else { return };
        // SAFETY: a row of the table is 2 · pairs floats; it was written in an earlier step or part.
        let angles = unsafe { std::slice::from_raw_parts(angles.cast_const(), 2 * pairs) };
        let (cos, sin) = angles.split_at(pairs);
        let adjacent = self.pairing == Pairing::Adjacent;
        let columns = self.x.cols();
        if let (Some(x), Some(out)) =
            (self.x.floats_at(place, 0, columns), self.out.floats_at(place, 0, columns))
        {
            // SAFETY: both rows have these elements, which only this unit accesses; they may be the same.
            let out = unsafe {
                std::ptr::copy(x, out, columns);
                std::slice::from_raw_parts_mut(out, columns)
            };
            vec::rope(self.isa, out, cos, sin, adjacent);
            return;
        }
        self.x.load_at(place, 0, values);
        vec::rope(self.isa, values, cos, sin, adjacent);
        self.out.store_at(place, 0, values);
    }
}

impl Kernel for RopeKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let [_, tokens, heads, cols] = self.x.dims;
        with_floats(cols, |values| {
            for unit in units {
                for head in 0..heads {
                    self.row([unit / tokens, unit % tokens, head], values);
                }
            }
        });
        Ok(())
    }
}
