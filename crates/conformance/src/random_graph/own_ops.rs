//! Custom operations in random graphs.

use quadriga_graph::{CustomError, CustomFunction, DType, Shape, Tensor, Value};

use super::generator::GraphGenerator;

fn like_first(inputs: &[&Tensor]) -> Result<(DType, Shape), CustomError> {
    inputs.first().map(|x| (DType::F32, *x.shape())).ok_or_else(|| "an input is needed".into())
}

/// Rows in reverse order: every unit reads another unit's input.
fn flip() -> CustomFunction {
    CustomFunction::new("flip", like_first, |mut call| {
        let (x, rows) = (call.input(0)?, call.unit_count);
        let columns = x.shape().cols().max(1);
        for (row, to) in call.units.clone().zip(call.output.f32()?.chunks_mut(columns)) {
            x.read_row(rows - 1 - row, to)?;
        }
        Ok(())
    })
}

/// Halves the elements, in place.
fn halve() -> CustomFunction {
    CustomFunction::new("halve", like_first, |mut call| {
        call.output.f32()?.iter_mut().for_each(|x| *x *= 0.5);
        Ok(())
    })
    .in_place(0)
}

impl<'g> GraphGenerator<'g> {
    /// One more custom operation.
    pub(super) fn own_step(&mut self, x: Value<'g>) {
        let op = if self.rng.chance(0.5) { flip() } else { halve() };
        let op = if self.rng.chance(0.3) { op.scratch_bytes(self.rng.range(1, 300)) } else { op };
        // A high cost lets several threads compute few rows.
        let op = if self.rng.chance(0.5) { op.operations_per_element(5000) } else { op };
        self.add(x.custom(&op.build(), &[]), true);
    }
}
