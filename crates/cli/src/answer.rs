//! Shared by `run` and `chat`: sampling options, and printing an answer while it is generated.

mod chat_template;
pub(crate) mod grammar;

use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};

use clap::{CommandFactory, FromArgMatches};
use quadriga_llm::sampling::SamplingOptions;
use quadriga_llm::{Answer, EngineOptions, Finish, GeneratorOptions, TokenCounts};
use quadriga_view::format::plural;

use self::grammar::GrammarOptions;
use crate::answer_printer::{AnswerPrinter, ReasoningOutput};
use crate::failure::{Failure, Outcome};
use crate::interrupt::CtrlC;
use crate::model_options::ModelOptions;
use crate::penalty_options::{PenaltyOptions, listed};
use crate::piped_input;
use crate::values::{self, JsonObject, Seed};

/// Options of text generation.
#[derive(Clone, clap::Args)]
pub(crate) struct AnswerOptions {
    /// Maximum number of tokens to generate, -1 for no limit
    #[arg(
        short = 'n',
        long = "predict",
        alias = "n-predict",
        value_name = "N",
        default_value_t = -1,
        allow_negative_numbers = true,
        value_parser = values::max_tokens,
        help_heading = PROMPT
    )]
    max_tokens: i64,
    /// Stop at this text; may be repeated
    #[arg(
        long,
        short_alias = 'r',
        alias = "reverse-prompt",
        value_name = "TEXT",
        allow_hyphen_values = true,
        value_parser = values::not_empty,
        help_heading = PROMPT
    )]
    stop: Vec<String>,
    /// Do not apply the model's chat template; implies --special
    #[arg(long, help_heading = PROMPT)]
    raw: bool,
    /// Parse control tokens in prompts, such as <|im_end|>, which are plain text otherwise
    #[arg(long, help_heading = PROMPT)]
    special: bool,
    /// System prompt, also -sys
    #[arg(
        long,
        alias = "system-prompt",
        value_name = "TEXT",
        allow_hyphen_values = true,
        help_heading = PROMPT
    )]
    system: Option<String>,
    /// File with the system prompt, also -sysf
    #[arg(long, value_name = "FILE", conflicts_with = "system", help_heading = PROMPT)]
    system_file: Option<PathBuf>,
    /// Keyword arguments of the chat template as a JSON object, such as {"enable_thinking": false}
    #[arg(
        long,
        value_name = "JSON",
        default_value = "{}",
        hide_default_value = true,
        value_parser = values::json_object,
        help_heading = PROMPT
    )]
    chat_template_kwargs: JsonObject,
    /// File with a chat template in place of the model's
    #[arg(long, value_name = "FILE", conflicts_with = "chat_template", help_heading = PROMPT)]
    chat_template_file: Option<PathBuf>,
    /// Chat template in place of the model's, in Jinja
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, hide = true)]
    chat_template: Option<String>,
    /// Reasoning of the model: show, hide (generated, not printed), off (not generated, if the template allows it), or
    /// auto: shown on a terminal, else on stderr
    #[arg(
        long,
        value_name = "MODE",
        value_enum,
        default_value_t,
        hide_possible_values = true,
        help_heading = PROMPT
    )]
    pub(crate) reasoning: ReasoningOutput,
    /// Most tokens of reasoning, which is ended then; 0 is --reasoning off, -1 no limit
    #[arg(
        long,
        value_name = "N",
        default_value_t = -1,
        allow_negative_numbers = true,
        value_parser = values::reasoning_budget,
        help_heading = PROMPT
    )]
    reasoning_budget: i64,
    /// End after one answer, also -st; run always does
    #[arg(long, help_heading = PROMPT)]
    pub(crate) single_turn: bool,
    /// Random seed, -1 for a random one [default: random]
    #[arg(
        short,
        long,
        value_name = "N",
        allow_negative_numbers = true,
        value_parser = values::seed,
        help_heading = SAMPLING
    )]
    seed: Option<Seed>,
    /// Sampling temperature, 0 for greedy decoding
    #[arg(
        long,
        alias = "temperature",
        value_name = "N",
        default_value_t = 0.8,
        allow_negative_numbers = true,
        value_parser = values::not_negative,
        help_heading = SAMPLING
    )]
    temp: f32,
    /// Keep the K most probable tokens, 0 or -1 for all
    #[arg(
        long,
        value_name = "K",
        default_value_t = 40,
        allow_negative_numbers = true,
        value_parser = values::top_k,
        help_heading = SAMPLING
    )]
    top_k: usize,
    /// Keep the most probable tokens up to a cumulative probability of P
    #[arg(
        long,
        value_name = "P",
        default_value_t = 0.95,
        allow_negative_numbers = true,
        value_parser = values::positive_probability,
        help_heading = SAMPLING
    )]
    top_p: f32,
    /// Drop tokens less probable than P times the most probable one
    #[arg(
        long,
        value_name = "P",
        default_value_t = 0.05,
        allow_negative_numbers = true,
        value_parser = values::probability,
        help_heading = SAMPLING
    )]
    min_p: f32,
    /// Penalty for repeating recent tokens, 1 for none
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1.0,
        allow_negative_numbers = true,
        value_parser = values::positive,
        help_heading = SAMPLING
    )]
    repeat_penalty: f32,
    #[command(flatten)]
    penalties: PenaltyOptions,
    #[command(flatten)]
    grammar: GrammarOptions,
}

