//! A drawing of the nodes of one split: in the DOT language, as SVG, or as a page.

use std::collections::HashMap;
use std::fmt::Write;

use quadriga_graph::{NodeId, Op, TensorId, TensorKind};
use quadriga_runtime::Plan;

use crate::format::{bytes, escape, plural};

/// Size of a box and the gaps between boxes, in pixels.
const BOX: (f64, f64) = (190.0, 38.0);
const GAP: (f64, f64) = (16.0, 34.0);
const MARGIN: f64 = 16.0;
const HEAD: f64 = 44.0;
/// Characters that fit a line of a box.
const CHARACTERS: usize = 28;

const STYLE: &str = "text{font:11px system-ui,sans-serif;fill:#1b2430;text-anchor:middle}.head{font-size:14px;font-weight:600;text-anchor:start}\
.paper{fill:#fff}.node{fill:#dfe7f5;stroke:#6f87b5}.collective{fill:#ead9f2;stroke:#8f4fb0}.weight{fill:#eef1f7;stroke:#6f87b5}.state{fill:#d9efec;stroke:#2f9187}.input{fill:#f8ecd0;stroke:#cf9410}\
.copy{fill:#f6ddd8;stroke:#c2543f}.result{fill:#e5edd5;stroke:#7d9e3a}.edge{fill:none;stroke:#55627a}.output{stroke-width:3}\
@media(prefers-color-scheme:dark){text{fill:#e6ebf3}.paper{fill:#12161d}.node{fill:#25314a}.collective{fill:#3b2547}.weight{fill:#1a202a}.state{fill:#173c39}.input{fill:#453410}\
.copy{fill:#4a2119}.result{fill:#2b3616}.edge{stroke:#9aa8bf}}";

/// A picture of one split of a plan: its nodes, what they read, and what leaves the split.
///
/// ```
/// use quadriga_graph::{DType, GraphBuilder};
/// use quadriga_runtime::Scheduler;
/// use quadriga_view::SplitPicture;
///
/// let g = GraphBuilder::new();
/// let x = g.input("x", DType::F32, [8, 64]);
/// g.output("y", x.sqr().named("squares").silu().named("y"));
/// let plan = Scheduler::new(quadriga_sim::Sim::new("sim:0").build()).plan(g.finish()?)?;
///
/// let picture = SplitPicture::new(&plan, 0).unwrap();
/// assert!(picture.dot().contains("squares"));
/// assert!(picture.svg().starts_with("<svg"));
/// assert!(SplitPicture::new(&plan, 1).is_none());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct SplitPicture {
    title: String,
    boxes: Vec<PictureBox>,
    /// From and to, by number.
    edges: Vec<(usize, usize)>,
}

/// A node, or something that nodes read.
#[derive(Clone, Debug)]
struct PictureBox {
    class: &'static str,
    /// Name; operation, type and shape.
    lines: [String; 2],
    /// The row that it is drawn in.
    row: usize,
    /// Whether its result is read after the split.
    leaves: bool,
}

impl SplitPicture {
    /// A picture of a split; `None` if the plan has no such split.
    pub fn new(plan: &Plan, split: usize) -> Option<SplitPicture> {
        let line = plan.splits().splits.get(split)?;
        let backend = plan.backends().get(line.backend).map_or("", |backend| backend.name());
        let nodes = plan.splits().nodes_of(split);
        let title = format!("Split {split} on {backend}: {}", plural(nodes.len(), "node", "nodes"));
        let mut picture = SplitPicture { title, boxes: Vec::new(), edges: Vec::new() };
        // The latest box of each storage: a write into a state makes a new one.
        let mut current: HashMap<TensorId, usize> = HashMap::new();
        for node in nodes {
            picture.node(plan, split, *node, &mut current);
        }
        Some(picture)
    }

