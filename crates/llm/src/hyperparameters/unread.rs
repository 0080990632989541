//! Keys of other architectures that would change what a model computes: a file that has one describes a model that nobody here
//! knows, and would run as another one if the key were ignored.

use quadriga_gguf::Value;

use super::Hyperparameters;
use super::keys::Keys;
use crate::Result;

/// When a key changes nothing.
#[derive(Clone, Copy)]
enum Neutral {
    /// With 0 or `false`.
    Zero,
    /// With 0, 1 or `false`.
    ZeroOrOne,
    /// With 0, or with the factor that the model has without the key.
    Factor(fn(&Hyperparameters) -> f64),
}

/// The keys, each with when it changes nothing. `attention.sliding_window` is not among them: configurations of models name one that
/// they switch off elsewhere. Architectures that read one check its value themselves.
const KEYS: &[(&str, Neutral)] = &[
    ("attention.clamp_kqv", Neutral::Zero),
    ("attention.max_alibi_bias", Neutral::Zero),
    ("attention.relative_buckets_count", Neutral::Zero),
    ("attention.scale", Neutral::Factor(attention_scale)),
    ("attention.shared_kv_layers", Neutral::Zero),
    ("attention.temperature_scale", Neutral::Zero),
    ("attn_logit_softcapping", Neutral::Zero),
    ("attn_output_scale", Neutral::ZeroOrOne),
    ("embedding_scale", Neutral::Factor(|hyper| f64::from(hyper.embedding_scale))),
    ("final_logit_softcapping", Neutral::Zero),
    ("interleave_moe_layer_step", Neutral::ZeroOrOne),
    ("logit_scale", Neutral::ZeroOrOne),
    ("moe_every_n_layers", Neutral::ZeroOrOne),
    ("residual_scale", Neutral::ZeroOrOne),
    ("router_logit_softcapping", Neutral::Zero),
    ("ssm.dt_b_c_rms", Neutral::Zero),
    ("swin_norm", Neutral::Zero),
];

/// The factor of attention scores.
fn attention_scale(hyper: &Hyperparameters) -> f64 {
    let length = hyper.layers.first().map_or(1, |layer| layer.key_length.max(1));
    hyper.attention_scale.map_or(1.0 / (length as f64).sqrt(), f64::from)
}

impl Hyperparameters {
    /// An error if the file has a key that changes the mathematics of other architectures, and that this one has not read.
    pub(crate) fn refuse_unread(&self, keys: &Keys<'_>) -> Result<()> {
        for (key, neutral) in KEYS {
            let Some(value) = keys.unread(key) else { continue };
            let changes = numbers(&value).into_iter().find(|number| !neutral.allows(self, *number));
            if let Some(number) = changes {
                let wanted = format!(
                    "absent or {}: the architecture {} does not use it",
                    neutral.wanted(self),
                    self.architecture
                );
                return Err(keys.wrong(key, number, &wanted));
            }
        }
        Ok(())
    }
}

impl Neutral {
    fn allows(self, hyper: &Hyperparameters, number: f64) -> bool {
        number == 0.0
            || match self {
                Neutral::Zero => false,
                Neutral::ZeroOrOne => number == 1.0,
                Neutral::Factor(of) => (number / of(hyper) - 1.0).abs() < 1e-4,
            }
    }

    fn wanted(self, hyper: &Hyperparameters) -> String {
        match self {
            Neutral::Zero => "0".to_owned(),
            Neutral::ZeroOrOne => "1".to_owned(),
            Neutral::Factor(of) => of(hyper).to_string(),
        }
    }
}

/// The numbers of a value or of an array; none of texts, which none of the keys has.
fn numbers(value: &Value<'_>) -> Vec<f64> {
    match value {
        Value::Array(array) => array.iter().filter_map(|element| number(&element)).collect(),
        value => number(value).into_iter().collect(),
    }
}

fn number(value: &Value<'_>) -> Option<f64> {
    Some(match *value {
        Value::Bool(flag) => u8::from(flag).into(),
        Value::U8(number) => number.into(),
        Value::I8(number) => number.into(),
        Value::U16(number) => number.into(),
        Value::I16(number) => number.into(),
        Value::U32(number) => number.into(),
        Value::I32(number) => number.into(),
        Value::F32(number) => number.into(),
        Value::U64(number) => number as f64,
        Value::I64(number) => number as f64,
        Value::F64(number) => number,
        Value::String(_) | Value::Array(_) => return None,
    })
}
