//! The interactive page: one self-contained HTML file. The plan is embedded as columns, which keeps large plans compact.

use std::collections::HashMap;

use quadriga_runtime::{CopyLine, SplitLine, StorageUse};
use serde::Serialize;
use serde_json::{Value, json};

use crate::Picture;
use crate::format::escape;
use crate::summary::{fragmentation, labels, sentences};

const SHELL: &str = include_str!("page/page.html");
const STYLE: &str = include_str!("page/page.css");
const SCRIPTS: [&str; 4] = [
    include_str!("page/data.js"),
    include_str!("page/charts.js"),
    include_str!("page/details.js"),
    include_str!("page/controls.js"),
];

/// Deduplicated strings; the columns hold their indices.
#[derive(Default)]
struct Texts {
    all: Vec<String>,
    number: HashMap<String, usize>,
}

impl Texts {
    fn add(&mut self, text: &str) -> usize {
        if let Some(number) = self.number.get(text) {
            return *number;
        }
        self.all.push(text.to_owned());
        self.number.insert(text.to_owned(), self.all.len() - 1);
        self.all.len() - 1
    }

    fn column<'t>(&mut self, texts: impl Iterator<Item = &'t str>) -> Vec<usize> {
        texts.map(|text| self.add(text)).collect()
    }
}

/// The value, or −1 for none.
fn or_none<T: Into<i64>>(value: Option<T>) -> i64 {
    value.map_or(-1, Into::into)
}

fn index(value: Option<usize>) -> i64 {
    or_none(value.map(|value| value as i64))
}

fn shape(dims: &[usize]) -> String {
    dims.iter().map(usize::to_string).collect::<Vec<_>>().join(" × ")
}

impl Picture {
    /// The plan as one self-contained HTML page that needs no network.
    pub fn html(&self) -> String {
        // Only `<` can end a script element; in JSON it occurs only inside strings.
        let data = self.columns().to_string().replace('<', "\\u003c");
        let scripts: String = SCRIPTS.iter().map(|script| format!("<script>\n{script}</script>\n")).collect();
        let parts = [
            ("<!--TITLE-->", escape(&self.title)),
            ("<!--STYLE-->", format!("<style>\n{STYLE}</style>")),
            ("<!--SCRIPTS-->", scripts),
            ("<!--PLAN-->", data),
        ];
        // The plan is inserted last, so that its strings are not searched for placeholders.
        parts.iter().fold(SHELL.to_owned(), |page, (mark, text)| page.replacen(mark, text, 1))
    }

    /// The plan in the form that data.js reads.
    fn columns(&self) -> Value {
        let plan = &self.plan;
        let labels = labels(plan);
        let mut texts = Texts::default();
        let nodes = {
            let all = || plan.nodes.iter();
            json!({
                "node": all().map(|n| n.node).collect::<Vec<_>>(),
                "name": texts.column(all().map(|n| n.name.as_str())),
                "operation": texts.column(all().map(|n| n.operation)),
                "split": all().map(|n| n.split).collect::<Vec<_>>(),
                "dtype": texts.column(all().map(|n| n.dtype)),
                "shape": all().map(|n| texts.add(&shape(&n.shape))).collect::<Vec<_>>(),
                "bytes": all().map(|n| n.bytes).collect::<Vec<_>>(),
                "operations": all().map(|n| n.cost.operations).collect::<Vec<_>>(),
                "traffic": all().map(|n| n.cost.traffic).collect::<Vec<_>>(),
                "sent": all().map(|n| n.cost.sent).collect::<Vec<_>>(),
                "storage": all().map(|n| index(n.storage)).collect::<Vec<_>>(),
                "why": texts.column(all().map(|n| n.why.as_str())),
            })
        };
        let storages = {
            let all = || plan.storages.iter();
            json!({
                "name": texts.column(all().map(|s| s.name.as_str())),
                "usage": all().map(|s| usage(s.usage)).collect::<Vec<_>>(),
                "backend": all().map(|s| s.backend).collect::<Vec<_>>(),
                "bytes": all().map(|s| s.bytes).collect::<Vec<_>>(),
                "chunk": all().map(|s| or_none(s.chunk)).collect::<Vec<_>>(),
                "offset": all().map(|s| s.offset.unwrap_or(0)).collect::<Vec<_>>(),
                "start": all().map(|s| s.start).collect::<Vec<_>>(),
                "end": all().map(|s| s.end).collect::<Vec<_>>(),
                "node": all().map(|s| index(s.node)).collect::<Vec<_>>(),
                "dtype": texts.column(all().map(|s| s.dtype)),
                "shape": all().map(|s| texts.add(&shape(&s.shape))).collect::<Vec<_>>(),
                "results": all().map(|s| s.results).collect::<Vec<_>>(),
                "mapped": all().map(|s| u8::from(s.mapped)).collect::<Vec<_>>(),
                "packed": all().map(|s| u8::from(s.packed)).collect::<Vec<_>>(),
                "why": texts.column(all().map(|s| s.why.as_str())),
            })
        };
        let estimates = self.estimates();
        let splits: Vec<Value> = plan
            .splits
            .iter()
            .zip(labels.iter().zip(&estimates))
            .map(|(line, (label, seconds))| split(line, label, *seconds))
            .collect();
        json!({
            "schema": plan.schema,
            "title": self.title,
            "about": self.about,
            "sentences": sentences(plan, &labels),
            "measured": self.limits.iter().all(|limits| limits.measured),
            "steps": plan.steps,
            "backends": plan.backends.iter().map(backend).collect::<Vec<_>>(),
            "splits": splits,
            "copies": plan.copies.iter().map(copy).collect::<Vec<_>>(),
            "nodes": nodes,
            "storages": storages,
            "texts": texts.all,
        })
    }
}

/// The index of a usage in the legend (`USAGES` of data.js).
fn usage(usage: StorageUse) -> u8 {
    match usage {
        StorageUse::Weight => 0,
        StorageUse::State => 1,
        StorageUse::Input => 2,
        StorageUse::Compute => 3,
        StorageUse::Copy => 4,
        StorageUse::Scratch => 5,
    }
}

/// A line of the explanation with additional fields.
fn with(line: impl Serialize, more: &[(&str, Value)]) -> Value {
    let mut object = serde_json::to_value(line).unwrap_or_default();
    if let Some(object) = object.as_object_mut() {
        object.extend(more.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
    }
    object
}

fn backend(line: &quadriga_runtime::BackendLine) -> Value {
    with(line, &[("fragmentation", json!(fragmentation(line)))])
}

fn split(line: &SplitLine, label: &str, seconds: f64) -> Value {
    with(line, &[("label", json!(label)), ("seconds", json!(seconds))])
}

fn copy(line: &CopyLine) -> Value {
    with(line, &[])
}
