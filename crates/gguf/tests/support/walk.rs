//! Calls every accessor of a file: none may panic, whatever the file contains.

use quadriga_gguf::{Array, File, OwnedValue, Summary, Value, Writer};

/// Calls every accessor, and checks the invariants of every file that opens.
pub(crate) fn walk(file: &File) {
    for (key, value) in file.metadata() {
        assert_eq!(file.value(key).map(|value| value.kind()), Some(value.kind()));
        walk_value(value);
        let _ = (file.get::<u32>(key), file.get::<i64>(key), file.get::<f32>(key), file.get::<bool>(key));
        let _ = (file.get::<&str>(key), file.get::<Array<'_>>(key), file.get::<Vec<&str>>(key));
        let _ = (file.find::<Vec<f32>>(key), file.find::<Vec<i32>>(key));
        let _ = format!("{value} {value:?}");
    }
    // Empty names are invalid, so no file has one.
    assert!(file.value("").is_none());
    let mut ends = Vec::new();
    for tensor in file.tensors() {
        let found = file.tensor(tensor.name()).expect("a listed tensor is found by its name");
        assert_eq!((found.offset(), found.part()), (tensor.offset(), tensor.part()));
        assert_eq!(tensor.bytes().len(), tensor.byte_len());
        assert_eq!(*tensor.data().bytes(), *tensor.bytes());
        assert_eq!(tensor.offset() % file.alignment() as usize, 0);
        assert!(tensor.element_count() > 0 && tensor.byte_len() > 0);
        ends.push((tensor.part(), tensor.offset(), tensor.offset() + tensor.byte_len()));
        let _ = format!("{tensor:?}");
    }
    assert_eq!(ends.len(), file.tensor_count());
    ends.sort_unstable();
    assert!(ends.windows(2).all(|pair| pair[0].0 != pair[1].0 || pair[0].2 <= pair[1].1));
    assert!(file.find_tensor("").is_none());
    let _ = Summary::of(file).to_string();
    assert!(file.version() == 2 || file.version() == 3);
}

fn walk_value(value: Value<'_>) {
    if let Value::Array(array) = value {
        assert_eq!(array.iter().count(), array.len());
        array.iter().for_each(walk_value);
    }
    // Compared as bytes, so that NaN equals itself.
    assert_eq!(OwnedValue::from(OwnedValue::from(value).value()), OwnedValue::from(value));
}

/// Rewrites a file and reads it back: metadata and tensors must be the same.
pub(crate) fn rewrite(file: &File) {
    let mut writer = Writer::new();
    for (key, value) in file.metadata() {
        writer.set(key, value).expect("a valid key or tensor");
    }
    for tensor in file.tensors() {
        writer
            .tensor_bytes(tensor.name(), tensor.dtype(), tensor.shape(), tensor.bytes())
            .expect("a valid key or tensor");
    }
    let mut bytes = Vec::new();
    writer.write_to(&mut bytes).expect("writing to memory");
    let again = File::from_bytes(bytes).expect("a valid file");
    let owned = |file: &File| -> Vec<_> {
        file.metadata().map(|(key, value)| (key.to_owned(), OwnedValue::from(value))).collect()
    };
    assert_eq!(owned(file), owned(&again));
    assert_eq!(file.tensor_count(), again.tensor_count());
    for (one, other) in file.tensors().zip(again.tensors()) {
        assert_eq!((one.name(), one.dtype(), one.shape()), (other.name(), other.dtype(), other.shape()));
        assert_eq!(one.bytes(), other.bytes());
    }
}
