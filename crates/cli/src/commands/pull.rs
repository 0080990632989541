//! `quadriga pull`, `list`, `rm` and `show`: models of a hub in the cache.

use std::io::{self, Write};
use std::path::PathBuf;

use quadriga_gguf::{File, Summary};
use quadriga_models::hub::{
    CachedFile, CachedModel, DEFAULT, HubError, OtherFiles, OtherKind, PartialDownload, RepositoryName,
};
use serde_json::json;

use crate::failure::{Failure, Outcome};
use crate::hub::HubAccess;
use crate::model_options::ModelOptions;
use crate::terminal::{self, Escaping};
use crate::{fetch, interrupt, size};

/// Arguments of `quadriga pull`.
#[derive(clap::Args)]
pub(crate) struct PullArgs {
    /// Repository of Hugging Face's hub and type of quantization: ORG/REPO[:QUANT], or default
    #[arg(value_name = "ORG/REPO[:QUANT]")]
    name: String,
    /// Branch, tag or commit, also ORG/REPO@REVISION [default: main]
    #[arg(long, value_name = "REVISION")]
    revision: Option<String>,
    /// Use models in the cache only [default: HF_HUB_OFFLINE]
    #[arg(long)]
    offline: bool,
    /// Print no progress
    #[arg(short, long)]
    quiet: bool,
    /// Folder of the models [default: QUADRIGA_CACHE, or the user's cache folder]
    #[arg(long, value_name = "FOLDER")]
    cache_dir: Option<PathBuf>,
}

/// Arguments of `quadriga list`.
#[derive(clap::Args)]
pub(crate) struct ListArgs {
    /// Print the list as JSON
    #[arg(long)]
    json: bool,
    /// Folder of the models [default: QUADRIGA_CACHE, or the user's cache folder]
    #[arg(long, value_name = "FOLDER")]
    cache_dir: Option<PathBuf>,
}

/// Arguments of `quadriga rm`.
#[derive(clap::Args)]
pub(crate) struct RemoveArgs {
    /// Models, or repositories with all of their models; with @REVISION (or the first digits of a commit) those of that one only
    #[arg(value_name = "ORG/REPO[@REVISION][:QUANT]", required = true)]
    names: Vec<String>,
    /// Folder of the models [default: QUADRIGA_CACHE, or the user's cache folder]
    #[arg(long, value_name = "FOLDER")]
    cache_dir: Option<PathBuf>,
}

/// Arguments of `quadriga show`.
#[derive(clap::Args)]
pub(crate) struct ShowArgs {
    /// Model in the cache
    #[arg(value_name = "ORG/REPO[@REVISION][:QUANT]")]
    name: String,
    /// Folder of the models [default: QUADRIGA_CACHE, or the user's cache folder]
    #[arg(long, value_name = "FOLDER")]
    cache_dir: Option<PathBuf>,
}

/// Downloads a model and prints the path of its file.
pub(crate) fn pull(arguments: &PullArgs) -> Outcome {
    let access = HubAccess {
        cache: arguments.cache_dir.as_deref(),
        offline: arguments.offline,
        quiet: arguments.quiet,
    };
    let path = if arguments.name == DEFAULT {
        if let Some(revision) = &arguments.revision {
            return Err(Failure::Usage(format!(
                "--revision {revision}: the default model has one version only"
            )));
        }
        let ctrl_c = interrupt::catch();
        fetch::default_model(access.cache, access.offline, arguments.quiet, ctrl_c.flag())?
    } else {
        let mut name: RepositoryName = arguments.name.parse()?;
        if let Some(revision) = &arguments.revision {
            if let Some(other) = name.explicit_revision().filter(|other| other != revision) {
                return Err(Failure::Usage(format!(
                    "@{other} and --revision {revision} are two revisions; give one"
                )));
            }
            name = name.with_revision(revision)?;
        }
        let options = ModelOptions::detected(arguments.cache_dir.clone());
        access.pull(&name, &|outline| options.fits(outline))?
    };
    Ok(writeln!(io::stdout(), "{}", terminal::escaped(&path.display().to_string()))?)
}

