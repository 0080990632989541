//! Expressions of chat templates whose operands are metered: their results are those of Python's Jinja.
#![allow(clippy::unwrap_used, reason = "tests")]

use quadriga_llm::template::{ChatTemplate, Message};

fn render(expression: &str) -> Result<String, String> {
    let source = format!("{{{{ {expression} }}}}");
    let template = ChatTemplate::new(&source, "<s>", "</s>").map_err(|error| error.to_string())?;
    template.render(&[Message::new("user", "x")], false).map_err(|error| error.to_string())
}

fn check(cases: &[(&str, &str)]) {
    for (expression, text) in cases {
        assert_eq!(render(expression).as_deref(), Ok(*text), "{expression}");
    }
}

#[test]
fn products_repeat_text_and_lists_and_multiply_numbers() {
    check(&[
        ("'ab' * 3", "ababab"),
        ("3 * 'ab'", "ababab"),
        ("'ab' * 0", ""),
        ("([1, 2] * 2)|length", "4"),
        ("(2 * [1, 2])|join(',')", "1,2,1,2"),
        ("6 * 7", "42"),
        ("-6 * 7", "-42"),
        ("1.5 * 3", "4.5"),
        ("3 * 0.5", "1.5"),
        ("0.5 * 0.5", "0.25"),
        ("4611686018427387904 * 4", "18446744073709551616"),
    ]);
    assert!(render("'ab' * 1.5").is_err());
    assert!(render("'ab' * 'cd'").is_err());
}

#[test]
fn slices_have_starts_ends_and_steps_as_in_python() {
    check(&[
        ("'abcdef'[1:3]", "bc"),
        ("'abcdef'[:2]", "ab"),
        ("'abcdef'[4:]", "ef"),
        ("'abcdef'[-2:]", "ef"),
        ("'abcdef'[:-2]", "abcd"),
        ("'abcdef'[3:1]", ""),
        ("'abcdef'[0:0]", ""),
        ("'abcdef'[2:-1]", "cde"),
        ("'abcdef'[::2]", "ace"),
        ("'abcdef'[::-1]", "fedcba"),
        ("'abcdef'[4:1:-1]", "edc"),
        ("'abcdef'[4:1:-2]", "ec"),
        ("'abcdef'[-1:-4:-1]", "fed"),
        ("'abcdef'[99:]", ""),
        ("'abcdef'[-99:2]", "ab"),
        ("'aüc'[1:2]", "ü"),
        ("[1, 2, 3, 4][1:3]|join(',')", "2,3"),
        ("[1, 2, 3, 4][-1:]|join(',')", "4"),
        ("[1, 2, 3, 4][::-1]|join(',')", "4,3,2,1"),
        ("[1, 2, 3, 4][3:0:-2]|join(',')", "4,2"),
    ]);
    assert!(render("'abc'[::0]").is_err());
    assert!(render("5[1:2]").is_err());
}

#[test]
fn filters_that_lengthen_their_input_keep_their_meaning() {
    check(&[
        ("'a\\nb'|indent(2)", "a\n  b"),
        ("'a\\nb'|indent(width=1)", "a\n b"),
        ("'abab'|replace('b', 'xx')", "axxaxx"),
        ("[1, 2, 3]|join('-')", "1-2-3"),
        ("'%s and %s'|format('a', 'b')", "a and b"),
        ("[1, 2, 3]|batch(2)|map('join', '')|join(',')", "12,3"),
        ("[1, 2, 3]|slice(2)|map('join', '')|join(',')", "12,3"),
        ("' ab '|trim", "ab"),
        ("'xxabxx'|trim('x')", "ab"),
        ("[1, 2, 3]|sum", "6"),
        ("'a,b'|split(',')|join('+')", "a+b"),
        ("'abc'|reverse", "cba"),
        ("[1, 2, 3]|reverse|join(',')", "3,2,1"),
    ]);
}

#[test]
fn tests_of_types_are_those_of_python() {
    check(&[
        ("none is iterable", "False"),
        ("5 is iterable", "False"),
        ("'a' is iterable", "True"),
        ("[] is iterable", "True"),
        ("{} is iterable", "True"),
        ("'a' is sequence", "True"),
        ("{} is sequence", "True"),
        ("none is sequence", "False"),
        ("5 is sequence", "False"),
    ]);
    assert!(render("{'a': 1}[0:1]").is_err(), "dictionaries have no slices");
    assert!(render("{'a': 1}|reverse|list|length").is_ok_and(|length| length == "1"));
    assert_eq!(render("(nothing|reverse)|list|length").as_deref(), Ok("0"));
}

#[test]
fn several_assignments_and_filters_in_one_tag_stay_apart() {
    let render = |source: &str| {
        ChatTemplate::new(source, "<s>", "</s>").unwrap().render(&[Message::new("user", "x")], false).unwrap()
    };
    assert_eq!(render("{% with a = 1, b = 2, (c, d) = [3, 4] %}{{ a + b * c - d }}{% endwith %}"), "3");
    assert_eq!(render("{% macro m(a, b=2, c=3) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ m(1, c=5) }}"), "125");
    assert_eq!(render("{% set a | upper | replace('B', 'c') %}ab{% endset %}{{ a }}"), "Ac");
    assert_eq!(render("{% filter upper|replace('B', 'c') %}ab{% endfilter %}"), "Ac");
    assert_eq!(render("{{ {'a': 1, 'b': 2}|items|list|length }}{{ (1,)|length }}{{ (1, 2)|length }}"), "212");
    assert_eq!(
        render("{{ 7 // 2 }} {{ 7 % 4 }} {{ 2 ** 3 }} {{ 7 - 2 }} {{ 7 / 2 }} {{ 2.0 }}"),
        "3 3 8 5 3.5 2.0"
    );
    assert_eq!(
        render("{{ not (1 < 2) or 'b' in 'abc' and 2 >= 2 }} {{ 1 <= 0 }} {{ 1 != 1 }}"),
        "True False False"
    );
}
