//! `quadriga bench`: tokens per second of prompt processing and text generation.

mod arrivals;
mod report;
mod samples;
mod streams;
mod subject;

use std::io;
use std::path::PathBuf;

use quadriga_llm::placement::{Devices, GpuLayers};
use quadriga_llm::{EmbedderOptions, EngineOptions, Pooling};
use quadriga_view::Statistics;
use quadriga_view::format::plural;
use serde_json::json;

use self::arrivals::ArrivalTest;
use self::report::{ModelFacts, Report, ReportFormat};
use self::samples::Samples;
use self::streams::StreamTest;
use self::subject::{Subject, Test, TestKind};
use crate::commands::synth::TOPICS_KEY;
use crate::failure::{Failure, Outcome};
use crate::model_options::ModelOptions;
use crate::placement_options;
use crate::prepared_model::Prepared;
use crate::recording::{RecordOptions, Recording};
use crate::serving_options::ServingOptions;
use crate::values;

/// Arguments of `quadriga bench`.
#[derive(clap::Args)]
#[command(after_help = LISTS)]
pub(crate) struct BenchArgs {
    /// Number of prompt tokens, 0 to skip
    #[arg(
        short = 'p',
        long = "n-prompt",
        value_name = "N",
        default_value = "512",
        value_delimiter = ',',
        allow_negative_numbers = true,
        value_parser = values::whole
    )]
    prompt: Vec<usize>,
    /// Number of tokens to generate, 0 to skip
    #[arg(
        short = 'n',
        long = "n-gen",
        value_name = "N",
        default_value = "128",
        value_delimiter = ',',
        allow_negative_numbers = true,
        value_parser = values::whole
    )]
    generate: Vec<usize>,
    /// Number of tokens in the KV cache before the measurement
    #[arg(
        short = 'd',
        long = "n-depth",
        value_name = "N",
        default_value = "0",
        value_delimiter = ',',
        allow_negative_numbers = true,
        value_parser = values::whole
    )]
    depth: Vec<usize>,
    /// Number of repetitions, after a warm-up that compiles everything (none with --no-warmup)
    #[arg(
        short,
        long,
        value_name = "N",
        default_value_t = 5,
        allow_negative_numbers = true,
        value_parser = values::at_least_one
    )]
    rounds: usize,
    /// Measure sequences that are computed together, such as 1,8,32: speeds of all of them, with -p and -n for each
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        allow_negative_numbers = true,
        value_parser = values::at_least_one,
        conflicts_with_all = ["depth", "logits", "topic", "threads_list", "gpu_layers_list", "trace", "stats"]
    )]
    streams: Vec<usize>,
    /// Measure requests that arrive at random, so many a second on average: times to the first token and between tokens
    #[arg(long, value_name = "RATE", value_parser = values::positive, conflicts_with_all = ["streams", "depth", "logits", "topic", "threads_list", "gpu_layers_list", "trace", "stats"])]
    arrivals: Option<f32>,
    /// Number of requests for --arrivals
    #[arg(long, value_name = "N", default_value_t = 64, requires = "arrivals", value_parser = values::at_least_one)]
    requests: usize,
    /// Tokens that all prompts of --arrivals begin with
    #[arg(long, value_name = "N", default_value_t = 0, requires = "arrivals", value_parser = values::whole)]
    shared: usize,
    /// Sequences that are generated all the while with --arrivals: times between their tokens are measured, too
    #[arg(long, value_name = "N", default_value_t = 0, requires = "arrivals", value_parser = values::whole)]
    beside: usize,
    #[command(flatten)]
    serving: ServingOptions,
    /// Copy the logits of every token to the host, as sampling does, instead of computing the argmax on the device
    #[arg(long)]
    logits: bool,
    /// Change the topic of the text every N tokens, for models by `synth --topics` [default: 0, tokens of all topics]
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true, value_parser = values::whole)]
    topic: usize,
    /// GGUF file, as with -m
    #[arg(value_name = "MODEL", conflicts_with_all = ["model", "hf_repo"])]
    file: Option<PathBuf>,
    /// Several values of -t
    #[arg(long, value_delimiter = ',', value_parser = values::threads, hide = true)]
    threads_list: Vec<usize>,
    /// Several values of -ngl
    #[arg(long, value_delimiter = ',', value_parser = placement_options::gpu_layers, hide = true)]
    gpu_layers_list: Vec<GpuLayers>,
    #[command(flatten)]
    pub(crate) model: ModelOptions,
    #[command(flatten)]
    record: RecordOptions,
    /// Format of the results: table, md, csv or json
    #[arg(
        short,
        long,
        value_name = "FORMAT",
        value_enum,
        hide_possible_values = true,
        default_value = "table"
    )]
    output: ReportFormat,
    /// Print the results as JSON, as -o json
    #[arg(long)]
    json: bool,
}

