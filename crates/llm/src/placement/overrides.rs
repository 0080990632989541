//! Weights that the caller places by regular expressions, whatever the placement of their layers: llama.cpp's
//! `--override-tensor`, `--cpu-moe` and `--n-cpu-moe`.

use std::collections::HashMap;

use quadriga_graph::layer_of;
use regex::{Regex, RegexBuilder};

use super::{Devices, Placement, TensorClass};
use crate::model::Model;
use crate::{Error, Result};

/// The memory that a compiled expression may take. Its time is linear in the length of a name, whatever it is.
const REGEX_BYTES: usize = 1 << 20;

/// Places the weights whose names a regular expression matches on a device.
///
/// ```
/// use quadriga_llm::placement::TensorOverride;
///
/// let overrides = TensorOverride::parse_list(r"blk\.[0-9]{1,2}\.ffn_.*_exps=CPU,output=cuda:1")?;
/// assert_eq!(overrides[0].pattern(), r"blk\.[0-9]{1,2}\.ffn_.*_exps");
/// assert_eq!(overrides[1].device(), "cuda:1");
/// assert!(TensorOverride::parse_list("blk.(=CPU").is_err());
/// # Ok::<(), quadriga_llm::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct TensorOverride {
    matches: Matches,
    device: String,
}

/// The weights that are placed.
#[derive(Clone, Debug)]
enum Matches {
    /// Those of a name.
    Regex(Regex),
    /// The experts of the layers before this one.
    Experts(usize),
}

impl Matches {
    /// Whether a tensor of the file is placed, which the graph has by the name `stacked`.
    fn has(&self, name: &str, stacked: &str) -> bool {
        match self {
            Matches::Regex(regex) => regex.is_match(name) || regex.is_match(stacked),
            Matches::Experts(layers) => {
                is_expert(stacked) && layer_of(name).is_some_and(|layer| layer < *layers)
            }
        }
    }
}

fn is_expert(stacked: &str) -> bool {
    TensorClass::of_weight(stacked) == TensorClass::Experts
}

impl TensorOverride {
    /// Weights whose names `pattern` matches anywhere are placed on `device`: the name of one of the placement's devices, in
    /// llama.cpp's spelling (`CPU`, `CUDA0`) if need be.
    pub fn new(pattern: &str, device: &str) -> Result<TensorOverride> {
        let compiled = RegexBuilder::new(pattern).size_limit(REGEX_BYTES).build();
        let regex = compiled.map_err(|error| {
            let text = error.to_string();
            let reason = text.lines().last().unwrap_or_default().trim();
            let reason = reason.strip_prefix("error: ").unwrap_or(reason);
            wrong(pattern, format!("not a regular expression: {reason}"))
        })?;
        Ok(TensorOverride { matches: Matches::Regex(regex), device: device.trim().to_owned() })
    }

    /// The experts of the first `layers` layers are placed on the CPU: llama.cpp's `--n-cpu-moe`, and with [`usize::MAX`] its
    /// `--cpu-moe`. In its place among other overrides, as there; [`Placement::cpu_expert_layers`] comes after all of them.
    pub fn experts_on_cpu(layers: usize) -> TensorOverride {
        TensorOverride { matches: Matches::Experts(layers), device: quadriga_cpu::NAME.to_owned() }
    }

    /// Reads `REGEX=DEVICE[,REGEX=DEVICE…]`. A comma before the equals sign is part of the expression.
    pub fn parse_list(text: &str) -> Result<Vec<TensorOverride>> {
        let mut overrides = Vec::new();
        let mut begun = String::new();
        for piece in text.split(',') {
            if !begun.is_empty() {
                begun.push(',');
            }
            begun.push_str(piece);
            if let Some((pattern, device)) = begun.rsplit_once('=') {
                if pattern.is_empty() || device.trim().is_empty() {
                    return Err(wrong(&begun, "must be REGEX=DEVICE".to_owned()));
                }
                overrides.push(TensorOverride::new(pattern, device)?);
                begun.clear();
            }
        }
        if begun.is_empty() && !overrides.is_empty() {
            return Ok(overrides);
        }
        Err(wrong(if begun.is_empty() { text } else { &begun }, "must be REGEX=DEVICE".to_owned()))
    }

    /// The regular expression; for [experts](TensorOverride::experts_on_cpu) a part that the names of all have.
    pub fn pattern(&self) -> &str {
        match &self.matches {
            Matches::Regex(regex) => regex.as_str(),
            Matches::Experts(_) => "_exps",
        }
    }

    /// The device's name, as given.
    pub fn device(&self) -> &str {
        &self.device
    }
}

fn wrong(text: &str, reason: String) -> Error {
    Error::TensorOverride { text: text.to_owned(), reason }
}

/// The overrides of a placement, for the tensors of one model.
#[derive(Default)]
pub(super) struct Overrides {
    /// The number of the backend of each weight that is placed, by name.
    backends: HashMap<String, usize>,
    /// The regular expressions that match no tensor.
    pub(super) unmatched: Vec<String>,
}

