//! `quadriga plan`: placement, splits and memory of a model, before anything is loaded.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use quadriga_cluster::Planned;
use quadriga_graph::{DType, PAGE_SLOTS};
use quadriga_llm::placement::Straggler;
use quadriga_llm::serving::BatcherOptions;
use quadriga_llm::{EngineOptions, Link, Parallelism};
use quadriga_runtime::{Backend, BackendLine, Explanation, Plan};
use quadriga_view::format::plural;
use quadriga_view::{Limits, Picture, SplitPicture};

use crate::atomic_file::AtomicFile;
use crate::commands::plan_instance::{self, EffortLevel};
use crate::commands::plan_placement::{PlacementReport, PlanWithPlacement};
use crate::commands::plan_ranks::RankReport;
use crate::commands::synth::{self, Preset};
use crate::failure::{Failure, Outcome};
use crate::model_options::ModelOptions;
use crate::prepared_model::Prepared;
use crate::terminal::{self, Escaping};
use crate::{known_limits, serving_options, size, values};

/// Arguments of `quadriga plan`.
#[derive(clap::Args)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) model: ModelOptions,
    /// GGUF file, as with -m
    #[arg(value_name = "MODEL", conflicts_with_all = ["model", "hf_repo", "instance"])]
    file: Option<PathBuf>,
    /// Plan a known model shape without a file, as synth writes it
    #[arg(long, value_enum, conflicts_with_all = ["model", "hf_repo", "file", "instance"])]
    preset: Option<Preset>,
    /// Data type of the matrices of --preset
    #[arg(long = "type", value_name = "TYPE", value_parser = synth::matrix_type, requires = "preset")]
    dtype: Option<DType>,
    /// Plan for N requests at once, with a KV cache in pages as batch and serve have it, also -np; with --ranks, the speed of all of them
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = values::at_least_one)]
    parallel: Option<usize>,
    /// KV cache of --parallel in tokens [default: as of batch]
    #[arg(
        long,
        value_name = "N",
        requires = "parallel",
        allow_negative_numbers = true,
        value_parser = values::at_least_one
    )]
    kv_tokens: Option<usize>,
    /// Plan for N ranks of equal machines, without starting any: what each holds, and the speed to expect
    #[arg(
        long,
        value_name = "N",
        allow_negative_numbers = true,
        value_parser = values::at_least_one,
        conflicts_with = "instance"
    )]
    ranks: Option<usize>,
    /// Show the plan of one rank of --ranks, counted from 0, as that of one machine
    #[arg(
        long,
        value_name = "N",
        requires = "ranks",
        allow_negative_numbers = true,
        value_parser = values::whole
    )]
    rank: Option<usize>,
    /// Simulate the ranks of --ranks, too: clocks execute their plans over the link
    #[arg(long, requires = "ranks", conflicts_with = "rank")]
    simulate: bool,
    /// Slow down a rank of --simulate: a factor, and the rank or random for another one in each step, such as 1.2,3
    #[arg(long, value_name = "FACTOR", requires = "simulate", value_parser = Straggler::from_str)]
    straggler: Option<Straggler>,
    /// List every node with its device and the reason for it
    #[arg(long)]
    nodes: bool,
    /// Write an interactive page of the plan
    #[arg(long, value_name = "FILE.html")]
    html: Option<PathBuf>,
    /// Write a drawing of the plan
    #[arg(long, value_name = "FILE.svg")]
    svg: Option<PathBuf>,
    /// Print the plan as JSON, or write it to a file
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-", conflicts_with = "nodes")]
    json: Option<PathBuf>,
    /// Print splits and copies in the DOT language
    #[arg(long, conflicts_with_all = ["nodes", "json"])]
    dot: bool,
    /// Show the nodes of one split, by number: in the DOT language, or as --svg or --html
    #[arg(
        long,
        value_name = "N",
        allow_negative_numbers = true,
        value_parser = values::whole,
        conflicts_with_all = ["nodes", "json"]
    )]
    split: Option<usize>,
    /// Check the plan with code that is independent of the planner's
    #[arg(long)]
    check: bool,
    /// Pack the buffers of a CSV file with columns id,lower,upper,size instead of planning a model
    #[arg(
        long,
        value_name = "FILE.csv",
        conflicts_with_all = ["nodes", "dot", "model", "html", "svg"],
        help_heading = PACKING
    )]
    instance: Option<PathBuf>,
    /// Packing effort of --instance [default: fast]
    #[arg(long, value_enum, help_heading = PACKING)]
    effort: Option<EffortLevel>,
    /// Report whether the packing of --instance fits into this many bytes
    #[arg(
        long,
        value_name = "BYTES",
        allow_negative_numbers = true,
        value_parser = size::parse,
        help_heading = PACKING
    )]
    capacity: Option<u64>,
}

