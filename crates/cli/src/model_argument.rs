//! A model file as the first argument of a command whose other arguments are texts.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use quadriga_models::hub::RepositoryName;

use crate::failure::{Failure, Outcome};
use crate::fetch::is_default;
use crate::model_options::ModelOptions;

/// The first bytes of a GGUF file.
const MAGIC: [u8; 4] = *b"GGUF";

/// Names that models of Ollama and others begin with.
const FAMILIES: &[&str] = &[
    "codellama",
    "command-r",
    "deepseek",
    "gemma",
    "glm",
    "gpt-oss",
    "granite",
    "llama",
    "ministral",
    "mistral",
    "mixtral",
    "olmo",
    "phi",
    "qwen",
    "qwq",
    "smollm",
    "tinyllama",
];

/// The model's options and the texts. Without `-m`, a first text that is a GGUF file, or looks like the path of one, is the
/// model, and so is a repository of the hub whose name ends in -GGUF.
///
/// # Errors
/// If the first text looks like the name of a model that is not a file: it would become part of a prompt to the default
/// model. If it is a model, and `-m` or `-hf` names another.
pub(crate) fn split<'t>(
    options: &ModelOptions,
    texts: &'t [String],
) -> Outcome<(ModelOptions, &'t [String])> {
    match texts.split_first() {
        Some((first, rest)) if !options.has_file() => {
            let is_named = !rest.is_empty() && is_default(Path::new(first));
            if is_named || is_model_file(first) {
                return Ok((options.with_file(Some(Path::new(first))), rest));
            }
            if is_gguf_repository(first) && !Path::new(first).exists() {
                return Ok((options.with_repository(first), rest));
            }
            match mistaken(first, rest) {
                Some(problem) => Err(Failure::Usage(format!(
                    "{first} {problem}; a model is named by its .gguf file or by -hf ORG/REPO, a text that begins so is given with -p"
                ))),
                None => Ok((options.clone(), texts)),
            }
        }
        Some((first, _)) if has_magic(Path::new(first)) => Err(Failure::Usage(format!(
            "{first} is a model, and so is that of {}; name one of them (a text that begins so is given with -p)",
            options.model_option()
        ))),
        _ => Ok((options.clone(), texts)),
    }
}

/// Whether a text is a GGUF file, by its first bytes or its name.
fn is_model_file(text: &str) -> bool {
    let path = Path::new(text);
    let named = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    named || has_magic(path)
}

fn has_magic(path: &Path) -> bool {
    // Opening a pipe would wait for its writer.
    if !path.is_file() {
        return false;
    }
    let mut start = [0; MAGIC.len()];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut start));
    read.is_ok() && start == MAGIC
}

/// Why a first text, which other texts may follow, is probably meant as a model.
fn mistaken(text: &str, others: &[String]) -> Option<&'static str> {
    if text.contains(char::is_whitespace) {
        return None;
    }
    if !others.is_empty() && Path::new(text).is_file() {
        return Some("is not a GGUF file");
    }
    // Several words of a prompt are written without quotes, or all of them are in quotes.
    let quoted = others.iter().any(|other| other.contains(char::is_whitespace));
    (looks_like_model(text) || (quoted && is_repository(text)))
        .then_some("is neither a GGUF file nor a text, it seems")
}

/// Whether a word is spelled as a repository of the hub: `ORG/REPO`, `ORG/REPO:QUANT`.
fn is_repository(word: &str) -> bool {
    word.parse::<RepositoryName>().is_ok()
}

/// Whether it is one of GGUF files by its name.
fn is_gguf_repository(word: &str) -> bool {
    let name = word.parse::<RepositoryName>();
    name.is_ok_and(|name| name.name().to_ascii_lowercase().ends_with("-gguf"))
}

/// Whether a word is spelled as models are: `llama3.2`, `gemma3:4b`, `owner/name-7B`, `./models/x`.
fn looks_like_model(word: &str) -> bool {
    let is_name = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_alphanumeric())
            && part.ends_with(|c: char| c.is_ascii_alphanumeric())
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
    };
    let has_digit = word.contains(|c: char| c.is_ascii_digit());
    let is_path = ["./", "../", "~/"].iter().any(|start| word.starts_with(start))
        || (word.starts_with('/') && word.matches('/').count() > 1);
    // A repository, or a name with a tag.
    let is_pair = |separator| {
        word.split_once(separator).is_some_and(|(owner, name)| is_name(owner) && is_name(name)) && has_digit
    };
    let family = FAMILIES.iter().find_map(|family| word.strip_prefix(family));
    let is_family =
        family.is_some_and(|rest| is_name(word) && !rest.starts_with(|c: char| c.is_ascii_alphabetic()));
    let is_tagged = is_pair(':') && word.starts_with(|c: char| c.is_ascii_lowercase());
    is_path || is_tagged || is_pair('/') || is_family
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_models_are_told_from_words() {
        for model in [
            "llama3.2",
            "gemma3:4b",
            "qwen3",
            "mistral",
            "gpt-oss:20b",
            "phi",
            "Qwen/Qwen3-8B-GGUF",
            "./models/x",
            "/models/x/y",
            "~/x",
            "deepseek-r1",
        ] {
            assert!(looks_like_model(model), "{model}");
        }
        for word in [
            "Explain",
            "Write",
            "Hi!",
            "philosophy",
            "llamas",
            "Llama",
            "/no_think",
            "and/or",
            "TCP/IP",
            "10:30",
            "2+2",
            "std::vector",
            "Python3",
            "x",
            "",
            "GPT-4",
            "C++20",
            "e.g.",
            "phi's",
        ] {
            assert!(!looks_like_model(word), "{word}");
        }
        for (words, is_model) in [
            (&["org/name", "What is gravity?"][..], true),
            (&["and/or"], false),
            (&["and/or", "hi"], false),
            (&["TCP/IP", "explained", "briefly"], false),
        ] {
            let rest: Vec<String> = words[1..].iter().map(|word| (*word).to_owned()).collect();
            assert_eq!(mistaken(words[0], &rest).is_some(), is_model, "{words:?}");
        }
        assert!(is_gguf_repository("org/tiny-GGUF:Q4_0") && !is_gguf_repository("and/or"));
    }
}
