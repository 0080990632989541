//! Which tensors of a layer ranks divide, and by what: one table for each kind of layer.
//!
//! A rank has groups of heads of attention, of linear attention, or of channels of a short convolution; columns of the feed-forward
//! network; and experts. A matrix whose rows are such units is cut by rows, and one that multiplies their results by columns: those
//! products are parts of a sum, to which all ranks add theirs. What no table names, every rank has as a whole.

/// What rows or columns of a tensor consist of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Unit {
    /// Elements of queries.
    Queries,
    /// Elements of queries, each head's before those of its gate.
    GatedQueries,
    /// Query heads.
    Heads,
    /// Elements of keys.
    Keys,
    /// Key heads.
    KeyHeads,
    /// Elements of values.
    Values,
    /// Elements of what queries attended to.
    Attended,
    /// Elements of keys and values in turn, by heads of latent attention.
    KeysAndValues,
    /// Key heads of linear attention.
    LinearKeyHeads,
    /// Elements of queries or keys of linear attention.
    LinearKeys,
    /// Elements of values of linear attention.
    LinearValues,
    /// Value heads of linear attention.
    LinearHeads,
    /// Learning rates and decays of the value heads of a key head, in turn.
    LinearRates,
    /// Queries, keys, values and gates, by key heads of linear attention.
    LinearGroups,
    /// Channels of a short convolution.
    Channels,
    /// Columns of the feed-forward network, or of the expert that all tokens use.
    Columns,
    /// The other experts.
    Experts,
}

impl Unit {
    /// Whether several ranks may have the same of these: those that have queries of one KV head.
    pub(super) fn is_of_keys(self) -> bool {
        matches!(self, Unit::Keys | Unit::KeyHeads | Unit::Values)
    }
}

/// The dimension that is divided.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Along {
    /// The outermost one. A bias is cut as its matrix.
    Rows,
    /// The elements of each row. A bias is added to the sum of all ranks.
    Columns,
}

/// How a tensor is cut: its dimension consists of units of one kind, then of the next.
#[derive(Debug)]
pub(super) struct PartCut {
    pub(super) part: &'static str,
    pub(super) along: Along,
    pub(super) units: &'static [Unit],
}

const fn rows(part: &'static str, units: &'static [Unit]) -> PartCut {
    PartCut { part, along: Along::Rows, units }
}

const fn columns(part: &'static str, units: &'static [Unit]) -> PartCut {
    PartCut { part, along: Along::Columns, units }
}

/// Attention over a KV cache of keys and values.
const ATTENTION: &[PartCut] = &[
    rows("attn_q", &[Unit::Queries]),
    rows("attn_k", &[Unit::Keys]),
    rows("attn_v", &[Unit::Values]),
    rows("attn_qkv", &[Unit::Queries, Unit::Keys, Unit::Values]),
    rows("attn_sinks", &[Unit::Heads]),
    columns("attn_output", &[Unit::Attended]),
];

/// The same with norms of each head that have weights of their own.
const NORMED_HEADS: &[PartCut] =
    &[rows("attn_q_norm", &[Unit::Heads]), rows("attn_k_norm", &[Unit::KeyHeads])];

/// The same with norms over all queries and over all keys of a token.
const NORMED_PROJECTIONS: &[PartCut] =
    &[rows("attn_q_norm", &[Unit::Queries]), rows("attn_k_norm", &[Unit::Keys])];

/// Attention whose results are multiplied by a gate, which the matrix of the queries has, too.
const GATED_ATTENTION: &[PartCut] = &[
    rows("attn_q", &[Unit::GatedQueries]),
    rows("attn_k", &[Unit::Keys]),
    rows("attn_v", &[Unit::Values]),
    columns("attn_output", &[Unit::Attended]),
];

/// Latent attention: all ranks have the short vectors of the cache, and what makes them.
const LATENT_ATTENTION: &[PartCut] = &[
    rows("attn_q", &[Unit::Queries]),
    rows("attn_q_b", &[Unit::Queries]),
    rows("attn_kv_b", &[Unit::KeysAndValues]),
    rows("attn_k_b", &[Unit::Heads]),
    rows("attn_v_b", &[Unit::Heads]),
    columns("attn_output", &[Unit::Attended]),
];

