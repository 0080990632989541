//! LoRA adapters on the command line: `FILE` or `FILE=SCALE`.

use std::path::{Path, PathBuf};

use quadriga_gguf::File;
use quadriga_llm::Adapter;

use crate::failure::{Failure, Outcome};

/// The path and the scale of an argument. A file or folder whose name has a = in it counts as one.
fn parse(text: &str) -> Outcome<(&str, f32)> {
    match text.rsplit_once('=').filter(|_| !Path::new(text).exists()) {
        None => Ok((text, 1.0)),
        Some((path, scale)) => match scale.parse::<f32>() {
            Ok(scale) if scale.is_finite() => Ok((path, scale)),
            _ => Err(Failure::Usage(format!("--lora {text}: the scale {scale:?} is not a number"))),
        },
    }
}

/// The files of adapters; of a folder, all that are in it.
pub(crate) fn files(arguments: &[String]) -> Outcome<Vec<PathBuf>> {
    let mut files = Vec::new();
    for text in arguments {
        let path = Path::new(parse(text)?.0);
        match std::fs::read_dir(path) {
            Ok(entries) => files.extend(entries.flatten().map(|entry| entry.path())),
            Err(_) => files.push(path.to_owned()),
        }
    }
    Ok(files)
}

/// Opens adapters for a model.
pub(crate) fn open(arguments: &[String], model: &File) -> Outcome<Vec<Adapter>> {
    let open = |text: &String| {
        let (path, scale) = parse(text)?;
        quadriga_models::lora::open(Path::new(path), scale, model).map_err(|error| {
            let text = error.to_string();
            Failure::Message(if text.contains(path) { text } else { format!("{path}: {text}") })
        })
    };
    arguments.iter().map(open).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_may_follow_the_file() {
        assert_eq!(parse("a.gguf").unwrap(), ("a.gguf", 1.0));
        assert_eq!(parse("a=b.gguf=-0.5").unwrap(), ("a=b.gguf", -0.5));
        for wrong in ["a.gguf=", "a.gguf=x", "a.gguf=nan"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
