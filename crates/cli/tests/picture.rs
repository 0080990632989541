//! The README's picture of the default model is the command's current output.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::ops::ControlFlow;
use std::path::Path;

use crate::common::{output, quadriga};
use quadriga_llm::default_model;

/// If set, the test redraws the picture before it compares.
const UPDATE: &str = "QUADRIGA_UPDATE_PICTURES";

#[test]
fn the_picture_in_the_readme_is_up_to_date() {
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/plan.svg");
    let folder = tempfile::tempdir().unwrap();
    let drawn = folder.path().join("plan.svg");
    let model = default_model::fetch(None, &mut |_| ControlFlow::Continue(())).unwrap();
    // An empty cache folder: estimates come from nominal figures, which are the same on every machine.
    let mut plan =
        quadriga(["plan", "--device", "sim", "-ngl", "16", "-b", "4", "-c", "4096", "--cache-dir"]);
    // The packed layout of weights depends on the instruction set; every CPU has this one.
    plan.env("QUADRIGA_ISA", "scalar");
    output(plan.arg(folder.path()).arg("-m").arg(model).arg("--svg").arg(&drawn)).success();
    let drawn = std::fs::read_to_string(drawn).unwrap();
    if std::env::var_os(UPDATE).is_some() {
        std::fs::write(&kept, &drawn).unwrap();
    }
    let kept = std::fs::read_to_string(kept).unwrap_or_default();
    assert!(
        kept == drawn,
        "docs/plan.svg differs from the output of `quadriga plan`; redraw and review it: \
         {UPDATE}=1 cargo test -p quadriga-cli --test picture"
    );
}