/// The gated delta rule behind a convolution.
const DELTA_RULE: &[PartCut] = &[
    rows("attn_qkv", &[Unit::LinearKeys, Unit::LinearKeys, Unit::LinearValues]),
    rows("attn_gate", &[Unit::LinearValues]),
    rows("ssm_in", &[Unit::LinearGroups]),
    rows("ssm_ba", &[Unit::LinearRates]),
    rows("ssm_beta", &[Unit::LinearHeads]),
    rows("ssm_alpha", &[Unit::LinearHeads]),
    rows("ssm_conv1d", &[Unit::LinearKeys, Unit::LinearKeys, Unit::LinearValues]),
    rows("ssm_dt", &[Unit::LinearHeads]),
    rows("ssm_a", &[Unit::LinearHeads]),
    columns("ssm_out", &[Unit::LinearValues]),
];

/// A short convolution, and the gates before and after it.
const SHORT_CONVOLUTION: &[PartCut] = &[
    rows("shortconv.in_proj", &[Unit::Channels, Unit::Channels, Unit::Channels]),
    rows("shortconv.conv", &[Unit::Channels]),
    columns("shortconv.out_proj", &[Unit::Channels]),
];

/// The state space of Mamba 2: gate, values, keys, queries and steps of one matrix.
const STATE_SPACE: &[PartCut] = &[
    rows(
        "ssm_in",
        &[Unit::LinearValues, Unit::LinearValues, Unit::LinearKeys, Unit::LinearKeys, Unit::LinearHeads],
    ),
    rows("ssm_conv1d", &[Unit::LinearValues, Unit::LinearKeys, Unit::LinearKeys]),
    rows("ssm_dt", &[Unit::LinearHeads]),
    rows("ssm_a", &[Unit::LinearHeads]),
    rows("ssm_d", &[Unit::LinearHeads]),
    rows("ssm_norm", &[Unit::LinearKeyHeads]),
    columns("ssm_out", &[Unit::LinearValues]),
];

/// A dense feed-forward network; `ffn_down_t` is the transposed last matrix.
const NETWORK: &[PartCut] = &[
    rows("ffn_gate", &[Unit::Columns]),
    rows("ffn_up", &[Unit::Columns]),
    columns("ffn_down", &[Unit::Columns]),
    rows("ffn_down_t", &[Unit::Columns]),
];

/// The same with gate and up in one matrix.
const FUSED_NETWORK: &[PartCut] =
    &[rows("ffn_up", &[Unit::Columns, Unit::Columns]), columns("ffn_down", &[Unit::Columns])];

/// Experts, and the one that all tokens use.
const EXPERTS: &[PartCut] = &[
    rows("ffn_gate_exps", &[Unit::Experts]),
    rows("ffn_up_exps", &[Unit::Experts]),
    rows("ffn_gate_up_exps", &[Unit::Experts]),
    rows("ffn_down_exps", &[Unit::Experts]),
    rows("ffn_gate_shexp", &[Unit::Columns]),
    rows("ffn_up_shexp", &[Unit::Columns]),
    columns("ffn_down_shexp", &[Unit::Columns]),
];

/// The parts that layers of an architecture consist of.
#[derive(Debug)]
pub(super) struct ArchitectureCuts {
    pub(super) name: &'static str,
    attention: &'static [&'static [PartCut]],
    /// Of layers without attention, where there are some.
    recurrent: &'static [PartCut],
    /// Whether value heads of linear attention that use the same key head are apart from each other: `i`, `i + key_heads`, …
    pub(super) tiled: bool,
}

const fn attention(name: &'static str, attention: &'static [&'static [PartCut]]) -> ArchitectureCuts {
    ArchitectureCuts { name, attention, recurrent: &[], tiled: false }
}

const fn recurrent(
    name: &'static str,
    attention: &'static [&'static [PartCut]],
    recurrent: &'static [PartCut],
    tiled: bool,
) -> ArchitectureCuts {
    ArchitectureCuts { name, attention, recurrent, tiled }
}

