//! Writing files: complete or not at all, streamed, and read back unchanged.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod support;

use std::{fs, io, path::Path};

use quadriga_conformance::Rng;
use quadriga_gguf::{Error, File, FormatErrorKind, OwnedValue, Value, ValueType, Writer};
use quadriga_graph::{DType, Shape};
use support::{small_file, walk};

fn names_in(folder: &Path) -> Vec<String> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn written_files_are_read_back_unchanged() {
    walk::rewrite(&File::from_bytes(small_file()).unwrap());
    let seed = 0x7772_6974;
    println!("seed {seed:#x}");
    let mut rng = Rng::new(seed);
    for _ in 0..200 {
        let alignment = 8u32 << rng.below(6);
        let mut tensors = Vec::new();
        for index in 0..rng.below(8) {
            let dtype = *rng.pick(&DType::all().collect::<Vec<_>>()).unwrap();
            let mut dims: Vec<usize> = (0..rng.range(1, 4)).map(|_| rng.range(1, 4)).collect();
            *dims.last_mut().unwrap() *= dtype.block_len();
            let rows: usize = dims.iter().rev().skip(1).product();
            let len = rows * dtype.row_bytes(*dims.last().unwrap()).unwrap();
            let bytes: Vec<u8> = (0..len).map(|_| rng.next_u64() as u8).collect();
            tensors.push((format!("tensor.{index}"), dtype, dims, bytes));
        }
        let mut writer = Writer::new();
        writer.set("general.alignment", alignment).unwrap();
        for (name, dtype, dims, bytes) in &tensors {
            writer
                .tensor(name, *dtype, Shape::new(dims).unwrap(), |out| {
                    bytes.chunks(7).try_for_each(|piece| out.write_all(piece))
                })
                .unwrap();
        }
        let mut written = Vec::new();
        writer.write_to(&mut written).unwrap();
        let file = File::from_bytes(written).unwrap();
        assert_eq!((file.alignment(), file.tensor_count()), (alignment, tensors.len()));
        for (name, dtype, dims, bytes) in &tensors {
            let tensor = file.tensor(name).unwrap();
            assert_eq!((tensor.dtype(), tensor.shape().dims()), (*dtype, dims.as_slice()));
            assert_eq!(tensor.bytes(), bytes);
        }
        walk::walk(&file);
        walk::rewrite(&file);
    }
}

#[test]
fn files_in_powerinfers_container_are_known_as_such() {
    let written = |mut writer: Writer<'static>| {
        writer.set("general.architecture", "llama").unwrap();
        writer.tensor_bytes("t", DType::F32, [2], &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
        let mut bytes = Vec::new();
        writer.write_to(&mut bytes).unwrap();
        bytes
    };
    let (plain, powerinfer) = (written(Writer::new()), written(Writer::powerinfer()));
    assert_ne!(plain[..4], powerinfer[..4]);
    assert_eq!(plain[4..], powerinfer[4..]);
    for (bytes, is_powerinfer) in [(plain, false), (powerinfer, true)] {
        let file = File::from_bytes(bytes).unwrap();
        assert_eq!(file.is_powerinfer(), is_powerinfer);
        assert_eq!(file.tensor("t").unwrap().bytes(), [1, 2, 3, 4, 5, 6, 7, 8]);
    }
}

#[test]
fn a_file_replaces_its_target_only_when_it_is_complete() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    fs::write(&path, b"before").unwrap();
    let mut writer = Writer::new();
    let seen = path.clone();
    writer
        .tensor("t", DType::I8, [4], move |out| {
            assert_eq!(fs::read(&seen)?, b"before");
            out.write_all(b"data")
        })
        .unwrap();
    writer.write(&path).unwrap();
    assert_eq!(File::open(&path).unwrap().tensor("t").unwrap().bytes(), b"data");
    assert_eq!(names_in(folder.path()), ["model.gguf"]);
}

#[cfg(unix)]
#[test]
fn a_written_file_has_the_permissions_of_an_ordinary_new_file() {
    use std::os::unix::fs::PermissionsExt;

    let folder = tempfile::tempdir().unwrap();
    let (model, ordinary) = (folder.path().join("model.gguf"), folder.path().join("ordinary"));
    Writer::new().write(&model).unwrap();
    fs::write(&ordinary, b"").unwrap();
    let mode = |path| fs::metadata(path).unwrap().permissions().mode();
    assert_eq!(mode(&model), mode(&ordinary));
}

#[test]
fn a_source_that_fails_leaves_nothing_behind() {
    type WriteFn = fn(&mut dyn io::Write) -> io::Result<()>;
    let sources: [(WriteFn, &str); 4] = [
        (|_| Err(io::Error::other("no more")), "could not be produced or written: no more"),
        (|out| out.write_all(b"abc"), "should be 4 bytes, but its source wrote 3"),
        (|out| out.write_all(b"abcde"), "should be 4 bytes, but its source wrote 5"),
        (
            |out| {
                // A source that ignores the error cannot make a file of the wrong length either.
                let _ = out.write_all(b"abcdefgh");
                Ok(())
            },
            "should be 4 bytes",
        ),
    ];
    for (source, message) in sources {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        fs::write(&path, b"before").unwrap();
        let mut writer = Writer::new();
        writer.tensor("t", DType::I8, [4], source).unwrap();
        let error = writer.write(&path).unwrap_err().to_string();
        assert!(error.contains(message) && error.contains("\"t\""), "{error}");
        assert_eq!(names_in(folder.path()), ["model.gguf"]);
        assert_eq!(fs::read(&path).unwrap(), b"before");
    }
}

