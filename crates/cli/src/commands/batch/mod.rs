//! `quadriga batch`: answers a file of requests, many at once.

mod input;
mod lines;
mod output;

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
use self::output::{BatchOutput, DoneResult};
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
presence_penalty, frequency_penalty, repeat_penalty, logprobs, response_format, json_schema, grammar (GBNF). Options of the
command line are the defaults; request number n has the seed of -s plus n unless it has its own.
Results:
  {"index": 0, "text": "…", "finish": "stop", "usage": {"prompt_tokens": 9, "completion_tokens": 50, "cached_tokens": 0}}
  {"index": 1, "id": "second", "error": "line 2: …"}
The batch ends with exit code 1 if a request failed. If the model itself fails, the batch stops: start it again with the same
output file, and it goes on after the last result."#;

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
    let mut output = BatchOutput::open(arguments.output.as_deref(), &arguments.input, arguments.overwrite)?;
    let (opened, opening) = arguments.model.with_load(load).open()?;
    let devices = arguments.model.open_devices()?;
    let batching = arguments.serving.batcher(&opened, options.engine.clone(), &devices)?;
    let mut prepared = arguments.model.place_on(opened, opening, &batching.engine, Some(devices))?;
    arguments.answer.set_template(&mut prepared)?;
    let options = GeneratorOptions {
        template_variables: arguments.answer.template_variables(&prepared.model),
        ..options
    };
    let (batcher, _) = arguments.serving.load(&arguments.model, &prepared, batching)?;
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
        let answered = plural(job.read - done, "request", "requests");
        let before = if done > 0 { format!(" ({done} were done before)") } else { String::new() };
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
        failed => Err(Failure::Message(format!(
            "{} failed; see their results",
            plural(failed, "request", "requests")
        ))),
    }
}

/// A request that is being answered.
#[derive(Default)]
struct Pending {
    index: usize,
    id: Option<Value>,
    text: String,
    reasoning: String,
    tool_calls: Vec<ToolCallPiece>,
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
                    Next::Line(line) => self.add(line, output.done())?,
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
    fn add(&mut self, line: InputLine, done: &[DoneResult]) -> Outcome {
        let index = self.read;
        let parsed = line.text.and_then(|text| BatchLine::parse(&text));
        let id = parsed.as_ref().ok().and_then(|line| line.id.clone());
        if let Some(result) = done.get(index) {
            if parsed.is_ok() && result.id != id {
                let name = |id: &Option<Value>| id.as_ref().map_or("none".to_owned(), Value::to_string);
                return Err(Failure::Message(format!(
                    "request {index} has the id {}, its result {}: the output belongs to another batch; choose another \
                     file, or use --overwrite",
                    name(&id),
                    name(&result.id)
                )));
            }
            self.failed += usize::from(result.failed);
            self.read += 1;
            self.next = self.read;
            return Ok(());
        }
        self.read += 1;
        let submitted = parsed
            .and_then(|line| line.request(self.batcher.model(), &self.options, index))
            .and_then(|request: Request| self.batcher.submit(request).map_err(|error| error.to_string()));
        let pending = Pending { index, id, ..Pending::default() };
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

    /// Takes in an event. A failure that is not the request's own ends the batch: the request can be answered another time.
    fn take(&mut self, id: RequestId, event: Event) -> Outcome {
        match event {
            Event::Token { piece: TextPiece { text, reasoning, token, tool_calls }, logprobs } => {
                self.tokens += 1;
                let Some(pending) = self.running.get_mut(&id) else { return Ok(()) };
                pending.text.push_str(&text);
                pending.reasoning.push_str(&reasoning);
                pending.tool_calls.extend(tool_calls);
                if let Some(TokenLogprobs { logprob, top, .. }) = logprobs {
                    pending.logprobs.push(json!({ "token": token, "logprob": logprob, "top": top }));
                }
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
                        object.insert("logprobs".to_owned(), pending.logprobs.into());
                    }
                }
                self.finish(pending.index, pending.id, result);
            }
            Event::Failed(error) => {
                let Some(pending) = self.running.remove(&id) else { return Ok(()) };
                let own = matches!(
                    *error,
                    LlmError::Logits(_)
                        | LlmError::ChangedLogits(_)
                        | LlmError::SamplingHook(_)
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
    fn in_order(&mut self) -> Vec<Value> {
        let mut results = Vec::new();
        while let Some(result) = self.finished.remove(&self.next) {
            results.push(result);
            self.next += 1;
        }
        results
    }
}
