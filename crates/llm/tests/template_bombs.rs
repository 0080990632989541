//! Templates that try to use up memory or time end with an error, in a process whose memory is limited.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::process::Command;

use quadriga_llm::template::{ChatTemplate, Message};

/// The address space of the child in KiB. An allocation beyond it aborts the process.
const MEMORY: usize = 1500 << 10;

/// Templates, and whether they may succeed.
fn bombs() -> Vec<(String, bool)> {
    let doubled = |step: &str| {
        format!(
            "{{% set ns = namespace(s='aaaaaaaaaaaaaaaa', l=[1]) %}}{{% for i in range(60) %}}{step}{{% endfor %}}{{{{ ns.s|length }}}}"
        )
    };
    let mut bombs: Vec<String> = [
        "{{ 'a\nb'|indent(200000000000) }}",
        "{{ 'a\nb'|indent(18446744073709551615) }}",
        "{{ 'a\nb'|indent(width=200000000000) }}",
        "{{ ['a\nb']|map('indent', 200000000000)|list }}",
        "{% filter indent(200000000000) %}a\nb{% endfilter %}",
        "{% set x | indent(200000000000) %}a\nb{% endset %}",
        "{% for i in range(100000) %}{% for j in range(10) %}{% set x = 'a' * 100000000 %}{% endfor %}{% endfor %}",
        "{% set x = [1] * 100000000 %}{{ x|length }}{% set y = x|list %}{% set z = y|list %}",
        "{% set x = (1, 2) * 90000000 %}{{ x|length }}",
        "{% set s = 'a' * 10000000 %}{{ s.replace('a', s)|length }}",
        "{% set s = 'a' * 10000000 %}{{ s|replace('a', s)|length }}",
        "{% set s = 'a' * 10000000 %}{{ s|replace('', s)|length }}",
        "{{ '%0100000000000d'|format(1)|length }}",
        "{{ '%*d'|format(100000000000, 1)|length }}",
        "{{ '{:>100000000000}'.format(1)|length }}",
        "{{ '{:{}}'.format(1, 100000000000)|length }}",
        "{{ '{0:>{1}}'.format(1, 100000000000)|length }}",
        "{{ '%.100000000000f'|format(1.5)|length }}",
        "{% set l = range(100000)|list %}{{ ('a' * 1000000).join(l)|length }}",
        "{% set l = range(100000)|list %}{{ l|join('a' * 1000000)|length }}",
        "{{ [1]|batch(100000000000, 'x')|list|length }}",
        "{{ [1]|slice(100000000000, 'x')|list|length }}",
        "{% set s = 'a' * 10000000 %}{{ s|trim(s)|length }}{{ s.strip(s + 'b')|length }}",
        "{% set s = 'a' * 10000000 %}{% for i in range(100000) %}{% set x = s|upper %}{% endfor %}",
        "{% set s = 'a' * 10000000 %}{% for i in range(100000) %}{% if s == s %}{% endif %}{% endfor %}",
        "{% set s = 'a' * 10000000 %}{% for i in range(100000) %}{% if 'b' in s %}{% endif %}{% endfor %}",
        "{% set s = 'a' * 10000000 %}{% for i in range(100000) %}{% if s is endingwith('b' + s) %}{% endif %}{% endfor %}",
        "{% set s = 'a' * 10000000 %}{% for i in range(100000) %}{% if s is string and s is not lower %}{{ s is upper }}{% endif %}{% endfor %}",
        "{% set s = 'a' * 10000000 %}{% for i in range(100000) %}{% if s is lower %}{% endif %}{% endfor %}",
        "{% set s = 'a' * 10000000 %}{% for i in range(100000) %}{% set x = s|length %}{% endfor %}",
        "{% set s = 'a' * 10000000 %}{% for i in range(100000) %}{% set x = s|count %}{% endfor %}",
        "{% set s = 'a' * 10000000 %}{% for i in range(100000) %}{% set x = s|safe %}{% endfor %}",
        "{% set s = 'a' * 10000000 %}{% for i in range(100000) %}{% set x = s[9999999] %}{% endfor %}",
        "{% set s = 'a' * 10000000 %}{% for i in range(100000) %}{% set x = s[::-1] %}{% endfor %}",
        "{% set s = 'a' * 10000000 %}{% for i in range(100000) %}{% set x = s.split('a') %}{% endfor %}",
        "{% set s = 'a' * 10000000 %}{% for i in range(100000) %}{% set x = s|list %}{% endfor %}",
        "{% set s = 'a' * 10000000 %}{{ [s, s, s, s, s, s, s, s, s]|tojson|length }}",
        "{% set s = 'a' * 1000 %}{% for i in range(100000) %}{{ s }}{% endfor %}",
        "{% set x %}{% for i in range(100000) %}{% for j in range(100) %}{{ 'a' * 1000 }}{% endfor %}{% endfor %}{% endset %}{{ x|length }}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}aaaaaaaaaaaaaaaa{% endif %}{% endmacro %}{% set x = f(40) %}{{ x|length }}",
        "{% for i in range(9999) recursive %}{{ loop(range(9999)) }}{% endfor %}",
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{{ 2 ** 100000 }}",
        "{{ (9999999999999999999 ** 2) * 99999999999999999999999 }}",
        // Values that are too deep to be dropped.
        "{% set ns = namespace(l=[]) %}{% for i in range(100000) %}{% for j in range(10) %}{% set ns.l = [ns.l] %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(l=[]) %}{% for i in range(100000) %}{% set ns.l = {'a': ns.l} %}{% endfor %}",
        "{% set ns = namespace(l=[]) %}{% for i in range(100000) %}{% set ns.l = (ns.l,) %}{% endfor %}",
        "{% set ns = namespace(l=[]) %}{% for i in range(100000) %}{% set ns.l = dict(a=ns.l) %}{% endfor %}",
        "{% set ns = namespace(l=[]) %}{% for i in range(100000) %}{% set ns.l = namespace(a=ns.l) %}{% endfor %}",
        "{% set ns = namespace(l=[1]) %}{% for i in range(100000) %}{% set ns.l = ns.l|batch(1) %}{% endfor %}",
        "{% set ns = namespace(c=1) %}{% set ns.c = ns %}{{ ns }}",
        "{% set ns = namespace(a=1) %}{% for i in range(100000) %}{% set n = namespace(p=1) %}{% set n.p = ns %}{% set ns = n %}{% endfor %}",
        "{% set ns = namespace(a=1) %}{% set ns.l = [ns] %}{{ ns.l }}",
    ]
    .map(str::to_owned)
    .to_vec();
    bombs.extend(
        [
            "{% set ns.s = ns.s ~ ns.s %}",
            "{% set ns.s = ns.s + ns.s %}",
            "{% set ns.s = ns.s * 2 %}",
            "{% set ns.s = ns.s.replace('a', 'aa') %}",
            "{% set ns.s = ns.s|replace('a', 'aa') %}",
            "{% set ns.s = [ns.s, ns.s]|join %}",
            "{% set ns.s = ''.join([ns.s, ns.s]) %}",
            "{% set ns.s = '%s%s'|format(ns.s, ns.s) %}",
            "{% set ns.s = '{0}{0}'.format(ns.s) %}",
            "{% set ns.s = ns.s|tojson|tojson %}",
            "{% set ns.s = [ns.s, ns.s]|string %}",
            "{% set ns.s = [ns.s, ns.s]|sum(start='') %}",
            "{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}",
            "{% filter upper %}{{ ns.s }}{% endfilter %}{% set ns.s = ns.s ~ ns.s %}",
            "{% set ns.l = [ns.l, ns.l] %}{% set ns.s = ns.l|string %}",
            "{% set ns.l = [ns.l, ns.l] %}{{ ns.l }}",
            "{% set ns.l = [ns.l, ns.l] %}{{ ns.l == ns.l }}",
            "{% set ns.l = [ns.l, ns.l] %}{% if 2 in ns.l %}{% endif %}",
            "{% set ns.l = [ns.l, ns.l] %}{{ ns.l|tojson|length }}",
            "{% set ns.l = [ns.l, ns.l] %}{{ {'a': 1}.get(ns.l) }}",
            "{% set ns.l = [ns.l, ns.l] %}{{ {'a': 1}[ns.l] }}",
            "{% set ns.l = {'a': ns.l, 'b': ns.l} %}{{ ns.l|tojson|length }}",
            "{% set ns.l = ns.l + ns.l %}{{ ns.l|list|length }}",
            "{% set ns.l = ns.l + ns.l %}{{ ns.l[-1] }}{{ ns.l[::-1]|length }}",
            "{% set ns.l = ns.l * 2 %}{{ ns.l|length }}",
            "{% set ns.l = ns.l + ns.l %}{{ ns.l|sum }}{{ ns.l|map('string')|join|length }}",
            "{% set ns.l = ns.l|list + ns.l|list %}{{ ns.l|length }}",
        ]
        .map(doubled),
    );
    // Literals and chains.
    bombs.push(format!("{{% set s = 'a' * 100000 %}}{{{{ ({})|length }}}}", vec!["s"; 100_000].join(" ~ ")));
    bombs.push(format!(
        "{{% set s = '{}' %}}{{% for i in range(100000) %}}{{{{ s }}}}{{% endfor %}}",
        format!("{}\n", "x".repeat(60_000)).repeat(15)
    ));
    bombs.push(format!(
        "{{% set x %}}{{% for i in range(100000) %}}{}{{% endfor %}}{{% endset %}}",
        format!("{}\n", "x".repeat(60_000)).repeat(15)
    ));
    bombs.push(format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(80_000)));
    bombs.push(format!("{{{{ a{} }}}}", ".a".repeat(400_000)));
    bombs.push(format!("{{{{ a{} }}}}", "|d".repeat(400_000)));
    bombs.push(format!("{{{{ {}a }}}}", "a and ".repeat(150_000)));
    bombs.push(format!("{{{{ {}a }}}}", "not ".repeat(200_000)));
    bombs.push(format!("{{{{ {}a }}}}", "a if a else ".repeat(80_000)));
    bombs.push(format!("{{{{ {}1{} }}}}", "[".repeat(100_000), "]".repeat(100_000)));
    let mut bombs: Vec<(String, bool)> = bombs.into_iter().map(|source| (source, false)).collect();
    // Shadowing the meters changes nothing: these are only variables.
    bombs.push((doubled("{% set text__ = 1 %}{% set added__ = 1 %}{% set ns.s = ns.s ~ ns.s %}"), false));
    bombs.push(("{% macro text__(x) %}{% endmacro %}{% set s = 'a' * 10 %}{{ s ~ s }}".to_owned(), true));
    // Slices and reversed lists do not pile up.
    for step in ["ns.l[0:]", "ns.l[::-1]", "ns.l|reverse", "ns.l|list", "(ns.l|select)"] {
        bombs.push((
            format!(
                "{{% set ns = namespace(l=[1, 2]) %}}{{% for i in range(50000) %}}{{% set ns.l = {step} %}}{{% endfor %}}{{{{ ns.l }}}}"
            ),
            true,
        ));
    }
    bombs
}

