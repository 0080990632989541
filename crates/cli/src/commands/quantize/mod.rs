//! `quadriga quantize`: writes a model with smaller types.

mod check;

use std::path::{Path, PathBuf};
use std::time::Instant;

use quadriga_gguf::File;
use quadriga_graph::DType;
use quadriga_models::importance::ImportanceMatrix;
use quadriga_models::quantize::{
    FileType, FitBasis, PrunedLayers, QuantizeError, QuantizeHooks, QuantizeOptions, QuantizePlan,
    TensorType, WrittenTensor, fit, output_paths, parse_override, parse_type, quantize_file,
};
use quadriga_models::{Error, check_output};
use quadriga_view::format::plural;

use crate::commands::perplexity::read_text;
use crate::failure::{Failure, Outcome};
use crate::hub_model::HubModel;
use crate::output_check::check_folder;
use crate::{interrupt, size, values};

/// Arguments of `quadriga quantize`.
#[derive(Clone, clap::Args)]
#[command(after_help = TYPES)]
pub(crate) struct QuantizeArgs {
    /// GGUF file to quantize; of a split model, any of its parts; or the word default; left out with -hf
    input: PathBuf,
    /// [OUT] TYPE [THREADS]: file to write [default: ggml-model-TYPE.gguf beside the input, or here with -hf], type or mix, number of
    /// threads
    #[arg(num_args = 0..=MAX_REST, value_names = ["OUT", "TYPE", "THREADS"])]
    rest: Vec<String>,
    #[command(flatten)]
    hub: HubModel,
    /// Importance matrix, by `quadriga imatrix` or llama.cpp
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,
    /// Use the importance matrix only for tensors with this in their name
    #[arg(long, value_name = "NAME", conflicts_with = "exclude_weights")]
    include_weights: Vec<String>,
    /// Do not use the importance matrix for tensors with this in their name
    #[arg(long, value_name = "NAME")]
    exclude_weights: Vec<String>,
    /// Type of all tensors whose name matches; the first that matches decides
    #[arg(long, value_name = "REGEX=TYPE")]
    tensor_type: Vec<String>,
    /// File with REGEX=TYPE, separated by spaces or lines
    #[arg(long, value_name = "FILE")]
    tensor_type_file: Option<PathBuf>,
    /// Type of output.weight
    #[arg(long, value_name = "TYPE", value_parser = tensor_type)]
    output_tensor_type: Option<DType>,
    /// Type of the token embedding
    #[arg(long, value_name = "TYPE", value_parser = tensor_type)]
    token_embedding_type: Option<DType>,
    /// Leave output.weight as it is
    #[arg(long)]
    leave_output_tensor: bool,
    /// Give all tensors the same type instead of a mix
    #[arg(long)]
    pure: bool,
    /// Layers to leave out, such as 20,21,22; the others are numbered again
    #[arg(long, value_name = "L,L…", value_parser = pruned_layers)]
    prune_layers: Option<PrunedLayers>,
    /// Quantize tensors that are quantized already; loses quality
    #[arg(long)]
    allow_requantize: bool,
    /// Write the same parts as the input has
    #[arg(long)]
    keep_split: bool,
    /// Set a key of the output's metadata; types: int, float, bool, str. A file that cannot be loaded with it is kept, and the
    /// exit code is 1
    #[arg(long, value_name = "KEY=TYPE:VALUE")]
    override_kv: Vec<String>,
    /// Print types and sizes, and write nothing
    #[arg(long)]
    dry_run: bool,
    /// Choose the type of each tensor so that the file has at most this size, with the least error; TYPE is left out. The input is run
    /// on a short text to measure which tensors matter, which takes its size in memory, unless --memory allows less or the machine
    /// has less: then all tensors count alike
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    fit: Option<u64>,
    /// With --fit: the size is the memory of a device that must hold weights, KV cache and buffers
    #[arg(long, requires = "fit")]
    vram: bool,
    /// With --vram: context size in tokens
    #[arg(short = 'c', long = "ctx-size", value_name = "N", default_value_t = 4096)]
    context: usize,
    /// Do not compare the result with the input on a short text
    #[arg(long)]
    no_check: bool,
    /// Text for the comparison [default: a short one of its own]
    #[arg(long, value_name = "FILE")]
    check_text: Option<PathBuf>,
    /// Memory for buffers [default: 256M], for the model that --fit runs [default: what is free], and for both models at the end, which
    /// are not compared if they need more [default: 1G]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    memory: Option<u64>,
    /// Number of threads [default: number of cores]
    #[arg(short, long, value_name = "N", value_parser = values::threads)]
    threads: Option<usize>,
    /// Print neither progress nor summary
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

/// The most arguments behind the input.
const MAX_REST: usize = 3;

const TYPES: &str = "\
Types and mixes, smallest first (Q3_K, Q4_K and Q5_K are short for the mixes in _M):
  IQ1_S IQ1_M TQ1_0 IQ2_XXS TQ2_0 IQ2_XS IQ2_S IQ2_M Q2_K_S Q2_K IQ3_XXS IQ3_XS IQ3_S IQ3_M Q3_K_S Q3_K_M
  Q3_K_L IQ4_XS MXFP4 MXFP4_MOE IQ4_NL NVFP4 Q4_0 Q4_K_S Q4_K_M Q4_1 Q5_0 Q5_K_S Q5_K_M Q5_1 Q6_K Q8_0
  F16 BF16 F32, and COPY, which leaves all tensors as they are
Types below 3 bits need an importance matrix to be of use.";

fn pruned_layers(text: &str) -> Result<PrunedLayers, String> {
    PrunedLayers::parse(text).map_err(|error| error.to_string())
}

fn tensor_type(name: &str) -> Result<DType, String> {
    parse_type(name).map_err(|error| error.to_string())
}

/// What is asked for: a type or mix, or a copy.
#[derive(Clone, Copy)]
struct AskedType {
    file_type: FileType,
    is_copy: bool,
}

impl AskedType {
    fn from_name(name: &str) -> Option<AskedType> {
        match name.eq_ignore_ascii_case("COPY") {
            // No tensor gets this type.
            true => FileType::from_name("F32").map(|file_type| AskedType { file_type, is_copy: true }),
            false => FileType::from_name(name).map(|file_type| AskedType { file_type, is_copy: false }),
        }
    }

