//! A summary of a plan in sentences: placement, copies, size and peak of each arena.

use std::collections::{BTreeMap, BTreeSet};

use quadriga_graph::layer_of;
use quadriga_runtime::{BackendLine, CopyLine, Explanation, NodeLine, StorageLine};

use crate::format::{bytes, list, plural};

/// The number of tensors at the peak that are named.
const MAX_NAMED: usize = 3;

/// A label of each split's content: `layers 0–14`, `layers 15–29 + logits`.
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
    // The last node with an explicit name; before the layers, else the last operation.
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

/// The plan in sentences.
pub(crate) fn sentences(plan: &Explanation, labels: &[String]) -> Vec<String> {
    let mut all = overview(plan, labels);
    for (number, backend) in plan.backends.iter().enumerate() {
        all.extend(buffer(plan, number, backend));
    }
    all
}

/// Placement, copies and streamed weights in sentences.
pub(crate) fn overview(plan: &Explanation, labels: &[String]) -> Vec<String> {
    let mut all = vec![format!(
        "{} in {} on {}.",
        plural(plan.nodes.len(), "operation", "operations"),
        plural(plan.splits.len(), "split", "splits"),
        list(&plan.backends.iter().map(|b| b.bytes.backend.clone()).collect::<Vec<_>>())
    )];
    all.push(placement(plan, labels));
    all.push(copies(plan));
    all.extend(collectives(plan));
    all.extend(streamed(plan));
    all
}

fn placement(plan: &Explanation, labels: &[String]) -> String {
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

fn copies(plan: &Explanation) -> String {
    if plan.copies.is_empty() {
        return "No copies between devices.".to_owned();
    }
    let name = |backend: usize| plan.backends.get(backend).map_or("", |b| b.bytes.backend.as_str());
    let mut pairs: Vec<(usize, usize)> = plan.copies.iter().map(|c| (c.copy.from, c.copy.to)).collect();
    pairs.sort_unstable();
    pairs.dedup();
    let pair = |(from, to): &(usize, usize)| {
        let mine = plan.copies.iter().filter(|c| (c.copy.from, c.copy.to) == (*from, *to));
        let sum: u64 = mine.clone().map(|c| c.copy.bytes as u64).sum();
        let sum = at_most(bytes(sum), mine.clone());
        let what = match mine.clone().next() {
            Some(only) if mine.clone().count() == 1 => format!(" ({})", only.name),
            _ => format!(" in {}", plural(mine.count(), "copy", "copies")),
        };
        format!("{sum} from {} to {}{what}", name(*from), name(*to))
    };
    format!("Each run copies {}.", list(&pairs.iter().map(pair).collect::<Vec<_>>()))
}

/// The operations that this rank executes together with others, and the bytes that it sends for them.
fn collectives(plan: &Explanation) -> Option<String> {
    let mut times: BTreeMap<&str, usize> = BTreeMap::new();
    for node in plan.nodes.iter().filter(|node| node.collective) {
        *times.entry(node.operation).or_default() += 1;
    }
    let sent = plan.nodes.iter().fold(0u64, |sum, node| sum.saturating_add(node.cost.sent));
    let parts: Vec<String> = times.iter().map(|(name, times)| format!("{times} × {name}")).collect();
    let sum = bytes(sent);
    (!parts.is_empty())
        .then(|| format!("Each run exchanges data with other ranks: {}; {sum} sent.", list(&parts)))
}

/// The streamed weights: how many, their bytes, and which layers they belong to.
fn streamed(plan: &Explanation) -> Option<String> {
    let streamed: Vec<&CopyLine> = plan.copies.iter().filter(|copy| copy.streamed).collect();
    let sum: u64 = streamed.iter().map(|copy| copy.copy.bytes as u64).sum();
    let layers: BTreeSet<usize> = streamed.iter().filter_map(|copy| layer_of(name_of(copy))).collect();
    let others: BTreeSet<&str> =
        streamed.iter().map(|copy| name_of(copy)).filter(|name| layer_of(name).is_none()).collect();
    let mut parts = ranges(&layers);
    if let Some(first) = parts.first_mut() {
        *first = format!("{} {first}", if layers.len() == 1 { "layer" } else { "layers" });
    }
    parts.extend(others.iter().take(MAX_NAMED).map(|name| (*name).to_owned()));
    if others.len() > MAX_NAMED {
        parts.push(format!("{} more", others.len() - MAX_NAMED));
    }
    let count = plural(streamed.len(), "weight", "weights");
    let sum = at_most(bytes(sum), streamed.iter().copied());
    let selected = streamed.iter().any(|copy| copy.copy.selected_by.is_some());
    let experts = if selected { ", of experts only those that the batch uses" } else { "" };
    (!streamed.is_empty()).then(|| format!("Each run streams {count} ({sum}) of {}{experts}.", list(&parts)))
}

/// The bytes of copies, which are fewer where slices are selected.
fn at_most<'c>(bytes: String, mut copies: impl Iterator<Item = &'c CopyLine>) -> String {
    if copies.any(|copy| copy.copy.selected_by.is_some()) { format!("at most {bytes}") } else { bytes }
}

