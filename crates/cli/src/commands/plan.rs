//! `quadriga plan`: where a model would go and what it would take, before anything is loaded.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use quadriga_llm::EngineOptions;
use quadriga_view::{Limits, Picture};

use crate::atomic_file::AtomicFile;
use crate::commands::plan_instance::{self, EffortLevel};
use crate::failure::{Failure, Outcome};
use crate::model_options::{ModelOptions, Prepared};
use crate::{known_limits, size};

/// What to plan, and how to show it.
#[derive(clap::Args)]
pub(crate) struct Plan {
    #[command(flatten)]
    model: ModelOptions,
    /// Also say for each node where it runs, and why
    #[arg(long)]
    nodes: bool,
    /// Write a page that shows the plan in any browser
    #[arg(long, value_name = "FILE.html")]
    html: Option<PathBuf>,
    /// Write a drawing of the plan
    #[arg(long, value_name = "FILE.svg")]
    svg: Option<PathBuf>,
    /// Print everything as JSON, or write it to a file
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-", conflicts_with = "nodes")]
    json: Option<PathBuf>,
    /// Print splits and copies in the dot language
    #[arg(long, conflicts_with_all = ["nodes", "json"])]
    dot: bool,
    /// Instead of a model, pack the storages in a file: `id,lower,upper,size` a line
    #[arg(long, value_name = "FILE.csv", conflicts_with_all = ["nodes", "dot", "model", "html", "svg"])]
    instance: Option<PathBuf>,
    /// How hard to try with --instance: fast, search or exact
    #[arg(long, value_enum, default_value = "fast", requires = "instance")]
    effort: EffortLevel,
    /// Say whether an --instance fits into so many bytes
    #[arg(long, value_name = "BYTES", value_parser = size::parse, requires = "instance")]
    capacity: Option<u64>,
}

/// Prints the forecast for the largest batch over a full cache.
pub(crate) fn plan(arguments: &Plan) -> Outcome {
    if let Some(instance) = &arguments.instance {
        return pack(arguments, instance);
    }
    let options = arguments.model.engine();
    let prepared = arguments.model.prepare(&options)?;
    let options = options.resolve(&prepared.model)?;
    let plan = &prepared.forecast;
    let mut out = io::stdout().lock();
    let json = arguments.json.as_deref();
    if json == Some(Path::new("-")) {
        writeln!(out, "{}", plan.to_json())?;
        return Ok(());
    }
    if json.is_some() || arguments.html.is_some() || arguments.svg.is_some() {
        return draw(arguments, &prepared, &options, &mut out);
    }
    if arguments.dot {
        write!(out, "{}", plan.to_dot())?;
        return Ok(());
    }
    writeln!(out, "context {}, batch {}, cache {}\n", options.context, options.batch, options.cache)?;
    let columns = ["device", "weights", "file map", "cache", "compute", "in all", "free"];
    let [first, rest @ ..] = columns;
    write!(out, "{first:10}")?;
    rest.iter().try_for_each(|column| write!(out, " {column:>11}"))?;
    writeln!(out)?;
    for (bytes, backend) in plan.bytes().iter().zip(plan.backends()) {
        write!(out, "{:10}", bytes.backend)?;
        for part in [bytes.weights, bytes.mapped, bytes.state, bytes.compute, bytes.total()] {
            write!(out, " {:>11}", size::text(part))?;
        }
        writeln!(out, " {:>11}", backend.device().free_bytes.map_or("unknown".to_owned(), size::text))?;
    }
    writeln!(out)?;
    if arguments.nodes {
        write!(out, "{plan:#}")?
    } else {
        write!(out, "{plan}")?
    }
    Ok(())
}

/// Writes the files that were asked for, and says in words what they show.
fn draw(arguments: &Plan, prepared: &Prepared, options: &EngineOptions, out: &mut dyn Write) -> Outcome {
    let plan = &prepared.forecast;
    let known = known_limits::load(arguments.model.cache_dir());
    let limits: Vec<Limits> = plan.backends().iter().map(|backend| Limits::of(&**backend, &known)).collect();
    let EngineOptions { context, batch, cache, .. } = options;
    let about = format!("{batch} tokens at once, at the end of a context of {context}; cache in {cache}");
    let picture = Picture::new(prepared.title(), plan.explain()).about(about).limits(&limits);
    let files: [(&Option<PathBuf>, &dyn Fn() -> String); 3] = [
        (&arguments.html, &|| picture.html()),
        (&arguments.svg, &|| picture.svg()),
        (&arguments.json, &|| plan.to_json()),
    ];
    for (path, make) in files {
        if let Some(path) = path {
            write(path, &make())?;
        }
    }
    picture.sentences().iter().try_for_each(|sentence| writeln!(out, "{sentence}"))?;
    Ok(())
}

/// Writes a file that is seen under its name only once it is whole.
fn write(path: &Path, text: &str) -> Outcome {
    let mut file = AtomicFile::create(path)?;
    file.write_all(text.as_bytes()).map_err(|error| Failure::file("write", path, &error))?;
    file.publish()
}

/// Packs storages that a file lists.
fn pack(arguments: &Plan, instance: &Path) -> Outcome {
    let json = arguments.json.is_some();
    let text = plan_instance::run(instance, arguments.effort, arguments.capacity, json)
        .map_err(|error| Failure::Message(error.to_string()))?;
    match &arguments.json {
        Some(path) if path != Path::new("-") => write(path, &text),
        _ => Ok(io::stdout().lock().write_all(text.as_bytes())?),
    }
}
