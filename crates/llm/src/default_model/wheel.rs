//! Just enough of a zip archive to take one file out of a wheel.

use std::io::{BufRead, Error, ErrorKind, Read, Result, Seek, SeekFrom};

use miniz_oxide::inflate::stream::{InflateState, inflate};
use miniz_oxide::{DataFormat, MZError, MZFlush, MZStatus};

/// The most bytes that the end record can be away from the end: itself and the longest comment.
const TAIL: u64 = 22 + 0xffff;

/// Opens an entry by name; reading it gives the unpacked bytes.
pub(super) fn entry<R: BufRead + Seek + 'static>(mut archive: R, name: &str) -> Result<Box<dyn Read>> {
    let length = archive.seek(SeekFrom::End(0))?;
    let tail_start = length.saturating_sub(TAIL);
    archive.seek(SeekFrom::Start(tail_start))?;
    let mut tail = Vec::new();
    archive.by_ref().take(TAIL).read_to_end(&mut tail)?;
    let end = tail
        .windows(4)
        .rposition(|bytes| bytes == b"PK\x05\x06")
        .ok_or_else(|| broken("is not a zip archive"))?;
    let end = Fields(tail.get(end..).unwrap_or_default());
    let (count, start) = (end.short(10)?, end.long(16)?);
    archive.seek(SeekFrom::Start(start))?;
    for _ in 0..count {
        let mut head = [0; 46];
        archive.read_exact(&mut head)?;
        let head = Fields(&head);
        if head.long(0)? != 0x0201_4b50 {
            return Err(broken("has a damaged table of contents"));
        }
        let mut own_name = vec![0; head.short(28)? as usize];
        archive.read_exact(&mut own_name)?;
        if own_name != name.as_bytes() {
            archive.seek_relative((head.short(30)? + head.short(32)?) as i64)?;
            continue;
        }
        let (method, packed, offset) = (head.short(10)?, head.long(20)?, head.long(42)?);
        archive.seek(SeekFrom::Start(offset))?;
        let mut local = [0; 30];
        archive.read_exact(&mut local)?;
        let local = Fields(&local);
        archive.seek_relative((local.short(26)? + local.short(28)?) as i64)?;
        let packed = archive.take(packed);
        return match method {
            0 => Ok(Box::new(packed)),
            8 => {
                Ok(Box::new(Inflate { packed, state: InflateState::new_boxed(DataFormat::Raw), done: false }))
            }
            other => Err(broken(&format!("packs {name} by a method that is not known here ({other})"))),
        };
    }
    Err(broken(&format!("does not contain {name}")))
}

fn broken(what: &str) -> Error {
    Error::new(ErrorKind::InvalidData, what.to_owned())
}

/// Little-endian numbers at fixed places.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn short(&self, at: usize) -> Result<u64> {
        let bytes = self.0.get(at..).and_then(|bytes| bytes.first_chunk::<2>());
        bytes.map(|bytes| u16::from_le_bytes(*bytes).into()).ok_or_else(|| broken("is cut short"))
    }

    fn long(&self, at: usize) -> Result<u64> {
        let bytes = self.0.get(at..).and_then(|bytes| bytes.first_chunk::<4>());
        bytes.map(|bytes| u32::from_le_bytes(*bytes).into()).ok_or_else(|| broken("is cut short"))
    }
}

/// A reader that inflates.
struct Inflate<R> {
    packed: R,
    state: Box<InflateState>,
    done: bool,
}

impl<R: BufRead> Read for Inflate<R> {
    fn read(&mut self, into: &mut [u8]) -> Result<usize> {
        while !self.done && !into.is_empty() {
            let input = self.packed.fill_buf()?;
            let step = inflate(&mut self.state, input, into, MZFlush::None);
            self.packed.consume(step.bytes_consumed);
            match step.status {
                Ok(MZStatus::StreamEnd) => self.done = true,
                Ok(_) | Err(MZError::Buf) => {}
                Err(_) => return Err(broken("contains damaged data")),
            }
            if step.bytes_written > 0 {
                return Ok(step.bytes_written);
            }
            if step.bytes_consumed == 0 && !self.done {
                return Err(broken("is cut short"));
            }
        }
        Ok(0)
    }
}
