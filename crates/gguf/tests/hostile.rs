//! Invalid and hostile files: each is an error that names the field and its offset.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod support;

use quadriga_conformance::Rng;
use quadriga_gguf::{Error, FieldError, File};
use support::{Raw, small_file, walk};

/// Types of values, by their ids in a file.
const U8: u32 = 0;
const U32: u32 = 4;
const I32: u32 = 5;
const F32: u32 = 6;
const BOOL: u32 = 7;
const STRING: u32 = 8;
const ARRAY: u32 = 9;
const U64: u32 = 10;

/// Types of tensors, by their ids in a file.
const T_F32: u32 = 0;
const T_Q4_0: u32 = 2;
const T_Q8_0: u32 = 8;
const T_Q4_K: u32 = 12;
const T_I8: u32 = 24;
const T_F64: u32 = 28;

/// A hostile file: a description, the file with the position of the invalid field marked, the field and the message.
type HostileCase = (&'static str, Raw, &'static str, &'static str);

fn header_cases() -> Vec<HostileCase> {
    let raw = Raw::default;
    vec![
        ("empty file", raw(), "magic", "4 bytes are needed, 0 are left"),
        ("three bytes", raw().put(b"GGU"), "magic", "4 bytes are needed, 3 are left"),
        ("another format", raw().put(b"PK\x03\x04").u32(3).u64(0).u64(0), "magic", "not a GGUF file"),
        ("reversed magic", raw().put(b"FUGG").u32(3).u64(0).u64(0), "magic", "not a GGUF file"),
        ("magic alone", raw().put(b"GGUF").here(), "version", "4 bytes are needed, 0 are left"),
        (
            "version 0",
            raw().put(b"GGUF").here().u32(0).u64(0).u64(0),
            "version",
            "version 0 is not supported",
        ),
        (
            "version 1",
            raw().put(b"GGUF").here().u32(1).u64(0).u64(0),
            "version",
            "version 1 is not supported",
        ),
        (
            "version 4",
            raw().put(b"GGUF").here().u32(4).u64(0).u64(0),
            "version",
            "version 4 is not supported",
        ),
        ("version of all ones", raw().put(b"GGUF").here().u32(u32::MAX), "version", "is not supported"),
        (
            "version 2 in foreign byte order",
            raw().put(b"GGUF").here().u32(2u32.swap_bytes()).u64(0).u64(0),
            "version",
            "written for a",
        ),
        (
            "version 3 in foreign byte order",
            raw().put(b"GGUF").here().u32(3u32.swap_bytes()).u64(0).u64(0),
            "version",
            "endian",
        ),
        ("no tensor count", raw().put(b"GGUF").u32(3).here(), "tensor count", "ends too early"),
        ("no metadata count", raw().put(b"GGUF").u32(3).u64(0).here().u32(0), "metadata count", "4 are left"),
        (
            "metadata count of all ones",
            raw().put(b"GGUF").u32(3).u64(0).here().u64(u64::MAX),
            "metadata count",
            "do not fit in the 0 bytes",
        ),
        (
            "metadata count that wraps when multiplied",
            raw().put(b"GGUF").u32(3).u64(0).here().u64(1 << 63).put(&[0; 64]),
            "metadata count",
            "do not fit",
        ),
        (
            "one key fewer than counted",
            Raw::file(0, 2).key("a", U32).u32(1).here().put(&[0; 11]),
            "key 1",
            "the name is empty",
        ),
        (
            "tensor count of all ones",
            raw().put(b"GGUF").u32(3).here().u64(u64::MAX).u64(0),
            "tensor count",
            "do not fit",
        ),
        (
            "tensor count that wraps when multiplied",
            raw().put(b"GGUF").u32(3).here().u64(1 << 59).u64(0).put(&[0; 64]),
            "tensor count",
            "do not fit",
        ),
        (
            "one tensor fewer than counted",
            Raw::file(2, 0).tensor("a", &[8], T_F32, 0).here().data(32, 32),
            "name of tensor 1",
            "",
        ),
    ]
}

fn key_cases() -> Vec<HostileCase> {
    let one = || Raw::file(0, 1);
    let long = "k".repeat(65_536);
    vec![
        ("key length of all ones", one().u64(u64::MAX).put(&[0; 16]), "key 0", "ends too early"),
        ("key length with the sign bit", one().u64(1 << 63).put(&[0; 16]), "key 0", "ends too early"),
        (
            "key longer than the file",
            one().u64(17).put(&[b'a'; 16]),
            "key 0",
            "17 bytes are needed, 16 are left",
        ),
        ("empty key", one().here().text("").u32(U8).put(&[0; 9]), "key 0", "the name is empty"),
        ("key of 64 KiB", one().here().key(&long, U8).put(&[0]), "key 0", "65536 bytes long"),
        ("key not UTF-8", one().here().text(b"\xff\xfe").u32(U8).put(&[0; 9]), "key 0", "not valid UTF-8"),
        (
            "key with half a letter",
            one().here().text(b"a\xc3").u32(U8).put(&[0; 9]),
            "key 0",
            "not valid UTF-8",
        ),
        (
            "key without a type",
            one().text("abcdefghij").here(),
            "value type of key \"abcdefghij\"",
            "0 are left",
        ),
        (
            "value type 13",
            one().text("a").here().u32(13).put(&[0; 9]),
            "value type of key \"a\"",
            "type 13 is unknown",
        ),
        (
            "value type of all ones",
            one().text("a").here().u32(u32::MAX).u64(0),
            "value type of key \"a\"",
            "unknown",
        ),
        (
            "key without a value",
            one().key("abcdef", U64).here(),
            "value of key \"abcdef\"",
            "8 bytes are needed",
        ),
        (
            "duplicate key",
            Raw::file(0, 2).key("a", U8).put(&[1]).u64(1).here().put(b"a").u32(U8).put(&[1]),
            "key \"a\"",
            "appears twice; first at byte 32",
        ),
        (
            "duplicate key of another type",
            Raw::file(0, 3)
                .key("a", U8)
                .put(&[1])
                .key("b", U8)
                .put(&[1])
                .u64(1)
                .here()
                .put(b"a")
                .u32(STRING)
                .text(""),
            "key \"a\"",
            "appears twice",
        ),
    ]
}

fn value_cases() -> Vec<HostileCase> {
    let value = |kind| Raw::file(0, 1).key("some.key", kind).here();
    let array = |element| Raw::file(0, 1).key("some.key", ARRAY).u32(element).here();
    let field = "value of key \"some.key\"";
    let length = "array length in value of key \"some.key\"";
    let nested = |depth| {
        let raw = Raw::file(0, 1).key("some.key", ARRAY);
        (0..depth).fold(raw, |raw, _| raw.u32(ARRAY).u64(1))
    };
    let mut cases = vec![
        ("bool of 2", value(BOOL).put(&[2]), field, "0 or 1, not 2"),
        ("string length of all ones", value(STRING).u64(u64::MAX), field, "ends too early"),
        ("string longer than the file", value(STRING).u64(9).put(&[b'a'; 8]), field, "9 bytes are needed"),
        ("string not UTF-8", value(STRING).text(b"\xc0\x80"), field, "not valid UTF-8"),
        ("string of a surrogate", value(STRING).text(b"\xed\xa0\x80"), field, "not valid UTF-8"),
        ("array without a length", array(U32), length, "8 bytes are needed"),
        ("array of unknown type", value(ARRAY).u32(99).u64(0), "element type in", "type 99 is unknown"),
        ("array length of all ones", array(U8).u64(u64::MAX), length, "do not fit"),
        ("array length that wraps", array(U64).u64(1 << 61).put(&[0; 64]), length, "do not fit"),
        ("array one element short", array(U32).u64(3).put(&[0; 11]), length, "3 items of at least 4 bytes"),
        ("strings more than fit", array(STRING).u64(3).put(&[0; 23]), length, "3 items of at least 8 bytes"),
        ("arrays more than fit", array(ARRAY).u64(1 << 40).put(&[0; 24]), length, "do not fit"),
        ("bools with a 7", array(BOOL).u64(3).put(&[0, 1]).here().put(&[7]), field, "0 or 1, not 7"),
        (
            "strings with one past the end",
            array(STRING).u64(2).text("ok").here().u64(1 << 62).put(&[0; 8]),
            "element 1 of value",
            "ends too early",
        ),
        (
            "strings with one not UTF-8",
            array(STRING).u64(2).text("ok").here().text(b"\x80"),
            "element 1 of value",
            "not valid UTF-8",
        ),
        (
            "arrays with one too long",
            array(ARRAY).u64(2).u32(U8).u64(0).u32(U8).here().u64(77).put(&[0; 8]),
            "array length in element 1 of value",
            "77 items",
        ),
        (
            "arrays with one of unknown type",
            array(ARRAY).u64(1).here().u32(13).u64(0),
            "element type in element 0 of value",
            "unknown",
        ),
        ("arrays nested 5 deep", nested(4).here().u32(U8).u64(0), "element 0 of", "more than 4 deep"),
    ];
    let deep = nested(100_000);
    cases.push((
        "arrays nested 100000 deep",
        Raw { mark: nested(4).bytes.len(), ..deep },
        "element 0 of",
        "deep",
    ));
    // Every plain type, one byte short.
    for (name, kind, size) in [
        ("u8 cut short", 0, 1),
        ("i8 cut short", 1, 1),
        ("u16 cut short", 2, 2),
        ("i16 cut short", 3, 2),
        ("u32 cut short", 4, 4),
        ("i32 cut short", 5, 4),
        ("f32 cut short", 6, 4),
        ("bool cut short", 7, 1),
        ("string length cut short", 8, 8),
        ("array type cut short", 9, 4),
        ("u64 cut short", 10, 8),
        ("i64 cut short", 11, 8),
        ("f64 cut short", 12, 8),
    ] {
        cases.push((name, value(kind).put(&vec![0; size - 1]), "value of key", "ends too early"));
    }
    cases
}

fn known_key_cases() -> Vec<HostileCase> {
    let value = |key, kind| Raw::file(0, 1).key(key, kind).here();
    let alignment = |alignment| value("general.alignment", U32).u32(alignment);
    let align = "value of key \"general.alignment\"";
    // The key comes before the architecture that gives it its meaning.
    let own = |key, kind| {
        let raw = Raw::file(0, 2).key(key, kind).here();
        let raw = if kind == ARRAY { raw.u32(STRING).u64(0) } else { raw.text("") };
        raw.key("general.architecture", STRING).text("llama")
    };
    vec![
        ("alignment 0", alignment(0), align, "alignment 0 is not a power of two"),
        ("alignment 1", alignment(1), align, "alignment 1 is not"),
        ("alignment 33", alignment(33), align, "alignment 33 is not"),
        ("alignment 48", alignment(48), align, "alignment 48 is not"),
        ("alignment of 2 GiB", alignment(1 << 31), align, "alignment 2147483648 is not"),
        ("alignment of all ones", alignment(u32::MAX), align, "is not a power of two"),
        (
            "alignment as u64",
            value("general.alignment", U64).u64(32),
            align,
            "should be a u32, but is u64 32",
        ),
        (
            "alignment as i32",
            value("general.alignment", I32).u32(32),
            align,
            "should be a u32, but is i32 32",
        ),
        (
            "alignment as string",
            value("general.alignment", STRING).text("32"),
            align,
            "but is string of 2 bytes",
        ),
        (
            "architecture as number",
            value("general.architecture", U32).u32(0),
            "general.architecture",
            "be a string",
        ),
        (
            "name as array",
            value("general.name", ARRAY).u32(STRING).u64(1).text("a"),
            "general.name",
            "array of 1",
        ),
        (
            "file type as string",
            value("general.file_type", STRING).text("3"),
            "general.file_type",
            "an integer",
        ),
        (
            "tokens as string",
            value("tokenizer.ggml.tokens", STRING).text("a"),
            "ggml.tokens",
            "array of strings",
        ),
        (
            "tokens as numbers",
            value("tokenizer.ggml.tokens", ARRAY).u32(U32).u64(1).u32(0),
            "ggml.tokens",
            "should be an array of strings, but is array of 1 u32",
        ),
        (
            "merges as number",
            value("tokenizer.ggml.merges", U64).u64(1),
            "ggml.merges",
            "an array of strings",
        ),
        (
            "scores as strings",
            value("tokenizer.ggml.scores", ARRAY).u32(STRING).u64(0),
            "ggml.scores",
            "of floats",
        ),
        (
            "token types as floats",
            value("tokenizer.ggml.token_type", ARRAY).u32(F32).u64(0),
            "ggml.token_type",
            "an array of integers",
        ),
        (
            "begin token as string",
            value("tokenizer.ggml.bos_token_id", STRING).text("1"),
            "bos_token",
            "an integer",
        ),
        ("begin token as float", value("tokenizer.ggml.bos_token_id", F32).u32(0), "bos_token", "an integer"),
        ("add begin token as number", value("tokenizer.ggml.add_bos_token", U32).u32(1), "add_bos", "a bool"),
        (
            "chat template as array",
            value("tokenizer.chat_template", ARRAY).u32(U8).u64(0),
            "chat_template",
            "a string",
        ),
        ("block count as array", own("llama.block_count", ARRAY), "llama.block_count", "an integer"),
        ("head count as strings", own("llama.attention.head_count", ARRAY), "head_count", "an integer or"),
        ("rope base as string", own("llama.rope.freq_base", STRING), "rope.freq_base", "a number"),
        ("split count as string", value("split.count", STRING).text("2"), "split.count", "an integer"),
        (
            "negative split count",
            value("split.count", I32).u32(u32::MAX),
            "split.count",
            "a non-negative integer",
        ),
    ]
}

fn tensor_cases() -> Vec<HostileCase> {
    let one = || Raw::file(1, 0);
    let name = |raw: Raw| raw.put(&[0; 64]);
    let dims = |count: u32| one().text("t").here().u32(count).put(&[1; 64]);
    let shape = |dims: &[u64], kind| {
        let start = one().text("t").u32(0).bytes.len();
        Raw { mark: start, ..one().tensor("t", dims, kind, 0).data(32, 4096) }
    };
    let kind = |id| one().text("t").u32(1).u64(32).here().u32(id).u64(0).data(32, 4096);
    let offset = |offset| one().tensor_before_offset("t", &[8], T_F32).here().u64(offset).data(32, 64);
    let (shapes, offsets) = ("dimensions of tensor \"t\"", "data offset of tensor \"t\"");
    let two = |first: u64, second: u64| {
        Raw::file(2, 0)
            .tensor("first", &[32], T_F32, first)
            .tensor_before_offset("second", &[32], T_F32)
            .here()
            .u64(second)
            .data(32, 512)
    };
    vec![
        ("tensor name length of all ones", name(one().u64(u64::MAX)), "name of tensor 0", "ends too early"),
        ("tensor name empty", name(one().here().text("")), "name of tensor 0", "the name is empty"),
        ("tensor name not UTF-8", name(one().here().text(b"\xf0\x28\x8c\x28")), "name of tensor 0", "UTF-8"),
        ("no dimensions", dims(0), "dimension count of tensor \"t\"", "0 dimensions"),
        ("five dimensions", dims(5), "dimension count of tensor \"t\"", "5 dimensions"),
        (
            "dimension count of all ones",
            dims(u32::MAX),
            "dimension count of tensor \"t\"",
            "4294967295 dimensions",
        ),
        ("dimension of zero", shape(&[0], T_F32), "dimension 0 of tensor \"t\"", "a dimension of 0"),
        (
            "second dimension of zero",
            one().text("t").u32(2).u64(32).here().u64(0).u32(0).u64(0).data(32, 128),
            "dimension 1 of tensor \"t\"",
            "a dimension of 0",
        ),
        ("dimension of minus one", shape(&[u64::MAX], T_F32), "dimension 0 of", "a dimension of -1"),
        ("dimension with the sign bit", shape(&[1 << 63], T_F32), "dimension 0 of", "a dimension of -9223"),
        ("largest dimension", shape(&[i64::MAX as u64], T_F32), shapes, "overflows"),
        ("product of two wraps to 0", shape(&[1 << 32, 1 << 32], T_F32), shapes, "overflows"),
        ("product of four wraps to 0", shape(&[65_536; 4], T_F32), shapes, "overflows"),
        ("product wraps to a small number", shape(&[0x1_0000_0001, 0xffff_ffff], T_F32), shapes, "overflows"),
        ("product has the sign bit", shape(&[1 << 62, 2], T_F32), shapes, "overflows"),
        ("bytes wrap", shape(&[1 << 61, 1], T_F64), shapes, "overflows"),
        ("bytes wrap over rows", shape(&[1 << 31, 1 << 31], T_F64), shapes, "overflows"),
        ("type id 4, removed", kind(4), "type of tensor \"t\"", "id 4 is unknown"),
        ("type id 31, removed", kind(31), "type of tensor \"t\"", "id 31 is unknown"),
        ("type id 9999", kind(9999), "type of tensor \"t\"", "id 9999 is unknown"),
        ("type id of all ones", kind(u32::MAX), "type of tensor \"t\"", "id 4294967295 is unknown"),
        ("33 elements in blocks of 32", shape(&[33], T_Q4_0), shapes, "not whole blocks of 32 (Q4_0)"),
        ("one element in blocks of 32", shape(&[1, 32], T_Q8_0), shapes, "not whole blocks of 32 (Q8_0)"),
        ("128 elements in blocks of 256", shape(&[128, 2], T_Q4_K), shapes, "not whole blocks of 256 (Q4_K)"),
        ("misaligned by one", offset(1), offsets, "1 is not a multiple of the alignment 32"),
        ("misaligned by 16", offset(16), offsets, "16 is not a multiple of the alignment 32"),
        (
            "misaligned for its own alignment",
            Raw::file(1, 1)
                .key("general.alignment", U32)
                .u32(64)
                .tensor_before_offset("t", &[8], T_F32)
                .here()
                .u64(32)
                .data(64, 256),
            offsets,
            "32 is not a multiple of the alignment 64",
        ),
        ("offset that wraps", offset(u64::MAX - 31), offsets, "do not fit in its 64 bytes"),
        ("offset with the sign bit", offset(1 << 63), offsets, "do not fit"),
        ("offset at the end", offset(64), offsets, "32 bytes of data at offset 64"),
        ("offset past the end", offset(96), offsets, "do not fit"),
        (
            "data one byte short",
            one().tensor_before_offset("t", &[8], T_F32).here().u64(0).data(32, 31),
            offsets,
            "do not fit in its 31 bytes",
        ),
        (
            "no data at all",
            one().tensor_before_offset("t", &[8], T_F32).here().u64(0),
            offsets,
            "its 0 bytes",
        ),
        (
            "data larger than any machine",
            one().tensor_before_offset("t", &[1 << 60], T_F32).here().u64(0).data(32, 64),
            offsets,
            "4611686018427387904 bytes of data",
        ),
        (
            "two tensors at one place",
            two(0, 0),
            "data offset of tensor \"second\"",
            "overlaps that of tensor \"first\"",
        ),
        ("tensors that overlap", two(0, 96), "data offset of tensor \"second\"", "overlaps"),
        (
            "tensors that overlap by one byte",
            Raw::file(2, 0)
                .tensor("first", &[33], T_I8, 0)
                .tensor_before_offset("second", &[32], T_I8)
                .here()
                .u64(32)
                .data(32, 64),
            "data offset of tensor \"second\"",
            "overlaps that of tensor \"first\"",
        ),
        (
            "tensors that overlap, later first",
            {
                let raw = two(96, 0);
                let mark = Raw::file(2, 0).tensor_before_offset("first", &[32], T_F32).bytes.len();
                Raw { mark, ..raw }
            },
            "data offset of tensor \"first\"",
            "overlaps that of tensor \"second\"",
        ),
        (
            "duplicate tensor",
            Raw::file(2, 0)
                .tensor("t", &[8], T_F32, 0)
                .u64(1)
                .here()
                .put(b"t")
                .u32(1)
                .u64(8)
                .u32(T_F32)
                .u64(32)
                .data(32, 64),
            "tensor \"t\"",
            "appears twice; first at byte 32",
        ),
    ]
}

fn error_of(bytes: Vec<u8>) -> Result<FieldError, String> {
    match File::from_bytes(bytes) {
        Ok(_) => Err("the file was read".to_owned()),
        Err(Error::Format { path: None, error }) => Ok(error),
        Err(other) => Err(format!("another kind of error: {other}")),
    }
}

#[test]
fn every_hostile_file_is_an_error_that_names_its_field_and_offset() {
    let groups = [header_cases(), key_cases(), value_cases(), known_key_cases(), tensor_cases()];
    let cases: Vec<HostileCase> = groups.into_iter().flatten().collect();
    let names: std::collections::HashSet<_> = cases.iter().map(|case| case.0).collect();
    assert_eq!(names.len(), cases.len(), "case names are unique");
    assert!(cases.len() >= 100, "{} cases", cases.len());
    let mut wrong = Vec::new();
    for (name, raw, field, problem) in cases {
        // A mark of 0 stands for any offset inside the file.
        let len = raw.bytes.len() as u64;
        match error_of(raw.bytes) {
            Err(outcome) => wrong.push(format!("{name}: {outcome}")),
            Ok(error) => {
                let message = error.to_string();
                let place = raw.mark == 0 || error.offset == raw.mark as u64;
                if !error.field.contains(field) || !message.contains(problem) || !place || error.offset > len
                {
                    wrong.push(format!(
                        "{name}: expected {field:?} at {} with {problem:?}, got {message}",
                        raw.mark
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_file_truncated_anywhere_is_an_error_at_an_offset_inside_it() {
    let whole = small_file();
    walk::walk(&File::from_bytes(whole.clone()).unwrap());
    for len in 0..whole.len() {
        let error =
            error_of(whole[..len].to_vec()).unwrap_or_else(|outcome| panic!("{len} bytes: {outcome}"));
        assert!(error.offset <= len as u64, "{len} bytes: {error}");
    }
}

#[test]
fn a_file_with_one_flipped_bit_is_an_error_or_valid() {
    let whole = small_file();
    let mut read = 0;
    for bit in 0..whole.len() * 8 {
        let mut bytes = whole.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        if let Ok(file) = File::from_bytes(bytes) {
            walk::walk(&file);
            walk::rewrite(&file);
            read += 1;
        }
    }
    // Most flips are in names, plain values and data, where any content is valid.
    assert!(read > whole.len(), "{read} of {} flips still read", whole.len() * 8);
}

#[test]
fn files_with_random_damage_are_errors_or_valid() {
    let seed = 0x6767_7566;
    println!("seed {seed:#x}");
    let mut rng = Rng::new(seed);
    let whole = small_file();
    let interesting = [0u64, 1, 31, 32, 255, 1 << 31, 1 << 32, 1 << 61, 1 << 63, u64::MAX];
    for round in 0..40_000 {
        let mut bytes = whole.clone();
        for _ in 0..rng.range(1, 6) {
            let place = rng.below(bytes.len());
            match rng.below(4) {
                0 => bytes[place] = rng.next_u64() as u8,
                1 => bytes[place] ^= 1 << rng.below(8),
                2 => {
                    let number = rng.pick(&interesting).unwrap().to_ne_bytes();
                    let len = [1, 2, 4, 8][rng.below(4)].min(bytes.len() - place);
                    bytes[place..place + len].copy_from_slice(&number[..len]);
                }
                _ => bytes.truncate(place.max(1)),
            }
        }
        if let Ok(file) = File::from_bytes(bytes) {
            println!("round {round} still reads");
            walk::walk(&file);
            walk::rewrite(&file);
        }
    }
}