    fn node(&mut self, plan: &Plan, split: usize, node: NodeId, current: &mut HashMap<TensorId, usize>) {
        let graph = plan.graph();
        let Some(n) = graph.get_node(node) else { return };
        let mut sources = Vec::new();
        for input in graph.inputs(node) {
            let Some(storage) = graph.get(*input).map(|tensor| tensor.storage()) else { continue };
            let source = match current.get(&storage) {
                Some(source) => *source,
                None => {
                    let source = self.outside(plan, split, *input, storage);
                    current.insert(storage, source);
                    source
                }
            };
            sources.push(source);
        }
        let row = sources.iter().filter_map(|source| self.boxes.get(*source)).map(|source| source.row + 1);
        let row = row.max().unwrap_or(0);
        let output = n.output();
        let described = graph.get(output).map(|t| format!("{} {}", t.dtype(), t.shape())).unwrap_or_default();
        let storage = graph.get(output).map_or(output, |tensor| tensor.storage());
        let number = self.boxes.len();
        self.boxes.push(PictureBox {
            class: if matches!(n.op(), Op::Collective(_)) { "collective" } else { "node" },
            lines: [graph.node_name(node), format!("{} {described}", n.op().name())],
            row,
            leaves: leaves(plan, split, storage),
        });
        sources.sort_unstable();
        sources.dedup();
        self.edges.extend(sources.into_iter().map(|source| (source, number)));
        current.insert(storage, number);
    }

    /// A box for something that is there before the split.
    fn outside(&mut self, plan: &Plan, split: usize, tensor: TensorId, storage: TensorId) -> usize {
        let graph = plan.graph();
        let backend = plan.splits().splits.get(split).map_or(0, |split| split.backend);
        let size = graph.get(storage).map_or(0, |storage| storage.bytes() as u64);
        let (class, what) = match (plan.copy_for(tensor, backend), graph.get(storage).map(|t| t.kind())) {
            (Some(copy), _) => {
                let from = plan.splits().copies.get(copy).map_or(0, |copy| copy.from);
                let from = plan.backends().get(from).map_or("", |backend| backend.name());
                ("copy", format!("copy from {from}"))
            }
            (None, Some(TensorKind::Weight)) => ("weight", "weight".to_owned()),
            (None, Some(TensorKind::Constant)) => ("weight", "constant".to_owned()),
            (None, Some(TensorKind::State)) => ("state", "state".to_owned()),
            (None, Some(TensorKind::Input)) => ("input", "input".to_owned()),
            (None, _) => ("result", "result of an earlier split".to_owned()),
        };
        let lines = [graph.name(storage), format!("{what}, {}", bytes(size))];
        self.boxes.push(PictureBox { class, lines, row: 0, leaves: false });
        self.boxes.len() - 1
    }

    /// The picture in the DOT language of Graphviz.
    pub fn dot(&self) -> String {
        let quoted = |text: &str| text.replace('\\', "\\\\").replace('"', "\\\"");
        let mut dot =
            format!("digraph split {{\n  label=\"{}\";\n  node [style=filled];\n", quoted(&self.title));
        for (number, shown) in self.boxes.iter().enumerate() {
            let (shape, color) = match shown.class {
                "node" => ("box", "#dfe7f5"),
                "collective" => ("box", "#ead9f2"),
                "weight" => ("ellipse", "#eef1f7"),
                "state" => ("cylinder", "#d9efec"),
                "input" => ("ellipse", "#f8ecd0"),
                "copy" => ("note", "#f6ddd8"),
                _ => ("ellipse", "#e5edd5"),
            };
            let [name, what] = &shown.lines;
            let border = if shown.leaves { ", penwidth=3" } else { "" };
            let label = format!("{}\\n{}", quoted(name), quoted(what));
            let _ = writeln!(
                dot,
                "  b{number} [label=\"{label}\", shape={shape}, fillcolor=\"{color}\"{border}];"
            );
        }
        for (from, to) in &self.edges {
            let _ = writeln!(dot, "  b{from} -> b{to};");
        }
        dot.push_str("}\n");
        dot
    }

