//! Operations by name, with parameters as JSON.

use quadriga_graph::{AttentionOptions, CustomOp, DType, GraphBuilder, Order, Pairing, Rope, Shape, Value};
use serde_json::Value as Json;

use super::array::{dtype, shape};
use crate::failure::{Failure, Outcome};

/// An operation that Python asked for.
#[derive(Clone)]
pub(crate) struct Operation {
    pub(crate) name: String,
    pub(crate) parameters: Json,
    /// Of a custom operation.
    pub(crate) custom: Option<CustomOp>,
}

impl Operation {
    fn wrong(&self, what: &str) -> Failure {
        Failure::new("GraphError", format!("{}: {what}", self.name))
    }

    fn float(&self, name: &str) -> Outcome<f32> {
        let found = self.parameters.get(name).and_then(Json::as_f64);
        found.map(|number| number as f32).ok_or_else(|| self.wrong(&format!("{name} must be a number")))
    }

    fn optional_float(&self, name: &str) -> Outcome<Option<f32>> {
        match self.parameters.get(name) {
            None | Some(Json::Null) => Ok(None),
            Some(_) => self.float(name).map(Some),
        }
    }

    fn count(&self, name: &str) -> Outcome<usize> {
        let found = self.parameters.get(name).and_then(Json::as_u64);
        let found = found.and_then(|number| usize::try_from(number).ok());
        found.ok_or_else(|| self.wrong(&format!("{name} must be a whole number that is not negative")))
    }

    fn flag(&self, name: &str) -> bool {
        self.parameters.get(name).and_then(Json::as_bool).unwrap_or(false)
    }

    fn counts(&self, name: &str) -> Outcome<Vec<usize>> {
        let found = self.parameters.get(name).cloned().unwrap_or_default();
        serde_json::from_value(found)
            .map_err(|_| self.wrong(&format!("{name} must be a list of whole numbers")))
    }

    fn shape(&self) -> Outcome<Shape> {
        shape(&self.counts("shape")?)
    }

    fn dtype(&self) -> Outcome<DType> {
        dtype(self.parameters.get("dtype").and_then(Json::as_str).unwrap_or_default())
    }

    /// Applies the operation to values.
    pub(crate) fn apply<'g>(&self, g: &'g GraphBuilder, inputs: &[Value<'g>]) -> Outcome<Value<'g>> {
        if self.name == "arange" {
            return Ok(g.arange(self.float("start")?, self.float("stop")?, self.float("step")?));
        }
        let Some((&x, others)) = inputs.split_first() else { return Err(self.wrong("it needs an input")) };
        let more = |number: usize| {
            others.get(number).copied().ok_or_else(|| self.wrong(&format!("it needs {} inputs", number + 2)))
        };
        // Optional inputs come last, in order; flags say which are there.
        let mut rest = others.iter().copied();
        let mut optional = |name: &str| if self.flag(name) { rest.next() } else { None };
        Ok(match self.name.as_str() {
            "sqr" => x.sqr(),
            "sqrt" => x.sqrt(),
            "log" => x.log(),
            "exp" => x.exp(),
            "sin" => x.sin(),
            "cos" => x.cos(),
            "abs" => x.abs(),
            "neg" => x.neg(),
            "relu" => x.relu(),
            "gelu" => x.gelu(),
            "gelu_erf" => x.gelu_erf(),
            "silu" => x.silu(),
            "sigmoid" => x.sigmoid(),
            "tanh" => x.tanh(),
            "softplus" => x.softplus(),
            "add" => x.add(more(0)?),
            "sub" => x.sub(more(0)?),
            "mul" => x.mul(more(0)?),
            "div" => x.div(more(0)?),
            "add1" => x.add1(more(0)?),
            "scale" => x.scale_bias(self.float("scale")?, self.float("bias")?),
            "clamp" => x.clamp(self.float("min")?, self.float("max")?),
            "swiglu" => x.swiglu(more(0)?),
            "norm" => x.norm(self.float("eps")?),
            "rms_norm" => x.rms_norm(self.float("eps")?),
            "l2_norm" => x.l2_norm(self.float("eps")?),
            "group_norm" => x.group_norm(self.count("groups")?, self.float("eps")?),
            "soft_max" => {
                let mask = optional("mask");
                x.soft_max(self.float("scale")?, mask, optional("sinks"))
            }
            "rope" => {
                let pairing = if self.flag("half") { Pairing::Half } else { Pairing::Adjacent };
                let rope = Rope::new(self.count("dims")?, pairing, self.float("base")?);
                let rope = Rope { scale: self.float("scale")?, ..rope };
                x.rope(rope, more(0)?, others.get(1).copied())
            }
            "attention" => {
                let (keys, values) = (more(0)?, more(1)?);
                rest = others.get(2..).unwrap_or_default().iter().copied();
                let mut optional = |name: &str| if self.flag(name) { rest.next() } else { None };
                let options = AttentionOptions {
                    scale: self.optional_float("scale")?,
                    soft_cap: self.optional_float("soft_cap")?,
                    mask: optional("mask"),
                    spans: optional("spans"),
                    sinks: optional("sinks"),
                    pages: None,
                };
                x.attention(keys, values, options)
            }
            "diag_mask_inf" => x.diag_mask_inf(self.count("past")?),
            "diag_mask_zero" => x.diag_mask_zero(self.count("past")?),
            "mul_mat" => x.mul_mat(more(0)?),
            "mul_mat_id" => x.mul_mat_id(more(0)?, more(1)?),
            "out_prod" => x.out_prod(more(0)?),
            "get_rows" => x.get_rows(more(0)?),
            "set_rows" => x.set_rows(more(0)?, more(1)?),
            "cast" => x.cast(self.dtype()?),
            "cont" => x.cont(),
            "copy_into" => x.copy_into(more(0)?),
            "concat" => x.concat(self.count("axis")?, others),
            "repeat" => x.repeat(self.shape()?),
            "pad" => match *self.counts("after")?.as_slice() {
                [a] => x.pad([a]),
                [a, b] => x.pad([a, b]),
                [a, b, c] => x.pad([a, b, c]),
                [a, b, c, d] => x.pad([a, b, c, d]),
                _ => return Err(self.wrong("after must have one to four numbers")),
            },
            "sum" => x.sum(),
            "sum_rows" => x.sum_rows(),
            "mean" => x.mean(),
            "argmax" => x.argmax(),
            "argsort" => {
                x.argsort(if self.flag("descending") { Order::Descending } else { Order::Ascending })
            }
            "top_k" => x.top_k(self.count("k")?),
            "reshape" => x.reshape(self.shape()?),
            "slice" => x.slice(self.count("axis")?, self.count("start")?, self.count("length")?),
            "permute" => match *self.counts("axes")?.as_slice() {
                [a, b] => x.permute([a, b]),
                [a, b, c] => x.permute([a, b, c]),
                [a, b, c, d] => x.permute([a, b, c, d]),
                _ => return Err(self.wrong("axes must have two to four numbers")),
            },
            "transpose" => x.transpose(),
            "custom" => match &self.custom {
                Some(op) => x.custom(op, others),
                None => return Err(self.wrong("there is no operation")),
            },
            _ => return Err(self.wrong("there is no such operation")),
        })
    }
}
