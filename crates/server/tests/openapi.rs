//! `/openapi.json` is true: every field that it describes is read and checked by the route, and every route is described.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::collections::BTreeSet;
use std::sync::Arc;

use quadriga_server::field_log::FieldLog;

use crate::common::{Setup, TestServer, Value, json, model};

/// A value that a schema describes, as small as possible.
fn example(schema: &Value) -> Value {
    if let Some(first) = schema["anyOf"].get(0).filter(|_| schema["properties"].is_null()) {
        return example(first);
    }
    if let Some(known) = schema["enum"].get(0) {
        return known.clone();
    }
    let kind = schema["type"].as_str().or_else(|| schema["type"][0].as_str()).unwrap();
    match kind {
        "string" => json!("x"),
        "integer" | "number" => json!(schema["minimum"].as_f64().unwrap_or(1.0).max(1.0) as i64),
        "boolean" => json!(false),
        "array" => match schema["minItems"].as_u64() {
            Some(_) => json!([example(&schema["items"])]),
            None => json!([]),
        },
        "object" => required(schema),
        other => panic!("{other}"),
    }
}

/// An object with the fields that must be there.
fn required(schema: &Value) -> Value {
    let mut names: Vec<&str> = schema["required"]
        .as_array()
        .map(|all| all.iter().filter_map(Value::as_str).collect())
        .unwrap_or_default();
    names.extend(schema["anyOf"][0]["required"].as_array().into_iter().flatten().filter_map(Value::as_str));
    names.into_iter().map(|name| (name.to_owned(), example(&schema["properties"][name]))).collect()
}

/// A value of another type than a schema describes.
fn wrong(schema: &Value) -> Option<Value> {
    let text = schema.to_string();
    let candidates = [json!({ "wrong": [{}] }), json!("wrong"), json!(true), json!([[[true]]])];
    let kinds = ["\"object\"", "\"string\"", "\"boolean\"", "\"array\""];
    candidates.into_iter().zip(kinds).find(|(_, kind)| !text.contains(kind)).map(|(value, _)| value)
}

fn document(server: &TestServer) -> Value {
    let document = server.get("/openapi.json").ok();
    assert_eq!(document["openapi"], "3.1.0");
    document
}

/// Routes with a body, and its schema; several where a route belongs to two interfaces.
fn bodies(document: &Value) -> Vec<(String, Value)> {
    let mut all = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        let schema = &item["post"]["requestBody"]["content"]["application/json"]["schema"];
        match (&schema["properties"], schema["anyOf"].as_array()) {
            (Value::Null, Some(forms)) => all.extend(forms.iter().map(|form| (path.clone(), form.clone()))),
            (Value::Null, None) => {}
            _ => all.push((path.clone(), schema.clone())),
        }
    }
    all
}

/// Fields that tell one interface from another where a route belongs to two.
const TELLS_FORMS_APART: [(&str, &str); 2] = [("/completions", "model"), ("/embeddings", "content")];

#[test]
fn every_field_is_read_and_checked() {
    let server = TestServer::start();
    let document = document(&server);
    let mut checked = 0;
    for (path, schema) in bodies(&document) {
        for (name, field) in schema["properties"].as_object().unwrap() {
            let Some(value) = wrong(field) else { continue };
            let mut body = required(&schema);
            // Either of two fields has the texts; one is enough.
            if !schema["anyOf"].is_null() && schema["anyOf"].to_string().contains(name.as_str()) {
                body.as_object_mut().unwrap().clear();
                if schema["properties"].get("query").is_some() {
                    body["query"] = json!("x");
                }
            }
            body[name] = value;
            let answer = server.post(&path, &body);
            assert_eq!(answer.status, 400, "{path}: {name} of {body}: {}", answer.text());
            assert!(answer.text().contains(name.as_str()), "{path}: {name}: {}", answer.text());
            checked += 1;
        }
        // What must be there is asked for.
        let names = schema["required"].as_array().unwrap().iter().filter_map(Value::as_str);
        for name in names.filter(|name| !TELLS_FORMS_APART.contains(&(path.as_str(), *name))) {
            let mut body = required(&schema);
            body.as_object_mut().unwrap().remove(name);
            let answer = server.post(&path, &body);
            assert_eq!(answer.status, 400, "{path} without {name}: {}", answer.text());
            assert!(answer.text().contains(name), "{}", answer.text());
        }
    }
    assert!(checked > 200, "{checked}");
}

