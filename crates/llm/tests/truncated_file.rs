//! A model file that becomes shorter while it is used is an error, not a signal; one that was read is not needed again.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::fs;

use crate::common::{Recipe, cpu};
use quadriga_gguf::File;
use quadriga_llm::{Engine, EngineOptions, Error, Model};
use quadriga_runtime::Scheduler;

fn engine(file: File) -> Result<Engine, Error> {
    let scheduler = Scheduler::new([cpu(1)]);
    Engine::new(Model::from_file(file)?, &scheduler, EngineOptions::default(), &mut |_| {})
}

#[test]
fn a_mapped_file_that_shrinks_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let bytes = Recipe::new("llama").parts().bytes();
    fs::write(&path, &bytes).unwrap();
    let mut mapped = engine(File::open(&path).unwrap()).unwrap();
    let mut read = engine(File::read(&path).unwrap()).unwrap();
    for engine in [&mut mapped, &mut read] {
        engine.feed(&[1, 2, 3]).unwrap();
    }
    assert_eq!(mapped.logits(0), read.logits(0));
    let opened = File::open(&path).unwrap();
    // Nothing is left of the mapped weights: touching them would end the process.
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(64).unwrap();
    let error = mapped.feed(&[4]).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::File(quadriga_gguf::Error::Shrunk { found: 64, .. })), "{text}");
    assert!(text.contains("model.gguf") && text.contains(&bytes.len().to_string()), "{text}");
    assert!(opened.check_mapped().is_err());
    read.feed(&[4]).unwrap();
    // With the bytes back in place, the tokens before the error are still there.
    fs::write(&path, &bytes).unwrap();
    mapped.feed(&[4]).unwrap();
    assert_eq!(mapped.logits(0), read.logits(0));
}
