//! Runs as trace events, the format of Chrome's tracing that Perfetto opens: written as they happen, one run at a time.
//!
//! Every lane is a thread: the host with its runs, and of each backend the splits (operations inside them) and the copies
//! in and out. A copy is tied by flow arrows to the split that makes its bytes and to the split that reads them. What is
//! in use of each backend's memory is a counter, a token is an instant event.

use std::io::{self, Write};
use std::sync::Arc;

use quadriga_graph::Fingerprint;
use quadriga_runtime::{Backend, CopyTime, Explanation, Plan, Stream, Trace};
use rustc_hash::FxHashMap;
use serde_json::{Value, json};

/// The lane of the host's own doings.
const HOST: usize = 1;

/// A run that happened.
pub struct Happening<'a> {
    /// The plan that ran.
    pub plan: &'a Plan,
    /// How long everything took.
    pub trace: &'a Trace,
    /// Seconds from the start of the recording to the start of the run.
    pub start: f64,
    /// What the run was for: `prompt, 12 tokens`.
    pub name: &'a str,
}

/// Writes trace events. [`finish`](ChromeTrace::finish) makes the file whole.
pub struct ChromeTrace<W: Write> {
    out: W,
    events: u64,
    flows: u64,
    /// What was said about plans before: bytes in use per backend and step.
    plans: FxHashMap<Fingerprint, Arc<InUse>>,
    /// When the last slice of each lane ends, in microseconds.
    ends: FxHashMap<usize, f64>,
}

/// For each backend: what stays, and what of the arena is in use in each step.
struct InUse {
    backends: Vec<(u64, Vec<u64>)>,
    names: Vec<String>,
}

impl InUse {
    fn of(plan: &Explanation) -> InUse {
        let steps = plan.steps as usize + 1;
        let of = |(number, backend): (usize, &quadriga_runtime::BackendLine)| {
            let mut change = vec![0i128; steps + 1];
            for s in plan.storages.iter().filter(|s| s.backend == number && s.chunk.is_some()) {
                for (step, bytes) in [(s.start, i128::from(s.bytes)), (s.end, -i128::from(s.bytes))] {
                    if let Some(change) = change.get_mut(step as usize) {
                        *change += bytes;
                    }
                }
            }
            let mut now = 0;
            let sum = |change: &i128| {
                now += change;
                now.max(0) as u64
            };
            (backend.bytes.weights + backend.bytes.state, change.iter().map(sum).collect())
        };
        let backends = plan.backends.iter().enumerate().map(of).collect();
        InUse { backends, names: plan.backends.iter().map(|b| b.bytes.backend.clone()).collect() }
    }
}

/// The lane of a backend's queue.
fn lane(backend: usize, stream: Stream) -> usize {
    HOST + 1
        + backend * 3
        + match stream {
            Stream::Compute => 0,
            Stream::Incoming => 1,
            Stream::Outgoing => 2,
        }
}

/// Seconds as microseconds, to the nanosecond.
fn micros(seconds: f64) -> f64 {
    (seconds * 1e9).round() / 1e3
}

