//! The placement part of `quadriga plan`: what is where, the speed to expect, and what more memory would change.

use std::io::{self, Write};

use quadriga_llm::placement::{
    BatchEstimate, ClassResidence, ExpertOption, ModelPart, NextGigabyte, PlacementUnit, SpeedEstimate,
    TensorClass, residence,
};
use quadriga_runtime::{Explanation, Rates};
use quadriga_view::format::{count, list, plural, seconds};
use serde::Serialize;

use crate::failure::Outcome;
use crate::prepared_model::Prepared;
use crate::size;

/// A model's placement and its estimated speed, as `plan --json` has them.
#[derive(Serialize)]
pub(crate) struct PlacementReport {
    /// Weights and states by class and backend.
    classes: Vec<ClassResidence>,
    /// Slots for experts of the CPU, which are part of the weights in `backends`.
    expert_cache: Option<PlannedExpertCache>,
    /// The ways to use memory for experts that were compared.
    expert_options: Vec<ExpertOption>,
    /// The parts of a model that does not fit as a whole, in the order in which accelerators are filled.
    units: Vec<PlacementUnit>,
    /// Tokens per second of prefill and decode, estimated.
    prefill_tokens_per_second: f64,
    decode_tokens_per_second: Option<f64>,
    /// What the speeds are made of.
    estimate: SpeedEstimate,
    /// What one more gigabyte would change.
    next_gigabyte: Option<NextGigabyte>,
}

/// An expert cache as planned.
#[derive(Serialize)]
pub(crate) struct PlannedExpertCache {
    /// Slots on all accelerators.
    slots: usize,
    /// Their bytes on each backend.
    bytes: Vec<u64>,
    /// Bytes on each backend for experts that are on their way, beside those of the plan.
    staging_bytes: Vec<u64>,
}

/// A plan with the model's placement.
#[derive(Serialize)]
pub(crate) struct PlanWithPlacement<'a> {
    #[serde(flatten)]
    pub(crate) plan: &'a Explanation,
    pub(crate) placement: &'a PlacementReport,
}

impl PlacementReport {
    /// The report of a planned model.
    pub(crate) fn new(prepared: &Prepared, plan: &Explanation) -> Outcome<PlacementReport> {
        let Prepared { model, devices, options, placement, placed, .. } = prepared;
        let estimate = placement.estimate(model, devices, options, placed)?;
        Ok(PlacementReport {
            classes: residence(plan),
            expert_cache: (placed.expert_slots > 0).then(|| PlannedExpertCache {
                slots: placed.expert_slots,
                bytes: placed.expert_slot_bytes.clone(),
                staging_bytes: placed.expert_staging_bytes.clone(),
            }),
            expert_options: placed.expert_options.clone(),
            units: placed.units.clone(),
            prefill_tokens_per_second: estimate.prefill.tokens_per_second(),
            decode_tokens_per_second: estimate.decode.as_ref().map(BatchEstimate::tokens_per_second),
            estimate,
            next_gigabyte: placement.next_gigabyte(model, devices, options, placed)?,
        })
    }

    /// Prints a table of the classes on each device.
    pub(crate) fn print_classes(&self, plan: &Explanation, out: &mut dyn Write) -> io::Result<()> {
        write!(out, "{:14}", "placement")?;
        plan.backends.iter().try_for_each(|backend| write!(out, " {:>22}", backend.bytes.backend))?;
        writeln!(out)?;
        for class in TensorClass::ALL {
            let of_class: Vec<&ClassResidence> = self.classes.iter().filter(|r| r.class == class).collect();
            if of_class.is_empty() {
                continue;
            }
            write!(out, "{class:14}")?;
            for backend in 0..plan.backends.len() {
                let text = match of_class.iter().find(|r| r.backend == backend) {
                    None => "–".to_owned(),
                    Some(here) if here.layers.is_empty() => size::text(here.bytes),
                    Some(here) => {
                        let layers = plural(here.layers.len(), "layer", "layers");
                        format!("{}, {layers}", size::text(here.bytes))
                    }
                };
                write!(out, " {text:>22}")?;
            }
            writeln!(out)?;
        }
        Ok(())
    }

