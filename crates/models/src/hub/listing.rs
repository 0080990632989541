//! The files of a repository, as the hub lists them.

use serde::Deserialize;

use super::error::{HubError, HubResult};

/// A repository at one commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// `ORG/REPO`.
    pub repository: String,
    /// The commit.
    pub commit: String,
    /// The files.
    pub files: Vec<RemoteFile>,
}

/// A file of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteFile {
    /// The path in the repository.
    pub name: String,
    /// The size in bytes.
    pub bytes: u64,
    /// The checksum.
    pub checksum: Option<RemoteChecksum>,
}

/// The checksum of a file that the hub gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemoteChecksum {
    /// SHA-256 of the content, of files in large file storage.
    Sha256(String),
    /// The id of the file's Git blob, of all others: SHA-1 of a header and the content.
    GitBlob(String),
}

/// More bytes than any file of a model has; that many files of this size can be added up.
const MAX_FILE: u64 = 1 << 42;

#[derive(Deserialize)]
struct ModelAnswer {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    #[serde(default)]
    size: Option<u64>,
    #[serde(default, rename = "blobId")]
    blob_id: Option<String>,
    #[serde(default)]
    lfs: Option<LargeFile>,
}

#[derive(Deserialize)]
struct LargeFile {
    sha256: Option<String>,
    /// The same, by the name that other answers of the hub give it.
    oid: Option<String>,
    size: Option<u64>,
}

impl Listing {
    /// Reads the hub's answer to `/api/models/ORG/REPO/revision/REVISION?blobs=true`.
    pub fn from_json(repository: &str, url: &str, bytes: &[u8]) -> HubResult<Listing> {
        let wrong = |reason: String| HubError::Answer { url: url.to_owned(), reason };
        let answer: ModelAnswer = serde_json::from_slice(bytes).map_err(|error| wrong(error.to_string()))?;
        if !is_hexadecimal(&answer.sha, 40) {
            return Err(wrong(format!("the commit {:?} is not 40 hexadecimal digits", answer.sha)));
        }
        let files = answer.siblings.into_iter().map(|file| {
            let large = file.lfs.as_ref();
            let sha256 = large.and_then(|large| large.sha256.clone().or_else(|| large.oid.clone()));
            let sha256 = sha256.map(|sum| sum.trim_start_matches("sha256:").to_ascii_lowercase());
            if let Some(sum) = sha256.as_ref().filter(|sum| !is_hexadecimal(sum, 64)) {
                return Err(wrong(format!(
                    "{}: the SHA-256 {sum:?} is not 64 hexadecimal digits",
                    file.rfilename
                )));
            }
            let blob = file.blob_id.filter(|id| is_hexadecimal(id, 40) && large.is_none());
            let checksum = sha256.map(RemoteChecksum::Sha256).or(blob.map(RemoteChecksum::GitBlob));
            let bytes = large.and_then(|large| large.size).or(file.size);
            let Some(bytes) = bytes else {
                return Err(wrong(format!("{} has no size", file.rfilename)));
            };
            if bytes > MAX_FILE {
                let name = &file.rfilename;
                return Err(wrong(format!("{name} has a size of {bytes} bytes, more than any model")));
            }
            Ok(RemoteFile { name: file.rfilename, bytes, checksum })
        });
        let files = files.collect::<HubResult<_>>()?;
        Ok(Listing { repository: repository.to_owned(), commit: answer.sha, files })
    }

    /// The file with this path.
    pub fn find(&self, name: &str) -> Option<&RemoteFile> {
        self.files.iter().find(|file| file.name == name)
    }
}

/// Whether a text is this many hexadecimal digits: safe as a file name.
fn is_hexadecimal(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// An error unless a file's path stays within the folder that it is put in, on every system.
pub(super) fn check_file_name(repository: &str, name: &str) -> HubResult<()> {
    let hostile = |part: &str| {
        part.is_empty()
            || part == "."
            || part == ".."
            || part.ends_with(['.', ' '])
            || part.contains(|c: char| c.is_control() || "\\:*?\"<>|".contains(c))
    };
    if name.is_empty() || name.len() > 512 || name.split('/').any(hostile) {
        return Err(HubError::FileName { repository: repository.to_owned(), name: name.to_owned() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hubs_answer_is_read() {
        let sum = "ab".repeat(32);
        let text = format!(
            r#"{{"sha":"{}","siblings":[{{"rfilename":"m.gguf","size":9,"blobId":"x","lfs":{{"sha256":"{sum}","size":9,"pointerSize":3}}}},
            {{"rfilename":"config.json","size":2,"blobId":"{}"}}]}}"#,
            "0".repeat(40),
            "1".repeat(40)
        );
        let listing = Listing::from_json("a/b", "url", text.as_bytes()).unwrap();
        assert_eq!(listing.files[0].checksum, Some(RemoteChecksum::Sha256(sum)));
        assert_eq!(
            listing.find("config.json").unwrap().checksum,
            Some(RemoteChecksum::GitBlob("1".repeat(40)))
        );
        for broken in [
            "",
            "{}",
            r#"{"sha":"../../x"}"#,
            r#"{"sha":"0000000000000000000000000000000000000000","siblings":[{"rfilename":"x"}]}"#,
        ] {
            assert!(Listing::from_json("a/b", "url", broken.as_bytes()).is_err(), "{broken}");
        }
    }

    #[test]
    fn hostile_file_names_are_refused() {
        for name in ["a.gguf", "Q4/a-00001-of-00002.gguf", ".gitattributes", "a b.gguf"] {
            assert!(check_file_name("a/b", name).is_ok(), "{name}");
        }
        for name in ["../a", "/a", "a/../b", "a//b", "", "a\\b", "C:a", "a/", "a\0b", "..", "a/.", "aux. "] {
            assert!(check_file_name("a/b", name).is_err(), "{name}");
        }
    }
}
