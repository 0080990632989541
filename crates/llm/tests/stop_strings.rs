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

/// Where a text ends whose first bytes end no stop string, found by looking at every place; with the stop string or without it.
fn end_of(text: &str, stops: &[&str], passed: usize, keeps: bool) -> Option<usize> {
    let places = (0..=text.len()).filter(|at| text.is_char_boundary(*at));
    let found = places.flat_map(|at| stops.iter().map(move |stop| (at, stop.len(), stop)));
    let is_stop =
        |(at, length, stop): &(usize, usize, &&str)| at + length > passed && text[*at..].starts_with(**stop);
    // Of those that are complete first, the one that begins first.
    let first = found.filter(is_stop).min_by_key(|(at, length, _)| (at + length, *at));
    first.map(|(at, length, _)| if keeps { at + length } else { at })
}

#[test]
fn stop_strings_count_where_they_end_after_what_was_passed() {
    let seed = 11;
    let mut random = Rng::new(seed);
    let letters = ['a', 'b', 'é'];
    let stops = ["ab", "aba", "éé", "bb"];
    let mut stopped = 0;
    for round in 0..4000 {
        let text: Vec<char> = (0..random.below(16)).map(|_| *random.pick(&letters).unwrap()).collect();
        let unstoppable = random.below(text.len() + 1);
        let keeps = random.chance(0.5);
        let mut matcher = StopMatcher::new(stops).keeping_stop(keeps);
        let (mut out, mut found) = (String::new(), None);
        for (at, letter) in text.iter().enumerate() {
            if at < unstoppable {
                out += &matcher.pass(&letter.to_string());
                continue;
            }
            let step = matcher.push(&letter.to_string());
            out += &step.text;
            if step.stopped_by.is_some() {
                found = step.stopped_by;
                break;
            }
        }
        if found.is_none() {
            out += &matcher.finish();
        }
        let whole: String = text.iter().collect();
        let passed = text[..unstoppable].iter().map(|letter| letter.len_utf8()).sum();
        let end = end_of(&whole, &stops, passed, keeps);
        assert_eq!(found.is_some(), end.is_some(), "seed {seed}, round {round}: {whole:?} after {passed}");
        assert_eq!(
            out,
            whole[..end.unwrap_or(whole.len())],
            "seed {seed}, round {round}: {whole:?} after {passed}, {keeps}"
        );
        stopped += usize::from(found.is_some());
    }
    assert!(stopped > 1000, "{stopped}");
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