/// The name of the flag that a chat can change.
pub(crate) const IGNORE_EOS: &str = "ignore-eos";

/// Options that a chat cannot change.
const FIXED: &[&str] = &[
    "raw",
    "special",
    "single-turn",
    "chat-template",
    "chat-template-file",
    "chat-template-kwargs",
    "system-file",
    "json-schema",
    "json-schema-file",
    "grammar",
    "grammar-file",
];

/// Headings of the help text.
const PROMPT: &str = "Generation options";
const SAMPLING: &str = "Sampling options";
const CONSTRAINTS: &str = "Constraints";

/// A command line of answer options alone, to change one of them.
#[derive(clap::Parser)]
#[command(no_binary_name = true, disable_help_flag = true)]
struct ChangedOptions {
    #[command(flatten)]
    answer: AnswerOptions,
}

impl AnswerOptions {
    /// These options with another value of one of them, named and written as on the command line.
    pub(crate) fn with(&self, name: &str, value: &str) -> Outcome<AnswerOptions> {
        match (name, value) {
            (IGNORE_EOS, "on" | "off") => {
                let mut changed = self.clone();
                changed.penalties.ignore_eos = value == "on";
                return Ok(changed);
            }
            (IGNORE_EOS, _) => {
                return Err(Failure::Usage(format!("--{IGNORE_EOS} is on or off, not {value:?}")));
            }
            ("logit-bias" | "l", "none") => {
                let mut changed = self.clone();
                changed.penalties.logit_bias.clear();
                return Ok(changed);
            }
            _ if FIXED.contains(&name) => {
                return Err(Failure::Usage(format!("{name} cannot be changed during a chat")));
            }
            _ => {}
        }
        let short = name.chars().count() == 1;
        let mut line = if short {
            vec![format!("-{name}"), value.to_owned()]
        } else {
            vec![format!("--{name}={value}")]
        };
        // Options that are not on the line keep their values, unless they have a default or are flags.
        let flags = [
            ("--raw", self.raw),
            ("--special", self.special),
            ("--single-turn", self.single_turn),
            ("--ignore-eos", self.penalties.ignore_eos),
        ];
        line.extend(flags.iter().filter(|(_, is_set)| *is_set).map(|(flag, _)| (*flag).to_owned()));
        let parser = ChangedOptions::command_for_update().mut_args(|option| option.default_value(None));
        let mut changed = ChangedOptions { answer: self.clone() };
        let parsed = parser.try_get_matches_from(line);
        parsed.and_then(|matches| changed.update_from_arg_matches(&matches)).map_err(|error| {
            if error.kind() == clap::error::ErrorKind::UnknownArgument {
                return Failure::Usage(format!("there is no option {name}; /set lists all"));
            }
            let text = error.to_string();
            let first = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
            let reason = first.rsplit_once("': ").map_or(first, |(_, reason)| reason);
            Failure::Usage(format!("/set {name} {value}: {reason}"))
        })?;
        Ok(changed.answer)
    }

