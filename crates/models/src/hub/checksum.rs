//! Checksums of downloaded files.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use sha1::Sha1;
use sha2::{Digest, Sha256};

use super::error::{HubError, HubResult, io_error};
use super::listing::RemoteChecksum;

/// Computes the SHA-256 of a file and compares what the hub gave. `progress` is told of the bytes read so far; what it returns
/// as an error ends the reading.
pub(super) fn verify(
    path: &Path,
    file: &str,
    expected: &RemoteChecksum,
    progress: &mut dyn FnMut(u64) -> HubResult<()>,
) -> HubResult<String> {
    let mut input = File::open(path).map_err(io_error("open", path))?;
    let length = input.metadata().map_err(io_error("read", path))?.len();
    let mut sha256 = Sha256::new();
    let mut blob = match expected {
        RemoteChecksum::GitBlob(_) => Some(Sha1::new_with_prefix(format!("blob {length}\0"))),
        RemoteChecksum::Sha256(_) => None,
    };
    let mut buffer = vec![0; 1 << 20];
    let mut read = 0;
    loop {
        let count = match input.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(io_error("read", path)(error)),
        };
        let part = buffer.get(..count).unwrap_or_default();
        sha256.update(part);
        if let Some(blob) = &mut blob {
            blob.update(part);
        }
        read += count as u64;
        progress(read)?;
    }
    let sha256 = hexadecimal(&sha256.finalize());
    let (expected, found) = match (expected, blob) {
        (RemoteChecksum::GitBlob(expected), Some(blob)) => (expected, hexadecimal(&blob.finalize())),
        (RemoteChecksum::Sha256(expected) | RemoteChecksum::GitBlob(expected), _) => {
            (expected, sha256.clone())
        }
    };
    if found != *expected {
        return Err(HubError::Checksum { file: file.to_owned(), expected: expected.clone(), found });
    }
    Ok(sha256)
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_checksums_are_compared() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        std::fs::write(&path, "hello\n").unwrap();
        let sha256 = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
        for right in [
            RemoteChecksum::Sha256(sha256.to_owned()),
            RemoteChecksum::GitBlob("ce013625030ba8dba906f756967f9e9ca394464a".to_owned()),
        ] {
            assert_eq!(verify(&path, "f", &right, &mut |_| Ok(())).unwrap(), sha256);
        }
        let wrong = RemoteChecksum::Sha256("00".repeat(32));
        assert!(matches!(verify(&path, "f", &wrong, &mut |_| Ok(())), Err(HubError::Checksum { .. })));
    }
}
