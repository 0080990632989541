//! llama-server's environment variables as defaults of the options of `serve`: containers are configured by them.
//!
//! `LLAMA_ARG_CTX_SIZE` stands for `--ctx-size`, and so on; some have names of their own. What the command line says counts.

use std::ffi::OsString;
use std::sync::OnceLock;

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};

use crate::command_line::normalize;
use crate::failure::{Failure, Outcome};
use crate::foreign_options::{IGNORED, SPELLINGS, TRANSLATIONS, UNSUPPORTED};
use crate::notes;

/// What the names of variables begin with.
const PREFIX: &str = "LLAMA_ARG_";

/// The variable of keys, which has a name of its own.
const API_KEY: &str = "LLAMA_API_KEY";

/// Variables that are not named like their options.
const NAMES: &[(&str, &str)] = &[
    ("N_PARALLEL", "parallel"),
    ("BATCH", "batch-size"),
    ("UBATCH", "ubatch-size"),
    ("ENDPOINT_METRICS", "metrics"),
    ("ENDPOINT_SLOTS", "slots"),
    ("NO_ENDPOINT_SLOTS", "no-slots"),
    ("ENDPOINT_PROPS", "props"),
    ("STATIC_PATH", "path"),
    ("THINK", "reasoning-format"),
    ("THINK_BUDGET", "reasoning-budget"),
    ("HFD_REPO", "hf-repo-draft"),
    ("LOG_VERBOSITY", "verbosity"),
];

/// Options that name the model: if the command line has one of them, variables name no other.
const MODEL: [&str; 3] = ["file", "model", "hf_repo"];

/// What is wrong with variables, until the log can be written to.
static WARNINGS: OnceLock<Vec<String>> = OnceLock::new();

/// Warns of variables that mean nothing here.
pub(crate) fn warn() {
    WARNINGS.get().into_iter().flatten().for_each(|warning| notes::warning(warning));
}

/// The command line with the options that variables stand for in front of its own, if there are any; `matches` are those of the
/// command line alone.
pub(crate) fn extended(
    line: &[OsString],
    parser: &Command,
    matches: &ArgMatches,
) -> Outcome<Option<ExtendedLine>> {
    let Some((command @ "serve", matches)) = matches.subcommand() else { return Ok(None) };
    let Some(place) = line.iter().position(|word| word == command) else { return Ok(None) };
    let Some(serve) = parser.find_subcommand(command) else { return Ok(None) };
    let mut found =
        Variables { serve, matches, options: Vec::new(), names: Vec::new(), warnings: Vec::new() };
    let mut variables: Vec<(OsString, OsString)> = std::env::vars_os().collect();
    variables.sort();
    for (name, value) in variables {
        let Some(name) = name.to_str().filter(|name| *name == API_KEY || name.starts_with(PREFIX)) else {
            continue;
        };
        found.add(name, value)?;
    }
    let Variables { options, names, warnings, .. } = found;
    // There is one command line in a process.
    let _ = WARNINGS.set(warnings);
    if options.is_empty() {
        return Ok(None);
    }
    let (before, own) = line.split_at(place + 1);
    let own = own.to_vec();
    let names = names.join(", ");
    let named = |failure| match failure {
        Failure::Usage(reason) => Failure::Usage(format!("with {names}: {reason}")),
        other => other,
    };
    let options = normalize(before.iter().cloned().chain(options), parser).map_err(named)?;
    Ok(Some(ExtendedLine { words: options.into_iter().chain(own).collect(), variables: names }))
}

/// A command line with options of variables.
pub(crate) struct ExtendedLine {
    pub(crate) words: Vec<OsString>,
    /// The names of the variables.
    variables: String,
}

impl ExtendedLine {
    /// Why it cannot be parsed although the command line can.
    pub(crate) fn failure(&self, error: &clap::Error) -> Failure {
        let text = error.to_string();
        let first = text.lines().next().unwrap_or_default();
        let reason = first.strip_prefix("error: ").unwrap_or(first);
        Failure::Usage(format!("with {}: {reason}", self.variables))
    }
}

struct Variables<'a> {
    serve: &'a Command,
    matches: &'a ArgMatches,
    options: Vec<OsString>,
    names: Vec<String>,
    warnings: Vec<String>,
}

