//! What `run` and `chat` share: how tokens are chosen, and an answer as it comes.

use std::hash::{BuildHasher, RandomState};
use std::io::Write;

use quadriga_llm::sampling::SamplingOptions;
use quadriga_llm::{Answer, EngineOptions, Finish, GeneratorOptions};

use crate::failure::Outcome;
use crate::interrupt::Gentle;
use crate::model_options::ModelOptions;

/// How the model answers.
#[derive(clap::Args)]
pub(crate) struct AnswerOptions {
    /// The most tokens of an answer; -1: until it ends
    #[arg(short = 'n', long = "predict", value_name = "N", default_value_t = -1, allow_negative_numbers = true)]
    most: i64,
    /// Where the random numbers start [somewhere]
    #[arg(short, long, value_name = "N")]
    seed: Option<u64>,
    /// How adventurous; 0 always takes the most probable token
    #[arg(long, value_name = "X", default_value_t = 0.8, allow_negative_numbers = true)]
    temp: f32,
    /// Only the so many most probable tokens; 0: all
    #[arg(long, value_name = "N", default_value_t = 40)]
    top_k: usize,
    /// Only the most probable tokens that together reach this probability
    #[arg(long, value_name = "P", default_value_t = 0.95)]
    top_p: f32,
    /// Only tokens this probable relative to the most probable one
    #[arg(long, value_name = "P", default_value_t = 0.05)]
    min_p: f32,
    /// Makes recent tokens less probable; 1: not at all
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    repeat_penalty: f32,
    /// End the answer at this text; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Send the prompt as it is, without the model's chat template
    #[arg(long)]
    raw: bool,
    /// What the model is told first
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
}

impl AnswerOptions {
    /// The generator's options, with a seed from somewhere if none was given.
    pub(crate) fn generator(&self, model: &ModelOptions) -> GeneratorOptions {
        let sampling = SamplingOptions {
            temperature: self.temp,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty,
            seed: self.seed.unwrap_or_else(|| RandomState::new().hash_one(()) >> 32),
            ..SamplingOptions::default()
        };
        GeneratorOptions {
            engine: EngineOptions { greedy: sampling.is_greedy(), ..model.engine() },
            sampling,
            most_tokens: usize::try_from(self.most).ok(),
            stops: self.stop.clone(),
            raw: self.raw,
            system: self.system.clone(),
            ..GeneratorOptions::default()
        }
    }
}

/// What came of an answer.
pub(crate) struct Answered {
    pub(crate) text: String,
    /// `None` if Ctrl-C ended it.
    pub(crate) finish: Option<Finish>,
    /// Tokens of the prompt that were computed, and how many a second.
    pub(crate) prompt: (usize, f64),
    /// Tokens of the answer, and how many a second.
    pub(crate) answer: (usize, f64),
}

/// Prints an answer as it comes, to its end or until Ctrl-C.
pub(crate) fn stream(mut answer: Answer<'_>, gentle: &Gentle, out: &mut dyn Write) -> Outcome<Answered> {
    let mut text = String::new();
    while !gentle.is_interrupted()
        && let Some(piece) = answer.next()
    {
        let piece = piece?.text;
        out.write_all(piece.as_bytes())?;
        out.flush()?;
        text.push_str(&piece);
    }
    let finish = answer.finish().filter(|_| !gentle.is_interrupted());
    let speed =
        |(tokens, time): (usize, std::time::Duration)| (tokens, tokens as f64 / time.as_secs_f64().max(1e-9));
    Ok(Answered { text, finish, prompt: speed(answer.prompt_speed()), answer: speed(answer.answer_speed()) })
}

/// The name of a way to end, for programs.
pub(crate) fn finish_name(finish: Option<Finish>) -> &'static str {
    match finish {
        Some(Finish::End) => "end",
        Some(Finish::Stop) => "stop",
        Some(Finish::Length) => "length",
        Some(Finish::Context) => "context",
        Some(Finish::Cancelled) | None => "interrupted",
    }
}
