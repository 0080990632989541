//! The system prompt: a text, or blocks of text.

use crate::error::{ApiError, quoted};
use crate::fields::Fields;
use serde_json::Value;

/// How Claude Code begins the system prompt. The text has a few characters that differ in each request.
const BILLING_HEADER: &str = "x-anthropic-billing-header:";

/// What precedes the characters that differ, and what follows them.
const CHANGING: (&str, char) = ("cch=", ';');

/// The system prompt of a request.
pub(super) fn system(fields: &Fields<'_>) -> Result<Option<String>, ApiError> {
    const NAME: &str = "system";
    let text = match fields.value(NAME) {
        None => None,
        Some(Value::String(text)) => Some(text.clone()),
        Some(Value::Array(_)) => {
            let blocks = fields.objects(NAME)?.unwrap_or_default();
            let texts = blocks.iter().map(block_text).collect::<Result<Vec<_>, _>>()?;
            Some(texts.join("\n")).filter(|_| !texts.is_empty())
        }
        Some(_) => return Err(fields.error(NAME, "must be a string or a list of blocks")),
    };
    Ok(text.map(steady))
}

fn block_text(block: &Fields<'_>) -> Result<String, ApiError> {
    match block.required_text("type")? {
        "text" => Ok(block.required_text("text")?.to_owned()),
        kind => Err(block.error("type", format!("is {}; a system prompt is made of text", quoted(kind)))),
    }
}

/// The text without what differs from request to request, so that its beginning is found in the KV cache.
fn steady(text: String) -> String {
    if !text.starts_with(BILLING_HEADER) {
        return text;
    }
    let (header, rest) = text.split_once('\n').map_or((text.as_str(), None), |(h, rest)| (h, Some(rest)));
    let (name, end) = CHANGING;
    let Some((before, after)) = header.split_once(name) else { return text };
    let Some((changing, after)) = after.split_once(end) else { return text };
    let zeros = "0".repeat(changing.chars().count());
    let header = format!("{before}{name}{zeros}{end}{after}");
    match rest {
        Some(rest) => format!("{header}\n{rest}"),
        None => header,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_billing_header_does_not_change() {
        let text = |code: &str| format!("x-anthropic-billing-header: v=2.1; cch={code}; x\nYou are cch=1;");
        assert_eq!(steady(text("a1b2c")), steady(text("ffe99")));
        assert_eq!(steady(text("a1b2c")), text("00000"));
        assert_eq!(steady("other cch=12345;".to_owned()), "other cch=12345;");
    }
}
