//! A plan as text: splits, copies, bytes, and the reason for every placement; also in the dot language.

use std::fmt;

use quadriga_graph::{NodeId, Op, TensorId};

use super::placement::Reason;
use super::plan::Plan;
use super::splits::Copy;
use crate::Cost;

impl Plan {
    /// The reason for a node's placement, in words.
    pub fn reason(&self, node: NodeId) -> String {
        let output = self.graph().get_node(node).map(|n| n.output());
        let storage = output.and_then(|output| self.graph().get(output)).map(|t| t.storage());
        match storage.filter(|_| self.decision(node).is_some()) {
            Some(storage) => self.reason_of(storage),
            None => "a view of a leaf".to_owned(),
        }
    }

    /// The reason for a storage's placement, in words.
    pub(crate) fn reason_of(&self, storage: TensorId) -> String {
        let Some((reason, refused_by)) = self.reason_for(storage) else { return String::new() };
        let name = |index: usize| self.graph().name(TensorId::from_index(index));
        let why = match reason {
            Reason::Pinned => "placed by the caller".to_owned(),
            Reason::HoldsSource { tensor } => format!("{} is placed there", name(tensor)),
            Reason::FollowsSource { tensor } => format!("follows {}", name(tensor)),
            Reason::Streams { tensor } => format!("{} is streamed there", name(tensor)),
            Reason::FollowsConsumer { node } => {
                format!("first read by {}", self.graph().node_name(NodeId::from_index(node)))
            }
            Reason::SavesCopy { node } => {
                format!(
                    "moved to its reader {}: fewer bytes to copy",
                    self.graph().node_name(NodeId::from_index(node))
                )
            }
            Reason::Preferred => "most preferred backend".to_owned(),
            Reason::WhereRead => "on every backend that reads it".to_owned(),
        };
        match refused_by.and_then(|backend| self.backends().get(backend)) {
            Some(backend) => format!("{why}; {} does not compute it", backend.name()),
            None => why,
        }
    }

    /// The collectives among some nodes, and the bytes that this rank sends for them in a run; empty if there are none.
    pub(super) fn collectives(&self, nodes: &[NodeId]) -> String {
        let mut found: Vec<(&str, usize)> = Vec::new();
        let mut sent = 0u64;
        for node in nodes {
            let Some(op @ Op::Collective(_)) = self.graph().get_node(*node).map(|n| n.op()) else { continue };
            sent = sent.saturating_add(Cost::of(self.graph(), *node).sent);
            match found.iter_mut().find(|(name, _)| *name == op.name()) {
                Some((_, times)) => *times += 1,
                None => found.push((op.name(), 1)),
            }
        }
        let names: Vec<String> = found.iter().map(|(name, times)| format!("{times} × {name}")).collect();
        if names.is_empty() { String::new() } else { format!("{}, {sent} bytes sent", names.join(", ")) }
    }

    /// The splits and copies in the dot language: a box for each split, an arrow for each copy.
    pub fn to_dot(&self) -> String {
        let splits = self.splits();
        let mut dot = String::from("digraph plan {\n  node [shape=box, fontname=\"sans-serif\"];\n");
        for (number, split) in splits.splits.iter().enumerate() {
            let backend = self.backends().get(split.backend).map_or("", |b| b.name());
            let nodes = splits.nodes_of(number);
            let name = |node: Option<&NodeId>| node.map_or_else(String::new, |n| self.graph().node_name(*n));
            let label = format!(
                "split {number} on {backend}\\n{}: {} … {}",
                count(nodes.len(), "node"),
                name(nodes.first()),
                name(nodes.last())
            );
            let label = match self.collectives(nodes) {
                own if own.is_empty() => label,
                own => format!("{label}\\n{own}"),
            };
            let label = label.replace('"', "\\\"");
            dot.push_str(&format!(
                "  s{number} [label=\"{label}\", colorscheme=set312, style=filled, fillcolor={}];\n",
                split.backend % 12 + 1
            ));
        }
        for (number, copy) in splits.copies.iter().enumerate() {
            let label = format!("{}\\n{}", self.copy_name(number), copied(copy)).replace('"', "\\\"");
            let from = match copy.source {
                Some(source) => format!("s{source}"),
                None => {
                    let name = self.graph().name(TensorId::from_index(copy.storage)).replace('"', "\\\"");
                    dot.push_str(&format!("  c{number} [label=\"{name}\", shape=ellipse];\n"));
                    format!("c{number}")
                }
            };
            dot.push_str(&format!("  {from} -> s{} [label=\"{label}\"];\n", copy.reader));
        }
        for lane in &splits.lanes {
            for (before, after) in lane.iter().zip(lane.iter().skip(1)) {
                dot.push_str(&format!("  s{before} -> s{after} [style=dotted, arrowhead=none];\n"));
            }
        }
        dot.push_str("}\n");
        dot
    }
}

/// The bytes of a copy, in words.
fn copied(copy: &Copy) -> String {
    format!("{}{} bytes", if copy.selected_by.is_some() { "at most " } else { "" }, copy.bytes)
}

/// A number with a noun, in the singular or plural.
fn count(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (graph, splits) = (self.graph(), self.splits());
        let (nodes, copies) = (count(splits.nodes.len(), "node"), splits.copies.len());
        let copies = if copies == 1 { "1 copy".to_owned() } else { format!("{copies} copies") };
        writeln!(f, "{nodes} in {} with {copies}", count(splits.splits.len(), "split"))?;
        let all = self.collectives(&splits.nodes);
        if !all.is_empty() {
            writeln!(f, "{all}")?;
        }
        for bytes in self.bytes() {
            writeln!(
                f,
                "{}: weights {}, mapped {}, state {}, compute {}",
                bytes.backend, bytes.weights, bytes.mapped, bytes.state, bytes.compute
            )?;
        }
        for (number, split) in splits.splits.iter().enumerate() {
            let backend = self.backends().get(split.backend).map_or("", |b| b.name());
            write!(f, "split {number} on {backend}: {}", count(split.node_count, "node"))?;
            for copy in &split.inputs {
                let bytes = splits.copies.get(*copy).map_or_else(String::new, copied);
                write!(f, "; reads {} ({bytes})", self.copy_name(*copy))?;
            }
            let own = self.collectives(splits.nodes_of(number));
            if !own.is_empty() {
                write!(f, "; {own}")?;
            }
            writeln!(f)?;
            if f.alternate() {
                for node in splits.nodes_of(number) {
                    let operation = graph.get_node(*node).map_or("", |n| n.op().name());
                    let (name, reason) = (graph.node_name(*node), self.reason(*node));
                    writeln!(f, "  {:>6} {operation:<12} {name:<32} {reason}", node.index())?;
                }
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Plan of {} splits for graph {}", self.splits().splits.len(), self.graph().fingerprint())
    }
}
