//! `quadriga plan --instance`: packs a list of storages and says how well.
//!
//! The file has one storage a line, `id,lower,upper,size`: so many bytes, needed from the moment `lower` up to, but not
//! including, `upper`. A heading names the columns, in any order.

use quadriga_runtime::memory::packing::{Effort, PackingError, PackingItem, PackingProblem, check, pack};
use serde::Serialize;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// How hard to try, as it is named on the command line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EffortName {
    /// Some milliseconds.
    #[default]
    Fast,
    /// Some seconds.
    Search,
    /// Until the answer is proved, or some minutes.
    Exact,
}

impl std::str::FromStr for EffortName {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "fast" => Ok(EffortName::Fast),
            "search" => Ok(EffortName::Search),
            "exact" => Ok(EffortName::Exact),
            _ => Err(format!("`{name}` is not an effort: fast, search or exact")),
        }
    }
}

/// What `quadriga plan --instance` was asked for.
#[derive(Clone, Debug, Default)]
pub struct PlanInstance {
    /// The file with the storages.
    pub instance: PathBuf,
    /// Say whether everything fits into so many bytes; with the effort `exact`, stop when it does.
    pub capacity: Option<u64>,
    /// How hard to try.
    pub effort: EffortName,
    /// Print as JSON.
    pub json: bool,
}

/// What was found. Printed as lines, or as JSON with the same names.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// How many storages there are.
    pub n: usize,
    /// The most bytes alive at one moment.
    pub lower_bound: u64,
    /// Bytes needed.
    pub peak: u64,
    /// Peak divided by the lower bound.
    pub ratio: f64,
    /// Whether no packing needs less.
    pub proved_optimal: bool,
    /// What found the packing.
    pub strategy: String,
    /// How long it took.
    pub seconds: f64,
    /// The capacity asked about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capacity: Option<u64>,
    /// Whether the peak is within the capacity.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fits: Option<bool>,
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

/// Why an instance could not be planned.
#[derive(Debug, thiserror::Error)]
pub enum InstanceError {
    /// The file cannot be read.
    #[error("cannot read {}: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        error: std::io::Error,
    },
    /// A column is missing from the heading.
    #[error("line 1: no column `{column}`; the heading names `id,lower,upper,size`")]
    Heading {
        /// The column.
        column: &'static str,
    },
    /// A field is missing or not a whole number.
    #[error("line {line}, column `{column}`: {problem}")]
    Field {
        /// The line, counted from 1.
        line: usize,
        /// The name of the column.
        column: &'static str,
        /// What is wrong.
        problem: String,
    },
    /// The storages cannot be packed.
    #[error("line {line}: {error}")]
    Unpackable {
        /// The line of the storage, counted from 1.
        line: usize,
        /// Why not.
        error: PackingError,
    },
    /// The packing is wrong: a mistake in this program.
    #[error("the packing found is wrong, which is a mistake in this program: {0}")]
    Wrong(quadriga_runtime::memory::packing::Flaw),
}

/// Reads storages from the text of a file.
pub fn parse(text: &str) -> Result<Vec<PackingItem>, InstanceError> {
    let mut lines = text.lines().enumerate();
    let heading = lines.next().map(|(_, line)| line).unwrap_or_default();
    let find = |column: &'static str| {
        let place = heading.split(',').position(|name| name.trim() == column);
        place.map(|place| (column, place)).ok_or(InstanceError::Heading { column })
    };
    let (lower, upper, size) = (find("lower")?, find("upper")?, find("size")?);
    let mut items = Vec::new();
    for (index, line) in lines.filter(|(_, line)| !line.trim().is_empty()) {
        let field = |(column, place): (&'static str, usize)| {
            let wrong = |problem: String| InstanceError::Field { line: index + 1, column, problem };
            let text = line.split(',').nth(place).ok_or_else(|| wrong("missing".into()))?.trim();
            text.parse::<u64>().map_err(|error| wrong(format!("`{}`: {error}", text.escape_debug())))
        };
        let moment = |at: (&'static str, usize)| {
            field(at).and_then(|moment| {
                u32::try_from(moment).map_err(|_| InstanceError::Field {
                    line: index + 1,
                    column: at.0,
                    problem: format!("`{moment}`: moments are below 2^32"),
                })
            })
        };
        items.push(PackingItem { start: moment(lower)?, end: moment(upper)?, size: field(size)? });
    }
    Ok(items)
}

/// Packs the instance and reports.
pub fn plan_instance(asked: &PlanInstance) -> Result<Report, InstanceError> {
    let text = read(&asked.instance)?;
    let problem = PackingProblem::new(parse(&text)?);
    let effort = match asked.effort {
        EffortName::Fast => Effort::Fast,
        EffortName::Search => Effort::Search { seed: 1, steps: 50_000_000 },
        EffortName::Exact => Effort::Exact { capacity: asked.capacity, steps: 4_000_000_000 },
    };
    let began = Instant::now();
    let packing = pack(&problem, effort).map_err(|error| {
        let item = match error {
            PackingError::EmptyLifetime { item, .. } | PackingError::TooLarge { item, .. } => item,
            _ => 0,
        };
        // Empty lines hold no item; the heading is line 1.
        let lines = text.lines().enumerate().skip(1).filter(|(_, line)| !line.trim().is_empty());
        InstanceError::Unpackable { line: lines.map(|(index, _)| index + 1).nth(item).unwrap_or(1), error }
    })?;
    let seconds = began.elapsed().as_secs_f64();
    check(&problem, &packing).map_err(InstanceError::Wrong)?;
    Ok(Report {
        n: problem.items.len(),
        lower_bound: packing.lower_bound,
        peak: packing.peak,
        ratio: packing.ratio(),
        proved_optimal: packing.proved_optimal,
        strategy: packing.strategy.to_string(),
        seconds,
        capacity: asked.capacity,
        fits: asked.capacity.map(|capacity| packing.peak <= capacity),
    })
}

/// Packs the instance and returns what is to be printed, ending with a newline.
pub fn run(asked: &PlanInstance) -> Result<String, InstanceError> {
    let report = plan_instance(asked)?;
    Ok(if asked.json { format!("{}\n", serde_json::json!(report)) } else { report.to_string() })
}

fn read(path: &Path) -> Result<String, InstanceError> {
    std::fs::read_to_string(path).map_err(|error| InstanceError::Read { path: path.into(), error })
}
