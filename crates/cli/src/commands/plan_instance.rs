//! `quadriga plan --instance`: packs the buffers that a CSV file lists and reports the peak.
//!
//! A heading names the columns `id,lower,upper,size`, in any order. Each line is one buffer: `size` bytes, live from the
//! time step `lower` up to, but not including, `upper`.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::ValueEnum;
use quadriga_runtime::memory::packing::{
    Effort, PackingError, PackingItem, PackingProblem, PackingViolation, check, pack,
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
struct Report {
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

impl fmt::Display for Report {
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
    /// A column is missing from the heading.
    #[error("line 1: no column `{column}`; the heading must name `id,lower,upper,size`")]
    Heading { column: &'static str },
    /// A field is missing or not a whole number. Lines are counted from 1.
    #[error("line {line}, column `{column}`: {reason}")]
    Field { line: usize, column: &'static str, reason: String },
    /// The buffer on this line cannot be packed.
    #[error("line {line}: {error}")]
    Unpackable { line: usize, error: PackingError },
    /// The checker rejected the packing.
    #[error("internal error: the packing is invalid: {0}")]
    Invalid(PackingViolation),
}

/// Reads the buffers from the text of a CSV file.
fn parse(text: &str) -> Result<Vec<PackingItem>, InstanceError> {
    let mut lines = text.lines().enumerate();
    let heading = lines.next().map(|(_, line)| line).unwrap_or_default();
    let find = |column: &'static str| {
        let index = heading.split(',').position(|name| name.trim() == column);
        index.map(|index| (column, index)).ok_or(InstanceError::Heading { column })
    };
    let (lower, upper, size) = (find("lower")?, find("upper")?, find("size")?);
    let mut items = Vec::new();
    for (index, line) in lines.filter(|(_, line)| !line.trim().is_empty()) {
        let field = |(column, index_in_line): (&'static str, usize)| {
            let wrong = |reason: String| InstanceError::Field { line: index + 1, column, reason };
            let text = line.split(',').nth(index_in_line).ok_or_else(|| wrong("missing".into()))?.trim();
            text.parse::<u64>().map_err(|error| wrong(format!("`{}`: {error}", text.escape_debug())))
        };
        let step = |at: (&'static str, usize)| {
            field(at).and_then(|step| {
                u32::try_from(step).map_err(|_| InstanceError::Field {
                    line: index + 1,
                    column: at.0,
                    reason: format!("`{step}`: time steps must be below 2^32"),
                })
            })
        };
        items.push(PackingItem { start: step(lower)?, end: step(upper)?, size: field(size)? });
    }
    Ok(items)
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
    let problem = PackingProblem::new(parse(&text)?);
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
    let report = Report {
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
