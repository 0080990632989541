//! `quadriga run`: generates the answer to one prompt.

use std::io::{self, Write};
use std::path::PathBuf;

use quadriga_llm::Finish;
use quadriga_view::format::plural;
use serde_json::json;

use crate::answer::{AnswerOptions, finish_name, speed_text, stream};
use crate::answer_printer::{AnswerPrinter, ReasoningDisplay};
use crate::failure::{Failure, Outcome};
use crate::model_options::ModelOptions;
use crate::prompt_cache::PromptCacheOptions;
use crate::recording::{RecordOptions, Recording};
use crate::{interrupt, model_argument, piped_input, ranks, terminal};

/// Arguments of `quadriga run`.
#[derive(clap::Args)]
pub(crate) struct RunArgs {
    /// Prompt, followed by text that is piped into the command; several words are joined. A first word that is a GGUF file is
    /// the model
    #[arg(value_name = "PROMPT")]
    words: Vec<String>,
    /// Prompt; stdin is not read
    #[arg(short, long, value_name = "PROMPT", allow_hyphen_values = true, conflicts_with = "file")]
    prompt: Option<String>,
    /// File with the prompt; stdin is not read
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    #[command(flatten)]
    answer: AnswerOptions,
    #[command(flatten)]
    cache: PromptCacheOptions,
    #[command(flatten)]
    pub(crate) model: ModelOptions,
    #[command(flatten)]
    record: RecordOptions,
    /// Print the answer, speed and memory as one JSON object
    #[arg(long)]
    json: bool,
}

/// Prints the answer while it is generated, then a summary.
pub(crate) fn run(arguments: &RunArgs) -> Outcome {
    let (model, words) = model_argument::split(&arguments.model, &arguments.words)?;
    let prompt = prompt(arguments, words)?;
    let prompt = model.llama.unescaped(&prompt);
    if prompt.trim().is_empty() && !ranks::follows() {
        return Err(Failure::Usage(
            "the prompt is empty; give one as an argument, with -p, with -f FILE or on stdin".into(),
        ));
    }
    arguments.cache.check()?;
    let mut options = arguments.answer.generator(&model)?;
    let seed = options.sampling.seed;
    arguments.record.count_neurons(&mut options.engine);
    let mut prepared = model.prepare(&options.engine)?;
    arguments.answer.set_template(&mut prepared)?;
    let context = prepared.options.context;
    options.template_variables = arguments.answer.template_variables(&prepared.model);
    if options.engine.neurons.gate_threshold() > 0.0 {
        prepared.explain_gate_threshold(&prepared.model.tokenizer()?.encode(&prompt, false))?;
    }
    let recording = arguments.record.start(&model, &prepared)?;
    let (mut generator, load_seconds) = prepared.generator(options)?;
    generator.observe(recording.as_ref().map(Recording::observer));
    arguments.cache.load(&mut generator)?;
    let answer = generator.answer(&prompt)?;
    let ctrl_c = interrupt::catch();
    let mut stdout = io::stdout().lock();
    let answered = if arguments.json {
        let shown = ReasoningDisplay::Inline;
        stream(answer, &ctrl_c, AnswerPrinter::new(&mut io::sink(), &mut io::sink(), false, shown))?
    } else {
        let (shown, mut aside) = (arguments.answer.reasoning.display(model.quiet), io::stderr());
        let printer = AnswerPrinter::new(&mut stdout, &mut aside, terminal::escapes_answers(), shown);
        stream(answer, &ctrl_c, printer)?
    };
    drop(ctrl_c);
    prepared.clear_prefill();
    let statistics = recording.map(Recording::finish).transpose()?.flatten();
    if arguments.json {
        let object = json!({
            "model": prepared.title(),
            "text": answered.text,
            "reasoning": Some(&answered.reasoning).filter(|text| !text.is_empty()),
            "finish": finish_name(answered.finish),
            "prompt": { "tokens": answered.prompt.0, "cached": answered.counts.cached, "tok_s": answered.prompt.1 },
            "answer": { "tokens": answered.answer.0, "tok_s": answered.answer.1 },
            "load_seconds": load_seconds,
            "seed": seed,
            "backends": prepared.backend_memory(),
            "expert_cache": generator.engine().expert_cache(),
            "stats": statistics,
            "neurons": generator.engine().neuron_use(),
        });
        writeln!(stdout, "{}", terminal::json(&object))?;
    } else {
        writeln!(stdout)?;
        answered.explain_missing(arguments.answer.reasoning);
    }
    // After the answer, which a file that cannot be written must not take away.
    arguments.cache.save_prompt(&mut generator, answered.counts.prompt, answered.counts.cached)?;
    if !model.quiet {
        arguments.answer.explain_missing_template(&prepared.model);
        let ((prompt, prompt_speed), (tokens, speed)) = (answered.prompt, answered.answer);
        let speed = speed_text(speed);
        let [prompt, tokens] = [prompt, tokens].map(|count| plural(count, "token", "tokens"));
        let cached = match answered.counts.cached {
            0 => String::new(),
            cached => format!(" (and {cached} from the prompt cache)"),
        };
        note!(
            "\n{} · load {load_seconds:.2} s · prompt {prompt}{cached}, {prompt_speed:.1} tok/s · answer {tokens}, {speed} tok/s · seed {seed}\nmemory: {}",
            prepared.title(),
            prepared.memory()
        );
    }
    if let Some(statistics) = statistics.filter(|_| !arguments.json) {
        note!("\n{statistics}");
        if let Some(cache) = generator.engine().expert_cache() {
            note!("{cache}");
        }
        if let Some(slots) = generator.engine().neuron_slots() {
            note!("{slots}");
        }
        if let Some(neurons) = generator.engine().neuron_use() {
            note!("{neurons}");
        }
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
        Some(Finish::Length) if arguments.answer.is_constrained() && !model.quiet => {
            let tokens = plural(answered.answer.0, "token", "tokens");
            note!(
                "quadriga: the answer was cut off after {tokens} (-n): it may not satisfy its schema or grammar"
            );
            Ok(())
        }
        Some(_) => Ok(()),
    }
}

/// The prompt: an option, a file, or the words and the piped input.
fn prompt(arguments: &RunArgs, words: &[String]) -> Outcome<String> {
    if (arguments.prompt.is_some() || arguments.file.is_some()) && !words.is_empty() {
        let option = if arguments.prompt.is_some() { "-p" } else { "-f" };
        let words = words.join(" ");
        return Err(Failure::Usage(format!(
            "two prompts: \"{words}\" and that of {option}; use one of them"
        )));
    }
    if let Some(prompt) = &arguments.prompt {
        return Ok(prompt.clone());
    }
    // Only the first rank has files and standard input.
    if ranks::follows() {
        return Ok(String::new());
    }
    if let Some(path) = &arguments.file {
        let bytes = std::fs::read(path).map_err(|error| Failure::file("read", path, &error))?;
        return piped_input::text(bytes, &path.display().to_string());
    }
    let words = words.join(" ");
    if ranks::may_never_end_input() && !words.is_empty() {
        return Ok(words);
    }
    match piped_input::read(!words.is_empty() && !arguments.model.quiet)? {
        None if words.is_empty() => Err(Failure::Usage(
            "no prompt; give one as an argument, for example: quadriga run \"What is gravity?\"".into(),
        )),
        Some(input) if words.is_empty() => Ok(input),
        Some(input) if !input.trim().is_empty() => Ok(format!("{words}\n\n{input}")),
        _ => Ok(words),
    }
}