/// One bomb, chosen by its number in the environment; does nothing in a normal run.
#[test]
fn child() {
    let Ok(number) = std::env::var("QUADRIGA_TEST_BOMB") else { return };
    for (i, (source, may_succeed)) in bombs().into_iter().enumerate() {
        if number != "all" && number != i.to_string() {
            continue;
        }
        // An abort leaves this as the last line.
        let shown: String = source.chars().take(200).collect();
        println!("bomb {i}: {shown}");
        let template = ChatTemplate::new(&source, "", "");
        let rendered = template.and_then(|template| template.render(&[Message::new("user", "hi")], true));
        match rendered {
            Ok(text) => assert!(may_succeed && text.len() < 1000, "bomb {i} gave {} bytes", text.len()),
            Err(error) => {
                let error = error.to_string();
                // The budgets end it, not the clock.
                assert!(
                    !may_succeed && error.len() < 2000 && !error.contains("time is up"),
                    "bomb {i}: {error}"
                )
            }
        }
    }
    println!("all bombs were refused");
}

#[test]
fn lines_that_are_too_long_are_refused() {
    let refused = |source: &str| ChatTemplate::new(source, "", "").unwrap_err().to_string();
    let error = refused(&"{% raw %}".repeat(50_000));
    assert!(error.contains("line 1 has more than 65535 bytes"), "{error}");
    assert!(refused(&format!("\n{{{{ {} }}}}", " ".repeat(70_000))).contains("line 2"));
    let longest = format!("{}\n{}", "x".repeat(65_535), "y".repeat(65_535));
    assert_eq!(ChatTemplate::new(&longest, "", "").unwrap().render(&[], true).unwrap(), longest);
}

#[test]
fn templates_cannot_use_up_memory_or_time() {
    let program = std::env::current_exe().unwrap();
    let script = format!("ulimit -v {MEMORY}; exec \"$0\" --exact child --nocapture --test-threads 1");
    let child = Command::new("sh")
        .args(["-c", &script])
        .arg(program)
        .env("QUADRIGA_TEST_BOMB", "all")
        .output()
        .expect("sh must be there");
    let (out, err) = (String::from_utf8_lossy(&child.stdout), String::from_utf8_lossy(&child.stderr));
    let last = out.lines().rev().find(|line| line.starts_with("bomb ")).unwrap_or("none");
    assert!(
        child.status.success() && out.contains("all bombs were refused"),
        "{}\n{last}\n{err}",
        child.status
    );
}
