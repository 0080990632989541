//! Stop strings are found however the text is split into parts.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use quadriga_conformance::Rng;
use quadriga_llm::stop::StopMatcher;

/// The text before a stop string, and the stop string that was found.
fn stream(stops: &[&str], parts: &[String]) -> (String, Option<usize>) {
    let mut matcher = StopMatcher::new(stops.iter().copied());
    let mut text = String::new();
    for part in parts {
        let step = matcher.push(part);
        text.push_str(&step.text);
        if step.stopped_by.is_some() {
            return (text, step.stopped_by);
        }
    }
    (text + &matcher.finish(), None)
}

#[test]
fn any_split_gives_the_text_before_the_first_stop_string() {
    let seed = 8;
    let mut random = Rng::new(seed);
    let letters = ['a', 'b', 'é', '\n'];
    let stops = ["ab\n", "éé", "bbbb", ""];
    for round in 0..2000 {
        let text: Vec<char> = (0..random.below(30)).map(|_| *random.pick(&letters).unwrap()).collect();
        let mut parts = vec![String::new()];
        for &letter in &text {
            if random.chance(0.4) {
                parts.push(String::new());
            }
            parts.last_mut().unwrap().push(letter);
        }
        let whole: String = text.iter().collect();
        let first = stops[..3].iter().filter_map(|stop| whole.find(stop)).min();
        let (out, stopped) = stream(&stops, &parts);
        // Parts can complete a later stop string before an earlier-starting, longer one; these sets have none such.
        assert_eq!(out, whole[..first.unwrap_or(whole.len())], "seed {seed}, round {round}: {parts:?}");
        assert_eq!(stopped.is_some(), first.is_some());
    }
}

#[test]
fn nothing_is_held_back_without_need() {
    let mut matcher = StopMatcher::new(["</s>", "User:"]);
    assert_eq!(matcher.push("a < b").text, "a < b");
    assert_eq!(matcher.push(" <").text, " ");
    assert_eq!(matcher.push("/b").text, "</b");
    assert_eq!(matcher.push("U").text, "");
    assert_eq!(matcher.finish(), "U");
    assert_eq!(StopMatcher::new([""; 0]).push("x").text, "x");
}
