//! The map of a file into memory: the one place with `unsafe` in this crate.

use std::{fs, path::Path, sync::Arc};

use quadriga_graph::Data;

use crate::error::{Error, Result};

/// Maps a regular file for reading.
pub(crate) fn map(path: &Path) -> Result<Data> {
    let failed = |action| move |source| Error::Io { action, path: path.to_owned(), source };
    // Asked before opening: opening a pipe for reading would wait for its writer.
    let regular = |metadata: fs::Metadata| match metadata.is_file() {
        true => Ok(metadata.len()),
        false => Err(Error::NotAFile { path: path.to_owned() }),
    };
    regular(fs::metadata(path).map_err(failed("open"))?)?;
    let file = fs::File::open(path).map_err(failed("open"))?;
    if regular(file.metadata().map_err(failed("open"))?)? == 0 {
        return Ok(Data::new(Arc::new([0u8; 0])));
    }
    // SAFETY: the map is read-only and private to this `Mmap`, which the returned handle keeps alive; it is only ever
    // seen as bytes, for which every content is valid. What remains is another process changing or cutting the file
    // in place while it is mapped, which no reader of mapped files can rule out and which `File::open` tells its
    // caller not to do; all text is checked again when it is read, so changed bytes cannot become invalid strings.
    let map = unsafe { memmap2::Mmap::map(&file) }.map_err(failed("map"))?;
    Ok(Data::new(Arc::new(map)))
}
