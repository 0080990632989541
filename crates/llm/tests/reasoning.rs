//! Reasoning is told from the answer, however the text is cut into pieces.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "tests")]

use quadriga_conformance::Rng;
use quadriga_llm::reasoning::{ReasoningFormat, ReasoningSplitter, SplitText};
use quadriga_llm::template::ChatTemplate;

fn split(format: &ReasoningFormat, open: bool, pieces: &[&str]) -> SplitText {
    let mut splitter = ReasoningSplitter::new(Some(format.clone()), open);
    let mut whole = SplitText::default();
    let parts: Vec<SplitText> = pieces.iter().map(|piece| splitter.push(piece)).collect();
    for part in parts.into_iter().chain([splitter.finish()]) {
        whole.reasoning.push_str(&part.reasoning);
        whole.answer.push_str(&part.answer);
    }
    whole
}

/// The same for a whole text, in the simplest way.
fn judge(format: &ReasoningFormat, open: bool, text: &str) -> SplitText {
    let (mut reasoning, mut answer) = (String::new(), String::new());
    let mut reasoned = open;
    match format {
        ReasoningFormat::Markers { open: first, close } => {
            let inside = match text.trim_start().strip_prefix(first.as_ref()) {
                _ if open => Some(text),
                inside => inside,
            };
            reasoned |= inside.is_some();
            match inside.map(|inside| inside.split_once(close.as_ref()).unwrap_or((inside, ""))) {
                Some((thought, rest)) => (reasoning, answer) = (thought.to_owned(), rest.to_owned()),
                None => answer = text.to_owned(),
            }
        }
        ReasoningFormat::Harmony => {
            // Every marker begins a block; the text before the first one is answer.
            let marked = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>"]
                .iter()
                .fold(text.to_owned(), |text, marker| text.replace(marker, &format!("\u{1}{marker}")));
            let mut header = None;
            for block in marked.split('\u{1}') {
                if let Some(name) = block.strip_prefix("<|channel|>").or(block.strip_prefix("<|start|>")) {
                    header = Some(name);
                } else if let Some(body) = block.strip_prefix("<|message|>") {
                    let analysis =
                        header.take().is_some_and(|name| name.trim_start().starts_with("analysis"));
                    reasoned |= analysis;
                    let kind = if analysis { &mut reasoning } else { &mut answer };
                    // White space before the answer goes only once reasoning was seen.
                    if analysis || !reasoned || !kind.is_empty() {
                        kind.push_str(body)
                    } else {
                        kind.push_str(body.trim_start())
                    }
                } else {
                    header = None;
                    let body = block.strip_prefix("<|end|>").unwrap_or(block);
                    answer.push_str(if reasoned && answer.is_empty() { body.trim_start() } else { body });
                }
            }
            // A header without its message.
            let body = header.unwrap_or_default();
            answer.push_str(if reasoned && answer.is_empty() { body.trim_start() } else { body });
            return SplitText { reasoning: reasoning.trim().to_owned(), answer };
        }
    }
    let answer = if reasoned { answer.trim_start().to_owned() } else { answer };
    SplitText { reasoning: reasoning.trim().to_owned(), answer }
}

#[test]
fn pieces_of_any_size_give_the_same_text() {
    let words = [
        "<think>",
        "</think>",
        "<thi",
        "nk>",
        "</",
        "<",
        ">",
        "\n",
        " ",
        "hm",
        "é",
        "🙂",
        "<|channel|>",
        "<|message|>",
        "<|start|>",
        "<|end|>",
        "analysis",
        "final",
        "assistant",
        "commentary to=f",
        "<|",
        "|>",
        "<|chan",
    ];
    for seed in 0..4000 {
        let mut random = Rng::new(seed);
        let text: String = (0..random.below(14)).map(|_| *random.pick(&words).unwrap()).collect();
        let format = if random.below(2) == 0 { ReasoningFormat::think() } else { ReasoningFormat::Harmony };
        let open = random.below(3) == 0 && format != ReasoningFormat::Harmony;
        let mut cuts: Vec<usize> =
            text.char_indices().map(|(at, _)| at).filter(|_| random.below(3) == 0).collect();
        cuts.push(text.len());
        let mut from = 0;
        let pieces: Vec<&str> =
            cuts.into_iter().map(|at| &text[std::mem::replace(&mut from, at)..at]).collect();
        assert_eq!(
            split(&format, open, &pieces),
            judge(&format, open, &text),
            "seed {seed}: {text:?} as {pieces:?}, {open}"
        );
    }
}

