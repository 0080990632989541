//! The texts of `quadriga embed`: arguments, an option, a file, stdin.

use super::EmbedArgs;
use crate::answer::read_text;
use crate::failure::{Failure, Outcome};
use crate::{piped_input, ranks};

/// Stands for the lines of stdin among the arguments.
const STDIN: &str = "-";

/// All texts, in order: those of `-p` or `-f`, or the arguments with the lines of stdin, which come last unless an argument
/// says where.
pub(super) fn gather(arguments: &EmbedArgs, words: &[String]) -> Outcome<Vec<String>> {
    let option = match (&arguments.prompt, &arguments.file) {
        (Some(prompt), _) => Some(("-p", arguments.model.llama.unescaped(prompt).into_owned())),
        (None, Some(path)) => Some(("-f", read_text(path)?)),
        (None, None) => None,
    };
    let texts = match option {
        Some((option, _)) if !words.is_empty() => {
            return Err(Failure::Usage(format!("texts as arguments and with {option}; use one of them")));
        }
        Some((_, text)) => lines(&text),
        None => {
            let is_wanted =
                !ranks::may_never_end_input() || words.is_empty() || words.iter().any(|word| word == STDIN);
            let piped = if is_wanted { piped_input::read(!arguments.model.quiet)? } else { None };
            if piped.is_none() && words.iter().any(|word| word == STDIN) {
                return Err(Failure::Usage(
                    "- stands for lines of stdin, but nothing is piped into the command".to_owned(),
                ));
            }
            with_piped(words, &lines(&piped.unwrap_or_default()))
        }
    };
    if texts.is_empty() {
        return Err(Failure::Usage("there is no text: give TEXT, or lines on stdin".to_owned()));
    }
    Ok(texts)
}

fn with_piped(words: &[String], piped: &[String]) -> Vec<String> {
    match words.iter().position(|word| word == STDIN) {
        None => [words, piped].concat(),
        Some(at) => {
            let (before, after) = words.split_at(at);
            [before, piped, after.get(1..).unwrap_or_default()].concat()
        }
    }
}

fn lines(text: &str) -> Vec<String> {
    text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn piped_lines_are_where_a_dash_is_or_last() {
        let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let piped = owned(&["x", "y"]);
        assert_eq!(with_piped(&owned(&["a", "b"]), &piped), owned(&["a", "b", "x", "y"]));
        assert_eq!(with_piped(&owned(&["a", "-", "b"]), &piped), owned(&["a", "x", "y", "b"]));
        assert_eq!(with_piped(&[], &piped), piped);
    }
}
