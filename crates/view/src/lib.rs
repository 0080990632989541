//! Visualisation of plans and profiling of runs.
//!
//! A [`Picture`] shows a plan's splits, copies and memory: as one interactive HTML page that needs no network, or as an
//! SVG drawing for documents. A [`ChromeTrace`] writes runs as trace events for Perfetto and Chrome. [`Statistics`] adds
//! up time by backend, split and operation, and compares it with the [`Limits`] of the machine. All of them read plain
//! data of the runtime: an [`Explanation`] or a [`Trace`](quadriga_runtime::Trace).
//!
//! ```
//! use quadriga_graph::{DType, GraphBuilder};
//! use quadriga_runtime::Scheduler;
//! use quadriga_view::Picture;
//!
//! let g = GraphBuilder::new();
//! let x = g.input("x", DType::F32, [8, 64]);
//! g.output("y", x.sqr().silu().add(x));
//! let plan = Scheduler::new(quadriga_sim::Sim::new("sim:0").build()).plan(g.finish()?)?;
//!
//! let picture = Picture::new("a small graph", plan.explain());
//! assert!(picture.html().starts_with("<!doctype html>"));
//! assert!(picture.svg().starts_with("<svg"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod chrome;
pub mod format;
mod limits;
mod machine;
mod measure;
mod page;
mod rounds;
mod split_picture;
mod statistics;
mod summary;
mod svg;

use quadriga_runtime::Explanation;

pub use chrome::{ChromeTrace, TracedRun};
pub use limits::Limits;
pub use measure::measure;
pub use rounds::Conditions;
pub use split_picture::SplitPicture;
pub use statistics::{Statistics, Totals};

/// A drawing of a plan, as a page or as SVG.
#[derive(Clone, Debug)]
pub struct Picture {
    title: String,
    about: String,
    plan: Explanation,
    limits: Vec<Limits>,
}

impl Picture {
    /// Creates a picture of a plan with a title, such as the model's name.
    pub fn new(title: impl Into<String>, plan: Explanation) -> Picture {
        let limits = limits::in_order(&plan.backends, &[]);
        Picture { title: title.into(), about: String::new(), plan, limits }
    }

    /// Sets the line below the title, such as batch and context size.
    #[must_use]
    pub fn about(mut self, about: impl Into<String>) -> Picture {
        self.about = about.into();
        self
    }

    /// Sets the speed of the backends, for time estimates. Without it nominal figures are used and marked as such.
    #[must_use]
    pub fn limits(mut self, limits: &[Limits]) -> Picture {
        self.limits = limits::in_order(&self.plan.backends, limits);
        self
    }

    /// A summary of the plan in sentences: placement, copies, size and peak of each arena.
    pub fn sentences(&self) -> Vec<String> {
        summary::sentences(&self.plan, &summary::labels(&self.plan))
    }

    /// The first sentences of the summary: placement, copies and streamed weights, without the arenas.
    pub fn overview(&self) -> Vec<String> {
        summary::overview(&self.plan, &summary::labels(&self.plan))
    }

    /// The estimated seconds of each split.
    pub fn estimates(&self) -> Vec<f64> {
        let of = |line: &quadriga_runtime::SplitLine| {
            self.limits.get(line.split.backend).map_or(0.0, |limits| limits.seconds(line.cost))
        };
        self.plan.splits.iter().map(of).collect()
    }
}
