//! `quadriga plan --instance`: packs the buffers that a CSV file lists and reports the peak.
//!
//! A heading names the columns `id,lower,upper,size`, in any order. Each line is one buffer: `size` bytes, live from the
//! time step `lower` up to, but not including, `upper`.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::ValueEnum;
use quadriga_runtime::memory::packing::{
    CsvError, Effort, PackingError, PackingProblem, PackingViolation, check, pack, parse_csv,
};
use serde::Serialize;

/// Packing effort, as named on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum EffortLevel {
    /// Greedy heuristics, milliseconds
    Fast,
    /// Local search, seconds
    Search,
    /// Branch and bound until proved optimal, minutes at most
    Exact,
}

/// The result, printed as lines or as JSON with the same names.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct InstanceReport {
    /// Number of buffers.
    n: usize,
    /// The most bytes live at one time step.
    lower_bound: u64,
    /// Bytes that the packing needs.
    peak: u64,
    /// Peak divided by the lower bound.
    ratio: f64,
    /// Whether it is proved that no packing needs less.
    proved_optimal: bool,
    /// The strategy that found the packing.
    strategy: String,
    /// Seconds spent packing.
    seconds: f64,
    /// The requested capacity.
    #[serde(skip_serializing_if = "Option::is_none")]
    capacity: Option<u64>,
    /// Whether the peak is within the capacity.
    #[serde(skip_serializing_if = "Option::is_none")]
    fits: Option<bool>,
}

impl fmt::Display for InstanceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "n              {}", self.n)?;
        writeln!(f, "lower_bound    {}", self.lower_bound)?;
        writeln!(f, "peak           {}", self.peak)?;
        writeln!(f, "ratio          {:.6}", self.ratio)?;
        writeln!(f, "proved_optimal {}", self.proved_optimal)?;
        writeln!(f, "strategy       {}", self.strategy)?;
        writeln!(f, "seconds        {:.6}", self.seconds)?;
        if let (Some(capacity), Some(fits)) = (self.capacity, self.fits) {
            writeln!(f, "capacity       {capacity}")?;
            writeln!(f, "fits           {fits}")?;
        }
        Ok(())
    }
}

/// Why an instance could not be packed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InstanceError {
    /// The file cannot be read.
    #[error("cannot read {}: {error}", path.display())]
    Read { path: PathBuf, error: std::io::Error },
    /// The file is not a packing instance.
    #[error(transparent)]
    Csv(#[from] CsvError),
    /// The buffer on this line cannot be packed.
    #[error("line {line}: {error}")]
    Unpackable { line: usize, error: PackingError },
    /// The checker rejected the packing.
    #[error("internal error: the packing is invalid: {0}")]
    Invalid(PackingViolation),
}

/// Packs the instance in a file and returns the report as text, ending with a newline.
///
/// With a capacity the report says whether the peak is within it; with [`EffortLevel::Exact`] the search then ends as
/// soon as it is.
pub(crate) fn run(
    path: &Path,
    effort: EffortLevel,
    capacity: Option<u64>,
    json: bool,
) -> Result<String, InstanceError> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| InstanceError::Read { path: path.to_owned(), error })?;
    let problem = PackingProblem::new(parse_csv(&text)?);
    let effort = match effort {
        EffortLevel::Fast => Effort::Fast,
        EffortLevel::Search => Effort::Search { seed: 1, steps: 50_000_000 },
        EffortLevel::Exact => Effort::Exact { capacity, steps: 4_000_000_000 },
    };
    let started = Instant::now();
    let packing = pack(&problem, effort).map_err(|error| {
        let item = match error {
            PackingError::EmptyLifetime { item, .. } | PackingError::TooLarge { item, .. } => item,
            _ => 0,
        };
        // Empty lines hold no item; the heading is line 1.
        let lines = text.lines().enumerate().skip(1).filter(|(_, line)| !line.trim().is_empty());
        InstanceError::Unpackable { line: lines.map(|(index, _)| index + 1).nth(item).unwrap_or(1), error }
    })?;
    let seconds = started.elapsed().as_secs_f64();
    check(&problem, &packing).map_err(InstanceError::Invalid)?;
    let report = InstanceReport {
        n: problem.items.len(),
        lower_bound: packing.lower_bound,
        peak: packing.peak,
        ratio: packing.ratio(),
        proved_optimal: packing.proved_optimal,
        strategy: packing.strategy.to_string(),
        seconds,
        capacity,
        fits: capacity.map(|capacity| packing.peak <= capacity),
    };
    Ok(if json { format!("{}\n", serde_json::json!(report)) } else { report.to_string() })
}
