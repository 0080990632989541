//! The README's picture of the default model is what the command draws.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod common;

use std::ops::ControlFlow;
use std::path::Path;

use common::{end, quadriga};
use quadriga_llm::default_model;

/// Set, the test draws the picture anew instead of comparing it.
const UPDATE: &str = "QUADRIGA_UPDATE_PICTURES";

#[test]
fn the_picture_in_the_readme_is_up_to_date() {
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/plan.svg");
    let folder = tempfile::tempdir().unwrap();
    let drawn = folder.path().join("plan.svg");
    let model = default_model::fetch(None, &mut |_| ControlFlow::Continue(())).unwrap();
    // An empty cache folder: estimates come from round figures, the same everywhere.
    let mut plan = quadriga(["plan", "--device", "sim", "-ngl", "16", "-b", "16", "--cache-dir"]);
    // How a CPU packs weights may depend on its instructions; these every CPU has.
    plan.env("QUADRIGA_ISA", "scalar");
    end(plan.arg(folder.path()).arg("-m").arg(model).arg("--svg").arg(&drawn)).well();
    let drawn = std::fs::read_to_string(drawn).unwrap();
    if std::env::var_os(UPDATE).is_some() {
        std::fs::write(&kept, &drawn).unwrap();
    }
    let kept = std::fs::read_to_string(kept).unwrap_or_default();
    assert!(
        kept == drawn,
        "docs/plan.svg is not what `quadriga plan` draws now; look at the new one, made by: \
         {UPDATE}=1 cargo test -p quadriga-cli --test picture"
    );
}
