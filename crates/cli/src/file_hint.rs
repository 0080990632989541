//! What a file is that is not a GGUF file.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use quadriga_models::hub::RepositoryName;

/// The first bytes that are looked at.
const START: usize = 32;

/// What to do with a file that is no GGUF file, where its first bytes tell what it is, or that is not there.
pub(crate) fn hint(path: &Path) -> Option<&'static str> {
    if !path.exists() && path.to_str().is_some_and(|text| text.parse::<RepositoryName>().is_ok()) {
        return Some("a model of the hub is given as -hf ORG/REPO, and `quadriga pull` prints its path");
    }
    let mut start = Vec::new();
    File::open(path).ok()?.take(START as u64).read_to_end(&mut start).ok()?;
    of_bytes(&start)
}

fn of_bytes(start: &[u8]) -> Option<&'static str> {
    const KNOWN: &[(&[u8], &str)] = &[
        (
            b"PK\x03\x04",
            "it is an archive, perhaps of PyTorch weights: convert the model with llama.cpp's convert_hf_to_gguf.py",
        ),
        (b"version https://git-lfs", "it is a Git LFS pointer, not the model: `git lfs pull` downloads that"),
        (b"<!DOCTYPE", "it is a web page: download the file itself"),
        (b"<!doctype", "it is a web page: download the file itself"),
        (b"<html", "it is a web page: download the file itself"),
        (b"ggjt", "it is in a format before GGUF: download the model as .gguf"),
        (b"tjgg", "it is in a format before GGUF: download the model as .gguf"),
    ];
    if let Some((_, hint)) = KNOWN.iter().find(|(magic, _)| start.starts_with(magic)) {
        return Some(hint);
    }
    match start {
        [] => Some("it is empty"),
        // The length of a header, which is a JSON object.
        [.., _] if start.get(8..10) == Some(b"{\"") => Some(
            "it is a safetensors file: `quadriga convert FOLDER -o model.gguf` converts the folder that it is in",
        ),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_recognised_by_their_first_bytes() {
        for (start, part) in [
            (&b"\x40\x01\0\0\0\0\0\0{\"__metadata__\""[..], "safetensors"),
            (b"PK\x03\x04....", "archive"),
            (b"version https://git-lfs.github.com/spec", "Git LFS"),
            (b"<!DOCTYPE html>", "web page"),
            (b"", "empty"),
        ] {
            assert!(of_bytes(start).is_some_and(|hint| hint.contains(part)), "{part}");
        }
        assert!([&b"A poem about models."[..], b"GGUF", b"x"].iter().all(|start| of_bytes(start).is_none()));
    }
}
