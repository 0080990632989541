//! The environment variables that this crate reads, all of them here.
//!
//! | variable | meaning | in code |
//! |---|---|---|
//! | `QUADRIGA_CACHE` | folder for the default model | `folder` of [`fetch`](crate::default_model::fetch) |
//! | `XDG_CACHE_HOME`, `HOME` | the user's cache folder, in which `quadriga` is used | the same |
//! | `QUADRIGA_PIP` | program to run in place of pip | `pip` of [`fetch_source`](crate::default_model::fetch_source) |

use std::path::PathBuf;

/// The folder for the default model: `QUADRIGA_CACHE`, else `quadriga` in the user's cache folder.
pub(crate) fn cache_folder() -> Option<PathBuf> {
    let user = || {
        let xdg = path("XDG_CACHE_HOME").filter(|folder| folder.is_absolute());
        xdg.or_else(|| path("HOME").map(|home| home.join(".cache")))
    };
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
