//! The models among the files of a repository: one per type of quantization, each of one or several files.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::LazyLock;

use quadriga_gguf::SplitName;
use regex::Regex;

/// A model among several of a repository: its label and its files, the first part first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelChoice<F> {
    /// The type of quantization, such as `Q4_K_M`, or the name of the file if that has none.
    pub quant: String,
    /// The files, in order.
    pub files: Vec<F>,
    /// The total size.
    pub bytes: u64,
}

/// Types that take twice the memory of the best quantized one, and gain nothing that could be measured.
const UNQUANTIZED: &[&str] = &["F32", "F16", "BF16"];

impl<F> ModelChoice<F> {
    /// Whether the type is a plain float type.
    pub fn is_unquantized(&self) -> bool {
        UNQUANTIZED.contains(&self.quant.as_str())
    }
}

/// The label of a file: the last type of quantization that its path names, in upper case.
pub fn quant_of(path: &str) -> Option<String> {
    static QUANT: LazyLock<Option<Regex>> = LazyLock::new(|| {
        Regex::new(r"(?:^|[^A-Z0-9])((?:UD-)?(?:I?Q[0-9](?:_[A-Z0-9]+)*|TQ[12]_0|MXFP4(?:_MOE)?|NVFP4|BF16|F16|FP16|F32|FP32))(?:$|[^A-Z0-9_])").ok()
    });
    // Matches share the character between them, so that the search goes on at the end of the label.
    let path = path.to_ascii_uppercase();
    let (mut at, mut last) = (0, None);
    while let Some(found) = QUANT.as_ref()?.captures_at(&path, at).and_then(|found| found.get(1)) {
        last = Some(found.as_str());
        at = found.end();
    }
    last.map(|label| match label {
        "FP16" => "F16".to_owned(),
        "FP32" => "F32".to_owned(),
        other => other.to_owned(),
    })
}

/// The models among files of these names and sizes, the largest first. Projectors, importance matrices and incomplete
/// sets of parts are left out.
pub fn choices<F: Clone>(
    files: &[F],
    name: impl Fn(&F) -> &str,
    bytes: impl Fn(&F) -> u64,
) -> Vec<ModelChoice<F>> {
    let mut found: Vec<ModelChoice<F>> = groups(files, name, bytes)
        .into_iter()
        .filter(|(parts, choice)| *parts == Some(choice.files.len()))
        .map(|(_, choice)| choice)
        .collect();
    found.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.quant.cmp(&b.quant)));
    found
}

/// The models of which there are some parts only, each with the number of its parts.
pub(super) fn incomplete<F: Clone>(
    files: &[F],
    name: impl Fn(&F) -> &str,
    bytes: impl Fn(&F) -> u64,
) -> Vec<(usize, ModelChoice<F>)> {
    let groups = groups(files, name, bytes).into_iter();
    groups
        .filter_map(|(parts, choice)| parts.map(|parts| (parts, choice)))
        .filter(|(parts, choice)| *parts > choice.files.len())
        .collect()
}

/// The models, complete or not, with the number of their parts; `None` where the names of the parts contradict each other.
fn groups<F: Clone>(
    files: &[F],
    name: impl Fn(&F) -> &str,
    bytes: impl Fn(&F) -> u64,
) -> Vec<(Option<usize>, ModelChoice<F>)> {
    let mut groups: BTreeMap<String, Vec<(u32, u32, &F)>> = BTreeMap::new();
    for file in files {
        let path = name(file);
        let Some(stem) = path.strip_suffix(".gguf") else { continue };
        let base = stem.rsplit('/').next().unwrap_or(stem).to_ascii_lowercase();
        if base.contains("mmproj") || base.contains("imatrix") {
            continue;
        }
        match SplitName::of(Path::new(path)) {
            Some(split) => {
                let group = split.path_of(1).to_string_lossy().into_owned();
                groups.entry(group).or_default().push((split.number, split.count, file));
            }
            None => groups.entry(path.to_owned()).or_default().push((1, 1, file)),
        }
    }
    let mut found = Vec::new();
    for (path, mut parts) in groups {
        parts.sort_by_key(|(number, ..)| *number);
        let count = parts.first().map_or(0, |(_, count, _)| *count);
        let count = parts.iter().all(|(_, other, _)| *other == count).then_some(count as usize);
        let stem = path.strip_suffix(".gguf").unwrap_or(&path);
        let stem = stem.rsplit_once("-00001-of-").map_or(stem, |(stem, _)| stem);
        let choice = ModelChoice {
            quant: quant_of(stem).unwrap_or_else(|| stem.to_owned()),
            bytes: parts.iter().map(|(.., file)| bytes(file)).sum(),
            files: parts.into_iter().map(|(.., file)| file.clone()).collect(),
        };
        found.push((count, choice));
    }
    found
}

