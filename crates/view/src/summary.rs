//! A plan in a few sentences: what runs where, what is copied, how big the buffers are and why.

use quadriga_graph::layer_of;
use quadriga_runtime::{BackendLine, Explanation, NodeLine, StorageLine};

use crate::format::{bytes, count, list, plural};

/// How many of the tensors at the peak are named.
const NAMED: usize = 3;

/// What each split computes, in a few words: `layers 0–14`, `layers 15–29 + logits`.
pub(crate) fn labels(plan: &Explanation) -> Vec<String> {
    let mut nodes: Vec<Vec<&NodeLine>> = vec![Vec::new(); plan.splits.len()];
    for node in &plan.nodes {
        if let Some(list) = nodes.get_mut(node.split) {
            list.push(node);
        }
    }
    nodes.iter().map(|nodes| label(nodes)).collect()
}

fn label(nodes: &[&NodeLine]) -> String {
    let layers = nodes.iter().filter_map(|node| layer_of(&node.name));
    let range = layers.clone().min().zip(layers.max());
    // The last name of its own; before the layers an operation will do.
    let named =
        |part: &[&NodeLine]| part.iter().rev().find(|node| !node.name.contains('#')).map(|n| n.name.clone());
    let any = |part: &[&NodeLine]| part.last().map(|node| node.operation.to_owned());
    let first = nodes.iter().position(|node| layer_of(&node.name).is_some()).unwrap_or(nodes.len());
    let last = nodes.iter().rposition(|node| layer_of(&node.name).is_some()).map_or(nodes.len(), |at| at + 1);
    let middle = match range {
        Some((from, to)) if from == to => Some(format!("layer {from}")),
        Some((from, to)) => Some(format!("layers {from}–{to}")),
        None => None,
    };
    let before = nodes.get(..first).and_then(|part| named(part).or_else(|| any(part)));
    let after = nodes.get(last..).and_then(named);
    let parts: Vec<String> = before.into_iter().chain(middle).chain(after).collect();
    if parts.is_empty() { "nothing".to_owned() } else { parts.join(" + ") }
}

/// The plan in sentences, one thing each.
pub(crate) fn sentences(plan: &Explanation, labels: &[String]) -> Vec<String> {
    let mut all = vec![format!(
        "{} in {} on {}.",
        plural(plan.nodes.len(), "operation", "operations"),
        plural(plan.splits.len(), "split", "splits"),
        list(&plan.backends.iter().map(|b| b.bytes.backend.clone()).collect::<Vec<_>>())
    )];
    all.push(what_runs_where(plan, labels));
    all.push(what_is_copied(plan));
    for (number, backend) in plan.backends.iter().enumerate() {
        all.extend(buffer(plan, number, backend));
    }
    all
}

fn what_runs_where(plan: &Explanation, labels: &[String]) -> String {
    let mut parts = Vec::new();
    for (number, backend) in plan.backends.iter().enumerate() {
        let mine: Vec<(usize, &String)> = labels
            .iter()
            .enumerate()
            .filter(|(split, _)| plan.splits.get(*split).is_some_and(|s| s.split.backend == number))
            .collect();
        let name = &backend.bytes.backend;
        let named = mine.iter().take(3).map(|(split, label)| format!("{label} (split {split})"));
        let mut named: Vec<String> = named.collect();
        match mine.len().saturating_sub(3) {
            0 => {}
            more => named.push(format!("{more} more")),
        }
        parts.push(match mine.len() {
            0 => format!("{name} computes nothing"),
            _ => format!("{name} computes {}", list(&named)),
        });
    }
    format!("{}.", parts.join("; "))
}

fn what_is_copied(plan: &Explanation) -> String {
    if plan.copies.is_empty() {
        return "Nothing is copied between devices.".to_owned();
    }
    let name = |backend: usize| plan.backends.get(backend).map_or("", |b| b.bytes.backend.as_str());
    let mut pairs: Vec<(usize, usize)> = plan.copies.iter().map(|c| (c.copy.from, c.copy.to)).collect();
    pairs.sort_unstable();
    pairs.dedup();
    let pair = |(from, to): &(usize, usize)| {
        let mine = plan.copies.iter().filter(|c| (c.copy.from, c.copy.to) == (*from, *to));
        let sum: u64 = mine.clone().map(|c| c.copy.bytes as u64).sum();
        let what = match mine.clone().next() {
            Some(only) if mine.clone().count() == 1 => format!(" ({})", only.name),
            _ => format!(" in {}", plural(mine.count(), "copy", "copies")),
        };
        format!("{} from {} to {}{what}", bytes(sum), name(*from), name(*to))
    };
    let lent: u64 = plan.copies.iter().filter(|c| c.lent).map(|c| c.copy.bytes as u64).sum();
    let lent = match lent {
        0 => String::new(),
        lent => format!("; {} of that are weights that are lent for the run", bytes(lent)),
    };
    format!("Each run copies {}{lent}.", list(&pairs.iter().map(pair).collect::<Vec<_>>()))
}

/// What is in use in a step of a backend's arena, largest first.
pub(crate) fn alive(plan: &Explanation, backend: usize, step: u32) -> Vec<&StorageLine> {
    let here =
        |s: &&StorageLine| s.backend == backend && s.chunk.is_some() && (s.start..s.end).contains(&step);
    let mut alive: Vec<&StorageLine> = plan.storages.iter().filter(here).collect();
    alive.sort_by_key(|s| std::cmp::Reverse(s.bytes));
    alive
}

/// Bytes of a backend's arena beyond what is ever in use in one step, in percent of the arena.
pub(crate) fn waste(backend: &BackendLine) -> f64 {
    let compute = backend.bytes.compute;
    100.0 * compute.saturating_sub(backend.lower_bound) as f64 / (compute as f64).max(1.0)
}

fn buffer(plan: &Explanation, number: usize, backend: &BackendLine) -> Option<String> {
    let size = backend.bytes.compute;
    if size == 0 {
        return None;
    }
    let alive = alive(plan, number, backend.peak_step);
    let mut parts: Vec<String> =
        alive.iter().take(NAMED).map(|s| format!("{} {}", s.name, bytes(s.bytes))).collect();
    let rest: u64 = alive.iter().skip(NAMED).map(|s| s.bytes).sum();
    if alive.len() > NAMED {
        parts.push(format!("{} others {}", count((alive.len() - NAMED) as f64), bytes(rest)));
    }
    let (most, quality) = if size == backend.lower_bound {
        ("so much is".to_owned(), "no smaller buffer would do".to_owned())
    } else {
        let most = format!("{} are", bytes(backend.lower_bound));
        (most, format!("{:.1} % of the buffer are gaps", waste(backend)))
    };
    Some(format!(
        "The compute buffer of {} is {}: {most} in use at once in step {} ({}); {quality}. Without sharing it would be {}.",
        backend.bytes.backend,
        bytes(size),
        backend.peak_step,
        list(&parts),
        bytes(backend.unshared)
    ))
}