/// The architectures whose layers ranks can divide. Others have parts that no table names; a pipeline may have their layers.
static ARCHITECTURES: &[ArchitectureCuts] = &[
    attention("llama", &[ATTENTION]),
    attention("bamboo", &[ATTENTION]),
    attention("falcon", &[ATTENTION]),
    attention("opt", &[ATTENTION]),
    attention("qwen2", &[ATTENTION]),
    attention("qwen2moe", &[ATTENTION]),
    attention("qwen3", &[ATTENTION]),
    attention("qwen3moe", &[ATTENTION]),
    attention("gemma", &[ATTENTION]),
    attention("gemma2", &[ATTENTION]),
    attention("gemma3", &[ATTENTION]),
    attention("phi3", &[ATTENTION]),
    attention("gpt-oss", &[ATTENTION]),
    attention("glm4", &[ATTENTION]),
    attention("glm4moe", &[ATTENTION]),
    attention("granite", &[ATTENTION]),
    attention("granitemoe", &[ATTENTION]),
    attention("smollm3", &[ATTENTION]),
    attention("smallthinker", &[ATTENTION]),
    attention("llama4", &[ATTENTION]),
    attention("command-r", &[ATTENTION, NORMED_HEADS]),
    attention("olmo2", &[ATTENTION, NORMED_PROJECTIONS]),
    attention("olmoe", &[ATTENTION, NORMED_PROJECTIONS]),
    attention("deepseek2", &[LATENT_ATTENTION]),
    recurrent("qwen35", &[GATED_ATTENTION], DELTA_RULE, true),
    recurrent("qwen35moe", &[GATED_ATTENTION], DELTA_RULE, true),
    recurrent("qwen3next", &[GATED_ATTENTION], DELTA_RULE, false),
    recurrent("mamba2", &[], STATE_SPACE, false),
    recurrent("lfm2", &[ATTENTION], SHORT_CONVOLUTION, false),
    recurrent("lfm2moe", &[ATTENTION], SHORT_CONVOLUTION, false),
];

impl ArchitectureCuts {
    /// The parts of an architecture's layers; `None` if they cannot be divided.
    pub(super) fn find(name: &str) -> Option<&'static ArchitectureCuts> {
        ARCHITECTURES.iter().find(|known| known.name == name)
    }

    /// The names of all that can be divided.
    pub(super) fn names() -> Vec<&'static str> {
        ARCHITECTURES.iter().map(|known| known.name).collect()
    }

    /// Whether several ranks may have the same keys: not where ranks add up the squares of all.
    pub(super) fn may_share_keys(&self) -> bool {
        let is_normed = |cut: &&PartCut| cut.part == "attn_k_norm" && cut.units.contains(&Unit::Keys);
        !self.attention.iter().copied().flatten().any(|cut| is_normed(&cut))
    }

    /// The tensors of a layer's attention, or of what it has in place of it.
    pub(super) fn mixer(&self, has_attention: bool) -> impl Iterator<Item = &'static PartCut> + use<> {
        let (attention, recurrent) =
            if has_attention { (self.attention, &[][..]) } else { (&[][..], self.recurrent) };
        attention.iter().copied().flatten().chain(recurrent)
    }
}

/// The tensors of a layer's feed-forward network.
pub(super) fn network(has_experts: bool, fused_gate: bool) -> &'static [PartCut] {
    match (has_experts, fused_gate) {
        (true, _) => EXPERTS,
        (false, true) => FUSED_NETWORK,
        (false, false) => NETWORK,
    }
}

/// Whether the products of a matrix are parts of a sum to which all ranks add theirs at once: those of the expert that all tokens use
/// are added to the other experts' first.
pub(super) fn is_summed(cut: &PartCut) -> bool {
    let by_columns = cut.along == Along::Columns && cut.part != "ffn_down_shexp";
    by_columns || cut.part == "ffn_down_t"
}