    fn name(self) -> &'static str {
        if self.is_copy { "COPY" } else { self.file_type.name() }
    }
}

/// The output, the type and the number of threads.
struct Target {
    output: PathBuf,
    asked: AskedType,
    threads: Option<usize>,
}

impl QuantizeArgs {
    /// The same arguments without an input where that is a model of the hub: the first is not its file then.
    fn shifted(&self) -> Outcome<QuantizeArgs> {
        if !self.hub.is_given() {
            return Ok(self.clone());
        }
        let first = self.input.to_str().map(str::to_owned).ok_or_else(|| {
            Failure::Usage(format!("{}: the name is not valid UTF-8", self.input.display()))
        })?;
        let rest: Vec<String> = std::iter::once(first).chain(self.rest.iter().cloned()).collect();
        if rest.len() > MAX_REST {
            return Err(Failure::Usage(format!(
                "-hf names the model: leave {} out, or -hf",
                self.input.display()
            )));
        }
        Ok(QuantizeArgs { input: PathBuf::new(), rest, ..self.clone() })
    }

    /// The arguments behind the input: the output may be left out, as in llama.cpp's command.
    fn target(&self) -> Outcome<Target> {
        let unknown = |name: &str| {
            let names = FileType::all().map(FileType::name).chain(["COPY"]);
            let nearest = crate::similar::nearest(names, name);
            let hint =
                nearest.first().map_or_else(|| ".".to_owned(), |name| format!("; did you mean {name}?"));
            Failure::Usage(format!("{name:?} is no type{hint} {TYPES}"))
        };
        let threads = |text: &str| {
            values::threads(text).map_err(|reason| Failure::Usage(format!("THREADS {text:?} {reason}")))
        };
        let beside =
            |asked: AskedType| self.input.with_file_name(format!("ggml-model-{}.gguf", asked.name()));
        let rest: Vec<&str> = self.rest.iter().map(String::as_str).collect();
        if self.fit.is_some() {
            let [output] = rest.as_slice() else {
                return Err(Failure::Usage("--fit chooses the types: give IN OUT only".to_owned()));
            };
            // The types of tensors that cannot be chosen, and the number in the file, are those of this mix.
            let asked = AskedType::from_name("Q4_K_M").ok_or_else(|| unknown("Q4_K_M"))?;
            return Ok(Target { output: output.into(), asked, threads: self.threads });
        }
        let asked = |name: &str| AskedType::from_name(name).ok_or_else(|| unknown(name));
        let (output, asked, count) = match rest.as_slice() {
            [name] => (beside(asked(name)?), asked(name)?, None),
            [name, count] if AskedType::from_name(name).is_some() && count.parse::<usize>().is_ok() => {
                (beside(asked(name)?), asked(name)?, Some(threads(count)?))
            }
            [output, name] => (output.into(), asked(name)?, None),
            [output, name, count, ..] => (output.into(), asked(name)?, Some(threads(count)?)),
            [] => {
                return Err(Failure::Usage(format!(
                    "the type is missing: quadriga quantize IN [OUT] TYPE. {TYPES}"
                )));
            }
        };
        Ok(Target { output, asked, threads: self.threads.or(count) })
    }

