//! The command line before it is parsed: options of one dash and several letters, and other spellings.
//!
//! The argument parser would read `-ngl` as `-n gl`. Such options are replaced by their long forms; unknown ones are an
//! error that names them. Options and commands that are not supported, but known, are an error that says what there is
//! instead.

use std::ffi::OsString;
use std::iter::Peekable;

use clap::Command;

use crate::failure::{Failure, Outcome};
use crate::foreign_options::{
    COMMANDS, IGNORED, LISTS, OPTIONAL_VALUES, OptionalValue, SPELLINGS, TRANSLATIONS, UNSUPPORTED,
    UNSUPPORTED_OF_VLLM,
};
use crate::similar::nearest;

/// Options whose value is any text, even one that looks like an option.
const TEXT_OPTIONS: &[&str] =
    &["-p", "--prompt", "-sys", "--system", "--system-prompt", "--stop", "-r", "--reverse-prompt", "--query"];

/// So many commands are named in an error at most.
const MAX_NAMED: usize = 4;

/// The command line with single-dash options replaced by their long forms, which the parser knows.
pub(crate) fn normalize(
    arguments: impl Iterator<Item = OsString>,
    parser: &Command,
) -> Outcome<Vec<OsString>> {
    let mut normalized: Vec<OsString> = Vec::new();
    let mut subcommand = None;
    let mut notes: Vec<String> = Vec::new();
    let mut arguments = arguments.peekable();
    normalized.extend(arguments.next());
    while let Some(argument) = arguments.next() {
        let Some(text) = argument.to_str() else {
            normalized.push(argument);
            continue;
        };
        if text == "--" {
            normalized.push(argument);
            normalized.extend(arguments);
            break;
        }
        if subcommand.is_none() {
            subcommand = parser.find_subcommand(text);
            if let Some((command, instead)) =
                COMMANDS.iter().find(|(command, _)| subcommand.is_none() && *command == text)
            {
                return Err(Failure::Usage(format!("there is no command {command}: {instead}")));
            }
        }
        let (name, value) = text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
        let translates = |option: &str| TRANSLATIONS.iter().any(|(other, ..)| *other == option);
        for (program, options) in [("llama.cpp", UNSUPPORTED), ("vLLM", UNSUPPORTED_OF_VLLM)] {
            let unsupported = options.iter().find(|(option, _)| *option == name && !translates(option));
            if let Some((option, instead)) = unsupported.filter(|_| !has_option(subcommand, name)) {
                return Err(Failure::Usage(format!("{program}'s {option} is not supported: {instead}")));
            }
        }
        let ignored = IGNORED.iter().find(|option| option.name == name);
        if let Some(option) = ignored.filter(|_| subcommand.is_some() && !has_option(subcommand, name)) {
            if option.has_value && value.is_none() {
                arguments.next();
            }
            notes.push(format!("quadriga: {name} has no effect: {}", option.reason));
            continue;
        }
        let long = SPELLINGS.iter().find(|(short, _)| *short == name).map_or(name, |(_, long)| *long);
        let mut value = value.map(OsString::from);
        let mut long = long;
        if let Some((_, list)) = LISTS.iter().find(|(option, _)| *option == long)
            && subcommand.is_some_and(|command| command.get_name() == "bench")
            && let Some(values) = value.as_ref().or(arguments.peek()).and_then(|value| value.to_str())
            && values.contains(',')
        {
            long = list;
        }
        if let Some(option) = OPTIONAL_VALUES.iter().find(|option| option.name == long && value.is_none()) {
            value = Some(optional_value(name, option, &mut arguments)?);
        }
        if TRANSLATIONS.iter().any(|(option, ..)| *option == long) && !has_option(subcommand, long) {
            let value = value.or_else(|| arguments.next()).unwrap_or_default();
            normalized.extend(translated(long, &value.to_string_lossy())?.map(OsString::from));
            continue;
        }
        if let Some(subcommand) = subcommand {
            match long == name {
                true => check_letters(name, subcommand)?,
                false => check_spelling(name, long, subcommand, parser)?,
            }
        }
        let has_value = value.is_some();
        let mut argument = OsString::from(long);
        if let Some(value) = value {
            argument.push("=");
            argument.push(value);
        }
        normalized.push(argument);
        if !has_value && TEXT_OPTIONS.contains(&name) {
            normalized.extend(arguments.next());
        }
    }
    let is_quiet = |argument: &OsString| argument == "-q" || argument == "--quiet";
    if !normalized.iter().any(is_quiet) {
        notes.into_iter().for_each(|note| note!("{note}"));
    }
    Ok(normalized)
}