impl PlanArgs {
    /// An error if a rank is missing, or is not one of those that there are.
    fn check_ranks(&self) -> Outcome {
        let (Some(ranks), rank) = (self.ranks, self.rank) else { return Ok(()) };
        if let Some(rank) = rank.filter(|rank| *rank >= ranks) {
            let last = ranks.saturating_sub(1);
            return Err(Failure::Usage(format!("--rank {rank}: --ranks {ranks} has ranks 0 to {last}")));
        }
        let of_one = [
            ("--nodes", self.nodes),
            ("--dot", self.dot),
            ("--html", self.html.is_some()),
            ("--svg", self.svg.is_some()),
            ("--split", self.split.is_some()),
            ("--check", self.check),
        ];
        match of_one.into_iter().find(|(_, is_given)| *is_given && rank.is_none()) {
            Some((option, _)) => {
                Err(Failure::Usage(format!("{option} shows one plan: name a rank of --ranks with --rank N")))
            }
            None => Ok(()),
        }
    }
}

/// Heading of the help text.
const PACKING: &str = "Packing options";

/// Prints the plan of the largest batch over a full KV cache.
pub(crate) fn plan(arguments: &PlanArgs) -> Outcome {
    if let Some(instance) = &arguments.instance {
        return pack(arguments, instance);
    }
    for (option, is_given) in
        [("--effort", arguments.effort.is_some()), ("--capacity", arguments.capacity.is_some())]
    {
        if is_given {
            return Err(Failure::Usage(format!("{option} needs --instance FILE.csv, which it is for")));
        }
    }
    arguments.check_ranks()?;
    let folder =
        tempfile::tempdir().map_err(|error| Failure::file("create", &std::env::temp_dir(), &error))?;
    let outline = arguments.preset.map(|preset| synth::outline(preset, arguments.dtype, folder.path()));
    let outline = outline.transpose()?;
    let model = arguments.model.with_file(arguments.file.as_deref().or(outline.as_deref()));
    if model.link.is_some() && arguments.ranks.is_none() {
        return Err(Failure::Usage("--link needs --ranks N: one machine exchanges nothing".to_owned()));
    }
    let (opened, opening) = model.open()?;
    let devices = model.open_devices()?;
    let engine = match arguments.parallel {
        None => model.engine(),
        Some(parallel) => {
            let tokens = arguments.kv_tokens;
            let engine = serving_options::paged(&opened, model.engine(), parallel, tokens, &devices)?;
            BatcherOptions { engine, ..BatcherOptions::default() }.for_model(&opened)?.engine
        }
    };
    // Ranks hold parts of what the whole would need.
    let whole = if arguments.ranks.is_some() { model.silent() } else { model.clone() };
    let prepared = whole.place_on(opened, opening, &engine, Some(devices))?;
    let prepared = if let Some(ranks) = arguments.ranks {
        let rates = |ranks: usize| known_limits::rates_of_ranks(model.cache_dir(), &prepared.devices, ranks);
        let (requests, link) = (arguments.parallel.unwrap_or(1), model.link.unwrap_or(Link::NETWORK));
        let mut report = RankReport::new(&prepared, model.parallelism, (ranks, requests), (link, &rates))?;
        if arguments.simulate {
            report.simulate(&prepared, &rates, arguments.straggler)?;
        }
        let Some(rank) = arguments.rank else {
            let free = prepared.devices.cpu().device().free_bytes;
            if let Some(shortage) = report.shortage(free).filter(|_| !model.quiet) {
                note!("quadriga: {shortage}");
            }
            return match &arguments.json {
                Some(path) if path != Path::new("-") => AtomicFile::write_text(path, &report.json()),
                Some(_) => Ok(writeln!(io::stdout().lock(), "{}", report.json())?),
                None => report.print(&mut Escaping(io::stdout().lock())),
            };
        };
        let grid = report.grid();
        let parallelism = Parallelism {
            tensor: Some(grid.tensor),
            pipeline: Some(grid.pipeline),
            cache: Some(prepared.options.cache_rows(&prepared.model)?),
            ..model.parallelism
        };
        let communicator = Arc::new(Planned::new(rank, ranks, grid.tensor));
        let Prepared { model: opened, devices, options, opening, .. } = prepared;
        let part = opened.with_ranks(communicator, parallelism)?;
        if let Some(share) = part.ranks().filter(|_| !model.quiet) {
            note!("quadriga: rank {rank} of {ranks} ({grid}) has {}", share.describe());
        }
        model.place_on(part, opening, &options, Some(devices))?
    } else {
        prepared
    };
    let plan = &prepared.placed.forecast;
    if arguments.check {
        plan.check().map_err(|error| Failure::Message(format!("invalid plan: {error}")))?;
        note!("the plan breaks no rule");
    }
    let mut out = io::stdout().lock();
    if let Some(split) = arguments.split {
        return draw_split(arguments, plan, split, &mut out);
    }
    if arguments.dot {
        write!(out, "{}", plan.to_dot())?;
        return Ok(());
    }
    let explanation = plan.explain();
    let report = PlacementReport::new(&prepared, &explanation)?;
    let json = || {
        let all = PlanWithPlacement { plan: &explanation, placement: &report };
        terminal::json(&serde_json::to_string(&all).unwrap_or_default())
    };
    if arguments.json.as_deref() == Some(Path::new("-")) {
        writeln!(out, "{}", json())?;
        return Ok(());
    }
    let picture = picture(&model, &prepared, explanation.clone());
    let files: [(&Option<PathBuf>, &dyn Fn() -> String); 3] = [
        (&arguments.html, &|| picture.html()),
        (&arguments.svg, &|| picture.svg()),
        (&arguments.json, &json),
    ];
    let mut wrote = Vec::new();
    for (path, make) in files {
        if let Some(path) = path {
            AtomicFile::write_text(path, &make())?;
            wrote.push(path);
        }
    }
    if model.quiet && !wrote.is_empty() {
        return Ok(());
    }
    let mut out = Escaping(out);
    writeln!(out, "{}", about(&prepared))?;
    for line in kept_states(&prepared).into_iter().chain(pages(&prepared, &explanation)) {
        writeln!(out, "{line}")?;
    }
    writeln!(out)?;
    memory(&explanation, &prepared, &mut out)?;
    if !model.quiet {
        writeln!(out)?;
        report.print_classes(&explanation, &mut out)?;
        writeln!(out)?;
        report.print_estimate(&explanation, &mut out)?;
        writeln!(out)?;
        picture.overview().iter().try_for_each(|sentence| writeln!(out, "{sentence}"))?;
    }
    if arguments.nodes {
        nodes(&explanation, &mut out)?;
    }
    for path in wrote {
        note!("wrote {}", path.display());
    }
    Ok(())
}