/// The places of all fields that a schema describes, such as `messages[].role`.
fn described(schema: &Value, place: &str, into: &mut BTreeSet<String>) {
    for form in schema["anyOf"].as_array().into_iter().flatten() {
        described(form, place, into);
    }
    if !schema["items"].is_null() {
        described(&schema["items"], &format!("{place}[]"), into);
    }
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        let place = if place.is_empty() { name.clone() } else { format!("{place}.{name}") };
        described(field, &place, into);
        into.insert(place);
    }
}

/// Values with every field and every alternative that a schema describes, each in one of them.
fn variants(schema: &Value) -> Vec<Value> {
    let alternatives = schema["anyOf"].as_array().filter(|_| schema["properties"].is_null());
    if let Some(forms) = alternatives {
        return forms.iter().flat_map(variants).collect();
    }
    if let Some(known) = schema["enum"].as_array() {
        return known.clone();
    }
    let kinds = schema["type"].as_array().cloned().unwrap_or_else(|| vec![schema["type"].clone()]);
    // Where one of several fields must be there.
    let base = |form: &Value| {
        let mut base = required(schema);
        let others = schema["anyOf"].as_array().into_iter().flatten().filter(|other| *other != form);
        for name in others.flat_map(|other| other["required"].as_array().unwrap()) {
            base.as_object_mut().unwrap().remove(name.as_str().unwrap());
        }
        for name in form["required"].as_array().into_iter().flatten() {
            let name = name.as_str().unwrap();
            base[name] = example(&schema["properties"][name]);
        }
        base
    };
    match kinds[0].as_str().unwrap() {
        "null" => vec![Value::Null],
        "boolean" => vec![json!(true), json!(false)],
        "array" if schema["maxItems"] == 0 || schema["items"].is_null() => vec![json!([])],
        "array" => variants(&schema["items"]).into_iter().map(|item| json!([item])).collect(),
        "object" => {
            let forms = schema["anyOf"].as_array().cloned().unwrap_or_else(|| vec![Value::Null]);
            let mut all = Vec::new();
            for base in forms.iter().map(base) {
                all.push(base.clone());
                for (name, field) in schema["properties"].as_object().into_iter().flatten() {
                    all.extend(variants(field).into_iter().map(|value| {
                        let mut object = base.clone();
                        object[name] = value;
                        object
                    }));
                }
            }
            all
        }
        _ => vec![example(schema)],
    }
}

