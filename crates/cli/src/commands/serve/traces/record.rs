//! A span as a collector gets it, and the fields of which it is made.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use tracing::field::{Field, Visit};

/// A span.
pub(super) struct SpanRecord {
    pub(super) name: &'static str,
    /// Whether it answers the request of another program.
    pub(super) is_server: bool,
    pub(super) trace: u128,
    pub(super) id: u64,
    pub(super) parent: Option<u64>,
    pub(super) start: SystemTime,
    /// `None` while it goes on.
    pub(super) end: Option<SystemTime>,
    pub(super) attributes: Vec<(&'static str, Value)>,
    pub(super) failed: bool,
    /// Whether its trace is recorded: the client may have decided that it is not.
    pub(super) sampled: bool,
}

impl SpanRecord {
    /// The JSON of OTLP.
    pub(super) fn json(&self) -> Value {
        // 64-bit numbers are texts in OTLP.
        let time =
            |time: SystemTime| time.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos()).to_string();
        let attributes: Vec<Value> = self
            .attributes
            .iter()
            .map(|(key, value)| json!({ "key": key, "value": any_value(value) }))
            .collect();
        let mut span = json!({
            "traceId": format!("{:032x}", self.trace),
            "spanId": format!("{:016x}", self.id),
            "name": self.name,
            // SERVER and INTERNAL.
            "kind": if self.is_server { 2 } else { 1 },
            "startTimeUnixNano": time(self.start),
            "endTimeUnixNano": time(self.end.unwrap_or(self.start)),
            "attributes": attributes,
            "status": if self.failed { json!({ "code": 2 }) } else { json!({}) },
        });
        if let (Some(parent), Some(object)) = (self.parent, span.as_object_mut()) {
            object.insert("parentSpanId".to_owned(), format!("{parent:016x}").into());
        }
        span
    }
}

/// A value as OTLP has it.
fn any_value(value: &Value) -> Value {
    match value {
        Value::Number(number) if number.is_f64() => json!({ "doubleValue": number }),
        Value::Number(number) => json!({ "intValue": number.to_string() }),
        Value::Bool(flag) => json!({ "boolValue": flag }),
        Value::String(text) => json!({ "stringValue": text }),
        Value::Array(list) => {
            json!({ "arrayValue": { "values": list.iter().map(any_value).collect::<Vec<_>>() } })
        }
        other => json!({ "stringValue": other.to_string() }),
    }
}

/// The trace and the span of the client, as the header `traceparent` names them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct TraceParent {
    pub(super) trace: u128,
    pub(super) span: u64,
    pub(super) sampled: bool,
}

impl TraceParent {
    /// Reads `VERSION-TRACE-SPAN-FLAGS`. `None` if it is wrong: then the request begins a trace of its own.
    pub(super) fn parse(text: &str) -> Option<TraceParent> {
        let mut parts = text.split('-');
        let mut hex = |digits: usize| {
            let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
            parts.next().filter(|part| part.len() == digits && part.bytes().all(is_digit))
        };
        let (version, trace, span, flags) = (hex(2)?, hex(32)?, hex(16)?, hex(2)?);
        // Later versions may have more parts; this one has not.
        if version == "ff" || version == "00" && parts.next().is_some() {
            return None;
        }
        let (trace, span) = (u128::from_str_radix(trace, 16).ok()?, u64::from_str_radix(span, 16).ok()?);
        let flags = u8::from_str_radix(flags, 16).ok()?;
        (trace != 0 && span != 0).then_some(TraceParent { trace, span, sampled: flags & 1 == 1 })
    }
}

/// The fields of a span or an event.
#[derive(Default)]
pub(super) struct Fields(BTreeMap<&'static str, Value>);

impl Fields {
    pub(super) fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name)?.as_str()
    }

    pub(super) fn number(&self, name: &str) -> Option<f64> {
        self.0.get(name)?.as_f64()
    }

    /// The attribute that a field becomes as the only one of a list.
    pub(super) fn listed(&self, name: &str, attribute: &'static str) -> Option<(&'static str, Value)> {
        Some((attribute, Value::Array(vec![self.0.get(name)?.clone()])))
    }

    /// The attribute that a field becomes.
    pub(super) fn attribute(&self, name: &str, attribute: &'static str) -> Option<(&'static str, Value)> {
        Some((attribute, self.0.get(name)?.clone()))
    }
}

impl Visit for Fields {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.0.insert(field.name(), value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.0.insert(field.name(), value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name(), value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.0.insert(field.name(), value.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0.insert(field.name(), format!("{value:?}").into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_client_names_its_trace() {
        let parent = TraceParent::parse("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
        let trace = 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c;
        assert_eq!(parent, Some(TraceParent { trace, span: 0xb7ad_6b71_6920_3331, sampled: true }));
        let unsampled = TraceParent::parse("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00");
        assert!(unsampled.is_some_and(|parent| !parent.sampled));
        for wrong in [
            "",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-x",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-+af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        ] {
            assert_eq!(TraceParent::parse(wrong), None, "{wrong}");
        }
    }
}
