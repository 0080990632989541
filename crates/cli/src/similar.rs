//! Similar names, for errors about unknown ones.

use std::collections::BTreeSet;

/// Names without the differences that users do not remember: case, `_` and `-`.
pub(crate) fn normalized(name: &str) -> String {
    name.chars().filter(|c| !matches!(c, '_' | '-')).flat_map(char::to_lowercase).collect()
}

/// Up to three distinct names within a third of their length in edits of the wanted one, nearest first.
pub(crate) fn nearest<'n>(names: impl Iterator<Item = &'n str>, wanted: &str) -> Vec<&'n str> {
    let wanted = normalized(wanted);
    let distinct: BTreeSet<&str> = names.collect();
    let mut near: Vec<(usize, &str)> = distinct
        .into_iter()
        .map(|name| (edit_distance(&normalized(name), &wanted), name))
        .filter(|(distance, name)| distance * 3 <= name.len().max(wanted.len()))
        .collect();
    near.sort_unstable();
    near.into_iter().take(3).map(|(_, name)| name).collect()
}

/// The number of insertions, deletions, replacements and swaps of neighbours between two texts.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let at = |row: &[usize], column: usize| row.get(column).copied().unwrap_or_default();
    let mut above: Vec<usize> = (0..=b.len()).collect();
    let mut above_two = above.clone();
    let mut previous = None;
    for (i, x) in a.chars().enumerate() {
        let mut row = vec![i + 1];
        for (j, y) in b.iter().enumerate() {
            let replaced = at(&above, j) + usize::from(x != *y);
            let mut best = replaced.min(at(&above, j + 1) + 1).min(at(&row, j) + 1);
            let before = j.checked_sub(1).and_then(|before| b.get(before));
            if previous == Some(*y) && before == Some(&x) {
                best = best.min(at(&above_two, j.saturating_sub(1)) + 1);
            }
            row.push(best);
        }
        previous = Some(x);
        above_two = std::mem::replace(&mut above, row);
    }
    above.last().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_are_counted() {
        for (a, b, distance) in [
            ("", "", 0),
            ("abc", "", 3),
            ("", "ab", 2),
            ("softmax", "sofmax", 1),
            ("norm", "morn", 2),
            ("ngl", "nlg", 1),
        ] {
            assert_eq!(edit_distance(a, b), distance, "{a} {b}");
        }
    }

    #[test]
    fn the_nearest_name_is_the_first() {
        let names = ["soft_max", "softmax", "rms_norm", "norm"];
        assert_eq!(nearest(names.into_iter(), "soft-mux"), ["soft_max", "softmax"]);
        assert!(nearest(names.into_iter(), "convolution").is_empty());
    }
}
