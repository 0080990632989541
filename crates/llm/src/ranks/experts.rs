//! Experts that several ranks have: each computes those of its own, and the sum of all ranks is the layer's result.

use std::ops::Range;

use quadriga_graph::{CustomCall, CustomError, CustomKernel, CustomOp, DType, Shape, Tensor};

/// The number of each expert among this rank's, or −1 where it is another's.
pub(super) fn local_experts(experts: Range<usize>) -> CustomOp {
    CustomOp::new(LocalExperts { experts })
}

struct LocalExperts {
    experts: Range<usize>,
}

impl CustomKernel for LocalExperts {
    fn name(&self) -> &'static str {
        "local_experts"
    }

    fn description(&self) -> &'static str {
        "number of each expert among this rank's, −1 for those of others"
    }

    fn infer(&self, inputs: &[&Tensor]) -> Result<(DType, Shape), CustomError> {
        match inputs {
            [ids] if ids.dtype() == DType::I32 => Ok((DType::I32, *ids.shape())),
            _ => Err("one I32 input is needed".into()),
        }
    }

    fn attributes(&self) -> Option<Vec<u8>> {
        Some([self.experts.start.to_le_bytes(), self.experts.end.to_le_bytes()].concat())
    }

    fn units(&self, _inputs: &[&Tensor], _output: &Tensor) -> usize {
        1
    }

    fn compute(&self, mut call: CustomCall<'_>) -> Result<(), CustomError> {
        let ids = call.input(0)?.i32()?;
        for (local, id) in call.output.i32()?.iter_mut().zip(ids) {
            let own = usize::try_from(*id).ok().filter(|id| self.experts.contains(id));
            *local = own.map_or(-1, |id| (id - self.experts.start) as i32);
        }
        Ok(())
    }
}
