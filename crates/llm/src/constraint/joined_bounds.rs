//! Bounds of one number that are in several parts of a schema.
//!
//! The compiler intersects parts that hold at once, but takes an exclusive bound in where it is a whole number and the other bound is
//! less than one away. Within one part [`exclude_whole_bound`] has seen to that; here it sees the bounds of all parts.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::bounds::{NUMBER_BOUNDS, referred};
use super::formats::{parts, parts_mut, parts_of_field_mut};
use super::numbers::exclude_whole_bound;

/// Schemas that are looked at for bounds that hold at once.
const MAX_VISITS: usize = 100_000;

/// Keywords whose schemas are of the same value: all of the first one hold, one of each other.
const ALL: &str = "allOf";
const ALTERNATIVES: [&str; 2] = ["anyOf", "oneOf"];

/// Bounds by their keywords.
type Bounds = Map<String, Value>;

/// Tightens bounds that the compiler would not keep, as they are in several parts of a schema.
///
/// # Errors
/// The reason why that cannot be done.
pub(super) fn join_bounds(schema: &mut Value) -> Result<(), String> {
    if !excludes_whole_numbers(schema) {
        return Ok(());
    }
    let root = schema.clone();
    BoundJoiner { root: &root, visits: 0 }.join(schema, &Bounds::new())
}

/// Whether a part of a schema has an exclusive bound that is a whole number.
fn excludes_whole_numbers(schema: &Value) -> bool {
    let mut left = vec![schema];
    while let Some(part) = left.pop() {
        let bounds =
            ["exclusiveMinimum", "exclusiveMaximum"].iter().filter_map(|name| part.get(name)?.as_f64());
        if bounds.into_iter().any(|bound| bound.fract() == 0.0) {
            return true;
        }
        left.extend(parts(part));
    }
    false
}

/// Adds the bounds of a schema to others that hold at once.
fn add(bounds: &mut Bounds, fields: &Map<String, Value>) {
    for (name, loose) in NUMBER_BOUNDS {
        let Some(bound) = fields.get(name).filter(|bound| bound.is_number()) else { continue };
        let tighter = |other: &Value| bound.as_f64() < other.as_f64();
        if bounds.get(name).is_none_or(|other| tighter(other) == (loose > 0.0)) {
            bounds.insert(name.to_owned(), bound.clone());
        }
    }
}

/// The bounds as the compiler keeps them, if those are others.
fn kept(bounds: &Bounds) -> Option<Bounds> {
    let mut kept = bounds.clone();
    exclude_whole_bound(&mut kept);
    (kept != *bounds).then_some(kept)
}

struct BoundJoiner<'s> {
    root: &'s Value,
    /// Schemas that were looked at.
    visits: usize,
}

impl<'s> BoundJoiner<'s> {
    /// Tightens the bounds of a schema whose value has further ones.
    fn join(&mut self, schema: &mut Value, outer: &Bounds) -> Result<(), String> {
        let Some(fields) = schema.as_object_mut() else {
            return parts_mut(schema).into_iter().try_for_each(|part| self.join(part, &Bounds::new()));
        };
        let mut bounds = outer.clone();
        self.collect(fields, &mut BTreeSet::new(), &mut bounds)?;
        if let Some(kept) = kept(&bounds) {
            add(fields, &kept);
        }
        for (name, value) in fields {
            let of_same_value = name == ALL || ALTERNATIVES.contains(&name.as_str());
            match value {
                Value::Array(members) if of_same_value => {
                    members.iter_mut().try_for_each(|member| self.join(member, &bounds))?;
                }
                value => {
                    let mut parts = parts_of_field_mut(name, value).into_iter();
                    parts.try_for_each(|part| self.join(part, &Bounds::new()))?;
                }
            }
        }
        Ok(())
    }

    fn visit(&mut self) -> Result<(), String> {
        self.visits += 1;
        match self.visits {
            0..=MAX_VISITS => Ok(()),
            _ => Err("its bounds of numbers are in too many places to be compared".to_owned()),
        }
    }

    /// Adds all bounds that hold for a value of a schema, whichever alternatives it is of.
    fn collect(
        &mut self,
        fields: &Map<String, Value>,
        followed: &mut BTreeSet<String>,
        bounds: &mut Bounds,
    ) -> Result<(), String> {
        self.visit()?;
        add(bounds, fields);
        let members = fields.get(ALL).and_then(Value::as_array);
        for member in members.into_iter().flatten().filter_map(Value::as_object) {
            self.collect(member, followed, bounds)?;
        }
        if let Some(name) = fields.get("$ref").and_then(Value::as_str)
            && followed.insert(name.to_owned())
            && let Some(target) = referred(self.root, name).and_then(Value::as_object)
        {
            let own = bounds.clone();
            self.collect(target, followed, bounds)?;
            // What is referred to may be used elsewhere: nothing can be added to it.
            if !own.is_empty() {
                self.check_alternatives(target, &mut followed.clone(), bounds)?;
            }
        }
        Ok(())
    }

    /// Refuses a schema with alternatives whose bounds the compiler would not keep beside others.
    fn check_alternatives(
        &mut self,
        fields: &'s Map<String, Value>,
        followed: &mut BTreeSet<String>,
        bounds: &Bounds,
    ) -> Result<(), String> {
        self.visit()?;
        let list = |name: &str| fields.get(name).and_then(Value::as_array).into_iter().flatten();
        for option in ALTERNATIVES.into_iter().flat_map(list).filter_map(Value::as_object) {
            let mut all = bounds.clone();
            self.collect(option, followed, &mut all)?;
            if kept(bounds).is_none() && kept(&all).is_some() {
                return Err("an exclusive bound in it is a whole number, and beside a reference to alternatives with a bound less than \
                     one away; write the alternatives in its place"
                    .to_owned());
            }
            self.check_alternatives(option, followed, &all)?;
        }
        for member in list(ALL).filter_map(Value::as_object) {
            self.check_alternatives(member, followed, bounds)?;
        }
        Ok(())
    }
}