    /// The options that a chat can change, by name, with their values.
    pub(crate) fn settings(&self) -> Vec<(&'static str, String)> {
        let seed = self.fixed_seed();
        let mut all = vec![
            ("predict", self.max_tokens.to_string()),
            ("reasoning", self.reasoning.name().to_owned()),
            ("reasoning-budget", self.reasoning_budget.to_string()),
            ("stop", listed(self.stop.iter().map(|text| format!("{text:?}")))),
            ("seed", seed.map_or_else(|| "-1".to_owned(), |seed| seed.to_string())),
            ("temp", self.temp.to_string()),
            ("top-k", self.top_k.to_string()),
            ("top-p", self.top_p.to_string()),
            ("min-p", self.min_p.to_string()),
            ("repeat-penalty", self.repeat_penalty.to_string()),
        ];
        all.extend(self.penalties.settings());
        all
    }

    /// The random seed, if one was given.
    pub(crate) fn fixed_seed(&self) -> Option<u64> {
        self.seed.and_then(|Seed(seed)| seed)
    }

    /// The generator's options, with a random seed if none was given.
    pub(crate) fn generator(&self, model: &ModelOptions) -> Outcome<GeneratorOptions> {
        let system = match (&self.system, &self.system_file) {
            (Some(text), _) => Some(model.llama.unescaped(text).into_owned()),
            (None, Some(path)) => Some(read_text(path)?),
            (None, None) => None,
        };
        let sampling = self.penalties.add_to(SamplingOptions {
            temperature: self.temp,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty,
            seed: self.fixed_seed().unwrap_or_else(|| RandomState::new().hash_one(()) >> 32),
            ..SamplingOptions::default()
        });
        Ok(GeneratorOptions {
            engine: EngineOptions { greedy: sampling.is_greedy(), ..model.engine() },
            sampling,
            max_tokens: usize::try_from(self.max_tokens).ok(),
            stops: self.stop.clone(),
            grammar: self.grammar.grammar()?,
            reasoning_budget: usize::try_from(self.reasoning_budget).ok().filter(|budget| *budget > 0),
            raw: self.raw,
            // Without the template, only the prompt itself can contain the control tokens of a turn.
            special: self.special || self.raw,
            system,
            ..GeneratorOptions::default()
        })
    }

    /// Whether answers are to have no reasoning.
    pub(crate) fn turns_reasoning_off(&self) -> bool {
        self.reasoning == ReasoningOutput::Off || self.reasoning_budget == 0
    }

    /// Whether answers must satisfy a schema or a grammar.
    pub(crate) fn is_constrained(&self) -> bool {
        self.grammar.is_given()
    }
}

/// The text of a file.
pub(crate) fn read_text(path: &Path) -> Outcome<String> {
    let bytes = std::fs::read(path).map_err(|error| Failure::file("read", path, &error))?;
    piped_input::text(bytes, &path.display().to_string())
}

/// A finished answer and its speed.
pub(crate) struct Answered {
    pub(crate) text: String,
    /// The model's reasoning before it; empty without one.
    pub(crate) reasoning: String,
    /// `None` if Ctrl-C ended it.
    pub(crate) finish: Option<Finish>,
    /// Tokens of the prompt and the answer.
    pub(crate) counts: TokenCounts,
    /// Prompt tokens that were evaluated (not those found in the KV cache), and tokens per second.
    pub(crate) prompt: (usize, f64),
    /// Generated tokens, and tokens per second of the decode steps; `None` if there was none: the first token comes from
    /// the prefill.
    pub(crate) answer: (usize, Option<f64>),
}

impl Answered {
    /// Says so if there is nothing but reasoning, which is not printed with the answer.
    pub(crate) fn explain_missing(&self, shown: ReasoningOutput) {
        if self.text.is_empty() && !self.reasoning.is_empty() && shown != ReasoningOutput::Show {
            let tokens = plural(self.answer.0, "token was", "tokens were");
            let raise = if self.finish == Some(Finish::Length) { "raise -n, or " } else { "" };
            note!(
                "quadriga: no answer: all {tokens} reasoning; {raise}use --reasoning show or --reasoning off"
            );
        }
    }
}

/// A speed in tokens per second, or a dash where there is nothing to measure.
pub(crate) fn speed_text(speed: Option<f64>) -> String {
    speed.map_or_else(|| "-".to_owned(), |speed| format!("{speed:.1}"))
}

