//! `quadriga run`: one answer, as it comes.

use std::io::{self, IsTerminal, Read, Write};
use std::path::PathBuf;

use quadriga_llm::Finish;
use serde_json::json;

use crate::answer::{AnswerOptions, finish_name, stream};
use crate::failure::{Failure, Outcome};
use crate::interrupt;
use crate::model_options::ModelOptions;
use crate::recording::{RecordOptions, Recording};

/// What to ask, of which model.
#[derive(clap::Args)]
pub(crate) struct Run {
    /// The prompt; without one it is read from standard input
    #[arg(value_name = "PROMPT", conflicts_with_all = ["prompt", "file"])]
    words: Vec<String>,
    /// The prompt, as an option
    #[arg(short, long, value_name = "PROMPT", conflicts_with = "file")]
    prompt: Option<String>,
    /// A file with the prompt
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    #[command(flatten)]
    answer: AnswerOptions,
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    record: RecordOptions,
    /// Print the answer and its numbers as one JSON object
    #[arg(long)]
    json: bool,
}

/// Prints one answer.
pub(crate) fn run(arguments: &Run) -> Outcome {
    let prompt = prompt(arguments)?;
    if prompt.trim().is_empty() {
        return Err(Failure::Message(
            "the prompt is empty; give one as an argument, with -p, with -f FILE or on standard input".into(),
        ));
    }
    let options = arguments.answer.generator(&arguments.model);
    let (seed, context) = (options.sampling.seed, options.engine.clone());
    let prepared = arguments.model.prepare(&options.engine)?;
    let context = context.resolve(&prepared.model)?.context;
    let recording = arguments.record.start(&arguments.model, &prepared)?;
    let (mut generator, load_seconds) = prepared.generator(options)?;
    generator.observe(recording.as_ref().map(Recording::watcher));
    let answer = generator.answer(&prompt)?;
    let gentle = interrupt::gently();
    let mut stdout = io::stdout().lock();
    let answered = if arguments.json {
        stream(answer, &gentle, &mut io::sink())?
    } else {
        stream(answer, &gentle, &mut stdout)?
    };
    drop(gentle);
    let statistics = recording.map(Recording::finish).transpose()?.flatten();
    if arguments.json {
        let object = json!({
            "text": answered.text,
            "finish": finish_name(answered.finish),
            "prompt": { "tokens": answered.prompt.0, "tok_s": answered.prompt.1 },
            "answer": { "tokens": answered.answer.0, "tok_s": answered.answer.1 },
            "load_seconds": load_seconds,
            "seed": seed,
            "backends": prepared.forecast.bytes(),
            "stats": statistics,
        });
        writeln!(stdout, "{object}")?;
    } else {
        writeln!(stdout)?;
    }
    if !arguments.model.quiet {
        let ((prompt, prompt_speed), (tokens, speed)) = (answered.prompt, answered.answer);
        note!(
            "\nload {load_seconds:.2} s · prompt {prompt} tokens, {prompt_speed:.1} tok/s · answer {tokens} tokens, \
             {speed:.1} tok/s · seed {seed}\nmemory: {}",
            prepared.memory()
        );
    }
    if let Some(statistics) = statistics.filter(|_| !arguments.json) {
        note!("\n{statistics}");
    }
    match answered.finish {
        None => Err(Failure::Interrupted),
        Some(Finish::Context) => {
            note!("quadriga: the context of {context} tokens is full; give a larger one with -c");
            Ok(())
        }
        Some(_) => Ok(()),
    }
}

fn prompt(arguments: &Run) -> Outcome<String> {
    let (bytes, from) = match (&arguments.prompt, &arguments.file) {
        (Some(prompt), _) => return Ok(prompt.clone()),
        (None, Some(path)) => {
            let bytes = std::fs::read(path).map_err(|error| Failure::file("read", path, &error))?;
            (bytes, path.display().to_string())
        }
        (None, None) if !arguments.words.is_empty() => return Ok(arguments.words.join(" ")),
        (None, None) if io::stdin().is_terminal() => {
            return Err(Failure::Usage(
                "there is no prompt; give one as an argument, for example: quadriga run \"What is gravity?\""
                    .into(),
            ));
        }
        (None, None) => {
            let mut bytes = Vec::new();
            let read = io::stdin().lock().read_to_end(&mut bytes);
            read.map_err(|error| Failure::Message(format!("cannot read standard input: {error}")))?;
            (bytes, "standard input".to_owned())
        }
    };
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Failure::Message(format!("{from} is not UTF-8 (byte {at}); convert it, for example with iconv"))
    })
}
