//! Splitting and merging GGUF files.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use quadriga_gguf::{File, Writer};
use quadriga_graph::DType;
use quadriga_models::shards::{ShardError, SplitLimits, merge, plan_split, split};

/// A file with ten tensors of 40 to 400 bytes.
fn model(folder: &Path, alignment: Option<u32>) -> PathBuf {
    let path = folder.join("model.gguf");
    let data: Vec<Vec<u8>> = (1..=10u8).map(|index| vec![index; 40 * usize::from(index)]).collect();
    let mut writer = Writer::new();
    writer.set("general.architecture", "llama").unwrap();
    if let Some(alignment) = alignment {
        writer.set("general.alignment", alignment).unwrap();
    }
    writer.set("tokenizer.ggml.tokens", ["a", "b"]).unwrap();
    for (index, bytes) in data.iter().enumerate() {
        writer.tensor_bytes(&format!("t{index}"), DType::F32, [2, bytes.len() / 8], bytes).unwrap();
    }
    writer.write(&path).unwrap();
    path
}

#[test]
fn merged_parts_are_the_original_byte_by_byte() {
    for alignment in [None, Some(64)] {
        for limits in [
            SplitLimits { tensors: 3, ..SplitLimits::default() },
            SplitLimits { bytes: 700, ..SplitLimits::default() },
            SplitLimits { tensors: 1, keys_apart: true, ..SplitLimits::default() },
            SplitLimits::default(),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let original = model(folder.path(), alignment);
            let planned = plan_split(&original, &limits).unwrap();
            let paths = split(&original, &folder.path().join("part"), &limits, &|| false).unwrap();
            assert_eq!(paths.len(), planned.len(), "{limits:?}");
            for (path, (tensors, bytes)) in paths.iter().zip(&planned) {
                assert!(*tensors <= limits.tensors && *bytes <= limits.bytes, "{}", path.display());
            }
            assert!(paths[0].ends_with(format!("part-00001-of-{:05}.gguf", paths.len())));
            // Any part opens the whole.
            let whole = File::open(paths.last().unwrap()).unwrap();
            assert_eq!((whole.tensor_count(), whole.part_count()), (10, paths.len()));
            assert_eq!(whole.get::<u32>("split.tensors.count").unwrap(), 10);
            let merged = folder.path().join("merged.gguf");
            merge(&paths[0], &merged, &|| false).unwrap();
            assert_eq!(fs::read(&merged).unwrap(), fs::read(&original).unwrap(), "{limits:?}");
            // Nothing temporary is left.
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), paths.len() + 2);
        }
    }
}

#[test]
fn what_cannot_be_split_or_merged_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let original = model(folder.path(), None);
    assert!(matches!(
        merge(&original, &folder.path().join("m.gguf"), &|| false),
        Err(ShardError::NotSplit { .. })
    ));
    let limits = SplitLimits { tensors: 5, ..SplitLimits::default() };
    let paths = split(&original, &folder.path().join("p"), &limits, &|| false).unwrap();
    assert!(matches!(
        split(&paths[0], &folder.path().join("q"), &limits, &|| false),
        Err(ShardError::AlreadySplit { parts: 2, .. })
    ));
    assert!(matches!(merge(&paths[0], &paths[1], &|| false), Err(ShardError::Output(_))));
    fs::remove_file(&paths[1]).unwrap();
    assert!(matches!(merge(&paths[0], &folder.path().join("m.gguf"), &|| false), Err(ShardError::Gguf(_))));
    assert!(!folder.path().join("m.gguf").exists());
}

#[test]
fn a_tensor_above_the_limit_has_a_part_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let original = model(folder.path(), None);
    // Tensors of 40, 80 … 400 bytes, each padded to 32.
    let limits = SplitLimits { bytes: 200, ..SplitLimits::default() };
    let parts: Vec<usize> = plan_split(&original, &limits).unwrap().iter().map(|part| part.0).collect();
    assert_eq!(parts, [2, 1, 1, 1, 1, 1, 1, 1, 1]);
    let paths = split(&original, &folder.path().join("p"), &limits, &|| false).unwrap();
    merge(&paths[0], &folder.path().join("m.gguf"), &|| false).unwrap();
    assert_eq!(fs::read(folder.path().join("m.gguf")).unwrap(), fs::read(&original).unwrap());
}

#[test]
fn what_is_cancelled_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let original = model(folder.path(), None);
    let limits = SplitLimits { tensors: 5, ..SplitLimits::default() };
    // In the second part.
    let looks = AtomicUsize::new(0);
    let later = || looks.fetch_add(1, Ordering::Relaxed) > 7;
    let cancelled = split(&original, &folder.path().join("p"), &limits, &later);
    assert!(matches!(cancelled, Err(ShardError::Cancelled)), "{cancelled:?}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    let paths = split(&original, &folder.path().join("p"), &limits, &|| false).unwrap();
    fs::write(folder.path().join("m.gguf"), "old").unwrap();
    looks.store(0, Ordering::Relaxed);
    let cancelled = merge(&paths[0], &folder.path().join("m.gguf"), &later);
    assert!(matches!(cancelled, Err(ShardError::Cancelled)), "{cancelled:?}");
    assert_eq!(fs::read(folder.path().join("m.gguf")).unwrap(), b"old");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 4);
}

/// The container says which activation its models have, where nothing else does.
#[test]
fn parts_of_powerinfers_container_are_in_it_too() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let mut writer = Writer::powerinfer();
    writer.set("general.architecture", "llama").unwrap();
    for name in ["a", "b"] {
        writer.tensor_bytes(name, DType::F32, [2], &[0; 8]).unwrap();
    }
    writer.write(&path).unwrap();
    let limits = SplitLimits { tensors: 1, ..SplitLimits::default() };
    let paths = split(&path, &folder.path().join("part"), &limits, &|| false).unwrap();
    assert!(File::open(&paths[1]).unwrap().is_powerinfer());
    let merged = folder.path().join("merged.gguf");
    merge(&paths[0], &merged, &|| false).unwrap();
    assert_eq!(fs::read(&merged).unwrap(), fs::read(&path).unwrap());
}

#[test]
fn parts_of_two_runs_are_no_model() {
    let folder = tempfile::tempdir().unwrap();
    let original = model(folder.path(), None);
    let limits = SplitLimits { tensors: 5, ..SplitLimits::default() };
    let prefix = folder.path().join("p");
    let paths = split(&original, &prefix, &limits, &|| false).unwrap();
    // A part that cannot be replaced, in place of a run that is killed before it gets there.
    fs::remove_file(&paths[1]).unwrap();
    fs::create_dir_all(paths[1].join("full")).unwrap();
    let failed = split(&original, &prefix, &limits, &|| false);
    assert!(matches!(&failed, Err(ShardError::Io { path, .. }) if *path == paths[1]), "{failed:?}");
    assert!(!paths[0].exists());
}
