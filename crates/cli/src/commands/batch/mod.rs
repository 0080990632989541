//! `quadriga batch`: answers a file of requests, many at once.

mod lines;
mod output;

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::PathBuf;
use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};
use quadriga_llm::serving::{Batcher, Event, Finished, Request, RequestId, TokenLogprobs};
use quadriga_llm::{GeneratorOptions, TextPiece};
use quadriga_view::format::plural;
use serde_json::{Value, json};

use self::lines::BatchLine;
use self::output::BatchOutput;
use crate::answer::{AnswerOptions, finish_name};
use crate::failure::{Failure, Outcome};
use crate::interrupt;
use crate::model_options::ModelOptions;
use crate::serving_options::ServingOptions;

/// Arguments of `quadriga batch`.
#[derive(clap::Args)]
#[command(after_help = FORMAT)]
pub(crate) struct BatchArgs {
    /// File of requests, one JSON object in each line; - for stdin
    #[arg(value_name = "REQUESTS")]
    input: PathBuf,
    /// File of results, one line for each request, in their order. If it has some already, the batch goes on after them
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Start anew, in place of results that the output file has
    #[arg(long, requires = "output")]
    overwrite: bool,
    #[command(flatten)]
    serving: ServingOptions,
    #[command(flatten)]
    answer: AnswerOptions,
    #[command(flatten)]
    pub(crate) model: ModelOptions,
}

/// The format of requests and results, for the help text.
const FORMAT: &str = r#"Requests:
  {"prompt": "Why is the sky blue?"}
  {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50, "id": "second"}
  {"custom_id": "third", "body": {"messages": [...], "temperature": 0}}
Fields beside prompt or messages: id or custom_id (any JSON), max_tokens, temperature, top_k, top_p, min_p, seed, stop,
presence_penalty, frequency_penalty, repeat_penalty, logprobs. Options of the command line are the defaults; request number
n has the seed of -s plus n unless it has its own.
Results:
  {"index": 0, "text": "…", "finish": "stop", "usage": {"prompt_tokens": 9, "completion_tokens": 50, "cached_tokens": 0}}
  {"index": 1, "id": "second", "error": "line 2: …"}"#;

/// Requests that are read ahead of the first one without a result, as a multiple of those computed at once.
const READ_AHEAD: usize = 8;