const LISTS: &str = "-p, -n, -d, -t and -ngl take lists, such as -p 128,512: each combination is measured.";

/// Measures and prints the speeds.
pub(crate) fn bench(arguments: &BenchArgs) -> Outcome {
    let named = arguments.model.with_file(arguments.file.as_deref());
    let (model, warm_up) = named.without_no_warmup();
    if !arguments.streams.is_empty() || arguments.arrivals.is_some() {
        return arguments.bench_many(&model, warm_up);
    }
    let configurations = arguments.configurations(&model);
    let lists = configurations.len() > 1
        || [&arguments.prompt, &arguments.generate, &arguments.depth].iter().any(|list| list.len() > 1);
    if configurations.len() > 1 && arguments.record.is_on() {
        return Err(Failure::Usage("--trace and --stats need a single value of -t and of -ngl".to_owned()));
    }
    let mut reports = Vec::new();
    for options in &configurations {
        reports.push(measure(arguments, options, warm_up)?);
    }
    let format = if arguments.json { ReportFormat::Json } else { arguments.output };
    let mut statistics = None;
    for (_, found) in &mut reports {
        statistics = statistics.or(found.take());
    }
    let reports: Vec<Report> = reports.into_iter().map(|(report, _)| report).collect();
    report::print(&reports, format, !model.quiet, lists, &mut io::stdout().lock())?;
    if let Some(statistics) = statistics.filter(|_| format != ReportFormat::Json) {
        note!("\n{statistics}");
    }
    Ok(())
}

impl BenchArgs {
    /// Whether one engine measures everything.
    pub(crate) fn has_one_engine(&self) -> bool {
        self.threads_list.len() <= 1 && self.gpu_layers_list.len() <= 1
    }

    /// Measures sequences that are computed together.
    fn bench_many(&self, model: &ModelOptions, warm_up: bool) -> Outcome {
        let ([prompt], [generate]) = (self.prompt.as_slice(), self.generate.as_slice()) else {
            return Err(Failure::Usage(
                "--streams and --arrivals need a single value of -p and of -n".to_owned(),
            ));
        };
        let as_json = match self.output {
            ReportFormat::Json => true,
            ReportFormat::Table => self.json,
            _ => return Err(Failure::Usage("--streams and --arrivals print a table or JSON".to_owned())),
        };
        if let Some(rate) = self.arrivals {
            let (rate, requests, shared) = (f64::from(rate), self.requests, self.shared);
            let (prompt, generate, serving) = (*prompt, *generate, &self.serving);
            let beside = self.beside;
            let test = ArrivalTest { rate, requests, prompt, shared, generate, beside, warm_up, serving };
            return arrivals::bench(&test, model, as_json, &mut io::stdout().lock());
        }
        let (streams, rounds) = (self.streams.as_slice(), self.rounds);
        let test = StreamTest { streams, prompt: *prompt, generate: *generate, rounds, warm_up };
        streams::bench(&test, model, as_json, &mut io::stdout().lock())
    }