/// Both directions: a field that no parser asks for is not described, and one that a parser asks for is. Requests go the whole way, and
/// the server notes the names of all fields that it looks for.
#[test]
fn fields_that_are_read_are_those_described() {
    let log = Arc::new(FieldLog::default());
    let mut setup = Setup { model: model::with_fill_tokens(), ..Setup::default() };
    setup.defaults.max_tokens = Some(1);
    let server = TestServer::of(setup.app().with_field_log(Arc::clone(&log)));
    let document = document(&server);
    let mut wrong = Vec::new();
    let mut compared = 0;
    for (path, item) in document["paths"].as_object().unwrap() {
        let post = &item["post"];
        let schema = &post["requestBody"]["content"]["application/json"]["schema"];
        // Other names of a route have a number; without a loader an unloaded model would not come back.
        let is_alias = post["operationId"].as_str().is_none_or(|id| id.contains('_'));
        if schema.is_null() || is_alias || path == "/models/unload" {
            continue;
        }
        for body in variants(schema) {
            server.post(path, &body);
        }
        let mut names = BTreeSet::new();
        described(schema, "", &mut names);
        let read = log.fields(path);
        wrong.extend(
            read.difference(&names).map(|name| format!("{path} reads {name}, which is not described")),
        );
        wrong.extend(
            names.difference(&read).map(|name| format!("{path} describes {name}, which is not read")),
        );
        compared += names.len();
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(compared > 1000, "{compared}");
}

#[test]
fn nulls_are_absent_and_routes_exist() {
    let server = TestServer::start();
    let document = document(&server);
    // Without a loader the model would not come back.
    for (path, schema) in bodies(&document).into_iter().filter(|(path, _)| path != "/models/unload") {
        let mut body = required(&schema);
        for (name, field) in schema["properties"].as_object().unwrap() {
            if body.get(name).is_none() && field.to_string().contains("\"null\"") {
                body[name] = Value::Null;
            }
        }
        for (name, value) in [("max_tokens", json!(1)), ("n_predict", json!(1)), ("stream", json!(false))] {
            if schema["properties"].get(name).is_some() {
                body[name] = value;
            }
        }
        if path == "/models/load" {
            // Only its own name loads it.
            body["model"] = json!("small");
        }
        let answer = server.post(&path, &body);
        // This model computes no embeddings, cannot rank, and cannot fill a gap.
        assert!([200, 501].contains(&answer.status), "{path}: {body}: {} {}", answer.status, answer.text());
    }
    for (path, item) in document["paths"].as_object().unwrap() {
        if !item["get"].is_null() {
            let answer = server.get(&path.replace("{model}", "small"));
            let status = match path.as_str() {
                // This model was loaded without a picture of its plan.
                "/plan" | "/plan.svg" => 404,
                // There is one model.
                "/models/sse" => 501,
                _ => 200,
            };
            assert_eq!(answer.status, status, "{path}");
        }
        let responses =
            item["get"]["responses"].as_object().or(item["post"]["responses"].as_object()).unwrap();
        assert!(responses.contains_key("200") && responses.contains_key("404"));
        // Whatever is asked for, under a name that is not the server's it is refused.
        let (path, method) =
            (path.replace("{model}", "small"), if item["get"].is_null() { "POST" } else { "GET" });
        let request = format!("{method} {path} HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n");
        let refused = server.client().raw(request.as_bytes());
        let refused = String::from_utf8_lossy(&refused);
        assert!(refused.contains("HTTP/1.1 403 Forbidden\r\n"), "{path}: {refused}");
        assert!(responses.contains_key("403"), "{path}");
    }
}

#[test]
fn errors_have_the_described_form() {
    let server = TestServer::start();
    let document = document(&server);
    let has_form = |value: &Value, schema: &Value| {
        let kinds = schema["type"].as_array().cloned().unwrap_or_else(|| vec![schema["type"].clone()]);
        let kind = match value {
            Value::Null => "null",
            Value::String(_) => "string",
            Value::Number(_) => "integer",
            Value::Object(_) => "object",
            Value::Bool(_) | Value::Array(_) => "other",
        };
        kinds.contains(&json!(kind))
    };
    let mut checked = 0;
    for (path, item) in document["paths"].as_object().unwrap() {
        let (wrong, method) = if item["post"].is_null() { ("POST", "get") } else { ("GET", "post") };
        let schema = &item[method]["responses"]["405"]["content"]["application/json"]["schema"];
        let schema = document.pointer(&schema["$ref"].as_str().unwrap()[1..]).unwrap();
        let path = &path.replace("{model}", "small");
        let mut answers = Vec::new();
        if item["get"].is_null() || item["post"].is_null() {
            answers.push((405, server.client().send(wrong, path, b"").answer()));
        }
        if method == "post" {
            answers.push((400, server.client().send("POST", path, b"{").answer()));
        }
        for (status, answer) in answers {
            assert_eq!(answer.status, status, "{path}");
            let answer = answer.json();
            for name in schema["required"].as_array().unwrap().iter().filter_map(Value::as_str) {
                let field = &schema["properties"][name];
                assert!(has_form(&answer[name], field), "{path}: {answer} is not {schema}");
                for inner in field["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
                    let form = &field["properties"][inner];
                    assert!(has_form(&answer[name][inner], form), "{path}: {answer} is not {schema}");
                }
            }
            checked += 1;
        }
    }
    assert!(checked > 60, "{checked}");
}

#[test]
fn wrong_methods_name_the_right_one() {
    let server = TestServer::start();
    let answer = server.get("/v1/chat/completions");
    assert_eq!((answer.status, answer.header("allow")), (405, Some("POST")));
    assert_eq!(answer.json()["error"]["type"], "invalid_request_error");
}

/// What clients make of the description is true below a prefix, too.
#[test]
fn paths_begin_where_the_server_says() {
    let server = TestServer::start();
    assert_eq!(document(&server)["servers"], json!([{ "url": "/" }]));
    let interface = quadriga_server::Interface { prefix: "/llm".to_owned(), ..Default::default() };
    let server = TestServer::of(Setup::default().app().with_interface(interface));
    let described = server.get("/llm/openapi.json").ok();
    assert_eq!(described["servers"], json!([{ "url": "/llm" }]));
    assert!(described["paths"]["/v1/models"].is_object());
}

#[test]
fn errors_of_paths_and_queries_are_described() {
    let server = TestServer::start();
    let document = document(&server);
    assert_eq!(server.get("/v1/models/%ff").status, 400);
    assert!(document["paths"]["/v1/models/{model}"]["get"]["responses"]["400"].is_object(), "{document}");
    for path in ["/tokenizer_info", "/plan", "/plan.svg", "/props", "/slots"] {
        let parameters = document["paths"][path]["get"]["parameters"].to_string();
        assert!(parameters.contains("\"model\""), "{path}: {parameters}");
    }
}