/// What the plan is for.
fn about(prepared: &Prepared) -> String {
    let EngineOptions { context, batch, cache_keys: keys, cache_values: values, .. } = &prepared.options;
    let hyper = prepared.model.hyperparameters();
    let batch = plural(*batch, "token", "tokens");
    if hyper.encoder {
        return format!(
            "encoder without KV cache, texts of up to {context} tokens, planned for a batch of {batch}"
        );
    }
    let types = match () {
        () if hyper.has_latent_cache() => format!("{keys} (latent)"),
        () if keys == values => keys.to_string(),
        () => format!("{keys} keys and {values} values"),
    };
    format!("context {context}, KV cache {types}, planned for a prompt batch of {batch}")
}

/// Lines about layers that do not keep the whole context, and their checkpoints.
fn kept_states(prepared: &Prepared) -> Vec<String> {
    let (options, model) = (&prepared.options, &prepared.model);
    let checkpoints = |bytes: u64, count: usize| match count {
        0 => String::new(),
        count => {
            let count = plural(count, "checkpoint", "checkpoints");
            format!(", {} of it for {count} (--checkpoints)", size::text(bytes))
        }
    };
    let windows = options.window_savings(model).map(|windows| {
        let [own, full] = [windows.own, windows.full].map(size::text);
        let layers = plural(windows.layers, "layer", "layers");
        let kept = checkpoints(windows.checkpoints, options.kept_windows());
        format!("sliding windows in {layers}: {own} of KV cache instead of {full}{kept}")
    });
    let recurrent = options.recurrent_states(model).map(|states| {
        let layers = plural(states.layers, "layer", "layers");
        let kept = checkpoints(states.checkpoints, options.kept_states());
        let bytes = size::text(states.bytes);
        format!("recurrent states of {layers}: {bytes} whatever the context{kept}")
    });
    let layers = model.hyperparameters().layers.iter().enumerate();
    let with_slots = layers.filter(|(layer, _)| !options.resident_experts.contains(*layer));
    let experts: Vec<usize> = with_slots.filter_map(|(_, layer)| Some(layer.experts?.count)).collect();
    let cache = (options.expert_slots > 0).then(|| {
        let slots = plural(options.expert_slots, "slot", "slots");
        let bytes = prepared.placed.expert_slot_bytes.iter().sum();
        let (all, layers) = (experts.iter().sum::<usize>(), plural(experts.len(), "layer", "layers"));
        format!("expert cache: {slots} on the GPU for {all} experts of {layers}, {}", size::text(bytes))
    });
    windows.into_iter().chain(recurrent).chain(cache).collect()
}