#[test]
fn a_source_may_write_in_pieces_of_any_size() {
    let mut writer = Writer::new();
    writer
        .tensor("t", DType::I8, [4], |out| {
            for piece in ["", "ab", "", "cd", ""] {
                assert_eq!(out.write(piece.as_bytes())?, piece.len());
            }
            out.flush()
        })
        .unwrap();
    let mut written = Vec::new();
    writer.write_to(&mut written).unwrap();
    assert_eq!(File::from_bytes(written).unwrap().tensor("t").unwrap().bytes(), b"abcd");
}

#[test]
fn a_source_that_panics_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let mut writer = Writer::new();
    writer.tensor("t", DType::I8, [4], |_| panic!("a panic in the source")).unwrap();
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| writer.write(&path)));
    assert!(result.is_err());
    assert!(names_in(folder.path()).is_empty());
}

#[test]
fn a_folder_that_cannot_be_written_is_an_error_with_its_path() {
    let folder = tempfile::tempdir().unwrap();
    let error = Writer::new().write(folder.path().join("absent/model.gguf")).unwrap_err();
    assert!(matches!(error, Error::Io { action: "create", .. }), "{error}");
    assert!(matches!(Writer::new().write("/"), Err(Error::NotAFile { .. })));
    // A folder under the target's name cannot be replaced.
    fs::create_dir(folder.path().join("taken.gguf")).unwrap();
    let error = Writer::new().write(folder.path().join("taken.gguf")).unwrap_err();
    assert!(matches!(error, Error::NotAFile { .. }), "{error}");
    assert_eq!(names_in(folder.path()), ["taken.gguf"]);
}

#[test]
fn invalid_keys_and_tensors_are_errors_when_added() {
    fn kind<T>(result: Result<T, Error>) -> FormatErrorKind {
        match result {
            Err(Error::Unwritable { kind, .. }) => kind,
            Err(error) => panic!("{error}"),
            Ok(_) => panic!("no error"),
        }
    }
    let mut writer = Writer::new();
    assert_eq!(kind(writer.set("", 1u8)), FormatErrorKind::EmptyName);
    writer.set("a", 1u8).unwrap();
    assert_eq!(kind(writer.set("a", 2u8)), FormatErrorKind::NameInUse);
    assert!(matches!(kind(writer.set("general.name", 1u8)), FormatErrorKind::WrongType { .. }));
    assert!(matches!(
        kind(writer.set("general.alignment", 31u32)),
        FormatErrorKind::Alignment { found: 31, .. }
    ));
    let mut tensor = |name: &str, dtype, dims: &[usize]| {
        kind(writer.tensor_bytes(name, dtype, Shape::new(dims).unwrap(), &[]))
    };
    assert_eq!(tensor("", DType::F32, &[1]), FormatErrorKind::EmptyName);
    assert!(matches!(tensor("t", DType::F32, &[]), FormatErrorKind::DimensionCount { found: 0, .. }));
    assert_eq!(tensor("t", DType::F32, &[2, 0]), FormatErrorKind::Dimension { found: 0 });
    assert!(matches!(tensor("t", DType::Q4_0, &[33]), FormatErrorKind::PartialBlock { len: 33, .. }));
    assert_eq!(tensor("t", DType::F32, &[usize::MAX, 2]), FormatErrorKind::TooLarge);
    writer.tensor_bytes("t", DType::I8, [1], &[1]).unwrap();
    assert_eq!(kind(writer.tensor_bytes("t", DType::I8, [1], &[1])), FormatErrorKind::NameInUse);

    // Only the architecture, which may be set last, defines this key.
    let mut writer = Writer::new();
    writer.set("llama.block_count", "two").unwrap().set("general.architecture", "llama").unwrap();
    assert!(matches!(kind(writer.write_to(&mut Vec::new())), FormatErrorKind::WrongType { .. }));
}

#[test]
fn nested_arrays_can_be_written_as_deep_as_they_are_read() {
    let mut value = OwnedValue::from([1u8, 2]);
    for _ in 0..3 {
        value = OwnedValue::array(ValueType::Array, &[value.clone(), value]).unwrap();
    }
    assert!(matches!(
        OwnedValue::array(ValueType::Array, &[value.clone()]),
        Err(FormatErrorKind::TooDeep { .. })
    ));
    assert!(matches!(
        OwnedValue::array(ValueType::U8, &[1u16.into()]),
        Err(FormatErrorKind::WrongType { .. })
    ));
    let mut writer = Writer::new();
    writer.set("deep", value.clone()).unwrap();
    let mut bytes = Vec::new();
    writer.write_to(&mut bytes).unwrap();
    let file = File::from_bytes(bytes).unwrap();
    assert_eq!(file.value("deep"), Some(value.value()));
    assert!(matches!(file.value("deep"), Some(Value::Array(array)) if array.len() == 2));
}

#[test]
fn the_longest_names_are_written_and_read() {
    let longest = "n".repeat(65_535);
    let mut writer = Writer::new();
    writer.set(&longest, 7_u32).unwrap();
    writer.tensor(&longest, DType::F32, Shape::new(&[1]).unwrap(), |out| out.write_all(&[0; 4])).unwrap();
    let mut written = Vec::new();
    writer.write_to(&mut written).unwrap();
    let bytes = written.len() as u64;
    let file = File::from_bytes(written).unwrap();
    assert_eq!(file.byte_len(), bytes);
    assert!(file.tensor(&longest).is_ok());
    assert_eq!(file.get::<u32>(&longest).unwrap(), 7);
    let error = Writer::new().set(&format!("{longest}n"), 7_u32).err().unwrap();
    assert!(error.to_string().contains("65536 bytes long"), "{error}");
}