/// Prints an answer while it is generated, to its end or until Ctrl-C.
pub(crate) fn stream(
    mut answer: Answer<'_>,
    ctrl_c: &CtrlC,
    mut printer: AnswerPrinter<'_>,
) -> Outcome<Answered> {
    let (mut text, mut reasoning) = (String::new(), String::new());
    while !ctrl_c.is_pressed()
        && let Some(piece) = answer.next()
    {
        let piece = piece?;
        printer.print(&piece)?;
        text.push_str(&piece.text);
        reasoning.push_str(&piece.reasoning);
    }
    printer.end_reasoning()?;
    let finish = answer.finish().filter(|_| !ctrl_c.is_pressed());
    let per_second =
        |(tokens, time): (usize, std::time::Duration)| tokens as f64 / time.as_secs_f64().max(1e-9);
    let (prompt, decode) = (answer.prompt_speed(), answer.decode_speed());
    let speed = (decode.0 > 0).then(|| per_second(decode));
    Ok(Answered {
        text,
        reasoning,
        finish,
        counts: answer.counts(),
        prompt: (prompt.0, per_second(prompt)),
        answer: (answer.counts().answer, speed),
    })
}

/// The name of a finish reason in JSON.
pub(crate) fn finish_name(finish: Option<Finish>) -> &'static str {
    match finish {
        Some(Finish::End | Finish::Stop(_) | Finish::StopToken(_)) => "stop",
        Some(Finish::Length) => "length",
        Some(Finish::Context) => "context",
        Some(Finish::Cancelled) | None => "interrupted",
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn every_option_that_a_chat_can_change_is_listed() {
        let command = ChangedOptions::command();
        let longs = command.get_arguments().filter_map(|option| option.get_long());
        let mut wanted: Vec<&str> = longs.filter(|long| !FIXED.contains(long) && *long != "system").collect();
        let line = [
            "-s",
            "7",
            "--stop",
            "a\n",
            "--stop",
            "b",
            "-l",
            "5-1.5",
            "-l",
            "6-inf",
            "--dry-penalty-last-n",
            "9",
        ];
        let settings = ChangedOptions::try_parse_from(line).unwrap().answer.settings();
        let mut names: Vec<&str> = settings.iter().map(|(name, _)| *name).collect();
        names.sort_unstable();
        wanted.sort_unstable();
        assert_eq!(names, wanted);
        for (name, value) in [
            ("seed", "7"),
            ("stop", "\"a\\n\", \"b\""),
            ("logit-bias", "5-1.5, 6-inf"),
            ("temp", "0.8"),
            ("repeat-last-n", "64"),
            ("dry-penalty-last-n", "9"),
            ("dry-sequence-breaker", "\"\\n\", \":\", \"\\\"\", \"*\""),
            ("ignore-eos", "off"),
        ] {
            assert!(settings.contains(&(name, value.to_owned())), "{name} {value}: {settings:?}");
        }
    }

    #[test]
    fn a_logit_bias_can_be_cleared() {
        let before = ChangedOptions::try_parse_from(["-l", "5+1"]).unwrap().answer;
        for name in ["logit-bias", "l"] {
            let after = before.with(name, "none").unwrap();
            assert!(after.settings().contains(&("logit-bias", "none".to_owned())));
        }
    }

    #[test]
    fn changing_one_option_keeps_the_others() {
        let line = [
            "--temp",
            "2",
            "-n",
            "5",
            "--raw",
            "--special",
            "--ignore-eos",
            "-s",
            "7",
            "--stop",
            "a",
            "--top-k",
            "9",
        ];
        let before = ChangedOptions::try_parse_from(line).unwrap().answer;
        let after = before.with("top-p", "0.5").unwrap().with("n", "6").unwrap().with("seed", "-1").unwrap();
        assert_eq!((after.temp, after.top_p, after.top_k, after.max_tokens), (2.0, 0.5, 9, 6));
        assert_eq!((after.raw, after.penalties.ignore_eos, after.single_turn), (true, true, false));
        assert!(after.special && !after.with("ignore-eos", "off").unwrap().penalties.ignore_eos);
        assert_eq!((after.seed, &after.stop[..]), (Some(Seed(None)), &["a".to_owned()][..]));
        for (name, value, part) in [
            ("temp", "x", "number of 0 or more"),
            ("nothing", "1", "no option nothing; /set lists all"),
            ("top-k", "x", "/set top-k x: must be a whole number"),
            ("n", "-5", "-1 for no limit"),
            ("ignore-eos", "maybe", "on or off"),
            ("raw", "on", "cannot be changed"),
            ("chat-template-kwargs", "{}", "cannot be changed"),
        ] {
            let Err(Failure::Usage(text)) = before.with(name, value) else { panic!("{name} {value}") };
            assert!(text.contains(part), "{text}");
        }
    }
}
