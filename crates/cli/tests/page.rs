//! The page of a plan in a real browser: `scripts/browser` installs Chromium and runs `tests/page/check.js` in it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{output, quadriga};
use quadriga_graph::{DType, Graph, GraphBuilder, Weight, layer_of};
use quadriga_llm::default_model;
use quadriga_runtime::Scheduler;
use quadriga_sim::Sim;
use quadriga_view::Picture;

/// The page of a graph on two devices; layers from `second` on are on the second device.
fn page(title: &str, graph: Graph, second: usize) -> String {
    let devices = [Sim::new("sim:0").build(), Sim::new("cpu").synchronous().host().build()];
    let plan = Scheduler::new(devices)
        .place(move |name| layer_of(name).map(|layer| usize::from(layer >= second)))
        .plan(graph)
        .unwrap();
    Picture::new(title, plan.explain()).html()
}

/// A graph of layers with 10 nodes each.
fn layers(count: usize) -> Graph {
    let g = GraphBuilder::new();
    let mut x = g.input("x", DType::F32, [8, 32]);
    for layer in 0..count {
        let _scope = g.scope(&format!("blk.{layer}"));
        let w = g.weight(&format!("blk.{layer}.up.weight"), Weight::new(DType::F32, [64, 32]));
        let back = g.weight(&format!("blk.{layer}.down.weight"), Weight::new(DType::F32, [32, 64]));
        let normed = x.rms_norm(1e-5).scale(1.5);
        let wide = w.mul_mat(normed);
        let gate = wide.silu().mul(wide.sqr()).scale(0.5).tanh();
        x = x.add(back.mul_mat(gate)).scale(0.9);
    }
    g.output("y", x);
    g.finish().unwrap()
}

fn hostile() -> Graph {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [8, 32]);
    let name = "</script><script>alert(1)</script><!-- & \"quoted\" 'name'";
    let w = g.weight(name, Weight::new(DType::F32, [64, 32]));
    g.output("y", w.mul_mat(x).named("<img src=x onerror=alert(2)>").silu());
    g.finish().unwrap()
}

#[test]
fn names_from_files_cannot_inject_markup() {
    let html = page("</title><b>bold", hostile(), 1);
    assert!(!html.contains("<script>alert") && !html.contains("<img") && !html.contains("<b>bold"));
    let start = html.find("id=\"plan\">").unwrap() + "id=\"plan\">".len();
    let data = &html[start..start + html[start..].find("</script>").unwrap()];
    // Nothing is fetched.
    let page = html.replace(data, "");
    assert!(!page.contains("http:") && !page.contains("https:") && !page.contains("src="));
    let data: serde_json::Value = serde_json::from_str(data).unwrap();
    let texts = data["texts"].as_array().unwrap();
    assert!(texts.iter().any(|text| text.as_str().unwrap().starts_with("</script><script>alert(1)")));
}

#[test]
fn a_drawing_is_well_formed_whatever_the_names() {
    let plan = Scheduler::new([Sim::new("a<&>\"b").build()]).plan(hostile()).unwrap();
    let svg = Picture::new("</svg>&", plan.explain()).about("a < b").svg();
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    assert_eq!(svg.matches("</svg>").count(), 1);
    // Every `&` begins an entity, and every text is closed.
    let entities = ["amp;", "lt;", "gt;", "quot;", "#39;"];
    assert!(
        svg.split('&').skip(1).all(|rest| entities.iter().any(|entity| rest.starts_with(entity))),
        "{svg}"
    );
    assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
}

#[test]
fn the_page_shows_the_plan_in_a_browser() {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("page");
    std::fs::create_dir_all(&target).unwrap();
    let model = default_model::fetch(None, &mut |_| ControlFlow::Continue(())).unwrap();
    let file = |name: &str| -> PathBuf { target.join(name) };
    let mut plan = quadriga(["plan", "--device", "sim", "-ngl", "16", "-b", "4", "--cache-dir"]);
    plan.arg(&target).arg("-m").arg(&model);
    plan.arg("--html").arg(file("plan.html")).arg("--json").arg(file("plan.json"));
    let summary = output(&mut plan).success().out;
    assert!(
        summary.contains("sim:0 computes layer 1 (split 1), layer 3")
            && summary.contains("Each run copies 126.0 KiB from sim:0 to cpu"),
        "{summary}"
    );
    std::fs::write(file("names.html"), page("</title><b>bold", hostile(), 1)).unwrap();
    let large = page("100,000 nodes", layers(10_000), 5_000);
    assert!(large.len() < 50 << 20, "{} bytes", large.len());
    std::fs::write(file("large.html"), large).unwrap();

    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let check = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/page/check.js");
    let mut script = Command::new(root.join("scripts/browser"));
    let done = script.arg(check).arg(&target).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    match done.status.code() {
        Some(0) => println!("{out}"),
        // Written past the capturing of test output, so that a skipped test is seen.
        Some(77) => {
            writeln!(std::io::stderr(), "\nSKIPPED: THE PAGE WAS NOT OPENED IN A BROWSER. {err}").unwrap()
        }
        _ => panic!("{out}{err}"),
    }
}
