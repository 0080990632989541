//! Compiles what an answer with tools may be.

use std::sync::Arc;

use crate::constraint::{Cancellation, Grammar};
use crate::reasoning::ReasoningSplitter;
use crate::sampling_hook::SamplingHook;
use crate::tools::{Tool, ToolChoice, ToolRules};
use crate::{Error, Model, Result};

/// A hook that keeps an answer to the rules, and the tools with the schemas that it enforces.
type Compiled = (Option<Box<dyn SamplingHook>>, Arc<[Tool]>);

/// The hook that keeps an answer to the rules, if there can be one, and the tools with the schemas that it enforces.
///
/// The schemas of tools that are not strict lose the parts that cannot be enforced.
pub(crate) fn compile(
    model: &Model,
    rules: &ToolRules<'_>,
    splitter: &ReasoningSplitter,
    cancellation: &Cancellation,
) -> Result<Compiled> {
    let first = compile_once(model, rules, splitter, cancellation);
    if !matches!(first, Err(Error::Grammar { .. })) {
        return first.map(|hook| (hook, rules.tools.into()));
    }
    let engine = model.constraints()?;
    let mut tools = rules.tools.to_vec();
    for tool in &mut tools {
        match engine.compile_after(&Grammar::JsonSchema(tool.parameters.clone()), None, cancellation) {
            Ok(_) => {}
            Err(Error::Grammar { reason, .. }) if tool.strict => {
                let reason = format!("{}: {reason}", tool.name);
                return Err(Error::Grammar { grammar: "schema of a strict tool", reason });
            }
            Err(Error::Grammar { .. }) => {
                tool.parameters = engine.relaxed(&tool.parameters, cancellation)?;
            }
            Err(error) => return Err(error),
        }
    }
    let hook = compile_once(model, &ToolRules { tools: &tools, ..rules.clone() }, splitter, cancellation)?;
    Ok((hook, tools.into()))
}

fn compile_once(
    model: &Model,
    rules: &ToolRules<'_>,
    splitter: &ReasoningSplitter,
    cancellation: &Cancellation,
) -> Result<Option<Box<dyn SamplingHook>>> {
    let (format, tokenizer) = (model.tool_format()?, model.tokenizer()?);
    let failed = |reason| Error::Grammar { grammar: "grammar of tool calls", reason };
    let marker = splitter.text_marker(tokenizer);
    let lark = format.grammar_after(rules, tokenizer, marker).map_err(failed)?;
    let Some(lark) = lark else { return Ok(None) };
    let (engine, grammar) = (model.constraints()?, Grammar::Lark(lark));
    // The grammar of the harmony format has the reasoning, too.
    let is_text = rules.choice == ToolChoice::Auto && rules.answer.is_none();
    let constraint = match format.harmony {
        true => engine.compile_after(&grammar, None, cancellation)?,
        false if is_text => engine.compile_text(&grammar, splitter, tokenizer, cancellation)?,
        false => engine.compile_until(&grammar, splitter, tokenizer, cancellation)?,
    };
    Ok(Some(constraint.hook()))
}
