//! Safetensors files: the header is a length and a JSON object of names, types, shapes and offsets.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::de::{self, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::error::{ConvertResult, invalid, io_error, is_regular};

/// The longest header that the format allows.
const MAX_HEADER: u64 = 100_000_000;
/// More dimensions than any weight has.
const MAX_RANK: usize = 8;

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of the format")]
pub enum SafeType {
    F64,
    F32,
    F16,
    BF16,
    F8E4M3,
    F8E5M2,
    I64,
    I32,
    I16,
    I8,
    U8,
    Bool,
}

impl SafeType {
    const ALL: [(&'static str, SafeType); 12] = [
        ("F64", SafeType::F64),
        ("F32", SafeType::F32),
        ("F16", SafeType::F16),
        ("BF16", SafeType::BF16),
        ("F8_E4M3", SafeType::F8E4M3),
        ("F8_E5M2", SafeType::F8E5M2),
        ("I64", SafeType::I64),
        ("I32", SafeType::I32),
        ("I16", SafeType::I16),
        ("I8", SafeType::I8),
        ("U8", SafeType::U8),
        ("BOOL", SafeType::Bool),
    ];

    /// The type with this name in a header.
    pub fn named(name: &str) -> Option<SafeType> {
        SafeType::ALL.iter().find(|(known, _)| *known == name).map(|(_, found)| *found)
    }

    /// The name in a header.
    pub fn name(self) -> &'static str {
        SafeType::ALL.iter().find(|(_, known)| *known == self).map_or("", |(name, _)| name)
    }

    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            SafeType::F64 | SafeType::I64 => 8,
            SafeType::F32 | SafeType::I32 => 4,
            SafeType::F16 | SafeType::BF16 | SafeType::I16 => 2,
            SafeType::F8E4M3 | SafeType::F8E5M2 | SafeType::I8 | SafeType::U8 | SafeType::Bool => 1,
        }
    }

    /// Whether the elements are floating-point numbers.
    pub fn is_float(self) -> bool {
        matches!(
            self,
            SafeType::F64
                | SafeType::F32
                | SafeType::F16
                | SafeType::BF16
                | SafeType::F8E4M3
                | SafeType::F8E5M2
        )
    }
}

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SafeTensor {
    /// The type of the elements.
    pub dtype: SafeType,
    /// The dimensions, outermost first.
    pub shape: Vec<usize>,
    /// The first byte, from the start of the file.
    pub start: u64,
    /// How many bytes there are.
    pub bytes: u64,
}

/// What a header says about a tensor. It is read without JSON values in between, which would take many times the header's length.
#[derive(Deserialize)]
struct HeaderEntry {
    #[serde(deserialize_with = "named_type")]
    dtype: SafeType,
    #[serde(deserialize_with = "dimensions")]
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

fn named_type<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SafeType, D::Error> {
    struct Name;
    impl Visitor<'_> for Name {
        type Value = SafeType;

        fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
            out.write_str("the name of a type")
        }

        fn visit_str<E: de::Error>(self, name: &str) -> Result<SafeType, E> {
            let shown: String = name.chars().take(60).collect();
            SafeType::named(name).ok_or_else(|| E::custom(format!("the type {shown:?} is unknown")))
        }
    }
    deserializer.deserialize_str(Name)
}

fn dimensions<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<usize>, D::Error> {
    struct List;
    impl<'de> Visitor<'de> for List {
        type Value = Vec<usize>;

        fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
            out.write_str("a list of dimensions")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<usize>, A::Error> {
            let mut found = Vec::new();
            while let Some(dimension) = list.next_element()? {
                if found.len() == MAX_RANK {
                    return Err(de::Error::custom(format!("more than {MAX_RANK} dimensions")));
                }
                found.push(dimension);
            }
            Ok(found)
        }
    }
    deserializer.deserialize_seq(List)
}

/// The header of a safetensors file.
#[derive(Debug)]
pub struct SafetensorsFile {
    /// The path.
    pub path: PathBuf,
    /// The tensors by name.
    pub tensors: BTreeMap<String, SafeTensor>,
}

impl SafetensorsFile {
    /// Reads and checks a file's header.
    pub fn open(path: &Path) -> ConvertResult<SafetensorsFile> {
        is_regular(path)?;
        let mut file = File::open(path).map_err(io_error("open", path))?;
        let length = file.metadata().map_err(io_error("read", path))?.len();
        let name = path.display().to_string();
        let mut start = [0; 8];
        file.read_exact(&mut start)
            .map_err(|_| invalid(&name, "byte 0", "it is shorter than the 8 bytes of a header's length"))?;
        let header = u64::from_le_bytes(start);
        if header > MAX_HEADER || header > length.saturating_sub(8) {
            return Err(invalid(
                &name,
                "byte 0",
                format!("a header of {header} bytes does not fit in the {length} bytes of the file"),
            ));
        }
        let mut bytes = vec![0; usize::try_from(header).unwrap_or(0)];
        file.read_exact(&mut bytes).map_err(io_error("read", path))?;
        let tensors = parse_header(&bytes, length, &name)?;
        Ok(SafetensorsFile { path: path.to_owned(), tensors })
    }
}