#[test]
fn markers_that_are_tokens_are_not_looked_for_in_text() {
    let mut splitter = ReasoningSplitter::new(Some(ReasoningFormat::Harmony), false).with_marked_markers();
    let mut whole = SplitText::default();
    let mut add = |part: SplitText| {
        whole.reasoning.push_str(&part.reasoning);
        whole.answer.push_str(&part.answer);
    };
    add(splitter.push("<|start|>hello<|channel|>analysis<|message|>"));
    add(splitter.push_marker("<|channel|>"));
    add(splitter.push("analysis"));
    add(splitter.push_marker("<|message|>"));
    add(splitter.push("hm <|end|> hm"));
    add(splitter.push_marker("<|end|>"));
    add(splitter.push_marker("<|start|>"));
    add(splitter.push("unfinished"));
    add(splitter.finish());
    assert_eq!(whole.reasoning, "hm <|end|> hm");
    assert_eq!(whole.answer, "<|start|>hello<|channel|>analysis<|message|>unfinished");
    let mut splitter = ReasoningSplitter::new(Some(ReasoningFormat::think()), false).with_marked_markers();
    assert_eq!(splitter.push("<think>no").answer, "<think>no");
    let mut splitter = ReasoningSplitter::new(Some(ReasoningFormat::think()), false).with_marked_markers();
    assert_eq!(splitter.push_marker("<think>"), SplitText::default());
    assert_eq!(splitter.push("a </think> b").reasoning, "a </think> b");
    assert_eq!(splitter.push_marker("</think>"), SplitText::default());
    assert_eq!(splitter.push("yes").answer, "yes");
}

#[test]
fn published_formats_are_recognised() {
    let think = ReasoningFormat::think();
    let case = |format: &ReasoningFormat, open: bool, text: &str| {
        let SplitText { reasoning, answer } = split(format, open, &[text]);
        (reasoning, answer)
    };
    let both = |reasoning: &str, answer: &str| (reasoning.to_owned(), answer.to_owned());
    assert_eq!(case(&think, false, "<think>\nhm\n</think>\n\nYes. </think>"), both("hm", "Yes. </think>"));
    assert_eq!(case(&think, true, "hm\n\nso\n</think>\n\nYes."), both("hm\n\nso", "Yes."));
    assert_eq!(case(&think, false, " Yes <think>no</think>"), both("", " Yes <think>no</think>"));
    assert_eq!(case(&think, false, "<think>never ends </thin"), both("never ends </thin", ""));
    assert_eq!(case(&think, false, "<thin"), both("", "<thin"));
    let harmony = ReasoningFormat::Harmony;
    let text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.";
    assert_eq!(case(&harmony, false, text), both("Hm.", "Yes."));
    assert_eq!(case(&harmony, false, "plain"), both("", "plain"));
    let tool = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}";
    assert_eq!(case(&harmony, false, tool), both("Hm.", "{}"));
}

#[test]
fn templates_say_which_format_they_use() {
    let format = |source: &str| ChatTemplate::new(source, "", "").unwrap().reasoning().cloned();
    assert_eq!(format("{{ messages[0].content }}"), None);
    assert_eq!(format("{{ content.split('</think>')[-1] }}"), Some(ReasoningFormat::think()));
    assert_eq!(format("<|start|>assistant<|channel|>final<|message|>"), Some(ReasoningFormat::Harmony));
    let think = ReasoningFormat::think();
    assert!(think.is_open("<|im_start|>assistant\n<think>\n") && !think.is_open("<think>\n\n</think>\n\n"));
    let off = |source: &str| ChatTemplate::new(source, "", "").unwrap().without_reasoning();
    assert_eq!(
        off("{% if enable_thinking is defined and enable_thinking is false %}</think>{% endif %}")["enable_thinking"],
        false
    );
    assert_eq!(off("<|channel|><|message|>{{ reasoning_effort }}")["reasoning_effort"], "low");
    assert_eq!(
        off("{% if not thinking is defined %}{% set thinking = false %}{% endif %}</think>")["thinking"],
        false
    );
    assert!(off("{% set enable_thinking = true %}{{ enable_thinking }}</think>").is_empty());
}