/// Answers all requests.
pub(crate) fn batch(arguments: &BatchArgs) -> Outcome {
    let options = arguments.answer.generator(&arguments.model)?;
    let mut input = open(arguments)?;
    let mut output = BatchOutput::open(arguments.output.as_deref(), arguments.overwrite)?;
    let done = output.done();
    let (opened, opening) = arguments.model.open()?;
    let batching = arguments.serving.batcher(&opened, options.engine.clone())?;
    let mut prepared = arguments.model.place(opened, opening, &batching.engine)?;
    arguments.answer.set_template(&mut prepared)?;
    let options = GeneratorOptions {
        template_variables: arguments.answer.template_variables(&prepared.model),
        ..options
    };
    let (batcher, _) = prepared.batcher(batching)?;
    let mut job = Job {
        batcher,
        options,
        running: HashMap::new(),
        finished: BTreeMap::new(),
        next: 0,
        read: 0,
        failed: 0,
        tokens: 0,
    };
    let bar = match arguments.model.quiet {
        true => ProgressBar::hidden(),
        false => ProgressBar::no_length(),
    };
    let style = ProgressStyle::with_template("{pos} answered, {per_sec} {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
    let ctrl_c = interrupt::catch();
    let started = Instant::now();
    let most = arguments.serving.parallel.saturating_mul(READ_AHEAD);
    let mut at_end = false;
    loop {
        while !at_end
            && job.read < job.next.saturating_add(most)
            && job.running.len() < 2 * arguments.serving.parallel
        {
            let mut line = String::new();
            let bytes = input.read_line(&mut line);
            at_end = bytes.map_err(|error| Failure::file("read", &arguments.input, &error))? == 0;
            if !at_end && !line.trim().is_empty() {
                job.add(&line, done)?;
            }
        }
        for (id, event) in job.batcher.step() {
            job.take(id, event);
        }
        for result in job.in_order() {
            output.write(&result)?;
            bar.inc(1);
        }
        if ctrl_c.is_pressed() {
            bar.finish_and_clear();
            return Err(Failure::Interrupted);
        }
        if at_end && job.running.is_empty() {
            break;
        }
    }
    drop(ctrl_c);
    bar.finish_and_clear();
    output.finish()?;
    if job.read < done {
        return Err(Failure::Message(format!(
            "the output has {done} results, but there are only {}; it belongs to another batch, or use --overwrite",
            plural(job.read, "request", "requests")
        )));
    }
    if !arguments.model.quiet {
        let (seconds, state) = (started.elapsed().as_secs_f64(), job.batcher.state());
        let answered = plural(job.read - done, "request", "requests");
        let before = if done > 0 { format!(" ({done} were done before)") } else { String::new() };
        note!(
            "{answered}{before} in {seconds:.1} s · {} generated, {:.1} tok/s · {} of prompts found in the KV cache",
            plural(job.tokens, "token", "tokens"),
            job.tokens as f64 / seconds.max(1e-9),
            plural(state.cached as usize, "token", "tokens"),
        );
    }
    match job.failed {
        0 => Ok(()),
        failed => Err(Failure::Message(format!(
            "{} failed; see their results",
            plural(failed, "request", "requests")
        ))),
    }
}

fn open(arguments: &BatchArgs) -> Outcome<Box<dyn BufRead>> {
    if arguments.input.as_os_str() == "-" {
        return Ok(Box::new(io::stdin().lock()));
    }
    let file = File::open(&arguments.input);
    let file = file.map_err(|error| Failure::file("read", &arguments.input, &error))?;
    Ok(Box::new(BufReader::new(file)))
}

/// A request that is being answered.
struct Pending {
    index: usize,
    id: Option<Value>,
    text: String,
    reasoning: String,
    logprobs: Vec<Value>,
}

/// The requests of a batch on their way.
struct Job {
    batcher: Batcher,
    options: GeneratorOptions,
    running: HashMap<RequestId, Pending>,
    /// Results that wait for earlier ones.
    finished: BTreeMap<usize, Value>,
    /// The first request without a written result, and the number of requests read.
    next: usize,
    read: usize,
    failed: usize,
    tokens: usize,
}

impl Job {
    /// Adds the request of a line, unless its result is among the first `done`. A wrong one has an error for a result.
    fn add(&mut self, line: &str, done: usize) -> Outcome {
        let index = self.read;
        self.read += 1;
        if index < done {
            self.next = self.read;
            return Ok(());
        }
        let parsed = BatchLine::parse(line, index);
        let id = parsed.as_ref().ok().and_then(|line| line.id.clone());
        let submitted = parsed
            .and_then(|line| line.request(self.batcher.model(), &self.options, index))
            .and_then(|request: Request| self.batcher.submit(request).map_err(|error| error.to_string()));
        let pending =
            Pending { index, id, text: String::new(), reasoning: String::new(), logprobs: Vec::new() };
        match submitted {
            Ok(request) => {
                self.running.insert(request, pending);
            }
            Err(error) => self.fail(pending, &error),
        }
        Ok(())
    }

    fn fail(&mut self, pending: Pending, error: &str) {
        self.failed += 1;
        let error = format!("request {}: {error}", pending.index);
        self.finish(pending.index, pending.id, json!({ "error": error }));
    }

    fn finish(&mut self, index: usize, id: Option<Value>, mut result: Value) {
        if let Some(object) = result.as_object_mut() {
            object.insert("index".to_owned(), index.into());
            if let Some(id) = id {
                object.insert("id".to_owned(), id);
            }
        }
        self.finished.insert(index, result);
    }

    /// Takes in an event.
    fn take(&mut self, id: RequestId, event: Event) {
        match event {
            Event::Token { piece: TextPiece { text, reasoning, token }, logprobs } => {
                self.tokens += 1;
                let Some(pending) = self.running.get_mut(&id) else { return };
                pending.text.push_str(&text);
                pending.reasoning.push_str(&reasoning);
                if let Some(TokenLogprobs { logprob, top }) = logprobs {
                    pending.logprobs.push(json!({ "token": token, "logprob": logprob, "top": top }));
                }
            }
            Event::Finished(Finished { finish, counts, .. }) => {
                let Some(pending) = self.running.remove(&id) else { return };
                let mut result = json!({
                    "text": pending.text,
                    "finish": finish_name(Some(finish)),
                    "usage": {
                        "prompt_tokens": counts.prompt,
                        "completion_tokens": counts.answer,
                        "cached_tokens": counts.cached,
                    },
                });
                if let Some(object) = result.as_object_mut() {
                    if !pending.reasoning.is_empty() {
                        object.insert("reasoning".to_owned(), pending.reasoning.into());
                    }
                    if !pending.logprobs.is_empty() {
                        object.insert("logprobs".to_owned(), pending.logprobs.into());
                    }
                }
                self.finish(pending.index, pending.id, result);
            }
            Event::Failed(error) => {
                if let Some(pending) = self.running.remove(&id) {
                    self.fail(pending, &error.to_string());
                }
            }
            Event::Prompt { .. } => {}
        }
    }

    /// Results that are next in order.
    fn in_order(&mut self) -> Vec<Value> {
        let mut results = Vec::new();
        while let Some(result) = self.finished.remove(&self.next) {
            results.push(result);
            self.next += 1;
        }
        results
    }
}