/// The tensors of a header in their order; a name can be there twice, of which a map would keep one.
struct Entries(Vec<(String, HeaderEntry)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Entries, D::Error> {
        struct Members;
        impl<'de> Visitor<'de> for Members {
            type Value = Entries;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    let entry = map.next_value();
                    let entry =
                        entry.map_err(|error| de::Error::custom(format!("tensor {name:?}: {error}")))?;
                    entries.push((name, entry));
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(Members)
    }
}

/// Checks the JSON of a header for a file of `length` bytes; `file` names it in errors.
pub fn parse_header(header: &[u8], length: u64, file: &str) -> ConvertResult<BTreeMap<String, SafeTensor>> {
    let Entries(entries) =
        serde_json::from_slice(header).map_err(|error| invalid(file, "header", error.to_string()))?;
    let data = header.len() as u64 + 8;
    let mut tensors = BTreeMap::new();
    for (name, HeaderEntry { dtype, shape, data_offsets: (begin, end) }) in entries {
        let place = format!("tensor {name:?}");
        let wrong = |reason: String| invalid(file, &place, reason);
        let elements = shape.iter().try_fold(1u64, |product, dim| product.checked_mul(*dim as u64));
        let expected = elements.and_then(|elements| elements.checked_mul(dtype.bytes() as u64));
        if end.checked_sub(begin).is_none() || expected != Some(end - begin) {
            return Err(wrong(format!(
                "bytes {begin} to {end} are not those of {shape:?} elements of type {}",
                dtype.name()
            )));
        }
        if end > length.saturating_sub(data) {
            return Err(wrong(format!(
                "byte {end} of the data is behind the end of the file (incomplete download?)"
            )));
        }
        let tensor = SafeTensor { dtype, shape, start: data + begin, bytes: end - begin };
        if tensors.insert(name, tensor).is_some() {
            return Err(wrong("the name appears twice in the header".to_owned()));
        }
    }
    Ok(tensors)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_checked() {
        let parse = |text: &str, bytes: u64| {
            parse_header(text.as_bytes(), text.len() as u64 + 8 + bytes, "m.safetensors")
        };
        let good =
            r#"{"__metadata__":{"format":"pt"},"w":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}}"#;
        let tensor = &parse(good, 12).unwrap()["w"];
        assert_eq!((tensor.dtype, tensor.shape.as_slice(), tensor.bytes), (SafeType::BF16, &[2, 3][..], 12));
        for (text, part) in [
            ("", "header"),
            ("[]", "header"),
            (r#"{"w":{"dtype":"BF16","shape":[2,3]}}"#, "data_offsets"),
            (r#"{"w":{"dtype":"Q4","shape":[2],"data_offsets":[0,2]}}"#, "Q4"),
            (r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,7]}}"#, "bytes 0 to 7"),
            (r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}"#, "bytes 8 to 0"),
            (r#"{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}"#, "behind the end"),
            (
                r#"{"w":{"dtype":"F32","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,0]}}"#,
                "bytes",
            ),
            (r#"{"w":{"dtype":"F32","shape":[-1],"data_offsets":[0,0]}}"#, "tensor \"w\""),
        ] {
            let error = parse(text, 12).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains("m.safetensors"), "{text}: {error}");
        }
    }

    #[test]
    fn headers_are_read_entry_by_entry() {
        let entry = |shape: &str| format!(r#""w":{{"dtype":"F32","shape":[{shape}],"data_offsets":[0,4]}}"#);
        let parse = |text: &str| parse_header(text.as_bytes(), text.len() as u64 + 12, "m.safetensors");
        // Nothing behind the first wrong entry is read.
        for (shape, part) in
            [("1,".repeat(MAX_RANK) + "1", "more than 8 dimensions"), ("-1".to_owned(), "-1")]
        {
            let error = parse(&format!("{{{},]", entry(&shape))).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains("tensor \"w\""), "{error}");
        }
        let metadata = format!(r#"{{"__metadata__":{{"a":[1,{{"b":null}}]}},{}}}"#, entry("1"));
        assert_eq!(parse(&metadata).unwrap().len(), 1);
    }
}
