//! Time of runs by backend, split and operation, compared with the machine's limits.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use quadriga_graph::{DType, Fingerprint, NodeId, Op};
use quadriga_runtime::{Backend, Cost, Plan, Trace};
use rustc_hash::FxHashMap;
use serde::Serialize;

use crate::Limits;
use crate::format::{bytes, count, plural, seconds};

/// Sums of time and work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Totals {
    /// Number of executions.
    pub count: u64,
    /// Total seconds.
    pub seconds: f64,
    /// Total arithmetic operations.
    pub operations: f64,
    /// Total bytes read and written.
    pub traffic: f64,
    /// Seconds of the arithmetic alone at the machine's limits.
    pub min_compute_seconds: f64,
    /// Seconds of the memory traffic alone at the machine's limits.
    pub min_memory_seconds: f64,
}

impl Totals {
    fn add(&mut self, seconds: f64, work: NodeWork, limits: &Limits) {
        self.count += 1;
        self.seconds += seconds;
        self.operations += work.operations;
        self.traffic += work.traffic;
        self.min_compute_seconds += work.compute_seconds;
        self.min_memory_seconds += work.traffic / limits.read.max(1.0);
    }

    /// Bytes per second.
    pub fn bandwidth(&self) -> f64 {
        self.traffic / self.seconds.max(1e-12)
    }

    /// Operations per second.
    pub fn speed(&self) -> f64 {
        self.operations / self.seconds.max(1e-12)
    }
}

/// The work of some nodes.
#[derive(Clone, Copy, Default)]
struct NodeWork {
    operations: f64,
    traffic: f64,
    /// Seconds of the arithmetic at the backend's limits.
    compute_seconds: f64,
}

/// The cost of a node at full context.
struct NodeCost {
    cost: Cost,
    /// The weight type, which its peak speed depends on.
    weights: DType,
    /// Whether the cost scales with the visible part of the KV cache.
    attends: bool,
}

/// Seconds of a backend's queues.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
struct BackendTotals {
    name: String,
    compute: f64,
    copy: f64,
}

/// Time of runs by backend, split and operation. Displays as tables; serialises as data.
#[derive(Serialize)]
pub struct Statistics {
    /// Number of runs.
    pub runs: u64,
    /// Total seconds of all runs.
    pub seconds: f64,
    backends: Vec<BackendTotals>,
    /// By kind of run, split number and backend.
    splits: BTreeMap<String, Totals>,
    /// By operation and backend.
    operations: BTreeMap<String, Totals>,
    copies: Totals,
    /// Copies of selected slices.
    selected_copies: Totals,
    limits: Vec<Limits>,
    #[serde(skip)]
    known: FxHashMap<Fingerprint, Arc<Vec<NodeCost>>>,
}

impl Statistics {
    /// Creates empty statistics for these backends, with the limits that were measured.
    pub fn new(backends: &[Arc<dyn Backend>], measured: &[Limits]) -> Statistics {
        let limits: Vec<Limits> = backends.iter().map(|backend| Limits::of(&**backend, measured)).collect();
        let named = |l: &Limits| BackendTotals { name: l.backend.clone(), ..BackendTotals::default() };
        Statistics {
            runs: 0,
            seconds: 0.0,
            backends: limits.iter().map(named).collect(),
            splits: BTreeMap::new(),
            operations: BTreeMap::new(),
            copies: Totals::default(),
            selected_copies: Totals::default(),
            limits,
            known: FxHashMap::default(),
        }
    }

