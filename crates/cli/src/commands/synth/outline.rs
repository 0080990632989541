//! A model file without its weights: a sparse file of the right size, which can be planned, but not run.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::path::Path;

use quadriga_gguf::Writer;
use quadriga_graph::Shape;

use super::SynthArgs;
use crate::failure::{Failure, Outcome};

/// Stands for bytes that are not written.
static ZEROS: [u8; 1 << 20] = [0; 1 << 20];

/// Writes metadata and tensor records; the tensors' bytes are a hole in the file.
pub(super) fn write(arguments: &SynthArgs, path: &Path) -> Outcome {
    let description = arguments.describe()?;
    let mut writer = Writer::new();
    description.metadata(&mut writer, arguments)?;
    for tensor in &description.tensors {
        let dtype = arguments.type_of(tensor).0;
        let elements = tensor.dims.iter().fold(1usize, |product, dim| product.saturating_mul(*dim));
        let bytes = dtype.row_bytes(elements).unwrap_or(0);
        let shape = Shape::new(&tensor.dims).unwrap_or(Shape::from([0]));
        writer.tensor(&tensor.name, dtype, shape, move |out| {
            let mut left = bytes;
            while left > 0 {
                let zeros = ZEROS.get(..left.min(ZEROS.len())).unwrap_or(&ZEROS);
                out.write_all(zeros)?;
                left -= zeros.len();
            }
            Ok(())
        })?;
    }
    let failed = |error: io::Error| Failure::file("write", path, &error);
    let mut sparse = SparseFile { file: File::create(path).map_err(failed)?, len: 0 };
    writer.write_to(&mut sparse)?;
    sparse.file.set_len(sparse.len).map_err(failed)
}

/// A file in which [`ZEROS`] are skipped.
struct SparseFile {
    file: File,
    len: u64,
}

impl Write for SparseFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if std::ptr::eq(bytes.as_ptr(), ZEROS.as_ptr()) {
            self.file.seek(SeekFrom::Current(bytes.len() as i64))?;
        } else {
            self.file.write_all(bytes)?;
        }
        self.len += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
