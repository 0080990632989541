//! Operations of one's own in a graph: a moving average along rows, as an object with attributes, and an in-place
//! operation of closures:
//!
//! ```sh
//! cargo run --release -p quadriga --example own_operation
//! ```

use quadriga::cpu;
use quadriga::graph::{
    CustomCall, CustomError, CustomFunction, CustomKernel, CustomOp, DType, GraphBuilder, Shape, Tensor,
};
use quadriga::runtime::Scheduler;

/// Each element replaced by the mean of the last `window` elements of its row.
struct MovingAverage {
    window: usize,
}

impl CustomKernel for MovingAverage {
    fn name(&self) -> &'static str {
        "moving_average"
    }

    fn infer(&self, inputs: &[&Tensor]) -> Result<(DType, Shape), CustomError> {
        match inputs {
            [x] if x.dtype() == DType::F32 && x.is_contiguous() && self.window > 0 => {
                Ok((DType::F32, *x.shape()))
            }
            _ => Err("one contiguous F32 input and a window of at least 1 are needed".into()),
        }
    }

    /// Objects with the same window are the same operation: a graph built again finds its plan.
    fn attributes(&self) -> Option<Vec<u8>> {
        Some(self.window.to_le_bytes().to_vec())
    }

    /// Each thread calls this for some units of the result: here, for some rows.
    fn compute(&self, mut call: CustomCall<'_>) -> Result<(), CustomError> {
        let x = call.input(0)?;
        let columns = x.shape().cols();
        let rows = x.f32()?.chunks(columns).skip(call.units.start);
        for (from, to) in rows.zip(call.output.f32()?.chunks_mut(columns)) {
            for (end, to) in (1..).zip(to) {
                let window = from.iter().take(end).skip(end.saturating_sub(self.window));
                *to = window.clone().sum::<f32>() / window.count() as f32;
            }
        }
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let average = CustomOp::new(MovingAverage { window: 2 });
    // The result overwrites input 0: the output starts as its elements.
    let round = CustomFunction::new(
        "round",
        |inputs| match inputs {
            [x] if x.dtype() == DType::F32 => Ok((DType::F32, *x.shape())),
            _ => Err("one F32 input is needed".into()),
        },
        |mut call| {
            call.output.f32()?.iter_mut().for_each(|x| *x = x.round());
            Ok(())
        },
    );
    let round = round.in_place(0).build();

    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [2, 4]);
    g.output("y", (x.custom(&average, &[]) * 10.0).custom(&round, &[]).relu());
    let plan = Scheduler::new(cpu::Backend::new()?).plan(g.finish()?)?;
    println!("{plan:#}");
    let mut session = plan.session()?;
    session.run(&[("x", &[0.1f32, 0.3, 0.5, 0.7, -1.0, 1.0, 2.0, 3.0])])?;
    let y: Vec<f32> = session.read("y")?;
    println!("{y:?}");
    assert_eq!(y, [1.0, 2.0, 4.0, 6.0, 0.0, 0.0, 15.0, 25.0]);
    Ok(())
}