    /// Adds a run of a kind, such as `prompt`. `visible` is the part of the planned KV-cache window that attention read,
    /// 0 to 1.
    pub fn add(&mut self, kind: &str, plan: &Plan, trace: &Trace, visible: f64) {
        self.runs += 1;
        self.seconds += trace.seconds;
        let known = self.nodes(plan);
        for (total, time) in self.backends.iter_mut().zip(&trace.backends) {
            total.compute += time.compute;
            total.copy += time.copy;
        }
        for split in &trace.splits {
            let Some(limits) = self.limits.get(split.backend) else { continue };
            let nodes = plan.splits().nodes_of(split.split).iter().map(|node| node.index());
            let work = work(&known, nodes, limits, visible);
            let name = format!("{kind}: split {} on {}", split.split, limits.backend);
            self.splits.entry(name).or_default().add(split.seconds, work, limits);
        }
        for operation in &trace.operations {
            let Some(limits) = self.limits.get(operation.backend) else { continue };
            let work = work(&known, operation.nodes.iter().copied(), limits, visible);
            let name = format!("{} on {}", operation.operation, limits.backend);
            self.operations.entry(name).or_default().add(operation.seconds, work, limits);
        }
        for copy in &trace.copies {
            let Some(limits) = self.limits.get(copy.backend) else { continue };
            let known = if copy.exact { copy.bytes as f64 } else { 0.0 };
            let work = NodeWork { traffic: known, ..NodeWork::default() };
            let copies = if copy.selected { &mut self.selected_copies } else { &mut self.copies };
            copies.add(copy.seconds, work, limits);
        }
    }

    fn nodes(&mut self, plan: &Plan) -> Arc<Vec<NodeCost>> {
        let make = || {
            let graph = plan.graph();
            let of = |node: NodeId| {
                let op = graph.get_node(node).map(|n| n.op());
                let first = graph.inputs(node).first().and_then(|id| graph.get(*id));
                let is_matmul =
                    matches!(op, Some(Op::MulMat | Op::MulMatId | Op::MulMatSparse { .. } | Op::AxpySparse));
                NodeCost {
                    cost: Cost::of(graph, node),
                    weights: first.filter(|_| is_matmul).map_or(DType::F32, |t| t.dtype()),
                    attends: matches!(op, Some(Op::Attention(_))),
                }
            };
            Arc::new(graph.node_ids().map(of).collect())
        };
        Arc::clone(self.known.entry(plan.graph().fingerprint()).or_insert_with(make))
    }

    /// Totals by kind of run and split.
    pub fn splits(&self) -> &BTreeMap<String, Totals> {
        &self.splits
    }

    /// Totals by operation and backend; fused operations have the names of their nodes, joined by ` + `.
    pub fn operations(&self) -> &BTreeMap<String, Totals> {
        &self.operations
    }
}

fn work(known: &[NodeCost], nodes: impl Iterator<Item = usize>, limits: &Limits, visible: f64) -> NodeWork {
    let mut sum = NodeWork::default();
    for node in nodes.filter_map(|node| known.get(node)) {
        let part = if node.attends { visible.clamp(0.0, 1.0) } else { 1.0 };
        let operations = node.cost.operations as f64 * part;
        sum.operations += operations;
        sum.traffic += node.cost.traffic as f64 * part;
        sum.compute_seconds += operations / limits.operations(node.weights).max(1.0);
    }
    sum
}

/// Rows printed per table.
const MAX_ROWS: usize = 14;

