//! The command line before it is parsed: llama.cpp's options of one dash and several letters.
//!
//! The argument parser would read `-ngl` as `-n gl`. Such options are replaced by their long forms; unknown ones are an
//! error that names them.

use std::ffi::OsString;

use clap::Command;

use crate::failure::{Failure, Outcome};
use crate::similar::nearest;

/// Options with a single dash, as in llama.cpp, and their long forms.
const SINGLE_DASH: &[(&str, &str)] = &[
    ("-ngl", "--gpu-layers"),
    ("-ctk", "--cache-type-k"),
    ("-ctv", "--cache-type-v"),
    ("-sys", "--system"),
    ("-st", "--single-turn"),
    ("-fa", FLASH_ATTENTION),
    ("-hf", "--hf-repo"),
    ("-hfr", "--hf-repo"),
    ("-dev", "--device"),
    ("-cnv", "--conversation"),
    ("-no-cnv", "--raw"),
    ("-ot", "--override-tensor"),
    ("-cmoe", "--cpu-moe"),
    ("-ncmoe", "--n-cpu-moe"),
    ("-ub", "--ubatch-size"),
    ("-tb", "--threads-batch"),
];

/// Options of llama.cpp that would change the answer and are not supported, each with what there is instead.
const UNSUPPORTED: &[(&str, &str)] = &[
    ("--grammar", "sampling hooks of the library can constrain answers"),
    ("--grammar-file", "sampling hooks of the library can constrain answers"),
    ("--json-schema", "sampling hooks of the library can constrain answers"),
    ("--mirostat", "--top-p, --min-p and --typical limit the choice of tokens"),
    ("--mirostat-lr", "--top-p, --min-p and --typical limit the choice of tokens"),
    ("--mirostat-ent", "--top-p, --min-p and --typical limit the choice of tokens"),
    ("--samplers", "the order of samplers is fixed; each has an option that turns it off"),
    ("--sampler-seq", "the order of samplers is fixed; each has an option that turns it off"),
    ("--keep", "chat drops the oldest turns and keeps the system prompt; -c N gives a larger context"),
];

/// Its value is optional, so that it must be joined to the name before the prompt could be taken for it.
const FLASH_ATTENTION: &str = "--flash-attn";
const FLASH_ATTENTION_VALUES: &[&str] = &["on", "off", "auto", "1", "0", "-1", "true", "false"];

/// Options whose value is any text, even one that looks like an option.
const TEXT_OPTIONS: &[&str] =
    &["-p", "--prompt", "-sys", "--system", "--system-prompt", "--stop", "-r", "--reverse-prompt"];

/// The command line with single-dash options replaced by their long forms, which the parser knows.
pub(crate) fn normalize(
    arguments: impl Iterator<Item = OsString>,
    parser: &Command,
) -> Outcome<Vec<OsString>> {
    let mut normalized: Vec<OsString> = Vec::new();
    let mut subcommand = None;
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
        }
        let (name, value) = text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
        if let Some((option, instead)) = UNSUPPORTED.iter().find(|(option, _)| *option == name) {
            return Err(Failure::Usage(format!("llama.cpp's {option} is not supported: {instead}")));
        }
        let known = SINGLE_DASH.iter().find(|(short, _)| *short == name).map(|(_, long)| *long);
        let long = known.or((name == FLASH_ATTENTION).then_some(FLASH_ATTENTION));
        match (long, value) {
            (Some(FLASH_ATTENTION), None) => {
                let is_value = |next: &OsString| FLASH_ATTENTION_VALUES.iter().any(|value| next == value);
                let value = arguments.next_if(is_value);
                if let (None, Some(next)) = (&value, arguments.peek().and_then(|next| next.to_str()))
                    && !next.starts_with('-')
                {
                    return Err(Failure::Usage(format!(
                        "{name} {next:?}: must be on, off or auto; a prompt behind it is given with -p"
                    )));
                }
                let mut joined = OsString::from(FLASH_ATTENTION);
                joined.push("=");
                joined.push(value.unwrap_or_else(|| "auto".into()));
                normalized.push(joined);
            }
            (Some(long), None) => normalized.push(long.into()),
            (Some(long), Some(value)) => normalized.push(format!("{long}={value}").into()),
            (None, _) => {
                if let Some(subcommand) = subcommand {
                    check_letters(name, subcommand)?;
                }
                normalized.push(argument.clone());
            }
        }
        if value.is_none() && TEXT_OPTIONS.contains(&name) {
            normalized.extend(arguments.next());
        }
    }
    Ok(normalized)
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
    let names = longs.iter().map(String::as_str).chain(SINGLE_DASH.iter().map(|(short, _)| *short));
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
            ("q run --grammar x", &["--grammar", "not supported", "hooks"]),
            ("q chat --mirostat=2", &["--mirostat", "not supported", "--top-p"]),
            ("q run --samplers top_k", &["--samplers", "not supported"]),
            ("q chat --keep 4", &["--keep", "not supported", "-c N"]),
        ] {
            let error = line(from).unwrap_err();
            assert!(parts.iter().all(|part| error.contains(part)), "{from}: {error}");
        }
    }
}
