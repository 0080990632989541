//! `quadriga run`: generates the answer to one prompt.

use std::io::{self, IsTerminal, Read, Write};
use std::path::PathBuf;

use quadriga_llm::Finish;
use quadriga_view::format::plural;
use serde_json::json;

use crate::answer::{AnswerOptions, finish_name, stream};
use crate::failure::{Failure, Outcome};
use crate::interrupt;
use crate::model_options::ModelOptions;
use crate::recording::{RecordOptions, Recording};

/// Arguments of `quadriga run`.
#[derive(clap::Args)]
pub(crate) struct RunArgs {
    /// Prompt [default: read from stdin]
    #[arg(value_name = "PROMPT", conflicts_with_all = ["prompt", "file"])]
    prompt_words: Vec<String>,
    /// Prompt
    #[arg(short, long, value_name = "PROMPT", conflicts_with = "file")]
    prompt: Option<String>,
    /// File with the prompt
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    #[command(flatten)]
    answer: AnswerOptions,
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    record: RecordOptions,
    /// Print the answer, speed and memory as one JSON object
    #[arg(long)]
    json: bool,
}

/// Prints the answer while it is generated, then a summary.
pub(crate) fn run(arguments: &RunArgs) -> Outcome {
    let prompt = prompt(arguments)?;
    if prompt.trim().is_empty() {
        return Err(Failure::Message(
            "the prompt is empty; give one as an argument, with -p, with -f FILE or on stdin".into(),
        ));
    }
    let options = arguments.answer.generator(&arguments.model);
    let (seed, context) = (options.sampling.seed, options.engine.clone());
    let prepared = arguments.model.prepare(&options.engine)?;
    let context = context.resolve(&prepared.model)?.context;
    let recording = arguments.record.start(&arguments.model, &prepared)?;
    let (mut generator, load_seconds) = prepared.generator(options)?;
    generator.observe(recording.as_ref().map(Recording::observer));
    let answer = generator.answer(&prompt)?;
    let ctrl_c = interrupt::catch();
    let mut stdout = io::stdout().lock();
    let answered = if arguments.json {
        stream(answer, &ctrl_c, &mut io::sink())?
    } else {
        stream(answer, &ctrl_c, &mut stdout)?
    };
    drop(ctrl_c);
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
        let [prompt, tokens] = [prompt, tokens].map(|count| plural(count, "token", "tokens"));
        note!(
            "\nload {load_seconds:.2} s · prompt {prompt}, {prompt_speed:.1} tok/s · answer {tokens}, {speed:.1} tok/s · seed {seed}\nmemory: {}",
            prepared.memory()
        );
    }
    if let Some(statistics) = statistics.filter(|_| !arguments.json) {
        note!("\n{statistics}");
    }
    match answered.finish {
        None => Err(Failure::Interrupted),
        Some(Finish::Context) => {
            note!(
                "quadriga: the context of {} is full; use a larger one (-c)",
                plural(context, "token", "tokens")
            );
            Ok(())
        }
        Some(_) => Ok(()),
    }
}

fn prompt(arguments: &RunArgs) -> Outcome<String> {
    let (bytes, from) = match (&arguments.prompt, &arguments.file) {
        (Some(prompt), _) => return Ok(prompt.clone()),
        (None, Some(path)) => {
            let bytes = std::fs::read(path).map_err(|error| Failure::file("read", path, &error))?;
            (bytes, path.display().to_string())
        }
        (None, None) if !arguments.prompt_words.is_empty() => return Ok(arguments.prompt_words.join(" ")),
        (None, None) if io::stdin().is_terminal() => {
            return Err(Failure::Usage(
                "no prompt; give one as an argument, for example: quadriga run \"What is gravity?\"".into(),
            ));
        }
        (None, None) => {
            let mut bytes = Vec::new();
            let read = io::stdin().lock().read_to_end(&mut bytes);
            read.map_err(|error| Failure::Message(format!("cannot read stdin: {error}")))?;
            (bytes, "stdin".to_owned())
        }
    };
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Failure::Message(format!("{from} is not valid UTF-8 (byte {at}); convert it, for example with iconv"))
    })
}