/// The choice that a user means by `quant`, whatever the case: its label, or the end of its file's name.
pub fn find_choice<'c, F>(
    choices: &'c [ModelChoice<F>],
    quant: &str,
    name: impl Fn(&F) -> &str,
) -> Option<&'c ModelChoice<F>> {
    let wanted = quant.to_ascii_uppercase();
    let exact = choices.iter().find(|choice| choice.quant.to_ascii_uppercase() == wanted);
    // Q4_K_XL may be called UD-Q4_K_XL.
    let variant = || {
        choices
            .iter()
            .find(|choice| choice.quant.to_ascii_uppercase().strip_prefix("UD-") == Some(wanted.as_str()))
    };
    let by_file = || {
        choices.iter().find(|choice| {
            choice.files.first().is_some_and(|file| {
                let stem = name(file).trim_end_matches(".gguf").to_ascii_uppercase();
                let stem = stem.rsplit('/').next().unwrap_or_default();
                stem == wanted
                    || stem.strip_suffix(&wanted).is_some_and(|rest| rest.ends_with(['-', '.', '_']))
            })
        })
    };
    exact.or_else(variant).or_else(by_file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(names: &[&str]) -> Vec<(String, usize)> {
        let files: Vec<(String, u64)> = names.iter().map(|name| ((*name).to_owned(), 1)).collect();
        let choices = choices(&files, |file| &file.0, |file| file.1);
        choices.into_iter().map(|choice| (choice.quant, choice.files.len())).collect()
    }

    #[test]
    fn labels_are_found_in_file_names() {
        for (path, label) in [
            ("Qwen3-8B-Q4_K_M", Some("Q4_K_M")),
            ("model.q8_0", Some("Q8_0")),
            ("ggml-model-f16", Some("F16")),
            ("UD-IQ2_XXS/x-UD-IQ2_XXS", Some("UD-IQ2_XXS")),
            ("BF16/gpt", Some("BF16")),
            ("gpt-oss-20b-mxfp4", Some("MXFP4")),
            ("a.Q4_1", Some("Q4_1")),
            ("a-Q4_K_M-F32", Some("F32")),
            ("llama", None),
            ("x-Q4K", None),
        ] {
            assert_eq!(quant_of(path).as_deref(), label, "{path}");
        }
    }

    #[test]
    fn parts_are_grouped_and_other_files_left_out() {
        let names = [
            "b-Q8_0-00002-of-00002.gguf",
            "b-Q8_0-00001-of-00002.gguf",
            "b-Q4_0.gguf",
            "mmproj-F16.gguf",
            "b-mmproj-BF16.gguf",
            "b.imatrix.gguf",
            "README.md",
            "c-Q5_K-00001-of-00003.gguf",
        ];
        assert_eq!(of(&names), [("Q8_0".to_owned(), 2), ("Q4_0".to_owned(), 1)]);
        let incomplete = incomplete(&names, |name| name, |_| 1);
        let found: Vec<_> =
            incomplete.iter().map(|(parts, choice)| (*parts, choice.quant.as_str())).collect();
        assert_eq!(found, [(3, "Q5_K")]);
    }

    #[test]
    fn a_choice_is_found_in_any_case() {
        let files = [("x-Q4_K_M.gguf", 2), ("x-UD-Q2_K_XL.gguf", 1), ("special.gguf", 3)];
        let choices = choices(&files, |file| file.0, |file| file.1);
        let find = |quant| find_choice(&choices, quant, |file| file.0).map(|choice| choice.bytes);
        assert_eq!(
            [find("q4_k_m"), find("q2_k_xl"), find("SPECIAL"), find("q8_0")],
            [Some(2), Some(1), Some(3), None]
        );
    }
}
