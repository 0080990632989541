//! S9: pictures of the nodes of one split.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use quadriga_graph::{DType, GraphBuilder, Ranks, Weight};
use quadriga_runtime::{Plan, Scheduler};
use quadriga_sim::Sim;
use quadriga_view::{Picture, SplitPicture};

fn plan() -> Plan {
    let g = GraphBuilder::new();
    let (x, ids) = (g.input("x", DType::F32, [1, 8]), g.input("ids", DType::I32, [1]));
    let weight = |name: &str| g.weight(name, Weight::with_data(DType::F32, [8, 8], [1.0f32; 64].as_slice()));
    let first = weight("w0").mul_mat(x).named("first");
    let second = weight("w1").mul_mat(first).named("se\"cond <b>");
    let kept = g.state("cache1", DType::F32, [4, 8]).set_rows(second, ids).named("kept");
    g.output("y", kept.sum_rows().named("y"));
    let devices = [Sim::new("a").build(), Sim::new("b").build()];
    let rule = |name: &str| name.bytes().last().filter(u8::is_ascii_digit).map(|last| usize::from(last % 2));
    Scheduler::new(devices).place(rule).plan(g.finish().unwrap()).unwrap()
}

#[test]
fn s9_a_split_is_drawn_with_its_nodes_and_everything_they_read() {
    let plan = plan();
    assert_eq!(plan.splits().splits.len(), 2);
    let dot = SplitPicture::new(&plan, 1).unwrap().dot();
    assert!(dot.starts_with("digraph split {\n  label=\"Split 1 on b: 3 nodes\";"), "{dot}");
    // A copy, a weight, a state and an input are read; two results stay inside, or are outputs.
    for text in
        ["copy from a", "w1\\nweight", "cache1\\nstate", "ids\\ninput", "se\\\"cond <b>\\nmul_mat F32"]
    {
        assert!(dot.contains(text), "{text}: {dot}");
    }
    assert!(!dot.contains("w0"), "a weight of the other split: {dot}");
    // Copy and weight to the product; product, state and indices to the write; that to the sum.
    assert_eq!(dot.matches(" -> ").count(), 6, "{dot}");
    assert_eq!(dot.matches("penwidth=3").count(), 1, "{dot}");
    let first = SplitPicture::new(&plan, 0).unwrap().dot();
    assert!(first.contains("first\\nmul_mat") && first.contains("penwidth=3"), "{first}");
    assert!(SplitPicture::new(&plan, 2).is_none());
}

#[test]
fn s9_drawings_are_well_formed_and_escaped() {
    let picture = SplitPicture::new(&plan(), 1).unwrap();
    let svg = picture.svg();
    assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
    assert!(svg.contains("se&quot;cond &lt;b&gt;") && !svg.contains("<b>"), "{svg}");
    // Three nodes and four things that they read, besides the background; an arrow for each read.
    assert_eq!(svg.matches("<rect ").count(), 1 + 7, "{svg}");
    assert_eq!(svg.matches("class=\"edge\"").count(), 6, "{svg}");
    for (open, close) in [("<text", "</text>"), ("<title>", "</title>")] {
        assert_eq!(svg.matches(open).count(), svg.matches(close).count());
    }
    let html = picture.html();
    assert!(html.starts_with("<!doctype html>") && html.contains(&svg));
}

#[test]
fn collectives_are_drawn_apart_and_their_bytes_are_in_pictures() {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [1, 1024]);
    let ranks = Ranks { group: 0, rank: 0, count: 2 };
    g.output("sum", x.neg().all_reduce(ranks).named("sum"));
    let plan = Scheduler::new(Sim::new("a").build()).plan(g.finish().unwrap()).unwrap();
    let picture = SplitPicture::new(&plan, 0).unwrap();
    assert!(picture.svg().contains("class=\"collective"), "{}", picture.svg());
    assert!(
        picture.dot().contains("all_reduce F32") && picture.dot().contains("#ead9f2"),
        "{}",
        picture.dot()
    );
    let page = Picture::new("ranks", plan.explain());
    assert!(page.svg().contains("sent to ranks"), "{}", page.svg());
    let sentences = page.overview();
    assert!(sentences.iter().any(|text| text.contains("1 × all_reduce; 4.0 KiB sent")), "{sentences:?}");
}