impl fmt::Display for Statistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total = self.seconds.max(1e-12);
        let percent = |part: f64| 100.0 * part / total;
        writeln!(f, "{}, {}", plural(self.runs as usize, "run", "runs"), seconds(self.seconds))?;
        writeln!(f, "\n{:24} {:>18} {:>18} {:>18}", "device", "compute", "copy", "idle")?;
        for backend in &self.backends {
            let idle = (total - backend.compute - backend.copy).max(0.0);
            write!(f, "{:24}", backend.name)?;
            for part in [backend.compute, backend.copy, idle] {
                write!(f, " {:>10} {:5.1} %", seconds(part), percent(part))?;
            }
            writeln!(f)?;
        }
        let measured = self.limits.iter().all(|limits| limits.measured);
        table(f, "split", &self.splits, total, measured)?;
        if !self.operations.is_empty() {
            table(f, "operation", &self.operations, total, measured)?;
        }
        let above = |totals: &Totals| {
            [totals.min_memory_seconds, totals.min_compute_seconds]
                .iter()
                .any(|part| is_above(part / totals.seconds.max(1e-12)))
        };
        if measured && self.splits.values().chain(self.operations.values()).any(above) {
            writeln!(
                f,
                "\n{ABOVE_PEAK} above the measured limit: caches hold some of the data, or the limit was measured on a busy machine"
            )?;
        }
        if self.copies.count > 0 {
            let Totals { count, traffic, seconds: time, .. } = self.copies;
            let each = bytes((traffic / count as f64) as u64);
            let speed = if time > 0.0 {
                format!(", {}B/s", crate::format::count(traffic / time))
            } else {
                String::new()
            };
            writeln!(
                f,
                "\n{} of {each} on average in {}{speed}",
                plural(count as usize, "copy", "copies"),
                seconds(time)
            )?;
        }
        if self.selected_copies.count > 0 {
            let Totals { count, traffic, seconds: time, .. } = self.selected_copies;
            let count = plural(count as usize, "copy", "copies");
            let known = match traffic > 0.0 && time > 0.0 {
                true => format!(", {}, {}B/s", bytes(traffic as u64), crate::format::count(traffic / time)),
                false => String::new(),
            };
            writeln!(f, "\n{count} of the experts that a batch uses in {}{known}", seconds(time))?;
        }
        for limits in &self.limits {
            let kind = match (limits.measured, limits.warning()) {
                (true, None) => "measured limits".to_owned(),
                (true, Some(warning)) => format!("measured limits, {warning}"),
                (false, _) => "nominal figures, not measured (see `quadriga devices --measure`)".to_owned(),
            };
            writeln!(f, "\n{}: {kind}: {}", limits.backend, limits.rates())?;
        }
        Ok(())
    }
}

/// Marks a share of more than the peak.
const ABOVE_PEAK: char = '!';

/// Whether a share is above the peak by more than rounding hides.
fn is_above(share: f64) -> bool {
    share >= 1.005
}

/// A share of the peak in percent, marked if it is above 100.
fn percent_of_peak(share: f64) -> String {
    let mark = if is_above(share) { ABOVE_PEAK.to_string() } else { String::new() };
    format!("{:.0} %{mark}", 100.0 * share)
}

fn table(
    f: &mut fmt::Formatter<'_>,
    what: &str,
    rows: &BTreeMap<String, Totals>,
    total: f64,
    measured: bool,
) -> fmt::Result {
    let mut lines: Vec<(&String, &Totals)> = rows.iter().collect();
    lines.sort_by(|a, b| b.1.seconds.total_cmp(&a.1.seconds));
    writeln!(
        f,
        "\n{what:36} {:>7} {:>10} {:>7} {:>11} {:>7} {:>12} {:>7}",
        "count", "time", "", "B/s", "of peak", "op/s", "of peak"
    )?;
    let of_peak = |min_seconds: f64, totals: &Totals| match measured {
        true => percent_of_peak(min_seconds / totals.seconds.max(1e-12)),
        false => "–".to_owned(),
    };
    let line = |f: &mut fmt::Formatter<'_>, name: &str, totals: &Totals| {
        let name: String = if name.chars().count() > 36 {
            name.chars().take(35).chain(['…']).collect()
        } else {
            name.to_owned()
        };
        writeln!(
            f,
            "{name:36} {:>7} {:>10} {:>5.1} % {:>11} {:>7} {:>12} {:>7}",
            totals.count,
            seconds(totals.seconds),
            100.0 * totals.seconds / total,
            count(totals.bandwidth()),
            of_peak(totals.min_memory_seconds, totals),
            count(totals.speed()),
            of_peak(totals.min_compute_seconds, totals)
        )
    };
    for (name, totals) in lines.iter().take(MAX_ROWS) {
        line(f, name, totals)?;
    }
    let mut rest = Totals::default();
    for (_, totals) in lines.iter().skip(MAX_ROWS) {
        rest.count += totals.count;
        rest.seconds += totals.seconds;
        rest.operations += totals.operations;
        rest.traffic += totals.traffic;
        rest.min_compute_seconds += totals.min_compute_seconds;
        rest.min_memory_seconds += totals.min_memory_seconds;
    }
    if lines.len() > MAX_ROWS {
        line(f, &plural(lines.len() - MAX_ROWS, "other", "others"), &rest)?;
    }
    Ok(())
}