/// Whether a command has a long option itself, by this name or as an alias.
fn has_option(command: Option<&Command>, long: &str) -> bool {
    let mut options = command.into_iter().flat_map(Command::get_arguments);
    let Some(name) = long.strip_prefix("--") else { return false };
    options.any(|option| {
        let aliases = option.get_all_aliases().unwrap_or_default();
        option.get_long() == Some(name) || aliases.contains(&name)
    })
}

/// The value behind an option that may have none.
fn optional_value(
    name: &str,
    option: &OptionalValue,
    arguments: &mut Peekable<impl Iterator<Item = OsString>>,
) -> Outcome<OsString> {
    let value = arguments.next_if(|next| option.values.iter().any(|value| next == value));
    if let (None, Some(next)) = (&value, arguments.peek().and_then(|next| next.to_str()))
        && option.strict
        && !next.starts_with('-')
    {
        return Err(Failure::Usage(format!(
            "{name} {next:?}: must be on, off or auto; a prompt behind it is given with -p"
        )));
    }
    Ok(value.unwrap_or_else(|| option.missing.into()))
}

/// The option that stands for another one with this value, if any is needed.
fn translated(name: &str, value: &str) -> Outcome<Option<&'static str>> {
    let own = TRANSLATIONS.iter().filter(|(option, ..)| *option == name);
    match own.clone().find(|(_, known, _)| *known == value) {
        Some((.., translation)) => Ok(*translation),
        None => {
            let known: Vec<&str> = own.map(|(_, known, _)| *known).collect();
            let instead = UNSUPPORTED.iter().find(|(option, _)| *option == name);
            let instead = instead.map_or_else(String::new, |(_, instead)| format!("; {instead}"));
            Err(Failure::Usage(format!("{name} {value:?}: must be {}{instead}", known.join(" or "))))
        }
    }
}

/// An error if an argument stands for an option that the command does not have: it is named as it was given.
fn check_spelling(name: &str, long: &str, command: &Command, parser: &Command) -> Outcome {
    let option = long.split_once('=').map_or(long, |(option, _)| option);
    if has_option(Some(command), option) {
        return Ok(());
    }
    let others = parser.get_subcommands().filter(|other| has_option(Some(other), option));
    let others: Vec<&str> = others.map(Command::get_name).collect();
    let advice = match others.as_slice() {
        [] => String::new(),
        [one] => format!("; {one} has it, as {option}"),
        [..] if others.len() <= MAX_NAMED => format!("; {} have it, as {option}", others.join(", ")),
        _ => format!("; other commands have it, as {option}"),
    };
    let command = command.get_name();
    Err(Failure::Usage(format!("{command} has no option {name}{advice} (see `quadriga {command} --help`)")))
}

