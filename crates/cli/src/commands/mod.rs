//! One module per command.

pub(crate) mod batch;
pub(crate) mod bench;
pub(crate) mod chat;
pub(crate) mod check;
pub(crate) mod check_random;
pub(crate) mod compare;
pub(crate) mod convert;
pub(crate) mod devices;
pub(crate) mod embed;
pub(crate) mod eval;
pub(crate) mod faults;
pub(crate) mod imatrix;
pub(crate) mod inspect;
pub(crate) mod lora_merge;
pub(crate) mod neurons;
pub(crate) mod perplexity;
pub(crate) mod plan;
pub(crate) mod plan_instance;
pub(crate) mod plan_placement;
pub(crate) mod plan_ranks;
pub(crate) mod pull;
pub(crate) mod quantize;
pub(crate) mod run;
pub(crate) mod serve;
pub(crate) mod split;
pub(crate) mod synth;