/// A line about the KV cache in pages: what it holds, and how much would fit.
fn pages(prepared: &Prepared, plan: &Explanation) -> Option<String> {
    let EngineOptions { pages, sequences, .. } = prepared.options;
    let tokens = pages * PAGE_SLOTS;
    let states: u64 = plan.backends.iter().map(|backend| backend.bytes.state).sum();
    if pages == 0 || states == 0 {
        return None;
    }
    // What each device has left beside all that is not KV cache.
    let fit = |BackendLine { bytes, free, .. }: &BackendLine| {
        let rest = free.as_ref()?.saturating_sub(bytes.total() - bytes.state);
        (bytes.state > 0).then(|| (tokens as u128 * u128::from(rest) / u128::from(bytes.state)) as u64)
    };
    let most = plan.backends.iter().filter_map(fit).min();
    let most = most.map_or(String::new(), |most| format!("; about {most} tokens would fit (--kv-tokens)"));
    Some(format!(
        "KV cache in {} of {PAGE_SLOTS} tokens: {tokens} tokens of up to {} together{most}",
        plural(pages, "page", "pages"),
        plural(sequences, "request", "requests")
    ))
}

/// A picture of the plan with the speeds of the devices.
fn picture(model: &ModelOptions, prepared: &Prepared, explanation: Explanation) -> Picture {
    let known = known_limits::load(model.cache_dir());
    let backends = prepared.placed.forecast.backends();
    let limits: Vec<Limits> = backends.iter().map(|backend| Limits::of(&**backend, &known)).collect();
    Picture::new(prepared.title(), explanation).about(about(prepared)).limits(&limits)
}