/// An error if an argument is a single dash and several letters that are not all flags of the command.
fn check_letters(name: &str, command: &Command) -> Outcome {
    let letters = match name.strip_prefix('-') {
        Some(letters) if letters.len() > 1 && letters.chars().all(|c| c.is_ascii_lowercase() || c == '-') => {
            letters
        }
        _ => return Ok(()),
    };
    if letters.starts_with('-') {
        return Ok(());
    }
    let find = |letter: char| command.get_arguments().find(|option| option.get_short() == Some(letter));
    let is_flag = |letter| letter == 'h' || find(letter).is_some_and(|o| !o.get_action().takes_values());
    if letters.chars().all(is_flag) {
        return Ok(());
    }
    let longs = command.get_arguments().filter_map(|option| option.get_long());
    let longs: Vec<String> = longs.map(|long| format!("--{long}")).collect();
    let names = longs.iter().map(String::as_str).chain(SPELLINGS.iter().map(|(short, _)| *short));
    let first = letters.chars().next().unwrap_or_default();
    let advice = match nearest(names, name).as_slice() {
        [] if find(first).is_some() => {
            let value = letters.get(1..).unwrap_or_default();
            format!("; a value is separated from its option: -{first} {value}")
        }
        [] => String::new(),
        near => format!("; similar: {}", near.join(", ")),
    };
    let command = command.get_name();
    Err(Failure::Usage(format!("unknown option {name}{advice} (see `quadriga {command} --help`)")))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn line(text: &str) -> Result<String, String> {
        let arguments = text.split(' ').map(OsString::from);
        match normalize(arguments, &crate::Arguments::command()) {
            Ok(words) => Ok(words.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")),
            Err(Failure::Usage(text)) => Err(text),
            Err(other) => panic!("{other:?}"),
        }
    }

    #[test]
    fn single_dash_options_become_long_ones() {
        for (from, to) in [
            ("q run -ngl 3 -ctk=f16 -sys x hi", "q run --gpu-layers 3 --cache-type-k=f16 --system x hi"),
            (
                "q run -ot exps=CPU -cmoe -ncmoe 3 -ot=a=b hi",
                "q run --override-tensor exps=CPU --cpu-moe --n-cpu-moe 3 --override-tensor=a=b hi",
            ),
            ("q run hi -fa", "q run hi --flash-attn=auto"),
            ("q run -fa -p hi", "q run --flash-attn=auto -p hi"),
            ("q run -fa on hi", "q run --flash-attn=on hi"),
            ("q run -fa -n 3", "q run --flash-attn=auto -n 3"),
            ("q run --flash-attn off hi", "q run --flash-attn=off hi"),
            ("q run -p -ngl -n5 -qh -c 9", "q run -p -ngl -n5 -qh -c 9"),
            ("q run -- -ngl", "q run -- -ngl"),
            ("q run --color on hi", "q run --color=on hi"),
            ("q run --color hi", "q run --color=on hi"),
            ("q run --color=auto hi", "q run --color=auto hi"),
            ("q run --think false hi", "q run --reasoning=off hi"),
            ("q run --think hi", "q run --reasoning=show hi"),
            ("q run --hidethinking hi", "q run --reasoning=hide hi"),
            ("q run --reasoning-budget=-1 hi", "q run --reasoning-budget=-1 hi"),
            ("q run --no-conversation -sysf f hi", "q run --raw --system-file f hi"),
            ("q run serve", "q run serve"),
            ("q bench -t 1,2 -ngl=0,5", "q bench --threads-list 1,2 --gpu-layers-list=0,5"),
            ("q bench -t 1 -ngl 5", "q bench -t 1 --gpu-layers 5"),
            ("q run -t 1,2", "q run -t 1,2"),
            ("q -ngl", "q --gpu-layers"),
            (
                "q run -ub 64 -tb=3 -cnv -r --keep -dev none",
                "q run --ubatch-size 64 --threads-batch=3 --conversation -r --keep --device none",
            ),
        ] {
            assert_eq!(line(from).as_deref(), Ok(to));
        }
    }

    #[test]
    fn unknown_single_dash_options_are_named_with_the_nearest_known_one() {
        for (from, parts) in [
            ("q run -nlg 3", &["-nlg", "-ngl"][..]),
            ("q run -ctx 3", &["-ctx", "-ctk"]),
            ("q run -phello", &["-phello", "-p hello"]),
            ("q bench -jfoo", &["-jfoo", "bench --help"]),
            ("q run -fa maybe", &["-fa \"maybe\"", "on, off or auto", "-p"]),
            ("q run --flash-attn hi", &["--flash-attn \"hi\"", "on, off or auto"]),
            ("q chat --mirostat=2", &["--mirostat", "not supported", "--top-p"]),
            ("q run --samplers top_k", &["--samplers", "not supported"]),
            ("q chat --keep 4", &["--keep", "not supported", "-c N"]),
            ("q run --mmproj x.gguf hi", &["--mmproj", "vision"]),
            ("q --list-devices", &["--list-devices", "quadriga devices"]),
            ("q run -nkvo hi", &["-nkvo", "-ngl"]),
            ("q ps", &["no command ps", "loads its own"]),
        ] {
            let error = line(from).unwrap_err();
            assert!(parts.iter().all(|part| error.contains(part)), "{from}: {error}");
        }
    }
}
