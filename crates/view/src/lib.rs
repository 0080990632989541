//! Plans and runs made visible.
//!
//! A [`Picture`] draws what a scheduler decided: as one page that opens in any browser and needs no network, or as a
//! drawing for a document. A [`ChromeTrace`] writes what happened in runs as trace events that Perfetto and Chrome open. A
//! [`Statistics`] adds up where the time went and sets it beside the [`Limits`] of the machine. What they show comes from
//! plain data of the runtime: an [`Explanation`] and a [`Trace`](quadriga_runtime::Trace).
//!
//! ```
//! use quadriga_graph::{DType, GraphBuilder};
//! use quadriga_runtime::Scheduler;
//! use quadriga_view::Picture;
//!
//! let g = GraphBuilder::new();
//! let x = g.input("x", DType::F32, [8, 64]);
//! g.output("y", x.sqr().silu().add(x));
//! let plan = Scheduler::new([quadriga_sim::Sim::new("sim:0").build()]).plan(g.finish()?)?;
//!
//! let picture = Picture::new("a small graph", plan.explain());
//! assert!(picture.html().starts_with("<!doctype html>"));
//! assert!(picture.svg().starts_with("<svg"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod chrome;
mod limits;
mod measure;
mod page;
mod statistics;
mod summary;
mod svg;
pub mod words;

use quadriga_runtime::Explanation;

pub use chrome::{ChromeTrace, Happening};
pub use limits::Limits;
pub use measure::measure;
pub use statistics::{Statistics, Totals};

/// A plan to be drawn.
#[derive(Clone, Debug)]
pub struct Picture {
    title: String,
    about: String,
    plan: Explanation,
    limits: Vec<Limits>,
}

impl Picture {
    /// A picture of a plan under a title, such as the model's name.
    pub fn new(title: impl Into<String>, plan: Explanation) -> Picture {
        let limits = limits::in_order(&plan.backends, &[]);
        Picture { title: title.into(), about: String::new(), plan, limits }
    }

    /// A line below the title: what the plan is for.
    #[must_use]
    pub fn about(mut self, about: impl Into<String>) -> Picture {
        self.about = about.into();
        self
    }

    /// How fast the backends are, for estimates; without it round figures are used and named so.
    #[must_use]
    pub fn limits(mut self, limits: &[Limits]) -> Picture {
        self.limits = limits::in_order(&self.plan.backends, limits);
        self
    }

    /// The plan in sentences: what runs where, what is copied, how big the buffers are and why.
    pub fn sentences(&self) -> Vec<String> {
        summary::sentences(&self.plan, &summary::labels(&self.plan))
    }

    /// About how many seconds each split takes.
    pub fn estimates(&self) -> Vec<f64> {
        let of = |line: &quadriga_runtime::SplitLine| {
            self.limits.get(line.split.backend).map_or(0.0, |limits| limits.seconds(line.cost))
        };
        self.plan.splits.iter().map(of).collect()
    }
}