/// Prints a table of each device's memory; with a column for slots of experts, where there are any.
fn memory(plan: &Explanation, prepared: &Prepared, out: &mut dyn Write) -> io::Result<()> {
    let (slots, staging) = (&prepared.placed.expert_slot_bytes, &prepared.placed.expert_staging_bytes);
    write!(out, "{:10} {:>11} {:>11} {:>11}", "device", "weights", "mmap", "KV cache")?;
    if !slots.is_empty() {
        write!(out, " {:>12}", "expert cache")?;
    }
    writeln!(out, " {:>11} {:>11} {:>11}", "compute", "total", "free")?;
    for (number, BackendLine { bytes, free, .. }) in plan.backends.iter().enumerate() {
        write!(out, "{:10}", bytes.backend)?;
        let [own, staged] = [slots, staging].map(|bytes| bytes.get(number).copied().unwrap_or(0));
        for part in [bytes.weights.saturating_sub(own), bytes.mapped, bytes.state] {
            write!(out, " {:>11}", size::text(part))?;
        }
        if !slots.is_empty() {
            write!(out, " {:>12}", size::text(own + staged))?;
        }
        write!(
            out,
            " {:>11} {:>11}",
            size::text(bytes.compute + bytes.work),
            size::text(bytes.total() + staged)
        )?;
        writeln!(out, " {:>11}", free.map_or("unknown".to_owned(), size::text))?;
    }
    Ok(())
}

/// Prints every split with the copies that it reads and its nodes.
fn nodes(plan: &Explanation, out: &mut dyn Write) -> io::Result<()> {
    for (number, line) in plan.splits.iter().enumerate() {
        let backend = plan.backends.get(line.split.backend).map_or("", |backend| &backend.bytes.backend);
        writeln!(out, "\nsplit {number} on {backend}: {}", plural(line.split.node_count, "node", "nodes"))?;
        for copy in line.split.inputs.iter().filter_map(|copy| plan.copies.get(*copy)) {
            let from = plan.backends.get(copy.copy.from).map_or("", |backend| &backend.bytes.backend);
            let kind = if copy.streamed { "streams" } else { "reads" };
            let (name, bytes) = (copy.name.escape_debug(), size::text(copy.copy.bytes as u64));
            let at_most = if copy.copy.selected_by.is_some() { "at most " } else { "" };
            writeln!(out, "  {kind} {name} from {from} ({at_most}{bytes})")?;
        }
        for node in plan.nodes.iter().filter(|node| node.split == number) {
            let name = node.name.escape_debug().to_string();
            writeln!(out, "  {:>6} {:<12} {name:<32} {}", node.node, node.operation, node.why)?;
        }
    }
    Ok(())
}

/// Writes a picture of one split, or prints it in the DOT language.
fn draw_split(arguments: &PlanArgs, plan: &Plan, split: usize, out: &mut dyn Write) -> Outcome {
    let Some(picture) = SplitPicture::new(plan, split) else {
        let count = plan.splits().splits.len();
        return Err(Failure::Usage(format!(
            "--split {split}: the plan has splits 0 to {}",
            count.max(1) - 1
        )));
    };
    for (path, text) in [(&arguments.svg, picture.svg()), (&arguments.html, picture.html())] {
        if let Some(path) = path {
            AtomicFile::write_text(path, &text)?;
            if !arguments.model.quiet {
                note!("wrote {}", path.display());
            }
        }
    }
    if arguments.dot || (arguments.svg.is_none() && arguments.html.is_none()) {
        write!(out, "{}", picture.dot())?;
    }
    Ok(())
}

/// Packs the buffers of a CSV file.
fn pack(arguments: &PlanArgs, instance: &Path) -> Outcome {
    let json = arguments.json.is_some();
    let text =
        plan_instance::run(instance, arguments.effort.unwrap_or(EffortLevel::Fast), arguments.capacity, json)
            .map_err(|error| Failure::Message(error.to_string()))?;
    match &arguments.json {
        Some(path) if path != Path::new("-") => AtomicFile::write_text(path, &text),
        _ => Ok(io::stdout().lock().write_all(text.as_bytes())?),
    }
}
