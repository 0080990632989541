//! Importance matrices: files of both formats, merging, and hostile files.

use std::path::Path;

use quadriga_gguf::Writer;
use quadriga_graph::DType;
use quadriga_models::importance::{ImportanceEntry, ImportanceMatrix};

fn matrix(factor: f32) -> ImportanceMatrix {
    let mut matrix = ImportanceMatrix {
        datasets: vec!["a.txt".into()],
        chunk_count: 3,
        chunk_size: 512,
        ..Default::default()
    };
    let dense = ImportanceEntry { sums: vec![factor, 2.0 * factor, 6.0 * factor], counts: vec![10.0] };
    let experts = ImportanceEntry { sums: vec![factor, factor, 0.0, 0.0], counts: vec![4.0, 0.0] };
    matrix.entries.insert("blk.0.attn_q.weight".into(), dense);
    matrix.entries.insert("blk.0.ffn_up_exps.weight".into(), experts);
    matrix
}

#[test]
fn files_are_read_as_they_were_written_and_merged() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("imatrix.gguf");
    let mut first = matrix(1.0);
    first.write(&path).unwrap();
    assert_eq!(ImportanceMatrix::read(&path).unwrap(), first);
    first.merge(&matrix(2.0)).unwrap();
    assert_eq!(first.entries["blk.0.attn_q.weight"].sums, [3.0, 6.0, 18.0]);
    assert_eq!(first.entries["blk.0.attn_q.weight"].counts, [20.0]);
    assert_eq!((first.chunk_count, first.datasets.len()), (6, 1));
    let mut other = matrix(1.0);
    other.entries.get_mut("blk.0.attn_q.weight").unwrap().sums.push(1.0);
    assert!(first.merge(&other).unwrap_err().to_string().contains("blk.0.attn_q.weight"));
}

#[test]
fn weights_are_around_one_and_unused_experts_count_evenly() {
    let matrix = matrix(5.0);
    let dense = matrix.weights("blk.0.attn_q.weight", 3, 1).unwrap();
    assert!((dense[0] - 1.0 / 3.0).abs() < 1e-6 && (dense[2] - 2.0).abs() < 1e-6, "{dense:?}");
    assert_eq!(matrix.weights("blk.0.ffn_up_exps.weight", 2, 2).unwrap(), [1.0; 4]);
    assert_eq!(matrix.weights("blk.0.attn_q.weight", 4, 1), None);
    assert_eq!(matrix.weights("blk.9.attn_q.weight", 3, 1), None);
}

/// A file that is longer than memory, as a model that is named by mistake can be.
#[cfg(target_os = "linux")]
#[test]
fn a_file_is_not_read_into_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("imatrix.gguf");
    let matrix = matrix(1.0);
    matrix.write(&path).unwrap();
    let longer = |path: &Path| std::fs::File::options().write(true).open(path).unwrap().set_len(1 << 40);
    longer(&path).unwrap();
    assert_eq!(ImportanceMatrix::read(&path).unwrap(), matrix);
    let path = folder.path().join("imatrix.dat");
    std::fs::write(&path, legacy(b"w", 2, &[1.0], &[])).unwrap();
    assert!(ImportanceMatrix::read(&path).is_ok());
    longer(&path).unwrap();
    let error = ImportanceMatrix::read(&path).unwrap_err().to_string();
    assert!(error.contains("imatrix.dat") && error.contains("4294967296"), "{error}");
}

/// A file of the older format with one entry.
fn legacy(name: &[u8], calls: i32, values: &[f32], tail: &[u8]) -> Vec<u8> {
    let mut bytes = 1i32.to_le_bytes().to_vec();
    bytes.extend((name.len() as i32).to_le_bytes());
    bytes.extend(name);
    bytes.extend(calls.to_le_bytes());
    bytes.extend((values.len() as i32).to_le_bytes());
    values.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
    bytes.extend(tail);
    bytes
}

fn read(bytes: &[u8]) -> Result<ImportanceMatrix, String> {
    ImportanceMatrix::from_bytes(bytes.to_vec(), Path::new("m.dat")).map_err(|error| error.to_string())
}