impl<W: Write> ChromeTrace<W> {
    /// Starts a file and names the lanes.
    pub fn new(mut out: W, backends: &[Arc<dyn Backend>]) -> io::Result<ChromeTrace<W>> {
        write!(out, "{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
        let plans = FxHashMap::default();
        let mut trace = ChromeTrace { out, events: 0, flows: 0, plans, ends: FxHashMap::default() };
        trace.meta("process_name", HOST, json!({ "name": "quadriga" }))?;
        trace.name(HOST, "host")?;
        for (number, backend) in backends.iter().enumerate() {
            let name = backend.name();
            trace.name(lane(number, Stream::Compute), name)?;
            trace.name(lane(number, Stream::Incoming), &format!("{name} copies in"))?;
            trace.name(lane(number, Stream::Outgoing), &format!("{name} copies out"))?;
        }
        Ok(trace)
    }

    fn meta(&mut self, what: &str, lane: usize, arguments: Value) -> io::Result<()> {
        self.event(&json!({ "ph": "M", "pid": 1, "tid": lane, "name": what, "args": arguments }))
    }

    fn name(&mut self, lane: usize, name: &str) -> io::Result<()> {
        self.meta("thread_name", lane, json!({ "name": name }))?;
        self.meta("thread_sort_index", lane, json!({ "sort_index": lane }))
    }

    fn event(&mut self, event: &Value) -> io::Result<()> {
        if self.events > 0 {
            self.out.write_all(b",")?;
        }
        self.out.write_all(b"\n")?;
        self.events += 1;
        serde_json::to_writer(&mut self.out, event)?;
        Ok(())
    }

    /// A slice. What a lane does, it does one after the other: clocks of device and host agree only to microseconds,
    /// so a slice that seems to begin before the one before it ended begins when it ended.
    fn slice(
        &mut self,
        lane: usize,
        name: &str,
        span: (f64, f64),
        arguments: Value,
    ) -> io::Result<(f64, f64)> {
        let before = self.ends.get(&lane).copied().unwrap_or(0.0);
        let end = micros(span.0 + span.1).max(before);
        let start = micros(span.0).max(before);
        self.ends.insert(lane, end);
        self.complete(lane, name, (start, end), arguments)?;
        Ok((start, end))
    }

    fn complete(
        &mut self,
        lane: usize,
        name: &str,
        (start, end): (f64, f64),
        arguments: Value,
    ) -> io::Result<()> {
        let length = ((end - start) * 1e3).round() / 1e3;
        self.event(&json!({
            "ph": "X", "pid": 1, "tid": lane, "name": name, "ts": start, "dur": length, "args": arguments
        }))
    }

    fn counter(&mut self, backend: &str, at: f64, kept: u64, compute: u64) -> io::Result<()> {
        self.event(&json!({
            "ph": "C", "pid": 1, "name": format!("memory of {backend}"), "ts": at,
            "args": { "weights and state": kept, "compute": compute }
        }))
    }

    fn flow(&mut self, phase: &str, id: u64, lane: usize, at: f64) -> io::Result<()> {
        let mut event = json!({
            "ph": phase, "pid": 1, "tid": lane, "id": id, "name": "copy", "cat": "copy", "ts": at
        });
        if phase == "f"
            && let Some(event) = event.as_object_mut()
        {
            event.insert("bp".to_owned(), json!("e"));
        }
        self.event(&event)
    }

    /// A moment: a token was chosen.
    pub fn token(&mut self, name: &str, at: f64) -> io::Result<()> {
        self.event(&json!({
            "ph": "i", "pid": 1, "tid": HOST, "s": "p", "name": name, "cat": "token", "ts": micros(at)
        }))
    }

    /// Something that the host did beside runs.
    pub fn host(&mut self, name: &str, start: f64, seconds: f64) -> io::Result<()> {
        self.slice(HOST, name, (start, seconds), json!({})).map(|_| ())
    }

    /// A run with all that happened in it.
    pub fn run(&mut self, happening: &Happening<'_>) -> io::Result<()> {
        let Happening { plan, trace, start, name } = *happening;
        let fingerprint = plan.graph().fingerprint();
        let in_use = match self.plans.get(&fingerprint) {
            Some(known) => Arc::clone(known),
            None => {
                let made = Arc::new(InUse::of(&plan.explain()));
                self.plans.insert(fingerprint, Arc::clone(&made));
                made
            }
        };
        self.slice(HOST, name, (start, trace.seconds), json!({ "seconds": trace.seconds }))?;
        let mut splits: FxHashMap<usize, (usize, f64, f64)> = FxHashMap::default();
        for split in &trace.splits {
            let lane = lane(split.backend, Stream::Compute);
            let arguments = json!({ "split": split.split, "nodes": split.nodes });
            let span = (start + split.start, split.seconds);
            let (from, to) = self.slice(lane, &format!("split {}", split.split), span, arguments)?;
            splits.insert(split.split, (lane, from, to));
            self.memory(&in_use, split.backend, plan.splits().nodes_of(split.split), (from, to))?;
        }
        self.operations(happening, &in_use, &splits)?;
        for copy in &trace.copies {
            self.copy(plan, copy, start, &splits)?;
        }
        Ok(())
    }

    /// The most memory in use during a split, and what is in use after it.
    fn memory(
        &mut self,
        in_use: &InUse,
        backend: usize,
        nodes: &[quadriga_graph::NodeId],
        (from, to): (f64, f64),
    ) -> io::Result<()> {
        let Some(((kept, steps), name)) = in_use.backends.get(backend).zip(in_use.names.get(backend)) else {
            return Ok(());
        };
        let at = |step: usize| steps.get(step).copied().unwrap_or(0);
        let most = nodes.iter().map(|node| at(node.index())).max().unwrap_or(0);
        self.counter(name, from, *kept, most)?;
        let after = nodes.last().map_or(0, |node| at(node.index() + 1));
        self.counter(name, to, *kept, after)
    }

    /// The operations, inside their splits.
    fn operations(
        &mut self,
        happening: &Happening<'_>,
        in_use: &InUse,
        splits: &FxHashMap<usize, (usize, f64, f64)>,
    ) -> io::Result<()> {
        let mut before: FxHashMap<usize, f64> = FxHashMap::default();
        for operation in &happening.trace.operations {
            let Some((lane, from, to)) = splits.get(&operation.split).copied() else { continue };
            let least = before.get(&operation.split).copied().unwrap_or(from);
            let start = micros(happening.start + operation.start).clamp(least, to.max(least));
            let end =
                micros(happening.start + operation.start + operation.seconds).clamp(start, to.max(start));
            before.insert(operation.split, end);
            let graph = happening.plan.graph();
            let names: Vec<String> = operation
                .nodes
                .iter()
                .map(|node| graph.node_name(quadriga_graph::NodeId::from_index(*node)))
                .collect();
            self.complete(lane, &operation.operation, (start, end), json!({ "nodes": names }))?;
            let found = in_use.backends.get(operation.backend).zip(in_use.names.get(operation.backend));
            if let (Some(((kept, steps), name)), Some(node)) = (found, operation.nodes.first()) {
                self.counter(name, start, *kept, steps.get(*node).copied().unwrap_or(0))?;
            }
        }
        Ok(())
    }

    fn copy(
        &mut self,
        plan: &Plan,
        copy: &CopyTime,
        start: f64,
        splits: &FxHashMap<usize, (usize, f64, f64)>,
    ) -> io::Result<()> {
        let lane = lane(copy.backend, copy.stream);
        let name = plan.copy_name(copy.copy);
        let arguments = json!({ "copy": copy.copy, "bytes": copy.bytes });
        let (from, to) = self.slice(lane, &name, (start + copy.start, copy.seconds), arguments)?;
        let Some(planned) = plan.splits().copies.get(copy.copy) else { return Ok(()) };
        self.flows += 1;
        let id = self.flows;
        if let Some((source, begin, end)) = planned.source.and_then(|source| splits.get(&source)).copied() {
            // Inside the slice, at its end.
            self.flow("s", id, source, (end - 0.001).max(begin))?;
            self.flow("t", id, lane, from)?;
        } else {
            self.flow("s", id, lane, from)?;
        }
        match splits.get(&planned.reader).copied() {
            Some((lane, begin, _)) => self.flow("f", id, lane, begin),
            None => self.flow("f", id, lane, to),
        }
    }

    /// Writes the end and the seconds that the recording took in all, and gives back what was written to.
    pub fn finish(mut self, seconds: f64) -> io::Result<W> {
        writeln!(self.out, "\n],\"otherData\":{}}}", json!({ "writer": "quadriga", "seconds": seconds }))?;
        self.out.flush()?;
        Ok(self.out)
    }
}
