//! An SVG drawing of a plan for documents, for light and dark backgrounds: lanes of splits, and memory of each backend.

use std::collections::BTreeMap;
use std::fmt::Write;

use quadriga_runtime::{BackendLine, SplitLine, StorageLine, StorageUse};

use crate::Picture;
use crate::format::{bytes, coordinate, escape, plural, seconds};
use crate::summary::{fragmentation, labels, sentences};

const WIDTH: f64 = 900.0;
/// Copies that are drawn as one arrow.
#[derive(Default)]
struct CopyArrow {
    count: usize,
    bytes: u64,
    /// Whether some have selected slices only.
    selected: bool,
}

impl CopyArrow {
    fn text(&self) -> String {
        let many = if self.count == 1 { "copy of ".to_owned() } else { format!("{} copies, ", self.count) };
        format!("{many}{}{}", if self.selected { "at most " } else { "" }, bytes(self.bytes))
    }
}

/// The horizontal range of the plots.
const LEFT: f64 = 64.0;
const RIGHT: f64 = WIDTH - 12.0;
const LANE: f64 = 74.0;
const BLOCK: f64 = 48.0;
const MIN_BLOCK: f64 = 5.0;
const MAP: f64 = 170.0;
/// Characters per pixel, estimated.
const CHARACTERS: f64 = 1.0 / 6.6;

const STYLE: &str = "text{font:12px system-ui,sans-serif;fill:#1b2430}.head{font-weight:600;font-size:14px}.quiet{fill:#55627a}\
.paper{fill:#fff}.field{fill:#f4f6fa}.block{fill:#dfe7f5;stroke:#6f87b5}.band{fill:#6f87b5;fill-opacity:.1}.weight{fill:#6f87b5}.state{fill:#2f9187}\
.input{fill:#cf9410}.compute{fill:#7d9e3a}.copy{fill:#c2543f}.scratch{fill:#8a6fb0}.map path{stroke:#fff;stroke-width:.5}\
.arrow{fill:none;stroke:#c2543f;stroke-width:1.6}.line{stroke:#1b2430;stroke-width:1.2}.bound{stroke:#c2543f;stroke-dasharray:6 4}\
@media(prefers-color-scheme:dark){text{fill:#e6ebf3}.quiet{fill:#9aa8bf}.paper{fill:#12161d}.field{fill:#1a202a}.block{fill:#25314a;stroke:#7f9bd4}\
.weight{fill:#6f8cc7}.state{fill:#35a99d}.input{fill:#e0ac35}.compute{fill:#8fb548}.copy{fill:#e2745f}.scratch{fill:#a88bd0}.map path{stroke:#12161d}\
.arrow{stroke:#e2745f}.line{stroke:#e6ebf3}.bound{stroke:#e2745f}}";

const USES: [(StorageUse, &str, &str); 6] = [
    (StorageUse::Weight, "weight", "weights"),
    (StorageUse::State, "state", "KV cache (state)"),
    (StorageUse::Input, "input", "inputs"),
    (StorageUse::Compute, "compute", "results"),
    (StorageUse::Copy, "copy", "copies from other devices"),
    (StorageUse::Scratch, "scratch", "scratch"),
];

/// A drawing in progress; `y` is the bottom of what is drawn.
struct Drawing<'p> {
    picture: &'p Picture,
    out: String,
    y: f64,
}

impl Picture {
    /// The plan as an SVG drawing: lanes with splits and copies, then the memory of each backend.
    pub fn svg(&self) -> String {
        let mut drawing = Drawing { picture: self, out: String::new(), y: 0.0 };
        drawing.head();
        drawing.lanes();
        for (number, backend) in self.plan.backends.iter().enumerate() {
            drawing.strip(number, backend);
            for chunk in 0..backend.chunks.len() {
                drawing.map(number, backend, chunk);
            }
        }
        drawing.legend();
        drawing.finish()
    }
}

/// The text, shortened to a width in pixels.
fn fitted(text: &str, width: f64) -> String {
    let max = (width * CHARACTERS).max(0.0) as usize;
    if text.chars().count() <= max {
        return text.to_owned();
    }
    match max {
        0..=2 => String::new(),
        _ => text.chars().take(max - 1).chain(['…']).collect(),
    }
}