    /// The picture as SVG: what is read first is at the top; thick borders mark results that are read after the split.
    pub fn svg(&self) -> String {
        let (places, width, height) = self.layout();
        let mut out = String::new();
        for (from, to) in &self.edges {
            let (Some((x1, y1)), Some((x2, y2))) = (places.get(*from), places.get(*to)) else { continue };
            let (x1, y1, x2) = (x1 + BOX.0 / 2.0, y1 + BOX.1, x2 + BOX.0 / 2.0);
            let middle = (y1 + y2) / 2.0;
            let path = format!("M{x1:.0} {y1:.0}C{x1:.0} {middle:.0} {x2:.0} {middle:.0} {x2:.0} {y2:.0}");
            let _ = writeln!(out, "<path class=\"edge\" d=\"{path}\"/>");
        }
        for (shown, (x, y)) in self.boxes.iter().zip(&places) {
            let class = if shown.leaves { format!("{} output", shown.class) } else { shown.class.to_owned() };
            let radius = if matches!(shown.class, "node" | "collective") { 3 } else { 16 };
            let (wide, high) = BOX;
            let _ = writeln!(
                out,
                "<rect class=\"{class}\" x=\"{x:.0}\" y=\"{y:.0}\" width=\"{wide:.0}\" height=\"{high:.0}\" rx=\"{radius}\"/>"
            );
            for (line, text) in shown.lines.iter().enumerate() {
                let (x, y) = (x + wide / 2.0, y + 16.0 + 14.0 * line as f64);
                let full = escape(text);
                let text = escape(&fitted(text));
                let _ = writeln!(out, "<text x=\"{x:.0}\" y=\"{y:.0}\">{text}<title>{full}</title></text>");
            }
        }
        let title = escape(&self.title);
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" role=\"img\">\n\
             <title>{title}</title>\n<style>{STYLE}</style>\n<rect class=\"paper\" width=\"100%\" height=\"100%\"/>\n\
             <text class=\"head\" x=\"{MARGIN}\" y=\"26\">{title}</text>\n{out}</svg>\n"
        )
    }

    /// The picture as a page that needs nothing else.
    pub fn html(&self) -> String {
        format!(
            "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><title>{}</title>\n<body style=\"margin:0\">\n{}</body></html>\n",
            escape(&self.title),
            self.svg()
        )
    }

    /// The upper left corner of every box, and the size of the drawing.
    fn layout(&self) -> (Vec<(f64, f64)>, f64, f64) {
        let mut rows = self.rows();
        let count = rows.iter().max().map_or(0, |row| row + 1);
        let mut used = vec![0usize; count];
        let columns: Vec<usize> = rows
            .iter()
            .map(|row| used.get_mut(*row).map_or(0, |used| std::mem::replace(used, *used + 1)))
            .collect();
        let widest = used.into_iter().max().unwrap_or(1).max(2) as f64;
        let at = |(column, row): (&usize, usize)| {
            let x = MARGIN + *column as f64 * (BOX.0 + GAP.0);
            (x, HEAD + row as f64 * (BOX.1 + GAP.1))
        };
        let places = columns.iter().zip(rows.drain(..)).map(at).collect();
        let width = 2.0 * MARGIN + widest * (BOX.0 + GAP.0) - GAP.0;
        (places, width, HEAD + count as f64 * (BOX.1 + GAP.1) - GAP.1 + MARGIN)
    }

    /// For each box its row: what is read from outside is right above its first reader.
    fn rows(&self) -> Vec<usize> {
        let mut rows: Vec<usize> = self.boxes.iter().map(|shown| shown.row).collect();
        for (number, shown) in
            self.boxes.iter().enumerate().filter(|(_, shown)| !matches!(shown.class, "node" | "collective"))
        {
            let readers = self.edges.iter().filter(|(from, _)| *from == number);
            let first = readers.filter_map(|(_, to)| self.boxes.get(*to)).map(|reader| reader.row).min();
            if let (Some(row), Some(first)) = (rows.get_mut(number), first) {
                *row = first.saturating_sub(1).max(shown.row);
            }
        }
        rows
    }
}

/// Whether a storage is read after a split, or is an output.
fn leaves(plan: &Plan, split: usize, storage: TensorId) -> bool {
    let graph = plan.graph();
    let is_it = |id: &TensorId| graph.get(*id).is_some_and(|tensor| tensor.storage() == storage);
    let output = graph.outputs().iter().any(|(_, id)| is_it(id));
    let copied = plan.splits().copies.iter().any(|copy| copy.storage == storage.index());
    let later = plan.splits().splits.len();
    let read = (split + 1..later)
        .flat_map(|later| plan.splits().nodes_of(later))
        .any(|node| graph.inputs(*node).iter().any(is_it));
    output || copied || read
}

/// The text, shortened to a line of a box.
fn fitted(text: &str) -> String {
    if text.chars().count() <= CHARACTERS {
        return text.to_owned();
    }
    // The end of a name tells more than its start.
    let skip = text.chars().count() + 1 - CHARACTERS;
    std::iter::once('…').chain(text.chars().skip(skip)).collect()
}