    /// Prints the estimated speed, and what more memory would change.
    pub(crate) fn print_estimate(&self, plan: &Explanation, out: &mut dyn Write) -> io::Result<()> {
        let names: Vec<&str> = plan.backends.iter().map(|backend| backend.bytes.backend.as_str()).collect();
        let SpeedEstimate { prefill, decode, decode_without_locality, rates } = &self.estimate;
        let batch = plural(prefill.tokens, "token", "tokens");
        write!(out, "Estimate: prefill {} in batches of {batch}", speed(prefill.tokens_per_second()))?;
        match decode {
            None => writeln!(out, ".")?,
            Some(decode) => {
                let slots = decode.visible_slots;
                writeln!(out, ", decode {} after {slots} tokens.", speed(decode.tokens_per_second()))?;
                writeln!(out, "A token takes {}.", time_of(decode, &names))?;
            }
        }
        if let Some(without) = decode_without_locality {
            writeln!(
                out,
                "This assumes that text stays on its topic, so that experts in slots are used again; decode {} if all are used equally often.",
                speed(without.tokens_per_second())
            )?;
        }
        if self.expert_options.len() > 1 {
            let options: Vec<String> = self.expert_options.iter().map(expert_option).collect();
            writeln!(out, "Compared for experts: {}.", options.join("; "))?;
            writeln!(
                out,
                "Chosen is the fastest for 512 tokens in and 128 out, of those that lose at most 2 % to whole layers if all experts are used equally often."
            )?;
        }
        writeln!(out, "{}", sources(rates, &names))?;
        if let Some(next) = &self.next_gigabyte {
            writeln!(out, "{}", sentence(next))?;
        }
        Ok(())
    }
}

/// One way to use memory for experts, with its speeds.
fn expert_option(option: &ExpertOption) -> String {
    let layers = plural(option.resident_layers, "whole layer", "whole layers");
    let (decode, without) = (speed(option.decode), speed(option.decode_without_locality));
    let prefill = format!("prefill {}", speed(option.prefill));
    let chosen = if option.chosen { " (chosen)" } else { "" };
    match option.slots {
        0 => format!("{layers} {decode}, {prefill}{chosen}"),
        slots => {
            let slots = plural(slots, "slot", "slots");
            format!("{layers} and {slots} {decode} ({without} without locality), {prefill}{chosen}")
        }
    }
}

/// Tokens per second, with few digits.
fn speed(tokens: f64) -> String {
    if tokens < 10.0 { format!("{tokens:.1} tok/s") } else { format!("{tokens:.0} tok/s") }
}

/// The parts of a batch's time.
fn time_of(batch: &BatchEstimate, names: &[&str]) -> String {
    let compute = names.iter().zip(&batch.compute).filter(|(_, time)| **time > 0.0);
    let mut parts: Vec<String> =
        compute.map(|(name, time)| format!("{} on {name}", seconds(*time))).collect();
    if batch.crossings > 0 {
        let crossings = plural(batch.crossings, "crossing", "crossings");
        parts.push(format!("{} for {crossings} between them", seconds(batch.waiting + batch.copies)));
    }
    if batch.overlapped > 0.0 {
        parts.push(format!("{} less because both compute experts at once", seconds(batch.overlapped)));
    }
    if batch.streaming > 0.0 {
        parts.push(format!("{} for streamed weights", seconds(batch.streaming)));
    }
    list(&parts)
}

/// Which rates were measured, and which are assumed.
fn sources(rates: &[Rates], names: &[&str]) -> String {
    let rate = |(name, rates): (&&str, &Rates)| {
        let source = if rates.measured { "measured" } else { "assumed" };
        format!("{name} {source} ({}B/s, {}op/s)", count(rates.read), count(rates.int8))
    };
    let mut text = format!("Rates: {}", list(&names.iter().zip(rates).map(rate).collect::<Vec<_>>()));
    if let Some(link) = rates.first().filter(|_| rates.len() > 1) {
        let (bandwidth, wait) = (count(link.link), seconds(link.rendezvous));
        text.push_str(&format!("; {bandwidth}B/s and an assumed {wait} a crossing between them"));
    }
    if rates.iter().any(|rates| !rates.measured) {
        text.push_str("; `quadriga devices --measure` measures");
    }
    text + "."
}

/// What one more gigabyte would change.
fn sentence(next: &NextGigabyte) -> String {
    let [before, after] = next.decode;
    if after <= before {
        return format!("One more GiB on {} would not make answers faster.", next.device);
    }
    if next.expert_slots > 0 {
        let slots = plural(next.expert_slots, "more expert", "more experts");
        let (device, before, after) = (&next.device, speed(before), speed(after));
        return format!("One more GiB on {device} would hold {slots}: decode {after} instead of {before}.");
    }
    if next.moves.is_empty() {
        return format!("One more GiB on {} would change nothing.", next.device);
    }
    let (device, moves) = (&next.device, moved(&next.moves));
    let (before, after) = (speed(before), speed(after));
    format!("One more GiB on {device} would hold {moves}: decode {after} instead of {before}.")
}

/// The parts, those of several layers together.
fn moved(parts: &[ModelPart]) -> String {
    let mut kinds: Vec<(&str, usize)> = Vec::new();
    for part in parts {
        match kinds.iter_mut().find(|(kind, _)| *kind == part.kind()) {
            Some((_, count)) => *count += 1,
            None => kinds.push((part.kind(), 1)),
        }
    }
    let text = |(kind, count): &(&str, usize)| match *kind {
        "layer" => plural(*count, "more layer", "more layers"),
        "output" | "embeddings" => format!("the {kind}"),
        kind => format!("the {kind} of {}", plural(*count, "more layer", "more layers")),
    };
    list(&kinds.iter().map(text).collect::<Vec<_>>())
}
