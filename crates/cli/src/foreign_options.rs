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
    ("--reasoning-budget", "0", Some("--reasoning=off")),
    ("--reasoning-budget", "-1", None),
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
    ("--vocab-only", "files with a vocabulary and no weights are not written"),
];

/// Commands of Ollama and others, each with what there is instead.
pub(crate) const COMMANDS: &[(&str, &str)] = &[
    ("server", "`quadriga serve` is the server"),
    ("ps", "no model stays loaded: each command loads its own"),
    ("create", "models are .gguf files; --system and sampling options are given to each command"),
];
