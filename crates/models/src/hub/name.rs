//! Names of repositories: `ORG/REPO[@REVISION][:QUANT]`.

use std::fmt;
use std::str::FromStr;

use super::error::{HubError, HubResult};

/// The name of a model repository, and which of its files is wanted.
///
/// ```
/// use quadriga_models::hub::RepositoryName;
///
/// let name: RepositoryName = "Qwen/Qwen3-8B-GGUF:Q4_K_M".parse()?;
/// assert_eq!((name.path().as_str(), name.quant()), ("Qwen/Qwen3-8B-GGUF", Some("Q4_K_M")));
/// assert!("../etc/passwd".parse::<RepositoryName>().is_err());
/// # Ok::<(), quadriga_models::hub::HubError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepositoryName {
    owner: String,
    name: String,
    revision: Option<String>,
    quant: Option<String>,
}

/// The longest part of a name.
const MAX_PART: usize = 96;

/// The revision that is meant without one.
pub(super) const MAIN: &str = "main";

impl RepositoryName {
    /// `ORG/REPO`.
    pub fn path(&self) -> String {
        format!("{}/{}", self.owner, self.name)
    }

    /// The organization or user.
    pub fn owner(&self) -> &str {
        &self.owner
    }

    /// The name within the organization.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The branch, tag or commit [default: main].
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or(MAIN)
    }

    /// The branch, tag or commit if the name has one.
    pub fn explicit_revision(&self) -> Option<&str> {
        self.revision.as_deref()
    }

    /// The type of quantization that is wanted, such as `Q4_K_M`.
    pub fn quant(&self) -> Option<&str> {
        self.quant.as_deref()
    }

    /// The same repository at this branch, tag or commit.
    pub fn with_revision(&self, revision: &str) -> HubResult<RepositoryName> {
        check_revision(revision).map_err(|reason| HubError::Name { text: revision.to_owned(), reason })?;
        Ok(RepositoryName { revision: Some(revision.to_owned()), ..self.clone() })
    }

    /// The same repository with this type of quantization.
    pub fn with_quant(&self, quant: Option<&str>) -> RepositoryName {
        RepositoryName { quant: quant.map(str::to_owned), ..self.clone() }
    }
}

impl FromStr for RepositoryName {
    type Err = HubError;

    fn from_str(text: &str) -> HubResult<RepositoryName> {
        let wrong = |reason| HubError::Name { text: text.to_owned(), reason };
        let start = ["https://huggingface.co/", "huggingface.co/", "https://hf.co/", "hf.co/"];
        let rest = start.iter().find_map(|start| text.strip_prefix(start)).unwrap_or(text);
        let (rest, quant) = rest.rsplit_once(':').map_or((rest, None), |(rest, quant)| (rest, Some(quant)));
        let (rest, revision) =
            rest.split_once('@').map_or((rest, None), |(rest, revision)| (rest, Some(revision)));
        let (owner, name) = rest.split_once('/').ok_or_else(|| wrong("the / is missing"))?;
        for part in [Some(owner), Some(name), quant].into_iter().flatten() {
            check_part(part).map_err(wrong)?;
        }
        revision.map_or(Ok(()), check_revision).map_err(wrong)?;
        // "latest" is what Ollama calls a model without a tag.
        let quant = quant.filter(|quant| !quant.eq_ignore_ascii_case("latest"));
        let owned = |text: &str| text.to_owned();
        Ok(RepositoryName {
            owner: owner.to_owned(),
            name: name.to_owned(),
            revision: revision.map(owned),
            quant: quant.map(owned),
        })
    }
}

/// The names of branches may have slashes: `refs/pr/1`.
fn check_revision(revision: &str) -> Result<(), &'static str> {
    if revision.len() > MAX_PART {
        return Err("a part of it is too long");
    }
    revision.split('/').try_for_each(check_part)
}

fn check_part(part: &str) -> Result<(), &'static str> {
    match part {
        "" => Err("a part of it is empty"),
        _ if part.len() > MAX_PART => Err("a part of it is too long"),
        _ if part.starts_with('.') || part.contains("..") => Err("a part of it begins with . or has .."),
        _ if !part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte)) => {
            Err("a part of it has other characters than letters, digits, ., _ and -")
        }
        _ => Ok(()),
    }
}

impl fmt::Display for RepositoryName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.owner, self.name)?;
        if let Some(revision) = &self.revision {
            write!(f, "@{revision}")?;
        }
        match &self.quant {
            Some(quant) => write!(f, ":{quant}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed_and_hostile_ones_refused() {
        for text in ["a/b", "a/b:Q4_K_M", "a/b@v1:Q8_0", "a/b@refs/pr/1:Q8_0", "a-1/B_2.c"] {
            assert_eq!(
                text.parse::<RepositoryName>().map(|name| name.to_string()).ok().as_deref(),
                Some(text)
            );
        }
        let linked = "https://huggingface.co/a/b:latest".parse::<RepositoryName>();
        assert_eq!(linked.ok().map(|name| name.to_string()).as_deref(), Some("a/b"));
        for text in [
            "",
            "a",
            "a/",
            "/b",
            "a/b/c",
            "../b",
            "a/..",
            "a/b:",
            "a/b:../x",
            "a/b c",
            "a/b@",
            "a\\b/c",
            "a/b:x/y",
            "a/b@/v",
            "a/b@v//w",
            "a/b@../v",
            "a/b@v/../w",
        ] {
            assert!(text.parse::<RepositoryName>().is_err(), "{text}");
        }
    }
}
