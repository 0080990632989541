//! Files made byte by byte, and a walk over every accessor of a file.
#![allow(dead_code, reason = "each test file uses its part")]

pub(crate) mod walk;

/// The bytes of a file under construction, and the offset of its invalid field.
#[derive(Clone, Default)]
pub(crate) struct Raw {
    pub(crate) bytes: Vec<u8>,
    pub(crate) mark: usize,
}

impl Raw {
    /// A header of version 3.
    pub(crate) fn file(tensors: u64, keys: u64) -> Raw {
        Raw::default().put(b"GGUF").u32(3).u64(tensors).u64(keys)
    }

    pub(crate) fn put(mut self, bytes: &[u8]) -> Raw {
        self.bytes.extend_from_slice(bytes);
        self
    }

    pub(crate) fn u32(self, value: u32) -> Raw {
        self.put(&value.to_ne_bytes())
    }

    pub(crate) fn u64(self, value: u64) -> Raw {
        self.put(&value.to_ne_bytes())
    }

    pub(crate) fn text(self, text: impl AsRef<[u8]>) -> Raw {
        self.u64(text.as_ref().len() as u64).put(text.as_ref())
    }

    /// Marks the invalid field, which starts here.
    pub(crate) fn here(mut self) -> Raw {
        self.mark = self.bytes.len();
        self
    }

    /// A key and the type of its value.
    pub(crate) fn key(self, key: &str, kind: u32) -> Raw {
        self.text(key).u32(kind)
    }

    /// A tensor's record; dimensions as the file lists them, innermost first.
    pub(crate) fn tensor(self, name: &str, dims: &[u64], kind: u32, offset: u64) -> Raw {
        self.tensor_before_offset(name, dims, kind).u64(offset)
    }

    pub(crate) fn tensor_before_offset(self, name: &str, dims: &[u64], kind: u32) -> Raw {
        let raw = self.text(name).u32(dims.len() as u32);
        dims.iter().fold(raw, |raw, dim| raw.u64(*dim)).u32(kind)
    }

    /// Fills up to a multiple of `alignment`, then adds `len` bytes of data.
    pub(crate) fn data(mut self, alignment: usize, len: usize) -> Raw {
        let start = self.bytes.len().next_multiple_of(alignment);
        self.bytes.resize(start, 0);
        self.bytes.extend((0..len).map(|index| index as u8));
        self
    }
}

/// A small file with a value of every type and two tensors that fill their alignment exactly.
pub(crate) fn small_file() -> Vec<u8> {
    let raw = Raw::file(2, 16)
        .key("general.architecture", 8)
        .text("llama")
        .key("general.alignment", 4)
        .u32(32)
        .key("llama.block_count", 4)
        .u32(2)
        .key("tokenizer.ggml.model", 8)
        .text("gpt2")
        .key("tokenizer.ggml.tokens", 9)
        .u32(8)
        .u64(3)
        .text("a")
        .text("")
        .text("ü")
        .key("u8", 0)
        .put(&[200])
        .key("i8", 1)
        .put(&[200])
        .key("u16", 2)
        .put(&60_000u16.to_ne_bytes())
        .key("i16", 3)
        .put(&(-3i16).to_ne_bytes())
        .key("i32", 5)
        .put(&(-4i32).to_ne_bytes())
        .key("f32", 6)
        .put(&1.5f32.to_ne_bytes())
        .key("bool", 7)
        .put(&[1])
        .key("u64", 10)
        .u64(u64::MAX)
        .key("i64", 11)
        .put(&i64::MIN.to_ne_bytes())
        .key("f64", 12)
        .put(&0.1f64.to_ne_bytes())
        .key("nested", 9)
        .u32(9)
        .u64(2)
        .u32(7)
        .u64(2)
        .put(&[0, 1])
        .u32(2)
        .u64(1)
        .put(&7u16.to_ne_bytes());
    raw.tensor("a.weight", &[4, 2], 0, 0).tensor("b.weight", &[16, 3, 1], 1, 32).data(32, 32 + 96).bytes
}