    /// The options of each combination of threads and layers.
    fn configurations(&self, model: &ModelOptions) -> Vec<ModelOptions> {
        let mut all = vec![model.clone()];
        if !self.threads_list.is_empty() {
            let with = |threads: &usize| {
                let mut options = model.clone();
                options.threads = Some(*threads);
                options
            };
            all = self.threads_list.iter().map(with).collect();
        }
        if self.gpu_layers_list.is_empty() {
            return all;
        }
        let with = |options: &ModelOptions| {
            self.gpu_layers_list.iter().map(|layers| options.with_gpu_layers(*layers)).collect::<Vec<_>>()
        };
        all.iter().flat_map(with).collect()
    }

    /// The tests, without those of no tokens; an encoder has no generation.
    fn tests(&self, encoder: bool) -> Outcome<Vec<Test>> {
        let mut tests = Vec::new();
        let depths: &[usize] = if encoder { &[0] } else { &self.depth };
        for depth in depths {
            let prompts = self.prompt.iter().map(|tokens| (TestKind::Prompt, *tokens));
            let generations = self.generate.iter().map(|tokens| (TestKind::Generation, *tokens));
            for (kind, tokens) in prompts.chain(generations.filter(|_| !encoder)) {
                if tokens > 0 {
                    tests.push(Test { kind, depth: *depth, samples: Samples::new(tokens) });
                }
            }
        }
        match tests.as_slice() {
            [] if encoder => {
                Err(Failure::Usage("nothing to measure: an encoder only has prompts, and -p is 0".into()))
            }
            [] => {
                Err(Failure::Usage("nothing to measure: -p 0 and -n 0; one of them must be above 0".into()))
            }
            _ => Ok(tests),
        }
    }
}

