//! Files that are read instead of mapped, files that shrink, and files that are incomplete.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod support;

use std::fs;

use quadriga_gguf::{Error, File};
use support::small_file;

#[test]
fn a_file_that_was_read_does_not_depend_on_the_disk() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("small.gguf");
    fs::write(&path, small_file()).unwrap();
    let (mapped, read) = (File::open(&path).unwrap(), File::read(&path).unwrap());
    assert_eq!(read.paths().collect::<Vec<_>>(), [&path]);
    let tensors = |file: &File| -> Vec<(String, Vec<u8>)> {
        file.tensors().map(|tensor| (tensor.name().to_owned(), tensor.bytes().to_vec())).collect()
    };
    let before = tensors(&read);
    assert_eq!(tensors(&mapped), before);
    mapped.check_mapped().unwrap();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(10).unwrap();
    match mapped.check_mapped().unwrap_err() {
        Error::Shrunk { mapped, found, .. } => assert_eq!((mapped, found), (small_file().len() as u64, 10)),
        other => panic!("{other}"),
    }
    read.check_mapped().unwrap();
    assert_eq!(tensors(&read), before);
    assert!(matches!(File::read(folder.path()).unwrap_err(), Error::NotAFile { .. }));
}

#[test]
fn only_what_is_used_is_read_and_it_stays() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("small.gguf");
    fs::write(&path, small_file()).unwrap();
    let (whole, file) = (File::read(&path).unwrap(), File::read_on_demand(&path).unwrap());
    assert_eq!((file.byte_len(), file.bytes_read()), (whole.byte_len(), 0));
    let tensor = file.tensors().max_by_key(|tensor| tensor.byte_len()).unwrap();
    let wanted = whole.tensor(tensor.name()).unwrap().bytes().to_vec();
    let half = wanted.len() / 2;
    assert!(half > 2);
    let data = tensor.data();
    // The second half before the first byte: joined as they are given.
    let part = || {
        let pieces = vec![
            data.slice(half, 2).unwrap(),
            data.slice(half + 2, half - 2).unwrap(),
            data.slice(0, 1).unwrap(),
        ];
        file.on_demand(&tensor, quadriga_graph::Data::joined(pieces))
    };
    let found = part();
    assert_eq!(file.bytes_read(), 0, "nothing was asked for");
    let expected = [&wanted[half..2 * half], &wanted[..1]].concat();
    assert_eq!((found.bytes().to_vec(), file.bytes_read()), (expected.clone(), half as u64 + 1));
    assert!(found.same(&part()), "one part in memory");
    // What was read is in memory, as are all names and values; the rest is not there any more.
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(10).unwrap();
    assert_eq!((part().bytes().to_vec(), file.bytes_read()), (expected, half as u64 + 1));
    let keys =
        |file: &File| file.metadata().map(|(key, value)| format!("{key} {value:?}")).collect::<Vec<_>>();
    assert_eq!(keys(&file), keys(&whole));
    file.check_mapped().unwrap();
    assert!(file.on_demand(&tensor, data.clone()).bytes().is_empty());
    assert!(matches!(file.check_mapped().unwrap_err(), Error::Io { action: "read", .. }));
}

#[test]
fn an_incomplete_file_names_both_sizes() {
    let whole = small_file();
    for cut in [1, 3, whole.len() / 2, whole.len() - 5] {
        let error = File::from_bytes(whole[..whole.len() - cut].to_vec()).unwrap_err().to_string();
        assert!(error.contains("incomplete download?"), "{cut}: {error}");
    }
    let error = File::from_bytes(whole[..whole.len() - 1].to_vec()).unwrap_err().to_string();
    for part in [format!("has {} bytes", whole.len() - 1), format!("need {}", whole.len())] {
        assert!(error.contains(&part), "{part}: {error}");
    }
}
