//! Keys of other architectures that would change what a model computes: a file that has one describes a model that nobody here
//! knows, and would run as another one if the key were ignored.

use quadriga_gguf::Value;

use super::Hyperparameters;
use super::activation::Activation;
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
    /// With other numbers than 0 for layers whose positions are rotated, and 0 for the others.
    Rotated,
    /// With a name of the activation that the architecture computes.
    Activation,
}

/// The keys, each with when it changes nothing. `attention.sliding_window` is not among them: configurations of models name one that
/// they switch off elsewhere. Architectures that read one check its value themselves.
const KEYS: &[(&str, Neutral)] = &[
    ("attention.clamp_kqv", Neutral::Zero),
    ("attention.max_alibi_bias", Neutral::Zero),
    ("attention.output_scale", Neutral::ZeroOrOne),
    ("attention.relative_buckets_count", Neutral::Zero),
    ("attention.rope_pattern", Neutral::Rotated),
    ("attention.scale", Neutral::Factor(attention_scale)),
    ("attention.shared_kv_layers", Neutral::Zero),
    ("attention.temperature_scale", Neutral::Zero),
    ("attention.value_scale", Neutral::ZeroOrOne),
    ("attn_logit_softcapping", Neutral::Zero),
    ("embedding_scale", Neutral::Factor(|hyper| f64::from(hyper.embedding_scale))),
    ("expert_group_scale", Neutral::ZeroOrOne),
    ("final_logit_softcapping", Neutral::Zero),
    ("hidden_activation", Neutral::Activation),
    ("interleave_moe_layer_step", Neutral::ZeroOrOne),
    ("logit_scale", Neutral::ZeroOrOne),
    ("moe_every_n_layers", Neutral::ZeroOrOne),
    ("residual_scale", Neutral::ZeroOrOne),
    ("rope.scaling.alpha", Neutral::ZeroOrOne),
    ("router_logit_softcapping", Neutral::Zero),
    ("ssm.dt_b_c_rms", Neutral::Zero),
    ("swiglu_clamp_exp", Neutral::Zero),
    ("swiglu_clamp_shexp", Neutral::Zero),
    ("swin_norm", Neutral::Zero),
];

/// The factor of attention scores.
fn attention_scale(hyper: &Hyperparameters) -> f64 {
    let length = hyper.layers.first().map_or(1, |layer| layer.key_length.max(1));
    hyper.attention_scale.map_or(1.0 / (length as f64).sqrt(), f64::from)
}

impl Hyperparameters {
    /// An error if the file has a key that changes the mathematics of other architectures, and that this one has not read.
    pub(crate) fn refuse_unread(&self, keys: &Keys<'_>, activation: Activation) -> Result<()> {
        for (key, neutral) in KEYS {
            let Some(value) = keys.unread(key) else { continue };
            if let Some(found) = neutral.changed_by(self, activation, &value) {
                let wanted = format!(
                    "absent or {}: the architecture {} does not use it",
                    neutral.wanted(self, activation),
                    self.architecture
                );
                return Err(keys.wrong(key, found, &wanted));
            }
        }
        Ok(())
    }
}

impl Neutral {
    /// What of a value changes the model.
    fn changed_by(
        self,
        hyper: &Hyperparameters,
        activation: Activation,
        value: &Value<'_>,
    ) -> Option<String> {
        let numbers = || numbers(value).into_iter();
        let changes = match self {
            Neutral::Zero => numbers().find(|number| *number != 0.0),
            Neutral::ZeroOrOne => numbers().find(|number| ![0.0, 1.0].contains(number)),
            Neutral::Factor(of) => {
                // Not a number is not close to anything.
                let close = |number: f64| (number / of(hyper) - 1.0).abs() < 1e-4;
                numbers().find(|number| *number != 0.0 && !close(*number))
            }
            Neutral::Rotated => {
                let single = !matches!(value, Value::Array(_));
                let all = numbers().cycle().take(if single { hyper.layers.len() } else { numbers().len() });
                let mut layers = all.zip(&hyper.layers);
                layers
                    .find(|(number, layer)| (*number != 0.0) != layer.rope.is_some())
                    .map(|(number, _)| number)
            }
            Neutral::Activation => {
                return match value {
                    Value::String(name) if activation.names().contains(name) => None,
                    Value::String(name) => Some((*name).to_owned()),
                    other => Some(format!("a value of type {}", other.kind())),
                };
            }
        };
        changes.map(|number| number.to_string())
    }

    fn wanted(self, hyper: &Hyperparameters, activation: Activation) -> String {
        match self {
            Neutral::Zero => "0".to_owned(),
            Neutral::ZeroOrOne => "1".to_owned(),
            Neutral::Factor(of) => of(hyper).to_string(),
            Neutral::Rotated if hyper.layers.iter().all(|layer| layer.rope.is_some()) => {
                "1 for all layers".to_owned()
            }
            Neutral::Rotated => "1 for the layers whose positions are rotated".to_owned(),
            Neutral::Activation => activation.names().join(" or "),
        }
    }
}

/// The numbers of a value or of an array; none of texts.
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