impl Overrides {
    /// Applies the overrides to the tensors of a model's file. The first that matches decides; a placement's numbers of layers whose
    /// experts are on the CPU come last.
    pub(super) fn resolve(placement: &Placement, model: &Model, devices: &Devices) -> Result<Overrides> {
        let rules = &placement.overrides;
        let mut resolved = Overrides::default();
        let (first, further) = (placement.cpu_expert_layers, placement.experts_on_cpu);
        if rules.is_empty() && first == 0 && further.is_empty() {
            return Ok(resolved);
        }
        let numbers =
            rules.iter().map(|rule| device_number(devices, rule)).collect::<Result<Vec<usize>>>()?;
        let cpu = devices.accelerators().len();
        let mut matched = vec![false; rules.len()];
        for tensor in model.file().tensors() {
            let (name, stacked) = (tensor.name(), stacked_name(tensor.name()));
            let stacked = stacked.as_deref().unwrap_or(name);
            let mut found = None;
            for ((rule, number), matched) in rules.iter().zip(&numbers).zip(&mut matched) {
                if rule.matches.has(name, stacked) {
                    *matched = true;
                    found = found.or(Some(*number));
                }
            }
            let on_cpu = is_expert(stacked)
                && layer_of(name).is_some_and(|layer| layer < first || further.contains(layer));
            if let Some(number) = found.or(on_cpu.then_some(cpu)) {
                resolved.backends.entry(stacked.to_owned()).or_insert(number);
            }
        }
        let unmatched = rules.iter().zip(matched).filter(|(_, matched)| !matched);
        let expressions = unmatched.filter(|(rule, _)| matches!(rule.matches, Matches::Regex(_)));
        resolved.unmatched = expressions.map(|(rule, _)| rule.pattern().to_owned()).collect();
        Ok(resolved)
    }

    /// The backend of a weight of the graph. Rows of a fused matrix have its name and one more part.
    pub(super) fn get(&self, name: &str) -> Option<usize> {
        let whole = || self.backends.get(name.rsplit_once('.')?.0);
        self.backends.get(name).or_else(whole).copied()
    }
}

/// The name in the graph of the tensor of a single expert: `blk.0.ffn_up.3.weight` is a part of `blk.0.ffn_up_exps.weight`.
fn stacked_name(name: &str) -> Option<String> {
    let (rest, "weight") = name.rsplit_once('.')? else { return None };
    let (part, expert) = rest.rsplit_once('.')?;
    expert.parse::<usize>().ok().filter(|_| part.contains(".ffn_"))?;
    Some(format!("{part}_exps.weight"))
}

/// The number of the backend that an override names.
fn device_number(devices: &Devices, rule: &TensorOverride) -> Result<usize> {
    // cuda:0, CUDA0 and cuda are the same.
    let plain = |name: &str| {
        let name = name.to_ascii_lowercase().replace(':', "");
        let numbered = name.ends_with(|last: char| last.is_ascii_digit());
        if numbered || name == quadriga_cpu::NAME { name } else { format!("{name}0") }
    };
    // llama.cpp's name for host memory that a GPU reads.
    let wanted =
        if rule.device.eq_ignore_ascii_case("cuda_host") { quadriga_cpu::NAME } else { &rule.device };
    let names = devices.names();
    names.iter().position(|name| plain(name) == plain(wanted)).ok_or_else(|| {
        let text = format!("{}={}", rule.pattern(), rule.device);
        wrong(&text, format!("{} is none of the devices in use ({})", rule.device, names.join(", ")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_split_after_devices() {
        let parse = |text: &str| -> Vec<(String, String)> {
            let all = TensorOverride::parse_list(text).unwrap();
            all.iter().map(|rule| (rule.pattern().to_owned(), rule.device().to_owned())).collect()
        };
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        assert_eq!(parse("exps=CPU"), [pair("exps", "CPU")]);
        assert_eq!(parse("a=CPU,b{1,2}=CUDA0"), [pair("a", "CPU"), pair("b{1,2}", "CUDA0")]);
        for text in ["", ",", "exps", "=CPU", "exps=", "a=CPU,b", "a=CPU,=cpu"] {
            assert!(TensorOverride::parse_list(text).is_err(), "{text:?}");
        }
        for (text, part) in [("a(=CPU", "a("), (r"(a)\1=CPU", "backreferences"), ("(?=a)=CPU", "look-around")]
        {
            let error = TensorOverride::parse_list(text).unwrap_err().to_string();
            assert!(error.contains(part) && !error.contains('\n'), "{text}: {error}");
        }
        assert_eq!(TensorOverride::experts_on_cpu(3).device(), "cpu");
        let long = format!("{}=CPU", "(((a{100}){100}){100})");
        assert!(TensorOverride::parse_list(&long).is_err(), "memory is limited");
    }

    #[test]
    fn tensors_of_single_experts_have_the_name_of_all() {
        assert_eq!(stacked_name("blk.3.ffn_up.11.weight").as_deref(), Some("blk.3.ffn_up_exps.weight"));
        for name in ["blk.3.ffn_up.weight", "blk.3.attn_q.weight", "output.weight", "weight", ""] {
            assert_eq!(stacked_name(name), None, "{name}");
        }
    }
}
