#!/usr/bin/env python3
"""Writes templates.json: small chat templates that use the features of published ones, and what Python's Jinja makes of
them, set up as Hugging Face's Transformers do it. Needs: pip install jinja2
"""
import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "..", "..", "bench"))
from agree_on_templates import CONVERSATIONS, DOCUMENTS, TOOLS, python  # noqa: E402

TALKS = [CONVERSATIONS[name] for name in ("system", "reasoning", "inline reasoning", "tool call", "two calls")]
VARIABLES = [{}, {"tools": TOOLS, "enable_thinking": False, "reasoning_effort": "low"}, {"documents": DOCUMENTS, "add_generation_prompt": False}]

TEMPLATES = {
    "tools as JSON lines, thinking that the last turn keeps": """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content|trim + '\\n\\n' }}{%- endif %}
    {{- "Tools:" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string and not message.content.startswith('<tool') %}
        {%- set ns.searching = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set reasoning = '' %}
    {%- set content = message.content %}
    {%- if message.reasoning_content is string %}
        {%- set reasoning = message.reasoning_content %}
    {%- elif '</think>' in content %}
        {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role }}
    {%- if reasoning and loop.index0 > ns.last %}{{- '\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}
    {{- '\\n' + content }}
    {%- for tool_call in message.tool_calls or [] %}
        {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
        {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
        {{- '<tool_call>{"name": "' ~ tool_call.name ~ '", "arguments": ' ~ (tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson) ~ '}</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
""",
    "channels, types by a recursive macro": """
{%- macro type_of(spec, level=0) -%}
  {%- if spec.type == 'object' -%}
    {{- '{' -}}{%- for name, inner in (spec.properties or {}).items() -%}{{- name -}}{%- if name not in (spec.required or []) -%}?{%- endif -%}: {{ type_of(inner, level + 1) }}{%- if not loop.last %}, {% endif -%}{%- endfor -%}{{- '}' -}}
  {%- elif spec.type == 'array' -%}{{ type_of(spec['items'], level=level + 1) }}[]
  {%- elif spec.enum -%}{{ spec.enum | map('tojson') | join(' | ') }}
  {%- else -%}{{ spec.type if spec.type is string else 'any' }}
  {%- endif -%}
{%- endmacro -%}
<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}
{% if tools is not none and tools -%}
namespace functions {
{%- for tool in tools %}{%- set f = tool.function %}
// {{ f.description }}
type {{ f.name }} = ({% if f.parameters.properties | length > 0 %}_: {{ type_of(f.parameters) }}{% endif %}) => any;
{%- endfor %}
}
{%- endif %}<|end|>
{%- for message in messages -%}
  {%- if message.role == 'assistant' -%}
    {%- if message.tool_calls is defined -%}
      {%- if message.reasoning_content and not message.content %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.reasoning_content + '<|end|>' -}}{% endif -%}
      {%- for call in message.tool_calls -%}{{- '<|start|>assistant to=functions.' ~ call.function.name ~ '<|channel|>commentary json<|message|>' ~ call.function.arguments|tojson ~ '<|call|>' -}}{%- endfor -%}
    {%- else -%}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + ('<|return|>' if loop.last and not add_generation_prompt else '<|end|>') -}}{%- endif -%}
  {%- elif message.role == 'tool' -%}{{- '<|start|>functions.' ~ message.name ~ ' to=assistant<|channel|>commentary<|message|>' ~ message.content|tojson ~ '<|end|>' -}}
  {%- else -%}{{- '<|start|>' ~ message.role ~ '<|message|>' ~ message.content ~ '<|end|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
""",
    "JSON with options": """
{{- tools | tojson(indent=2) if tools else 'no tools' }}|
{{- arguments | default({'b': [], 'a': {}, 'c': [1.0, 2.5, 1e-7, 1e20, -0.0, true, none, 'ü\\t"<']}) | tojson(indent=4) }}|
{{- {'z': 'Ünï 😀', 'a': {'y': 1, 'b': 2}} | tojson(ensure_ascii=true, sort_keys=True) }}|
{{- [1, {'a': [2]}] | tojson(separators=(',', ':')) }}|{{ messages | length | tojson }}|{{ 'x' | tojson }}|{{ {} | tojson(indent=0) }}|{{ [[], [1]] | tojson(indent=0) }}
""",
    "types": """
{%- set values = [none, true, 0, 1.5, '', 'text', [], [1], {}, {'a': 1}, missing, (1, 2)] %}
{%- for value in values %}
{{ loop.index }}:{% if value is defined %}defined {% endif %}{% if value is none %}none {% endif %}{% if value is string %}string {% endif %}{% if value is mapping %}mapping {% endif %}
{%- if value is iterable %}iterable {% endif %}{% if value is sequence %}sequence {% endif %}{% if value is number %}number {% endif %}{% if value is boolean %}boolean {% endif %}{% if value %}true{% endif %}
{%- endfor %}
{{ tools is iterable }} {{ tools is none }} {{ documents is defined }} {{ tools is not string }} {{ (tools or []) | length }}
""",
    "controls, filters and methods": """
{%- for message in messages if message.role != 'system' %}
  {%- if loop.index > 3 %}{% break %}{% endif %}
  {%- if not message.content %}{% continue %}{% endif %}
  {%- set short = message.content[:10] if message.content | length > 10 else message.content %}
{{ loop.index0 }}/{{ loop.length }} {{ loop.previtem.role if loop.previtem is defined else '-' }} {{ message['role'] | upper }} {{ message.role.title() }}: {{ short | trim | replace('\\n', ' ') | indent(2) }}
{%- else %}nobody
{%- endfor %}
{{ messages | map(attribute='role') | unique | list | join(',') }} {{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ messages | rejectattr('role', 'in', ['user', 'tool']) | map(attribute='role') | list }}
{{ {'b': 1, 'a': 2} | dictsort }} {{ {'b': 1, 'a': 2}.items() | list }} {{ {'b': 1}.get('c', 'none') }} {{ [3, 1, 2] | sort | first }} {{ [1, 2, 3] | last }} {{ 'a,b,c'.split(',', 1) }} {{ 'x'.join(['1', '2']) }}
{{ '%s is %d' | format('it', 3) }} {{ '{} and {}'.format('a', 'b') }} {{ 'abc'.endswith('c') and 'abc'.find('b') == 1 }} {{ ' x '.rstrip() ~ '|' }} {{ 7 // 2 }} {{ 7 % 3 }} {{ 2 ** 3 }} {{ range(3) | list }} {{ 'aXb'.lower() }}
{%- set ns = namespace(found=[]) %}{% for message in messages %}{% set ns.found = ns.found + [message.role] %}{% endfor %}
{{ ns.found }} {{ ns.found[1:] }} {{ ns.found[-1] }} {{ ns.found[::-1] | join('<') }} {{ messages[0].content[::-1] }} {{ messages[0]['missing'] is defined }} {{ messages[0].missing or 'no' }}
""",
    "generation tags and whitespace": """
{% for message in messages %}
    {% if message.role == 'assistant' %}
    {% generation %}{{ message.content }}{% endgeneration %}
    {%- else %}
        {# a comment #}
        {{ message.content }}
    {% endif %}
{% endfor %}

end
""",
    "roles that must alternate": """
{%- if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}
{%- for message in rest %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate, not ' ~ message.role) }}{% endif %}{{ bos_token ~ message.content ~ eos_token }}{% endfor %}
""",
    "documents and blocks": """
{%- set text %}{% for document in documents or [] %}
{{ loop.cycle('-', '+') }} {{ document.title }}: {{ document['text'] | replace('\\n', ' / ') }}
{%- endfor %}{% endset %}
{%- macro turn(role) %}<{{ role }}>{{ caller() }}</{{ role }}>{% endmacro %}
{%- for message in messages %}{% call turn(message.role) %}{{ message.content | trim }}{% endcall %}{% endfor %}
{{- text }}{% filter upper %}done{% endfilter %}{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ 'y' if documents is none else 'n' }}
""",
}


def main():
    cases = []
    for name, template in TEMPLATES.items():
        for messages in TALKS:
            for variables in VARIABLES:
                case = {"template": template, "messages": messages, "variables": variables, "bos_token": "<s>", "eos_token": "</s>"}
                result = python(case)
                if "error" in result and "alternate" not in result["error"]:
                    sys.exit(f"{name}: {result}")
                # Texts are long; templates, messages and variables are stored once.
                cases.append({"template": name, "messages": TALKS.index(messages), "variables": VARIABLES.index(variables)} | result)
    stored = {"templates": TEMPLATES, "messages": TALKS, "variables": VARIABLES, "cases": cases}
    with open(os.path.join(HERE, "templates.json"), "w", encoding="utf-8") as file:
        json.dump(stored, file, ensure_ascii=True, indent=0)
        file.write("\n")


if __name__ == "__main__":
    main()