    /// The options of the quantizer.
    fn options(&self, target: &Target) -> Outcome<QuantizeOptions> {
        let usage = |error: QuantizeError| Failure::Usage(error.to_string());
        let mut rules = self.tensor_type.clone();
        if let Some(path) = &self.tensor_type_file {
            let text = std::fs::read_to_string(path).map_err(|error| Failure::file("read", path, &error))?;
            rules.extend(text.split_whitespace().map(str::to_owned));
        }
        let mut options = QuantizeOptions::new(target.asked.file_type);
        options.only_copy = target.asked.is_copy;
        options.pruned = self.prune_layers.clone().unwrap_or_default();
        options.output_type = self.output_tensor_type;
        options.embedding_type = self.token_embedding_type;
        options.tensor_types =
            rules.iter().map(|rule| TensorType::parse(rule)).collect::<Result<_, _>>().map_err(usage)?;
        options.leave_output = self.leave_output_tensor;
        options.pure = self.pure;
        options.allow_requantize = self.allow_requantize;
        options.keep_split = self.keep_split;
        options.overrides = self
            .override_kv
            .iter()
            .map(|text| parse_override(text))
            .collect::<Result<_, _>>()
            .map_err(usage)?;
        options.include_weights.clone_from(&self.include_weights);
        options.exclude_weights.clone_from(&self.exclude_weights);
        options.threads = target.threads.unwrap_or_default();
        if let Some(memory) = self.memory {
            options.memory = usize::try_from(memory).unwrap_or(usize::MAX);
        }
        Ok(options)
    }
}

/// Plans, quantizes and reports.
pub(crate) fn quantize(arguments: &QuantizeArgs) -> Outcome {
    let arguments = &arguments.shifted()?;
    let target = arguments.target()?;
    let mut options = arguments.options(&target)?;
    let input = arguments.hub.path(&arguments.input, arguments.quiet)?;
    let arguments = &QuantizeArgs { input, ..arguments.clone() };
    let file = File::open(&arguments.input)?;
    let paths = output_paths(&file, &target.output, &options, arguments.imatrix.as_deref())?;
    let read = arguments.check_text.iter().chain(&arguments.tensor_type_file);
    for path in &paths {
        check_output(path, read.clone())?;
        check_folder(path)?;
    }
    if let Some(path) = &arguments.check_text {
        read_text(path)?;
    }
    let matrix = arguments.imatrix.as_deref().map(ImportanceMatrix::read).transpose()?;
    let plan = match arguments.fit {
        Some(size) => {
            let plan = fit_plan(arguments, &target, &file, &options, matrix.as_ref(), size)?;
            options.file_type = plan.main_type().unwrap_or(options.file_type);
            plan
        }
        None => QuantizePlan::new(&file, &options, matrix.as_ref())?,
    };
    if !arguments.quiet {
        warn(&options, &plan, matrix.as_ref());
    }
    if arguments.dry_run {
        return print_plan(&file, &plan);
    }
    let importance = matrix.as_ref().zip(arguments.imatrix.as_deref());
    write(arguments, &file, &target, &plan, &options, importance)?;
    if paths.len() > 1 && !arguments.quiet {
        paths.iter().for_each(|path| note!("wrote {}", path.display()));
    }
    if !options.overrides.is_empty() {
        check::check_loadable(&arguments.input, &paths)?;
    }
    // Nobody would see what it finds, and a copy is no other model.
    let is_same = options.only_copy && options.pruned.is_empty();
    if arguments.no_check || arguments.quiet || is_same {
        return Ok(());
    }
    // What is mapped counts as memory.
    drop(file);
    drop(matrix);
    check::check(arguments, &target, &paths)
}

/// A plan that fits in a size: of the file, or of a device's memory.
fn fit_plan(
    arguments: &QuantizeArgs,
    target: &Target,
    file: &File,
    options: &QuantizeOptions,
    matrix: Option<&ImportanceMatrix>,
    size: u64,
) -> Outcome<QuantizePlan> {
    // Metadata and names; in a device's memory, what is there beside weights.
    let alignment = u64::from(file.alignment());
    let tensors: u64 =
        file.tensors().map(|tensor| (tensor.byte_len() as u64).next_multiple_of(alignment)).sum();
    let beside = match arguments.vram {
        true => check::memory_beside_weights(&arguments.input, arguments.context)?,
        false => file.byte_len().saturating_sub(tensors) + 4096,
    };
    let plan = QuantizePlan::new(file, options, matrix)?;
    let sensitivities = check::sensitivities(arguments, target, &plan)?;
    let ctrl_c = interrupt::catch_writing();
    let basis = FitBasis { importance: matrix, sensitivities: sensitivities.as_ref() };
    let plan = fit(file, options, basis, size.saturating_sub(beside), &|| ctrl_c.is_pressed());
    match plan {
        _ if ctrl_c.is_pressed() => Err(Failure::Interrupted),
        Err(Error::Quantize(QuantizeError::TooSmall { smallest, .. })) => {
            let (place, others, advice) = match arguments.vram {
                true => (" of memory", "KV cache and buffers", "; -c N sets a smaller context"),
                false => ("", "names and metadata", ""),
            };
            Err(Failure::Message(format!(
                "--fit {}: the model needs at least {}{place}, {} for weights of the smallest types and {} for {others}{advice}",
                size::text(size),
                size::text(smallest.saturating_add(beside)),
                size::text(smallest),
                size::text(beside)
            )))
        }
        plan => Ok(plan?),
    }
}

