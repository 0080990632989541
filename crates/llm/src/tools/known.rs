//! Formats of templates that do not write calls, or not as the model does.

use super::format::{CallSyntax, TemplateSupport, ToolFormat};
use crate::marks::{HARMONY_BETWEEN, HARMONY_CLOSE, HARMONY_OPEN};
use crate::reasoning::ReasoningFormat;
use crate::template::ChatTemplate;

/// The format of models that know none: instructions in the system message describe it.
pub(super) fn described() -> ToolFormat {
    let template = TemplateSupport::default();
    ToolFormat { template, ..ToolFormat::object("<tool_call>\n", "\n</tool_call>") }
}

/// Whether calls are messages in a channel, whose template writes one at a time.
pub(super) fn is_harmony(template: &ChatTemplate) -> bool {
    template.reasoning() == Some(&ReasoningFormat::Harmony)
}

/// Calls of the harmony format, as [`ReasoningSplitter`](crate::reasoning::ReasoningSplitter) writes them.
pub(super) fn harmony() -> ToolFormat {
    let template = TemplateSupport { tools: true, calls: true, results: true, ..TemplateSupport::default() };
    ToolFormat {
        separator: None,
        syntax: CallSyntax::Named { between: HARMONY_BETWEEN.to_string() },
        template,
        harmony: true,
        ..ToolFormat::object(&HARMONY_OPEN.to_string(), &HARMONY_CLOSE.to_string())
    }
}

/// Kimi K2's calls, whose template writes identifiers in place of names.
pub(super) fn kimi(template: &ChatTemplate) -> Option<ToolFormat> {
    let has = |text: &str| template.mentions(text);
    let is_kimi = has("<|tool_calls_section_begin|>") && has("<|tool_call_argument_begin|>");
    let support = TemplateSupport {
        tools: true,
        calls: true,
        results: true,
        identifiers: true,
        ..TemplateSupport::default()
    };
    is_kimi.then(|| ToolFormat {
        section_open: "<|tool_calls_section_begin|>".to_owned(),
        section_close: "<|tool_calls_section_end|>".to_owned(),
        separator: Some(String::new()),
        syntax: CallSyntax::Identified {
            prefix: "functions.".to_owned(),
            mark: ":".to_owned(),
            between: "<|tool_call_argument_begin|>".to_owned(),
        },
        template: support,
        ..ToolFormat::object("<|tool_call_begin|>", "<|tool_call_end|>")
    })
}

/// Calls as Python writes them, in a list: LFM2's between tags, and those that a template asks for with these words, as Llama 4's and
/// Llama 3.2's do.
fn pythonic(template: &ChatTemplate) -> Option<ToolFormat> {
    let (open, close) = match () {
        () if template.mentions("<|tool_list_start|>") => ("<|tool_call_start|>", "<|tool_call_end|>"),
        () if template.mentions("[func_name1(params_name1=params_value1") => ("", ""),
        () => return None,
    };
    Some(ToolFormat { syntax: CallSyntax::Pythonic, ..ToolFormat::list(open, close) })
}

/// Llama 4, whose template writes earlier calls in another place than the model does.
pub(super) fn llama4(template: &ChatTemplate) -> Option<ToolFormat> {
    let has_tags = template.mentions("<|python_start|>") && template.mentions("<|python_end|>");
    let support = TemplateSupport { tools: true, calls: true, ..TemplateSupport::default() };
    has_tags.then(|| ToolFormat { template: support, ..pythonic(template).unwrap_or_else(llama) })
}

/// The format that a template hints at with the texts that it mentions.
pub(super) fn mentioned(template: &ChatTemplate) -> Option<ToolFormat> {
    let has = |text: &str| template.mentions(text);
    let tool_name = |format: ToolFormat| ToolFormat {
        syntax: CallSyntax::Object {
            name: "tool_name".to_owned(),
            arguments: "parameters".to_owned(),
            counter: has("tool_call_id").then(|| "tool_call_id".to_owned()),
        },
        ..format
    };
    if let Some(format) = pythonic(template) {
        return Some(format);
    }
    Some(if has("<|/tool|>") {
        // Phi-4-mini.
        let support = TemplateSupport { tools_in_system: true, ..TemplateSupport::default() };
        ToolFormat { template: support, ..ToolFormat::list("<|tool_call|>", "<|/tool_call|>") }
    } else if has("<|tool_call|>") {
        // Granite 3.
        ToolFormat::list("<|tool_call|>", "")
    } else if has("[TOOL_CALLS]") {
        // Mistral.
        ToolFormat::list("[TOOL_CALLS] ", "")
    } else if has("<|START_ACTION|>") {
        // Command R7B and Command A.
        tool_name(ToolFormat::list("<|START_ACTION|>", "<|END_ACTION|>"))
    } else if has("Action:") && has("```json") {
        // Command R.
        tool_name(ToolFormat::list("Action: ```json\n", "\n```"))
    } else if has("<function=") && has("<parameter=") {
        // Qwen3-Coder.
        let syntax = CallSyntax::Tagged {
            head: ">\n".to_owned(),
            open: "<parameter=".to_owned(),
            between: ">\n".to_owned(),
            json_between: None,
            close: "\n</parameter>\n".to_owned(),
        };
        ToolFormat { syntax, ..ToolFormat::object("<tool_call>\n<function=", "</function>\n</tool_call>") }
    } else if has("<tool_call>") {
        // Hermes.
        ToolFormat::object("<tool_call>\n", "\n</tool_call>")
    } else if has("<|python_tag|>") {
        llama()
    } else {
        return None;
    })
}

/// Llama 3: an object without any text around it.
fn llama() -> ToolFormat {
    let object = ToolFormat::object("", "");
    let syntax =
        CallSyntax::Object { name: "name".to_owned(), arguments: "parameters".to_owned(), counter: None };
    ToolFormat { separator: None, syntax, ..object }
}

/// Other texts with which a call may begin.
pub(super) fn alternative_open(template: &ChatTemplate, syntax: &CallSyntax) -> Option<String> {
    let tag = ["<|python_tag|>", "<|python_start|>"].into_iter().find(|tag| template.mentions(tag))?;
    let list = if *syntax == CallSyntax::Pythonic { "[" } else { "" };
    Some(format!("{tag}{list}"))
}
