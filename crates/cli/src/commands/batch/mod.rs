//! `quadriga batch`: answers a file of requests, many at once.

mod input;
mod lines;
mod logprobs;
mod output;
mod results;

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use quadriga_llm::serving::{Batcher, Event, Finished, Request, RequestId, TokenLogprobs};
use quadriga_llm::template::ToolCall;
use quadriga_llm::tools::ToolCallPiece;
use quadriga_llm::{Error as LlmError, GeneratorOptions, RequestLoad, TextPiece};
use quadriga_view::format::plural;
use serde_json::{Value, json};

use self::input::{BatchInput, InputLine, Next};
use self::lines::BatchLine;
use self::output::{BatchOutput, ResultLine};
use self::results::{ResultOrigin, model_digest};
use crate::answer::{AnswerOptions, finish_name};
use crate::failure::{Failure, Outcome};
use crate::model_options::ModelOptions;
use crate::serving_options::ServingOptions;
use crate::{interrupt, ranks};

/// Arguments of `quadriga batch`.
#[derive(clap::Args)]
#[command(after_help = FORMAT)]
pub(crate) struct BatchArgs {
    /// File of requests, one JSON object in each line; - for stdin
    #[arg(value_name = "REQUESTS")]
    input: PathBuf,
    /// File of results, one line for each request, in their order [default: stdout]. If it has some already, the batch goes on after
    /// them
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Start anew, in place of results that the output file has
    #[arg(long, requires = "output")]
    overwrite: bool,
    /// Answer requests again whose results in the output file are errors; their lines may have been corrected, all others must be the
    /// same. Results stay as they are until all of them are there again
    #[arg(long, requires = "output", conflicts_with = "overwrite")]
    retry_failed: bool,
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
  {"custom_id": "fourth", "url": "/v1/completions", "body": {"prompt": "The sky is blue because"}}
A prompt is a message of the user; with --raw, and in the body of a line of OpenAI's batch files, it is a text to continue, without
the chat template. Such lines may have the url /v1/chat/completions or /v1/completions.
Fields beside prompt or messages: id or custom_id (any JSON), max_tokens, temperature, top_k, top_p, min_p, seed, stop,
presence_penalty, frequency_penalty, repeat_penalty, logprobs, response_format, json_schema, grammar (GBNF). A request with
other fields is an error, except those that change no answer (model, user, metadata, store, service_tier). Options of the
command line are the defaults; request number n has the seed of -s plus n unless it has its own.
Results:
  {"index": 0, "text": "…", "finish": "stop", "usage": {"prompt_tokens": 9, "completion_tokens": 50, "cached_tokens": 0}}
  {"index": 1, "id": "second", "error": "line 2: …"}
  {"id": "batch_req_2", "custom_id": "third", "response": {"status_code": 200, "body": {"choices": …}}, "error": null}
Lines with a body have results as in OpenAI's batch files. Each result also has digests of its request and model: a batch goes
on only after results of the same requests and the same model.
The batch ends with exit code 1 if a request failed. If the model itself fails, the batch stops: start it again with the same
output file, and it goes on after the last result. Options of the command line are not compared with those of earlier results."#;

/// Requests that are read ahead of the first one without a result, as a multiple of those computed at once.
const READ_AHEAD: usize = 8;

/// How long the input is waited for at a time when there is nothing to compute.
const WAIT: Duration = Duration::from_millis(50);

/// Answers all requests.
pub(crate) fn batch(arguments: &BatchArgs) -> Outcome {
    let options = arguments.answer.generator(&arguments.model)?;
    let load = RequestLoad::constant(arguments.serving.parallel);
    if ranks::follows() {
        // Only the first rank has the files.
        let (opened, opening) = arguments.model.with_load(load).open()?;
        let devices = arguments.model.open_devices()?;
        let batching = arguments.serving.batcher(&opened, options.engine, &devices)?;
        let prepared = arguments.model.place_on(opened, opening, &batching.engine, Some(devices))?;
        return arguments.serving.load(&arguments.model, &prepared, batching).map(|_| ());
    }
    let input = BatchInput::open(&arguments.input)?;
    let (path, retry) = (arguments.output.as_deref(), arguments.retry_failed);
    let mut output = BatchOutput::open(path, &arguments.input, arguments.overwrite, retry)?;
    let (opened, opening) = arguments.model.with_load(load).open()?;
    let devices = arguments.model.open_devices()?;
    let batching = arguments.serving.batcher(&opened, options.engine.clone(), &devices)?;
    let model = model_digest(&opened);
    let mut prepared = arguments.model.place_on(opened, opening, &batching.engine, Some(devices))?;
    arguments.answer.set_template(&mut prepared)?;
    let options = GeneratorOptions {
        template_variables: arguments.answer.template_variables(&prepared.model),
        ..options
    };
    let file = prepared.model.file().paths().next().and_then(std::path::Path::file_stem);
    let name = file.map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let (batcher, _) = arguments.serving.load(&arguments.model, &prepared, batching)?;
    let mut job = Job {
        batcher,
        options,
        running: HashMap::new(),
        finished: BTreeMap::new(),
        next: 0,
        read: 0,
        failed: 0,
        first_error: None,
        kept: 0,
        tokens: 0,
        model,
        name,
    };
    let bar = match arguments.model.quiet {
        true => ProgressBar::hidden(),
        false => ProgressBar::no_length(),
    };
    let style = ProgressStyle::with_template("{pos} answered, {per_sec} {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
    let started = Instant::now();
    output.begin()?;
    let ended = job.run(arguments, &input, &mut output, &bar);
    bar.finish_and_clear();
    job.batcher.cancel_all();
    job.batcher.save_prefixes();
    ended?;
    let done = output.done().len();
    output.finish()?;
    if job.read < done {
        return Err(Failure::Message(format!(
            "the output has {done} results, but there are only {}; it belongs to another batch, or use --overwrite",
            plural(job.read, "request", "requests")
        )));
    }
    if !arguments.model.quiet {
        let (seconds, state) = (started.elapsed().as_secs_f64(), job.batcher.state());
        let answered = plural(job.read - job.kept, "request", "requests");
        let before = match job.kept {
            0 => String::new(),
            kept => format!(" ({kept} were done before)"),
        };
        note!(
            "{answered}{before} in {seconds:.1} s · {} generated, {:.1} tok/s · {} of prompts found in the KV cache{}",
            plural(job.tokens, "token", "tokens"),
            job.tokens as f64 / seconds.max(1e-9),
            plural(state.cached as usize, "token", "tokens"),
            match state.guessed {
                0 => String::new(),
                guessed => format!(" · {} of {guessed} guesses were right", state.guessed_right),
            }
        );
        if let Some(cache) = state.expert_cache {
            note!("{cache}");
        }
    }
    match job.failed {
        0 => Ok(()),
        failed => {
            let first = job.first_error.map(|error| format!(" ({error})")).unwrap_or_default();
            let again = if arguments.output.is_some() { "; --retry-failed answers them again" } else { "" };
            let requests = plural(failed, "request", "requests");
            Err(Failure::Message(format!("{requests} failed{first}; see their results{again}")))
        }
    }
}

/// A request that is being answered.
#[derive(Default)]
struct Pending {
    index: usize,
    origin: ResultOrigin,
    id: Option<Value>,
    text: String,
    reasoning: String,
    tool_calls: Vec<ToolCallPiece>,
    logprobs: Vec<(u32, TokenLogprobs)>,
}

/// The requests of a batch on their way.
struct Job {
    batcher: Batcher,
    options: GeneratorOptions,
    running: HashMap<RequestId, Pending>,
    /// Results that wait for earlier ones.
    finished: BTreeMap<usize, ResultLine>,
    /// The first request without a written result, and the number of requests read.
    next: usize,
    read: usize,
    failed: usize,
    /// Why the first of them failed, if it did in this run.
    first_error: Option<String>,
    /// Results that were there already and are kept.
    kept: usize,
    tokens: usize,
    /// A digest of the model, and its name.
    model: String,
    name: String,
}

impl Job {
    /// Reads requests, computes them and writes their results, up to the end or Ctrl-C.
    fn run(
        &mut self,
        arguments: &BatchArgs,
        input: &BatchInput,
        output: &mut BatchOutput,
        bar: &ProgressBar,
    ) -> Outcome {
        let ctrl_c = interrupt::catch();
        let parallel = arguments.serving.parallel;
        let most = parallel.saturating_mul(READ_AHEAD);
        let mut at_end = false;
        while !at_end || !self.running.is_empty() {
            while !at_end
                && self.read < self.next.saturating_add(most)
                && self.running.len() < parallel.saturating_mul(2)
            {
                let wait = self.running.is_empty().then_some(WAIT);
                match input.next(wait).map_err(|error| Failure::file("read", &arguments.input, &error))? {
                    Next::Line(line) => self.add(line, output)?,
                    Next::Waiting => break,
                    Next::End => at_end = true,
                }
            }
            let stepped = self.batcher.step().into_iter().try_for_each(|(id, event)| self.take(id, event));
            // What is complete is written, also if the model failed.
            for result in self.in_order() {
                output.write(&result)?;
                bar.inc(1);
            }
            stepped?;
            if ctrl_c.is_pressed() {
                return Err(Failure::Interrupted);
            }
        }
        Ok(())
    }

    /// Adds the request of a line, unless its result is there already. A wrong one has an error for a result.
    fn add(&mut self, line: InputLine, output: &mut BatchOutput) -> Outcome {
        let index = self.read;
        let origin = ResultOrigin::of(&line.text);
        let parsed = line.text.and_then(|text| BatchLine::parse(&text));
        let id = parsed.as_ref().ok().and_then(|line| line.id.clone());
        let done = output.done().get(index);
        if let Some(result) = done.filter(|result| !(result.failed && output.retries())) {
            if parsed.is_ok() && result.id != id {
                let name = |id: &Option<Value>| id.as_ref().map_or("none".to_owned(), Value::to_string);
                return Err(Failure::Message(format!(
                    "request {index} has the id {}, its result {}: the output belongs to another batch; choose another \
                     file, or use --overwrite",
                    name(&id),
                    name(&result.id)
                )));
            }
            let changed =
                |own: &str, written: &Option<String>| written.as_ref().is_some_and(|other| other != own);
            let problem = match result {
                result if changed(&origin.request, &result.request) => "is of another request",
                result if changed(&self.model, &result.model) => "is of another model",
                _ => "",
            };
            if !problem.is_empty() {
                return Err(Failure::Message(format!(
                    "line {}: its result in the output {problem}; choose another file, or use --overwrite",
                    line.number
                )));
            }
            self.failed += usize::from(result.failed);
            self.kept += 1;
            self.read += 1;
            if output.retries() {
                self.finished.insert(index, output.kept(index)?);
            } else {
                self.next = self.read;
            }
            return Ok(());
        }
        self.read += 1;
        let submitted = parsed
            .and_then(|line| line.request(self.batcher.model(), &self.options, index))
            .and_then(|request: Request| self.batcher.submit(request).map_err(|error| error.to_string()));
        let pending = Pending { index, origin, id, ..Pending::default() };
        match submitted {
            Ok(request) => {
                self.running.insert(request, pending);
            }
            Err(error) => self.fail(pending, &format!("line {}: {error}", line.number)),
        }
        Ok(())
    }

    fn fail(&mut self, pending: Pending, error: &str) {
        self.failed += 1;
        self.first_error.get_or_insert_with(|| error.to_owned());
        self.finish(pending.index, &pending.origin, pending.id, json!({ "error": error }));
    }

    fn finish(&mut self, index: usize, origin: &ResultOrigin, id: Option<Value>, result: Value) {
        let line = origin.line(index, id, result, &self.model, &self.name);
        self.finished.insert(index, ResultLine::New(line));
    }

    /// Takes in an event. A failure that is not the request's own ends the batch: the request can be answered another time.
    fn take(&mut self, id: RequestId, event: Event) -> Outcome {
        match event {
            Event::Token { piece: TextPiece { text, reasoning, token, tool_calls }, logprobs } => {
                self.tokens += 1;
                let Some(pending) = self.running.get_mut(&id) else { return Ok(()) };
                pending.text.push_str(&text);
                pending.reasoning.push_str(&reasoning);
                pending.tool_calls.extend(tool_calls);
                pending.logprobs.extend(logprobs.map(|found| (token, found)));
            }
            Event::Finished(Finished { finish, counts, .. }) => {
                let Some(pending) = self.running.remove(&id) else { return Ok(()) };
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
                    if !pending.tool_calls.is_empty() {
                        let calls = ToolCallPiece::join(&pending.tool_calls);
                        let call = |call: ToolCall| json!({ "name": call.name, "arguments": call.arguments });
                        object.insert("tool_calls".to_owned(), calls.into_iter().map(call).collect());
                    }
                    if !pending.reasoning.is_empty() {
                        object.insert("reasoning".to_owned(), pending.reasoning.into());
                    }
                    if !pending.logprobs.is_empty() {
                        let tokenizer = self.batcher.model().tokenizer().ok();
                        let logprobs = pending.origin.logprobs(&pending.logprobs, tokenizer);
                        object.insert("logprobs".to_owned(), logprobs);
                    }
                }
                self.finish(pending.index, &pending.origin, pending.id, result);
            }
            Event::Failed(error) => {
                let Some(pending) = self.running.remove(&id) else { return Ok(()) };
                let own = matches!(
                    *error,
                    LlmError::Logits(_)
                        | LlmError::ChangedLogits(_)
                        | LlmError::SamplingHook(_)
                        | LlmError::HookPanicked
                        | LlmError::Token { .. }
                );
                if !own {
                    let text = format!("request {}: {error}; start the batch again to go on", pending.index);
                    return Err(Failure::Message(text));
                }
                self.fail(pending, &error.to_string());
            }
            Event::Prompt { .. } | Event::Progress { .. } | Event::Embedding { .. } => {}
        }
        Ok(())
    }

    /// Results that are next in order.
    fn in_order(&mut self) -> Vec<ResultLine> {
        let mut results = Vec::new();
        while let Some(result) = self.finished.remove(&self.next) {
            results.push(result);
            self.next += 1;
        }
        results
    }
}
