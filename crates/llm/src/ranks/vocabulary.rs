//! Embedding with rows that several ranks have: each looks up the tokens of its part, and the rest are zeros of the sum.

use std::ops::Range;

use quadriga_graph::{CustomCall, CustomError, CustomKernel, CustomOp, DType, Shape, Tensor};

/// The row of each token in this rank's part; the nearest where it has none.
pub(super) fn local_rows(rows: Range<usize>) -> CustomOp {
    CustomOp::new(LocalRows { rows })
}

/// Rows of this rank's tokens, and zeros for others.
pub(super) fn own_rows(rows: Range<usize>) -> CustomOp {
    CustomOp::new(OwnRows { rows })
}

struct LocalRows {
    rows: Range<usize>,
}

struct OwnRows {
    rows: Range<usize>,
}

fn attributes(rows: &Range<usize>) -> Option<Vec<u8>> {
    Some([rows.start.to_le_bytes(), rows.end.to_le_bytes()].concat())
}

impl CustomKernel for LocalRows {
    fn name(&self) -> &'static str {
        "local_rows"
    }

    fn description(&self) -> &'static str {
        "row of each token in this rank's part of the embedding"
    }

    fn infer(&self, inputs: &[&Tensor]) -> Result<(DType, Shape), CustomError> {
        match inputs {
            [tokens] if tokens.dtype() == DType::I32 => Ok((DType::I32, *tokens.shape())),
            _ => Err("one I32 input is needed".into()),
        }
    }

    fn attributes(&self) -> Option<Vec<u8>> {
        attributes(&self.rows)
    }

    fn units(&self, _inputs: &[&Tensor], _output: &Tensor) -> usize {
        1
    }

    fn compute(&self, mut call: CustomCall<'_>) -> Result<(), CustomError> {
        let tokens = call.input(0)?.i32()?;
        let last = (self.rows.len() as i64 - 1).max(0);
        for (row, token) in call.output.i32()?.iter_mut().zip(tokens) {
            *row = (i64::from(*token) - self.rows.start as i64).clamp(0, last) as i32;
        }
        Ok(())
    }
}

impl CustomKernel for OwnRows {
    fn name(&self) -> &'static str {
        "own_rows"
    }

    fn description(&self) -> &'static str {
        "rows of this rank's tokens, zeros for others"
    }

    fn infer(&self, inputs: &[&Tensor]) -> Result<(DType, Shape), CustomError> {
        match inputs {
            [x, tokens]
                if x.dtype() == DType::F32
                    && tokens.dtype() == DType::I32
                    && x.shape().rows() == tokens.shape().elements() =>
            {
                Ok((DType::F32, *x.shape()))
            }
            _ => Err("F32 rows and as many I32 tokens are needed".into()),
        }
    }

    fn attributes(&self) -> Option<Vec<u8>> {
        attributes(&self.rows)
    }

    fn in_place(&self) -> Option<usize> {
        Some(0)
    }

    fn compute(&self, mut call: CustomCall<'_>) -> Result<(), CustomError> {
        let tokens = call.input(1)?.i32()?;
        let columns = call.output.shape().cols().max(1);
        for (unit, row) in call.units.clone().zip(call.output.f32()?.chunks_mut(columns)) {
            let token = tokens.get(unit).and_then(|token| usize::try_from(*token).ok());
            if !token.is_some_and(|token| self.rows.contains(&token)) {
                row.fill(0.0);
            }
        }
        Ok(())
    }
}
