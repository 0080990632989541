//! Options and commands of llama.cpp and Ollama that are spelled otherwise here, or are not supported.

/// Options with a single dash, as in llama.cpp, and other spellings, with the long forms that the parser knows.
pub(crate) const SPELLINGS: &[(&str, &str)] = &[
    ("-ngl", "--gpu-layers"),
    ("--n-gpu-layers", "--gpu-layers"),
    ("-np", "--parallel"),
    ("--max-num-seqs", "--parallel"),
    ("--max-model-len", "--ctx-size"),
    ("--served-model-name", "--alias"),
    ("-cram", "--cache-ram"),
    ("-cb", "--cont-batching"),
    ("-to", "--timeout"),
    ("-lv", "--verbosity"),
    ("-md", "--draft"),
    ("--model-draft", "--draft"),
    ("--draft-n", "--draft-max"),
    ("-ctk", "--cache-type-k"),
    ("-ctv", "--cache-type-v"),
    ("-sys", "--system"),
    ("-sysf", "--system-file"),
    ("-jf", "--json-schema-file"),
    ("--system-prompt-file", "--system-file"),
    ("-st", "--single-turn"),
    ("-fa", FLASH_ATTENTION),
    ("-hf", "--hf-repo"),
    ("-hfr", "--hf-repo"),
    ("-hfd", "--hf-repo-draft"),
    ("-hfrd", "--hf-repo-draft"),
    ("-dev", "--device"),
    ("-cnv", "--conversation"),
    ("-no-cnv", "--raw"),
    ("--no-conversation", "--raw"),
    ("-ot", "--override-tensor"),
    ("-cmoe", "--cpu-moe"),
    ("-ncmoe", "--n-cpu-moe"),
    ("-sm", "--split-mode"),
    ("-ts", "--tensor-split"),
    ("-mg", "--main-gpu"),
    ("-ub", "--ubatch-size"),
    ("-tb", "--threads-batch"),
    ("-rea", "--reasoning"),
    ("--hidethinking", "--reasoning=hide"),
    ("-ofreq", "--save-every"),
    ("--print-supported-models", "--classes"),
];

/// An option whose value may be missing, so that it is joined to the name before the prompt could be taken for it.
pub(crate) struct OptionalValue {
    pub(crate) name: &'static str,
    pub(crate) values: &'static [&'static str],
    /// The value that is meant without one.
    pub(crate) missing: &'static str,
    /// Whether another word behind the option is an error, not a prompt.
    pub(crate) strict: bool,
}

const FLASH_ATTENTION: &str = "--flash-attn";

pub(crate) const OPTIONAL_VALUES: &[OptionalValue] = &[
    OptionalValue {
        name: FLASH_ATTENTION,
        values: &["on", "off", "auto", "1", "0", "-1", "true", "false"],
        missing: "auto",
        strict: true,
    },
    OptionalValue { name: "--color", values: &["on", "off", "auto"], missing: "on", strict: false },
    OptionalValue { name: "--think", values: &["true", "false"], missing: "true", strict: false },
];

/// Options that stand for one of another name, by their value: `None` if that is the default here.
pub(crate) const TRANSLATIONS: &[(&str, &str, Option<&str>)] = &[
    ("--think", "true", Some("--reasoning=show")),
    ("--think", "false", Some("--reasoning=off")),
    ("--reasoning-format", "auto", None),
    ("--reasoning-format", "deepseek", None),
];

/// Options of `bench` whose value may be a list, and the option that takes lists.
pub(crate) const LISTS: &[(&str, &str)] =
    &[("-t", "--threads-list"), ("--threads", "--threads-list"), ("--gpu-layers", "--gpu-layers-list")];

const FILTERS: &str = "--top-p, --min-p and --typical limit the choice of tokens";
const ORDER: &str = "the order of samplers is fixed; each has an option that turns it off";
const ROPE: &str = "RoPE is as the model file says";
const TWO_MODELS: &str = "`quadriga compare A B -f TEXT` runs both models and prints their KL divergence";
const VISION: &str = "vision and audio are not supported, only text";