#[test]
fn the_older_format_is_read() {
    let mut tail = 7i32.to_le_bytes().to_vec();
    tail.extend(5i32.to_le_bytes());
    tail.extend(b"a.txt");
    let found = read(&legacy(b"blk.0.attn_q.weight", 2, &[1.0, 4.0], &tail)).unwrap();
    assert_eq!(found.entries["blk.0.attn_q.weight"].sums, [1.0, 4.0]);
    assert_eq!((found.chunk_count, found.datasets), (7, vec!["a.txt".to_owned()]));
}

#[test]
fn hostile_files_are_refused_with_the_place() {
    let whole = legacy(b"blk.0.attn_q.weight", 2, &[1.0, 4.0], &[]);
    for end in 0..whole.len() {
        let error = read(&whole[..end]).unwrap_err();
        assert!(error.contains("at byte"), "{end}: {error}");
    }
    for (bytes, place) in [
        ((-1i32).to_le_bytes().to_vec(), "number of entries"),
        (i32::MAX.to_le_bytes().to_vec(), "number of entries"),
        (legacy(b"\xff\xfe", 2, &[1.0], &[]), "name 1"),
        (legacy(b"w", 2, &[f32::NAN], &[]), "values of"),
        (legacy(b"w", 2, &[-1.0], &[]), "values of"),
        (legacy(b"w", -2, &[1.0], &[]), "count of"),
    ] {
        let error = read(&bytes).unwrap_err();
        assert!(error.contains(place), "{place}: {error}");
    }
    let gguf = |name: &str, dtype: DType, values: &[f32], both: bool| {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let mut writer = Writer::new();
        writer.tensor_bytes(name, dtype, [bytes.len() / dtype.block_bytes()], &bytes).unwrap();
        if both {
            writer.tensor_bytes("w.counts", DType::F32, [2], &[0, 0, 128, 63, 0, 0, 128, 63]).unwrap();
        }
        let mut out = Vec::new();
        writer.write_to(&mut out).unwrap();
        out
    };
    for (bytes, place) in [
        (gguf("w.in_sum2", DType::F32, &[1.0, 2.0], false), "\"w\""),
        (gguf("w.in_sum2", DType::F32, &[1.0, 2.0, 3.0], true), "\"w\""),
        (gguf("w.in_sum2", DType::F32, &[1.0, f32::INFINITY], true), "w.in_sum2"),
        (gguf("w.in_sum2", DType::F16, &[1.0, 2.0], true), "w.in_sum2"),
        (gguf("w.other", DType::F32, &[1.0], false), "w.other"),
    ] {
        let error = read(&bytes).unwrap_err();
        assert!(error.contains(place), "{place}: {error}");
    }
}

/// The older format has means times chunks, GGUF sums over tokens: equally many chunks weigh the same.
#[test]
fn files_of_both_formats_weigh_by_their_chunks_when_merged() {
    let old = || read(&legacy(b"w", 100, &[900.0, 100.0], &100i32.to_le_bytes())).unwrap();
    let mut new = ImportanceMatrix { chunk_count: 100, chunk_size: 256, ..Default::default() };
    let tokens = 25_600.0;
    let entry = ImportanceEntry { sums: vec![tokens, 9.0 * tokens], counts: vec![tokens] };
    new.entries.insert("w".into(), entry);
    let mut first = old();
    first.merge(&new).unwrap();
    let mut second = new.clone();
    second.merge(&old()).unwrap();
    let mut several = old();
    several.merge(&old()).unwrap();
    assert_eq!(several.entries["w"].sums, [1800.0, 200.0]);
    // Written as GGUF, it is still one that counts chunks.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("old.gguf");
    old().write(&path).unwrap();
    let mut third = new.clone();
    third.merge(&ImportanceMatrix::read(&path).unwrap()).unwrap();
    for merged in [first, second, third] {
        assert_eq!(merged.weights("w", 2, 1).unwrap(), [1.0, 1.0], "{merged:?}");
        assert_eq!(merged.entries["w"].counts, [2.0 * tokens]);
        assert_eq!((merged.chunk_count, merged.chunk_size), (200, 256));
    }
    // Also the weights that only the older one has.
    let mut other = ImportanceMatrix { chunk_size: 256, ..Default::default() };
    other.merge(&old()).unwrap();
    assert_eq!(other.entries["w"].counts, [tokens]);
}
