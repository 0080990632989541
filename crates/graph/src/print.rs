//! A graph as a table, and in Graphviz's dot language.

use std::fmt;

use crate::graph::Graph;
use crate::tensor::{TensorId, TensorKind};

impl fmt::Display for Graph {
    /// A table: the leaves, then each node with its result and inputs, then the outputs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} nodes, {} tensors, fingerprint {}",
            self.nodes.len(),
            self.tensors.len(),
            self.fingerprint
        )?;
        for id in self.tensor_ids() {
            let t = &self[id];
            if matches!(t.kind, TensorKind::Computed(_)) {
                continue;
            }
            let kind = t.kind.name();
            writeln!(f, "{kind:>8}  {:<32} {:<8} {}", self.name(id), t.dtype, t.shape)?;
        }
        for node in self.node_ids() {
            let n = &self[node];
            let t = &self[n.output];
            let inputs: Vec<String> = self.inputs(node).iter().map(|id| self.name(*id)).collect();
            let place = if t.storage == n.output {
                String::new()
            } else {
                format!("  in {}+{}", self.name(t.storage), t.offset)
            };
            writeln!(
                f,
                "{:>8}  {:<32} {:<8} {} = {}({}){place}",
                node.0,
                self.name(n.output),
                t.dtype,
                t.shape,
                n.op.name(),
                inputs.join(", ")
            )?;
        }
        for (name, id) in &self.outputs {
            writeln!(f, "  output  {name:<32} = {}", self.name(*id))?;
        }
        Ok(())
    }
}

impl Graph {
    /// The graph in Graphviz's dot language: leaves as boxes, results as ellipses, an edge per input.
    pub fn to_dot(&self) -> String {
        let mut dot = String::from("digraph graph_ {\n  rankdir=TB;\n  node [fontname=\"sans-serif\"];\n");
        for id in self.tensor_ids() {
            let t = &self[id];
            let shape = if matches!(t.kind, TensorKind::Computed(_)) { "ellipse" } else { "box" };
            let kept = if self.outputs.iter().any(|(_, o)| *o == id) { ", peripheries=2" } else { "" };
            let label = dot_text(&format!("{}\\n{} {}", self.name(id), t.dtype, t.shape));
            dot.push_str(&format!("  t{} [shape={shape}{kept}, label=\"{label}\"];\n", id.0));
        }
        for node in self.node_ids() {
            let to: TensorId = self[node].output;
            for from in self.inputs(node) {
                dot.push_str(&format!("  t{} -> t{};\n", from.0, to.0));
            }
        }
        dot.push_str("}\n");
        dot
    }
}

/// Escapes text for a dot label.
fn dot_text(text: &str) -> String {
    text.replace('"', "\\\"")
}