impl<'a> Variables<'a> {
    fn add(&mut self, variable: &str, value: OsString) -> Outcome {
        let Ok(value) = value.into_string() else {
            return Err(Failure::Usage(format!("{variable} is not UTF-8")));
        };
        if value.is_empty() {
            if variable == API_KEY {
                self.warnings.push(format!("{API_KEY} is empty and asks for no key"));
            }
            return Ok(());
        }
        let long = long_of(variable);
        let negated = match long.strip_prefix("no-") {
            Some(positive) => positive.to_owned(),
            None => format!("no-{long}"),
        };
        let dashed = format!("--{long}");
        match (self.find(&long), self.find(&negated)) {
            (Some(option), _) if option.get_action().takes_values() => {
                if !self.is_given(option) {
                    self.push(variable, format!("{dashed}={value}"));
                }
            }
            _ if TRANSLATIONS.iter().any(|(option, ..)| *option == dashed) => {
                self.push(variable, format!("{dashed}={value}"));
            }
            (None, None) => {
                let unsupported = UNSUPPORTED.iter().find(|(option, _)| *option == dashed);
                let ignored = IGNORED.iter().find(|option| option.name == dashed);
                let reason = unsupported.map(|(_, reason)| *reason).or(ignored.map(|option| option.reason));
                self.warnings.push(match reason {
                    Some(reason) => format!("{variable} has no effect: {reason}"),
                    None => format!("{variable} has no effect: `quadriga serve` has no option --{long}"),
                });
            }
            (option, negated) => {
                let Some(is_on) = truth(&value) else {
                    return Err(Failure::Usage(format!("{variable} is {value:?}; it must be 1 or 0")));
                };
                let given = option.into_iter().chain(negated).any(|option| self.is_given(option));
                let wanted = if is_on { option } else { negated };
                if let Some(name) = wanted.and_then(Arg::get_long).filter(|_| !given) {
                    self.push(variable, format!("--{name}"));
                }
            }
        }
        Ok(())
    }

    fn push(&mut self, variable: &str, option: String) {
        self.options.push(option.into());
        self.names.push(variable.to_owned());
    }

    /// The option of this name, or with this other name.
    fn find(&self, long: &str) -> Option<&'a Arg> {
        self.serve.get_arguments().find(|option| {
            let others = option.get_all_aliases().unwrap_or_default();
            option.get_long() == Some(long) || others.contains(&long)
        })
    }

    /// Whether the command line says what an option does.
    fn is_given(&self, option: &Arg) -> bool {
        let is_on_line = |id: &str| self.matches.value_source(id) == Some(ValueSource::CommandLine);
        let id = option.get_id().as_str();
        is_on_line(id) || MODEL.contains(&id) && MODEL.iter().any(|id| is_on_line(id))
    }
}

/// The long name of the option that a variable stands for.
fn long_of(variable: &str) -> String {
    let Some(name) = variable.strip_prefix(PREFIX) else { return "api-key".to_owned() };
    let renamed = NAMES.iter().find(|(other, _)| *other == name).map(|(_, long)| (*long).to_owned());
    let long = renamed.unwrap_or_else(|| name.to_lowercase().replace('_', "-"));
    let spelled = SPELLINGS.iter().find(|(other, _)| other.strip_prefix("--") == Some(long.as_str()));
    spelled.and_then(|(_, other)| other.strip_prefix("--")).map_or(long, str::to_owned)
}

/// A value that turns something on or off, as llama.cpp has them.
fn truth(value: &str) -> Option<bool> {
    match value {
        "1" | "on" | "true" | "enabled" => Some(true),
        "0" | "off" | "false" | "disabled" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_named_like_options() {
        for (variable, long) in [
            ("LLAMA_API_KEY", "api-key"),
            ("LLAMA_ARG_CTX_SIZE", "ctx-size"),
            ("LLAMA_ARG_N_GPU_LAYERS", "gpu-layers"),
            ("LLAMA_ARG_N_PARALLEL", "parallel"),
            ("LLAMA_ARG_NO_WEBUI", "no-webui"),
            ("LLAMA_ARG_MODEL_DRAFT", "draft"),
        ] {
            assert_eq!(long_of(variable), long);
        }
        let parser = crate::parser();
        let serve = parser.find_subcommand("serve").unwrap();
        for (name, long) in NAMES {
            let known = serve.get_arguments().any(|option| option.get_long() == Some(long));
            let translated = TRANSLATIONS.iter().any(|(option, ..)| option.strip_prefix("--") == Some(long));
            let refused = UNSUPPORTED.iter().any(|(option, _)| option.strip_prefix("--") == Some(long));
            assert!(known || translated || refused, "{name}: {long}");
        }
    }
}