/// Loads the model, and measures all tests with it. Returns the statistics of a recording, too.
fn measure(
    arguments: &BenchArgs,
    model: &ModelOptions,
    warm_up: bool,
) -> Outcome<(Report, Option<Statistics>)> {
    let (opened, opening) = model.open()?;
    let hyper = opened.hyperparameters();
    let encoder = hyper.encoder;
    let mut tests = arguments.tests(encoder)?;
    let needed = tests.iter().map(|test| test.depth.saturating_add(test.samples.tokens)).max().unwrap_or(0);
    let mut options = EngineOptions { greedy: !arguments.logits, ..model.engine() };
    arguments.record.count_neurons(&mut options);
    if encoder {
        if !model.quiet && arguments.depth.iter().any(|depth| *depth > 0) {
            note!("quadriga: -d has no effect: an encoder has no KV cache");
        }
        options.context = needed.min(hyper.context);
        options = EmbedderOptions { engine: options, ..EmbedderOptions::default() }.engine(&opened);
    } else if options.context == 0 {
        options.context = needed;
    } else if options.context < needed {
        return Err(Failure::Usage(format!(
            "-c {}: the context does not hold {}",
            options.context,
            plural(needed, "token", "tokens")
        )));
    }
    let prepared = model.place(opened, opening, &options)?;
    let free = |devices: &Devices| -> Vec<Option<u64>> {
        devices.backends().iter().map(|backend| backend.device().free_bytes).collect()
    };
    let before = free(&prepared.devices);
    let recording = arguments.record.start(model, &prepared)?;
    let (mut subject, load_seconds) = load(&prepared, options, recording.as_ref())?;
    let vocabulary = prepared.model.hyperparameters().vocabulary;
    let topics = prepared.model.file().find::<u32>(TOPICS_KEY).ok().flatten().unwrap_or(0) as usize;
    if topics == 0 && arguments.topic > 0 {
        return Err(Failure::Usage(
            "--topic: the model has no topics; write one with `quadriga synth --topics N`".to_owned(),
        ));
    }
    let tokens = match arguments.topic {
        0 => tokens(vocabulary, needed),
        length => tokens_on_topics(vocabulary, needed, topics, length),
    };
    prepared.explain_gate_threshold(&tokens)?;
    if warm_up {
        subject.warm_up(&tests, &tokens, topics > 0)?;
    }
    for _ in 0..arguments.rounds {
        for test in &mut tests {
            let seconds = subject.run(test, &tokens, topics > 0)?;
            test.samples.speeds.push(test.samples.tokens as f64 / seconds.max(1e-9));
        }
    }
    // Memory taken from each device as the device reports it: buffers and the driver's own.
    let taken: Vec<Option<u64>> = before
        .iter()
        .zip(free(&prepared.devices))
        .map(|(before, after)| Some(before.as_ref()?.saturating_sub(after?)))
        .collect();
    let statistics = recording.map(Recording::finish).transpose()?.flatten();
    let file = prepared.model.file();
    let bytes: u64 = file.tensors().map(|tensor| tensor.byte_len() as u64).sum();
    let cpu = prepared.devices.cpu();
    if let Some(cache) = subject.expert_cache().filter(|_| !model.quiet) {
        note!("{cache}");
    }
    if let Some(slots) = subject.neuron_slots().filter(|_| !model.quiet) {
        note!("{slots}");
    }
    if let Some(neurons) = subject.neuron_use().filter(|_| !model.quiet) {
        note!("{neurons}");
    }
    let facts = json!({
        "rounds": arguments.rounds,
        "argmax": if subject.is_greedy() { "device" } else { "none" },
        "threads": cpu.threads(),
        "isa": cpu.isa().name(),
        "model": file.find::<&str>("general.name").ok().flatten().unwrap_or("model"),
        "model_bytes": bytes,
        "backends": prepared.devices.names(),
        "memory": prepared.backend_memory(),
        "taken": taken,
        "load_seconds": load_seconds,
        "expert_cache": subject.expert_cache(),
        "neurons": subject.neuron_use(),
        "neuron_slots": subject.neuron_slots(),
        "stats": statistics,
    });
    let report = Report {
        tests,
        gpu_layers: model.gpu_layers_text(),
        model: ModelFacts { title: prepared.title(), bytes },
        facts,
        load_seconds,
        threads: cpu.threads(),
        isa: cpu.isa().to_string(),
        devices: prepared.devices.names().iter().map(ToString::to_string).collect(),
    };
    Ok((report, statistics))
}

/// Loads the weights.
fn load(
    prepared: &Prepared,
    options: EngineOptions,
    recording: Option<&Recording>,
) -> Outcome<(Subject, f64)> {
    if !prepared.model.hyperparameters().encoder {
        let (mut engine, seconds) = prepared.engine()?;
        engine.observe(recording.map(Recording::observer));
        return Ok((Subject::Engine(Box::new(engine)), seconds));
    }
    if recording.is_some() {
        note!("quadriga: --trace and --stats have no effect: encoders are not observed");
    }
    let options =
        EmbedderOptions { pooling: Some(Pooling::Mean), engine: options, ..EmbedderOptions::default() };
    let (embedder, seconds) = prepared.embedder(options)?;
    Ok((Subject::Encoder(Box::new(embedder)), seconds))
}

/// A fixed sequence of varied ordinary tokens, the same for every engine that is compared.
fn tokens(vocabulary: usize, count: usize) -> Vec<u32> {
    let vocabulary = vocabulary.clamp(1, 40_000);
    (0..count).map(|k| ((k * 37 + 11) % vocabulary) as u32).collect()
}

/// Tokens of one topic after the other, each for so many tokens: token `t` is of topic `t % topics`.
fn tokens_on_topics(vocabulary: usize, count: usize, topics: usize, length: usize) -> Vec<u32> {
    let of_topic = (vocabulary / topics.max(1)).max(1);
    let token = |k: usize| (k * 37 + 11) % of_topic * topics + k / length % topics;
    (0..count).map(|k| token(k).min(vocabulary.saturating_sub(1)) as u32).collect()
}