impl Drawing<'_> {
    fn x(&self, step: u32) -> f64 {
        LEFT + f64::from(step) / f64::from(self.picture.plan.steps.max(1)) * (RIGHT - LEFT)
    }

    /// The horizontal range of a split's block, at least [`MIN_BLOCK`] wide.
    fn block(&self, split: &SplitLine) -> (f64, f64) {
        let (from, to) = (self.x(split.first as u32), self.x(split.last as u32 + 1));
        let from = from.min(RIGHT - MIN_BLOCK);
        (from, to.max(from + MIN_BLOCK))
    }

    /// Appends a line of markup. Writing to a string cannot fail.
    fn put(&mut self, markup: std::fmt::Arguments<'_>) {
        let _ = self.out.write_fmt(markup);
        self.out.push('\n');
    }

    fn rectangle(&mut self, class: &str, x: f64, y: f64, width: f64, height: f64) {
        self.put(format_args!(
            "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\"/>",
            width.max(0.5),
            height.max(0.5)
        ));
    }

    fn text(&mut self, class: &str, x: f64, y: f64, text: &str) {
        self.put(format_args!("<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\">{}</text>", escape(text)));
    }

    fn text_right(&mut self, class: &str, x: f64, y: f64, text: &str) {
        let text = escape(text);
        self.put(format_args!(
            "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"end\">{text}</text>"
        ));
    }

    fn head(&mut self) {
        let picture = self.picture;
        self.text("head", 8.0, 20.0, &fitted(&format!("Plan of {}", picture.title), WIDTH - 20.0));
        self.text("quiet", 8.0, 38.0, &fitted(&picture.about, WIDTH - 20.0));
        self.y = 50.0;
    }

    fn lanes(&mut self) {
        let picture = self.picture;
        let plan = &picture.plan;
        let (labels, estimates) = (labels(plan), picture.estimates());
        let top = self.y;
        let lane = |backend: usize| top + backend as f64 * LANE + 8.0;
        for (number, backend) in plan.backends.iter().enumerate() {
            self.rectangle("field", LEFT, lane(number) - 3.0, RIGHT - LEFT, BLOCK + 6.0);
            self.text("head", 8.0, lane(number) + 28.0, &fitted(&backend.bytes.backend, LEFT - 10.0));
        }
        for (number, split) in plan.splits.iter().enumerate() {
            let y = lane(split.split.backend);
            let (from, to) = self.block(split);
            self.rectangle("block", from, y, to - from, BLOCK);
            let room = to - from - 14.0;
            let label = labels.get(number).map_or("", String::as_str);
            let name = format!("split {number}: {label}");
            self.text("head", from + 7.0, y + 18.0, &fitted(&name, room * 0.85));
            let time = estimates.get(number).copied().unwrap_or_default();
            let (nodes, traffic) = (split.split.node_count, bytes(split.cost.traffic));
            let nodes = plural(nodes, "node", "nodes");
            let sent = match split.cost.sent {
                0 => String::new(),
                sent => format!("{} sent to ranks, ", bytes(sent)),
            };
            let facts = format!("{nodes}, {traffic} memory traffic, {sent}≈ {}", seconds(time));
            self.text("quiet", from + 7.0, y + 36.0, &fitted(&facts, room));
        }
        // Copies with the same source and reader are drawn as one arrow.
        let mut arrows: BTreeMap<(Option<usize>, usize, usize), CopyArrow> = BTreeMap::new();
        for copy in plan.copies.iter().map(|line| &line.copy) {
            let arrow = arrows.entry((copy.source, copy.reader, copy.from)).or_default();
            (arrow.count, arrow.bytes) = (arrow.count + 1, arrow.bytes + copy.bytes as u64);
            arrow.selected |= copy.selected_by.is_some();
        }
        let few = arrows.len() <= 12;
        for ((source, reader, from), arrow) in arrows {
            let (Some(reader), source) =
                (plan.splits.get(reader), source.and_then(|source| plan.splits.get(source)))
            else {
                continue;
            };
            let down = from < reader.split.backend;
            let (y0, y1) = match down {
                true => (lane(from) + BLOCK, lane(reader.split.backend)),
                false => (lane(from), lane(reader.split.backend) + BLOCK),
            };
            // From near the end of the source's block to near the start of the reader's.
            let (left, right) = self.block(reader);
            let x1 = (left + 6.0).min((left + right) / 2.0) + if source.is_some() { 0.0 } else { 5.0 };
            // Data that exists before the run has no source split: the arrow is vertical.
            let x0 = source.map_or(x1, |source| self.block(source).1 - 6.0);
            let (middle, way) = ((y0 + y1) / 2.0, if down { 1.0 } else { -1.0 });
            self.put(format_args!(
                "<path class=\"arrow\" d=\"M{x0:.1} {y0:.1}C{x0:.1} {middle:.1} {x1:.1} {middle:.1} {x1:.1} {:.1}\"/>",
                y1 - 5.0 * way
            ));
            self.put(format_args!("<path class=\"copy\" d=\"M{x1:.1} {y1:.1}l-4 {:.1}h8z\"/>", -7.0 * way));
            if few {
                let text = arrow.text();
                if x1 + 130.0 < RIGHT {
                    self.text("", x1 + 10.0, middle + 4.0, &text);
                } else {
                    self.text_right("", x0 - 10.0, middle + 4.0, &text);
                }
            }
        }
        self.y = top + plan.backends.len() as f64 * LANE + 4.0;
    }

    /// All memory of a backend, to the same scale for all backends.
    fn strip(&mut self, number: usize, backend: &BackendLine) {
        let plan = &self.picture.plan;
        let largest = plan.backends.iter().map(|b| b.total + b.bytes.mapped).max().unwrap_or(1).max(1);
        let scale = (RIGHT - LEFT) / largest as f64;
        let top = self.y + 22.0;
        self.text("head", 8.0, top + 12.0, &fitted(&backend.bytes.backend, LEFT - 10.0));
        self.rectangle("field", LEFT, top, RIGHT - LEFT, 16.0);
        let mut at = LEFT;
        let b = &backend.bytes;
        for (class, size) in [("weight", b.weights + b.mapped), ("state", b.state), ("compute", b.compute)] {
            if size > 0 {
                self.rectangle(class, at, top, size as f64 * scale, 16.0);
                at += size as f64 * scale;
            }
        }
        let mut parts = vec![format!("weights {}", bytes(b.weights + b.mapped))];
        if b.mapped > 0 {
            parts.push(format!("{} of them memory-mapped", bytes(b.mapped)));
        }
        parts.push(format!("KV cache {}", bytes(b.state)));
        parts.push(format!("compute {}", bytes(b.compute)));
        let splits = plan.splits.iter().filter(|split| split.split.backend == number).count();
        if splits == 0 {
            parts.push("no splits".to_owned());
        }
        self.text("quiet", LEFT, top + 31.0, &parts.join(", "));
        self.y = top + 38.0;
    }

    /// The memory map of one buffer of a backend's arena: address over steps.
    fn map(&mut self, number: usize, backend: &BackendLine, chunk: usize) {
        let picture = self.picture;
        let plan = &picture.plan;
        let size = backend.chunks.get(chunk).copied().unwrap_or(0).max(1);
        let top = self.y + 18.0;
        let y = |address: u64| top + (1.0 - address as f64 / size as f64) * MAP;
        self.rectangle("field", LEFT, top, RIGHT - LEFT, MAP);
        for split in plan.splits.iter().filter(|split| split.split.backend == number) {
            let (from, to) = (self.x(split.first as u32), self.x(split.last as u32 + 1));
            self.rectangle("band", from, top, to - from, MAP);
        }
        self.put(format_args!("<g class=\"map\">"));
        for (usage, class, _) in USES {
            let mine =
                |s: &&StorageLine| s.usage == usage && s.backend == number && s.chunk == Some(chunk as u32);
            let mut path = String::new();
            // Rectangles that look the same are drawn once.
            let mut seen = std::collections::HashSet::new();
            for s in plan.storages.iter().filter(mine) {
                let offset = s.offset.unwrap_or(0);
                let (left, right) = (self.x(s.start), self.x(s.end));
                let (high, low) = (y(offset + s.bytes), y(offset));
                let outline = [left, right, high, low].map(|value| (value * 2.0).round() as i64);
                if !seen.insert(outline) {
                    continue;
                }
                path.push('M');
                coordinate(&mut path, left);
                path.push(' ');
                coordinate(&mut path, high);
                for (letter, length) in [('h', right - left), ('v', low - high), ('h', left - right)] {
                    path.push(letter);
                    coordinate(&mut path, if length < 0.0 { length.min(-0.4) } else { length.max(0.4) });
                }
                path.push('z');
            }
            if !path.is_empty() {
                self.put(format_args!("<path class=\"{class}\" d=\"{path}\"/>"));
            }
        }
        self.put(format_args!("</g>"));
        self.lines(backend, chunk, top, &y);
        self.y = top + MAP + 16.0;
    }

    /// The captions, the lower bound and the peak of a memory map.
    fn lines(&mut self, backend: &BackendLine, chunk: usize, top: f64, y: &dyn Fn(u64) -> f64) {
        let size = backend.chunks.get(chunk).copied().unwrap_or(0);
        let one = backend.chunks.len() == 1;
        self.put(format_args!("<path class=\"line\" d=\"M{LEFT:.1} {top:.1}H{RIGHT:.1}\"/>"));
        let name = &backend.bytes.backend;
        let quality = match (one, size == backend.lower_bound) {
            (false, _) => format!("buffer {} of {}", chunk + 1, backend.chunks.len()),
            (true, true) => "equal to the lower bound".to_owned(),
            (true, false) => format!("{:.1} % fragmentation", fragmentation(backend)),
        };
        self.text("", LEFT, top - 6.0, &format!("compute buffer of {name}: {}, {quality}", bytes(size)));
        self.text_right("quiet", LEFT - 5.0, top + 10.0, &bytes(size));
        self.text_right("quiet", LEFT - 5.0, top + MAP, "0");
        if !one {
            return;
        }
        if size > backend.lower_bound {
            let bound = y(backend.lower_bound);
            self.put(format_args!("<path class=\"line bound\" d=\"M{LEFT:.1} {bound:.1}H{RIGHT:.1}\"/>"));
        }
        let peak = self.x(backend.peak_step);
        let text = format!("peak at step {} of {}", backend.peak_step, self.picture.plan.steps);
        self.put(format_args!("<path class=\"line\" d=\"M{peak:.1} {:.1}v5\"/>", top + MAP));
        if peak + 170.0 < RIGHT {
            self.text("quiet", peak + 5.0, top + MAP + 12.0, &text);
        } else {
            self.text_right("quiet", peak - 5.0, top + MAP + 12.0, &text);
        }
    }

    fn legend(&mut self) {
        let y = self.y + 14.0;
        let mut x = LEFT;
        let picture = self.picture;
        for (usage, class, name) in USES {
            if picture.plan.storages.iter().any(|s| s.usage == usage) {
                self.rectangle(class, x, y - 9.0, 10.0, 10.0);
                self.text("quiet", x + 14.0, y, name);
                x += 30.0 + name.chars().count() as f64 * 6.4;
            }
        }
        self.text("quiet", LEFT, y + 18.0, "Steps go to the right, addresses up. A rectangle in a map is the memory of a tensor from its first write to its last read.");
        self.y = y + 28.0;
    }

    fn finish(self) -> String {
        let Drawing { picture, out, y } = self;
        let sentences = sentences(&picture.plan, &labels(&picture.plan)).join(" ");
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH:.0} {y:.0}\" role=\"img\">\n<title>{}</title>\n\
             <desc>{}</desc>\n<style>{STYLE}</style>\n<rect class=\"paper\" width=\"100%\" height=\"100%\" rx=\"6\"/>\n{out}</svg>\n",
            escape(&format!("Plan of {}", picture.title)),
            escape(&sentences)
        )
    }
}
