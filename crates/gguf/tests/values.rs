//! Metadata values: conversions, comparison and iteration, and what a summary prints of them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use quadriga_gguf::{Array, File, FromValue, OwnedValue, Summary, TypeTotal, Value, ValueType, Writer};
use quadriga_graph::DType;

/// The value of an array.
fn array(value: &OwnedValue) -> Array<'_> {
    Array::from_value(value.value()).unwrap()
}

/// A summary of a model without tensors, to be changed.
fn empty_summary() -> Summary {
    let mut bytes = Vec::new();
    Writer::new().write_to(&mut bytes).unwrap();
    Summary::of(&File::from_bytes(bytes).unwrap())
}

#[test]
fn integers_of_every_type_are_integers_and_nothing_else_is() {
    let integers: [(OwnedValue, i128); 8] = [
        (u8::MAX.into(), u8::MAX.into()),
        (i8::MIN.into(), i8::MIN.into()),
        (u16::MAX.into(), u16::MAX.into()),
        (i16::MIN.into(), i16::MIN.into()),
        (u32::MAX.into(), u32::MAX.into()),
        (i32::MIN.into(), i32::MIN.into()),
        (u64::MAX.into(), u64::MAX.into()),
        (i64::MIN.into(), i64::MIN.into()),
    ];
    for (value, number) in &integers {
        assert_eq!(value.value().integer(), Some(*number));
        assert_eq!(f64::from_value(value.value()), None, "{number} is no float");
    }
    let others: [OwnedValue; 5] = [1.0f32.into(), 1.0f64.into(), true.into(), "1".into(), [1u8].into()];
    assert!(others.iter().all(|other| other.value().integer().is_none()));
}

#[test]
fn a_type_reads_its_own_values_only_and_has_a_name() {
    let values: [OwnedValue; 5] = [true.into(), false.into(), "text".into(), [1u8].into(), 1u8.into()];
    fn readable<'a, T: FromValue<'a>>(values: &'a [OwnedValue]) -> Vec<Option<T>> {
        values.iter().map(|value| T::from_value(value.value())).collect()
    }
    assert_eq!(readable::<bool>(&values), [Some(true), Some(false), None, None, None]);
    assert_eq!(readable::<&str>(&values), [None, None, Some("text"), None, None]);
    assert_eq!(readable::<Array<'_>>(&values), [None, None, None, Some(array(&values[3])), None]);
    assert_eq!(readable::<u16>(&values), [None, None, None, None, Some(1)]);
    let names = [bool::expected(), <&str>::expected(), Array::expected(), f32::expected(), f64::expected()];
    assert_eq!(names, ["bool", "string", "array", "f32", "f64"]);
    assert_eq!((usize::expected(), Vec::<i8>::expected()), ("usize".to_owned(), "array of i8".to_owned()));
}

#[test]
fn arrays_are_equal_if_type_length_and_elements_are() {
    let arrays: Vec<OwnedValue> = vec![
        [1u8, 2].into(),
        [1u8, 3].into(),
        [1u8].into(),
        [1i8, 2].into(),
        Vec::<u8>::new().into(),
        Vec::<i8>::new().into(),
        ["a", "b"].into(),
        ["a", "c"].into(),
    ];
    for (place, one) in arrays.iter().enumerate() {
        for (other_place, other) in arrays.iter().enumerate() {
            assert_eq!(array(one) == array(other), place == other_place, "{place} and {other_place}");
        }
    }
}

#[test]
fn an_array_iterates_over_its_elements_and_bounds_their_number() {
    let nested = OwnedValue::array(ValueType::Array, &[["a", ""].into(), [3u16].into()]).unwrap();
    let arrays: [OwnedValue; 5] =
        [[0.5f64; 3].into(), ["a", "", "ü"].into(), [true, false].into(), Vec::<u32>::new().into(), nested];
    for (owned, len) in arrays.iter().zip([3, 3, 2, 0, 2]) {
        let array = array(owned);
        assert_eq!((array.len(), array.is_empty()), (len, len == 0));
        let mut values = array.iter();
        for left in (0..len).rev() {
            assert!(values.next().is_some());
            // A file that another process changes may end early, so there is no lower bound.
            assert_eq!(values.size_hint(), (0, Some(left)));
        }
        assert_eq!(values.next(), None);
    }
    assert_eq!(array(&arrays[1]).iter().nth(2), Some(Value::String("ü")));
    assert_eq!(arrays[4].value().to_string(), "[[\"a\", \"\"], [3]]");
}

#[test]
fn a_summary_prints_counts_and_sizes_with_units() {
    let mut summary = empty_summary();
    let counts = [
        (0, "0"),
        (999, "999"),
        (1000, "1.0 k"),
        (999_999, "1000.0 k"),
        (134_515_008, "134.5 M"),
        (7_000_000_000, "7.0 B"),
        (1_100_000_000_000, "1.1 T"),
    ];
    for (parameters, text) in counts {
        summary.parameters = parameters;
        let line = format!("parameters       {text} ({parameters})\n");
        assert!(summary.to_string().contains(&line), "{line:?} is not in\n{summary}");
    }
    let sizes = [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (98_765_432, "94.2 MiB"),
        (1 << 30, "1.0 GiB"),
        (3 << 39, "1.5 TiB"),
    ];
    for (bytes, text) in sizes {
        summary.file_bytes = bytes;
        let line = format!("size             {text}\n");
        assert!(summary.to_string().contains(&line), "{line:?} is not in\n{summary}");
    }
}

#[test]
fn a_summary_adds_up_the_tensors_of_each_type() {
    let mut writer = Writer::new();
    writer.set("general.architecture", "llama").unwrap();
    writer.set("llama.attention.head_count_kv", [4u32, 4, 4]).unwrap();
    writer.set("llama.feed_forward_length", Vec::<u32>::new()).unwrap();
    for name in ["a", "b", "c"] {
        writer.tensor_bytes(name, DType::I8, [2, 8], &[0; 16]).unwrap();
    }
    writer.tensor_bytes("d", DType::F32, [3], &[0; 12]).unwrap();
    let mut bytes = Vec::new();
    writer.write_to(&mut bytes).unwrap();
    let summary = Summary::of(&File::from_bytes(bytes).unwrap());
    let total = |dtype, tensors, parameters, bytes| TypeTotal { dtype, tensors, parameters, bytes };
    assert_eq!(summary.types, [total(DType::I8, 3, 48, 48), total(DType::F32, 1, 3, 12)]);
    assert_eq!((summary.parameters, summary.tensor_bytes), (51, 60));
    // One number for all layers is printed once.
    assert_eq!(summary.dimensions, [("feed forward", "none".to_owned()), ("KV heads", "4".to_owned())]);
}