fn write(
    arguments: &QuantizeArgs,
    file: &File,
    target: &Target,
    plan: &QuantizePlan,
    options: &QuantizeOptions,
    importance: Option<(&ImportanceMatrix, &Path)>,
) -> Outcome {
    let started = Instant::now();
    let ctrl_c = interrupt::catch_writing();
    let (total, mut done, mut bytes) = (plan.tensors.len(), 0, 0);
    let bar = (!arguments.quiet).then(|| indicatif::ProgressBar::new(plan.byte_len()));
    let mut progress = |tensor: &WrittenTensor| {
        done += 1;
        bytes += tensor.plan.byte_len();
        if let Some(bar) = &bar {
            bar.set_message(format!("{done}/{total} {}", tensor.plan.name));
            bar.set_position(bytes);
        }
    };
    let cancelled = || ctrl_c.is_pressed();
    let mut hooks = QuantizeHooks { progress: &mut progress, cancelled: &cancelled };
    let written = quantize_file(file, &target.output, plan, options, importance, &mut hooks);
    if let Some(bar) = &bar {
        bar.finish_and_clear();
    }
    if ctrl_c.is_pressed() {
        return Err(Failure::Interrupted);
    }
    written?;
    if !arguments.quiet {
        note!(
            "wrote {}: {} in place of {}, {:.2} bits per weight, {:.1} s",
            target.output.display(),
            size::text(plan.byte_len()),
            size::text(file.byte_len()),
            plan.bits_per_weight(),
            started.elapsed().as_secs_f64()
        );
    }
    Ok(())
}

/// What the user should know before it is computed.
fn warn(options: &QuantizeOptions, plan: &QuantizePlan, matrix: Option<&ImportanceMatrix>) {
    let low = ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "Q2_K_S"];
    if matrix.is_none() && low.contains(&options.file_type.name()) {
        note!(
            "quadriga: {} without --imatrix loses much quality; `quadriga imatrix` computes one",
            options.file_type
        );
    }
    let fallbacks = plan.tensors.iter().filter(|tensor| tensor.wanted.is_some()).count();
    if fallbacks > 0 {
        let (tensors, get) =
            (plural(fallbacks, "tensor", "tensors"), if fallbacks == 1 { "gets" } else { "get" });
        note!("quadriga: {tensors} {get} a larger type: rows are not whole blocks of 256");
    }
    for rule in &options.tensor_types {
        if !plan.tensors.iter().any(|tensor| rule.pattern.is_match(&tensor.name)) {
            note!("quadriga: --tensor-type {}: no tensor has such a name", rule.pattern);
        }
    }
    let Some(matrix) = matrix else { return };
    let without = plan.tensors.iter().filter(|tensor| {
        tensor.is_quantizable && tensor.from != tensor.to && !matrix.entries.contains_key(&tensor.source)
    });
    let names: Vec<&str> = without.map(|tensor| tensor.name.as_str()).collect();
    if let Some(first) = names.first() {
        let tensors = plural(names.len(), "tensor", "tensors");
        note!("quadriga: the importance matrix has nothing for {tensors}, such as {first}");
    }
}

/// Prints what would be written.
fn print_plan(file: &File, plan: &QuantizePlan) -> Outcome {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    for tensor in &plan.tensors {
        let dims: Vec<String> = tensor.shape.dims().iter().rev().map(ToString::to_string).collect();
        let kept = if tensor.from == tensor.to { "  kept" } else { "" };
        let wanted = tensor.wanted.map_or_else(String::new, |dtype| format!("  instead of {dtype}"));
        writeln!(
            out,
            "{:<40} {:>20}  {:>7} → {:<7} {:>12}{kept}{wanted}",
            tensor.name,
            dims.join(" × "),
            tensor.from,
            tensor.to,
            size::text(tensor.byte_len())
        )?;
    }
    writeln!(
        out,
        "{} in place of {}, {:.2} bits per weight",
        size::text(plan.byte_len()),
        size::text(file.byte_len()),
        plan.bits_per_weight()
    )?;
    Ok(())
}
