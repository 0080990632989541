//! Chat templates as real models have them, and malicious ones.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use quadriga_llm::Error;
use quadriga_llm::template::{ChatTemplate, Message};

fn talk() -> Vec<Message> {
    vec![
        Message::new("system", "Be brief."),
        Message::new("user", " Hi <b>&'\"! "),
        Message::new("assistant", "Hello."),
        Message::new("user", "Why?"),
    ]
}

fn render(source: &str) -> String {
    ChatTemplate::new(source, "<s>", "</s>").unwrap().render(&talk(), true).unwrap()
}

fn failure(source: &str) -> String {
    let result = ChatTemplate::new(source, "", "").and_then(|template| template.render(&talk(), true));
    match result {
        Err(error @ Error::Template { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn chatml_of_smollm2_and_qwen2() {
    let source = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nDefault<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
    let expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi <b>&'\"! <|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(render(source), expected);
    let template = ChatTemplate::new(source, "", "").unwrap();
    let alone = template.render(&[Message::new("user", "x")], false).unwrap();
    assert_eq!(alone, "<|im_start|>system\nDefault<|im_end|>\n<|im_start|>user\nx<|im_end|>\n");
}

#[test]
fn llama2_with_the_system_prompt_in_the_first_message() {
    let source = "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}";
    assert_eq!(
        render(source),
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n Hi <b>&'\"! [/INST] Hello. </s><s>[INST] Why? [/INST]"
    );
    let template = ChatTemplate::new(source, "<s>", "</s>").unwrap();
    let twice = [Message::new("user", "a"), Message::new("user", "b")];
    let error = template.render(&twice, true).unwrap_err().to_string();
    assert!(error.contains("Roles must alternate"), "{error}");
}

#[test]
fn llama3_with_dates_and_trimming() {
    let source = "{{- bos_token }}\n{%- if not date_string is defined %}\n    {%- set date_string = strftime_now('%d %b %Y') %}\n{%- endif %}\n{%- if messages[0]['role'] == 'system' %}\n    {%- set system_message = messages[0]['content']|trim %}\n    {%- set messages = messages[1:] %}\n{%- else %}\n    {%- set system_message = '' %}\n{%- endif %}\n{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}\n{%- if tools is not none and tools is defined %}{{- 'Environment: ipython\\n' }}{%- endif %}\n{{- 'Today Date: ' + date_string + '\\n\\n' }}\n{{- system_message }}\n{{- '<|eot_id|>' }}\n{%- for message in messages %}\n    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}\n{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n{%- endif %}\n";
    let text = render(source);
    assert!(text.starts_with("<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: "), "{text}");
    assert!(text.ends_with("\n\nWhy?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"), "{text}");
    assert!(text.contains("user<|end_header_id|>\n\nHi <b>&'\"!<|eot_id|>"), "{text}");
}

#[test]
fn mistral_phi_and_gemma() {
    let mistral = "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{{ '[INST] ' ~ message.content ~ ' [/INST]' }}{% elif message.role == 'assistant' %}{{ message.content + eos_token }}{% endif %}{% endfor %}";
    assert_eq!(render(mistral), "<s>[INST]  Hi <b>&'\"!  [/INST]Hello.</s>[INST] Why? [/INST]");
    let phi = "{% for message in messages %}{% if message['role'] in ['system', 'user'] %}{{'<|' ~ message['role'] ~ '|>\n' + message['content'] + '<|end|>\n'}}{% else %}{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}";
    assert!(render(phi).ends_with("<|user|>\nWhy?<|end|>\n<|assistant|>\n"));
    let gemma = "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{% continue %}{% endif %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}";
    assert!(render(gemma).ends_with("<start_of_turn>model\nHello.<end_of_turn>\n<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n"));
}

#[test]
fn qwen3_with_python_methods_namespaces_and_reversed_slices() {
    let source = "{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}\n{%- for message in messages[::-1] %}\n    {%- set index = (messages|length - 1) - loop.index0 %}\n    {%- if ns.multi_step_tool and message.role == \"user\" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}\n        {%- set ns.multi_step_tool = false %}\n        {%- set ns.last_query_index = index %}\n    {%- endif %}\n{%- endfor %}\n{%- for message in messages %}\n    {%- set content = message.content %}\n    {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}\n    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}\n{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}\n{%- endif %}{{ ns.last_query_index }}";
    let thought = [
        Message::new("user", "a"),
        Message::new("assistant", "<think>hm</think>\n\nb"),
        Message::new("user", "c"),
    ];
    let text = ChatTemplate::new(source, "", "").unwrap().render(&thought, true).unwrap();
    assert_eq!(
        text,
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n2"
    );
}

#[test]
fn json_is_formatted_as_in_python() {
    assert_eq!(render("{{ {'a': [1, '<&é'], 'b': none} | tojson }}"), r#"{"a": [1, "<&é"], "b": null}"#);
    assert_eq!(render("{{ [1, {'a': true}] | tojson(indent=2) }}"), "[\n  1,\n  {\n    \"a\": true\n  }\n]");
}

#[test]
fn generation_tags_are_ignored() {
    assert_eq!(render("a{% generation %}b{%- endgeneration -%} c"), "abc");
}

#[test]
fn bad_templates_are_errors_of_one_line() {
    let endless = failure(
        "{% for a in range(9999) %}{% for b in range(9999) %}{% set c = a %}{% endfor %}{% endfor %}",
    );
    assert!(endless.contains("did not end within"), "{endless}");
    let deep = failure("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}");
    assert!(deep.contains("recursion") || deep.contains("did not end"), "{deep}");
    let loud = failure("{% set a = 'x' * 1000000 %}{% for i in range(10000) %}{{ a }}{% endfor %}");
    assert!(loud.contains("too long"), "{loud}");
    for source in
        ["{% if %}", "{{ messages[0].content.no_such_method() }}", "{{ 1 / 0 }}", "{% include 'x' %}", "{{"]
    {
        let message = failure(source);
        assert!(!message.contains('\n') && message.contains("chat template failed"), "{message}");
    }
    assert!(failure(&" ".repeat(2 << 20)).contains("bytes"));
    let nested = failure(&"{% if true %}".repeat(50_000));
    assert!(nested.contains("chat template failed"));
    let brackets = failure(&format!("{{{{ {}", "(".repeat(100_000)));
    assert!(brackets.contains("chat template failed"));
}

#[test]
fn slices_are_those_of_python() {
    let slices = [
        ("[][::-1]", "[]"),
        ("''[::-1]", ""),
        ("'ab'[5:1:-2]", ""),
        ("'abcdef'[5:1:-2]", "fd"),
        ("'abcdef'[-100:100]", "abcdef"),
        ("'abcdef'[1:-1]", "bcde"),
        ("'abcdef'[-3:-1]", "de"),
        ("'abcdef'[4:2]", ""),
        ("[1, 2, 3][::-1]", "[3, 2, 1]"),
        ("[1, 2, 3][1:]", "[2, 3]"),
        ("[1, 2, 3, 4, 5][::2]", "[1, 3, 5]"),
        ("[1, 2, 3][:-5:-1]", "[3, 2, 1]"),
        ("nothing[1:]|list", "[]"),
        ("-([1, 2]|sum)", "-3"),
    ];
    for (expression, wanted) in slices {
        assert_eq!(render(&format!("{{{{ {expression} }}}}")), wanted, "{expression}");
    }
    assert_eq!(render("{% if messages[1:] %}yes{% endif %}{% if messages[9:] %}no{% endif %}"), "yes");
}

#[test]
fn json_numbers_and_letters_are_those_of_python() {
    let json = |value: &str| render(&format!("{{{{ {value}|tojson }}}}"));
    for (value, text) in [
        ("1.0", "1.0"),
        ("0.0001", "0.0001"),
        ("0.00001", "1e-05"),
        ("1e16", "1e+16"),
        ("-2.5e-7", "-2.5e-07"),
    ] {
        assert_eq!(json(value), text, "{value}");
    }
    assert_eq!(json("1e15"), "1000000000000000.0");
    assert_eq!(render("{{ 'aé😀b'|tojson(ensure_ascii=true) }}"), "\"a\\u00e9\\ud83d\\ude00b\"");
    assert_eq!(
        render("{{ {'b': 1, 'a': [{'d': 2, 'c': 3}]}|tojson(sort_keys=true) }}"),
        r#"{"a": [{"c": 3, "d": 2}], "b": 1}"#
    );
    assert_eq!(render("{{ [1, 2]|tojson(separators=['; ', '=']) }}"), "[1; 2]");
}

#[test]
fn an_error_names_the_line_of_the_template() {
    for (line, source) in [
        (1, "{{ raise_exception('x') }}"),
        (3, "a\n\n{{ raise_exception('x') }}"),
        (4, "{% set a = 1 %}\n{% if a %}\n\n{{ raise_exception('x') }}{% endif %}"),
        (
            5,
            "{% for m in messages %}\n{% if false %}\n\n{% elif true %}\n{{ raise_exception('x') }}{% endif %}{% endfor %}",
        ),
    ] {
        let error = failure(source);
        assert!(error.contains(&format!("(in chat:{line})")), "{line}: {error}");
    }
}

#[test]
fn messages_are_those_of_openai() {
    let read = |text: &str| serde_json::from_str::<Message>(text).unwrap();
    assert_eq!(read(r#"{"role": "user", "content": "hi"}"#), Message::new("user", "hi"));
    let call = read(
        r#"{"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function",
            "function": {"name": "f", "arguments": {"a": 1}}}]}"#,
    );
    assert_eq!((call.content.as_str(), call.tool_calls[0].name.as_str()), ("", "f"));
    assert_eq!(call.tool_calls[0].id.as_deref(), Some("1"));
    let written = serde_json::to_value(&call).unwrap();
    assert_eq!(written["tool_calls"][0]["type"], "function");
    assert_eq!(serde_json::from_value::<Message>(written).unwrap(), call);
    assert!(Message::trusted("user", "x").trusted && !Message::new("user", "x").trusted);
}