/// The name of a copied tensor, without the prefix of the backend that the copy is for.
fn name_of(copy: &CopyLine) -> &str {
    copy.name.split_once('#').map_or(copy.name.as_str(), |(_, name)| name)
}

/// Numbers with runs of consecutive ones as ranges: `0, 2, 4–7`.
fn ranges(numbers: &BTreeSet<usize>) -> Vec<String> {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == *number => *last = *number,
            _ => ranges.push((*number, *number)),
        }
    }
    let text = |(first, last): &(usize, usize)| match last - first {
        0 => first.to_string(),
        1 => format!("{first}, {last}"),
        _ => format!("{first}–{last}"),
    };
    ranges.iter().map(text).collect()
}

/// The storages of a backend's arena that are live in a step, largest first.
fn live(plan: &Explanation, backend: usize, step: u32) -> Vec<&StorageLine> {
    let here =
        |s: &&StorageLine| s.backend == backend && s.chunk.is_some() && (s.start..s.end).contains(&step);
    let mut live: Vec<&StorageLine> = plan.storages.iter().filter(here).collect();
    live.sort_by_key(|s| std::cmp::Reverse(s.bytes));
    live
}

/// The part of a backend's arena that exceeds the most bytes live in one step, in percent.
pub(crate) fn fragmentation(backend: &BackendLine) -> f64 {
    let compute = backend.bytes.compute;
    100.0 * compute.saturating_sub(backend.lower_bound) as f64 / (compute as f64).max(1.0)
}

fn buffer(plan: &Explanation, number: usize, backend: &BackendLine) -> Option<String> {
    let size = backend.bytes.compute;
    if size == 0 {
        return None;
    }
    let live = live(plan, number, backend.peak_step);
    let mut parts: Vec<String> =
        live.iter().take(MAX_NAMED).map(|s| format!("{} {}", s.name, bytes(s.bytes))).collect();
    let rest: u64 = live.iter().skip(MAX_NAMED).map(|s| s.bytes).sum();
    if live.len() > MAX_NAMED {
        parts.push(format!("{} {}", plural(live.len() - MAX_NAMED, "other", "others"), bytes(rest)));
    }
    let quality = if size == backend.lower_bound {
        "equal to the lower bound".to_owned()
    } else {
        format!("{:.1} % fragmentation, lower bound {}", fragmentation(backend), bytes(backend.lower_bound))
    };
    Some(format!(
        "The compute buffer of {} is {} ({quality}); its peak is at step {} ({}). Without memory reuse it would be {}.",
        backend.bytes.backend,
        bytes(size),
        backend.peak_step,
        list(&parts),
        bytes(backend.unshared)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_numbers_are_ranges() {
        let text = |numbers: &[usize]| ranges(&numbers.iter().copied().collect()).join(", ");
        assert_eq!(text(&[0, 2, 4, 5, 6, 7, 9, 10]), "0, 2, 4–7, 9, 10");
        assert_eq!(text(&[]), "");
    }
}
