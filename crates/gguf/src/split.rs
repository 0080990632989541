//! The names of the parts of a split model.

use std::path::{Path, PathBuf};

/// A path of the form `PREFIX-00002-of-00003.gguf`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SplitName {
    /// The folder; empty if the path has none.
    pub folder: PathBuf,
    /// The name before the numbers.
    pub prefix: String,
    /// The number of the part, counted from 1.
    pub number: u32,
    /// How many parts there are.
    pub count: u32,
}

impl SplitName {
    /// Parses a path; `None` if it does not have that form.
    pub fn of(path: &Path) -> Option<SplitName> {
        let stem = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (prefix, number) = rest.rsplit_once('-')?;
        let (number, count) = (five_digits(number)?, five_digits(count)?);
        (1..=count).contains(&number).then(|| SplitName {
            folder: path.parent().map(Path::to_owned).unwrap_or_default(),
            prefix: prefix.to_owned(),
            number,
            count,
        })
    }

    /// The path of another part.
    pub fn path_of(&self, number: u32) -> PathBuf {
        self.folder.join(format!("{}-{number:05}-of-{:05}.gguf", self.prefix, self.count))
    }
}

fn five_digits(text: &str) -> Option<u32> {
    (text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit())).then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_split_files_are_parsed() {
        let name = SplitName::of(Path::new("/models/a-b-00002-of-00003.gguf")).unwrap();
        assert_eq!((name.number, name.count), (2, 3));
        assert_eq!(name.path_of(1), Path::new("/models/a-b-00001-of-00003.gguf"));
        for other in [
            "a.gguf",
            "a-00002-of-00003",
            "a-2-of-3.gguf",
            "a-00004-of-00003.gguf",
            "a-00000-of-00003.gguf",
            "a-+0001-of-00003.gguf",
            "00001-of-00003.gguf",
            "",
        ] {
            assert_eq!(SplitName::of(Path::new(other)), None, "{other}");
        }
    }
}