/// Lists the models in the cache.
pub(crate) fn list(arguments: &ListArgs) -> Outcome {
    let cache = access(arguments.cache_dir.as_ref()).cache()?;
    let models = cache.models()?;
    let (sources, parts): (Vec<OtherFiles>, Vec<OtherFiles>) =
        cache.other_files()?.into_iter().partition(|others| others.kind == OtherKind::Safetensors);
    let rows = models.iter().map(|model| (full_name(model), &model.commit, model.bytes, &model.files)).chain(
        sources.iter().map(|source| {
            let name =
                format!("{} (safetensors)", with_revision(&source.repository, source.revision.as_ref()));
            (name, &source.commit, source.bytes, &source.files)
        }),
    );
    let mut out = io::stdout().lock();
    if arguments.json {
        let file = |file: &CachedFile| json!({ "name": file.name, "path": file.path, "bytes": file.bytes, "sha256": file.sha256, "shared": file.is_shared });
        let rows = rows.map(|(name, commit, bytes, files)| {
            let files: Vec<_> = files.iter().map(file).collect();
            json!({ "name": name, "commit": commit, "bytes": bytes, "files": files })
        });
        return Ok(writeln!(out, "{}", terminal::json(&json!(rows.collect::<Vec<_>>())))?);
    }
    let partial = cache.partial_downloads();
    // Names of files are those of whoever made the repository.
    let rows: Vec<_> = rows
        .map(|(name, commit, bytes, files)| (terminal::escaped(&name).into_owned(), commit, bytes, files))
        .collect();
    if rows.is_empty() {
        if partial.is_empty() && parts.is_empty() {
            note!("no models; `quadriga pull ORG/REPO:QUANT` gets one");
        }
    } else {
        let width = rows.iter().map(|(name, ..)| name.chars().count()).max().unwrap_or(0).max(4);
        writeln!(out, "{:width$}  {:>10}  COMMIT", "NAME", "SIZE")?;
        for (name, commit, bytes, files) in rows {
            let commit = terminal::escaped(commit.get(..8).unwrap_or(commit));
            let shared = files.first().is_some_and(|file| file.is_shared);
            let shared = if shared { "  in Hugging Face's cache" } else { "" };
            writeln!(out, "{name:width$}  {:>10}  {commit}{shared}", size::text(bytes))?;
        }
    }
    explain_parts(&parts);
    explain_partial(&partial);
    Ok(())
}

/// Names the models of which some parts are missing: they take space, and cannot be run.
fn explain_parts(parts: &[OtherFiles]) {
    for model in parts {
        let OtherKind::Parts { quant, count } = &model.kind else { continue };
        let name = format!("{}:{quant}", with_revision(&model.repository, model.revision.as_ref()));
        let (found, size) = (model.files.len(), size::text(model.bytes));
        note!(
            "incomplete: {found} of {count} parts of {name}, {size}; `quadriga pull {name}` gets the others, `quadriga rm {name}` removes them"
        );
    }
}

/// Names the downloads that were not completed: they take space, and are no models.
fn explain_partial(partial: &[PartialDownload]) {
    for download in partial {
        let PartialDownload { repository, file, bytes, total, is_busy } = download;
        let (bytes, total) = (size::text(*bytes), size::text(*total));
        if *is_busy {
            note!("downloading: {file} of {repository}, {bytes} of {total}");
        } else {
            note!(
                "incomplete: {file} of {repository}, {bytes} of {total}; `quadriga pull` continues it, `quadriga rm {repository}` removes it"
            );
        }
    }
}

/// Removes models from the cache.
pub(crate) fn remove(arguments: &RemoveArgs) -> Outcome {
    let cache = access(arguments.cache_dir.as_ref()).cache()?;
    for name in &arguments.names {
        let freed = if name == DEFAULT { cache.remove_default()? } else { cache.remove(&name.parse()?)? };
        note!("removed {name}, {} freed", size::text(freed));
    }
    Ok(())
}

/// Prints where a model is, what it is, and a summary of its file.
pub(crate) fn show(arguments: &ShowArgs) -> Outcome {
    let cache = access(arguments.cache_dir.as_ref()).cache()?;
    let missing = || HubError::NotCached { name: arguments.name.clone() };
    let found = match arguments.name.as_str() {
        DEFAULT => cache.models()?.into_iter().find(|model| model.repository == DEFAULT),
        name => cache.find(&name.parse()?)?,
    };
    let model = found.ok_or_else(missing)?;
    let mut out = io::stdout().lock();
    let out = &mut Escaping(&mut out);
    writeln!(out, "{:<16} {}", "model", full_name(&model))?;
    writeln!(out, "{:<16} {}", "commit", model.commit)?;
    for file in &model.files {
        let shared = if file.is_shared { " (in Hugging Face's cache)" } else { "" };
        writeln!(out, "{:<16} {}{shared}", "file", file.path.display())?;
        if let Some(sum) = &file.sha256 {
            writeln!(out, "{:<16} {sum}", "sha256")?;
        }
    }
    let first = model.files.first().ok_or_else(missing)?;
    Ok(write!(out, "{}", Summary::of(&File::open(&first.path)?))?)
}

fn access(cache: Option<&PathBuf>) -> HubAccess<'_> {
    HubAccess { cache: cache.map(PathBuf::as_path), offline: true, quiet: true }
}

/// The name that commands take.
fn full_name(model: &CachedModel) -> String {
    match model.repository.as_str() {
        DEFAULT => DEFAULT.to_owned(),
        repository => format!("{}:{}", with_revision(repository, model.revision.as_ref()), model.quant),
    }
}

fn with_revision(repository: &str, revision: Option<&String>) -> String {
    match revision {
        Some(revision) => format!("{repository}@{revision}"),
        None => repository.to_owned(),
    }
}