/// Options of llama.cpp that would change the answer and are not supported, each with what there is instead.
pub(crate) const UNSUPPORTED: &[(&str, &str)] = &[
    ("--mirostat", FILTERS),
    ("--mirostat-lr", FILTERS),
    ("--mirostat-ent", FILTERS),
    ("--samplers", ORDER),
    ("--sampler-seq", ORDER),
    ("--keep", "chat drops the oldest turns and keeps the system prompt; -c N gives a larger context"),
    ("--context-shift", "chat drops the oldest turns; -c N gives a larger context"),
    (
        "--reasoning-format",
        "the chat template tells reasoning from the answer; --reasoning show, hide or off decides what becomes of it",
    ),
    ("--no-jinja", "chat templates are always Jinja; --raw sends the prompt without one"),
    ("--list-devices", "`quadriga devices` lists them"),
    ("-nkvo", "the KV cache of a layer is where the layer runs; -ngl N sets how many run on the GPU"),
    (
        "--no-kv-offload",
        "the KV cache of a layer is where the layer runs; -ngl N sets how many run on the GPU",
    ),
    ("--lora-scaled", "--lora FILE=SCALE names both"),
    ("--control-vector", "control vectors are not supported; --lora adds LoRA adapters"),
    ("--rope-scaling", ROPE),
    ("--rope-scale", ROPE),
    ("--rope-freq-base", ROPE),
    ("--rope-freq-scale", ROPE),
    ("--image", VISION),
    ("--mmproj", VISION),
    ("--mmproj-url", VISION),
    ("-mm", VISION),
    ("--audio", VISION),
    ("--kl-divergence", TWO_MODELS),
    ("--kl-divergence-base", TWO_MODELS),
    (
        "--show-statistics",
        "an importance matrix is a GGUF file, which `quadriga inspect --tensors FILE` lists",
    ),
    ("--output-format", "importance matrices are written as GGUF, which llama.cpp's tools read, too"),
    ("--no-cont-batching", "requests are always computed together; --parallel 1 computes one at a time"),
    ("--no-prefill-assistant", "a request says so itself, with continue_final_message"),
    ("--media-path", VISION),
    ("--override-kv", "keys are those of the file; `quadriga quantize --override-kv` writes another one"),
    ("--log-file", "messages go to stderr: 2> FILE writes them to a file"),
    ("-mu", "-hf ORG/REPO downloads a model of the hub, `quadriga pull` also beforehand"),
    ("--model-url", "-hf ORG/REPO downloads a model of the hub, `quadriga pull` also beforehand"),
    ("--path", "a server has its own page, or none with --no-webui"),
    ("--models-preset", "all models of --models-dir have the options of the command line"),
    ("-hff", "-hf ORG/REPO:QUANT names a file of the repository by its type"),
    ("--hf-file", "-hf ORG/REPO:QUANT names a file of the repository by its type"),
    ("-pg", "prefill and decode are measured apart, with -p N and -n N"),
    ("--vocab-only", "files with a vocabulary and no weights are not written"),
];

/// Options of vLLM that are not supported, each with what there is instead.
pub(crate) const UNSUPPORTED_OF_VLLM: &[(&str, &str)] = &[
    ("--gpu-memory-utilization", "--vram-budget BYTES limits the memory of a GPU"),
    (
        "--tensor-parallel-size",
        "`mpirun -n N quadriga serve --parallelism tensor` divides a model among N ranks",
    ),
    (
        "--pipeline-parallel-size",
        "`mpirun -n N quadriga serve --parallelism pipeline` divides a model among N ranks",
    ),
    ("--dtype", "weights have the types of the file; `quadriga quantize` writes others"),
    ("--quantization", "weights have the types of the file; `quadriga quantize` writes others"),
];

/// An option of llama.cpp that changes no answer: it is accepted with a note.
pub(crate) struct IgnoredOption {
    pub(crate) name: &'static str,
    pub(crate) has_value: bool,
    /// Why it has no effect.
    pub(crate) reason: &'static str,
}

const fn flag(name: &'static str, reason: &'static str) -> IgnoredOption {
    IgnoredOption { name, has_value: false, reason }
}

const fn option(name: &'static str, reason: &'static str) -> IgnoredOption {
    IgnoredOption { name, has_value: true, reason }
}

/// Options of llama.cpp without effect, unless a command has one of the same name.
pub(crate) const IGNORED: &[IgnoredOption] = &[
    flag("--log-disable", "-q leaves out notes"),
    flag("--simple-io", "input and output are plain where they are no terminal"),
    flag("--kv-unified", "requests always share one KV cache"),
    flag("-kvu", "requests always share one KV cache"),
    flag("--check-tensors", "types, shapes and ranges of tensors are always checked"),
    flag("--no-repack", "weights are packed where that is faster"),
    flag("--mmap", "files are mapped unless --no-mmap is given"),
    flag("--direct-io", "files are mapped, or read with --no-mmap"),
    flag("--perf", "speeds are always measured"),
    flag("--no-perf", "speeds are always measured"),
    flag("--verbose-prompt", "--json has the number of the prompt's tokens"),
    option("--prio", "the system's `nice` sets a priority"),
    option("--cpu-mask", "the system's `taskset` sets cores"),
    option("--threads-http", "connections have threads of their own"),
    option("--draft-min", "drafts of any length are verified"),
    option("--swa-checkpoints", "windows are kept with the prefix that they belong to"),
    option("-sps", "prefixes are found by their tokens"),
    option("--slot-prompt-similarity", "prefixes are found by their tokens"),
    option("--fit", "a placement that fits is always found"),
    option("-dt", "pages of the KV cache need no defragmentation"),
    option("--defrag-thold", "pages of the KV cache need no defragmentation"),
];

/// Commands of Ollama and others, each with what there is instead.
pub(crate) const COMMANDS: &[(&str, &str)] = &[
    ("server", "`quadriga serve` is the server"),
    ("stop", "no model stays loaded: Ctrl-C or SIGTERM ends `quadriga serve`"),
    ("ps", "no model stays loaded: each command loads its own"),
    ("create", "models are .gguf files; --system and sampling options are given to each command"),
];
