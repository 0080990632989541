//! The limits of chat templates, to the byte where they are exact: they grow with the messages.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use quadriga_llm::template::{ChatTemplate, Message, TemplateArguments, ToolCall};
use serde_json::json;

/// The largest value without messages, and what each value has beside its text.
const LARGEST: usize = 16 << 20;
const OVERHEAD: usize = 32;

fn render(source: &str, messages: &[Message], arguments: &TemplateArguments) -> Result<String, String> {
    let template = ChatTemplate::new(source, "", "").map_err(|error| error.to_string())?;
    template.render_with(messages, arguments).map_err(|error| error.to_string())
}

fn arguments(variables: serde_json::Value) -> TemplateArguments {
    let serde_json::Value::Object(variables) = variables else { panic!("variables have names") };
    TemplateArguments { variables, ..TemplateArguments::default() }
}

/// Whether a text of so many bytes may be made.
fn fits(bytes: usize, messages: &[Message], arguments: &TemplateArguments) -> bool {
    match render(&format!("{{{{ ('a' * {bytes})|length }}}}"), messages, arguments) {
        Ok(text) => text == bytes.to_string(),
        Err(error) if error.contains("a value is too large") => false,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn the_largest_value_grows_with_every_text_of_messages_and_arguments() {
    let call = ToolCall {
        id: Some("i".repeat(11)),
        name: "n".repeat(13),
        arguments: json!({ "k".repeat(17): ["s".repeat(19), 5, null], "o": { "p": "q".repeat(23) } }),
    };
    let full = Message {
        reasoning_content: Some("r".repeat(29)),
        tool_calls: vec![call, ToolCall::new("t".repeat(31), json!("u".repeat(37)))],
        tool_call_id: Some("v".repeat(41)),
        name: Some("w".repeat(43)),
        ..Message::new("x".repeat(47), "y".repeat(53))
    };
    let of_full = 11 + 13 + 17 + 19 + 2 + 23 + 29 + 31 + 37 + 41 + 43 + 47 + 53;
    let tools = arguments(json!({ "tools": ["z".repeat(59), { "aa": "b".repeat(61) }], "flag": true }));
    let of_tools = 5 + 59 + 2 + 61 + 4;
    let none = TemplateArguments::default();
    let cases: [(&[Message], &TemplateArguments, usize); 5] = [
        (&[], &none, 0),
        (&[Message::new("user", "hello")], &none, 9),
        (&[full.clone(), Message::new("user", "")], &none, of_full + 4),
        (&[], &tools, of_tools),
        (&[full], &tools, of_full + of_tools),
    ];
    for (messages, arguments, size) in cases {
        let largest = LARGEST + 4 * size - OVERHEAD;
        assert!(fits(largest, messages, arguments), "{size} bytes of texts");
        assert!(!fits(largest + 1, messages, arguments), "{size} bytes of texts");
    }
}

#[test]
fn operations_are_refused_before_their_result_is_made() {
    let none = TemplateArguments::default();
    let (large, long) = ("a value is too large", "it takes too long");
    // Each with a smaller operand that is fine.
    let cases = [
        ("('a' * N).replace('a', 'bb')|length", 10_000_000, 1_000_000, large),
        ("('a' * N)|replace('a', 'bb')|length", 10_000_000, 1_000_000, large),
        ("'{:>N}'.format(1)|length", 20_000_000, 1_000, large),
        ("('a' * N).join(range(20)|list)|length", 1_000_000, 1_000, large),
        ("(range(20)|list)|join('a' * N)|length", 1_000_000, 1_000, large),
        ("('a' * N).strip('b' * 300)|length", 1_000_000, 1_000, long),
        ("('a' * N).lstrip('b' * 300)|length", 1_000_000, 1_000, long),
        ("('a' * N)|trim('b' * 300)|length", 1_000_000, 1_000, long),
        ("('a' * N).split('a')|length", 1_000_000, 1_000, large),
        ("('a' * N)|split('a')|list|length", 1_000_000, 1_000, large),
        ("('a ' * N).split()|length", 1_000_000, 1_000, large),
        ("('a' * N).upper()|length", 6_000_000, 1_000, large),
        ("[('a' * N), ('a' * N)]|tojson|length", 9_000_000, 1_000, large),
        ("[('a' * N), ('a' * N)]|string|length", 9_000_000, 1_000, large),
        ("{'a': 'b' * N, 'c' * N: 1}|tojson|length", 9_000_000, 1_000, large),
        ("([1] * N)|length", 600_000, 1_000, large),
        ("('a\\n' * N)|indent(30)|length", 600_000, 1_000, large),
        ("[1]|batch(N)|list|length", 600_000, 1_000, large),
        ("[1]|slice(N)|list|length", 300_000, 1_000, large),
    ];
    for (expression, refused, fine, why) in cases {
        let of = |n: usize| format!("{{{{ {} }}}}", expression.replace('N', &n.to_string()));
        let error = render(&of(refused), &[], &none).expect_err(expression);
        assert!(error.contains(why), "{expression}: {error}");
        render(&of(fine), &[], &none).unwrap_or_else(|error| panic!("{expression}: {error}"));
    }
}

#[test]
fn all_values_together_and_all_work_are_limited() {
    let none = TemplateArguments::default();
    let repeated = |expression: &str, times: usize| {
        let step = format!("{{% set x = {expression} %}}");
        let source =
            format!("{{% set s = 'a' * 10000000 %}}{{% for i in range({times}) %}}{step}{{% endfor %}}");
        render(&source, &[], &none)
    };
    // 96 MiB may be allocated and 256 MiB read; the text itself is 10 MB.
    for (expression, fine, refused, why) in [
        ("s ~ ''", 8, 10, "it uses too much memory"),
        ("s + ''", 8, 10, "it uses too much memory"),
        ("s[1:]", 8, 10, "it uses too much memory"),
        ("s|upper", 8, 10, "it uses too much memory"),
        ("s == ''", 24, 27, "it takes too long"),
        ("'b' in s", 24, 27, "it takes too long"),
        ("s|length", 24, 27, "it takes too long"),
        ("s[5]", 24, 27, "it takes too long"),
        ("s is lower", 24, 27, "it takes too long"),
        ("s.startswith('b')", 8, 10, "it uses too much memory"),
        ("[s|first]", 100, usize::MAX, ""),
        ("s is string", 100, usize::MAX, ""),
        ("s|default('b')", 100, usize::MAX, ""),
    ] {
        repeated(expression, fine).unwrap_or_else(|error| panic!("{expression}: {error}"));
        if refused < usize::MAX {
            let error = repeated(expression, refused).expect_err(expression);
            assert!(error.contains(why), "{expression}: {error}");
        }
    }
}

#[test]
fn tags_of_1500_words_and_500_elif_tags_are_the_most() {
    let none = TemplateArguments::default();
    // Names and operators, and the end of the tag.
    let sum = |words: usize, operator: &str| vec!["a"; words / 2].join(operator);
    for operator in [" + ", " ~ ", " and "] {
        let longest = arguments(json!({ "a": if operator == " + " { json!(1) } else { json!("b") } }));
        let tag = format!("{{{{ ({})|string|length }}}}", sum(1490, operator));
        let both = format!("{tag}{{% set b = {} %}}", sum(1490, operator));
        render(&both, &[], &longest).unwrap_or_else(|error| panic!("{operator}: {error}"));
    }
    let one = arguments(json!({ "a": 1 }));
    assert_eq!(render(&format!("{{{{ {} }}}}", sum(1500, " + ")), &[], &one).unwrap(), "750");
    let error = render(&format!("{{{{ {} }}}}", sum(1502, " + ")), &[], &one).unwrap_err();
    assert!(error.contains("a tag has more than 1500 words"), "{error}");
    let elif = |count: usize| format!("{{% if a %}}{}x{{% endif %}}", "{% elif a == 2 %}".repeat(count));
    assert_eq!(render(&elif(500), &[], &none).unwrap(), "");
    let error = render(&elif(501), &[], &none).unwrap_err();
    assert!(error.contains("more than 500 elif tags"), "{error}");
}

#[test]
fn lists_are_nested_up_to_a_depth() {
    let none = TemplateArguments::default();
    let nested = |levels: usize| {
        let source = format!(
            "{{% set ns = namespace(l=1) %}}{{% for i in range({levels}) %}}{{% set ns.l = [ns.l] %}}{{% endfor %}}{{{{ ns.l|tojson|length }}}}"
        );
        render(&source, &[], &none)
    };
    assert_eq!(nested(31).unwrap(), "63");
    let error = nested(40).unwrap_err();
    assert!(error.contains("lists are nested too deeply"), "{error}");
    for source in ["{{ dict(a=namespace()) }}", "{{ namespace(a=namespace()) }}", "{{ [namespace()] }}"] {
        let error = render(source, &[], &none).expect_err(source);
        assert!(error.contains("a namespace cannot be an element"), "{source}: {error}");
    }
}
